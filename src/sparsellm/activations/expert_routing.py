"""Which tokens each expert of a block is shown: its own, and where these are too few some of the layer's others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sparsellm.activations.output_cache import StopForward, allclose_bf16
from sparsellm.errors import UnsupportedModel
from sparsellm.models.block_calls import Call
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import replace_forward
from sparsellm.models.experts import expert_members, experts_of, forward_by_expert, routed_tokens
from sparsellm.runtime import collectives


class ExpertSamples:
    """Which tokens each expert of a block is shown: those that are routed to it, and others where these are too few.

    An expert with fewer tokens than its layers have inputs cannot tell what it does to them. It is also shown tokens of the
    layer, evenly spaced over all batches, as if they were routed to it, until there are as many: its Gram matrices then hold a
    share of the layer's.

    routed: how many tokens are routed to each expert, (batches, experts), in all processes. tokens: of the layer, in each of
    these batches. least: how many each is shown. counts: over all batches.
    """

    def __init__(self, routed: Tensor, tokens: Sequence[int], least: int) -> None:
        self.counts = routed.sum(0)
        others = torch.tensor(tokens).unsqueeze(1) - routed  # tokens that are not routed to the expert
        self._before = collectives.shard((others.cumsum(0) - others).tolist())
        self._others: list[int] = others.sum(0).tolist()
        lacking = [max(0, least - int(count)) for count in self.counts]
        self._lacking = [min(some, most) for some, most in zip(lacking, self._others, strict=True)]
        self._batch = 0
        self._shown: list[Tensor] = []

    @property
    def max_tokens(self) -> int:
        """How many tokens an expert is shown, at most."""
        return max(int(count) + lacking for count, lacking in zip(self.counts, self._lacking, strict=True))

    def restart(self) -> None:
        """A pass over the batches begins."""
        self._batch = 0

    def choose(self, member: Tensor) -> list[Tensor]:
        """The tokens that each expert is shown of the next batch. member: which are routed to it, (tokens, experts)."""
        self._shown, before = [], self._before[self._batch]
        self._batch += 1
        for number, local in enumerate(routed_tokens(member)):
            lacking, others = self._lacking[number], self._others[number]
            if lacking:
                (rest,) = torch.where(~member[:, number])
                place = torch.arange(len(rest), device=rest.device) + before[number]
                extra = rest[(place + 1) * lacking // others > place * lacking // others]
                local = torch.cat([local, extra]).sort().values  # noqa: PLW2901  (in the order of the tokens)
            self._shown.append(local)
        return self._shown

    def repeat(self, member: Tensor) -> list[Tensor]:
        """The same tokens once more, however they are routed now: so that two streams can be held against each other."""
        return self._shown


@torch.no_grad()
def sample_expert_tokens(block: Block, entered: Iterable[tuple[Tensor, Call]], tokens: Sequence[int]) -> ExpertSamples:
    """Which tokens a block's experts are shown, from a pass as far as them.

    entered: what enters the block, batch by batch of this process, and how it is called. tokens: of all processes' batches.
    """
    views = [view for view in block.views.values() if view.expert is not None]
    module = views[0].module
    experts, forward = experts_of(module), module.forward
    assert experts is not None
    counts: list[list[int]] = []

    def count(*given: Tensor) -> Tensor:
        if not counts and not allclose_bf16(forward_by_expert(experts, views)(*given), forward(*given)):
            raise UnsupportedModel(
                f"The experts of {block.name}, a {type(module).__name__}, compute something else than their parameters' names "
                "say. They cannot be pruned."
            )
        counts.append(expert_members(experts, *given).sum(0).tolist())
        raise StopForward

    with replace_forward(module, count):
        for hidden, call in entered:
            with suppress(StopForward):
                block(hidden, call)
    return ExpertSamples(
        torch.tensor(collectives.all_gather(counts)), tokens, max(view.in_features for view in views[: len(experts.names)])
    )
