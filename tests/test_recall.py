"""Attention that runs once: what it wrote is recalled, to the bit, for as long as it writes the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsellm.activations import Activations
from sparsellm.allocation import uniform
from sparsellm.blocks import Block, blocks_of
from sparsellm.looks import Asked
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.patterns import parse_pattern
from sparsellm.refinement import Descent
from sparsellm.sequential import prune_blocks, walk
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.storage import Storage
from tests.test_walk import batches, tiny


def entered(family: str = "opt", **options: Any) -> tuple[Block, Activations]:
    """A first block with what enters it, in two streams."""
    return next(walk(tiny(family, **options), batches(), teacher=True))


@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "qwen3-sliding"])
def test_passes_are_the_same_to_the_bit(family: str) -> None:
    """With attention recalled a pass shows what it did, and the stream goes where it went, also if someone writes into what
    they are given; attention itself runs once a batch."""
    (block, inputs), (other, plain) = entered(family), entered(family)
    adder, writer = block.architecture.adders
    assert inputs.alone(adder) == "self_attn"
    inputs.remember("self_attn", dense=False)
    ran: Counter[str] = Counter()
    block.run(adder).register_forward_hook(lambda *_: ran.update("a"))
    asked = Asked([writer], ["self_attn", writer])
    for _ in range(3):
        for (one, _), (two, _) in zip(inputs.pairs(block, asked, Asked()), plain.pairs(other, asked, Asked()), strict=True):
            assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in asked.reads)
            assert all(torch.equal(one.outputs[name], two.outputs[name]) for name in asked.writes)
            one.outputs["self_attn"].zero_()
    for some, its in ((inputs, block), (plain, other)):
        some.advance(its)
    assert all(torch.equal(one, two) for one, two in zip(inputs.pruned, plain.pruned, strict=True))
    assert ran == {"a": len(batches())}


def test_it_is_forgotten() -> None:
    """When its stream is behind the block, when the caller says so, and at the latest with the walk; its room is given back."""
    storage = Storage()
    visits = walk(tiny("opt"), batches(), teacher=True, storage=storage)
    block, inputs = next(visits)
    stream, before = sum(hidden.numel() * 4 for hidden in inputs.pruned), storage.most_kept
    for dense in (True, False):
        inputs.remember("self_attn", dense)
    list(inputs.pairs(block, Asked(["fc1"]), Asked(["fc1"], whole=True)))
    assert storage.most_kept == before + 2 * stream
    for _ in range(2):
        inputs.remember("self_attn", dense=False)
    assert storage.most_kept == before + 2 * stream
    next(visits)
    visits.close()
    assert set(storage._taken.values()) == {0}


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("couple", ["none", "feedforward", "block"])
def test_pruning_is_the_same_without(family: str, couple: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight to the bit, also where gradient steps move attention itself, and attention runs less often."""
    method = SparseLLM(SparseGPT(), couple=couple, newton=1, refine=Descent(4 if couple == "block" else 0, 1e-2))
    ran: Counter[bool] = Counter()
    found: dict[bool, list[Tensor]] = {}
    for recalls in (True, False):
        model = tiny(family)
        for block in blocks_of(model):
            block.run("self_attn.q_proj").register_forward_hook(lambda *_, recalls=recalls: ran.update([recalls]))
        if not recalls:
            monkeypatch.setattr(Activations, "alone", lambda self, writer: None)
        list(prune_blocks(model, batches(), method, uniform(blocks_of(model), parse_pattern("60%"))))
        found[recalls] = [parameter.detach().clone() for parameter in model.parameters()]
    assert all(torch.equal(one, two) for one, two in zip(*found.values(), strict=True))
    assert ran[True] < ran[False]


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_what_cannot_be_recalled(family: str) -> None:
    """Modules that return more, that hold later layers, or that are none."""
    block, inputs = entered(family, attention="eager")
    adder, writer = block.architecture.adders
    assert inputs.alone(adder) is None  # it returns the attention weights too
    block, inputs = entered(family)
    assert inputs.alone("self_attn.q_proj") is None
    assert inputs.alone(writer) == ("mlp" if family == "llama" else None)
    block.run("self_attn").register_forward_hook(lambda _, __, output: (2 * output[0], None))
    assert inputs.teacher is not None
    inputs.teacher.run("self_attn").register_forward_hook(lambda _, __, output: (2 * output[0], None))
    assert inputs.alone(adder) is None  # what it writes is not what its last layer writes
