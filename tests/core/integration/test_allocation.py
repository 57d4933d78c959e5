"""Sharing a sparsity out by outliers and by curves, each against a direct computation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sparsellm.activations.fisher_diagonal import FisherFactors
from sparsellm.allocation import rules as allocation
from sparsellm.allocation import rules as balance
from sparsellm.allocation.rules import CAUTION, allocate, owl
from sparsellm.errors import InvalidSetting
from sparsellm.methods import Plan
from sparsellm.models.blocks import blocks_of
from sparsellm.outputs.journal import Journal
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers.patterns import NM, Unstructured, parse_pattern
from tests.core.integration.test_sparsellm_method import batches, signals, tiny, two_families


def heavy(family: str) -> PreTrainedModel:
    """A model whose blocks have tails of different weight."""
    model = tiny(family)
    with torch.no_grad():
        for block, power in zip(blocks_of(model), (1.5, 3.0, 2.0), strict=True):
            for layer in block.layers.values():
                layer.weight.copy_(2 * layer.weight.sign() * layer.weight.abs() ** power)
    return model


@pytest.mark.parametrize("sparsity", ["60%", "96%", "3%"])
@pytest.mark.parametrize("skip", [[], ["self_attn.[qo]*"]])
@two_families
def test_owl(family: str, skip: list[str], sparsity: str) -> None:
    """Densities rise linearly with a block's outliers among the planned layers' |W| times input norm."""
    model = heavy(family)
    read, figures = signals(model), []
    plan = uniform_plan(blocks_of(model), parse_pattern(sparsity), exclude=skip)
    for block in blocks_of(model):
        names = [name for name in block.layers if block.full_name(name) in plan]
        every = [
            block.layer(name).weight.double().abs() * read[block.full_name(name)][0].square().mean(0).sqrt() for name in names
        ]
        scores = torch.cat([score.flatten() for score in every]).detach()
        figures.append(float((scores > 5 * scores.mean()).sum()) / len(scores))
    asked = 1 - float(sparsity.removesuffix("%")) / 100
    half = min(0.08, asked / 2, (1 - asked) / 2)
    shares = (np.array(figures) - min(figures)) / (max(figures) - min(figures))
    wanted = asked + 2 * half * (shares - shares.mean())
    found = owl(model, batches(), plan)
    assert found.keys() == plan.keys()
    for block, density in zip(blocks_of(model), wanted, strict=True):
        mine = [found[name] for name in plan if name.startswith(f"{block.name}.")]
        assert mine == pytest.approx([density] * len(mine), abs=1e-6)
    alone = uniform_plan(blocks_of(model), parse_pattern(sparsity), chosen=frozenset({1}))
    assert owl(model, batches(), alone) == pytest.approx(dict.fromkeys(alone, asked))


def curve(scale: float, power: float, levels: list[float]) -> list[float]:
    """Errors that fall as a power of the density."""
    return [scale * level**-power for level in levels]


@pytest.mark.parametrize(
    "layers",
    [
        [(100, 1.0, 1.0), (100, 9.0, 1.0), (100, 81.0, 1.0)],
        [(400, 5.0, 2.0), (50, 1.0, 0.5), (100, 0.1, 3.0)],
        [(300, 1e-9, 1.0), (100, 1e-9, 1.0), (200, 1e6, 1.0)],
    ],
)
@pytest.mark.parametrize("asked", [0.1, 0.3, 0.6])
def test_split_by_curves_has_the_least_error(layers: list[tuple[int, float, float]], asked: float) -> None:
    """The sum of the errors is that of the best of all splits on a fine grid, and the mean density is the one asked for."""
    levels = sorted({min(asked * level, 0.95) for level in (0.33, 0.5, 1.0, 1.5, 2.0)})
    curves = {str(i): (size, curve(scale, power, levels)) for i, (size, scale, power) in enumerate(layers)}
    found = np.array(list(balance.allocate_by_curves(curves, levels, asked).values()))
    sizes, grid = np.array([size for size, _, _ in layers]), np.geomspace(levels[0], levels[-1], 300)
    assert found @ sizes / sizes.sum() == pytest.approx(asked, rel=0.01)
    one, two = np.meshgrid(grid, grid)
    three = np.round((asked * sizes.sum() - one * sizes[0] - two * sizes[1]) / sizes[2], 12)
    costs = np.zeros_like(one)
    for (_, scale, power), density in zip(layers, (one, two, three), strict=True):
        errors = np.log(curve(scale, power, levels))
        costs += np.exp(np.interp(np.log(np.maximum(density, 1e-9)), np.log(levels), errors))
    best = costs[(three >= levels[0]) & (three <= levels[-1])].min()
    assert sum(scale * density**-power for (_, scale, power), density in zip(layers, found, strict=True)) <= 1.02 * best
    if len({(size, power) for size, _, power in layers}) == 1:
        assert found[0] < found[1] < found[2]
    twins = balance.allocate_by_curves({name: (100, [4.0, 2.0, 1.0]) for name in "ab"}, [0.2, 0.4, 0.8], 0.4)
    assert list(twins.values()) == pytest.approx([0.4, 0.4], rel=0.01)


def test_curves_between_their_points() -> None:
    """Log-log linear between the levels; where one measurement is out of line, more weights never cost more."""
    grid = torch.tensor([0.1, math.sqrt(0.02), 0.2, 0.4, 0.8]).double()
    got = balance._interpolated([0.1, 0.2, 0.4, 0.8], [16.0, 4.0, 5.0, 1.0], grid)
    assert got.tolist() == pytest.approx([16.0, math.sqrt(80), 5.0, 5.0, 1.0])


Curves = dict[str, tuple[int, list[float]]]


def caught(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> list[tuple[Curves, list[float]]]:
    """The curves and levels that are to be balanced at a density of 0.3; told are 0.1, 0.11 and so on, in the plan's order."""
    seen: list[tuple[Curves, list[float]]] = []

    def balanced(curves: Curves, levels: list[float], asked: float) -> dict[str, float]:
        assert asked == pytest.approx(0.3)
        seen.append((curves, levels))
        return {name: 0.1 + 0.01 * number for number, name in enumerate(plan)}

    monkeypatch.setattr(allocation, "allocate_by_curves", balanced)
    return seen


