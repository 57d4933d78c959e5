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


def home(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token numbers: the device of its embedding."""
    return model.get_input_embeddings().weight.device  # type: ignore[no-any-return]
