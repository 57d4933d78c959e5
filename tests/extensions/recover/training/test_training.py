"""Low-rank changes against automatic differentiation, early stop, and trainings that are interrupted and continued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsellm.extensions.recover.training import masked_training
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.extensions.recover.training.trained_weights import MaskedLoRA

SHAPES = {"weight": (6, 10), "experts": (3, 6, 10)}


def problem(seed: int = 0) -> tuple[dict[str, nn.Parameter], dict[str, Tensor], Callable[[int], Iterator[Tensor]]]:
    """Two weights, half of each masked, and a loss of both on each of six groups."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    keep = {name: torch.rand(weight.shape, generator=generator) > 0.5 for name, weight in weights.items()}
    parameters = {name: nn.Parameter(weight.masked_fill(~keep[name], 0)) for name, weight in weights.items()}
    x, y = torch.randn(6, 20, 10, generator=generator), torch.randn(6, 20, 6, generator=generator)

    def loss(number: int) -> Iterator[Tensor]:
        output = sum(torch.tanh(x[number] @ weight.mT) for weight in (parameters["weight"], *parameters["experts"]))
        yield (output - y[number]).square().mean()

    return parameters, keep, loss


def test_gradients_of_low_rank_factors_are_those_of_the_masked_product() -> None:
    """A and B get what differentiating W = M * (W0 + B A) gives; the weights are that product, with zeros where they were."""
    parameters, keep, loss = problem()
    lora = MaskedLoRA(parameters, keep, rank=2, seed=1)
    with torch.no_grad():
        for factor in lora.trained.values():
            factor.normal_(generator=torch.Generator().manual_seed(factor.numel()))
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    factors = {name: factor.detach().clone().requires_grad_() for name, factor in lora.trained.items()}
    product = {name: keep[name] * (initial[name] + factors[f"{name}.B"] @ factors[f"{name}.A"]) for name in parameters}
    lora.apply()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, product[name], atol=1e-6)
        assert torch.equal(parameter == 0, ~keep[name])
    (term,) = loss(0)
    found = lora.gradients(torch.autograd.grad(term, list(parameters.values())))
    upstream = torch.autograd.grad(next(loss(0)), list(parameters.values()))
    wanted = torch.autograd.grad(list(product.values()), list(factors.values()), upstream)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert torch.allclose(one, other, atol=1e-5)


def test_low_rank_training_changes_a_weight_by_a_matrix_of_that_rank() -> None:
    """Before a step the weights keep every bit; after 60 the loss is lower, and without a mask the change has rank 2."""
    parameters, keep, loss = problem()
    del keep["weight"]
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    MaskedLoRA(parameters, keep, rank=2, seed=1).apply()
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)
    result = MaskedAdam(60, 0.05, rank=2).run(parameters, keep, loss, groups=6, seed=1)
    assert 0 < result.after < result.before
    assert torch.equal(parameters["experts"] == 0, ~keep["experts"])
    assert not torch.equal(parameters["experts"], before["experts"])
    change = (parameters["weight"].detach() - before["weight"]).double()
    assert int((torch.linalg.svdvals(change) > 1e-4).sum()) == 2


def test_patience_ends_a_training_that_no_longer_gains() -> None:
    """The held-out loss is lowest at the start of the curve: the training ends three validations later and keeps that state."""
    weight = nn.Parameter(torch.zeros(1))

    def loss(number: int) -> Iterator[Tensor]:
        yield (weight - (1.0 if number == 0 else 0.2)).square().sum()

    result = MaskedAdam(100, 0.03, patience=3).run({"weight": weight}, {}, loss, groups=2, seed=0)
    patient = nn.Parameter(torch.zeros(1))

    def same(number: int) -> Iterator[Tensor]:
        yield (patient - (1.0 if number == 0 else 0.2)).square().sum()

    whole = MaskedAdam(100, 0.03).run({"weight": patient}, {}, same, groups=2, seed=0)
    assert (result.after, result.steps) == (whole.after, whole.steps)
    assert torch.equal(weight, patient)
    stop = result.steps + 30
    assert result.note == f"stopped at step {stop} of 100: the held-out loss was lowest at step {result.steps}"
    assert [point.step for point in result.curve] == list(range(0, stop + 1, 10))
    assert result.curve == whole.curve[: len(result.curve)]
    assert min(point.held_out for point in result.curve) == result.after


class Killed(Exception):
    """Stands for SIGKILL."""


class Memory:
    """A store that breaks off after a number of states."""

    def __init__(self, states: int) -> None:
        self.left, self.state = states, None

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Keep copies, then break off if this was the last state."""
        self.state: Any = ({name: tensor.clone() for name, tensor in tensors.items()}, dict(values))
        self.state[1]["order"] = list(values["order"])
        self.left -= 1
        if self.left == 0:
            raise Killed

    def load(self) -> Any:
        """The last state."""
        return self.state


@pytest.mark.parametrize(("rank", "rate"), [(None, 0.05), (2, 0.05), (None, 5.0)])
@pytest.mark.parametrize("states", [1, 4, 9])
def test_a_training_that_breaks_off_continues_to_the_same_bytes(
    states: int, rank: int | None, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, the curve and the losses are those of a training that was not interrupted, also if its rate was too high."""
    monkeypatch.setattr(masked_training, "RISE", 1.0)
    adam = MaskedAdam(35, rate, rank=rank)
    wanted, keep, loss = problem()
    result = adam.run(wanted, keep, loss, groups=6, seed=1)
    assert (result.curve[1].held_out > result.before) == (rate > 1)
    store = Memory(states)
    parameters, keep, loss = problem()
    with pytest.raises(Killed):
        adam.run(parameters, keep, loss, groups=6, seed=1, store=store)
    parameters, keep, loss = problem()  # as a new process finds them
    assert adam.run(parameters, keep, loss, groups=6, seed=1, store=store) == result
    assert all(torch.equal(parameters[name], wanted[name]) for name in wanted)


def test_a_curve_that_ends_in_nan_keeps_the_best_state() -> None:
    """The loss turns NaN at the 25th step: the state of step 20 is kept, and the note names the step."""
    parameters, keep, loss = problem()
    steps = 0

    def breaks(number: int) -> Iterator[Tensor]:
        nonlocal steps
        steps += torch.is_grad_enabled()
        yield next(loss(number)) * (float("nan") if steps >= 25 else 1.0)

    result = MaskedAdam(100, 0.02, rank=2).run(parameters, keep, breaks, groups=6, seed=1)
    assert (result.steps, result.curve[-1].step) == (20, 20)
    assert "at step 25: the best weights before it were kept" in result.note
    with torch.no_grad():
        assert float(next(loss(5))) == pytest.approx(result.after)
    assert all(torch.equal(parameters[name] == 0, ~keep[name]) for name in parameters)
