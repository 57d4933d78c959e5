"""`sparsellm demo` as a stranger runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from sparsellm.extensions.packed.record import CEILING, PACKED, TORCH, Bench, Speed
from sparsellm.extensions.studies.demonstration import DemoRow
from sparsellm.recipes.fields import METHODS
from sparsellm.texts.samples import test_windows
from tests.conftest import report_of


@pytest.mark.parametrize("bundled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["small", "bundled"])
def test_demo_compares_and_writes(
    bundled: bool,
    small_models: dict[str, Path],
    tmp_path: Path,
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Llama form (README's commands run the other): every method, 80 % zeros each; one model written."""
    if not bundled:
        monkeypatch.setattr("sparsellm.texts.demo.model_path", small_models.__getitem__)
    monkeypatch.setattr("sparsellm.extensions.studies.demonstration.SAMPLES", 4 if bundled else 1)
    monkeypatch.setattr(
        "sparsellm.pipeline.token_sequences.test_windows",
        lambda *given, limit, **named: test_windows(*given, limit=16 if bundled else 2, **named),
    )
    result = command("demo", "--family", "llama", "--output", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    rows, packed = data["rows"], data["packed"]
    assert packed["model"] == data["output"] == str(tmp_path / "out")
    assert packed["disk_bytes"] < packed["memory_bytes"]["dense, torch"] / (2 if bundled else 1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [row["method"] for row in rows] == ["dense", *reversed(METHODS)]
    assert all(row["sparsity"] == pytest.approx(0.8, abs=1e-5 if bundled else 1e-4) for row in rows[1:])
    if bundled:
        assert all(row["perplexity"] > rows[0]["perplexity"] for row in rows[1:])
    assert f"{rows[-1]['perplexity']:.3f}" in (tmp_path / "out" / "README.md").read_text()
    assert report_of(tmp_path / "out")["recipe"]["method"] == "sparsellm"


def test_demo_ends_with_what_to_do_next(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines are commands; the one about the written model runs as it stands, and none is wider than 80 columns."""
    rows = [DemoRow("dense", 40.0, 1.0, 0.0, 0.0), DemoRow("sparsellm", 50.0, 1.0, 0.8, 2.0)]
    speeds = [Speed(form, 2, 1, decode, None) for form, decode in ((TORCH, 20.4), (PACKED, 51), (CEILING, 510))]
    sizes = {TORCH: 4 * 2**20, PACKED: 2**20}
    bench = Bench("", 2**20, sizes, 1, {2: 1.0}, prompt=1, tokens=1, speeds=speeds, notes=[], environment={})
    monkeypatch.setattr("sparsellm.extensions.studies.demonstration.demonstrate", lambda *_: rows)
    monkeypatch.setattr("sparsellm.extensions.studies.demonstration.measure_packed", lambda _: bench)
    lines = command("demo", "--output", tmp_path / "out").stdout.splitlines()[-6:]
    assert lines[0] == "Packed it takes 1.0 MiB, dense 4.0 MiB. On 2 threads it decodes"
    assert lines[1] == "51 tokens a second packed, 20 dense (2.50 × torch, 0.10 of memory's speed)."
    assert max(map(len, lines[:3])) <= 80
    lines = lines[3:]
    assert [line.split(": ")[1].split()[:2] for line in lines] == [
        ["sparsellm", "inspect"],
        ["sparsellm", "plan"],
        ["sparsellm", "prune"],
    ]
    assert lines[0].endswith(f"sparsellm inspect {tmp_path / 'out'}")
    assert max(map(len, lines[1:])) <= 80


def test_an_output_that_exists_is_told_in_words_of_the_command_line(tmp_path: Path, command: Callable[..., Result]) -> None:
    """Without an option that `demo` does not have; other commands name theirs."""
    (tmp_path / "file").touch()
    result = command("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert " ".join(result.stderr.split()).endswith(f"error: {tmp_path} exists. Choose another name.")
    other = command("prune", "demo:opt", tmp_path, "--method", "magnitude")
    assert "Choose another name, or pass --overwrite to replace it." in " ".join(other.stderr.split())


def test_unknown_family(command: Callable[..., Result]) -> None:
    """A family that is not bundled is refused by name."""
    result = command("demo", "--family", "gpt")
    assert result.exit_code == 1
    assert "opt" in result.stderr
    assert "llama" in result.stderr
