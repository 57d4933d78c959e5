r"""Training of the whole pruned model with fixed masks, toward the dense model.

The paper's global objective is the distance of the pruned model's outputs from the dense model's, $\mathcal L(z_L, y)$. Here it
is the KL divergence of the predictions, minimized by gradient steps over all pruned blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.recover.training.masked_training import MaskedAdam, Pieces, TrainingStore
from sparsellm.extensions.recover.training.quantized_training import RoundedLayer, rounded_layers, store_scales
from sparsellm.extensions.recover.training.trained_weights import TRAINING_WIDTH, Train, pruned_blocks, trained_names
from sparsellm.methods import Plan, TrainingResult, planned_layers
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import (
    compute_dtype_context,
    eval_mode,
    gradient_checkpointing,
    product_dtype_context,
    require_grad_only,
)
from sparsellm.models.output_head import kl_of_logits, logits_of_states, outside_parameters, states_entering_head
from sparsellm.runtime import collectives
from sparsellm.runtime.products import fast_linear_layers
from sparsellm.texts.padding import unpadded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_ADAM = MaskedAdam(1200, 2e-3)
"""Default gradient steps over the whole model, for models of width `TRAINING_WIDTH`."""

RATES: dict[Train, float] = {"full": 1.0, "lora": 2.0}
"""Learning rate of each set of trained parameters, relative to that of all; chosen on a Llama of width 256 at 80 %."""


def adam_for(
    model: PreTrainedModel,
    steps: int,
    *,
    train: Train = "full",
    rank: int = 16,
    patience: int | None = None,
) -> MaskedAdam:
    """The gradient steps for a model; the learning rate falls with its width (Yang et al., Tensor Programs V, 2022)."""
    width: int = model.config.get_text_config().hidden_size
    rate = MODEL_ADAM.rate * RATES[train] * min(1.0, TRAINING_WIDTH / width)
    return replace(MODEL_ADAM, steps=steps, rate=rate, rank=rank if train == "lora" else None, patience=patience)


def count_held_out(windows: Tensor) -> int:
    """Number of sequences that are held out for validation: an eighth of the calibration sequences, at least one."""
    return max(1, round(MODEL_ADAM.held * len(windows)))


Group = tuple[Tensor, ...]
"""The sequences of one optimizer step, in batches that are computed at once; each process has its own."""


def group_batches(windows: Tensor, more: Tensor, step: int, batch: int) -> tuple[list[Group], int]:
    """Divide sequences into the groups of the optimizer steps, and each group over the processes and into batches.

    Generated sequences are held out; they form the last groups. Pruning has fitted the weights to the calibration sequences, on
    which training would seem to lose even where it gains on any other text; they are held out only if too few are generated.

    Args:
        windows: Calibration sequences, (samples, seq), `PADDING` after the end of shorter ones.
        more: Generated sequences, (count, seq).
        step: Sequences in a group, over all processes.
        batch: Maximum number of sequences in a batch.

    Returns:
        The groups, whose batches are (batch, seq) without padding, and the number of held-out groups.
    """
    held_out = count_held_out(windows)
    last = more if len(more) >= held_out else windows
    held_out_groups = last[-held_out:].split(step)
    trained = (x[:-held_out] if x is last else x for x in (more, windows))
    groups = (*(group for x in trained for group in x.split(step)), *held_out_groups)
    batch = min(batch, -(-step // collectives.world()))
    return [tuple(collectives.shard(unpadded_batches(group, batch))) for group in groups if len(group)], len(held_out_groups)


@torch.no_grad()
def last_states(model: PreTrainedModel, groups: Sequence[Group], compute: torch.dtype | None = None) -> list[Group]:
    """The inputs of the dense model's output head, (batch, seq, in), for each batch; to be taken before pruning."""
    with eval_mode(model), compute_dtype_context(model, compute), fast_linear_layers():
        return [tuple(states_entering_head(model, batch.to(model.device)) for batch in group) for group in groups]


