"""The methods of `examples/papers`, as the package that it is: SparseSwaps against all exchanges, ELSA by its promises."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsellm
from sparsellm import NM, Gram, LayerProblem, Pattern, Unstructured, Wanda
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import InvalidSetting, TooLarge
from tests.conftest import ROOT
from tests.project.test_extension import Program, install, program

FOLDER = ROOT / "examples" / "papers"
TEXT: dict[str, Any] = {"calibration": "demo", "samples": 256, "sequence_length": 64}
SMALL: dict[str, Any] = {"steps": 6, "sequences": 2, "interval": 3, "rate": 2e-3, "penalty": 0.1}

__all__ = ["program"]  # a fixture


@pytest.fixture
def elsa(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of ELSA."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import elsa

    return elsa


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of SparseSwaps."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import sparse_swaps

    return sparse_swaps


def problem_of(seed: int = 0, pruned_mask: Tensor | None = None) -> LayerProblem:
    """A problem of three rows of eight weights, whose inputs are correlated."""
    generator = torch.Generator().manual_seed(seed)
    gram = Gram(8)
    gram.update(torch.randn(40, 8, generator=generator) @ torch.randn(8, 8, generator=generator))
    gram.finalize()
    return LayerProblem(torch.randn(3, 8, generator=generator), gram, pruned_mask=pruned_mask)


def row_errors(problem: LayerProblem, keep: Tensor) -> Tensor:
    """The error of each row with a mask, (rows,)."""
    lost = (problem.weight * ~keep).double()
    return ((lost @ problem.gram.double()) * lost).sum(1)


def best_exchange(problem: LayerProblem, keep: Tensor, span: int) -> Tensor:
    """The least error of each row, (rows,), after no exchange or one of a kept weight for a removed one, by trying all."""
    best = row_errors(problem, keep)
    fixed = torch.zeros_like(keep) if problem.pruned_mask is None else problem.pruned_mask
    for row, removed, added in torch.cartesian_prod(torch.arange(3), torch.arange(8), torch.arange(8)).tolist():
        if keep[row, removed] and not keep[row, added] and not fixed[row, added] and removed // span == added // span:
            other = keep.clone()
            other[row, removed], other[row, added] = False, True
            best[row] = min(best[row], row_errors(problem, other)[row])
    return best


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(2, 4)], ids=str)
@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_each_exchange_is_the_best_of_all(pattern: Pattern, keeps_zeros: bool, seed: int, swaps: ModuleType) -> None:
    """One after the other, until none lowers the error; the values of the weights stay, and so does each row's count."""
    mask = (torch.arange(8) % 4 == 1).expand(3, 8) if keeps_zeros else None
    problem, span = problem_of(seed, mask), pattern.column_span or 8
    weight, wanted = problem.weight.clone(), row_errors(problem, Wanda().solve(problem, pattern) != 0)
    for count in range(9):
        solved = swaps.SparseSwaps(swaps=count).solve(problem, pattern)
        keep = solved != 0
        assert torch.equal(solved, weight * keep)
        assert torch.equal(keep.sum(1), (Wanda().solve(problem, pattern) != 0).sum(1))
        assert pattern.holds(solved)
        assert mask is None or not keep[mask].any()
        assert torch.allclose(row_errors(problem, keep), wanted, rtol=1e-5)
        wanted = best_exchange(problem, keep, span)
    assert torch.allclose(row_errors(problem, keep), wanted, rtol=1e-5)  # the last exchange has been made
    assert (wanted < row_errors(problem, Wanda().solve(problem, pattern) != 0)).any()
    assert torch.equal(problem.weight, weight)


