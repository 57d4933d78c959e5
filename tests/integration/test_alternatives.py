"""What a machine chooses by measuring: said by the run, kept when it is resumed, and not slower than what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

import sparsellm
from sparsellm.formats import kernels
from sparsellm.formats.bitmask import Bitmask
from sparsellm.models.contexts import product_dtype_context
from sparsellm.models.sparse_matmul import matmul_of, max_density
from sparsellm.pipeline import startup
from sparsellm.pipeline.journal import Journal
from sparsellm.runtime import alternatives, devices, products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def adopted() -> Iterator[None]:
    """Forgets what a test adopted."""
    yield
    alternatives.forget()


def test_a_run_says_what_was_chosen(tiny: dict[str, Path], text_file: Path) -> None:
    settings = {"calibration": str(text_file), "samples": 4, "sequence_length": 32}
    environment = sparsellm.prune(tiny["opt"], "wanda", "50%", **settings).report.environment
    assert environment["float32 products"] == ("oneDNN" if products.uses_onednn() else "torch")
    assert environment["products in solvers"] == ("bfloat16" if devices.multiplies_bfloat16(CPU) else "float32")
    assert environment["zeros are skipped"] == f"from {100 * (1 - max_density()):.0f} % zeros on"
    alternatives.adopt({"float32 products that skip zeros": 0.88})
    assert startup._agree_on_alternatives(None, None)["zeros are skipped"] != "from 80 % zeros on"  # its own again


def test_a_resumed_run_keeps_what_its_machine_chose(tmp_path: Path) -> None:
    """Also where the machine that resumes it chooses something else."""
    begun = {
        "float32 products by oneDNN": 3.0,
        "float32 products that skip zeros": 0.88,
        "matrix products in bfloat16": 0.01,
    }
    Journal.begin(tmp_path, {}).note("speedups", begun)
    resumed = startup._agree_on_alternatives(None, Journal.resume(tmp_path, {}).share())
    assert resumed == {
        "float32 products": "oneDNN",
        "zeros are skipped": "from 80 % zeros on",
        "products in solvers": "float32",
    }
    assert products.uses_onednn()
    assert max_density() == pytest.approx(0.2)


def test_other_processes_take_the_choice_of_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They measure nothing."""
    monkeypatch.setattr(startup, "_measure_alternatives", None)
    monkeypatch.setattr(startup.collectives, "is_main", lambda: False)
    monkeypatch.setattr(startup.collectives, "broadcast_object", lambda value: {"float32 products that skip zeros": 0.88})
    assert startup._agree_on_alternatives(None, None)["zeros are skipped"] == "from 80 % zeros on"


def test_a_choice_under_load_is_noted(tiny: dict[str, Path], text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [products.ONEDNN_PRODUCTS, "packed products, bfloat16, avx2"]  # a run multiplies nothing packed
    monkeypatch.setattr(alternatives, "unsteady", lambda: measured)
    settings = {"calibration": str(text_file), "samples": 4, "sequence_length": 32}
    notes = sparsellm.prune(tiny["opt"], "wanda", "50%", **settings).report.notes
    told = [note for note in notes if "other programs were at work" in note]
    assert len(told) == 1
    assert products.ONEDNN_PRODUCTS in told[0]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def products_of(rows: int, columns: int, tokens: int) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """The usual computation and the chosen one, for every choice on a CPU."""
    inputs, weight = normal(tokens, columns), normal(rows, columns)
    yield partial(linear, inputs, weight), partial(products.linear, inputs, weight)
    yield lambda: inputs @ weight.T, partial(products.matmul, inputs, weight.T)
    for dtype in (None, torch.bfloat16):
        limit = max_density(dtype)
        pruned = weight * (torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.95 * limit)
        chosen, dense, x = matmul_of(pruned, dtype), pruned.to(dtype or torch.float32), inputs.to(dtype or torch.float32)
        with product_dtype_context(CPU, None):
            yield partial(products.linear, x, dense), partial(chosen, x, None)
    if kernels.instruction_set():
        packed = Bitmask.from_dense(weight.bfloat16().where(weight > 0, 0.0))
        for count in (kernels.PASS, kernels.MAX_TOKENS):
            x = inputs[:count].bfloat16()
            yield partial(kernels._multiply_tiles, x, packed, None), partial(kernels.packed_matmul, x, packed)


@pytest.mark.parametrize(("speedup", "used"), [(0.03, False), (2.0, True)])
def test_solvers_round_where_that_is_faster(speedup: float, used: bool) -> None:
    """Not where the processor has the instructions and torch may not use them, as with ONEDNN_MAX_CPU_ISA=AVX2."""
    alternatives.adopt({products.BFLOAT16_NAME: speedup})
    assert devices.multiplies_bfloat16(CPU) is used


@pytest.mark.skipif(not kernels.instruction_set(), reason="no kernels are compiled")
@pytest.mark.parametrize(("speedup", "by_kernel"), [(0.9, False), (1.1, True)])
def test_several_passes_where_they_are_faster(speedup: float, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured decides which of the two multiplies more than 8 tokens; it is the same product."""
    weight, called = normal(64, 128).bfloat16(), []
    monkeypatch.setattr(alternatives, "measure_speedup", lambda *_: (speedup, False))
    monkeypatch.setattr(alternatives, "store", None)
    tiles = kernels._multiply_tiles
    monkeypatch.setattr(kernels, "_multiply_tiles", lambda *parts: called.append(len(parts[0])) or tiles(*parts))
    alternatives.forget()
    for tokens in (kernels.PASS, kernels.PASS + 1, kernels.MAX_TOKENS, kernels.MAX_TOKENS + 1):
        x = normal(tokens, 128).bfloat16()
        torch.testing.assert_close(kernels.packed_matmul(x, Bitmask.from_dense(weight)), x @ weight.T, rtol=2e-2, atol=0.1)
    assert called == ([17] if by_kernel else [9, 16, 17])


@pytest.mark.long
@pytest.mark.parametrize(("rows", "columns"), [(768, 768), (3072, 768), (768, 3072), (2048, 2048)])
def test_no_choice_is_slower_than_what_it_replaces(rows: int, columns: int) -> None:
    """By more than a tenth, at the least favorable density; machines are noisy, so that it may try several times."""
    for number, (usual, chosen) in enumerate(products_of(rows, columns, 1024)):
        found = []
        for _ in range(8):
            found.append(alternatives.measure_speedup(usual, chosen)[0])
            if found[-1] > 1 / 1.1:
                break
        assert found[-1] > 1 / 1.1, (number, found)
