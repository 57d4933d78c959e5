"""The whole model's stage: predictions nearer to the dense model's, masks held."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from sparsellm.extensions.recover.training import generation
from sparsellm.extensions.recover.training.distillation import Group, distill, group_batches, last_states
from sparsellm.extensions.recover.training.generation import generate_samples, preallocate, preallocated_layer
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.methods import Plan, TrainingResult
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Wanda
from sparsellm.solvers.patterns import parse_pattern
from tests.pruning import prune_blocks

every_family = pytest.mark.parametrize("family", ["opt", "opt-projected", "llama"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of three blocks with a tied head, whose weights are large enough to matter, and random biases."""
    torch.manual_seed(0)
    shared = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 3, "max_position_embeddings": 32}
    shared |= {"num_attention_heads": 2, "tie_word_embeddings": True}
    if family.startswith("opt"):
        width = 8 if family == "opt-projected" else 16
        model: PreTrainedModel = OPTForCausalLM(OPTConfig(**shared, ffn_dim=32, word_embed_proj_dim=width, init_std=0.25))
    else:
        sizes = {"num_key_value_heads": 1, "initializer_range": 0.25, "intermediate_size": 24}
        model = LlamaForCausalLM(LlamaConfig(**shared, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


@cache
def batches() -> list[Tensor]:
    """Eight batches of four sequences of twelve random tokens."""
    return list(torch.randint(0, 48, (32, 12), generator=torch.Generator().manual_seed(1)).split(4))


def alone(some: Sequence[Tensor]) -> list[Group]:
    """Groups of one batch each."""
    return [(batch,) for batch in some]


def divergence(dense: PreTrainedModel, model: PreTrainedModel, batch: Tensor) -> float:
    """KL(dense || model), nats a token, of a batch, both computed in float32."""
    with torch.no_grad():
        wanted, found = (
            copy.deepcopy(each).float().eval()(input_ids=batch).logits.flatten(0, 1).double().log_softmax(-1)
            for each in (dense, model)
        )
    return float(kl_div(found, wanted, log_target=True, reduction="batchmean"))


def distilled(
    family: str, descent: MaskedAdam, dtype: torch.dtype = torch.float32, **choice: object
) -> tuple[PreTrainedModel, PreTrainedModel, Plan, TrainingResult, tuple[str, ...]]:
    """A fresh model as it was pruned, and after its stage; the plan, what was gained, and what moved."""
    model = tiny(family, dtype)
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"), **choice)  # type: ignore[arg-type]
    states = last_states(model, alone(batches()), torch.float32)
    list(prune_blocks(model, batches(), LayerWise(Wanda()), plan, torch.float32))
    before = copy.deepcopy(model)
    found, moved = distill(model, alone(batches()), states, plan=plan, adam=descent)
    return before, model, plan, found, moved


@every_dtype
@every_family
def test_the_divergence_falls(family: str, dtype: torch.dtype) -> None:
    """What is told is the KL divergence of the held-back batch, before and after, and it falls by a fifth at least."""
    dense = tiny(family, dtype)
    before, model, _, found, _ = distilled(family, MaskedAdam(60, 3e-3), dtype)
    assert found.before == pytest.approx(divergence(dense, before, batches()[-1]), rel=1e-3)
    rounding = 1e-3 if dtype == torch.float32 else 0.05  # the weights are rounded after the last look
    assert found.after == pytest.approx(divergence(dense, model, batches()[-1]), rel=rounding)
    assert found.after < 0.8 * found.before
    assert 0 < found.steps <= 60
    assert found.note == ""


def test_activations_are_computed_again_in_the_backward_pass() -> None:
    """A step runs each block twice, which is what gradient checkpointing costs; a validation runs it once."""
    model, calls = tiny("llama"), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    states = last_states(model, alone(batches()), torch.float32)
    list(prune_blocks(model, batches(), LayerWise(Wanda()), plan, torch.float32))
    model.model.layers[1].mlp.gate_proj.register_forward_hook(count)
    distill(model, alone(batches()), states, plan=plan, adam=MaskedAdam(3, 1e-3), held_out=1)
    assert calls == 1 + 3 * (2 + 1)  # the first validation, and after each of three steps another


@every_dtype
@every_family
def test_what_moves_and_what_stays(family: str, dtype: torch.dtype) -> None:
    """Masks hold exactly, and planned weights move; other blocks, dense layers, embeddings and head keep every bit.

    Biases and norms of the planned blocks may move, and are told; dtypes, the tie, the mode and gradients are as before.
    """
    choice = {"chosen": frozenset({0, 2}), "exclude": ["k_proj"]}
    before, model, plan, _, moved = distilled(family, MaskedAdam(30, 3e-3), dtype, **choice)
    again = distilled(family, MaskedAdam(30, 3e-3), dtype, **choice)[1]
    changed = set[str]()
    for (name, one), other, same in zip(model.named_parameters(), before.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same), name
        assert one.dtype == dtype
        assert one.requires_grad
        assert one.grad is None
        layer, equal = name.rsplit(".", 1)[0], torch.equal(one, other)
        if layer in plan and one.ndim == 2:
            assert not equal, name
            assert torch.equal(one == 0, other == 0), name
            assert int((one == 0).sum()) == round(0.6 * one.numel())
        elif one.ndim == 2 or "k_proj" in name or not any(f"layers.{index}." in name for index in (0, 2)):
            assert equal, name
        elif not equal:
            changed.add(name)
    assert set(moved) == changed
    assert any("norm" in name for name in changed)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.training
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks


@every_dtype
@pytest.mark.parametrize("descent", [MaskedAdam(0, 1e-3), MaskedAdam(3, 30.0)], ids=["no steps", "steps much too long"])
def test_where_nothing_is_gained_nothing_moves(descent: MaskedAdam, dtype: torch.dtype) -> None:
    """Without steps, and where no look is better than the start, every parameter keeps every bit."""
    before, model, _, found, moved = distilled("opt", descent, dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert (found.steps, moved, found.note) == (0, (), "")
    assert found.after == found.before


def test_one_group_is_told() -> None:
    """With one group there is none to hold back: nothing moves, and the note says so."""
    model = tiny("opt")
    dense = copy.deepcopy(model)
    states = last_states(model, alone(batches()[:1]))
    plan = uniform_plan(blocks_of(model), parse_pattern("50%"))
    found, moved = distill(model, alone(batches()[:1]), states, plan=plan, adam=MaskedAdam(5, 1e-2))
    assert "only one group" in found.note
    assert moved == ()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))


@every_family
def test_last_states(family: str) -> None:
    """The head makes of them the model's own logits, without dropout; the model stays in its mode and dtype."""
    model = tiny(family, torch.bfloat16)
    states = last_states(model, alone(batches()), torch.float32)
    assert len(states) == len(batches())
    wide = copy.deepcopy(model).float().eval()
    with torch.no_grad():
        for (state,), batch in zip(states, batches(), strict=True):
            assert torch.equal(wide.get_output_embeddings()(state), wide(input_ids=batch).logits)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@every_family
def test_the_dense_model_writes(family: str) -> None:
    """Windows begin with stretches of the given ones and go on as the model predicts; the same seed, the same text; the
    caller's own random numbers and the model are as before."""
    model, given = tiny(family).train(), torch.cat(batches())
    state = torch.get_rng_state()
    done: list[float] = []
    one, again, other = (
        generate_samples(model, given, 70, seed=seed, progress=lambda now, total: done.append(now)) for seed in (5, 5, 6)
    )
    steps = len(done) // 6  # three times a batch of 64 sequences and one of 6
    tokens = [step / steps for step in range(1, steps + 1)]
    assert done[: 2 * steps] == pytest.approx([64 * share for share in tokens] + [64 + 6 * share for share in tokens])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert one.shape == (70, 12)
    assert one.dtype == given.dtype
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    long = generate_samples(model, given[:2].repeat(1, 2)[:, :24], 40, seed=1)  # three tokens of each are given
    stretches = {tuple(row[start : start + 3].tolist()) for row in given[:2].repeat(1, 2) for start in range(22)}
    assert {tuple(row[:3].tolist()) for row in long} <= stretches
    assert len({tuple(row[:3].tolist()) for row in long}) > 10
    assert generate_samples(model, given, 0).shape == (0, 12)


def test_what_is_written_follows_the_predictions() -> None:
    """Of two possible tokens, one of which ends a text, the model writes one three times as often as the other."""
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.lm_head.weight = nn.Parameter(torch.zeros(48, 16))
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight = nn.Parameter(torch.ones(48, 16))
        model.lm_head.weight[2] = 2.0  # 2 ends a text in this family
        model.lm_head.weight[9] = 2.0 + math.log(3) / 16  # the last states are ones
    text = generate_samples(model, torch.full((1, 16), 7), 200)
    assert (text[:, :2] == 7).all()
    assert set(text[:, 2:].unique().tolist()) == {2, 9}
    assert abs(float((text[:, 2:] == 9).double().mean()) - 0.75) < 0.03


@every_family
def test_keys_and_values_are_written_in_place(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of transformers' own cache, which stays where its layers are of another kind."""
    given, caches = torch.cat(batches()), []

    def observe(cache: Cache, length: int) -> None:
        preallocate(cache, length)
        caches.append(cache)

    monkeypatch.setattr(generation, "preallocate", observe)
    text = generate_samples(tiny(family), given, 70)
    for grown, size in zip(caches, (64, 6), strict=True):
        assert [type(layer) for layer in grown.layers] == [preallocated_layer()] * 3
        for layer in grown.layers:
            assert layer.keys.shape[0] == size
            assert layer.keys.shape[2] == 11  # the last token has no successor
            assert layer.keys.untyped_storage().nbytes() == layer.keys[:, :, :1].numel() * 12 * 4
    monkeypatch.setattr(generation, "preallocate", lambda cache, length: None)
    assert torch.equal(text, generate_samples(tiny(family), given, 70))
    config = MistralConfig(num_hidden_layers=2, sliding_window=4)
    sliding = DynamicCache(config=config)
    keys = torch.ones(1, 1, 2, 8)
    sliding.update(keys, keys, 0)
    preallocate(sliding, 12)
    assert [type(layer) for layer in sliding.layers] == [DynamicSlidingWindowLayer] * 2


def test_generated_text_is_held_out() -> None:
    """An eighth as many sequences as there are calibration sequences, the last ones; all of them are there once."""
    real, more = torch.arange(32).reshape(16, 2), torch.arange(32, 42).reshape(5, 2)
    found, back = group_batches(real, more, 3, 3)
    assert back == 1
    assert torch.equal(found[-1][0], more[-2:])
    assert torch.equal(torch.cat([batch for group in found for batch in group]), torch.cat([more[:-2], real, more[-2:]]))
    assert [[len(batch) for batch in group] for group in found] == [[3], [3], [3], [3], [3], [3], [1], [2]]
    found, back = group_batches(real, more, 3, 2)
    assert [[len(batch) for batch in group] for group in found] == [*([[2, 1]] * 6), [1], [2]]


def test_calibration_text_is_held_out_where_too_little_is_generated() -> None:
    """The last eighth of the calibration sequences stands last."""
    real, more = torch.arange(32).reshape(16, 2), torch.arange(32, 34).reshape(1, 2)
    found, back = group_batches(real, more, 3, 3)
    assert back == 1
    assert torch.equal(found[-1][0], real[-2:])
    assert torch.equal(torch.cat([batch for group in found for batch in group]), torch.cat([more, real]))
    found, back = group_batches(torch.cat([real] * 8), more[:0], 12, 12)
    assert ([len(batch) for (batch,) in found], back) == ([12] * 9 + [4, 12, 4], 2)
    found, back = group_batches(real[:1], more, 8, 8)
    assert ([len(batch) for (batch,) in found], back) == ([1, 1], 1)


def test_a_step_in_pieces() -> None:
    """What a step reads may be computed batch by batch: the same loss, and the same weights, to rounding."""
    found = []
    for batch in (6, 4, 1):
        dense, pruned = tiny("llama"), tiny("llama")
        plan = shrunk(pruned)
        groups, back = group_batches(torch.cat(batches()), torch.cat(batches())[:0], 6, batch)
        result, _ = distill(pruned, groups, last_states(dense, groups), plan=plan, adam=MaskedAdam(20, 1e-3), held_out=back)
        assert result.after < result.before
        found.append((result, pruned.state_dict()))
    (one, wanted), *others = found
    for result, weights in others:
        assert (result.before, result.after) == (pytest.approx(one.before, rel=1e-4), pytest.approx(one.after, rel=1e-3))
        assert all(torch.allclose(weights[name], wanted[name], atol=2e-4) for name in wanted)


@pytest.mark.parametrize("back", [1, 3])
def test_how_many_are_held_back(back: int) -> None:
    """The loss before and after is that of the last batches, as many as asked."""
    dense, pruned = tiny("llama"), tiny("llama")
    plan = shrunk(pruned)
    states = last_states(dense, alone(batches()))
    found, _ = distill(pruned, alone(batches()), states, plan=plan, adam=MaskedAdam(0, 1e-3), held_out=back)
    assert found.steps == 0
    found, _ = distill(pruned, alone(batches()), states, plan=plan, adam=MaskedAdam(1, 1e-30), held_out=back)
    wanted = sum(divergence(dense, pruned, batch) for batch in batches()[-back:]) / back
    assert found.before == pytest.approx(wanted, rel=1e-4)


def shrunk(model: PreTrainedModel) -> Plan:
    """A plan of half of every layer's weights, done by magnitude."""
    plan = uniform_plan(blocks_of(model), parse_pattern("50%"))
    with torch.no_grad():
        for name, pattern in plan.items():
            weight = model.get_submodule(name).weight
            weight.mul_(pattern.keep(weight.abs()))
    return plan
