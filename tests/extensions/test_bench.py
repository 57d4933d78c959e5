"""`bench` and `sparsellm.bench`: tables, JSON, the page, and wrong input."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.packed import speed
from sparsellm.extensions.packed.card import record_speed
from sparsellm.extensions.packed.formats import kernel_library, kernels
from sparsellm.extensions.packed.formats import transformers as packed_transformers
from sparsellm.extensions.packed.record import CEILING, KERNEL, PACKED, TORCH, Bench, Packed, Speed
from sparsellm.extensions.studies.tables import SPEED_COLUMNS
from tests.extensions.packed.test_decoding import packed_model

Command = Callable[..., Result]


@pytest.fixture
def folder(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny OPT, packed while it is loaded, on a machine with a kernel and a memory of 10 GB/s."""
    monkeypatch.setattr(packed_transformers, "load", packed_model)
    monkeypatch.setattr("sparsellm.runtime.memory.cache_bytes", lambda: None)
    monkeypatch.setattr(kernels, "instruction_set", lambda: "avx512")
    monkeypatch.setattr(kernels, "instruction_sets", lambda: ["avx512"])
    monkeypatch.setattr(kernels, "dense_matmul", lambda x, weight: x @ weight.T)
    monkeypatch.setattr(kernel_library, "read_seconds", lambda weights: sum(weight.nbytes for weight in weights) / 1e10)
    return str(tiny["opt"])


def test_every_form_has_a_line(folder: str, command: Command) -> None:
    """In tables of at most 80 columns, where × ceiling stands beside × torch."""
    done = command("bench", folder, "--batch", "1,2", "--threads", "1", "--tokens", "2")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r".*: [\d.]+ KiB on disk, [\d.]+ KiB in memory; the dense weights are [\d.]+ KiB\.", lines[0])
    assert lines[2].strip() == "1 thread reads 10.0 GB/s of dense weights"
    start = lines.index(next(line for line in lines if line.startswith("form")))
    assert re.split(r"  +", lines[start].strip()) == SPEED_COLUMNS
    rows = [re.split(r"  +", line.strip()) for line in lines[start + 1 : start + 9]]
    assert [row[:2] for row in rows] == [[form, batch] for batch in "12" for form in (TORCH, KERNEL, PACKED, CEILING)]
    assert {row[3] for row in rows if row[0] == TORCH} == {row[4] for row in rows if row[0] == CEILING} == {"1.00"}
    assert all(len(line) <= 80 for line in lines[1 : start + 9])


def test_json_has_every_figure(folder: str, command: Command) -> None:
    done = command("bench", folder, "--against", folder, "--batch", "3", "--tokens", "2", "--json")
    data = json.loads(done.stdout)
    dense, packed = data["memory_bytes"][TORCH], data["memory_bytes"][PACKED]
    assert packed < dense == data["memory_bytes"][KERNEL]
    assert data["disk_bytes"] == (Path(folder) / "model.safetensors").stat().st_size
    assert data["environment"]["kernel"] == "avx512"
    assert [row["form"] for row in data["speeds"]] == [TORCH, KERNEL, PACKED, CEILING]
    first, *_, last = data["speeds"]
    assert last["decode"] == pytest.approx(3 * 1e10 / data["step_bytes"])
    for row in data["speeds"]:
        assert row["batch"] == 3
        assert row["times_torch"] == row["decode"] / first["decode"]
        assert row["times_ceiling"] == row["decode"] / last["decode"]


def test_the_page_has_the_chart_and_the_command(folder: str, tmp_path: Path) -> None:
    result = sparsellm.bench(folder, batch=2, threads=1, tokens=2, output=tmp_path / "new" / "bench.html")
    page = unescape((tmp_path / "new" / "bench.html").read_text(encoding="utf-8"))
    assert f"sparsellm bench {folder} --batch 2 --threads 1 --tokens 2" in page
    assert page.count("<svg") == 2, "one for a wide page, one for a phone"
    for sentence in result.describe():
        assert sentence in page
    speeds = r"[\d.]+ tokens a second packed, [\d.]+ dense; [\d.]+ × torch, [\d.]+ of memory's speed"
    assert re.fullmatch(f"1 thread, 2 sequences: {speeds}", result.describe()[0])
    assert "× torch" in str(result)


