"""Weights too large or too small for float32: an error that names the layer, or the figures of the same model in its range."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

import sparsellm
from sparsellm.errors import NonFinite
from sparsellm.pipeline.interface import prune
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import TokenCount
from tests.conftest import report_of
from tests.core.cli.test_bad_input import refused

METHODS = ("magnitude", "wanda", "sparsegpt", "alps", "fast-admm", "sparsellm", "algorithm1")


def scaled(dense: Path, folder: Path, factor: float, dtype: torch.dtype | None = None, part: str = ".layers.") -> Path:
    """A copy of a model with the matrices whose names hold a text times a factor: by default the weights of its layers."""
    shutil.copytree(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        grown = tensor.float() * factor if tensor.ndim == 2 and part in name else tensor
        tensors[name] = grown.to(dtype or tensor.dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words_of(method: str, text: Path) -> tuple[object, ...]:
    """The words of the command line for a method, on a short text."""
    named = ("--method", method)
    return (*named, "--calibration", text, "--samples", 4, "--sequence-length", 32, "--sparsity", "50%")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_weights_that_overflow_are_refused(
    family: str, method: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Float32 (llama) and bfloat16 (opt) × 1e30: no method ends with "mean error 0"; nothing is written."""
    folder = scaled(tiny[family], tmp_path / "model", 1e30)
    for memory in ((), ("--offload",)):
        message = refused(command("prune", folder, tmp_path / "out", *words_of(method, text_file), *memory))
        assert "overflow" in message or "not finite" in message, message
        assert "layers.0" in message or "logits" in message, message
        assert "calibration tokens than" not in message, message
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("part", ["embed_tokens", "."])
def test_hidden_states_that_overflow_in_a_norm_are_refused(
    method: str, part: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Float32 hidden states of 1e28 are finite, their squares are not: an RMS norm turns them into zeros without a word."""
    folder = scaled(tiny["llama"], tmp_path / "model", 1e30, part=part)
    message = refused(command("prune", folder, tmp_path / "out", *words_of(method, text_file)))
    assert "overflow" in message, message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt", "alps"])
def test_weights_near_the_end_of_float16_have_a_finite_error(
    method: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """What still fits is pruned; where the pruned weight no longer does, its layer is named."""
    largest = max(
        float(x.abs().max()) for name, x in load_file(tiny["llama"] / "model.safetensors").items() if ".layers." in name
    )
    folder = scaled(tiny["llama"], tmp_path / "model", 6e4 / largest, torch.float16)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"float32"', '"float16"'))
    result = command("prune", folder, tmp_path / "out", *words_of(method, text_file))
    if result.exit_code:
        refused(result, "layers.", "overflows torch.float16")
        return
    assert all(0 < layer["error"] < 1 for block in report_of(tmp_path / "out")["blocks"] for layer in block["layers"])


def in_float16(dense: Path, folder: Path, **factors: float) -> Path:
    """A copy of a model in float16, with the matrices whose names end with those of the layers times a factor."""
    shutil.copytree(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        grown = tensor * factors.get(name.split(".")[-2], 1)
        tensors[name] = grown.clamp(-6e4, 6e4).half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "float16"}))
    return folder


OVERFLOWS = {
    "none": {},
    "residual": {"down_proj": 1e6, "up_proj": 1e2},
    "inside": {"up_proj": 1e5, "gate_proj": 1e3, "down_proj": 1e-6},
    "logits": {"norm": 1e5},
}
"""By where values pass 65,504, factors of layers."""


@pytest.mark.parametrize("where", OVERFLOWS)
@pytest.mark.parametrize("offload", [False, True])
def test_figures_that_float16_does_not_give_are_marked(
    where: str, offload: bool, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Perplexity is computed in float32: of a model that overflows in its own dtype, also within a block, a note says so."""
    folder = in_float16(tiny["llama"], tmp_path / "model", **OVERFLOWS[where])
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert bool(model(torch.arange(3, 35)[None]).logits.isfinite().all()) == (where == "none")
    memory = ("--offload",) if offload else ()
    words = ("--sparsity", "50%", "--method", "magnitude", "--evaluate", text_file, "--evaluate-limit", 4, *memory)
    done = command("prune", folder, tmp_path / "out", *words, "--sequence-length", 32)
    assert done.exit_code == 0, done.stderr
    assert (done.stderr.count("overflow") == 1) == (where != "none"), done.stderr
    report = report_of(tmp_path / "out")
    assert any("overflow" in note for note in report["notes"]) == (where != "none")
    if not offload:
        done = command("evaluate", folder, "--text", text_file, "--evaluate-limit", 4, "--sequence-length", 32)
        assert ("overflow" in done.stderr) == (where != "none")
        notes: list[object] = []
        sparsellm.evaluate(model, torch.arange(3, 35)[None], observe=notes.append)
        assert any("overflow" in str(note) for note in notes) == (where != "none")


def test_runs_that_share_the_dense_model_are_all_marked(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Also where the dense model's figures are known from an earlier run, and the pruned one overflows no more."""
    folder = in_float16(tiny["llama"], tmp_path / "model", norm=1e5)
    several = sparsellm.prune(
        str(folder), "magnitude", ["50%", "60%"], evaluate=str(text_file), evaluate_limit=4, sequence_length=32
    )
    for result in several:
        assert sum("overflow" in note for note in result.report.notes) == 1


@pytest.mark.parametrize(
    ("method", "exponent"),
    [("magnitude", -20), ("magnitude", -60), ("magnitude", -120), ("sparsegpt", -20), ("sparsegpt", -60)],
)
def test_small_weights_have_the_error_of_the_same_weights_in_range(
    method: str, exponent: int, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """By a power of two: the first layer sees the same inputs, and loses the same share to the bit. It was "0" below 1e-20."""
    tokens = torch.randint(3, 250, (4, 32), generator=torch.Generator().manual_seed(0))
    found = [
        prune(str(folder), method, "50%", calibration=tokens).report.layers[0].error
        for folder in (tiny["llama"], scaled(tiny["llama"], tmp_path / "model", 2.0**exponent))
    ]
    assert found[0] == found[1] > 0.01


@pytest.mark.parametrize("factor", [1e30, 1e-30, 1e-42, 0.0])
def test_the_error_of_a_problem(factor: float) -> None:
    """An energy that overflows is an error; one that vanishes is scaled; of nothing, nothing is lost."""
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    problem = LayerProblem(weight * factor, TokenCount(2))
    pruned = weight * factor * torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    if factor > 1:
        with pytest.raises(NonFinite, match="overflows float32"):
            problem.error(pruned)
    else:
        assert problem.error(pruned) == pytest.approx(1 / 30 if factor else 0.0, rel=2e-2)  # 1e-42 has three digits
