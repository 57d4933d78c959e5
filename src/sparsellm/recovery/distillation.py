r"""The far end of Omega: the whole model as one problem, masks held.

The paper's global goal is the distance of the pruned model's outputs from the dense model's, $\mathcal L(z_L, y)$. Here it is
the KL divergence of its predictions, lowered by gradient steps over all pruned blocks at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.methods import Plan, TrainingResult
from sparsellm.methods.layerwise import planned_layers
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode, gradient_checkpointing, require_grad_only
from sparsellm.recovery.masked_training import MaskedAdam
from sparsellm.runtime import collectives

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINING = MaskedAdam(300, 4e-3)
"""The usual gradient steps over the whole model, for models of `TRAINING_WIDTH`."""

TRAINING_WIDTH = 256
"""The width of the models that the learning rate was chosen on."""

PROMPT = 0.125
"""How much of a window that the model writes is given, as a share of its length."""

AT_A_TIME = 64
"""Windows that are written side by side."""


@torch.no_grad()
def generate_samples(
    model: PreTrainedModel, windows: Tensor, count: int, seed: int = 0, compute: torch.dtype | None = None
) -> Tensor:
    """More text, in the dense model's own words: (count, length) token numbers.

    Each begins with a stretch of a calibration window, an eighth of its length from a place drawn by `seed`, and goes on as the
    model does, drawn from its predictions as they are (LLM-QAT, Liu et al., 2023, writes all of its text so). Real text is what
    this stage soonest runs out of: on few windows it learns them by heart.

    windows: (samples, length). Cost: a forward pass of every token, one after the other, `AT_A_TIME` windows side by side.
    """
    if count == 0:
        return windows[:0]
    samples, length = windows.shape
    given = max(1, int(PROMPT * length))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(samples, (count, 1), generator=generator)
    starts = torch.randint(length - given + 1, (count, 1), generator=generator)
    prompts = windows[rows, starts + torch.arange(given)]
    drawing = torch.Generator(device=model.device)
    found: list[list[list[int]]] = []
    pages = list(enumerate(prompts.split(AT_A_TIME)))
    with eval_mode(model), compute_dtype_context(model, compute):
        for number, some in collectives.shard(pages):
            drawing.manual_seed(seed * len(pages) + number)
            pieces, past = [some.to(model.device)], None
            while sum(piece.shape[1] for piece in pieces) < length:  # not `generate`: it would stop where a text ends
                output = model(input_ids=pieces[-1], past_key_values=past, use_cache=True)
                past = output.past_key_values
                pieces.append(torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=drawing))
            found.append(torch.cat(pieces, 1).tolist())
    return torch.tensor([window for page in collectives.all_gather(found) for window in page])


def model_training(model: PreTrainedModel, steps: int) -> MaskedAdam:
    """The descent for a model: the wider it is, the shorter Adam's steps (Yang et al., Tensor Programs V, 2022)."""
    width: int = model.config.get_text_config().hidden_size
    return replace(TRAINING, steps=steps, rate=TRAINING.rate * min(1.0, TRAINING_WIDTH / width))


def count_held_out(windows: Tensor) -> int:
    """How many of the calibration windows, the last, judge this stage; at least one."""
    return max(1, round(TRAINING.held * len(windows)))


Group = tuple[Tensor, ...]
"""What one step reads: tensors of windows, each as many as are computed at once; of several processes each has its own."""


def group_batches(windows: Tensor, more: Tensor, step: int, batch: int) -> tuple[list[Group], int]:
    """Groups of windows to read, each (batch, length), and how many groups, the last, are to be held back: real text only. Of
    several processes each gets its share of every group.

    windows: (samples, length), the calibration windows. more: what the model wrote. step: windows in a group. batch: of them,
    at a time.
    """
    back = count_held_out(windows)
    last = windows[-back:].split(step)
    groups = (*more.split(step), *windows[:-back].split(step), *last)
    batch = min(batch, -(-step // collectives.world()))
    return [tuple(collectives.shard(some.split(batch))) for some in groups if len(some)], len(last)


@torch.no_grad()
def last_states(model: PreTrainedModel, groups: Sequence[Group], compute: torch.dtype | None = None) -> list[Group]:
    """What the model's head reads, (batch, seq, model), for each batch: the dense model's predictions, before it is pruned."""

    def read(batch: Tensor) -> Tensor:
        states: Tensor = model.base_model(input_ids=batch.to(model.device), use_cache=False).last_hidden_state
        return states

    with eval_mode(model), compute_dtype_context(model, compute):
        return [tuple(read(batch) for batch in group) for group in groups]


def distill(
    model: PreTrainedModel,
    groups: Sequence[Group],
    states: Sequence[Group],
    plan: Plan,
    descent: MaskedAdam,
    back: int | None = None,
) -> tuple[TrainingResult, tuple[str, ...]]:
    r"""Lower $\mathrm{KL}(\text{dense} \,\|\, \text{pruned})$, nats a token, over the planned blocks' parameters, in place.

    groups: token numbers for each step, in tensors of (batch, seq). states: from `last_states`, of the dense model. plan: its
    layers keep their zeros; other linear layers of these blocks stay as they are. back: how many groups, the last, are held
    back. Returns what was gained, and the biases and norms that moved.

    Every block keeps only its inputs for the backward pass. Memory: see `sparsellm.runtime.memory`.
    """
    blocks = [block for block in blocks_of(model) if any(block.full_name(name) in plan for name in block.layers)]
    parameters: dict[str, nn.Parameter] = {}
    keep: dict[str, Tensor] = {}
    for block in blocks:
        fixed = block.parameters_of(name for name in block.layers if block.full_name(name) not in plan)
        local = {name: parameter for name, parameter in block.module.named_parameters() if name not in fixed}
        masks = block.masks({name: block.layer(name).weight != 0 for name in planned_layers(block, plan)})
        parameters |= {block.full_name(name): parameter for name, parameter in local.items()}
        keep |= {block.full_name(name): mask for name, mask in masks.items() if name in local}
    others = {block.full_name(name) for block in blocks for name in block.unpruned_parameters()}
    small = {name: parameter.detach().clone() for name, parameter in parameters.items() if name in others}
    shares = collectives.all_gather_object([sum(len(batch) for batch in group) for group in groups])
    sizes = [sum(each) for each in zip(*shares, strict=True)]
    head = model.get_output_embeddings()
    with (
        eval_mode(model),
        compute_dtype_context(model, torch.float32),
        require_grad_only(model, parameters.values()),
        gradient_checkpointing(block.module for block in blocks),
    ):

        def loss(number: int) -> Iterator[Tensor]:
            windows = sizes[number]
            for batch, state in zip(groups[number], states[number], strict=True):
                predicted = model(input_ids=batch.to(model.device), use_cache=False).logits
                yield _divergence(head(state.float()), predicted) * (len(batch) / windows)

        found = descent.run(parameters, keep, loss, len(groups), seed=0, back=back)
        for block in blocks:
            block.round_to_storage_dtype()
    return found, _moved(small, parameters)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over tokens of the KL divergence of two sets of logits, (batch, seq, vocabulary)."""
    wanted, found = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def _moved(before: Mapping[str, Tensor], after: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """The names of the tensors that are not what they were."""
    return tuple(name for name, tensor in before.items() if not torch.equal(tensor.to(after[name].dtype), after[name]))
