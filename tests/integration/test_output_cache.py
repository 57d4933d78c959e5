"""Attention that runs once: what it wrote is recalled, to the bit, for as long as it writes the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsellm.activations.hooks import CaptureRequest
from sparsellm.activations.output_cache import CacheableModule, find_skippable
from sparsellm.activations.streams import Activations
from sparsellm.activations.walk import walk
from sparsellm.methods import LayerResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.pruning.plan import uniform_plan
from sparsellm.pruning.sequential import prune_blocks
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.criteria import Wanda
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.integration.test_walk import batches, tiny


def entered(family: str = "opt", **options: Any) -> tuple[Block, Activations]:
    """A first block with what enters it, in two streams."""
    return next(walk(tiny(family, **options), batches(), teacher=True))


@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "qwen3-sliding"])
def test_passes_are_the_same_to_the_bit(family: str) -> None:
    """With attention recalled a pass shows what it did, and the stream goes where it went, also if someone writes into what
    they are given; attention itself runs once a batch."""
    (block, inputs), (other, plain) = entered(family), entered(family)
    adder, writer = block.architecture.residual_writers
    around = inputs.cacheable_module(adder)
    assert around is not None
    assert (around.name, around.writer) == ("self_attn", adder)
    inputs.cache_output(around, dense=False)
    ran: Counter[str] = Counter()
    block.module_of(adder).register_forward_hook(lambda *_: ran.update("a"))
    asked = CaptureRequest([writer], ["self_attn", writer])
    for _ in range(3):
        for (one, _), (two, _) in zip(
            inputs.paired_batches(block, asked, CaptureRequest()),
            plain.paired_batches(other, asked, CaptureRequest()),
            strict=True,
        ):
            assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in asked.inputs)
            assert all(torch.equal(one.outputs[name], two.outputs[name]) for name in asked.outputs)
            one.outputs["self_attn"].zero_()
    for some, its in ((inputs, block), (plain, other)):
        some.advance(its)
    assert all(torch.equal(one, two) for one, two in zip(inputs.pruned, plain.pruned, strict=True))
    assert ran == {"a": len(batches())}


def test_it_is_forgotten() -> None:
    """When its stream is behind the block, when the caller says so, and at the latest with the walk; its room is given back."""
    storage = OffloadManager()
    visits = walk(tiny("opt"), batches(), teacher=True, storage=storage)
    block, inputs = next(visits)
    around = inputs.cacheable_module("self_attn.out_proj")
    assert around is not None
    stream, before = sum(hidden.numel() * 4 for hidden in inputs.pruned), storage.most_kept
    for dense in (True, False):
        inputs.cache_output(around, dense)
    list(inputs.paired_batches(block, CaptureRequest(["fc1"]), CaptureRequest(["fc1"], whole=True)))
    assert storage.most_kept == before + 2 * stream
    for _ in range(2):
        inputs.cache_output(around, dense=False)
    assert storage.most_kept == before + 2 * stream
    next(visits)
    visits.close()
    assert set(storage._taken.values()) == {0}


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("couple", ["none", "feedforward"])
def test_pruning_is_the_same_without(family: str, couple: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight to the bit, and attention runs less often."""
    method = SparseLLM(SparseGPT(), scope=couple, gauss_newton_steps=1)
    ran: Counter[bool] = Counter()
    found: dict[bool, list[Tensor]] = {}
    for recalls in (True, False):
        model = tiny(family)
        for block in blocks_of(model):
            block.module_of("self_attn.q_proj").register_forward_hook(lambda *_, recalls=recalls: ran.update([recalls]))
        if not recalls:
            monkeypatch.setattr(Activations, "cacheable_module", lambda self, writer: None)
        list(prune_blocks(model, batches(), method, uniform_plan(blocks_of(model), parse_pattern("60%"))))
        found[recalls] = [parameter.detach().clone() for parameter in model.parameters()]
    assert all(torch.equal(one, two) for one, two in zip(*found.values(), strict=True))
    assert ran[True] < ran[False]


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_what_cannot_be_recalled(family: str) -> None:
    """Modules that return more, that hold later layers, or that are none."""
    block, inputs = entered(family, attention="eager")
    adder, writer = block.architecture.residual_writers
    assert inputs.cacheable_module(adder) is None  # it returns the attention weights too
    block, inputs = entered(family)
    assert inputs.cacheable_module("self_attn.q_proj") is None
    found = inputs.cacheable_module(writer)
    assert (found and found.name) == ("mlp" if family == "llama" else None)
    block.module_of("self_attn").register_forward_hook(lambda _, __, output: (2 * output[0], None))
    assert inputs.teacher is not None
    inputs.teacher.module_of("self_attn").register_forward_hook(lambda _, __, output: (2 * output[0], None))
    assert inputs.cacheable_module(adder) is None  # what it writes is not what its last layer writes


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3-sliding"])
def test_true_sequential_order(family: str) -> None:
    """Group by group on what the pruned groups before it let through, as plain passes of the whole block find it."""
    found, plain = tiny(family), tiny(family)
    pattern, solver = parse_pattern("60%"), SparseGPT()
    method = LayerWise(solver, true_sequential=True)
    steps = list(prune_blocks(found, batches(), method, uniform_plan(blocks_of(found), pattern)))
    for block, inputs in walk(plain, batches()):
        for group in block.architecture.groups:
            gram = Gram(block.layer(group[0]).in_features, unit=inputs.window)
            hook = block.module_of(group[0]).register_forward_pre_hook(lambda _, args, gram=gram: gram.update(args[0]))
            for hidden, call in zip(inputs.pruned, inputs.calls(block), strict=True):
                block(hidden, call)
            hook.remove()
            for name in group:
                block.write(name, solver.solve(LayerProblem(block.layer(name).weight.detach().clone(), gram), pattern))
    assert all(torch.equal(one, two) for one, two in zip(found.parameters(), plain.parameters(), strict=True))
    names = [f"{block.name}.{name}" for block in blocks_of(plain) for name in block.layers]
    assert [step.name for step in steps if isinstance(step, LayerResult)] == names


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_what_a_true_sequential_pass_runs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer once a batch, where there is memory for what the feed-forward's writer reads; its readers twice where there
    is none, and what is kept is then in files. The same bits."""
    plain = functional.linear
    found: dict[bool, list[Tensor]] = {}
    ran: dict[bool, Counter[str]] = {}
    for room in (True, False):
        model, storage = tiny(family), OffloadManager(None if room else 0, tmp_path)
        blocks, mine = blocks_of(model), Counter[str]()
        ids = {id(layer.weight): name for block in blocks[:-1] for name, layer in block.layers.items()}  # nobody reads the last

        def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None, ids: Any = ids, mine: Any = mine) -> Tensor:
            mine.update([ids[id(weight)]] if id(weight) in ids else [])
            return plain(x, weight, bias)

        monkeypatch.setattr(functional, "linear", counted)
        method, plan = LayerWise(Wanda(), true_sequential=True), uniform_plan(blocks, parse_pattern("50%"))
        list(prune_blocks(model, batches(), method, plan, storage=storage))
        found[room], ran[room] = [parameter.detach().clone() for parameter in model.parameters()], mine
        assert set(storage._taken.values()) == {0}
        assert (storage.most_written > 0) == (not room)
    assert all(torch.equal(one, two) for one, two in zip(*found.values(), strict=True))
    once = (len(blocks) - 1) * len(batches())
    readers = blocks[0].architecture.groups[-2]
    # The first batch's pass goes on to where attention ends, to see that it can be recalled: its writer runs once more.
    assert ran[True] == {
        name: once + (len(blocks) - 1 if name in blocks[0].architecture.residual_writers[:1] else 0)
        for name in blocks[0].layers
    }
    assert ran[False] == ran[True] | dict.fromkeys(readers, 2 * once)


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_part_that_is_not_what_the_table_says(family: str) -> None:
    """A feed-forward's readers are spared only where its writer is seen to read their activation."""
    block, inputs = entered(family)
    readers, (writer,) = block.architecture.groups[-2:]

    def seen(layer: str) -> list[CacheableModule]:
        with find_skippable(block, layer) as found:
            block(inputs.pruned[0], inputs.calls(block)[0])
        return found

    assert seen(writer) == [CacheableModule(writer, writer, skippable=readers)]
    assert seen(readers[0]) == seen(block.architecture.residual_writers[0]) == []
    setattr(
        block.module if family == "opt" else block.module_of("mlp"), "activation_fn" if family == "opt" else "act_fn", nn.Tanh()
    )
    assert seen(writer) == []
