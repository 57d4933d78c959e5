"""What the gate's minimizer takes of an activation function, against autograd and the function itself."""

from __future__ import annotations

import pytest
import torch

from sparsellm.models.feedforward import ACTIVATION_FUNCTIONS, ActivationFunction

every_curve = pytest.mark.parametrize(
    "curve",
    {id(curve): curve for curve in ACTIVATION_FUNCTIONS.values()}.values(),
    ids=["silu", "gelu", "gelu_tanh", "quick_gelu"],
)


@every_curve
def test_constants_of_the_curves(curve: ActivationFunction) -> None:
    """Each is lowest where stated, nowhere steeper or sharper than stated, and its bends are its derivatives."""
    s = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    value = curve.value(s)
    (slope,) = torch.autograd.grad(value.sum(), s, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), s)
    for got, wanted in zip(curve.curvature(s.detach()), (value, slope, bend), strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-9, atol=1e-9)
    value, slope, s = value.detach(), slope.detach(), s.detach()
    assert float(value.min()) == pytest.approx(curve.floor, abs=1e-6)
    assert float(s[value.argmin()]) == pytest.approx(curve.lowest, abs=1e-4)
    assert 0.999 * curve.steepest < float(slope.abs().max()) <= curve.steepest
    assert 0.999 * curve.sharpest < float(bend.abs().max()) <= curve.sharpest


@every_curve
def test_inverse_of_the_curve(curve: ActivationFunction) -> None:
    """Right and left of the lowest place, the curve is there what was asked for, or the place is the lowest itself."""
    right = torch.linspace(curve.floor + 1e-3, 40, 500, dtype=torch.float64)
    torch.testing.assert_close(curve.value(curve.right_meeting(right)), right, rtol=1e-2, atol=2e-3)
    left = torch.linspace(curve.floor + 1e-3, -1e-6, 500, dtype=torch.float64)
    met = curve.left_meeting(left)
    assert bool((met <= curve.lowest).all())
    torch.testing.assert_close(curve.value(met), left, rtol=0.05, atol=1e-3)
    beyond = torch.tensor([curve.floor - 1, -50.0], dtype=torch.float64)
    assert bool((curve.left_meeting(beyond) == curve.lowest).all())
    torch.testing.assert_close(curve.right_meeting(beyond), torch.full_like(beyond, curve.lowest), rtol=0, atol=1e-4)
