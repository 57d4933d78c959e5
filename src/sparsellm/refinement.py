"""Gradient steps with the masks held: on one block's outputs, or on the whole model's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsellm.activations import Activations
from sparsellm.blocks import Block, computed_in, only_trained
from sparsellm.errors import InvalidSetting

LOOKS = 10
"""How often the held-back batches are looked at on the way."""


@dataclass(frozen=True)
class Refined:
    """What gradient steps did. before, after: the loss on held-back batches, relative where it is an error.

    steps: how many had been taken at the best look; 0 where none helped, and the weights are as they were. note: what went
    wrong, or nothing.
    """

    before: float
    after: float
    steps: int
    note: str = ""


@dataclass(frozen=True)
class Descent:
    """Adam with a rate that falls to 0, stopped where held-back batches say so.

    steps: at most; 0 for none. rate: the first learning rate. held: the share of batches held back, at least one.
    """

    steps: int
    rate: float
    held: float = 0.125

    def __post_init__(self) -> None:
        if self.steps < 0 or not self.rate > 0 or not 0 < self.held < 1:
            raise InvalidSetting(
                f"Refinement needs steps >= 0, rate > 0 and held in (0, 1), got {self.steps}, {self.rate}, {self.held}."
            )

    def run(
        self,
        parameters: Mapping[str, nn.Parameter],
        keep: Mapping[str, Tensor],
        loss: Callable[[int], Tensor],
        batches: int,
        seed: int,
        back: int | None = None,
    ) -> Refined:
        """Lower `loss(batch number)` over the parameters, in place; what is held back decides which state stays.

        keep: masks by parameter name; what is False stays zero. batches: how many; with fewer than two nothing is done. back:
        how many of them, the last, are held back; by default the usual share.
        The same for the same arguments: batches come in an order drawn from `seed`. A loss that is not finite ends the descent,
        with the best state so far.
        """
        back = min(back or max(1, round(self.held * batches)), batches - 1)
        if self.steps == 0 or batches < 2 or not parameters:
            return Refined(
                0.0,
                0.0,
                0,
                "" if batches > 1 or self.steps == 0 else "not refined: there is only one batch, and none to hold back",
            )
        generator = torch.Generator().manual_seed(seed)
        before = best = self._held(loss, batches - back, batches)
        state = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if not torch.isfinite(torch.tensor(before)):
            return Refined(before, before, 0, "not refined: the loss is not finite")
        optimizer = torch.optim.Adam(parameters.values(), lr=self.rate, betas=(0.9, 0.95))
        taken, note = 0, ""
        order: list[int] = []
        looks = {round(self.steps * (look + 1) / LOOKS) for look in range(LOOKS)}
        for step in range(1, self.steps + 1):
            order = order or torch.randperm(batches - back, generator=generator).tolist()
            for group in optimizer.param_groups:
                group["lr"] = self.rate * (1 - (step - 1) / self.steps)
            optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                value = loss(order.pop())
                value.backward()
            if not bool(value.isfinite()):
                note = f"the loss became infinite or undefined at step {step}: the best weights before it were kept"
                break
            optimizer.step()
            _mask(parameters, keep)
            if step in looks and (now := self._held(loss, batches - back, batches)) < best:
                best, taken = now, step
                state = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])
        return Refined(before, best, taken, note)

    @staticmethod
    @torch.no_grad()
    def _held(loss: Callable[[int], Tensor], start: int, end: int) -> float:
        """The mean loss over the held-back batches."""
        return sum(float(loss(number)) for number in range(start, end)) / (end - start)


@torch.no_grad()
def _mask(parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor]) -> None:
    """Zero what is not kept."""
    for name, mask in keep.items():
        parameters[name].mul_(mask)


def refine_block(
    block: Block, inputs: Activations, keep: Mapping[str, Tensor], names: Sequence[str], metric: Tensor | None, descent: Descent
) -> Refined:
    r"""Lower $E\lVert h - \mathrm{block}(\hat x) \rVert_F^2$ over the block's own parameters, h the dense stream behind it.

    keep: masks by layer. names: which parameters of the block to train. metric: F, (model, model), or None for the identity.
    The gradient is of one block only; memory for the block in float32 four times, and for one batch's backward pass.
    """
    inputs.advance_dense()
    targets = inputs.dense
    if targets is None:
        raise TypeError("There is no dense stream: ask for one with teacher=True.")
    root = None if metric is None else _root(metric)
    power = sum(float(_weighed(target.float(), root).square().mean()) for target in targets) / len(targets)
    with ExitStack() as context:
        context.enter_context(computed_in(block.module, torch.float32))
        parameters = {name: parameter for name, parameter in block.module.named_parameters() if name in names}
        context.enter_context(only_trained(block.module, parameters.values()))
        calls = inputs.calls(block, torch.float32)

        def loss(number: int) -> Tensor:
            missed = block(inputs.pruned[number].float(), calls[number]) - targets[number].float()
            return _weighed(missed, root).square().mean() / power

        masks = {f"{name}.weight": mask for name, mask in keep.items() if f"{name}.weight" in parameters}
        return descent.run(parameters, masks, loss, len(targets), seed=block.index)


def _root(metric: Tensor) -> Tensor:
    """L with F = L Lᵀ, for a positive semi-definite F."""
    heights, vectors = torch.linalg.eigh(metric)
    root: Tensor = vectors * heights.clamp(min=1e-3 * float(heights.mean())).sqrt()
    return root


def _weighed(errors: Tensor, root: Tensor | None) -> Tensor:
    """Errors as they count."""
    return errors if root is None else errors @ root
