"""Training of one block with fixed masks: the error of its outputs, and the batches of its gradient steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from sparsellm.activations.walk import Activations
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.recover.training.masked_training import MaskedAdam, TrainingStore
from sparsellm.extensions.recover.training.quantized_training import rounded_layers, store_scales
from sparsellm.methods import TrainingResult
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import compute_dtype_context, require_grad_only
from sparsellm.runtime import collectives
from sparsellm.solvers.linalg import eigh
from sparsellm.texts.padding import windows_a_step


def refine_block(
    block: Block,
    inputs: Activations,
    keep: Mapping[str, Tensor],
    *,
    names: Sequence[str],
    fisher: Tensor | None,
    adam: MaskedAdam,
    scales: Mapping[str, Scales] | None = None,
    store: TrainingStore | None = None,
) -> TrainingResult:
    r"""Minimize $E\lVert h - \mathrm{block}(\hat x) \rVert_F^2$ over a block's parameters, in place.

    h is the dense block's output and $\hat x$ the pruned stream's input. A step uses `windows_a_step` sequences, or one batch
    if that is more. Memory: seven float32 copies of the block (`trained_bytes`), and the activations of
    one batch.

    Args:
        inputs: The activations at the block, with a dense stream.
        keep: Masks by layer name, (out, in).
        names: Names of the trained parameters, within the block.
        fisher: F, (model, model), positive semi-definite; None for the identity.
        scales: By full name of a rounded layer, its scales, which are trained with its integers.
        store: As for `MaskedAdam.run`.

    Returns:
        The result; losses are relative to $E\lVert h \rVert_F^2$.
    """
    inputs.advance_dense()
    targets = inputs.dense
    assert targets is not None
    root = None if fisher is None else _square_root(fisher)
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
        parameters = {block.full_name(name): x for name, x in block.module.named_parameters() if name in names}
        context.enter_context(require_grad_only(block.module, parameters.values()))
        calls = inputs.calls(block, torch.float32)

        def loss(number: int) -> Iterator[Tensor]:
            scale = 1 / (power * sum(sizes[batch] for batch in groups[number]) * numel)
            for index in (local[batch] for batch in groups[number] if batch in local):
                output = block(inputs.pruned[index].float(), calls[index])
                error = output.float() - targets[index].float()
                yield _apply_root(root, error).square().sum() * scale

        masks = {block.full_name(name): mask for name, mask in block.masks(keep).items() if name in names}
        rounded = list(rounded_layers(block, scales or {}, parameters))
        result = adam.run(parameters, masks, loss, groups=len(groups), seed=block.index, rounded=rounded, store=store)
        store_scales(scales or {}, rounded)
        return result


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


def _square_root(fisher: Tensor) -> Tensor:
    """L with F = L Lᵀ for a positive semi-definite F; eigenvalues are at least a thousandth of their mean."""
    eigenvalues, vectors = eigh(fisher)
    root: Tensor = vectors * eigenvalues.clamp(min=1e-3 * float(eigenvalues.mean())).sqrt()
    return root


def _apply_root(root: Tensor | None, states: Tensor) -> Tensor:
    """Hidden states, (..., model), times the root of F, if there is one."""
    return states if root is None else states @ root
