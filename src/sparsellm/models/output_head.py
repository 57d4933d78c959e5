"""The output head: as one more block after the decoder blocks, the states that enter it, the logits, and the last norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.errors import UnsupportedModel
from sparsellm.models.blocks import HEAD_ARCHITECTURE, Block, Call, blocks_of
from sparsellm.models.contexts import compute_dtype_context, replace_forward
from sparsellm.models.loaded_model import PartialOutput, run_with_replaced_blocks
from sparsellm.runtime.products import fast_linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_head(model: PreTrainedModel, index: int) -> Block | None:
    """Return the linear layer that computes the logits, as the block with this number; None for a model without one."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    name = next(path for path, module in model.named_modules() if module is head)
    return Block(index, name, head, HEAD_ARCHITECTURE, {name: tensor.dtype for name, tensor in head.named_parameters()})


def blocks_and_head(model: PreTrainedModel, layers: Collection[str]) -> list[Block]:
    """Return the decoder blocks of a model, followed by its output head if that is among the layers.

    Args:
        model: The model.
        layers: Full names of layers, such as a plan.

    Raises:
        UnsupportedModel: As `blocks_of`, or the head is among the layers and shares its weight with the input embedding.
    """
    blocks = blocks_of(model)
    head = output_head(model, len(blocks)) if layers else None
    if head is None or head.name not in layers:
        return blocks
    weights = dict(model.named_parameters(remove_duplicate=False))
    if tied := [name for name, tensor in weights.items() if tensor is head.module.weight and name != f"{head.name}.weight"]:
        raise UnsupportedModel(
            f"{head.name} cannot be pruned, because it is tied: its weight is also {tied[0]}, which would be pruned with it. "
            "Leave it out of `include`, or save the model with `tie_word_embeddings=False` and a head of its own."
        )
    return [*blocks, head]


def outside_parameters(model: PreTrainedModel, plan: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the decoder's parameters outside of its blocks, by name: the last norm, projections, and the output head.

    Input embeddings are left out unless the head shares their weight; so are the layers of the plan.
    """
    blocks = blocks_of(model)
    path = ".".join(blocks[0].name.split(".")[:-2])
    decoder = {id(x) for x in model.get_submodule(path).modules()} | {id(model.get_output_embeddings())}
    within = {id(x) for block in blocks for x in block.module.modules()}
    names: dict[str, nn.Parameter] = {}
    owners = [module for module in model.modules() if id(module) in decoder - within and not isinstance(module, nn.Embedding)]
    chosen = {id(parameter) for module in owners for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) in chosen and name.removesuffix(".weight") not in plan:
            names[name] = parameter
    return names


def states_entering_head(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The inputs of the output head in a pass over token ids (batch, seq): (batch, seq, in).

    Raises:
        UnsupportedModel: The model has no head, or does not call it.
    """
    entered: list[Tensor] = []
    head = model.get_output_embeddings()

    def record(hidden: Tensor) -> Tensor:
        entered.append(hidden)
        return hidden

    if head is not None:
        with replace_forward(head, record):
            model(input_ids=tokens, use_cache=False)
    if not entered:
        raise UnsupportedModel(f"A {type(model).__name__} calls no output head. Pass `scope='block'`, which needs none.")
    return entered[-1]


def logits_of_states(
    model: PreTrainedModel, blocks: Sequence[Block], *, tokens: Tensor, states: Tensor, head: nn.Module | None = None
) -> Tensor:
    """The logits of given inputs of the output head, scaled and capped as the model does.

    Args:
        blocks: The model's decoder blocks, which do not run.
        tokens: Token ids, (batch, seq).
        states: Inputs of the head, (batch, seq, in).
        head: Takes the place of the model's head; None for that itself.
    """
    own: nn.Module = model.get_output_embeddings()
    forward = (head or own).forward
    run = partial(model, input_ids=tokens, use_cache=False)
    with replace_forward(own, lambda _: forward(states)):
        return run_with_replaced_blocks(blocks, lambda _block, hidden, _call: hidden, run).logits  # type: ignore[no-any-return]


@contextmanager
def prediction_head(
    model: PreTrainedModel, blocks: Sequence[Block], dtype: torch.dtype | None = None
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Context that yields a function from token ids (batch, seq) and the last block's output (batch, seq, model) to logits.

    The function runs the model with blocks that return their input, and a last block that returns the given output.

    Args:
        model: The model.
        blocks: Its decoder blocks; their own parameters are not used.
        dtype: The dtype to compute in outside of the blocks; None for the model's own.
    """

    def predict(tokens: Tensor, output: Tensor) -> Tensor:
        def block_output(block: Block, hidden: Tensor, call: Call) -> Tensor:
            return output if block is blocks[-1] else hidden

        run = partial(model, input_ids=tokens.to(output.device), use_cache=False)
        with fast_linear_layers():
            return run_with_replaced_blocks(blocks, block_output, run).logits  # type: ignore[no-any-return]

    with compute_dtype_context(model, dtype, without=[block.module for block in blocks]):
        yield predict


@contextmanager
def head_inputs(
    model: PreTrainedModel, blocks: Sequence[Block], dtype: torch.dtype | None = None
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Context that yields a function as that of `prediction_head`, to the inputs of the head, (batch, seq, in), not to logits.

    The function raises UnsupportedModel where the model does not call its head.
    """
    entered: list[Tensor] = []
    expected = torch.Size()

    def record(hidden: Tensor) -> Tensor:
        if hidden.shape[:-1] != expected:
            raise PartialOutput
        entered.append(hidden)
        return hidden

    def inputs(tokens: Tensor, output: Tensor) -> Tensor:
        nonlocal expected
        expected = tokens.shape
        predict(tokens, output)
        if not entered:
            raise UnsupportedModel(f"A {type(model).__name__} does not call its output head. Leave it out of `include`.")
        return entered.pop()

    with prediction_head(model, blocks, dtype) as predict, replace_forward(model.get_output_embeddings(), record):
        yield inputs


def other_last_token(tokens: Tensor) -> Tensor:
    """The tokens, (batch, seq), with the last but one in place of the last."""
    return torch.cat([tokens[:, :-1], tokens[:, -2:-1]], dim=1)


def check_causal(model: PreTrainedModel, logits: Tensor, others: Tensor, *, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel for a model in which the last token changes what is predicted before it, beyond rounding.

    Args:
        logits: (batch, seq, vocabulary), of some tokens.
        others: The same of `other_last_token` of them.
        dtype: Dtype of the computation. Experts that get other tokens round differently, and a router that is rounded
            differently may choose another expert: the limit is therefore far above its precision.
    """
    moved = (logits[:, :-1].float() - others[:, :-1].float()).abs().max()
    if moved > math.sqrt(torch.finfo(dtype).eps) * logits.abs().max():
        raise UnsupportedModel(
            f"A {type(model).__name__} is not causal on text alone: its prediction of a token depends on it and later ones. "
            "It can be pruned, but it has no perplexity and no accuracy on text alone."
        )


def kl_of_logits(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the KL divergence of each row of two sets of logits, (..., vocabulary): (...), computed in float32."""
    target, predicted = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (target.exp() * (target - predicted)).sum(-1)
