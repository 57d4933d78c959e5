"""The solvers against what the authors' own programs gave on one problem."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.conftest import SHARED

AUTHORS = SHARED / "parity" / "authors.safetensors"

pytestmark = pytest.mark.skipif(not AUTHORS.exists(), reason=f"{AUTHORS} is not on this machine")

RECORDED = {
    "sparsegpt-0.5": 0.01458,
    "sparsegpt-0.7": 0.06214,
    "sparsegpt-2of4": 0.02685,
    "sparsegpt-3of4": 0.15202,
    "sparsegpt-4of8": 0.01493,
    "alps-0.5": 0.00121,
    "alps-0.7": 0.00670,
    "alps-0.9": 0.06785,
    "alps-2of4": 0.00489,
    "alps-3of4": 0.03816,
}
"""Relative output errors of the authors' answers, as noted beside the file."""


@pytest.fixture(scope="module")
def authors() -> dict[str, Tensor]:
    """The problem and the authors' answers."""
    return load_file(AUTHORS)


@pytest.fixture(scope="module")
def problem(authors: dict[str, Tensor]) -> LayerProblem:
    """The problem as this package states it."""
    gram = Gram(authors["inputs"].shape[1])
    gram.update(authors["inputs"])
    return LayerProblem(authors["weight"], gram)


def pattern_text(name: str) -> str:
    """The pattern in a record's name."""
    return name.split("-")[1].replace("of", ":")


@pytest.mark.parametrize(("name", "recorded"), RECORDED.items())
def test_recorded_errors(name: str, recorded: float, authors: dict[str, Tensor], problem: LayerProblem) -> None:
    """The authors' answers have the errors noted beside them, by problem.error and by the outputs themselves."""
    assert problem.error(authors[name]) == pytest.approx(recorded, abs=1e-5)
    x, weight = authors["inputs"].double(), authors["weight"].double()
    lost = (x @ (authors[name].double() - weight).T).square().sum() / (x @ weight.T).square().sum()
    assert float(lost) == pytest.approx(recorded, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in RECORDED if name.startswith("sparsegpt") and "of" in name])
def test_sparsegpt_nm_equals_the_authors(name: str, authors: dict[str, Tensor], problem: LayerProblem) -> None:
    """N:M: the same mask and the same values to 1e-4; the dead input's weights are zero in both."""
    answer = SparseGPT(damping=0.01, block=128).solve(problem, parse_pattern(pattern_text(name)))
    assert torch.equal(answer == 0, authors[name] == 0)
    torch.testing.assert_close(answer, authors[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["sparsegpt-0.5", "sparsegpt-0.7"])
def test_sparsegpt_unstructured_equals_the_authors(name: str, authors: dict[str, Tensor], problem: LayerProblem) -> None:
    """Unstructured: the error to 1 %, masks but for the one weight too many that the authors' code removes per block."""
    answer = SparseGPT(damping=0.01, block=128).solve(problem, parse_pattern(pattern_text(name)))
    assert problem.error(answer) == pytest.approx(problem.error(authors[name]), rel=0.01)
    assert float(((answer == 0) != (authors[name] == 0)).float().mean()) < 0.001


@pytest.mark.parametrize("name", [name for name in RECORDED if name.startswith("alps")])
def test_alps_is_as_good_as_the_authors(name: str, authors: dict[str, Tensor], problem: LayerProblem) -> None:
    """The error is at most 1.01 times theirs, at a sparsity no lower than theirs."""
    answer = ALPS().solve(problem, parse_pattern(pattern_text(name)))
    assert problem.error(answer) <= 1.01 * problem.error(authors[name])
    assert int((answer == 0).sum()) >= int((authors[name] == 0).sum())