def test_groups_of_rows_are_solved_apart(swaps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    together = swaps.SparseSwaps().solve(problem_of(), Unstructured(0.5))
    monkeypatch.setattr(swaps, "ENTRIES", 64)  # a row at a time
    assert torch.equal(swaps.SparseSwaps().solve(problem_of(), Unstructured(0.5)), together)


def pruned(elsa: ModuleType, sparsity: str, **settings: Any) -> sparsellm.Result:
    """The bundled OPT by ELSA, as an object."""
    return sparsellm.prune("demo:opt", elsa.ELSA(**SMALL | settings), sparsity, **TEXT)


def test_elsa_lowers_the_loss_of_its_start(elsa: ModuleType) -> None:
    """On sequences that it does not read; with fewer steps the learning rate is at its height in the end."""
    training = pruned(elsa, "95%", steps=40, sequences=4, interval=4).report.recovered
    assert training is not None
    assert training.after < training.before


@pytest.mark.parametrize("sparsity", ["90%", "3:4"])
def test_elsa_learns_masks_of_the_pattern(sparsity: str, elsa: ModuleType) -> None:
    result = pruned(elsa, sparsity)
    pattern, start = sparsellm.parse_pattern(sparsity), sparsellm.prune("demo:opt", "magnitude", sparsity)
    changed = 0
    for layer in result.report.layers:
        weight, first = (x.model.get_parameter(f"{layer.name}.weight") for x in (result, start))
        assert pattern.holds(weight)
        assert layer.zeros == int((weight == 0).sum()) == pattern.count_removed(weight.shape)
        changed += int(((weight == 0) != (first == 0)).sum())
    assert changed > 0


def test_elsa_repeats_itself(elsa: ModuleType) -> None:
    first, second = (pruned(elsa, "90%").model.state_dict() for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_a_projection_keeps_the_largest_squares_times_the_second_moment(elsa: ModuleType) -> None:
    """By a slow formula, and the multiplier grows by what the projection removes."""
    model = open_checkpoint("demo:opt").load().float()
    blocks = sparsellm.blocks_of(model)[:1]
    name = blocks[0].full_name("fc1")
    admm = elsa.ADMM(blocks, {name: Unstructured(0.75)}, {})
    dense = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    weight = model.get_parameter(f"{name}.weight")
    weight.data.mul_(weight.abs() > weight.abs().median())
    admm.start(dense, 0.01)
    assert torch.equal(weight, dense[f"{name}.weight"])
    x, z, u = weight.detach().clone(), admm.z[f"{name}.weight"].clone(), torch.zeros_like(weight)
    moments = torch.zeros_like(weight), torch.zeros_like(weight)
    for number in range(1, 4):
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        admm.step((weight * direction).sum(), 0.01, 0.5)
        gradient = direction + 0.5 * (x - z + u)
        moments = 0.9 * moments[0] + 0.1 * gradient, 0.95 * moments[1] + 0.05 * gradient**2
        x -= 0.01 * (moments[0] / (1 - 0.9**number)) / ((moments[1] / (1 - 0.95**number)).sqrt() + 1e-8)
        assert torch.allclose(weight, x, atol=1e-5)
        admm.project()
        moved = x + u
        score = moved**2 * moments[1]
        keep = score > score.flatten().kthvalue(round(0.75 * score.numel())).values
        assert (keep == (admm.z[f"{name}.weight"] != 0)).float().mean() > 0.999  # rounding may exchange a few
        z, u = admm.z[f"{name}.weight"].clone(), moved - admm.z[f"{name}.weight"]


@pytest.fixture
def package(tmp_path: Path) -> None:
    """The package of the folder, in `tmp_path`."""
    install(tmp_path, "paper-methods", (FOLDER / "paper_methods.py").read_text(encoding="utf-8"))
    for name in ("elsa", "sparse_swaps"):
        shutil.copy(FOLDER / f"{name}.py", tmp_path)


@pytest.mark.usefixtures("package")
def test_the_methods_have_names(tmp_path: Path, program: Program) -> None:
    """On the command line, in a sweep and in reports; `plan` knows the step over the whole model."""
    words = [x for name, value in TEXT.items() for x in (f"--{name.replace('_', '-')}", value)]
    settings = [x for name, value in SMALL.items() for x in ("--set", f"{name}={value}")]
    done = program("prune", "demo:opt", tmp_path / "out", "--method", "elsa", "--sparsity", "3:4", *settings, *words)
    assert done.returncode == 0, done.stderr
    done = program("verify", tmp_path / "out", "--against", "demo:opt")
    assert done.returncode == 0, done.stderr
    plan = program("plan", "demo:opt", "--method", "elsa", *words)
    assert "ADMM over the whole model" in plan.stdout, plan.stderr
    listed = program("sweep", FOLDER / "sweep.yaml", tmp_path / "swept", "--list")
    assert "elsa(" in listed.stdout, listed.stderr
    assert "sparse-swaps" in listed.stdout


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({}, InvalidSetting, "calibration"),
        ({"calibration": "demo", "offload": True}, TooLarge, "the whole model"),
        ({"calibration": "demo", "values": "int8"}, InvalidSetting, "values"),
    ],
)
def test_elsa_refuses(settings: dict[str, Any], error: type[Exception], named: str, elsa: ModuleType) -> None:
    """What it cannot do, by its name, before the weights are read."""
    with pytest.raises(error, match="elsa") as refusal:
        sparsellm.prune("demo:opt", elsa.ELSA(), "90%", **settings)
    assert named in str(refusal.value)


def test_half_a_step_is_refused(elsa: ModuleType) -> None:
    """A method that has `begin` and lacks other members of a step is not taken for one of blocks alone."""

    class Half(elsa.ELSA):  # type: ignore[misc, name-defined]
        stage = property()

    with pytest.raises(InvalidSetting, match="Half has `begin`"):
        sparsellm.prune("demo:opt", Half(), "90%", **TEXT)


def test_settings_are_refused(elsa: ModuleType, swaps: ModuleType) -> None:
    with pytest.raises(InvalidSetting, match="steps=0"):
        elsa.ELSA(steps=0)
    with pytest.raises(InvalidSetting, match="swaps"):
        swaps.SparseSwaps(swaps=-1)
