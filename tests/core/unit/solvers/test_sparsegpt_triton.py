"""SparseGPT's kernel against its plain loop: by Triton's interpreter (see `tests`), or on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsellm.solvers import sparsegpt
from sparsellm.solvers.patterns import Pattern, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.conftest import long_unless

OUTPUTS = [1, 4, 11]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(sparsegpt.triton is None, reason="Triton is not installed: it has wheels for Linux only")


def block_of(columns: int, outputs: int) -> tuple[Tensor, Tensor]:
    """(columns, out) weights and (columns, columns) factor, the latter a part of a larger one that is stored by columns.

    One column is dead.
    """
    generator = torch.Generator().manual_seed(columns * 100 + outputs)
    factor = 0.3 * torch.randn(columns + 9, columns + 9, generator=generator).tril().T
    factor.diagonal().copy_(0.5 + torch.rand(columns + 9, generator=generator))
    weight = torch.randn(columns, outputs, generator=generator)
    weight[columns // 3] = 0
    return weight.to(DEVICE), factor.to(DEVICE)[4 : 4 + columns, 4 : 4 + columns]


def both(columns: Tensor, factor: Tensor, keep: Tensor | None, pattern: Pattern) -> Tensor:
    """The same masks; the same weights but for rounding. Returns those of the kernel."""
    one, other = columns.clone(), columns.clone()
    sparsegpt._sweep(one, factor, None if keep is None else keep.clone(), pattern=pattern)
    sparsegpt.prune_columns(other, factor, keep, pattern=pattern)
    assert torch.equal(other == 0, one == 0)
    assert torch.allclose(other, one, rtol=1e-5, atol=1e-5)
    return other


@pytest.mark.parametrize(
    ("columns", "outputs"),
    [
        long_unless((place + number) % 2 == 0, columns, outputs)
        for place, columns in enumerate((1, 2, 16, 21))
        for number, outputs in enumerate(OUTPUTS)
    ],
)
def test_given_masks_are_kept(columns: int, outputs: int) -> None:
    """Of odd sizes, with rows that lose all, some, and nothing."""
    weight, factor = block_of(columns, outputs)
    keep = torch.rand(columns, outputs, generator=torch.Generator().manual_seed(0)) > torch.linspace(0, 1, outputs)
    both(weight, factor, keep.to(DEVICE), parse_pattern("50%"))


GROUPS = [("2:4", 4), ("2:4", 16), ("3:4", 12), ("4:8", 24), ("1:2", 14), ("2:3", 21), ("20:31", 31)]


@pytest.mark.parametrize(
    ("text", "columns", "outputs"),
    [
        long_unless(OUTPUTS[number % 3] == outputs or case == ("2:4", 16), *case, outputs)
        for number, case in enumerate(GROUPS)
        for outputs in OUTPUTS
    ],
)
def test_groups_are_chosen_as_they_are_reached(text: str, columns: int, outputs: int) -> None:
    weight, factor = block_of(columns, outputs)
    both(weight, factor, None, parse_pattern(text))


@pytest.mark.parametrize("text", ["2:4", "3:4", "4:8"])
def test_ties_go_by_position(text: str) -> None:
    """Of equal scores the later stay, as in `NM.keep`; nothing couples here, so that they stay equal."""
    pattern = parse_pattern(text)
    weight = torch.randint(-2, 3, (16, 9), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    factor = torch.eye(16, device=DEVICE)
    pruned = both(weight, factor, None, pattern)
    assert torch.equal(pruned, (weight.T * pattern.keep(weight.T.square())).T)


@pytest.mark.parametrize(
    ("shape", "block", "text"),
    [
        long_unless(number % 4 == place or (place == 1 and text in ("50%", "2:4")), *case, text)
        for place, case in enumerate([((6, 40), 16), ((5, 24), 128), ((1, 8), 8), ((7, 32), 24)])
        for number, text in enumerate(["50%", "90%", "2:4", "3:4", "4:8"])
    ],
)
def test_the_kernel_prunes_a_layer_as_the_plain_loop_does(
    text: str, shape: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel and by the plain loop: ragged last blocks, dead inputs, the same masks, the same values to 1e-5."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(4 * shape[1], shape[1], generator=generator)
    x = x + 0.8 * x.roll(1, dims=1)
    x[:, [2, shape[1] - 1]] = 0
    gram = Gram(shape[1], DEVICE)
    gram.update(x.to(DEVICE))
    problem, pattern = LayerProblem(torch.randn(shape, generator=generator).to(DEVICE), gram), parse_pattern(text)
    answers, swept = [], 0
    sweep = sparsegpt.prune_columns

    def counted(*arguments: Any, **keywords: Any) -> None:
        nonlocal swept
        swept += 1
        sweep(*arguments, **keywords)

    monkeypatch.setattr(sparsegpt, "prune_columns", counted)
    for serves in (False, True):
        monkeypatch.setattr(sparsegpt, "kernel_supports", lambda *_, serves=serves: serves)
        answers.append(SparseGPT(block=block).solve(problem, pattern))
    assert swept == -(-shape[1] // block)
    assert torch.equal(answers[0] == 0, answers[1] == 0)
    assert torch.allclose(answers[1], answers[0], rtol=1e-5, atol=1e-5)


def test_where_the_kernel_is_used() -> None:
    """Processors, other precisions, wide blocks and large groups take the plain loop; a GPU that runs it takes the kernel."""
    columns, two_four = torch.zeros(8, 4, device=DEVICE), parse_pattern("2:4")
    assert not sparsegpt.kernel_supports(torch.zeros(8, 4), two_four)
    assert not sparsegpt.kernel_supports(columns.double(), two_four)
    assert not sparsegpt.kernel_supports(torch.zeros(sparsegpt.MAX_COLUMNS + 1, 4, device=DEVICE), two_four)
    assert not sparsegpt.kernel_supports(torch.zeros(64, 4, device=DEVICE), parse_pattern("2:32"))
    assert sparsegpt.kernel_supports(columns, two_four) == (DEVICE == "cuda")
    assert not sparsegpt.has_kernel(torch.device("cpu"))


def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled, or that answers wrongly, is not used."""
    assert sparsegpt.kernel_passes_self_test(torch.device(DEVICE))
    assert sparsegpt.kernel_compiler().startswith("triton ")
    for broken in (lambda *_, **__: 1 / 0, lambda columns, *_, **__: columns):
        monkeypatch.setattr(sparsegpt, "prune_columns", broken)
        assert not sparsegpt.kernel_passes_self_test(torch.device(DEVICE))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparsellm.solvers.sparsegpt import MAX_COLUMNS, ROWS_PER_PROGRAM, _kernel
for keep, group in (("*u8", 0), ("*fp32", 4)):
    types = dict(columns="*fp32", factor="*fp32", keep=keep, count="i32", outputs="i32")
    fixed = dict(GROUP=group, ZEROS=group // 2, COLUMNS=MAX_COLUMNS, LANES=ROWS_PER_PROGRAM)
    source = ASTSource(_kernel, types | dict.fromkeys(fixed, "constexpr"), fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 1})
    print(len(made.asm["cubin"]) > 0)
"""


@pytest.mark.long
def test_the_kernel_compiles_for_a_gpu() -> None:
    """For a GPU of compute capability 8.0, which need not be there."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=plain, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True"]