def test_speeds_are_recorded_in_the_report_and_the_card(
    outputs: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if asked; a second time in place of the first. The folder still verifies, and unpacks to what it was."""
    monkeypatch.setattr(kernel_library, "read_seconds", lambda weights: sum(weight.nbytes for weight in weights) / 1e10)
    packed, run = tmp_path / "packed", ("--threads", "1", "--tokens", "2")
    sparsellm.pack(outputs["opt"], packed)
    before = {file.name: file.read_bytes() for file in packed.iterdir()}
    assert command("bench", packed, "--batch", "1", *run).exit_code == 0
    assert {file.name: file.read_bytes() for file in packed.iterdir()} == before
    for batch in ("1", "1,2"):
        done = command("bench", packed, "--batch", batch, *run, "--record")
        assert done.stdout.splitlines()[-1] == f"Wrote the speeds into the report and the model card of {packed}."
    changed = {file.name for file in packed.iterdir() if file.read_bytes() != before.get(file.name)}
    assert changed == {"README.md", "sparsellm.json"}
    assert sparsellm.verify(packed).layers == 18
    recorded = Packed.of(sparsellm.load_report(packed)).bench
    assert [x.batch for x in recorded.speeds if x.form == PACKED] == [1, 2]
    card, page = (packed / "README.md").read_text(encoding="utf-8"), tmp_path / "page.html"
    assert command("report", packed, "--output", page).exit_code == 0
    for sentence in recorded.describe():
        shown = unescape(page.read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
        assert card.count(sentence) == shown.count(sentence) == 1
        assert sentence in command("inspect", packed).stdout
    assert card.count("by `sparsellm bench`") == 1
    assert "1 thread reads 10.0 GB/s of dense weights" in shown
    sparsellm.unpack(packed, tmp_path / "back")
    assert (tmp_path / "back" / "README.md").read_bytes() == (outputs["opt"] / "README.md").read_bytes()


def test_speeds_are_recorded_only_in_what_pack_wrote(outputs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Before anything is measured."""
    packed = tmp_path / "packed"
    sparsellm.pack(outputs["opt"], packed)
    report = packed / "sparsellm.json"
    text = report.read_text(encoding="utf-8")
    report.write_text(text.replace('"zeros": 1024', '"zeros": 1025', 1), encoding="utf-8")
    for folder, message in (
        (outputs["opt"], "--record is for what pack wrote"),
        (packed, "sparsellm.json of .* was changed since it was written"),
        (tmp_path, "was not written by sparsellm"),
    ):
        done = command("bench", folder, "--record")
        assert (done.exit_code, done.stdout) == (1, "")
        assert re.search(message, done.stderr)


@pytest.mark.parametrize("edit", [{"decode": 0}, {"decode": "inf"}, {"form": "other"}, {"threads": 7}])
def test_edited_speeds_are_one_message(edit: dict[str, object], outputs: dict[str, Path], tmp_path: Path) -> None:
    """A report without the speeds that belong together, or with none that can be divided by."""
    speeds = [Speed(form, 1, 1, 2.0, None) for form in (TORCH, PACKED, CEILING)]
    bench = Bench("opt", 1, {TORCH: 2, PACKED: 1}, 1, {1: 1e10}, 8, 2, speeds, [], {})
    sparsellm.pack(outputs["opt"], tmp_path / "packed")
    record_speed(tmp_path / "packed", bench)
    report = tmp_path / "packed" / "sparsellm.json"
    data = json.loads(report.read_text(encoding="utf-8"))
    assert Packed.of(sparsellm.load_report(report)).bench == bench
    data["packing"]["bench"]["speeds"][1] |= edit
    report.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(BadCheckpoint, match=r"packing: bench"):
        sparsellm.load_report(report)


def test_without_a_kernel_it_says_so(folder: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "instruction_set", lambda: None)
    monkeypatch.setattr(kernels, "instruction_sets", list)
    done = command("bench", folder, "--batch", "1", "--tokens", "2")
    assert KERNEL not in done.stdout
    assert "note: no kernel is installed" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch got 0: pass numbers from 1 to 2,147,483,647."),
        (["--threads", "1,9999"], f"--threads got 1,9999: pass numbers from 1 to {os.cpu_count()}, the cores of this machine."),
        (
            ["--tokens", "0"],
            "--tokens got 0, and the model's context of 64 has room for 3 turns of 21. Pass a number from 1 to 21.",
        ),
        (
            ["--tokens", "22"],
            "--tokens got 22, and the model's context of 64 has room for 3 turns of 21. Pass a number from 1 to 21.",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(folder: str, command: Command, options: list[str], message: str) -> None:
    done = command("bench", folder, *options)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == f"error: {message}"
    assert not done.stdout


def test_text_for_a_number_is_wrong_usage(folder: str, command: Command) -> None:
    done = command("bench", folder, "--batch", "1;4")
    assert done.exit_code == 2
    assert "--batch takes numbers separated by commas" in done.stderr


def test_another_model_is_no_dense_form(folder: str, tiny: dict[str, Path], command: Command) -> None:
    done = command("bench", folder, "--against", tiny["llama"], "--tokens", "2")
    assert done.exit_code == 1
    assert "was not made from" in done.stderr
    assert "is missing" in done.stderr


def test_models_that_do_not_fit_are_refused(folder: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.memory, "available", lambda _: 1000)
    done = command("bench", folder, "--tokens", "2")
    assert done.exit_code == 1
    assert "The dense model needs" in done.stderr


def test_threads_are_restored(folder: str) -> None:
    before = torch.get_num_threads()
    sparsellm.bench(folder, batch=1, threads=2, tokens=21)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("cache", "small"), [(2**40, True), (16, False), (None, False)])
def test_a_model_that_fits_in_the_cache_is_told_first(
    cache: int | None,
    small: bool,
    folder: str,
    outputs: dict[str, Path],
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the terminal, in Python, on the page and on the card, before any speed."""
    monkeypatch.setattr("sparsellm.runtime.memory.cache_bytes", lambda: cache)
    done = command("bench", folder, "--batch", 1, "--tokens", 2)
    assert done.stdout.splitlines()[1].startswith("Too small to tell: ") == small
    assert ("of dense weights fit in a processor cache of " in done.stdout) == small
    sparsellm.pack(outputs["opt"], tmp_path / "packed")
    measured = sparsellm.bench(tmp_path / "packed", batch=1, tokens=2, record=True, output=tmp_path / "page.html")
    assert str(measured).partition("packed: ")[2].startswith("Too small to tell") == small
    for file in (tmp_path / "page.html", tmp_path / "packed" / "README.md"):
        assert ("Too small to tell" in file.read_text(encoding="utf-8")) == small
    again = Packed.of(sparsellm.load_report(tmp_path / "packed")).bench
    assert again.caution == measured.caution
