"""A model run with its blocks stood in for: what stands before them and behind them in a family is done by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.blocks import Block
from sparsellm.calls import Call
from sparsellm.errors import SparseLLMError, UnsupportedModel
from sparsellm.memory import out_of_memory
from sparsellm.modes import computed_in, instead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def predicting(
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
        return standing_in(blocks, answer, run).logits  # type: ignore[no-any-return]

    with computed_in(model, dtype, without=[block.module for block in blocks]):
        yield predict


class _Indexed(Exception):
    """The model took the first of what a block answered: its blocks answer with tuples."""


def standing_in(blocks: Sequence[Block], answer: Callable[[Block, Tensor, Call], Tensor], run: Callable[[], Any]) -> Any:
    """What a run of the model gives with each block's forward replaced by a function of the block, its input and its call.

    Some models take a block's answer as it is, some the first of a tuple. Which is seen where it goes: the hidden states keep
    their shape from block to block.
    """

    def once(wrap: bool) -> Any:
        shapes: list[torch.Size] = []

        def forward_of(block: Block) -> Callable[..., Any]:
            def forward(hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
                shapes.append(hidden.shape)
                if hidden.shape != shapes[0]:
                    raise _Indexed
                found = answer(block, hidden, Call(arguments, keywords))
                return (found,) if wrap else found

            return forward

        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(instead(block.module, forward_of(block)))
            return run()

    try:
        return once(wrap=False)
    except _Indexed:
        return once(wrap=True)
    except (RuntimeError, IndexError, ValueError):
        if len(blocks) > 1:
            raise
        return once(wrap=True)  # a single block's answer goes to no other block


def entered(model: PreTrainedModel, blocks: Sequence[Block], batch: Tensor) -> list[tuple[Tensor, Call]]:
    """What each block is called with on a batch of token numbers, with the blocks passing the hidden states through.

    Raises UnsupportedModel where the model does not run on token numbers alone, or calls a block never or more than once.
    """
    seen: dict[int, tuple[Tensor, Call]] = {}
    kind = type(model).__name__

    def record(block: Block, hidden: Tensor, call: Call) -> Tensor:
        if len(seen) <= 1 and block is blocks[0]:
            seen.clear()  # the model may be run again, with tuples for answers
        if block.index in seen:
            raise UnsupportedModel(f"A {kind} runs {block.name} more than once for every text, which no method here prunes.")
        seen[block.index] = hidden, call
        return hidden

    try:
        standing_in(blocks, record, partial(model.base_model, input_ids=batch.to(home(model)), use_cache=False))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        if isinstance(error, SparseLLMError) or out_of_memory(error):
            raise
        told = " ".join(str(error).split())
        raise UnsupportedModel(
            f"A {kind} cannot be run block by block on text alone ({type(error).__name__}: {told[:200]})."
        ) from error
    unseen = [block.name for block in blocks if block.index not in seen]
    if unseen:
        raise UnsupportedModel(f"A {kind} does not run {unseen[0]} on text, so nothing is known of what its layers read.")
    return [seen[block.index] for block in blocks]


def home(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token numbers: the device of its embedding."""
    return model.get_input_embeddings().weight.device  # type: ignore[no-any-return]
