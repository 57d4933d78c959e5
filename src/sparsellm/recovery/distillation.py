r"""Distillation of the dense model into the whole pruned model, with fixed masks.

The paper's global objective is the distance of the pruned model's outputs from the dense model's, $\mathcal L(z_L, y)$. Here it
is the KL divergence of the predictions, minimised by gradient steps over all pruned blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.data.samples import sequence_lengths, unpadded_batches
from sparsellm.methods import Plan, TrainingResult, planned_layers
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode, gradient_checkpointing, require_grad_only
from sparsellm.recovery.masked_training import MaskedAdam
from sparsellm.runtime import collectives

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINING = MaskedAdam(300, 4e-3)
"""Default gradient steps over the whole model, for models of width `TRAINING_WIDTH`."""

TRAINING_WIDTH = 256
"""Width of the models on which the learning rate was chosen."""

PROMPT = 0.125
"""Length of the prompt of a generated sequence, as a fraction of the sequence length."""

AT_A_TIME = 64
"""Number of sequences that are generated in parallel."""


@torch.no_grad()
def generate_samples(
    model: PreTrainedModel,
    windows: Tensor,
    count: int,
    *,
    seed: int = 0,
    compute: torch.dtype | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Tensor:
    """Generate additional training sequences with the dense model.

    Each sequence starts with a prompt, an eighth of a calibration sequence from a random position, and is continued by sampling
    from the model's predictions at temperature 1 (LLM-QAT, Liu et al., 2023, generates all of its data this way). With few
    calibration sequences alone, training overfits.

    Cost: a forward pass per token of a sequence, `AT_A_TIME` sequences in parallel.

    Args:
        windows: Calibration sequences, (samples, seq), of token ids, `PADDING` after the end of shorter ones.
        seed: Seed of the prompts and of the sampling.
        compute: Dtype in which the model computes; None for its own.
        progress: Called after each token with the number of generated sequences, of which those at work count in part, and
            their total.

    Returns:
        Token ids, (count, seq).
    """
    if count == 0:
        return windows[:0]
    samples, length = windows.shape
    lengths = sequence_lengths(windows)
    prompt_length = min(max(1, int(PROMPT * length)), int(lengths.min()))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(samples, (count, 1), generator=generator)
    starts = torch.randint(length - prompt_length + 1, (count, 1), generator=generator)
    starts %= lengths[rows] - prompt_length + 1  # within the sequence, where it is shorter than the others
    prompts = windows[rows, starts + torch.arange(prompt_length)]
    token_generator = torch.Generator(device=model.device)
    local: list[list[list[int]]] = []  # this process's batches of sequences
    batches = list(enumerate(prompts.split(AT_A_TIME)))
    with eval_mode(model), compute_dtype_context(model, compute):
        for number, prompt in collectives.shard(batches):
            token_generator.manual_seed(seed * len(batches) + number)
            pieces, past = [prompt.to(model.device)], None
            while sum(piece.shape[1] for piece in pieces) < length:  # unlike `generate`, continues after an end-of-text token
                output = model(input_ids=pieces[-1], past_key_values=past, use_cache=True)
                past = output.past_key_values
                pieces.append(torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=token_generator))
                if progress is not None:
                    done = (len(pieces) - 1) / (length - prompt_length)
                    progress(number * AT_A_TIME + done * len(prompt), count)
            local.append(torch.cat(pieces, 1).tolist())
    return torch.tensor([sequence for batch in collectives.all_gather(local) for sequence in batch])


def model_training(model: PreTrainedModel, steps: int) -> MaskedAdam:
    """The gradient steps for a model; the learning rate falls with its width (Yang et al., Tensor Programs V, 2022)."""
    width: int = model.config.get_text_config().hidden_size
    return replace(TRAINING, steps=steps, rate=TRAINING.rate * min(1.0, TRAINING_WIDTH / width))


def count_held_out(windows: Tensor) -> int:
    """Number of calibration sequences, the last ones, that are held out for validation; at least one."""
    return max(1, round(TRAINING.held * len(windows)))


Group = tuple[Tensor, ...]
"""The sequences of one optimiser step, in batches that are computed at once; each process has its own."""


def group_batches(windows: Tensor, more: Tensor, step: int, batch: int) -> tuple[list[Group], int]:
    """Divide sequences into the groups of the optimiser steps, and each group over the processes and into batches.

    Only calibration sequences are held out; they form the last groups.

    Args:
        windows: Calibration sequences, (samples, seq), `PADDING` after the end of shorter ones.
        more: Generated sequences, (count, seq).
        step: Sequences in a group, over all processes.
        batch: Maximum number of sequences in a batch.

    Returns:
        The groups, whose batches are (batch, seq) without padding, and the number of held-out groups.
    """
    held_out = count_held_out(windows)
    held_out_groups = windows[-held_out:].split(step)
    groups = (*more.split(step), *windows[:-held_out].split(step), *held_out_groups)
    batch = min(batch, -(-step // collectives.world()))
    return [tuple(collectives.shard(unpadded_batches(group, batch))) for group in groups if len(group)], len(held_out_groups)


@torch.no_grad()
def last_states(model: PreTrainedModel, groups: Sequence[Group], compute: torch.dtype | None = None) -> list[Group]:
    """The inputs of the dense model's output head, (batch, seq, model), for each batch; to be taken before pruning."""

    def forward(batch: Tensor) -> Tensor:
        states: Tensor = model.base_model(input_ids=batch.to(model.device), use_cache=False).last_hidden_state
        return states

    with eval_mode(model), compute_dtype_context(model, compute):
        return [tuple(forward(batch) for batch in group) for group in groups]


