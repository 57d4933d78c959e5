"""SparseLLM on tiny random models: against local pruning, and against Algorithm 1 with every signal held in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, relu, silu
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from sparsellm.errors import UnsupportedModel
from sparsellm.methods import BlockMethod, BlockResult, EpochResult, LayerResult, Step
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.auxiliary_signals import AuxiliarySignals
from sparsellm.methods.gate_update import solve_gate
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import LayerSolver, Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import Pattern, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram, TokenCount
from tests.pairwise import pairwise
from tests.pruning import prune_blocks

SOLVERS: list[LayerSolver] = [Magnitude(), Wanda(), SparseGPT(), FastADMM(), ALPS()]
READERS = {"opt": ("fc1",), "llama": ("mlp.gate_proj", "mlp.up_proj"), "llama-bias": ("mlp.gate_proj", "mlp.up_proj")}
WRITER = {"opt": "fc2", "llama": "mlp.down_proj", "llama-bias": "mlp.down_proj"}

every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
every_family = pytest.mark.parametrize("family", ["opt", "llama", "llama-bias"])
two_families = pytest.mark.parametrize("family", ["opt", "llama"])


def tiny(family: str) -> PreTrainedModel:
    """A random model of two blocks, with weights large enough to matter and random biases."""
    torch.manual_seed(0)
    shared = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    if family.startswith("opt"):
        sizes = {"ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32, "init_std": 0.2}
        config = OPTConfig(**shared, **sizes, activation_function="tanh" if family == "opt-tanh" else "relu")
        model: PreTrainedModel = OPTForCausalLM(config)
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25}
        config = LlamaConfig(**shared, **heads, intermediate_size=64, mlp_bias=family.endswith("bias"))
        model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@cache
def batches(*sizes: int) -> list[Tensor]:
    """Twelve sequences of 16 random tokens, cut into batches of the given sizes."""
    tokens = torch.randint(0, 128, (12, 16), generator=torch.Generator().manual_seed(1))
    return list(tokens.split(list(sizes or (6, 4, 2))))


def prune(
    family: str, method: BlockMethod, text: str = "70%", sizes: tuple[int, ...] = (), **choice: object
) -> tuple[PreTrainedModel, list[Step]]:
    """A fresh model pruned, and everything that was yielded."""
    model = tiny(family)
    plan = uniform_plan(blocks_of(model), parse_pattern(text), **choice)  # type: ignore[arg-type]
    return model, list(prune_blocks(model, batches(*sizes), method, plan))


@pytest.fixture
def after_signals(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The objective over alpha after each update of the signals, which no run computes."""
    objectives: list[float] = []
    refit = AuxiliarySignals.refit

    def recorded(signals: AuxiliarySignals, weights: dict[str, Tensor]) -> float:
        error = refit(signals, weights)
        objectives.append(signals.objective(weights))
        return error

    monkeypatch.setattr(AuxiliarySignals, "refit", recorded)
    return objectives


def epochs_of(steps: list[Step]) -> list[EpochResult]:
    """The epochs' results among all."""
    return [step for step in steps if isinstance(step, EpochResult)]


