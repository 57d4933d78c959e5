"""The GPU's benchmark, on a processor and a tiny shape: that it measures what it says, and says where it measures nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from sparsellm.solvers.patterns import parse_pattern

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}


def test_every_phase_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method's seconds and phases; the phases add up to the block; what was patched is as before."""
    monkeypatch.syspath_prepend(str(FOLDER))
    gpu = importlib.import_module("gpu")
    before = gpu.SparseGPT._prune, gpu.Gram.update
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    found = gpu.measure(TINY, tokens, 2, pattern=parse_pattern("50%"), device=torch.device("cpu"), size=64)
    assert list(found["methods"]) == list(gpu.METHODS)
    expected = {"SparseGPT": "column loop", "Algorithm 1": "gate", "default, closed form": "ADMM"}
    for name, phase in expected.items():
        phases = found["methods"][name]["phases"]
        assert {"forward", "moments", "factorization", "errors", phase} <= phases.keys()
        assert found["methods"][name]["seconds"] > 0
        assert phases["forward"]["roofline"] > 0
        assert phases["moments"]["roofline"] > 0
    assert found["kernel"].keys() == {"plain loop"}
    assert any("column loop" in line for line in gpu.tables(found))
    assert (gpu.SparseGPT._prune, gpu.Gram.update) == before


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested phases count once."""
    monkeypatch.syspath_prepend(str(FOLDER))
    clock = importlib.import_module("clock")
    times = iter(range(100))
    monkeypatch.setattr(clock, "now", lambda device: float(next(times)))
    phases = clock.Phases()
    inner = phases.wrap(lambda: None, "inner")
    phases.wrap(inner, "outer")()
    phases.settle()
    assert dict(phases.seconds) == {"other": 2.0, "outer": 2.0, "inner": 1.0}


def test_integers_and_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer of 4 bits multiplies as its dense form; the whole model decodes, dense and packed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    products, cpu = importlib.import_module("gpu_products"), torch.device("cpu")
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    found = products.measure_integers(weight, {1: torch.ones(1, 128).bfloat16()})
    assert found["seconds"]["1"] > 0
    keep = parse_pattern("70%").keep(weight.abs())
    packed = products.quantized(weight, keep)
    assert found["bytes"] == packed.nbytes < weight.numel() / 2
    assert not packed.to_dense()[~keep].any()
    assert (packed.to_dense() - weight * keep).norm() < 0.15 * (weight * keep).norm()
    config = LlamaConfig(**TINY, num_hidden_layers=2, max_position_embeddings=128)
    speeds = products.whole_model(cpu, config)
    assert len(speeds) == 2
    assert min(speeds.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--file", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit, match=r"^no GPU:"):
        importlib.import_module("gpu").main()
    assert not list(tmp_path.iterdir())
