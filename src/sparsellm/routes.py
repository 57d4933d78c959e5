"""Which tokens each expert of a block is shown: its own, and where these are too few some of the layer's others."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.views import routed


class Routes:
    """Which tokens each expert of a block is shown: those that are routed to it, and others where these are too few.

    An expert with fewer tokens than its layers have inputs cannot tell what it does to them. It is also shown tokens of the
    layer, evenly spaced over all batches, as if they were routed to it, until there are as many: its Gram matrices then hold a
    share of the layer's.

    counts: how many tokens are routed to each expert, over all batches. tokens: of the layer. least: how many each is shown.
    """

    def __init__(self, counts: Tensor, tokens: int, least: int) -> None:
        self.counts, self.tokens = counts, tokens
        self._others = [tokens - int(count) for count in counts]
        lacking = [max(0, least - int(count)) for count in counts]
        self._lacking = [min(some, others) for some, others in zip(lacking, self._others, strict=True)]
        self._passed = [0] * len(counts)  # tokens that are not routed to the expert, so far in this pass
        self._shown: list[Tensor] = []

    @property
    def most(self) -> int:
        """How many tokens an expert is shown, at most."""
        return max(int(count) + lacking for count, lacking in zip(self.counts, self._lacking, strict=True))

    def restart(self) -> None:
        """A pass over the batches begins."""
        self._passed = [0] * len(self._passed)

    def choose(self, chosen: Tensor) -> list[Tensor]:
        """The tokens that each expert is shown of the next batch. chosen: (tokens, top-k), as the router has it."""
        self._shown = []
        for number, mine in enumerate(routed(chosen, len(self._lacking))):
            lacking, others = self._lacking[number], self._others[number]
            if lacking:
                (rest,) = torch.where((chosen != number).all(-1))
                place = torch.arange(len(rest), device=rest.device) + self._passed[number]
                self._passed[number] += len(rest)
                extra = rest[(place + 1) * lacking // others > place * lacking // others]
                mine = torch.cat([mine, extra]).sort().values  # noqa: PLW2901  (in the order of the tokens)
            self._shown.append(mine)
        return self._shown

    def again(self, chosen: Tensor) -> list[Tensor]:
        """The same tokens once more, however they are routed now: so that two streams can be held against each other."""
        return self._shown
