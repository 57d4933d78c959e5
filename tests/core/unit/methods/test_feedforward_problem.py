"""One feed-forward part: its error, its curvature and its steps, against autograd and dense algebra in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.functional import linear, relu, silu

from sparsellm.methods import gauss_newton
from sparsellm.methods.feedforward_problem import FeedForwardProblem, PartWeights, moved, weights_of
from sparsellm.methods.gauss_newton import RIDGE, gauss_newton_changes
from sparsellm.models.architectures import ARCHITECTURES
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward, GatedFeedForward, PlainFeedForward
from sparsellm.solvers.linalg import add_diagonal

MODEL, HIDDEN, TOKENS = 6, 9, 50

every_family = pytest.mark.parametrize("family", ["opt", "llama", "llama-bias"])


class Gated(nn.Module):
    """A gated feed-forward part, as Llama's."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(MODEL, HIDDEN, bias) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, MODEL, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@cache
def block_of(family: str) -> Block:
    """A random block that has a feed-forward part only, with random biases where there are any."""
    torch.manual_seed(0)
    plain = {"fc1": nn.Linear(MODEL, HIDDEN), "fc2": nn.Linear(HIDDEN, MODEL)}
    module = nn.ModuleDict(plain if family == "opt" else {"mlp": Gated(family.endswith("bias"))}).eval()
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.3 if name.endswith("bias") else 0.5)
    architecture = ARCHITECTURES[family.removesuffix("-bias")]
    return Block(0, "block", module, architecture, {name: tensor.dtype for name, tensor in module.named_parameters()})


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal draws in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward(block: Block, x: Tensor) -> Tensor:
    """What the block's own modules compute of the feed-forward part."""
    parts = dict(block.module.named_children())
    mlp = parts["fc2"](relu(parts["fc1"](x))) if "fc1" in parts else parts["mlp"](x)
    return mlp.detach()  # type: ignore[no-any-return]


def metric() -> Tensor:
    """A cost of errors, no axis like another."""
    root = draw(MODEL, MODEL, seed=1) * torch.linspace(0.4, 2, MODEL)
    return root @ root.T


def cost() -> Tensor:
    """F as the part damps it, in float64."""
    return add_diagonal(metric().double(), 1e-3)


def part_of(family: str, split: tuple[int, ...] = (20, 1, 29)) -> FeedForwardProblem:
    """A part with inputs that have a mean, and targets near what it computes."""
    block = block_of(family)
    feed_forward = block.architecture.feed_forward
    assert feed_forward is not None
    x = draw(TOKENS, MODEL, seed=2) * torch.linspace(0.5, 1.5, MODEL) + draw(MODEL, seed=3)
    t = forward(block, x) + 0.5 * draw(TOKENS, MODEL, seed=4) + 0.3
    return FeedForwardProblem(feed_forward, metric(), list(x.split(split)), list(t.split(split)))


def pruned(part: FeedForwardProblem, family: str) -> tuple[PartWeights, dict[str, Tensor]]:
    """The block's weights, about half of them gone, and the masks."""
    dense = weights_of(block_of(family), part.names)
    keep = {name: draw(*dense[name][0].shape, seed=5 + number) > -0.2 for number, name in enumerate(part.names)}
    return {name: (weight * keep[name], bias) for name, (weight, bias) in dense.items()}, keep


def tokens_of(part: FeedForwardProblem) -> tuple[Tensor, Tensor]:
    """All inputs and targets in float64."""
    return torch.cat(part.inputs).double(), torch.cat(part.targets).double()


def phi(part: FeedForwardProblem, hidden: list[Tensor]) -> Tensor:
    """What the writer reads."""
    return relu(hidden[0]) if len(part.feed_forward.in_proj) == 1 else silu(hidden[0]) * hidden[1]


def hidden_of(part: FeedForwardProblem, weights: PartWeights, x: Tensor) -> list[Tensor]:
    """The readers' outputs in the dtype of x."""
    pairs = [weights[name] for name in part.feed_forward.in_proj]
    return [linear(x, weight.to(x), None if bias is None else bias.to(x)) for weight, bias in pairs]


def output(part: FeedForwardProblem, weights: PartWeights, x: Tensor) -> Tensor:
    """The part's output in the dtype of x."""
    weight, bias = weights[part.feed_forward.out_proj]
    return linear(phi(part, hidden_of(part, weights, x)), weight.to(x), None if bias is None else bias.to(x))


