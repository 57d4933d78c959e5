"""Gradient steps with fixed masks: the optimiser, and its use on the outputs of one block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsellm.activations.walk import Activations
from sparsellm.data.samples import unpadded_batches
from sparsellm.errors import InvalidSetting
from sparsellm.methods import TrainingResult
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import compute_dtype_context, require_grad_only
from sparsellm.runtime import collectives, devices
from sparsellm.solvers.linalg import eigh

VALIDATIONS = 10
"""Number of validations during training."""

TOKENS_A_STEP = 4096
"""Approximate number of tokens per gradient step of a block."""

Pieces = Callable[[int], Iterator[Tensor]]
"""Maps the number of a group to its loss, in terms that are computed one at a time and add up to it."""


def windows_a_step(samples: int, length: int) -> int:
    """Number of sequences per gradient step of a block; at most an eighth of all, so that some can be held out."""
    return max(1, min(TOKENS_A_STEP // length, samples // 8))


def split_batches(windows: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Divide sequences, (samples, seq), into batches of at most `batch` that do not cross the boundaries of gradient steps.

    The sequences of a step then do not depend on the batch size, unless a batch is larger than a step. Batches have no padding.
    """
    step = max(batch, windows_a_step(*windows.shape))
    return tuple(part for group in windows.split(step) for part in unpadded_batches(group, batch))


