"""Every signal update of SparseLLM against the problem that it solves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from sparsellm.methods.auxiliary_signals import activation_correction, fit_activated_, fit_hidden
from sparsellm.models.feedforward import FeedForward, GatedFeedForward, PlainFeedForward

PLAIN = PlainFeedForward(up="fc1", out_proj="fc2")
GATED = GatedFeedForward(gate="gate", up="up", out_proj="down")
FORMS = {
    "plain": PLAIN,
    "gated": GATED,
    "plain-gelu": replace(PLAIN, activation="gelu_new"),
    "gated-gelu": replace(GATED, activation="gelu_pytorch_tanh"),
    "plain-erf": replace(PLAIN, activation="gelu"),
}
ACTIVATIONS = {
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
"""torch's own, by the names that they have in a configuration."""
every_form = pytest.mark.parametrize("ff", FORMS.values(), ids=FORMS)
RATIOS = [0.01, 0.1, 1.0, 5.0, 100.0]
DTYPES = [torch.float32, torch.float64]
MODEL, HIDDEN, TOKENS = 12, 30, 40

Draw = Callable[..., Tensor]


def drawer(seed: int, dtype: torch.dtype = torch.float64) -> Draw:
    """A function that draws normal tensors of a shape, one stream for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def activation_cost(p: Tensor, shape: Tensor, weight: Tensor, target: Tensor, ratio: float) -> Tensor:
    """‖y − W p‖² + r ‖p − φ‖² of every token."""
    return (target - p @ weight.T).square().sum(1) + ratio * (p - shape).square().sum(1)


def plain_cost(z: Tensor, m: Tensor, p: Tensor, ratio: float) -> Tensor:
    """(z − m)² + r (p − relu(z))², entry by entry."""
    return (z - m).square() + ratio * (p - relu(z)).square()


def objective(
    ff: PlainFeedForward | GatedFeedForward,
    hidden: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    p: Tensor,
    fit: Tensor,
    ratio: float,
) -> Tensor:
    """The paper's whole objective over alpha, token by token, for W_out p already compared with y in `fit`, (tokens,)."""
    apart = sum((signal - output).square().sum(1) for signal, output in zip(hidden, outputs, strict=True))
    phi = ACTIVATIONS[ff.activation](hidden[0]) * (hidden[1] if isinstance(ff, GatedFeedForward) else 1)
    return fit + ratio * (p - phi).square().sum(1) + apart


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("sparse", [0.0, 0.9])
def test_activations_equal_the_normal_equations(sparse: float, ratio: float) -> None:
    """The (model, model) form equals (WᵀW + rI)⁻¹(Wᵀy + rφ), the paper's (hidden, hidden) one, in float64."""
    draw = drawer(1)
    weight = draw(MODEL, HIDDEN) * (torch.rand(MODEL, HIDDEN, generator=torch.Generator().manual_seed(2)) >= sparse)
    shape, target = draw(TOKENS, HIDDEN), draw(TOKENS, MODEL)
    p = fit_activated_(shape.clone(), shape @ weight.T, target, activation_correction(weight, ratio))
    matrix = weight.T @ weight + ratio * torch.eye(HIDDEN, dtype=torch.float64)
    wanted = torch.linalg.solve(matrix, (target @ weight + ratio * shape).T).T
    torch.testing.assert_close(p, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ratio", RATIOS)
def test_activations_are_the_minimizer(ratio: float) -> None:
    """The gradient vanishes there, and every perturbation of any size raises every token's cost."""
    draw = drawer(2)
    weight, shape, target = draw(MODEL, HIDDEN), draw(TOKENS, HIDDEN), draw(TOKENS, MODEL)
    p = fit_activated_(shape.clone(), shape @ weight.T, target, activation_correction(weight, ratio)).requires_grad_()
    lowest = activation_cost(p, shape, weight, target, ratio)
    (gradient,) = torch.autograd.grad(lowest.sum(), p)
    assert float(gradient.abs().max()) < 1e-9
    for size in (1e-3, 0.1, 1.0, 10.0):
        moved = activation_cost(p.detach() + size * draw(TOKENS, HIDDEN), shape, weight, target, ratio)
        assert bool((moved > lowest).all())


@pytest.mark.parametrize("ratio", [0.01, 1.0, 100.0])
def test_activations_in_float32(ratio: float) -> None:
    """In float32 the cost is the float64 minimum to rounding; only the first argument is written to."""
    draw = drawer(3, torch.float32)
    arguments = draw(TOKENS, HIDDEN), draw(MODEL, HIDDEN), draw(TOKENS, MODEL)
    copies = [argument.clone() for argument in arguments]
    shape, weight, target = arguments
    correction = activation_correction(weight, ratio)
    assert torch.allclose((weight @ weight.T + ratio * torch.eye(len(weight))) @ correction, weight, atol=1e-4)
    p = fit_activated_(shape, shape @ weight.T, target, correction)
    assert p is shape
    for argument, copy in zip(arguments[1:], copies[1:], strict=True):
        assert torch.equal(argument, copy)
    arguments = copies[0], weight, target
    shape, weight, target = (argument.double() for argument in arguments)
    best = fit_activated_(shape.clone(), shape @ weight.T, target, activation_correction(weight, ratio))
    costs = [activation_cost(answer.double(), shape, weight, target, ratio) for answer in (p, best)]
    torch.testing.assert_close(costs[0], costs[1], rtol=1e-4, atol=1e-5)


def test_a_dense_fit_stays() -> None:
    """Where W φ is y already, p is φ."""
    draw = drawer(4)
    weight, shape = draw(MODEL, HIDDEN), draw(TOKENS, HIDDEN)
    p = fit_activated_(shape.clone(), shape @ weight.T, shape @ weight.T, activation_correction(weight, 0.1))
    torch.testing.assert_close(p, shape, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_plain_hidden_against_a_grid(ratio: float, dtype: torch.dtype) -> None:
    """Every entry of the ReLU step is as good as the best of a grid on both branches, for m and p of either sign."""
    draw = drawer(5, dtype)
    m, p = 3 * draw(8, 25), 3 * draw(8, 25)
    m[0], p[1], m[2], p[3] = 0, 0, -2, -2
    (z,) = fit_hidden(PLAIN, (torch.full_like(m, 7),), (m,), p, ratio=ratio)
    assert z.shape == m.shape
    assert z.dtype == dtype
    grid = torch.linspace(-15, 15, 12_001, dtype=torch.float64)
    wanted = plain_cost(grid, m.double()[..., None], p.double()[..., None], ratio).amin(-1)
    found = plain_cost(z.double(), m.double(), p.double(), ratio)
    assert bool((found <= wanted + 1e-5 * (1 + wanted)).all())


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_plain_hidden_leaves_its_arguments(ratio: float) -> None:
    """The step writes to nothing that it was given."""
    draw = drawer(6)
    hidden, m, p = draw(4, 9), draw(4, 9), draw(4, 9)
    copies = hidden.clone(), m.clone(), p.clone()
    fit_hidden(PLAIN, (hidden,), (m,), p, ratio=ratio)
    for argument, copy in zip((hidden, m, p), copies, strict=True):
        assert torch.equal(argument, copy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_gated_hidden_against_a_grid(ratio: float, dtype: torch.dtype) -> None:
    """Up against its grid with the present gate; the gate against its grid with the new up; arguments untouched."""
    draw = drawer(7, dtype)
    s0, z0, m_s, m_z, p = (2 * draw(6, 20) for _ in range(5))
    copies = [signal.clone() for signal in (s0, z0, m_s, m_z, p)]
    s, z = fit_hidden(GATED, (s0, z0), (m_s, m_z), p, ratio=ratio)
    for signal, copy in zip((s0, z0, m_s, m_z, p), copies, strict=True):
        assert torch.equal(signal, copy)
    assert s.dtype == z.dtype == dtype
    assert s.shape == z.shape == p.shape
    s, z, s0, m_s, m_z, p = (signal.double() for signal in (s, z, s0, m_s, m_z, p))

    def up_cost(up: Tensor) -> Tensor:
        return (up - m_z[..., None]).square() + ratio * (p[..., None] - silu(s0)[..., None] * up).square()

    def gate_cost(gate: Tensor) -> Tensor:
        return (gate - m_s[..., None]).square() + ratio * (p[..., None] - silu(gate) * z[..., None]).square()

    for answer, costs in ((z, up_cost), (s, gate_cost)):
        wanted = costs(torch.linspace(-40, 40, 8_001, dtype=torch.float64)).amin(-1)
        found = costs(answer[..., None])[..., 0]
        assert bool((found <= wanted + 1e-4 * (1 + wanted)).all())


@pytest.mark.parametrize("ratio", RATIOS)
@every_form
def test_no_update_raises_the_objective(ff: PlainFeedForward | GatedFeedForward, ratio: float) -> None:
    """From signals of any size, token by token: moving p, then each hidden signal, never raises the whole objective."""
    draw, size = drawer(100), 10.0 ** torch.linspace(-1, 1, 5).repeat_interleave(TOKENS).double().unsqueeze(1)
    weight, target = draw(MODEL, HIDDEN) / HIDDEN**0.5, size * draw(len(size), MODEL)
    outputs = tuple(size * draw(len(size), HIDDEN) for _ in ff.in_proj)
    hidden = tuple(size * draw(len(size), HIDDEN) for _ in ff.in_proj)
    p = size * draw(len(size), HIDDEN)
    correction = activation_correction(weight, ratio)
    last = objective(ff, hidden, outputs, p, (target - p @ weight.T).square().sum(1), ratio)
    for _ in range(3):
        shape = ff.activate(*hidden)
        p = fit_activated_(shape, shape @ weight.T, target, correction)
        fit = (target - p @ weight.T).square().sum(1)
        steps = [objective(ff, hidden, outputs, p, fit, ratio)]
        fresh = fit_hidden(ff, hidden, outputs, p, ratio=ratio)
        if isinstance(ff, GatedFeedForward):  # up moves before the gate
            steps.append(objective(ff, (hidden[0], fresh[1]), outputs, p, fit, ratio))
        steps.append(objective(ff, fresh, outputs, p, fit, ratio))
        for now in steps:
            assert bool((now <= last * (1 + 1e-10)).all())
            last = now
        hidden = fresh


@every_form
def test_a_solution_stays(ff: FeedForward) -> None:
    """At signals with objective zero nothing moves."""
    draw = drawer(9)
    outputs = tuple(draw(TOKENS, HIDDEN) for _ in ff.in_proj)
    p = ff.activate(*outputs)
    for signal, output in zip(fit_hidden(ff, outputs, outputs, p, ratio=0.7), outputs, strict=True):
        torch.testing.assert_close(signal, output, rtol=1e-12, atol=1e-12)


def test_what_activate_computes() -> None:
    """relu(z) for the plain form, silu(s) z for the gated one; readers in the order of the arguments."""
    draw = drawer(10)
    s, z = draw(3, 4), draw(3, 4)
    assert torch.equal(PLAIN.activate(z), z.clamp(min=0))
    torch.testing.assert_close(GATED.activate(s, z), s * torch.sigmoid(s) * z)
    assert PLAIN.in_proj == ("fc1",)
    assert GATED.in_proj == ("gate", "up")
