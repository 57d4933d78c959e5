"""What a machine chooses by measuring: said by the run, and kept when it is resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sparsellm
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.kernel_library import Library
from sparsellm.models.sparse_matmul import max_density
from sparsellm.outputs.journal import Journal
from sparsellm.pipeline import startup
from sparsellm.runtime import autotuning, devices, products
from sparsellm.runtime.native import load_library

CPU = torch.device("cpu")

GAINS = {"float32 products that skip zeros": 0.88, "float32 products that skip zeros, 5% nonzero": 4.4}
"""Speedups with 25 % and 5 % nonzero weights of a kernel whose time is proportional to them, so that it wins up to 20 %."""


@pytest.fixture(autouse=True)
def adopted() -> Iterator[None]:
    """Forgets what a test adopted."""
    yield
    autotuning.forget()


def test_a_run_says_what_was_chosen(tiny: dict[str, Path], text_file: Path) -> None:
    settings = {"calibration": str(text_file), "samples": 4, "sequence_length": 32}
    environment = sparsellm.prune(tiny["opt"], "wanda", "50%", **settings).report.environment
    assert environment["float32 products"] == ("oneDNN" if products.uses_onednn() else "torch")
    assert environment["products in solvers"] == ("bfloat16" if devices.multiplies_bfloat16(CPU) else "float32")
    assert environment["zeros are skipped"] == f"from {100 * (1 - max_density()):.0f} % zeros on"
    autotuning.adopt({**GAINS, startup.BFLOAT16_IN_PASSES: 9.0})  # by a resumed run
    again = sparsellm.prune(tiny["opt"], "wanda", "50%", **settings).report.environment
    assert again["zeros are skipped"] == environment["zeros are skipped"] != "from 80 % zeros on"
    assert startup.bf16_pass_speedup(CPU) != 9.0


def test_what_a_cpu_chose_says_nothing_of_a_gpu() -> None:
    autotuning.adopt({"a product": 3.0})
    assert autotuning.speedup("a product", None) == 3.0
    measured = autotuning.speedup("a product", lambda: (lambda: time.sleep(2e-3), lambda: None), "a GPU")
    assert measured != 3.0


def test_a_resumed_run_keeps_what_its_machine_chose(tmp_path: Path) -> None:
    """Also where the machine that resumes it chooses something else."""
    begun = {
        "float32 products by oneDNN": 3.0,
        **GAINS,
        "matrix products in bfloat16": 0.01,
    }
    Journal.begin(tmp_path, {}).store_fact("speedups", begun)
    resumed = startup._agree_on_speedups(None, Journal.resume(tmp_path, {}).share())
    assert resumed == {
        "float32 products": "oneDNN",
        "zeros are skipped": "from 80 % zeros on",
        "products in solvers": "float32",
    }
    assert products.uses_onednn()
    assert max_density() == pytest.approx(0.2)


def test_other_processes_take_the_choice_of_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They measure nothing."""
    monkeypatch.setattr(startup, "_measure_speedups", None)
    monkeypatch.setattr(startup.collectives, "is_main", lambda: False)
    monkeypatch.setattr(startup.collectives, "broadcast_object", lambda value: GAINS)
    assert startup._agree_on_speedups(None, None)["zeros are skipped"] == "from 80 % zeros on"


def test_a_choice_under_load_is_noted(tiny: dict[str, Path], text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [products.ONEDNN_PRODUCTS, "packed products of 16 tokens, bfloat16, avx2"]  # a run multiplies nothing packed
    monkeypatch.setattr(autotuning, "unsteady", lambda: measured)
    settings = {"calibration": str(text_file), "samples": 4, "sequence_length": 32}
    notes = sparsellm.prune(tiny["opt"], "wanda", "50%", **settings).report.notes
    told = [note for note in notes if "other programs were at work" in note]
    assert len(told) == 1
    assert products.ONEDNN_PRODUCTS in told[0]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.skipif(len(kernels.instruction_sets()) < 3, reason="no set to choose from")
@pytest.mark.parametrize(("speedup", "chosen"), [(0.9, -1), (1.05, -1), (1.2, 1)])
def test_another_instruction_set_where_it_is_clearly_faster(
    speedup: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that the processor's flags promise most of, and not by noise; the same product."""
    monkeypatch.setattr(autotuning, "measure_speedup", lambda *_: (speedup, False))
    monkeypatch.setattr(autotuning, "store", None)
    monkeypatch.setattr(kernels, "load_kernels", lambda: library)
    monkeypatch.setattr(kernels, "is_faster", lambda tokens, dtype: True)
    autotuning.forget()
    library = Library(load_library())
    assert kernels.instruction_set() == kernels.instruction_sets()[chosen]
    weight, x = normal(64, 128).bfloat16(), normal(1, 128).bfloat16()
    torch.testing.assert_close(kernels.packed_matmul(x, Bitmask.from_dense(weight)), x @ weight.T, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize(("gain", "least"), [(1.0, 1.0), (4 / 3, 0.5), (2.0, 0.0)])
def test_small_matrices_are_for_one_thread(gain: float, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads take o + t/2 where one takes t. As fast as one, they are faster with more elements than were measured."""
    elements = kernels.SMALL[0] * kernels.SMALL[1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(kernels, "fastest_kernels", object)
    monkeypatch.setattr(kernels, "instruction_set", lambda: "avx2")
    autotuning.adopt({"packed products by 2 threads, avx2": gain})
    assert kernels.least_for_threads() == pytest.approx(least * elements)


@pytest.mark.parametrize(("speedup", "used"), [(0.03, False), (2.0, True)])
def test_solvers_round_where_that_is_faster(speedup: float, used: bool) -> None:
    """Not where the processor has the instructions and torch may not use them, as with ONEDNN_MAX_CPU_ISA=AVX2."""
    autotuning.adopt({products.BFLOAT16_IN_SOLVERS: speedup})
    assert devices.multiplies_bfloat16(CPU) is used


@pytest.mark.skipif(not kernels.instruction_set(), reason="no kernels are compiled")
@pytest.mark.parametrize(("faster", "decoded"), [((1, 4, 8, 16), [17]), ((1, 4), [5, 9, 17]), ((8,), [1, 4, 9, 17])])
def test_the_numbers_of_tokens_that_the_kernel_is_faster_with(
    faster: tuple[int, ...], decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured with the next larger number decides which of the two multiplies; it is the same product."""
    weight, called = normal(64, 128).bfloat16(), []
    tiles, used = kernels._multiply_tiles, kernels.instruction_set()
    names = {count: kernels._comparison("packed products", count, torch.bfloat16, used) for count in kernels.PACKED_TOKENS}
    monkeypatch.setattr(kernels, "_multiply_tiles", lambda *parts: called.append(len(parts[0])) or tiles(*parts))
    autotuning.adopt({name: 1.1 if count in faster else 0.9 for count, name in names.items()})
    for tokens in (1, 4, 5, 9, 17):
        x = normal(tokens, 128).bfloat16()
        torch.testing.assert_close(kernels.packed_matmul(x, Bitmask.from_dense(weight)), x @ weight.T, rtol=2e-2, atol=0.1)
    assert called == decoded
