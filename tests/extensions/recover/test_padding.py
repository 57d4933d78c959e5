"""Padded batches: what is computed from them is computed from their tokens alone, by every method and at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

import sparsellm
from sparsellm.activations.backward import sample_labels
from sparsellm.activations.fisher_diagonal import weight_costs
from sparsellm.activations.sensitivity import layer_curvatures, output_fisher
from sparsellm.activations.walk import walk
from sparsellm.extensions.recover.training.block_training import refine_block
from sparsellm.extensions.recover.training.distillation import distill, group_batches, last_states
from sparsellm.extensions.recover.training.generation import generate_samples
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.methods.feedforward_problem import HELD
from sparsellm.methods.layerwise import LayerWise, collect_statistics
from sparsellm.models.blocks import blocks_of
from sparsellm.observers.events import Note
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import Magnitude
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.statistics import Gram
from sparsellm.texts.in_memory import read_in_memory
from sparsellm.texts.padding import PADDING, sequence_lengths, split_batches, unpadded_batches
from tests.conftest import long_unless
from tests.core.integration.test_sensitivity import outputs_of
from tests.pruning import prune_blocks

VOCABULARY, PAD = 48, 3
LENGTHS = (12, 5, 9, 2, 12, 7, 3, 10, 6, 11, 4, 8)

every_side = pytest.mark.parametrize("side", ["right", "left"])
every_family = pytest.mark.parametrize("family", ["opt", "llama"])


def tiny(family: str) -> PreTrainedModel:
    """A random model of two blocks, with weights large enough that its predictions are far from even, and biases."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
    sizes |= {"num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model: PreTrainedModel
    if family == "opt":
        model = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=16, init_std=0.25, dropout=0.0))
    elif family == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(**sizes, intermediate_size=24, num_key_value_heads=1, initializer_range=0.25, **experts)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=1, initializer_range=0.25))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


@cache
def rows() -> list[Tensor]:
    """Sequences of random tokens, of different lengths; the padding token is among them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(side: str) -> dict[str, Tensor]:
    """The rows as a tokenizer pads them."""
    ids = torch.full((len(LENGTHS), max(LENGTHS)), PAD)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows()):
        place = slice(0, len(row)) if side == "right" else slice(max(LENGTHS) - len(row), None)
        ids[number, place], mask[number, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def batches() -> tuple[Tensor, ...]:
    """The batches that a run makes of the padded rows."""
    windows = read_in_memory(padded("left"), samples=1, seed=0)
    assert isinstance(windows, Tensor)
    return split_batches(windows, 1)


def masked_pass(model: PreTrainedModel, side: str, hooked: dict[str, nn.Module]) -> dict[str, Tensor]:
    """The inputs of modules at the tokens, (tokens, in), in one pass of the padded rows with their mask."""
    batch = padded(side)
    inputs: dict[str, Tensor] = {}
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def record(name: str) -> Callable[..., None]:
        return lambda _, arguments: inputs.__setitem__(
            name, arguments[0].flatten(0, -2)[batch["attention_mask"].flatten().bool()]
        )

    handles = [module.register_forward_pre_hook(record(name)) for name, module in hooked.items()]
    with torch.no_grad():
        model(**batch, position_ids=positions, use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs


@every_side
@every_family
def test_statistics_are_those_of_a_pass_with_the_mask(family: str, side: str) -> None:
    """Gram matrices and root mean squares of every layer equal those at the tokens of one padded pass with its mask."""
    model = tiny(family)
    blocks = blocks_of(model)
    hooked = {block.full_name(name): block.module.get_submodule(name) for block in blocks for name in block.layers}
    inputs = masked_pass(model, side, hooked)
    for block, activations in walk(model, batches()):
        statistics = collect_statistics(block, activations, dict.fromkeys(block.layers, Gram))
        for name, gram in statistics.items():
            x = inputs[block.full_name(name)].double()
            assert gram.tokens == len(x) == sum(LENGTHS)
            assert isinstance(gram, Gram)
            torch.testing.assert_close(gram.matrix.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(gram.rms.double(), x.square().mean(0).sqrt(), rtol=1e-4, atol=1e-6)


METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "wanda": {"method": "wanda"},
    "sparsegpt": {"method": "sparsegpt"},
    "alps": {"method": "alps"},
    "fast-admm": {"method": "fast-admm"},
    "alps-accurate": {"method": "alps-accurate"},
    "sparsellm": {"method": "sparsellm"},
    "published": {"method": "algorithm1"},
    "true-sequential": {"method": "sparsegpt", "settings": {"true_sequential": True}},
    "owl": {"method": "wanda", "allocation": "owl"},
    "fisher": {"method": "sparsegpt", "allocation": "fisher"},
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        long_unless(family == "llama" or name == "sparsellm", family, name)
        for family in ("opt", "llama", "mixtral")
        for name in METHODS
    ],
)
def test_every_method_prunes_as_from_the_rows(family: str, name: str) -> None:
    """A padded batch and a list of its rows give the same weights and errors, to the bit."""
    found: list[tuple[dict[str, Tensor], list[float]]] = []
    for calibration in (padded("left"), rows()):
        model = tiny(family)
        result = sparsellm.prune(model, sparsity="50%", calibration=calibration, **METHODS[name])
        if name != "magnitude" and family != "mixtral":
            held_out = (
                {sum(LENGTHS) - round(HELD * sum(LENGTHS))} if name == "sparsellm" else set()
            )  # for the output projections
            assert {layer.tokens for layer in result.report.layers} == {sum(LENGTHS)} | held_out
        found.append((model.state_dict(), [layer.error for layer in result.report.layers]))
    (weights, errors), (other_weights, other_errors) = found
    assert [key for key, tensor in weights.items() if not torch.equal(other_weights[key], tensor)] == []
    assert other_errors == errors


def test_the_mask_matters() -> None:
    """The same ids without their mask give other weights: the padding counts as tokens then."""
    models = [tiny("llama"), tiny("llama")]
    for model, calibration in zip(models, (padded("right"), padded("right")["input_ids"]), strict=True):
        sparsellm.prune(model, "wanda", calibration=calibration)
    weights = [model.model.layers[1].mlp.down_proj.weight for model in models]
    assert not torch.equal(*(weight != 0 for weight in weights))


@every_family
def test_rows_as_batches_of_their_own(family: str) -> None:
    """`prune_blocks` on the rows, each a batch of its own, is what a run makes of the padded batch."""
    model, other = tiny(family), tiny(family)
    result = sparsellm.prune(model, "alps", calibration=padded("right"))
    plan = {layer.name: layer.pattern for layer in result.report.layers}
    list(prune_blocks(other, [row.unsqueeze(0) for row in rows()], LayerWise(ALPS()), plan))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


@every_family
def test_sensitivities_are_means_over_the_tokens(family: str) -> None:
    """F of each block's output is the mean of g gᵀ over the tokens of all rows, by autograd on each row."""
    model = tiny(family)
    blocks = blocks_of(model)
    wanted = [torch.zeros(16, 16).double() for _ in blocks]
    for number, row in enumerate(rows()):
        with outputs_of(model) as states:
            logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
        labels = sample_labels(logits.detach().softmax(-1), torch.Generator().manual_seed(number))
        gradients = torch.autograd.grad(cross_entropy(logits, labels, reduction="sum"), states)
        for total, gradient in zip(wanted, gradients, strict=True):
            total.add_((gradient[0].T @ gradient[0]).double() / sum(LENGTHS))
    for got, expected in zip(output_fisher(model, batches()), wanted, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-6 + 1e-4 * float(expected.abs().max()))


