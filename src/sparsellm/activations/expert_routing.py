"""Selects the tokens from which the statistics of each expert are computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sparsellm.activations.streams import StopForward
from sparsellm.errors import UnsupportedModel
from sparsellm.models.blocks import Block, Call
from sparsellm.models.contexts import replace_forward
from sparsellm.models.experts import expert_members, experts_of, forward_by_expert, routed_tokens
from sparsellm.runtime import collectives
from sparsellm.solvers.linalg import allclose_bf16


class ExpertSamples:
    """Selects the tokens from which each expert's statistics are computed: those routed to it, plus others if too few.

    The Gram matrix of an expert with fewer tokens than its layers have inputs is singular. Such an expert also gets tokens
    that are not routed to it, evenly spaced over all batches, until it has `least` tokens. Its Gram matrix then contains a
    share of the whole layer's.

    Args:
        routed: (batches, experts), the number of tokens routed to each expert, over all processes.
        tokens: Number of tokens in each of these batches.
        least: Minimum number of tokens per expert, where the batches hold that many.

    Attributes:
        counts: (experts,), the number of tokens routed to each expert, over all batches.
    """

    def __init__(self, routed: Tensor, tokens: Sequence[int], least: int) -> None:
        self.counts = routed.sum(0)
        unrouted = torch.tensor(tokens).unsqueeze(1) - routed
        self._unrouted_before = collectives.shard((unrouted.cumsum(0) - unrouted).tolist())  # in earlier batches
        self._unrouted: list[int] = unrouted.sum(0).tolist()
        missing = [max(0, least - int(count)) for count in self.counts]
        self._extra = [min(count, available) for count, available in zip(missing, self._unrouted, strict=True)]

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of an expert."""
        return max(int(count) + extra for count, extra in zip(self.counts, self._extra, strict=True))

    def choose(self, number: int, member: Tensor) -> list[Tensor]:
        """Choose each expert's tokens from a batch.

        Args:
            number: Index of the batch in this process.
            member: (tokens, experts), True where a token is routed to an expert.

        Returns:
            For each expert, the indices of its tokens, in ascending order.
        """
        chosen, before = [], self._unrouted_before[number]
        for expert, indices in enumerate(routed_tokens(member)):
            extra, unrouted = self._extra[expert], self._unrouted[expert]
            if extra:
                (candidates,) = torch.where(~member[:, expert])
                position = torch.arange(len(candidates), device=candidates.device) + before[expert]
                added = candidates[(position + 1) * extra // unrouted > position * extra // unrouted]
                indices = torch.cat([indices, added]).sort().values  # noqa: PLW2901  (in the order of the tokens)
            chosen.append(indices)
        return chosen


@torch.no_grad()
def sample_expert_tokens(block: Block, entered: Iterable[tuple[Tensor, Call]], tokens: Sequence[int]) -> ExpertSamples:
    """Count the tokens routed to each expert of a block, in passes that end at the experts.

    Args:
        block: A block with experts.
        entered: The block's input, (batch, seq, model), and its call, for each batch of this process.
        tokens: Number of tokens in each batch of all processes.

    Raises:
        UnsupportedModel: The experts' forward differs from the one computed from their parameters.
    """
    views = [view for view in block.views.values() if view.expert is not None]
    module = views[0].module
    experts, forward = experts_of(module), module.forward
    assert experts is not None
    counts: list[list[int]] = []

    def count(*inputs: Tensor) -> Tensor:
        if not counts and not allclose_bf16(forward_by_expert(experts, views)(*inputs), forward(*inputs)):
            raise UnsupportedModel(
                f"The experts of {block.name}, a {type(module).__name__}, compute something else than their parameters' names "
                "say. They cannot be pruned."
            )
        counts.append(expert_members(experts, *inputs).sum(0).tolist())
        raise StopForward

    with replace_forward(module, count):
        for hidden, call in entered:
            with suppress(StopForward):
                block(hidden, call)
    return ExpertSamples(
        torch.tensor(collectives.all_gather(counts)), tokens, max(view.in_features for view in views[: len(experts.names)])
    )
