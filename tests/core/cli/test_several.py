"""Several sparsities in one command: the outputs of single runs, with what the dense model shows found once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.files import WORK
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockResult
from sparsellm.models.blocks import Block
from sparsellm.outputs.journal import Journal
from tests.conftest import extensions, long_unless, report_of
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
SPARSITIES = {"50%": "50", "62.5%": "62.5", "2:4": "2-4"}
SMALL = ("--samples", 6, "--sequence-length", 32, "--batch-size", 2, "--evaluate-limit", 4)


def compared(folder: Path) -> dict[str, Any]:
    """What two equal runs have in common: all files but the log, the report without times, memory and digests of itself."""
    files: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir() if "sparsellm" not in file.name}
    report = report_of(folder)
    for name in ("seconds", "peak_memory_bytes"):
        del report[name]
    report["digests"] = report["digests"]["tensors"]
    for pair in report["perplexity"].values():
        for figure in pair.values():
            del figure["seconds"]
    for block in report["blocks"]:
        for result in (block, *block["layers"]):
            del result["seconds"]
    return files | {"report": report}


@extensions
@pytest.mark.parametrize(
    ("family", "options"),
    [
        long_unless(True, "llama", ("--offload", "--effort", "fast")),
        long_unless(False, "opt", ("--method", "wanda", "--offload")),
        long_unless(False, "llama", ("--effort", "best")),
    ],
)
def test_outputs_are_those_of_single_runs(
    family: str,
    options: tuple[object, ...],
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparsellm.extensions.recover.recipe import SCOPE_STEPS

    monkeypatch.setitem(SCOPE_STEPS, "model", 20)
    words = (*SMALL, *options, "--calibration", text_file, "--evaluate", text_file)
    done = command("prune", tiny[family], tmp_path / "all", "--sparsity", ",".join(SPARSITIES), *words)
    assert done.exit_code == 0, done.stderr
    assert sorted(entry.name for entry in (tmp_path / "all").iterdir()) == sorted(SPARSITIES.values())
    for sparsity, name in SPARSITIES.items():
        alone = command("prune", tiny[family], tmp_path / name, "--sparsity", sparsity, *words)
        assert alone.exit_code == 0, alone.stderr
        assert compared(tmp_path / "all" / name) == compared(tmp_path / name)
        assert str(tmp_path / "all" / name) in done.stdout
    assert command("verify", tmp_path / "all" / "62.5", "--against", tiny[family]).exit_code == 0


@extensions
def test_what_the_dense_model_shows_is_found_once(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of its gradients, its perplexity, its generated sequences, and the token ids of both texts."""
    from sparsellm.extensions.recover.recipe import SCOPE_STEPS

    monkeypatch.setitem(SCOPE_STEPS, "model", 20)
    calls: dict[str, int] = {}

    def count(place: str) -> None:
        module, _, name = place.rpartition(".")
        real = getattr(__import__(module, fromlist=[name]), name)

        def counted(*given: Any, **named: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return real(*given, **named)

        monkeypatch.setattr(place, counted)

    for place in (
        "pipeline.dense_results.iterate_output_fisher",
        "activations.fisher_diagonal.run_backward",
        "extensions.recover.model_training.generate_samples",
    ):
        count(f"sparsellm.{place}")
    for place in (
        "pipeline.measuring.measure_perplexity",
        "pipeline.token_sequences.draw_windows",
        "pipeline.token_sequences.read_test",
    ):
        count(f"sparsellm.{place}")
    texts = ("--calibration", text_file, "--evaluate", text_file)
    done = command(
        "prune", tiny["opt"], tmp_path / "out", "--sparsity", "50%,60%,70%", "--effort", "best", *SMALL, *texts, "--json"
    )
    assert done.exit_code == 0, done.stderr
    assert calls == {
        "iterate_output_fisher": 1,
        "run_backward": 1,
        "generate_samples": 1,
        "measure_perplexity": 1 + 3,
        "draw_windows": 1,
        "read_test": 1,
    }
    outputs = json.loads(done.stdout)["outputs"]
    assert [output["output"] for output in outputs] == [str(tmp_path / "out" / name) for name in ("50", "60", "70")]
    assert [output["recipe"]["sparsity"] for output in outputs] == ["50%", "60%", "70%"]


def test_an_interrupted_command_goes_on(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the second output: the first one is not pruned again, and the end is the same."""
    words = (*SMALL, "--calibration", text_file, "--sparsity", "50%,60%,70%")
    assert command("prune", tiny["llama"], tmp_path / "whole", *words).exit_code == 0
    plain, kept = Journal.store_block, []

    def keep(self: Journal, block: Block, result: BlockResult) -> Path:
        kept.append(result)
        if len(kept) == 5:  # of three blocks each
            raise KeyboardInterrupt
        return plain(self, block, result)

    monkeypatch.setattr(Journal, "store_block", keep)
    out = tmp_path / "out"
    done = command("prune", tiny["llama"], out, *words)
    assert done.exit_code == 130
    assert "1 of 3 outputs is finished and kept: pass --resume to continue" in done.stderr
    first = (out / "50" / "model.safetensors").stat().st_mtime_ns
    refused(command("prune", tiny["llama"], out, *words), "is unfinished. Pass --resume")
    done = command("prune", tiny["llama"], out, *words, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "50" in done.stdout
    assert (out / "50" / "model.safetensors").stat().st_mtime_ns == first
    assert not (out / WORK).exists()
    assert all(compared(out / name) == compared(tmp_path / "whole" / name) for name in ("50", "60", "70"))
    assert "nothing to resume" in command("prune", tiny["llama"], out, *words, "--resume").stderr


def test_outputs_are_added_and_replaced_only_when_asked(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    words = ("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--sparsity")
    assert command(*words, "50%,60%").exit_code == 0
    assert command(*words, "70%,80%").exit_code == 0
    refused(command(*words, "80%,90%"), "exists. Choose another name, or pass --overwrite")
    assert not (tmp_path / "out" / "90").exists()
    assert command(*words, "80%,90%", "--overwrite").exit_code == 0
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["50", "60", "70", "80", "90"]


@pytest.mark.parametrize(("sparsity", "named"), [("50%,0.5", "50% 2 times"), ("50%,", "got ''"), ("50%,120%", "got '?120%")])
def test_wrong_lists_are_refused(sparsity: str, named: str, tiny: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match=f"`sparsity` .*{named}"):
        sparsellm.prune(tiny["opt"], "magnitude", sparsity)


def test_a_folder_with_files_is_refused(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """The output of a single run, for example; and an error before the first output leaves nothing."""
    words = ("prune", tiny["opt"], "--method", "magnitude", "--sparsity")
    assert command(*words[:2], tmp_path / "one", *words[2:], "50%").exit_code == 0
    refused(command(*words[:2], tmp_path / "one", *words[2:], "50%,60%"), "README.md is a file. Name a new folder")
    text = ("--calibration", tmp_path / "none.txt", "--sparsity", "50%,60%")
    assert command("prune", tiny["opt"], tmp_path / "out", *text).exit_code == 1
    assert not (tmp_path / "out").exists()


def test_print_config_is_read_back(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    shown = command("prune", tiny["opt"], "--method", "magnitude", "--sparsity", "50%,2:4", "--print-config")
    assert "sparsity: 50%,2:4" in shown.stdout
    (tmp_path / "recipe.yaml").write_text(shown.stdout)
    assert command("prune", "--config", tmp_path / "recipe.yaml", tmp_path / "out").exit_code == 0
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["2-4", "50"]


def test_a_list_in_python(tiny: dict[str, Path], text_file: Path) -> None:
    settings: dict[str, Any] = {"calibration": text_file, "samples": 4, "sequence_length": 32, "effort": "fast"}
    results = sparsellm.prune(tiny["llama"], sparsity=[0.5, "60%"], **settings)
    assert [result.report.recipe.sparsity for result in results] == ["50%", "60%"]  # type: ignore[attr-defined]
    alone = sparsellm.prune(tiny["llama"], sparsity="60%", **settings)
    pairs = zip(results[1].model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    by_text = sparsellm.prune(tiny["llama"], "magnitude", "50%,2:4")
    assert [result.report.recipe.sparsity for result in by_text] == ["50%", "2:4"]  # type: ignore[attr-defined]
    assert len(sparsellm.prune(tiny["llama"], "magnitude", [0.5])) == 1
    with pytest.raises(InvalidSetting, match="pruned in place and can have one sparsity, got 2"):
        sparsellm.prune(AutoModelForCausalLM.from_pretrained(tiny["llama"]), "magnitude", [0.5, 0.6])