def test_costs_of_weights_are_means_over_the_tokens() -> None:
    """Fisher costs of a layer: squares of the weight, times the means over all tokens of squared gradients and inputs."""
    model = tiny("llama")
    name = "model.layers.1.mlp.down_proj"
    layer = model.get_submodule(name)
    squares, gradient_squares = torch.zeros(24), torch.zeros(16)
    for number, row in enumerate(rows()):
        kept: list[Tensor] = []
        handle = layer.register_forward_hook(lambda _, inputs, output: kept.extend((inputs[0], output)))  # noqa: B023
        logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
        handle.remove()
        labels = sample_labels(logits.detach().softmax(-1), torch.Generator().manual_seed(number))
        (gradient,) = torch.autograd.grad(cross_entropy(logits, labels, reduction="sum"), kept[1])
        squares += kept[0].detach()[0].square().sum(0)
        gradient_squares += gradient[0].square().sum(0)
    tokens = sum(LENGTHS)
    wanted = layer.weight.detach().square() * (gradient_squares / tokens).outer(squares / tokens)
    costs = dict(weight_costs(model, batches(), [name]))
    torch.testing.assert_close(costs[name], wanted, rtol=1e-3, atol=1e-4 * float(wanted.max()))


def test_the_limit_of_tokens_counts_those_of_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """S of a layer uses the rows that begin within the limit, however long the longest row is."""
    model = tiny("llama")
    metric = torch.eye(16)
    used: list[int] = []
    monkeypatch.setattr("sparsellm.activations.sensitivity.TOKENS_PER_WIDTH", 0)
    for limit in (10, 30, 1000):
        monkeypatch.setattr("sparsellm.activations.sensitivity.SENSITIVITY_TOKENS", limit)
        _, inputs = next(steps := walk(model, batches()))
        block, counted = blocks_of(model)[0], []
        monkeypatch.setattr(Gram, "mean_over", lambda self, tokens: counted.append(tokens) or self.matrix)  # noqa: B023
        layer_curvatures(
            block, inputs.pruned, inputs.calls(block), ["mlp.down_proj"], fisher=metric, offsets=inputs.offsets, window=12
        )
        steps.close()
        used.append(counted[0])
    assert used == [12, 12 + 5 + 9 + 2 + 12, sum(LENGTHS)]


