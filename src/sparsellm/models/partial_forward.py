"""A model run with its blocks stood in for: what stands before them and behind them in a family is done by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.errors import SparseLLMError, UnsupportedModel
from sparsellm.models.block_calls import Call, equal_calls
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import compute_dtype_context, replace_forward
from sparsellm.runtime.memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def prediction_head(
    model: PreTrainedModel, blocks: Sequence[Block], dtype: torch.dtype | None = None
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Within the context, a function from token numbers (batch, seq) and the last block's output (batch, seq, model) to logits.

    It runs the model as it is, with blocks that do nothing but the last, which gives the output that it was told; so whatever
    stands behind the blocks in this family is done. dtype: what that is computed in, if not its own.
    """

    def predict(tokens: Tensor, output: Tensor) -> Tensor:
        def answer(block: Block, hidden: Tensor, call: Call) -> Tensor:
            return output if block is blocks[-1] else hidden

        run = partial(model, input_ids=tokens.to(output.device), use_cache=False)
        return run_with_replaced_blocks(blocks, answer, run).logits  # type: ignore[no-any-return]

    with compute_dtype_context(model, dtype, without=[block.module for block in blocks]):
        yield predict


class _PartialOutput(Exception):
    """The model took a part of what a block answered for the hidden states."""


OTHERS = (None, 0, 1, 2, 3)
"""How many values blocks may answer with after the hidden states, in a tuple; None for the hidden states themselves."""


def run_with_replaced_blocks(
    blocks: Sequence[Block], answer: Callable[[Block, Tensor, Call], Tensor], run: Callable[[], Any]
) -> Any:
    """What a run of the model gives with each block's forward replaced by a function of the block, its input and its call.

    Some models take a block's answer as it is, some the first of a tuple. Which is seen where it goes: the hidden states keep
    their shape from block to block.
    """

    def once(others: int | None) -> Any:
        shapes: list[torch.Size] = []

        def forward_of(block: Block) -> Callable[..., Any]:
            def forward(hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
                shapes.append(hidden.shape)
                if hidden.shape != shapes[0]:
                    raise _PartialOutput
                found = answer(block, hidden, Call(arguments, keywords))
                return found if others is None else (found, *[None] * others)

            return forward

        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(replace_forward(block.module, forward_of(block)))
            return run()

    first: Exception | None = None
    for others in OTHERS:
        try:
            return once(others)
        except (torch.OutOfMemoryError, SparseLLMError):
            raise
        except (_PartialOutput, RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            first = first if first is not None and not isinstance(first, _PartialOutput) else error
    assert first is not None
    raise first


def check_block_chain(before: Block, block: Block, entered: Mapping[int, tuple[Tensor, Call]]) -> None:
    """Raise UnsupportedModel where what enters a block is not what enters the one before it, which a stand-in hands on."""
    if not equal_calls(entered[before.index][0], entered[block.index][0]):
        message = f"The model changes the hidden states between {before.name} and {block.name}."
        raise UnsupportedModel(f"{message} Such models cannot be pruned block by block.")


def block_inputs(model: PreTrainedModel, blocks: Sequence[Block], batch: Tensor) -> list[tuple[Tensor, Call]]:
    """What each block is called with on a batch of token numbers, with the blocks passing the hidden states through.

    Raises UnsupportedModel where the model does not run on token numbers alone, or calls a block never or more than once.
    """
    seen: dict[int, tuple[Tensor, Call]] = {}
    kind = type(model).__name__

    def record(block: Block, hidden: Tensor, call: Call) -> Tensor:
        if block.index in seen:
            raise UnsupportedModel(f"A {kind} runs {block.name} more than once for every text, which no method here prunes.")
        seen[block.index] = hidden, call
        check_block_chain(blocks[max(block.index - 1, 0)], block, seen)
        return hidden

    def run() -> Any:
        seen.clear()  # the model may be run again, with other forms of the blocks' answers
        return model.base_model(input_ids=batch.to(input_device(model)), use_cache=False)

    with model_errors(model, "block by block on text alone"):
        run_with_replaced_blocks(blocks, record, run)
    unseen = [block.name for block in blocks if block.index not in seen]
    if unseen:
        raise UnsupportedModel(f"A {kind} does not run {unseen[0]} on text, so nothing is known of what its layers read.")
    return [seen[block.index] for block in blocks]


@contextmanager
def model_errors(model: PreTrainedModel, how: str) -> Iterator[None]:
    """Within the context an error of the model's own code is an UnsupportedModel; a lack of memory stays what it is.

    how: as what the model cannot be run, for the message.
    """
    try:
        yield
    except Exception as error:  # configurations hold values that no one checks before the model's own code computes with them
        if isinstance(error, SparseLLMError) or is_out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModel(f"A {type(model).__name__} cannot be run {how} ({said}).") from error


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token numbers: the device of its embedding."""
    return model.get_input_embeddings().weight.device  # type: ignore[no-any-return]
