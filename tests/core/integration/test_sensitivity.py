"""What errors cost further down, against exact expectations over labels and explicit Jacobians."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from sparsellm.activations import sensitivity
from sparsellm.activations.backward import sample_labels
from sparsellm.activations.sensitivity import layer_curvatures, output_fisher
from sparsellm.activations.walk import Activations
from sparsellm.errors import UnsupportedModel
from sparsellm.models.blocks import Block, blocks_of
from tests.pruning import loaded

VOCABULARY, WIDTH, LENGTH = 11, 8, 6
WRITERS = {"opt": ("self_attn.out_proj", "fc2"), "llama": ("self_attn.o_proj", "mlp.down_proj")}

every_family = pytest.mark.parametrize("family", ["opt", "llama"])


def tiny(family: str) -> PreTrainedModel:
    """A random model of two blocks, with weights large enough that its predictions are far from even."""
    torch.manual_seed(0)
    shared = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "max_position_embeddings": 32}
    if family == "opt":
        sizes = {"ffn_dim": 16, "num_attention_heads": 2, "word_embed_proj_dim": WIDTH, "init_std": 0.5}
        model: PreTrainedModel = OPTForCausalLM(OPTConfig(**shared, **sizes))
    else:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}
        model = LlamaForCausalLM(LlamaConfig(**shared, **heads, intermediate_size=12))
    return model.eval()


def limit_tokens(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let F and S see this many tokens, whatever the width."""
    monkeypatch.setattr(sensitivity, "SENSITIVITY_TOKENS", count)
    monkeypatch.setattr(sensitivity, "TOKENS_PER_WIDTH", 0)


@cache
def windows(count: int) -> Tensor:
    """Different sequences of random tokens, (count, seq)."""
    return torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))


@contextmanager
def outputs_of(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The outputs of all blocks of the passes within the context."""
    seen: list[Tensor] = []

    def keep(module: object, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.module.register_forward_hook(keep) for block in blocks_of(model)]
    yield seen
    for hook in hooks:
        hook.remove()


@cache
def sampled(family: str) -> list[Tensor]:
    """F by the source, from two sequences seen 1,200 times each."""
    with pytest.MonkeyPatch.context() as patch:
        limit_tokens(patch, 14_400)
        return output_fisher(tiny(family), list(windows(2).repeat(1200, 1).split(240)))


def exact_fisher(family: str) -> list[Tensor]:
    """F of each block's output for these two sequences: every label of every position, by what the model gives it.

    A label's loss reaches all positions before it; labels are independent, so that squares add up.
    """
    model = tiny(family)
    found = [torch.zeros(WIDTH, WIDTH).double() for _ in range(2)]
    for window in windows(2).split(1):
        with outputs_of(model) as states:
            scores = model(input_ids=window).logits[0].log_softmax(-1)
        for position in scores:
            for score in position:
                chance = float(score.detach().exp())
                gradients = torch.autograd.grad(-score, states, retain_graph=True)
                found = [sum_ + chance * (g[0].T @ g[0]).double() for sum_, g in zip(found, gradients, strict=True)]
    return [sum_ / windows(2).numel() for sum_ in found]


def far(got: Tensor, wanted: Tensor) -> float:
    """The relative distance of two matrices."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def test_labels_are_drawn_by_their_shares() -> None:
    """As often as their shares say, to four standard errors; never what has none, at either end; in pieces or not."""
    shares = torch.tensor([0.0, 0.05, 0.4, 0.0, 0.3, 0.25, 0.0])
    labels = sample_labels(shares.expand(100_000, -1), torch.Generator().manual_seed(0))
    found = labels.bincount(minlength=7) / len(labels)
    assert bool(((found - shares).abs() <= 4 * (shares * (1 - shares) / len(labels)).sqrt()).all())
    again = torch.stack([sample_labels(shares.view(1, -1), torch.Generator().manual_seed(7)) for _ in range(2)])
    assert torch.equal(again[0], again[1])


@pytest.mark.parametrize("family", ["opt", pytest.param("llama", marks=pytest.mark.long)])
def test_fisher_against_every_label(family: str) -> None:
    """F is the exact expectation over the model's own labels, but for the sampling (measured: 2 to 4 %)."""
    got, wanted = sampled(family), exact_fisher(family)
    assert len(got) == 2
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, one.T)
        assert far(one, other) < 0.06
        assert float(one.trace()) == pytest.approx(float(other.trace()), rel=0.05)
    assert far(wanted[0], wanted[1]) > 0.3  # one block's could not stand for the other's


