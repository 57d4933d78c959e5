"""Gradient steps with the masks held: on one block's outputs, or on the whole model's predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsellm.activations.streams import Activations
from sparsellm.errors import InvalidSetting
from sparsellm.methods import TrainingResult
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import compute_dtype_context, require_grad_only
from sparsellm.runtime import collectives, devices
from sparsellm.solvers.linalg import eigh

VALIDATIONS = 10
"""How often the held-back groups are looked at on the way."""

TOKENS_A_STEP = 4096
"""About how many tokens a step over one block reads."""

Pieces = Callable[[int], Iterator[Tensor]]
"""The loss of a group of windows by its number, in pieces that add up to it: each is as much as is computed at once."""


def windows_a_step(samples: int, length: int) -> int:
    """How many of the windows a step over one block reads: an eighth of all at most, to have some to hold back."""
    return max(1, min(TOKENS_A_STEP // length, samples // 8))


def split_batches(windows: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Windows (samples, length) in batches of at most `batch`, none of which lies astride two steps' groups.

    So what a step reads does not depend on how many windows travel together, unless more do than a step reads.
    """
    step = max(batch, windows_a_step(*windows.shape))
    return tuple(piece for group in windows.split(step) for piece in group.split(batch))


@dataclass(frozen=True)
class MaskedAdam:
    """Adam with a rate that falls to 0, stopped where held-back groups of windows say so.

    steps: at most; 0 for none. rate: the first learning rate. held: the share of groups held back, at least one.
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
        loss: Pieces,
        groups: int,
        seed: int,
        back: int | None = None,
    ) -> TrainingResult:
        """Lower the loss of the groups over the parameters, in place; what is held back decides which state stays.

        keep: masks by parameter name; what is False stays zero. loss: of several processes each gives the pieces of its own
        windows, and steps go along the sum of the gradients. groups: how many; with fewer than two nothing is done. back:
        how many of them, the last, are held back; by default the usual share.
        The same for the same arguments: groups come in an order drawn from `seed`. A loss that is not finite ends the descent,
        with the best state so far.
        """
        back = min(back or max(1, round(self.held * groups)), groups - 1)
        if self.steps == 0 or groups < 2 or not parameters:
            few = self.steps > 0 and groups < 2
            return TrainingResult(
                0.0, 0.0, 0, "not refined: there is only one group of windows, and none to hold back" if few else ""
            )
        generator = torch.Generator().manual_seed(seed)
        before = best = self._held(loss, groups - back, groups)
        state = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if not math.isfinite(before):
            return TrainingResult(before, before, 0, "not refined: the loss is not finite")
        optimizer = torch.optim.Adam(parameters.values(), lr=self.rate, betas=(0.9, 0.95))
        taken, note = 0, ""
        order: list[int] = []
        looks = {round(self.steps * (look + 1) / VALIDATIONS) for look in range(VALIDATIONS)}
        for step in range(1, self.steps + 1):
            order = order or torch.randperm(groups - back, generator=generator).tolist()
            for group in optimizer.param_groups:
                group["lr"] = self.rate * (1 - (step - 1) / self.steps)
            value = _slope(loss(order.pop()), list(parameters.values()))
            if not math.isfinite(value):
                note = f"the loss became infinite or undefined at step {step}: the best weights before it were kept"
                break
            optimizer.step()
            _mask(parameters, keep)
            if step in looks and (now := self._held(loss, groups - back, groups)) < best:
                best, taken = now, step
                state = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])
        return TrainingResult(before, best, taken, note)

    @staticmethod
    @torch.no_grad()
    def _held(loss: Pieces, start: int, end: int) -> float:
        """The mean loss over the held-back groups."""
        found = torch.tensor(sum(float(piece) for number in range(start, end) for piece in loss(number)), dtype=torch.float64)
        collectives.all_reduce_(found)
        return float(found) / (end - start)


def _slope(pieces: Iterator[Tensor], parameters: Sequence[nn.Parameter]) -> float:
    """A loss, the sum of its pieces in all processes; gradients are left in the parameters, None where nothing depends on one.

    Added up in float64, as in `sparsellm.solvers.statistics`.
    """
    value = 0.0
    sums: list[Tensor | None] = [None] * len(parameters)
    for parameter in parameters:
        parameter.grad = None  # the last step's: its memory is needed
    with torch.enable_grad():
        for piece in pieces:
            value += float(piece.detach())
            for number, found in enumerate(torch.autograd.grad(piece, parameters, allow_unused=True)):
                total = sums[number]
                if found is not None:
                    sums[number] = found.to(devices.widest_float(found.device)) if total is None else total.add_(found)
    if collectives.world() > 1:
        message = torch.tensor([value, *(float(some is not None) for some in sums)], dtype=torch.float64)
        every = [
            torch.zeros_like(x, dtype=devices.widest_float(x.device)) if some is None else some
            for some, x in zip(sums, parameters, strict=True)
        ]
        collectives.all_reduce_(message, *every)
        value, *known = message.tolist()
        sums = [some if count else None for some, count in zip(every, known, strict=True)]
    for parameter, some in zip(parameters, sums, strict=True):
        parameter.grad = None if some is None else some.to(parameter.dtype)
    return value


@torch.no_grad()
def _mask(parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor]) -> None:
    """Zero what is not kept."""
    for name, mask in keep.items():
        parameters[name].mul_(mask)


def refine_block(
    block: Block,
    inputs: Activations,
    keep: Mapping[str, Tensor],
    names: Sequence[str],
    metric: Tensor | None,
    descent: MaskedAdam,
) -> TrainingResult:
    r"""Lower $E\lVert h - \mathrm{block}(\hat x) \rVert_F^2$ over the block's own parameters, h the dense stream behind it.

    keep: masks by layer. names: which parameters of the block to train. metric: F, (model, model), or None for the identity.
    A step reads `windows_a_step` windows, batch after batch, or one batch where that is more. The gradient is of one block
    only; memory for the block in float32 seven times, and for one batch's backward pass.
    """
    inputs.advance_dense()
    targets = inputs.dense
    if targets is None:
        raise TypeError("There is no dense stream: ask for one with teacher=True.")
    root = None if metric is None else _root(metric)
    had = torch.tensor(sum(float(_weighed(target.float(), root).square().sum()) for target in targets), dtype=torch.float64)
    collectives.all_reduce_(had)
    sizes = [windows for windows, _ in inputs.shapes]
    power = float(had) / (sum(sizes) * targets[0][0].numel())
    groups = _groups(sizes, windows_a_step(sum(sizes), targets[0].shape[1]))
    local = {batch: place for place, batch in enumerate(collectives.shard(range(len(sizes))))}
    with ExitStack() as context:
        context.enter_context(compute_dtype_context(block.module, torch.float32))
        parameters = {name: parameter for name, parameter in block.module.named_parameters() if name in names}
        context.enter_context(require_grad_only(block.module, parameters.values()))
        calls = inputs.calls(block, torch.float32)

        def loss(number: int) -> Iterator[Tensor]:
            share = 1 / (power * sum(sizes[batch] for batch in groups[number]) * targets[0][0].numel())
            for place in (local[batch] for batch in groups[number] if batch in local):
                missed = block(inputs.pruned[place].float(), calls[place]) - targets[place].float()
                yield _weighed(missed, root).square().sum() * share

        masks = {name: mask for name, mask in block.masks(keep).items() if name in parameters}
        return descent.run(parameters, masks, loss, len(groups), seed=block.index)


def _groups(sizes: Sequence[int], step: int) -> list[list[int]]:
    """Batches by number, in groups of at least `step` windows: as `cut` made them, groups begin where batches do. All of all
    processes."""
    groups: list[list[int]] = [[]]
    for number, _ in enumerate(sizes):
        if sum(sizes[batch] for batch in groups[-1]) >= step:
            groups.append([])
        groups[-1].append(number)
    return groups


def _root(metric: Tensor) -> Tensor:
    """L with F = L Lᵀ, for a positive semi-definite F."""
    heights, vectors = eigh(metric)
    root: Tensor = vectors * heights.clamp(min=1e-3 * float(heights.mean())).sqrt()
    return root


def _weighed(errors: Tensor, root: Tensor | None) -> Tensor:
    """Errors as they count."""
    return errors if root is None else errors @ root
