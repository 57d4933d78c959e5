"""The walk through the blocks against an ordinary forward pass, and which blocks and layers a run takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from sparsellm.activations.streams import CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.errors import InvalidSetting, NonFinite, UnsupportedModel
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.fields import select_blocks
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.patterns import NM, Pattern, Unstructured
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.pruning import prune_blocks, walk

SHARED = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GATED = {**SHARED, "intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "opt": partial(OPTConfig, **SHARED, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2),
    "opt-post-norm": partial(OPTConfig, **SHARED, ffn_dim=64, word_embed_proj_dim=16, init_std=0.2, do_layer_norm_before=False),
    "llama": partial(LlamaConfig, **GATED),
    "mistral": partial(MistralConfig, **GATED, sliding_window=4),
    "qwen2": partial(Qwen2Config, **GATED),
    "qwen2-sliding": partial(Qwen2Config, **GATED, use_sliding_window=True, sliding_window=4, layer_types=MIXED),
    "qwen3": partial(Qwen3Config, **GATED, head_dim=16),
    "qwen3-sliding": partial(Qwen3Config, **GATED, head_dim=16, use_sliding_window=True, sliding_window=4, layer_types=MIXED),
}


def tiny(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of three blocks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
    assert model.config._attn_implementation == attention
    return model.to(dtype).eval()


def batches() -> list[Tensor]:
    """Three batches of different numbers of sequences and different lengths, longer than the sliding window."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, shape, generator=generator) for shape in ((2, 12), (1, 7), (3, 12))]


