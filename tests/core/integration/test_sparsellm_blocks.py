"""Which layers and blocks the default method takes, what it leaves alone, what it tells, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsellm.activations.sensitivity import output_fisher
from sparsellm.methods import BlockMethod, BlockResult, LayerResult
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.methods import method_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers import Magnitude
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.core.integration.test_sparsellm_method import batches, changed, prune, signals, tiny, two_families
from tests.pruning import prune_blocks, walk


@two_families
def test_the_dense_stream_is_the_dense_models_own(family: str) -> None:
    """Bit for bit, whatever is done to the blocks that it passes."""
    method = SparseLLM(SparseGPT())
    model = tiny(family)
    wanted = signals(tiny(family))
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    for block, inputs in walk(model, batches(), needs_dense_stream=True, fisher=output_fisher(model, batches())):
        assert inputs.dense is not None
        entered = torch.cat([hidden.flatten(0, -2) for hidden in inputs.dense])
        assert torch.equal(entered.double(), wanted[block.name][0])
        assert block.index == 0 or not torch.equal(inputs.pruned[0], inputs.dense[0])
        list(method.prune(block, inputs, plan))


@pytest.mark.parametrize("family", ["opt", "llama", "qwen2-sliding"])
def test_what_moves_is_told_and_all_else_stays(family: str) -> None:
    """Biases of planned layers move; `moved` names these; the rest keeps its bits."""
    method = SparseLLM(Magnitude(), rounds=0)
    model, steps = prune(family, method, chosen=frozenset({1}), exclude=["q_proj"])
    results = {step.name for step in steps if isinstance(step, LayerResult)}
    (finished,) = [step for step in steps if isinstance(step, BlockResult)]
    assert finished.refined is None
    block = blocks_of(model)[1]
    assert results == {block.full_name(name) for name in block.layers if not name.endswith("q_proj")}
    wanted = {f"{name}.bias" for name in results if model.get_submodule(name).bias is not None}
    assert set(finished.changed_parameters) == wanted
    assert len(finished.changed_parameters) == len(wanted)
    assert changed(model, tiny(family)) == wanted | {f"{name}.weight" for name in results}


@pytest.mark.parametrize(
    ("family", "choice", "couple", "note"),
    [
        ("opt-tanh", {}, "feedforward", "its layers were pruned one by one, since its activation function is not supported"),
        ("opt-tanh", {}, "none", ""),
        (
            "opt",
            {"exclude": ["fc1"]},
            "feedforward",
            "its feed-forward layers were pruned one by one, since the plan excludes fc1",
        ),
        ("llama", {"include": ["up_proj"]}, "block", "one by one, since the plan excludes mlp.down_proj, mlp.gate_proj"),
        ("llama", {"include": ["up_proj"]}, "none", ""),
        ("llama", {"include": ["self_attn.*"]}, "block", ""),
        ("llama", {}, "feedforward", ""),
    ],
)
def test_parts_that_cannot_be_coupled(family: str, choice: dict[str, Any], couple: Any, note: str) -> None:
    """Their layers are pruned one by one, and the block's note says why; no loop runs over half a part."""
    method = SparseLLM(SparseGPT(), scope=couple)
    model, steps = prune(family, method, **choice)
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"), **choice)
    assert [step.name for step in steps if isinstance(step, LayerResult)] == list(plan)
    for name in plan:
        assert int((model.get_submodule(name).weight == 0).sum()) == parse_pattern("60%").count_removed(
            model.get_submodule(name).weight.shape
        )
    for step in steps:
        if isinstance(step, BlockResult):
            assert step.note.endswith(note)
            assert bool(step.note) == bool(note)
            assert bool(step.epochs) == (family == "llama" and not choice)


def test_blocks_behind_the_last_are_not_visited() -> None:
    """Where only the first block is planned, nothing runs through the second, which would raise."""
    model = tiny("llama")
    fisher = output_fisher(model, batches())
    with torch.no_grad():
        blocks_of(model)[1].layer("mlp.down_proj").weight.fill_(float("inf"))
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"), chosen=frozenset({0}))
    steps = list(prune_blocks(model, batches(), SparseLLM(SparseGPT()), plan, fisher=fisher))
    assert [step.index for step in steps if isinstance(step, BlockResult)] == [0]


@two_families
def test_same_call_same_bits(family: str) -> None:
    """Two runs of everything, random labels, random errors included, give the same bits."""
    method = SparseLLM()
    one, other = (prune(family, method, chosen=frozenset({0}))[0] for _ in range(2))
    assert not changed(one, other)
    assert changed(one, tiny(family))


def test_efforts() -> None:
    """An effort sets solver and coupling where the recipe names none; what it names wins."""

    def built(**settings: Any) -> BlockMethod:
        recipe = Recipe(model="demo:opt", calibration="demo", **settings)
        assert recipe.allocation_rule == "fisher"
        return method_of(recipe, 4)

    assert built() == built(effort="standard") == SparseLLM(ALPS.accurate(), scope="feedforward")
    assert (
        built(effort="fast") == SparseLLM(FastADMM(), scope="none") == built(settings={"scope": "none", "solver": "fast-admm"})
    )
    assert built(effort="fast", settings={"solver": "alps"}) == SparseLLM(ALPS(), scope="none")
    assert built(effort="fast", settings={"scope": "feedforward"}) == SparseLLM(FastADMM(), scope="feedforward")
    recipe = Recipe(model="demo:opt", calibration="demo", effort="fast", settings={"solver": "alps"})
    assert recipe.describe().startswith("sparsellm, fast(solver=alps), 50 %")