def in_a_row(part: FeedForwardProblem, weights: PartWeights, masks: dict[str, Tensor] | None = None) -> list[Tensor]:
    """Weights and biases of the readers, in order; or, of masks, these and True for the biases."""
    found: list[Tensor] = []
    for name in part.feed_forward.in_proj:
        weight, bias = weights[name]
        found.append(weight if masks is None else masks[name])
        if bias is not None:
            found.append(bias if masks is None else torch.ones_like(bias, dtype=torch.bool))
    return found


def flat(tensors: list[Tensor]) -> Tensor:
    """All entries in a row; numbers in float64."""
    return torch.cat([tensor.flatten() if tensor.dtype is torch.bool else tensor.flatten().double() for tensor in tensors])


def mean_cost(errors: Tensor, metric: Tensor) -> float:
    """The mean over tokens of e F e."""
    return float(((errors @ metric) * errors).sum(1).mean())


@pytest.mark.parametrize(
    "form",
    [
        PlainFeedForward("a", "b"), GatedFeedForward("a", "b", "c"),
        PlainFeedForward("a", "b", "gelu_new"), GatedFeedForward("a", "b", "c", "gelu"),
    ],
    ids=["plain", "gated", "plain-gelu", "gated-gelu"],
)  # fmt: skip
def test_slopes_against_autograd(form: FeedForward) -> None:
    """The derivative of `activate` by each reader's output, entry by entry."""
    for gate in (-3.0, -0.4, 0.6, 5.0):
        hidden = tuple((draw(7, 5, seed=seed).double() + gate).requires_grad_() for seed in range(len(form.in_proj)))
        wanted = torch.autograd.grad(form.activate(*hidden).sum(), hidden)
        for got, other in zip(form.slopes(*hidden), wanted, strict=True):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, other)


@every_family
def test_error_against_the_modules(family: str) -> None:
    """The mean over tokens of the misses of the modules' own forward pass, in the metric; in any batches, from bf16 too."""
    part = part_of(family)
    x, t = tokens_of(part)
    dense, weights = weights_of(block_of(family), part.names), pruned(part, family)[0]
    wanted = mean_cost(t - forward(block_of(family), x.float()).double(), cost())
    assert part.error(dense) == pytest.approx(wanted, rel=1e-5)
    assert part.error(weights) == pytest.approx(mean_cost(t - output(part, weights, x), cost()), rel=1e-5)
    assert part.target_energy() == pytest.approx(mean_cost(t, cost()), rel=1e-5)
    other = part_of(family, (1,) * TOKENS)
    assert other.error(dense) == pytest.approx(part.error(dense))
    assert other.target_energy() == pytest.approx(part.target_energy())
    reached = replace(part, targets=[forward(block_of(family), some) for some in part.inputs])
    assert reached.error(dense) < 1e-10
    coarse = replace(part, inputs=[x.bfloat16() for x in part.inputs], targets=[t.bfloat16() for t in part.targets])
    wide = replace(part, inputs=[x.float() for x in coarse.inputs], targets=[t.float() for t in coarse.targets])
    assert coarse.error(dense) == wide.error(dense) != part.error(dense)


@every_family
def test_regression_of_the_writer(family: str) -> None:
    """The writer's sums are those of the activations that these readers give; the metric does not enter."""
    part = part_of(family)
    weights, (x, t) = pruned(part, family)[0], tokens_of(part)
    p, weight = phi(part, hidden_of(part, weights, x)), draw(MODEL, HIDDEN, seed=9)
    found, affine = part.regression(weights), weights[part.feed_forward.out_proj][1] is not None
    residual = t - p @ weight.double().T
    bias = residual.mean(0) if affine else torch.zeros(MODEL).double()
    assert found.error(weight) == pytest.approx(float((residual - bias).square().sum(1).mean()), rel=1e-4)
    got = found.bias(weight)
    assert (got is None) == (not affine)
    assert got is None or torch.allclose(got.double(), bias, atol=1e-4)
    torch.testing.assert_close(found.inputs.matrix.double(), p.T @ p / TOKENS, rtol=1e-4, atol=1e-5)


@every_family
def test_curvatures_against_jacobians(family: str) -> None:
    """S of each reader is the mean over tokens of Jᵀ F J, J the part's Jacobian by that reader's output."""
    part = part_of(family)
    dense = weights_of(block_of(family), part.names)
    x, _ = tokens_of(part)
    found = part.curvatures(dense)
    assert tuple(found) == part.feed_forward.in_proj
    for number, name in enumerate(found):
        wanted = torch.zeros(HIDDEN, HIDDEN).double()
        for token in x:
            hidden = hidden_of(part, dense, token)

            def behind(signal: Tensor, hidden: list[Tensor] = hidden, number: int = number) -> Tensor:
                signals = [*hidden[:number], signal, *hidden[number + 1 :]]
                return linear(phi(part, signals), dense[part.feed_forward.out_proj][0].double())

            slope = jacobian(behind, hidden[number])
            wanted += slope.T @ cost() @ slope / TOKENS
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-3, atol=1e-4)