@dataclass(frozen=True)
class MaskedAdam:
    """Adam with fixed masks and a learning rate that falls linearly to 0; the state with the best validation loss is kept.

    Attributes:
        held: Fraction of the groups held out for validation; at least one group is.
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
        *,
        groups: int,
        seed: int,
        held_out: int | None = None,
        progress: Callable[[float, int], None] | None = None,
    ) -> TrainingResult:
        """Train the parameters in place and keep the state with the smallest mean loss of the held-out groups.

        A non-finite loss ends the training. Equal arguments give equal results.

        Args:
            keep: Masks by parameter name, of the parameters' shapes; entries that are False stay zero.
            loss: Loss of a group, see `Pieces`. Each process returns the terms of its own sequences; gradients are summed.
            groups: Number of groups; with fewer than two there is no training.
            seed: Seed of the order of the groups.
            held_out: Number of held-out groups, the last ones; by default the fraction `held`.
            progress: Called after each step with its number and that of all steps.

        Returns:
            The validation losses before and after, the number of the step whose state is kept, and a note on failures.
        """
        held_out = min(held_out or max(1, round(self.held * groups)), groups - 1)
        if self.steps == 0 or groups < 2 or not parameters:
            too_few = self.steps > 0 and groups < 2
            note = "not refined: there is only one group of sequences, and none can be held out" if too_few else ""
            return TrainingResult(0.0, 0.0, 0, note)
        generator = torch.Generator().manual_seed(seed)
        training_groups = groups - held_out
        before = best = self._validation_loss(loss, training_groups, groups)
        best_state = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if not math.isfinite(before):
            return TrainingResult(before, before, 0, "not refined: the loss is not finite")
        optimizer = torch.optim.Adam(parameters.values(), lr=self.rate, betas=(0.9, 0.95))
        best_step, note = 0, ""
        order: list[int] = []
        validation_steps = {round(self.steps * (number + 1) / VALIDATIONS) for number in range(VALIDATIONS)}
        for step in range(1, self.steps + 1):
            order = order or torch.randperm(training_groups, generator=generator).tolist()
            for group in optimizer.param_groups:
                group["lr"] = self.rate * (1 - (step - 1) / self.steps)
            value = _compute_gradients(loss(order.pop()), list(parameters.values()))
            if not math.isfinite(value):
                note = f"the loss became infinite or undefined at step {step}: the best weights before it were kept"
                break
            optimizer.step()
            _apply_masks(parameters, keep)
            if step in validation_steps and (current := self._validation_loss(loss, training_groups, groups)) < best:
                best, best_step = current, step
                best_state = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            if progress is not None:
                progress(step, self.steps)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(best_state[name])
        return TrainingResult(before, best, best_step, note)

    @staticmethod
    @torch.no_grad()
    def _validation_loss(loss: Pieces, start: int, end: int) -> float:
        """The mean loss of the groups from `start` to `end` - 1, over all processes."""
        total = torch.tensor(sum(float(term) for number in range(start, end) for term in loss(number)), dtype=torch.float64)
        collectives.all_reduce_(total)
        return float(total) / (end - start)


def _compute_gradients(terms: Iterator[Tensor], parameters: Sequence[nn.Parameter]) -> float:
    """Set the gradients of the sum of all terms over all processes, None for parameters without one; return the sum.

    Accumulates in float64, as `sparsellm.solvers.statistics` does.
    """
    value = 0.0
    sums: list[Tensor | None] = [None] * len(parameters)
    for parameter in parameters:
        parameter.grad = None  # releases the memory of the previous step's gradient
    with torch.enable_grad():
        for term in terms:
            value += float(term.detach())
            for number, gradient in enumerate(torch.autograd.grad(term, parameters, allow_unused=True)):
                total = sums[number]
                if gradient is not None:
                    wide = devices.widest_float(gradient.device)
                    sums[number] = gradient.to(wide) if total is None else total.add_(gradient)
    if collectives.world() > 1:
        # the loss, and for each parameter whether this process has a gradient
        message = torch.tensor([value, *(float(total is not None) for total in sums)], dtype=torch.float64)
        filled = [
            torch.zeros_like(parameter, dtype=devices.widest_float(parameter.device)) if total is None else total
            for total, parameter in zip(sums, parameters, strict=True)
        ]
        collectives.all_reduce_(message, *filled)
        value, *counts = message.tolist()
        sums = [total if count else None for total, count in zip(filled, counts, strict=True)]
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = None if total is None else total.to(parameter.dtype)
    return value


@torch.no_grad()
def _apply_masks(parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor]) -> None:
    """Set the pruned weights to zero, not to -0.0 as a product would."""
    for name, mask in keep.items():
        parameters[name].masked_fill_(~mask, 0)


def refine_block(
    block: Block,
    inputs: Activations,
    keep: Mapping[str, Tensor],
    *,
    names: Sequence[str],
    metric: Tensor | None,
    adam: MaskedAdam,
) -> TrainingResult:
    r"""Minimise $E\lVert h - \mathrm{block}(\hat x) \rVert_F^2$ over a block's parameters, in place.

    h is the dense block's output and $\hat x$ the pruned stream's input. A step uses `windows_a_step` sequences, or one batch
    if that is more. Memory: seven float32 copies of the block (`trained_bytes`), and the activations of
    one batch.

    Args:
        inputs: The activations at the block, with a dense stream.
        keep: Masks by layer name, (out, in).
        names: Names of the trained parameters, within the block.
        metric: F, (model, model), positive semi-definite; None for the identity.

    Returns:
        The result; losses are relative to $E\lVert h \rVert_F^2$.

    Raises:
        TypeError: If the activations have no dense stream.
    """
    inputs.advance_dense()
    targets = inputs.dense
    if targets is None:
        raise TypeError("There is no dense stream: ask for one with needs_dense_stream=True.")
    root = None if metric is None else _square_root(metric)
    energy = torch.tensor(sum(float(_apply_root(root, state.float()).square().sum()) for state in targets), dtype=torch.float64)
    collectives.all_reduce_(energy)
    longest = max(length for _, length in inputs.shapes)
    sizes = [sequences * (length / longest) for sequences, length in inputs.shapes]  # of every batch, over all processes
    numel = longest * targets[0].shape[-1]
    power = float(energy) / (sum(sizes) * numel)
    groups = _group_batches(sizes, windows_a_step(round(sum(sizes)), longest))
    local = {batch: index for index, batch in enumerate(collectives.shard(range(len(sizes))))}
    with ExitStack() as context:
        context.enter_context(compute_dtype_context(block.module, torch.float32))
        parameters = {name: parameter for name, parameter in block.module.named_parameters() if name in names}
        context.enter_context(require_grad_only(block.module, parameters.values()))
        calls = inputs.calls(block, torch.float32)

        def loss(number: int) -> Iterator[Tensor]:
            scale = 1 / (power * sum(sizes[batch] for batch in groups[number]) * numel)
            for index in (local[batch] for batch in groups[number] if batch in local):
                error = block(inputs.pruned[index].float(), calls[index]) - targets[index].float()
                yield _apply_root(root, error).square().sum() * scale

        masks = {name: mask for name, mask in block.masks(keep).items() if name in parameters}
        return adam.run(parameters, masks, loss, groups=len(groups), seed=block.index)


def _group_batches(sizes: Sequence[float], step: int) -> list[list[int]]:
    """Divide batches into groups of at least `step` sequences of the full length; returns the batch numbers of each group.

    A shorter sequence counts for as much of one as it has tokens.
    """
    groups: list[list[int]] = [[]]
    for number, _ in enumerate(sizes):
        if sum(sizes[batch] for batch in groups[-1]) >= step:
            groups.append([])
        groups[-1].append(number)
    return groups


def _square_root(metric: Tensor) -> Tensor:
    """L with F = L Lᵀ for a positive semi-definite F; eigenvalues are at least a thousandth of their mean."""
    eigenvalues, vectors = eigh(metric)
    root: Tensor = vectors * eigenvalues.clamp(min=1e-3 * float(eigenvalues.mean())).sqrt()
    return root


def _apply_root(root: Tensor | None, states: Tensor) -> Tensor:
    """Hidden states, (..., model), times the root of the metric, if there is one."""
    return states if root is None else states @ root


COPIES = 7
"""float32 copies of the trained parameters: the weights, Adam's two moments, the best state so far, the gradient of a batch,
and the float64 sum of all batches' gradients, which counts as two."""


def trained_bytes(blocks: Sequence[Block], together: bool) -> int:
    """Bytes for the training of the largest block, or of all blocks at once if `together`."""
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in blocks]
    return COPIES * 4 * (sum(sizes) if together else max(sizes, default=0))


def predictions_bytes(*, tokens: int, width: int, batch_tokens: int, vocabulary: int, depth: int) -> int:
    """Additional bytes for distillation: the dense model's last states, three tensors of logits, and the blocks' inputs."""
    return 4 * (tokens * width + 3 * batch_tokens * vocabulary + batch_tokens * width * depth)