def half_way(plan: Plan) -> dict[str, object]:
    """From 0.3 to those densities, on a scale of logarithms."""
    assert CAUTION == 0.5
    return {name: pytest.approx(math.sqrt(0.3 * (0.1 + 0.01 * number))) for number, name in enumerate(plan)}


@pytest.mark.parametrize("sparsity", ["53.7%", "90%"])
@pytest.mark.parametrize("rule", ["owl", "fisher"])
@two_families
def test_allocated_sparsity_adds_up_exactly(family: str, rule: str, sparsity: str) -> None:
    """All layers together lose what was asked, to one weight; not each the same; N:M cannot be shared out."""
    model = heavy(family)
    sizes = {name: model.get_submodule(name).weight.numel() for name in uniform_plan(blocks_of(model), Unstructured(0))}
    plan = uniform_plan(blocks_of(model), parse_pattern(sparsity), exclude=["v_proj"])
    shared = allocate(rule, model, batches(), plan)
    assert list(shared) == list(plan)
    total = sum(sizes[name] for name in plan)
    assert sum(shared[name].count_removed([sizes[name]]) for name in plan) == parse_pattern(sparsity).count_removed([total])
    assert max(pattern.sparsity for pattern in shared.values()) - min(pattern.sparsity for pattern in shared.values()) > 0.02
    last = list(plan)[-1]
    with pytest.raises(InvalidSetting, match=rf"got 2:4 for {last}\."):
        allocate(rule, model, batches(), {**plan, last: NM(2, 4)})


@pytest.mark.parametrize("rule", ["owl", "fisher"])
@two_families
def test_one_pass_of_the_dense_model_serves_every_sparsity(
    family: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cache and factors do not depend on the sparsity; allocations from it equal those of passes of their own."""
    model = heavy(family)
    plans = [uniform_plan(blocks_of(model), parse_pattern(sparsity)) for sparsity in ("50%", "80%")]
    some = uniform_plan(blocks_of(model), parse_pattern("80%"), exclude=["v_proj"])
    expected = [allocate(rule, model, batches(), plan) for plan in (*plans, some)]
    journal = Journal.begin(tmp_path, {})
    factors: dict[str, FisherFactors] = {}
    assert allocate(rule, model, batches(), plans[0], cache=journal, factors=factors) == expected[0]
    with monkeypatch.context() as without_passes:
        for place in ("sparsellm.allocation.rules.walk", "sparsellm.activations.fisher_diagonal.run_backward"):
            without_passes.delattr(place)
        resumed = Journal.resume(tmp_path, {})
        assert allocate(rule, model, batches(), plans[1], cache=resumed, factors=factors) == expected[1]
    assert allocate(rule, model, batches(), some, cache=journal) == expected[2]  # other layers, so a pass of their own