@every_family
def test_fisher_is_the_curvature_of_the_divergence(family: str) -> None:
    """The KL divergence that a small error of the last block's outputs causes is half its square in the metric F."""
    model, size = tiny(family), 3e-3
    window, last = windows(2).repeat(100, 1), blocks_of(model)[-1].module
    errors = size * torch.randn(*window.shape, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        dense = model(input_ids=window).logits.double().log_softmax(-1)
        last.register_forward_hook(lambda _, __, out: (out[0] + errors, *out[1:]) if isinstance(out, tuple) else out + errors)
        moved = model(input_ids=window).logits.double().log_softmax(-1)
    divergence = float((dense.exp() * (dense - moved)).sum(-1).mean())
    flat = errors.flatten(0, 1)
    assert divergence == pytest.approx(float(((flat @ sampled(family)[-1]) * flat).sum(1).mean()) / 2, rel=0.1)


@pytest.mark.parametrize("training", [True, False])
@every_family
def test_the_model_is_as_before(family: str, training: bool) -> None:
    """Parameters, what asks for gradients, hooks, forwards and mode are as before; the same call gives the same bits."""
    model, batches = tiny(family).train(training), [windows(4)]
    frozen = [parameter for number, parameter in enumerate(model.parameters()) if number % 3 == 0]
    for parameter in frozen:
        parameter.requires_grad_(False)
    asked = [parameter.requires_grad for parameter in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        one = output_fisher(model, batches)
    with pytest.raises(UnsupportedModel, match="IndexError"):
        output_fisher(model, [torch.full((1, 4), VOCABULARY)])
    assert [parameter.requires_grad for parameter in model.parameters()] == asked
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert module.training == training
    for tolerance, other in ((0.0, [windows(4)]), (1e-4, [windows(4)[:3], windows(4)[3:]])):  # another model; other batches
        for a, b in zip(one, output_fisher(tiny(family), other), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(a.diagonal().mean()))


def test_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit no more windows are looked at; the sums are divided by what was."""
    some = output_fisher(tiny("opt"), [windows(4)[:2]])
    limit_tokens(monkeypatch, 2 * LENGTH - 1)
    limited = output_fisher(tiny("opt"), [windows(4)[:3], windows(4)[3:]])
    for a, b in zip(limited, some, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    one, all_ = (arrived("opt", 0, *windows(4)[:end].split(2)) for end in (2, 4))
    found = [of_layers(inputs, block, ["fc1"], metric())["fc1"] for block, inputs in (one, all_)]
    assert torch.equal(found[0], found[1])


def test_wide_models_take_more_tokens() -> None:
    """F of full rank needs a few tokens for each of its rows."""
    assert [sensitivity.sampled_tokens(width) for width in (256, 1024, 1025, 4096)] == [4096, 4096, 4100, 16384]


@every_family
def test_batches_make_no_difference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However windows are batched, F and S are the same to the bit, also where the limit cuts a batch: masks follow last bits.

    The model is computed in float64, so that what its products round does not reach the sums, which are of float32 products.
    """
    limit_tokens(monkeypatch, 7 * LENGTH)
    found = []
    for size in (1, 3, 8):
        batches = windows(8).split(size)
        block, inputs = arrived(family, 0, *batches, dtype=torch.float64)
        by_layer = of_layers(inputs, block, list(block.layers), metric())
        found.append([*output_fisher(tiny(family).double(), batches), *by_layer.values()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_batches_of_different_lengths() -> None:
    """Sequences of any lengths count by their tokens: a shorter one after another adds its own share to its sum."""
    first = output_fisher(tiny("opt"), [windows(2)[:1]])
    both = output_fisher(tiny("opt"), [windows(2)[:1], windows(2)[1:, :4]])
    for one, other in zip(first, both, strict=True):
        added = ((LENGTH + 4) * other - LENGTH * one).double()
        assert float(added.trace()) > 0
        assert float(torch.linalg.eigvalsh(added)[0]) > -1e-5 * float(added.trace())
        assert torch.linalg.matrix_rank(added, rtol=1e-4) <= 4


@every_family
def test_computed_in_another_dtype(family: str) -> None:
    """A bf16 model computed in float32 gives the float32 model's F, and stays bf16."""
    model = tiny(family).to(torch.bfloat16)
    other = copy.deepcopy(model).float()
    got = output_fisher(loaded(model, torch.float32), [windows(3)])
    wanted = output_fisher(other, [windows(3)])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def arrived(family: str, index: int, *batches: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Block, Activations]:
    """A block, and the streams that enter it."""
    model = tiny(family).to(dtype)
    blocks = blocks_of(model)
    with torch.no_grad():
        inputs = Activations.from_model(model, blocks, batches, streams=([], []))
        for block in blocks[:index]:
            inputs.begin_block(block)
            inputs.advance(block)
    inputs.begin_block(blocks[index])
    return blocks[index], inputs


def metric() -> Tensor:
    """A cost of errors with preferred directions, no two axes alike."""
    root = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) * torch.logspace(-0.5, 0.5, WIDTH)
    return root @ root.T


def exact_sensitivity(block: Block, inputs: Activations, name: str) -> Tensor:
    """S = mean over tokens of the sum of Jᵀ F J over all outputs that the token reaches, J from autograd, for one sequence."""
    assert inputs.dense is not None
    hidden, call = inputs.dense[0][:1].detach(), inputs.calls(block)[0]
    seen: list[Tensor] = []
    with torch.no_grad():
        hook = block.layer(name).register_forward_hook(lambda _, __, output: seen.append(output))
        block(hidden, call)
        hook.remove()

    def behind(output: Tensor) -> Tensor:
        hook = block.layer(name).register_forward_hook(lambda _, __, ___: output)
        result = block(hidden, call)[0]
        hook.remove()
        return result

    wide = jacobian(behind, seen[0]).reshape(LENGTH, WIDTH, LENGTH, -1)  # OPT's layers see (tokens, model)
    costs: Tensor = torch.einsum("satb,ac,sctd->bd", wide, metric(), wide) / LENGTH
    return costs


def of_layers(inputs: Activations, block: Block, names: list[str], weighs: Tensor) -> dict[str, Tensor]:
    """S of a block's layers, as it was, on the dense stream."""
    assert inputs.dense is not None
    assert inputs.dense_block is not None
    calls = inputs.calls(block)
    offsets, window = inputs.offsets, inputs.window
    return layer_curvatures(inputs.dense_block, inputs.dense, calls, names, fisher=weighs, offsets=offsets, window=window)


@cache
def sensitivities(family: str, index: int) -> tuple[Block, Activations, dict[str, Tensor]]:
    """A block, its streams, and S of all its layers by the source, from one sequence seen 2,000 times."""
    block, inputs = arrived(family, index, *windows(1).expand(2000, -1).split(500))
    return block, inputs, of_layers(inputs, block, list(block.layers), metric())


@pytest.mark.parametrize("index", [0, 1])
@every_family
def test_layers_against_jacobians(family: str, index: int) -> None:
    """S of every layer, attention's included, is E[Jᵀ F J], but for the sampling; the readers' S are no multiples of 1."""
    block, inputs, found = sensitivities(family, index)
    assert set(found) == set(block.layers)
    for name, got in found.items():
        wanted = exact_sensitivity(block, inputs, name)
        assert got.dtype == torch.float32
        assert got.shape == (block.layer(name).out_features,) * 2
        assert far(got, wanted) < 0.1, name
        assert far(wanted, wanted.trace() / len(wanted) * torch.eye(len(wanted))) > 0.2, name


@every_family
def test_a_writer_costs_what_its_block_costs(family: str) -> None:
    """The feed-forward writer adds to the stream as it is: its S is F; attention's writer is also read by what follows it."""
    found = sensitivities(family, 0)[2]
    attention, feed_forward = WRITERS[family]
    assert far(found[feed_forward], metric()) < 0.07
    assert far(found[attention], metric()) > 0.2


@every_family
def test_layers_are_asked_on_the_dense_stream(family: str) -> None:
    """The block as it was and the dense stream count, whatever became of the block and its stream; nothing is left behind."""
    batch = windows(5)
    block, inputs = arrived(family, 1, batch)
    one = of_layers(inputs, block, list(block.layers), metric())
    other_block, other = arrived(family, 1, batch)
    with torch.no_grad():
        for parameter in other_block.module.parameters():
            parameter.mul_(0.3)
        other.pruned = [2 * hidden for hidden in other.pruned]
        again = of_layers(other, other_block, list(block.layers)[:-1], metric())
    assert set(again) == set(list(block.layers)[:-1])
    assert all(torch.equal(again[name], one[name]) for name in again)
    assert inputs.dense_block is not None
    for module in inputs.dense_block.module.modules():
        assert not module._forward_hooks
    assert all(parameter.requires_grad and parameter.grad is None for parameter in inputs.dense_block.module.parameters())


@pytest.mark.parametrize("scale", [4.0, 0.0])
def test_layers_scale_with_the_metric(scale: float) -> None:
    """Four times the cost behind is four times the cost before; none is none."""
    block, inputs = arrived("opt", 0, windows(5))
    one, other = (of_layers(inputs, block, ["fc1"], factor * metric())["fc1"] for factor in (1, scale))
    torch.testing.assert_close(other, scale * one, rtol=1e-3, atol=1e-4)