def hooked_inputs(model: PreTrainedModel) -> list[list[Tensor]]:
    """What enters each block, by block and batch, in ordinary forward passes."""
    entered: list[list[Tensor]] = []

    def recorder(seen: list[Tensor]) -> Callable[..., None]:
        return lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).clone())

    hooks = []
    for block in blocks_of(model):
        entered.append([])
        hooks.append(block.module.register_forward_pre_hook(recorder(entered[-1]), with_kwargs=True))
    with torch.no_grad():
        for batch in batches():
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return entered


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_walk_sees_what_the_model_computes(name: str, attention: str) -> None:
    """Every block's inputs on the walk are bit for bit those of an ordinary forward pass, windows included."""
    model = tiny(name, attention)
    wanted = hooked_inputs(model)
    visited = 0
    for block, inputs in walk(model, batches()):
        assert len(inputs.pruned) == 3
        for got, entered in zip(inputs.pruned, wanted[block.index], strict=True):
            assert torch.equal(got, entered)
        visited += 1
    assert visited == 3
    again = hooked_inputs(model)  # the model itself is as before
    assert all(torch.equal(a, b) for one, other in zip(wanted, again, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["mistral", "qwen2-sliding", "qwen3-sliding"])
def test_the_window_matters_here(name: str) -> None:
    """The sliding windows of these models do change what the blocks compute, or the test above would show nothing."""
    sliding, full = tiny(name), tiny(name)
    full.config.sliding_window = 64
    assert not torch.equal(hooked_inputs(sliding)[-1][0], hooked_inputs(full)[-1][0])


def test_changes_to_a_block_travel_on() -> None:
    """What the caller does to a block on the walk is in the inputs of the next, as in the changed model's own pass."""
    model, changed = tiny("llama"), tiny("llama")
    with torch.no_grad():
        for block in blocks_of(changed):
            block.layer("mlp.down_proj").weight.mul_(0.5)
    wanted = hooked_inputs(changed)
    for block, inputs in walk(model, batches()):
        assert all(torch.equal(a, b) for a, b in zip(inputs.pruned, wanted[block.index], strict=True))
        with torch.no_grad():
            block.layer("mlp.down_proj").weight.mul_(0.5)


def test_stop_and_watch() -> None:
    """`stop` ends the walk; `watch` shows flattened inputs and outputs of layers, runs no further, leaves no hook behind."""
    model = tiny("opt")
    assert [block.index for block, _ in walk(model, batches(), stop=2)] == [0, 1]
    block, inputs = next(walk(model, batches()))
    read: list[Tensor] = []
    written: list[Tensor] = []
    ran: list[str] = []
    before = [hidden.clone() for hidden in inputs.pruned]
    for name, layer in block.layers.items():
        layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    for captured in inputs.run(block, CaptureRequest(["fc1"], ["fc1"])):
        read.append(captured.inputs["fc1"])
        written.append(captured.outputs["fc1"])
    assert [(tuple(x.shape), tuple(y.shape)) for x, y in zip(read, written, strict=True)] == [
        ((n, 32), (n, 64)) for n in (24, 7, 36)
    ]
    assert all(torch.allclose(block.layer("fc1")(x), y, atol=1e-5) for x, y in zip(read, written, strict=True))
    assert "fc2" not in ran
    ran.clear()
    captures = list(inputs.run(block, CaptureRequest(["fc1", "self_attn.q_proj"])))
    assert [{name: len(x) for name, x in captured.inputs.items()} for captured in captures] == [
        {"fc1": count, "self_attn.q_proj": count} for count in (24, 7, 36)
    ]
    assert "fc1" not in ran
    assert all(torch.equal(a, b) for a, b in zip(inputs.pruned, before, strict=True))
    assert not block.layer("fc1")._forward_pre_hooks
    assert len(block.layer("fc1")._forward_hooks) == 1


def test_passes_end_where_nothing_more_is_asked_for() -> None:
    """A layer whose inputs alone are asked for does not run; where nothing is, nothing does; each stream has its own block."""
    model = tiny("opt")
    block, inputs = next(walk(model, batches(), needs_dense_stream=True))
    assert inputs.dense_block is not None
    with torch.no_grad():
        block.layer("self_attn.out_proj").weight.zero_()
    ran: list[str] = []
    for which, some in (("pruned", block), ("dense", inputs.dense_block)):
        for name, layer in some.layers.items():
            layer.register_forward_hook(lambda *_, name=name, which=which: ran.append(f"{which} {name}"))
    asked = CaptureRequest(["fc1"], ["self_attn.out_proj"])
    pairs = list(inputs.run_paired(block, asked, CaptureRequest()))
    assert set(ran) == {f"pruned self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    for (pruned, dense), hidden in zip(pairs, inputs.dense or [], strict=True):
        assert torch.equal(
            pruned.outputs["self_attn.out_proj"], block.layer("self_attn.out_proj").bias.expand(len(hidden.flatten(0, 1)), -1)
        )
        assert (list(pruned.inputs), dense.inputs, dense.outputs, dense.block_output) == (["fc1"], {}, {}, None)
        assert torch.equal(dense.block_input, hidden.flatten(0, 1))
    assert inputs.dense_block is not None


@pytest.mark.parametrize("family", ["opt", "llama", "qwen2-sliding"])
def test_a_stream_may_travel_on_while_it_is_watched(family: str) -> None:
    """Where blocks stay as they are one pass shows and moves; each next block is entered by the same numbers, once."""
    entered: dict[bool, list[list[Tensor]]] = {False: [], True: []}
    for onward, seen in entered.items():
        model, ran = tiny(family), [0]
        for block, inputs in walk(model, batches()):
            seen.append([hidden.clone() for hidden in inputs.pruned])
            block.module.register_forward_pre_hook(lambda *_, ran=ran: ran.__setitem__(0, ran[0] + 1))
            captures = list(inputs.run(block, CaptureRequest(list(block.layers)[-1:]), advance=onward))
            assert len(captures) == len(batches())
        passes = 3 if onward else 5  # of three blocks: the last one's output is nobody's
        assert ran == [passes * len(batches())]
    assert all(torch.equal(a, b) for one, other in zip(*entered.values(), strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("last", [False, True])
def test_the_dense_stream_travels_on_with_its_last_pass(last: bool) -> None:
    """It is then where it would have been by itself, to the bit, and no teacher is left; else it stays where it was."""
    walked = [walk(tiny("llama"), batches(), needs_dense_stream=True) for _ in range(2)]
    (block, inputs), (_, other) = (next(some) for some in walked)
    before = list(inputs.dense or [])
    for (_, dense), entered in zip(
        inputs.run_paired(block, CaptureRequest(), CaptureRequest(outputs=["mlp.down_proj"]), advance_dense=last),
        before,
        strict=True,
    ):
        assert torch.equal(dense.block_input, entered.flatten(0, 1))
        assert (dense.block_output is not None) == last
    assert (inputs.dense_block is None) == last
    if last:
        other.advance_dense()
    assert all(torch.equal(a, b) for a, b in zip(inputs.dense or [], other.dense or [], strict=True))
    inputs.advance_dense()
    if not last:
        other.advance_dense()
    assert all(torch.equal(a, b) for a, b in zip(inputs.dense or [], other.dense or [], strict=True))


def test_a_whole_pass_is_checked() -> None:
    """What is not finite is found where it arises, also in the pass that takes the dense stream onward."""
    model = tiny("opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc2.weight[0] = float("inf")
    block, inputs = next(walk(model, batches(), needs_dense_stream=True))
    with pytest.raises(NonFinite, match=r"layers\.0\.fc2 is not finite"):
        list(inputs.run_paired(block, CaptureRequest(), CaptureRequest(), advance_dense=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_the_callers_own(enabled: bool) -> None:
    """Between the yields of walk and prune_blocks the caller's grad mode holds, also after a loop left early."""
    model = tiny("llama")
    plan = uniform_plan(blocks_of(model), Unstructured(0.5))
    with torch.set_grad_enabled(enabled):
        for _, inputs in walk(model, batches()):
            assert torch.is_grad_enabled() == enabled
            assert not any(hidden.requires_grad for hidden in inputs.pruned)
        for _ in prune_blocks(model, batches(), LayerWise(Wanda()), plan):
            assert torch.is_grad_enabled() == enabled
        for _ in walk(model, batches()):
            break
        assert torch.is_grad_enabled() == enabled


@pytest.mark.parametrize("fails", [False, True])
def test_forwards_are_restored(fails: bool) -> None:
    """After learning the calls every block's forward is its own again, or the one that a library had put there."""
    model = tiny("opt")
    modules = [block.module for block in blocks_of(model)]
    wrapped = modules[1].forward = partial(modules[1].forward)
    with pytest.raises(UnsupportedModel, match="IndexError") if fails else nullcontext():
        Activations.from_model(model, blocks_of(model), [torch.full((1, 4), 10_000)] if fails else batches())
    assert modules[1].__dict__["forward"] is wrapped
    assert all("forward" not in module.__dict__ for module in (modules[0], modules[2]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_training_mode_is_restored(training: bool, early: bool) -> None:
    """Pruning runs without dropout and gives the model back in the mode it came in, also when stopped early."""
    model, evaluated = tiny("opt").train(training), tiny("opt")
    for each in (model, evaluated):
        steps = prune_blocks(each, batches(), LayerWise(SparseGPT()), uniform_plan(blocks_of(each), NM(2, 4)))
        for _ in steps:
            assert not each.training
            if early:
                break
        steps.close()
    assert model.training == training
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), evaluated.parameters(), strict=True))


@pytest.mark.parametrize("method", [LayerWise(SparseGPT()), Algorithm1(SparseGPT(), epochs=2)])
@pytest.mark.parametrize("name", ["opt", "qwen2-sliding"])
def test_bf16_models_stay_bf16(name: str, method: LayerWise | Algorithm1) -> None:
    """Parameters and hidden states keep their dtype; no group loses a zero on the way to bf16."""
    model = tiny(name, dtype=torch.bfloat16)
    plan = uniform_plan(blocks_of(model), NM(2, 4))
    list(prune_blocks(model, batches(), method, plan))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for _, inputs in walk(model, batches()):
        assert all(hidden.dtype == torch.bfloat16 for hidden in inputs.pruned)
    for full in plan:
        groups = model.get_submodule(full).weight.view(-1, 4)
        assert bool(((groups == 0).sum(1) >= 2).all())


@pytest.mark.parametrize("name", CONFIGS)
def test_pruning_leaves_the_tied_head_alone(name: str) -> None:
    """Planned layers lose their share; the head, embedding, norms and biases keep every bit, and the tie."""
    model, dense = tiny(name), tiny(name)
    plan = uniform_plan(blocks_of(model), Unstructured(0.6))
    assert len(plan) == 3 * (6 if name.startswith("opt") else 7)
    assert not any("lm_head" in full for full in plan)
    list(prune_blocks(model, batches(), LayerWise(Wanda()), plan))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for (full, parameter), before in zip(model.named_parameters(), dense.parameters(), strict=True):
        if full.removesuffix(".weight") in plan:
            assert int((parameter == 0).sum()) == round(0.6 * parameter.numel()), full
        else:
            assert torch.equal(parameter, before), full


def test_magnitude_needs_no_text() -> None:
    """A method without needs prunes without batches, and its results say that nothing was known."""
    model = tiny("llama")
    plan = uniform_plan(blocks_of(model), Unstructured(0.5), chosen=frozenset({1}))
    steps = list(prune_blocks(model, [], LayerWise(Magnitude()), plan))
    assert len(steps) == 8
    assert {step.known for step in steps[:-1]} == {"TokenCount"}
    assert list(prune_blocks(model, [], LayerWise(SparseGPT()), {})) == []


def test_non_finite_activations_name_their_layer() -> None:
    """Infinity in a layer's output stops the walk and names the layer."""
    model = tiny("llama")
    with torch.no_grad():
        blocks_of(model)[1].layer("mlp.down_proj").weight.fill_(float("inf"))
    with pytest.raises(NonFinite, match=r"model\.layers\.1\.mlp\.down_proj .*float32"):
        list(walk(model, batches()))


def test_blocks_chosen() -> None:
    """Words, ranges and lists."""
    for text, count, chosen in (
        ("all", 4, {0, 1, 2, 3}), ("none", 4, set()), ("first-half", 4, {0, 1}), ("first-half", 5, {0, 1}),
        ("0:2", 4, {0, 1}), (":2", 4, {0, 1}), ("2:", 4, {2, 3}), (":", 4, {0, 1, 2, 3}), ("3", 4, {3}),
        ("0,3", 4, {0, 3}), (" 0 , 2:4 ", 4, {0, 2, 3}), ("1,1", 4, {1}),
        ("-1", 4, {3}), ("-4", 4, {0}), ("-2:", 4, {2, 3}), (":-1", 4, {0, 1, 2}), ("1:-1", 4, {1, 2}), ("0,-1", 4, {0, 3}),
    ):  # fmt: skip
        assert select_blocks(text, count) == frozenset(chosen), text


def test_blocks_refused() -> None:
    """Blocks that are not there and texts that mean none are refused, with what was got."""
    for text in ("4", "0:5", "2:2", "3:1", "5:", "half", "", "1,", "-5", "-5:", "-1:1", "1.5", "0-2", "1:2:3"):
        with pytest.raises(InvalidSetting, match=rf"`blocks` got {text!r}"):
            select_blocks(text, 4)
    with pytest.raises(InvalidSetting, match="`blocks` got"):
        select_blocks("9" * 5000, 4)  # more digits than Python turns into an integer


def test_plans_by_name() -> None:
    """`include` and `exclude` match full names and their ends; skip wins; `chosen` limits the blocks."""
    blocks = blocks_of(tiny("llama"))
    pattern = Unstructured(0.5)
    assert set(uniform_plan(blocks, pattern, include=["down_proj"])) == {f"model.layers.{i}.mlp.down_proj" for i in range(3)}
    assert set(uniform_plan(blocks, pattern, include=["model.layers.1.self_attn.*"], exclude=["q_proj"])) == {
        f"model.layers.1.self_attn.{name}_proj" for name in "kvo"
    }
    assert len(uniform_plan(blocks, pattern, chosen=frozenset({2}), exclude=["mlp.*"])) == 4
    assert set(uniform_plan(blocks, pattern).values()) == {pattern}


@pytest.mark.parametrize(
    ("pattern", "selection", "named"),
    [
        (Unstructured(0.5), {"include": ["dwn_proj"]}, "`include`.*'dwn_proj'.*'down_proj'"),
        (Unstructured(0.5), {"exclude": ["fc1"]}, "`exclude`.*'fc1'"),
        (NM(3, 5), {}, r"model\.layers\.0\.self_attn\.q_proj .*20 .*3:5"),
        (NM(5, 48), {"chosen": frozenset({2}), "include": ["down_proj"]}, r"^model\.layers\.2\.mlp\.down_proj: 5:48 .*64"),
        (Unstructured(0.5), {"chosen": frozenset()}, "`blocks`"),
        (Unstructured(0.5), {"exclude": ["*"]}, "`exclude`"),
        (Unstructured(0.5), {"include": ["mlp.*"], "exclude": ["mlp.*"]}, "`include`"),
    ],
)
def test_plans_refused(pattern: Pattern, selection: dict[str, Any], named: str) -> None:
    """Names that match nothing, shapes that do not divide (naming the layer), and empty plans are refused."""
    with pytest.raises(InvalidSetting, match=named):
        uniform_plan(blocks_of(tiny("llama")), pattern, **selection)


def test_models_refused() -> None:
    """A body without its head, and layers that are not plain ones."""
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        blocks_of(tiny("llama").model)
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Conv1d(32, 64, 1)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj .*Conv1d"):
        uniform_plan(blocks_of(model), Unstructured(0.5))


@pytest.mark.parametrize("layer", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", None])
def test_the_first_layer_that_overflows_is_named(layer: str | None) -> None:
    """Where the fault is a layer's the message names that layer; else, as for a norm, the block."""
    model = tiny("llama")
    block = blocks_of(model)[1]
    with torch.no_grad():
        (block.layer(layer) if layer else block.module.post_attention_layernorm).weight.fill_(3e38)  # type: ignore[union-attr, operator]
    told = f"model.layers.1.{layer}" if layer else "model.layers.1.mlp.gate_proj"  # what reads the norm overflows first
    with pytest.raises(NonFinite, match=rf"output of {told} is not finite"):
        for _ in walk(model, batches()):
            pass