def test_distillation_weighs_tokens_alike() -> None:
    """The loss of a group is the mean over its tokens, and prompts and prediction never see padding."""
    dense, model = tiny("llama"), tiny("llama")
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    windows = read_in_memory(padded("left"), samples=1, seed=0)
    assert isinstance(windows, Tensor)
    more = generate_samples(dense, windows, 5)
    assert more.shape == (5, max(LENGTHS))
    assert int(more.min()) >= 0
    groups, held_out = group_batches(windows, more[:1], 6, 2)  # too few to be held out
    assert [[tuple(batch.shape) for batch in group] for group in groups[1:]] == [
        [(1, length) for length in part] for part in (LENGTHS[:6], LENGTHS[6:10], LENGTHS[10:])
    ]
    states = last_states(dense, groups)
    list(prune_blocks(model, [], LayerWise(Magnitude()), plan))
    before = copy.deepcopy(model)
    result, _ = distill(model, groups, states, plan=plan, adam=MaskedAdam(1, 1e-4), held_out=held_out)
    total, tokens = 0.0, 0
    for row in rows()[10:]:
        with torch.no_grad():
            scores = [each(input_ids=row.unsqueeze(0)).logits[0].double().log_softmax(-1) for each in (dense, before)]
        total += float(kl_div(scores[1], scores[0], log_target=True, reduction="sum"))
        tokens += len(row)
    assert result.before == pytest.approx(total / tokens, rel=1e-4)


def test_prompts_lie_within_their_rows() -> None:
    """Every prompt is a piece of its row, also of a short one."""
    windows = read_in_memory([torch.arange(40), torch.arange(1, 7)], samples=1, seed=0)
    assert isinstance(windows, Tensor)
    model = tiny("llama")
    starts = generate_samples(model, windows, 64)[:, :5]
    assert bool((starts.diff(dim=1) == 1).all())
    assert {1, 2} <= {int(start) for start in starts[:, 0]}
    assert int(starts[:, 0].max()) > 6


def test_errors_of_a_block_weigh_tokens_alike() -> None:
    """The loss of gradient steps over a block is the squared error of the held-out tokens, relative to all tokens' energy."""
    dense, model = tiny("llama"), tiny("llama")
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    _, inputs = next(steps := walk(dense, batches(), needs_dense_stream=True))
    block = blocks_of(dense)[0]
    names = list(block.layers)
    list(LayerWise(Magnitude()).prune(block, inputs, plan))
    reference = blocks_of(model)[0]
    with torch.no_grad():
        targets = [reference(hidden, call) for hidden, call in zip(inputs.pruned, inputs.calls(block), strict=True)]
        errors = [
            block(hidden, call) - target
            for hidden, call, target in zip(inputs.pruned, inputs.calls(block), targets, strict=True)
        ]
    energy = sum(float(target.double().square().sum()) for target in targets) / sum(LENGTHS)
    keep = {name: block.layer(name).weight != 0 for name in names}
    parameters = [name for name, _ in block.module.named_parameters()]
    result = refine_block(block, inputs, keep, names=parameters, fisher=None, adam=MaskedAdam(1, 1e-5))
    steps.close()
    held = errors[
        -2:
    ]  # a step reads as many tokens as the longest row has; the last of six groups is held out: rows of 4 and 8
    lost = sum(float(error.double().square().sum()) for error in held) / sum(error.shape[1] for error in held)
    assert result.before == pytest.approx(lost / energy, rel=1e-4)


def test_batches_have_no_padding() -> None:
    """Rows of different lengths are batches of their own; rows of one length travel together; order is kept."""
    windows = torch.tensor([[1, 2, 3], [4, 5, PADDING], [6, 7, 8]])
    assert sequence_lengths(windows).tolist() == [3, 2, 3]
    assert [batch.tolist() for batch in unpadded_batches(windows, 2)] == [[[1, 2, 3]], [[4, 5]], [[6, 7, 8]]]
    assert [batch.tolist() for batch in unpadded_batches(windows[[0, 2]], 2)] == [[[1, 2, 3], [6, 7, 8]]]


def test_batch_size_is_one_and_said_so() -> None:
    """A batch size that was asked for is noted where it cannot be; the result does not depend on it."""
    seen: list[object] = []
    model = tiny("llama")
    result = sparsellm.prune(model, "wanda", calibration=padded("left"), batch_size=4, observe=seen.append)
    assert result.report.resolved["batch_size"] == 1
    assert any(isinstance(event, Note) and event.text.startswith("1 sequence per batch") for event in seen)
    assert result.report.calibration == "12 sequences of 2 to 12 tokens, given in memory"