def linearized(part: FeedForwardProblem, weights: PartWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Of all readers' weights and biases in a row: Jᵀ F J, Jᵀ F r, and the curvature that scales the ridge.

    J is autograd's. The curvature takes the slopes as independent of the inputs: |v_i|² E[φ'²] E[x²].
    """
    x, t = tokens_of(part)
    metric, writer = cost(), weights[part.feed_forward.out_proj][0].double()

    def run(*given: Tensor) -> Tensor:
        left = iter(given)
        moved = {n: (next(left), None if weights[n][1] is None else next(left)) for n in part.feed_forward.in_proj}
        return output(part, weights | moved, x)

    parameters = tuple(tensor.double() for tensor in in_a_row(part, weights))
    wide = torch.cat([some.flatten(2) for some in jacobian(run, parameters)], 2)  # (tokens, model, parameters)
    matrix = torch.einsum("tap,ab,tbq->pq", wide, metric, wide) / TOKENS
    pull = torch.einsum("tap,ab,tb->p", wide, metric, t - run(*parameters)) / TOKENS
    heights, curvature = ((writer.T @ metric) * writer.T).sum(1), list[Tensor]()
    slopes = part.feed_forward.slopes(*hidden_of(part, weights, x))
    for name, slope in zip(part.feed_forward.in_proj, slopes, strict=True):
        powers = heights * slope.square().mean(0)
        curvature += [powers.outer(x.square().mean(0)), *([] if weights[name][1] is None else [powers])]
    return matrix, pull, flat(curvature)


def step_of(part: FeedForwardProblem, weights: PartWeights, keep: dict[str, Tensor], steps: int) -> PartWeights:
    """The change after so many conjugate gradient steps."""
    *_, last = gauss_newton_changes(part, weights, keep, steps)
    return last


def test_every_change_goes_further_and_stays_as_it_is() -> None:
    """A change of more steps is longer and leaves the earlier ones alone: a round picks one of them."""
    part = part_of("opt")
    weights, keep = pruned(part, "opt")
    changes = list(gauss_newton_changes(part, weights, keep, 4))
    lengths = [float(flat(in_a_row(part, change)).norm()) for change in changes]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 4
    for number, change in enumerate(changes, 1):
        assert torch.equal(flat(in_a_row(part, change)), flat(in_a_row(part, step_of(part, weights, keep, number))))


def test_moved_adds_a_part_of_a_change() -> None:
    weights: PartWeights = {"a": (torch.ones(2, 3), torch.ones(2)), "b": (torch.ones(1, 2), None)}
    change: PartWeights = {"a": (torch.full((2, 3), 4.0), torch.full((2,), -2.0))}
    result = moved(weights, change, 0.5)
    assert torch.equal(result["a"][0], torch.full((2, 3), 3.0))
    assert torch.equal(result["a"][1], torch.zeros(2))  # type: ignore[arg-type]
    assert result["b"] is weights["b"]
    assert torch.equal(weights["a"][0], torch.ones(2, 3))


@every_family
def test_rounded_slopes_hardly_change_a_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps; those of ReLU are 0 and 1, which are not rounded."""
    part = part_of(family)
    weights, keep = pruned(part, family)
    rounded = flat(in_a_row(part, step_of(part, weights, keep, 4)))
    monkeypatch.setattr(gauss_newton, "SLOPES", torch.float32)
    exact = flat(in_a_row(part, step_of(part, weights, keep, 4)))
    assert float((rounded - exact).norm()) < 0.03 * float(exact.norm())
    assert torch.equal(rounded, exact) == (family == "opt")