def distill(
    model: PreTrainedModel,
    groups: Sequence[Group],
    states: Sequence[Group],
    *,
    plan: Plan,
    adam: MaskedAdam,
    head: nn.Module | None = None,
    held_out: int | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> tuple[TrainingResult, tuple[str, ...]]:
    r"""Minimise $\mathrm{KL}(\text{dense} \,\|\, \text{pruned})$ over the planned blocks' parameters, in place.

    The loss is the mean over tokens, in nats. The blocks' activations are recomputed in the backward pass. Memory: see
    `sparsellm.recovery.masked_training.predictions_bytes`.

    Args:
        groups: Token ids, (batch, seq) each, from `group_batches`.
        states: Hidden states of the dense model for the same batches, from `last_states`.
        plan: The pruned layers, whose zeros are kept; other linear layers of these blocks are not trained.
        head: The output head of the dense model; None where it is the pruned model's.
        held_out: Number of held-out groups, the last ones; by default the fraction `adam.held`.
        progress: Called after each step with its number and that of all steps.

    Returns:
        The losses before and after, and the full names of the biases, norms and routers that changed.
    """
    blocks = [block for block in blocks_of(model) if any(block.full_name(name) in plan for name in block.layers)]
    parameters: dict[str, nn.Parameter] = {}
    keep: dict[str, Tensor] = {}
    for block in blocks:
        frozen = block.parameters_of(name for name in block.layers if block.full_name(name) not in plan)
        trained = {name: parameter for name, parameter in block.module.named_parameters() if name not in frozen}
        masks = block.masks({name: block.layer(name).weight != 0 for name in planned_layers(block, plan)})
        parameters |= {block.full_name(name): parameter for name, parameter in trained.items()}
        keep |= {block.full_name(name): mask for name, mask in masks.items() if name in trained}
    unpruned = {block.full_name(name) for block in blocks for name in block.unpruned_parameters()}
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items() if name in unpruned}
    counts = collectives.all_gather_object([sum(batch.numel() for batch in group) for group in groups])
    sizes = [sum(local) for local in zip(*counts, strict=True)]  # tokens of each group, over all processes
    dense_head = model.get_output_embeddings() if head is None else head.float()
    with (
        eval_mode(model),
        compute_dtype_context(model, torch.float32),
        require_grad_only(model, parameters.values()),
        gradient_checkpointing(block.module for block in blocks),
    ):

        def loss(number: int) -> Iterator[Tensor]:
            for batch, state in zip(groups[number], states[number], strict=True):
                logits = model(input_ids=batch.to(model.device), use_cache=False).logits
                yield _divergence(dense_head(state.float()), logits) * (batch.numel() / sizes[number])

        result = adam.run(parameters, keep, loss, groups=len(groups), seed=0, held_out=held_out, progress=progress)
        for block in blocks:
            block.round_to_storage_dtype()
    changed = (name for name, old in initial.items() if not torch.equal(old.to(parameters[name].dtype), parameters[name]))
    return result, tuple(changed)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over tokens of the KL divergence of two sets of logits, (batch, seq, vocabulary)."""
    target, predicted = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (target.exp() * (target - predicted)).sum(-1).mean()
