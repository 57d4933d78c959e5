r"""The far end of Omega: the whole model as one problem, masks held.

The paper's global goal is the distance of the pruned model's outputs from the dense model's, $\mathcal L(z_L, y)$. Here it is
the KL divergence of its predictions, lowered by gradient steps over all pruned blocks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.blocks import blocks_of, checkpointed, computed_in, evaluating, only_trained
from sparsellm.methods import Plan
from sparsellm.refinement import Descent, Refined

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUPLING = Descent(300, 4e-3)
"""The usual descent of this stage, for models of `COUPLING_WIDTH`."""

COUPLING_WIDTH = 256
"""The width of the models that the learning rate was chosen on."""

PROMPT = 0.125
"""How much of a window that the model writes is given, as a share of its length."""

AT_A_TIME = 64
"""Windows that are written side by side."""


@torch.no_grad()
def written(model: PreTrainedModel, windows: Tensor, count: int, seed: int = 0, compute: torch.dtype | None = None) -> Tensor:
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
    drawing = torch.Generator(device=model.device).manual_seed(seed)
    found = []
    with evaluating(model), computed_in(model, compute):
        for some in prompts.to(model.device).split(AT_A_TIME):
            pieces, past = [some], None
            while sum(piece.shape[1] for piece in pieces) < length:  # not `generate`: it would stop where a text ends
                output = model(input_ids=pieces[-1], past_key_values=past, use_cache=True)
                past = output.past_key_values
                pieces.append(torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=drawing))
            found.append(torch.cat(pieces, 1).cpu())
    return torch.cat(found)


def coupling(model: PreTrainedModel, steps: int) -> Descent:
    """The descent for a model: the wider it is, the shorter Adam's steps (Yang et al., Tensor Programs V, 2022)."""
    width: int = model.config.get_text_config().hidden_size
    return replace(COUPLING, steps=steps, rate=COUPLING.rate * min(1.0, COUPLING_WIDTH / width))


def held_back(windows: Tensor) -> int:
    """How many of the calibration windows, the last, judge this stage; at least one."""
    return max(1, round(COUPLING.held * len(windows)))


def batched(windows: Tensor, more: Tensor, batch: int) -> tuple[list[Tensor], int]:
    """Batches to read, each (batch, length), and how many of them, the last, are to be held back: real text only.

    windows: (samples, length), the calibration windows. more: what the model wrote.
    """
    back = held_back(windows)
    last = windows[-back:].split(batch)
    return [some for some in (*more.split(batch), *windows[:-back].split(batch), *last) if len(some)], len(last)


@torch.no_grad()
def last_states(model: PreTrainedModel, batches: Sequence[Tensor], compute: torch.dtype | None = None) -> list[Tensor]:
    """What the model's head reads, (batch, seq, model), batch by batch: the dense model's predictions, before it is pruned."""
    with evaluating(model), computed_in(model, compute):
        body = model.base_model
        return [body(input_ids=batch.to(model.device), use_cache=False).last_hidden_state for batch in batches]


def distil(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    states: Sequence[Tensor],
    plan: Plan,
    descent: Descent,
    back: int | None = None,
) -> tuple[Refined, tuple[str, ...]]:
    r"""Lower $\mathrm{KL}(\text{dense} \,\|\, \text{pruned})$, nats a token, over the planned blocks' parameters, in place.

    batches: token numbers, each (batch, seq). states: from `last_states`, of the dense model. plan: its layers keep their
    zeros; other linear layers of these blocks stay as they are. back: how many batches, the last, are held back. Returns what
    was gained, and the biases and norms that moved.

    Every block keeps only its inputs for the backward pass. Memory: see `sparsellm.memory`.
    """
    blocks = [block for block in blocks_of(model) if any(block.full_name(name) in plan for name in block.layers)]
    fixed = {block.full_name(name) for block in blocks for name in block.layers} - set(plan)
    parameters = {
        block.full_name(name): parameter
        for block in blocks
        for name, parameter in block.module.named_parameters()
        if block.full_name(name).rsplit(".", 1)[0] not in fixed
    }
    keep = {f"{name}.weight": parameters[f"{name}.weight"] != 0 for name in plan}
    small = {name: parameter.detach().clone() for name, parameter in parameters.items() if parameter.ndim == 1}
    head = model.get_output_embeddings()
    with evaluating(model), computed_in(model, torch.float32), only_trained(model, parameters.values()), checkpointed(blocks):

        def loss(number: int) -> Tensor:
            predicted = model(input_ids=batches[number].to(model.device), use_cache=False).logits
            return _divergence(head(states[number].float()), predicted)

        found = descent.run(parameters, keep, loss, len(batches), seed=0, back=back)
        for block in blocks:
            block.settle()
    return found, _moved(small, parameters)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over tokens of the KL divergence of two sets of logits, (batch, seq, vocabulary)."""
    wanted, found = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def _moved(before: Mapping[str, Tensor], after: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """The names of the tensors that are not what they were."""
    return tuple(name for name, tensor in before.items() if not torch.equal(tensor.to(after[name].dtype), after[name]))
