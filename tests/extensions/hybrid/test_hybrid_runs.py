"""Runs with the hybrid pattern: every method, the output and its report, a run that is resumed, and a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockResult
from sparsellm.models.blocks import Block
from sparsellm.outputs.journal import Journal
from sparsellm.outputs.report import load_report
from sparsellm.solvers.patterns import NM, parse_pattern
from tests.conftest import report_of
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
METHODS = ("magnitude", "wanda", "sparsegpt", "fast-admm", "alps", "algorithm1", "sparsellm")
PATTERN = "2:4@50%"
QUICK = ("--samples", 4, "--sequence-length", 32, "--sparsity", PATTERN)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def words(folder: Path, text_file: Path, method: str) -> tuple[object, ...]:
    """A run on a tiny model but for its output; magnitude reads no text."""
    return folder, "--method", method, *QUICK, *(() if method == "magnitude" else ("--calibration", text_file))


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_every_method(
    method: str, family: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """Half of each layer's rows are 2:4, in whole blocks, and no weight of the others is zero; the output verifies itself."""
    out, (model, *rest) = tmp_path / "out", words(tiny[family], text_file, method)
    done = command("prune", model, out, *rest)
    assert done.exit_code == 0, done.stderr
    weights = weights_of(out)
    layers = load_report(out).layers
    assert len(layers) == 3 * (6 if family == "opt" else 7)
    for layer in layers:
        weight = weights[f"{layer.name}.weight"]
        assert layer.zeros == weight.numel() // 4 == int((weight == 0).sum())
        blocks = (weight != 0).all(1).view(4, -1)  # of fewer than 256 rows
        assert torch.equal(blocks.all(1), blocks.any(1))
        assert int(blocks.all(1).sum()) == 2
        assert NM(2, 4).holds(weight[~blocks.flatten()])
    assert {layer["pattern"] for block in report_of(out)["blocks"] for layer in block["layers"]} == {PATTERN}
    assert command("verify", out, "--against", model).exit_code == 0


def test_what_inspects_and_verifies(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """The report, the card and `inspect` know the pattern; with one value too many neither `inspect` nor `verify` passes."""
    out, (model, *rest) = tmp_path / "out", words(tiny["llama"], text_file, "wanda")
    assert command("prune", model, out, *rest).exit_code == 0
    report = load_report(out)
    assert (str(report.layers[0].pattern), report.n_m) == (PATTERN, "")
    assert report.layers[0].pattern == parse_pattern(PATTERN)
    assert f"{PATTERN} (2 of every 4 removed in 50 % of the rows, 25.0 %)" in (out / "README.md").read_text(encoding="utf-8")
    for expected, status in ((PATTERN, 0), ("2:4@25%", 0), ("2:4@75%", 1), ("2:4", 1), ("25%", 0), ("3:4@50%", 1)):
        assert command("inspect", out, "--expect", expected).exit_code == status, expected
    weights = weights_of(out)
    weight = weights[f"{report.layers[3].name}.weight"]
    row, column = (weight == 0).nonzero()[0].tolist()
    weight[row, column] = 1.0
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    assert command("inspect", out, "--expect", PATTERN).exit_code == 1
    assert command("verify", out).exit_code == 1


@pytest.mark.parametrize("method", ["sparsegpt", "sparsellm"])
def test_interrupted_and_resumed(
    method: str,
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After one block; the end is an unbroken run's, to the byte."""
    model, *rest = words(tiny["opt"], text_file, method)
    assert command("prune", model, tmp_path / "whole", *rest).exit_code == 0
    plain = Journal.store_block

    def store(self: Journal, block: Block, result: BlockResult) -> Path:
        if self.block_files():
            raise KeyboardInterrupt
        return plain(self, block, result)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "store_block", store)
        assert command("prune", model, tmp_path / "out", *rest).exit_code == 130
    done = command("prune", model, tmp_path / "out", *rest, "--resume")
    assert done.exit_code == 0, done.stderr
    one, other = weights_of(tmp_path / "whole"), weights_of(tmp_path / "out")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_with_zeros_kept_and_values_rounded(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A pruned model is pruned further with its zeros kept, and its rows that stay dense are rounded too."""
    model, *rest = words(tiny["llama"], text_file, "sparsegpt")
    first, second = tmp_path / "first", tmp_path / "second"
    assert command("prune", model, first, *rest, "--sparsity", "10%").exit_code == 0
    done = command("prune", first, second, *rest, "--keep-zeros", "--values", "int8")
    assert done.exit_code == 0, done.stderr
    before, after = weights_of(first), weights_of(second)
    for layer in load_report(second).layers:
        name = f"{layer.name}.weight"
        assert not after[name][before[name] == 0].any()
        assert layer.pattern.holds(after[name])
        assert layer.bits == 8
    assert command("verify", second).exit_code == 0


def test_plans_and_several_outputs(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    model, *rest = words(tiny["llama"], text_file, "sparsegpt")
    planned = command("plan", model, *rest, "--layers")
    assert planned.exit_code == 0, planned.stderr
    assert f"at {PATTERN}" in planned.stdout
    done = command("prune", model, tmp_path / "out", *rest, "--sparsity", "2:4@25%,2:4@75%")
    assert done.exit_code == 0, done.stderr
    assert {str(layer.pattern) for layer in load_report(tmp_path / "out" / "2-4@75").layers} == {"2:4@75%"}
    refused(command("prune", model, tmp_path / "x", *rest, "--sparsity", "2:4@120%"), "2:4@120%")
    refused(command("prune", model, tmp_path / "x", *rest, "--allocation", "owl"), "--allocation")


def test_a_file_of_patterns(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """A file may name it for some layers, and for all of them if they come to the sparsity."""
    file = tmp_path / "shares.yaml"
    file.write_text(f'"self_attn.*": "{PATTERN}"\n', encoding="utf-8")
    result = sparsellm.prune(str(tiny["llama"]), "magnitude", "40%", allocation=str(file))
    assert {str(layer.pattern) for layer in result.report.layers if "self_attn" in layer.name} == {PATTERN}
    assert result.report.sparsity == pytest.approx(0.4, abs=1e-4)
    file.write_text(f'"*": "{PATTERN}"\n', encoding="utf-8")
    assert sparsellm.prune(str(tiny["llama"]), "magnitude", PATTERN, allocation=str(file)).report.sparsity == 0.25
    file.write_text('"*": "2:4@120%"\n', encoding="utf-8")
    with pytest.raises(InvalidSetting, match="120%"):
        sparsellm.prune(str(tiny["llama"]), "magnitude", "40%", allocation=str(file))


def test_a_packed_output_is_the_same_model(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    model, *rest = words(tiny["llama"], text_file, "wanda")
    done = command("prune", model, tmp_path / "out", *rest, "--sparsity", "3:4@75%", "--pack")
    assert done.exit_code == 0, done.stderr
    assert command("inspect", tmp_path / "out-packed", "--against", tmp_path / "out", "--expect", "3:4@75%").exit_code == 0
