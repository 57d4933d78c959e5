"""Attention that runs once: what it wrote is recalled, to the bit, for as long as it writes the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsellm.activations.output_cache import CacheableModule, OutputCache, trace_dataflow
from sparsellm.activations.streams import CaptureRequest, Stream
from sparsellm.activations.walk import Activations
from sparsellm.methods import LayerResult
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.runtime.offload import DEVICE, DISK, OffloadManager
from sparsellm.solvers import Wanda
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.core.integration.test_walk import batches, tiny
from tests.pruning import prune_blocks, walk


def entered(family: str = "opt", **options: Any) -> tuple[Block, Activations]:
    """A first block with what enters it, in two streams."""
    return next(walk(tiny(family, **options), batches(), needs_dense_stream=True))


def cacheable(block: Block, inputs: Activations) -> dict[str, CacheableModule]:
    """The modules of a block that can be cached, by the layer that computes their output."""
    return dict(trace_dataflow(block, inputs.pruned[0], inputs.calls(block)[0]).cacheable)


def new_cache(inputs: Activations, stream: Stream) -> OutputCache:
    """An empty cache, set in the stream."""
    cache = stream.cache = OutputCache(inputs.storage, inputs.local_shapes, stream[0])
    return cache


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "qwen3-sliding"])
def test_passes_with_a_cache_capture_the_same_bits(family: str) -> None:
    """With attention cached, passes and the advance give the same bits, also if the caller modifies what was captured."""
    (block, inputs), (other, plain) = entered(family), entered(family)
    adder, writer = block.architecture.residual_writers
    attention = cacheable(block, inputs)[adder]
    assert (attention.name, attention.writer) == ("self_attn", adder)
    new_cache(inputs, inputs.pruned).record(attention)
    ran: Counter[str] = Counter()
    block.module_of(adder).register_forward_hook(lambda *_: ran.update("a"))
    request = CaptureRequest([writer], ["self_attn", writer])
    for _ in range(3):
        for one, two in zip(inputs.run(block, request), plain.run(other, request), strict=True):
            assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in request.inputs)
            assert all(torch.equal(one.outputs[name], two.outputs[name]) for name in request.outputs)
            one.outputs["self_attn"].zero_()
    inputs.advance(block)
    plain.advance(other)
    assert all(torch.equal(one, two) for one, two in zip(inputs.pruned, plain.pruned, strict=True))
    assert ran == {"a": len(batches())}


def test_cache_memory_is_freed() -> None:
    """When its stream has passed the block, when a module is cached anew, and at the latest when the walk ends."""
    storage = OffloadManager()
    visits = walk(tiny("opt"), batches(), needs_dense_stream=True, storage=storage)
    block, inputs = next(visits)
    attention = cacheable(block, inputs)["self_attn.out_proj"]
    size, before = sum(hidden.numel() * 4 for hidden in inputs.pruned), storage.reserved[DEVICE]
    assert inputs.dense is not None
    caches = [new_cache(inputs, stream) for stream in (inputs.dense, inputs.pruned)]
    for cache in caches:
        cache.record(attention)
    request = CaptureRequest(["fc1"])
    for _ in inputs.run_paired(block, request, request, advance_dense=True):
        assert storage.reserved[DEVICE] == before + 2 * size
    assert inputs.dense.cache is None
    for _ in range(2):
        caches[1].record(attention)
        assert storage.reserved[DEVICE] == before + size
    next(visits)
    visits.close()
    assert set(storage.reserved.values()) == {0}


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("couple", ["none", "feedforward"])
def test_pruning_is_the_same_without(family: str, couple: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight to the bit, and attention runs less often."""
    method = SparseLLM(SparseGPT(), scope=couple, rounds=1 if couple == "feedforward" else None)
    ran: Counter[bool] = Counter()
    found: dict[bool, list[Tensor]] = {}
    for recalls in (True, False):
        model = tiny(family)
        for block in blocks_of(model):
            block.module_of("self_attn.q_proj").register_forward_hook(lambda *_, recalls=recalls: ran.update([recalls]))
        if not recalls:
            monkeypatch.setattr(OutputCache, "_add", lambda *_, **__: None)
        list(prune_blocks(model, batches(), method, uniform_plan(blocks_of(model), parse_pattern("60%"))))
        found[recalls] = [parameter.detach().clone() for parameter in model.parameters()]
    assert all(torch.equal(one, two) for one, two in zip(*found.values(), strict=True))
    assert ran[True] < ran[False]


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_what_cannot_be_recalled(family: str) -> None:
    """Modules that return more, that hold later layers, or that are none."""
    block, inputs = entered(family, attention="eager")
    adder, writer = block.architecture.residual_writers
    assert adder not in cacheable(block, inputs)  # it returns the attention weights too
    block, inputs = entered(family)
    assert "self_attn.q_proj" not in cacheable(block, inputs)
    assert cacheable(block, inputs)[writer].name == writer  # not "mlp": its input projections need not run either
    block.module_of("self_attn").register_forward_hook(lambda _, __, output: (2 * output[0], None))
    assert adder not in cacheable(block, inputs)  # its output is not that of its last layer


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3-sliding"])
def test_true_sequential_order(family: str) -> None:
    """Group by group on what the pruned groups before it let through, as plain passes of the whole block find it."""
    found, plain = tiny(family), tiny(family)
    pattern, solver = parse_pattern("60%"), SparseGPT()
    method = TrueSequential(solver)
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
        method, plan = TrueSequential(Wanda()), uniform_plan(blocks, parse_pattern("50%"))
        for _ in prune_blocks(model, batches(), method, plan, storage=storage):
            assert (storage.reserved[DISK] > 0) == (not room)
        found[room], ran[room] = [parameter.detach().clone() for parameter in model.parameters()], mine
        assert set(storage.reserved.values()) == {0}
    assert all(torch.equal(one, two) for one, two in zip(*found.values(), strict=True))
    once = (len(blocks) - 1) * len(batches())
    readers = blocks[0].architecture.groups[-2]
    traced = {name: once + len(blocks) - 1 for name in blocks[0].layers}  # one batch more, to trace the block's dataflow
    assert ran[True] == traced
    assert ran[False] == traced | {name: traced[name] + once for name in readers}


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_part_that_is_not_what_the_table_says(family: str) -> None:
    """A feed-forward's readers are spared only where its writer is seen to read their activation."""
    block, inputs = entered(family)
    readers, (writer,) = block.architecture.groups[-2:]
    assert cacheable(block, inputs)[writer] == CacheableModule(writer, writer, skippable=readers)
    assert readers[0] not in cacheable(block, inputs)
    setattr(
        block.module if family == "opt" else block.module_of("mlp"), "activation_fn" if family == "opt" else "act_fn", nn.Tanh()
    )
    assert writer not in cacheable(block, inputs)