def distill(
    model: PreTrainedModel,
    groups: Sequence[Group],
    states: Sequence[Group],
    *,
    plan: Plan,
    adam: MaskedAdam,
    train: Train = "full",
    targets: Iterable[str] | None = None,
    scales: Mapping[str, Scales] | None = None,
    products: torch.dtype | None = None,
    head: nn.Module | None = None,
    outside: bool = False,
    held_out: int | None = None,
    progress: Callable[[float, int], None] | None = None,
    store: TrainingStore | None = None,
) -> tuple[TrainingResult, tuple[str, ...]]:
    r"""Minimize $\mathrm{KL}(\text{dense} \,\|\, \text{pruned})$ of the predictions over the blocks' parameters, in place.

    The blocks' activations are recomputed in the backward pass. Memory: see `ModelTraining.memory_bytes`.

    Args:
        groups: Token ids, (batch, seq) each, from `group_batches`.
        states: Hidden states of the dense model for the same batches, from `last_states`.
        plan: The pruned layers, whose zeros are kept; other linear layers of these blocks are not trained.
        train: The parameters that are trained, as in `trained_names`.
        targets: Full names of the layers that "lora" trains; None for all pruned ones.
        scales: By full name of a rounded layer, its scales, which are trained with its integers.
        products: Dtype of matrix products; weights, sums and the optimizer's state are float32.
        head: The output head of the dense model; None where the pruned model has the same, and `outside` does not train it.
        outside: Whether to train the decoder's parameters outside of its blocks too (`outside_parameters`).
        held_out: Number of held-out groups, the last ones; by default the fraction `adam.held`.
        progress: Called after each step with its number and that of all steps.
        store: As for `MaskedAdam.run`.

    Returns:
        The divergences before and after, in nats per token, and the full names of the trained parameters that changed and
        hold no pruned layer.
    """
    blocks = pruned_blocks(blocks_of(model), plan)
    parameters: dict[str, nn.Parameter] = {}
    keep: dict[str, Tensor] = {}
    rounded: list[RoundedLayer] = []
    for block in blocks:
        layers = planned_layers(block, plan)
        trained = trained_names(block, layers, train, targets)
        masks = block.masks({name: block.layer(name).weight != 0 for name in layers})
        parameters |= {block.full_name(name): x for name, x in block.module.named_parameters() if name in trained}
        keep |= {block.full_name(name): mask for name, mask in masks.items() if name in trained}
        rounded += rounded_layers(block, scales or {}, parameters)
    unpruned = {block.full_name(name) for block in blocks for name in block.unpruned_parameters()}
    if outside:
        others = outside_parameters(model, plan)
        parameters, unpruned = {**parameters, **others}, {*unpruned, *others}
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items() if name in unpruned}
    with (
        eval_mode(model),
        compute_dtype_context(model, torch.float32),
        require_grad_only(model, parameters.values()),
        gradient_checkpointing(block.module for block in blocks),
    ):
        terms = loss_terms(model, groups, states, products=products, head=head)
        run = partial(adam.run, rounded=rounded, held_out=held_out, progress=progress, store=store)
        result = run(parameters, keep, terms, groups=len(groups), seed=0)
        store_scales(scales or {}, rounded)
        for block in blocks:
            block.round_to_storage_dtype()
    changed = (name for name, old in initial.items() if not torch.equal(old.to(parameters[name].dtype), parameters[name]))
    return result, tuple(changed)


def loss_terms(
    model: PreTrainedModel,
    groups: Sequence[Group],
    states: Sequence[Group],
    *,
    products: torch.dtype | None = None,
    head: nn.Module | None = None,
) -> Pieces:
    """The loss of each group, in a term for each of this process's batches. Arguments as for `distill`."""
    counts = collectives.all_gather_object([sum(batch.numel() for batch in group) for group in groups])
    sizes = [sum(local) for local in zip(*counts, strict=True)]  # tokens of each group, over all processes
    blocks, dense_head = blocks_of(model), None if head is None else head.float()

    def of_group(number: int) -> Iterator[Tensor]:
        for batch, state in zip(groups[number], states[number], strict=True):
            tokens = batch.to(model.device)
            with product_dtype_context(model.device, products):
                student = model(input_ids=tokens, use_cache=False).logits
                with torch.no_grad():
                    teacher = logits_of_states(model, blocks, tokens=tokens, states=state.float(), head=dense_head)
                value = kl_of_logits(teacher, student).mean()
            yield value * (batch.numel() / sizes[number])

    return of_group