def same_bits(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether all parameters are equal."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def feed_forward_signals(model: PreTrainedModel, family: str, index: int) -> tuple[Tensor, Tensor]:
    """What the block's readers read and its writer writes in an ordinary forward pass, all tokens, in float64."""
    block = blocks_of(model)[index]
    x, y = list[Tensor](), list[Tensor]()
    block.layer(READERS[family][0]).register_forward_hook(lambda _, inputs, __: x.append(inputs[0].flatten(0, -2)))
    block.layer(WRITER[family]).register_forward_hook(lambda _, __, output: y.append(output.flatten(0, -2)))
    with torch.no_grad():
        for batch in batches():
            model(batch)
    return torch.cat(x).double(), torch.cat(y).double()


def algorithm_1(
    family: str, index: int, solver: LayerSolver, pattern: Pattern, method: Algorithm1
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The paper's Algorithm 1 on one block, slowly: float64, all signals for all tokens in memory, dense solves.

    Per epoch the objective after the weights, the objective after the signals, and the true error; and the last weights.
    """
    model = tiny(family)
    x, y = feed_forward_signals(model, family, index)
    block = blocks_of(model)[index]
    names, writer = READERS[family], WRITER[family]
    dense = {name: block.layer(name).weight.detach().double() for name in (*names, writer)}
    biases = {name: getattr(block.layer(name), "bias", None) for name in dense}
    bias = {name: torch.zeros(len(dense[name])).double() if b is None else b.detach().double() for name, b in biases.items()}
    alpha, beta, y = method.alpha, method.beta, y - bias[writer]

    def phi(hidden: list[Tensor]) -> Tensor:
        return relu(hidden[0]) if family == "opt" else silu(hidden[0]) * hidden[1]

    def reach(weights: dict[str, Tensor]) -> list[Tensor]:
        return [linear(x, weights[name], bias[name]) for name in names]

    def objective(weights: dict[str, Tensor], hidden: list[Tensor], p: Tensor) -> float:
        total = alpha * (y - p @ weights[writer].T).square().sum() + beta * (p - phi(hidden)).square().sum()
        for signal, reached in zip(hidden, reach(weights), strict=True):
            total += alpha * (signal - reached).square().sum()
        return float(total) / len(x)

    def aim(name: str, target: Tensor, inputs: Tensor) -> Tensor:
        gram = inputs.T @ inputs / len(inputs)
        pull = method.ridge * gram.diagonal().mean()
        shifted = gram + pull * torch.eye(len(gram), dtype=torch.float64)
        return torch.linalg.solve(shifted, (target.T @ inputs / len(inputs) + pull * dense[name]).T).T

    def solve(target: Tensor, inputs: Tensor) -> Tensor:
        gram = Gram(inputs.shape[1], dtype=torch.float64)
        gram.update(inputs)
        return solver.solve(LayerProblem(target, gram), pattern)

    hidden = reach(dense)
    p, aims, trace = phi(hidden), dict(dense), []
    for _ in range(method.epochs):
        weights = {name: solve(aims[name], p if name == writer else x) for name in dense}
        row = [objective(weights, hidden, p)]
        out = weights[writer]
        matrix = alpha * out.T @ out + beta * torch.eye(out.shape[1], dtype=torch.float64)
        p = torch.linalg.solve(matrix, (alpha * y @ out + beta * phi(hidden)).T).T
        reached = reach(weights)
        if family == "opt":
            on, off = ((alpha * reached[0] + beta * p) / (alpha + beta)).clamp(min=0), reached[0].clamp(max=0)
            costs = [alpha * (z - reached[0]).square() + beta * (p - relu(z)).square() for z in (on, off)]
            hidden = [torch.where(costs[0] <= costs[1], on, off)]
        else:
            gate = silu(hidden[0])
            up = (alpha * reached[1] + beta * gate * p) / (alpha + beta * gate.square())
            hidden = [solve_gate(reached[0], up, p, ratio=beta / alpha), up]
        row.append(objective(weights, hidden, p))
        trace.append([*row, float((y - phi(reached) @ out.T).square().sum() / y.square().sum())])
        aims = {name: aim(name, signal - bias[name], x) for name, signal in zip(names, hidden, strict=True)}
        aims[writer] = aim(writer, y, p)
    return trace, weights


@every_solver
@two_families
def test_one_epoch_is_local_pruning(family: str, solver: LayerSolver) -> None:
    """SparseLLM with one epoch equals LayerWise in every bit of every parameter, for each solver."""
    (local, _), (coupled, steps) = prune(family, LayerWise(solver)), prune(family, Algorithm1(solver, epochs=1))
    assert same_bits(local, coupled)
    assert not same_bits(local, tiny(family))
    assert len(epochs_of(steps)) == 2


@two_families
def test_omega(family: str) -> None:
    """An empty Omega equals LayerWise; with one block in it just that block's feed-forward layers differ."""
    local, _ = prune(family, LayerWise(SparseGPT()))
    model, steps = prune(family, Algorithm1(SparseGPT(), blocks=frozenset()))
    assert same_bits(model, local)
    assert not epochs_of(steps)
    assert Algorithm1(Magnitude(), blocks=frozenset()).needs is TokenCount
    second, steps = prune(family, Algorithm1(SparseGPT(), blocks=frozenset({1}), keep_best=False))
    assert {step.block for step in epochs_of(steps)} == {blocks_of(model)[1].name}
    coupled = {blocks_of(model)[1].full_name(name) + ".weight" for name in (*READERS[family], WRITER[family])}
    for (name, one), other in zip(second.named_parameters(), local.parameters(), strict=True):
        assert torch.equal(one, other) == (name not in coupled), name


@pytest.mark.parametrize(
    ("alpha_beta", "solver", "family"),
    pairwise([(0.1, 0.1), (1.0, 0.05), (0.1, 5.0)], [Magnitude(), SparseGPT()], ["opt", "llama"]),
    ids=str,
)
def test_signals_never_raise_the_objective(
    alpha_beta: tuple[float, float], solver: LayerSolver, family: str, after_signals: list[float]
) -> None:
    """In every epoch of every block the objective is no higher after the signals than before, up to rounding."""
    alpha, beta = alpha_beta
    _, steps = prune(family, Algorithm1(solver, epochs=3, alpha=alpha, beta=beta))
    epochs = epochs_of(steps)
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3] * 2
    updated = [epoch for epoch in epochs if epoch.epoch < 3]  # nobody would need the last signals
    for epoch, after in zip(updated, after_signals, strict=True):
        assert 0 <= alpha * after <= epoch.after_weights * (1 + 1e-5)
    assert alpha * after_signals[0] < 0.9 * epochs[0].after_weights


@pytest.mark.parametrize(
    ("family", "settings", "solver"),
    pairwise(["opt", "llama", "llama-bias"], [(0, 0.1, 0.1), (1, 1.0, 0.3)], [Magnitude(), SparseGPT()]),
    ids=str,
)
def test_against_algorithm_1_in_memory(
    family: str, settings: tuple[int, float, float], solver: LayerSolver, after_signals: list[float]
) -> None:
    """The streamed float32 sums give the objectives, true errors and weights of the slow float64 reference."""
    index, alpha, beta = settings
    layers, method = [*READERS[family], WRITER[family]], Algorithm1(solver, 3, alpha, beta, keep_best=False)
    model, steps = prune(family, method, "60%", chosen=frozenset({index}), include=layers)
    trace, weights = algorithm_1(family, index, solver, parse_pattern("60%"), method)
    after = [alpha * objective for objective in after_signals]
    for epoch, wanted, got in zip(epochs_of(steps), trace, [*after, trace[-1][1]], strict=True):
        assert [epoch.after_weights, got, epoch.feed_forward_error] == pytest.approx(wanted, rel=1e-3)
    for name in layers:
        distance = (blocks_of(model)[index].layer(name).weight.detach().double() - weights[name]).norm()
        assert float(distance / weights[name].norm()) < 1e-2, name


@dataclass(frozen=True)
class Scripted:
    """SparseGPT in the epoch named `good`; in all others its answers shrunk to a third. Counts its calls."""

    good: int
    layers: int
    calls: list[int] = field(default_factory=list)

    needs: ClassVar[type[TokenCount]] = Gram

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        self.calls.append(len(self.calls) // self.layers + 1)
        weight = SparseGPT().solve(problem, pattern)
        return weight if self.calls[-1] == self.good else weight / 3


@pytest.mark.parametrize("keep_best", [True, False])
@pytest.mark.parametrize("good", [1, 2, 3])
@two_families
def test_keep_best_returns_the_best_epoch(family: str, good: int, keep_best: bool) -> None:
    """What is written is the epoch with the smallest feed-forward error, or the last, by an error measured anew."""
    only = [*READERS[family], WRITER[family]]
    x, y = feed_forward_signals(tiny(family), family, 0)
    method = Algorithm1(Scripted(good, len(only)), epochs=3, keep_best=keep_best)
    model, steps = prune(family, method, chosen=frozenset({0}), include=only)
    errors, returned = [epoch.feed_forward_error for epoch in epochs_of(steps)], good if keep_best else 3
    assert min(errors) == errors[good - 1]
    assert {step.epoch for step in steps if isinstance(step, LayerResult)} == {returned}
    block = blocks_of(model)[0].module
    part = (lambda h: block.fc2(relu(block.fc1(h)))) if family == "opt" else block.mlp
    bias = block.fc2.bias.double() if family == "opt" else 0
    with torch.no_grad():
        missed = (part(x.float()).double() - y).square().sum() / (y - bias).square().sum()
    assert float(missed) == pytest.approx(errors[returned - 1], rel=1e-3)


@pytest.mark.parametrize("keep_best", [True, False])
@two_families
def test_reported_error_is_of_evenly_spaced_tokens(family: str, keep_best: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last epoch's error is that of the written weights on every third token of each batch, or with `keep_best` on all."""
    monkeypatch.setattr("sparsellm.methods.algorithm1.ERROR_TOKENS", 64)  # of 192
    layers = [*READERS[family], WRITER[family]]
    x, y = feed_forward_signals(tiny(family), family, 0)
    method = Algorithm1(SparseGPT(), epochs=2, keep_best=keep_best)
    model, steps = prune(family, method, chosen=frozenset({0}), include=layers)
    reported = [epoch for epoch in epochs_of(steps) if epoch.accepted][-1].feed_forward_error
    block = blocks_of(model)[0].module.double()
    with torch.no_grad():
        output = block.fc2(relu(block.fc1(x))) if family == "opt" else block.mlp(x)
        squares = (output - y).square().sum(1), (y - (block.fc2.bias if family == "opt" else 0)).square().sum(1)
    all_tokens, spaced = (
        float(torch.cat([one[0] for one in parts]).sum() / torch.cat([one[1] for one in parts]).sum())
        for parts in (
            [squares],
            [[each.split([96, 64, 32])[batch][::3] for each in squares] for batch in range(3)],
        )
    )
    assert abs(all_tokens / spaced - 1) > 1e-2
    assert reported == pytest.approx(all_tokens if keep_best else spaced, rel=1e-4)


@pytest.mark.parametrize("solver", [Wanda(), SparseGPT()], ids=lambda solver: type(solver).__name__)
@two_families
def test_batches_do_not_matter(family: str, solver: LayerSolver) -> None:
    """The same sequences in other batches give the same errors and, but for rounding, the same weights."""
    method = Algorithm1(solver, epochs=2, keep_best=False)
    one, steps = prune(family, method, sizes=(12,))
    for sizes in ((1,) * 12, (5, 7)):
        other, others = prune(family, method, sizes=sizes)
        errors, wanted = ([epoch.feed_forward_error for epoch in epochs_of(each)] for each in (others, steps))
        assert errors == pytest.approx(wanted, rel=5e-3)
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert float((a - b).norm() / b.norm()) < 0.05, name
            assert float(((a == 0) != (b == 0)).float().mean()) < 0.01, name


@two_families
def test_what_is_not_planned_stays(family: str) -> None:
    """Layers that the plan leaves out, biases, norms and embeddings keep every bit; planned layers have their zeros."""
    dense, method = tiny(family), Algorithm1(SparseGPT(), epochs=2)
    model, steps = prune(family, method, chosen=frozenset({1}), exclude=["self_attn.q_proj"])
    layers = {step.name: step for step in steps if isinstance(step, LayerResult)}
    assert len(layers) == (5 if family == "opt" else 6)
    for (name, parameter), before in zip(model.named_parameters(), dense.parameters(), strict=True):
        layer = layers.get(name.removesuffix(".weight"))
        assert torch.equal(parameter, before) == (layer is None), name
        if layer is not None:
            assert int((parameter == 0).sum()) == round(0.7 * parameter.numel()) == layer.zeros


def test_incomplete_feed_forward_is_pruned_layer_wise() -> None:
    """Where a feed-forward layer stays dense the block is pruned layer-wise, and the block's note says so."""
    model, steps = prune("llama", Algorithm1(SparseGPT()), exclude=["up_proj"])
    assert same_bits(model, prune("llama", LayerWise(SparseGPT()), exclude=["up_proj"])[0])
    notes = {step.note for step in steps if isinstance(step, BlockResult)}
    assert notes == {"pruned layer-wise, since the plan excludes mlp.up_proj"}


def test_other_activations_are_refused() -> None:
    """A feed-forward part that is not solved in closed form raises, unless Omega leaves it out."""
    model = tiny("opt-tanh")
    plan = uniform_plan(blocks_of(model), parse_pattern("50%"))
    with pytest.raises(UnsupportedModel, match=r"layers\.0 .*`blocks` none"):
        list(prune_blocks(model, batches(), Algorithm1(SparseGPT()), plan))
    assert list(prune_blocks(model, batches(), Algorithm1(SparseGPT(), blocks=frozenset()), plan))