@every_family
def test_newton_against_a_dense_solve(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many steps the linearized problem, ridge included, is solved on the mask: zero off it, biases free."""
    monkeypatch.setattr(gauss_newton, "SLOPES", torch.float32)
    part = part_of(family)
    weights, keep = pruned(part, family)
    matrix, pull, curvature = linearized(part, weights)
    free = flat(in_a_row(part, weights, keep))
    shifted = matrix + RIDGE * curvature.diag()
    wanted = torch.zeros_like(pull)
    wanted[free] = torch.linalg.lstsq(shifted[free][:, free], pull[free], driver="gelsd").solution  # dead units stay
    steps = step_of(part, weights, keep, 400)
    assert tuple(steps) == part.feed_forward.in_proj
    assert [some.shape for some in in_a_row(part, steps)] == [some.shape for some in in_a_row(part, weights)]
    got, few = flat(in_a_row(part, steps)), flat(in_a_row(part, step_of(part, weights, keep, 3)))
    assert not bool((got[~free] + few[~free]).any())
    assert float((got - wanted).norm() / wanted.norm()) < 2e-3
    lowest, low = (float(change @ shifted @ change / 2 - pull @ change) for change in (wanted, few))
    assert lowest < low < 0.5 * lowest


@every_family
def test_newton_lowers_the_error(family: str) -> None:
    """A short stretch of a step lowers the part's true error as much as its slope says; nothing moves at a solution."""
    part, length = part_of(family), 3e-3
    weights, keep = pruned(part, family)
    steps = step_of(part, weights, keep, 8)
    slope = -2 * float(linearized(part, weights)[1] @ flat(in_a_row(part, steps)))
    assert part.error(moved(weights, steps, length)) - part.error(weights) == pytest.approx(length * slope, rel=0.1)
    done = replace(part, targets=[output(part, weights, x) for x in part.inputs])
    assert float(flat(in_a_row(part, step_of(done, weights, keep, 8))).abs().max()) < 1e-4


@pytest.mark.parametrize("split", [(50,), (20, 1, 29), (1,) * 50], ids=str)
def test_tokens_are_told_apart_by_number(split: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-back tokens are the last sixteenth, a curvature's every third here, however tokens are batched."""
    part = part_of("opt", split)
    x, t = torch.cat(part.inputs), torch.cat(part.targets)
    fitted, held = part.split()
    fitted.least = 14
    monkeypatch.setattr("sparsellm.methods.feedforward_problem.SAMPLED_WIDTHS", 2)
    for some, wanted in ((fitted, slice(0, 47)), (held, slice(47, 50)), (fitted.sampled(), slice(0, 47, 3))):
        assert torch.equal(torch.cat(list(some.inputs)), x[wanted])
        assert torch.equal(torch.cat(list(some.targets)), t[wanted])
        assert all(len(batch) for batch in some.inputs)
    monkeypatch.setattr("sparsellm.methods.feedforward_problem.SAMPLED_WIDTHS", 4)  # now the width asks for more: 24
    assert torch.equal(torch.cat(list(fitted.sampled().inputs)), x[:47])


def test_a_round_needs_few_tokens_for_its_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's gradient is taken from all tokens and its curvature from some: to first order, down the slope of all."""
    part = part_of("opt")
    weights, keep = pruned(part, "opt")
    part.least = 10
    monkeypatch.setattr("sparsellm.methods.feedforward_problem.SAMPLED_WIDTHS", 1)
    seen: list[tuple[str, int]] = []
    for name in ("_gradient", "_curvature_product"):
        plain = getattr(gauss_newton, name)

        def counted(problem: FeedForwardProblem, *arguments: Any, name: str = name, plain: Any = plain) -> Any:
            seen.append((name, sum(map(len, problem.inputs))))
            return plain(problem, *arguments)

        monkeypatch.setattr(gauss_newton, name, counted)
    step = step_of(part, weights, keep, 3)
    assert seen == [("_gradient", 50), *[("_curvature_product", 10)] * 3]
    assert part.error(moved(weights, step, 1e-3)) < part.error(weights)


@every_family
def test_sums_do_not_depend_on_the_windows_of_a_batch(family: str) -> None:
    """With windows known the numbers are the same to the bit, of all tokens, of some at the end, and of every third."""

    def found(*windows: int) -> list[Tensor]:
        whole = part_of(family, tuple(10 * some for some in windows))
        whole.window = 10
        last = whole._rows(slice(13, 50))
        many: list[Tensor] = []
        for part in (whole, last, whole._rows(slice(4, 50, 3)), last._rows(slice(1, 30, 2))):
            weights, keep = pruned(part, family)
            many += [torch.tensor([part.error(weights), part.target_energy()]), part.regression(weights)._cross]
            many += [weight for weight, _ in step_of(part, weights, keep, 3).values()]
            many += [*part.curvatures(weights).values()]
        return many

    for windows in ((2, 2, 1), (3, 2), (5,)):
        assert all(map(torch.equal, found(1, 1, 1, 1, 1), found(*windows)))


def test_tokens_are_cut_where_windows_begin() -> None:
    part = part_of("llama")
    part.window = 10
    assert part._sizes(0, 25) == [10, 10, 5]
    assert part._sizes(7, 5) == [3, 2]
    third = part._rows(slice(4, 50, 3))  # tokens 4, 7, 10, 13, 16, 19, 22 ...
    assert third._sizes(0, 7) == [2, 4, 1]
