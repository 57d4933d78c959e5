"""The sensitivities of the loss to each block's outputs, in a stage of a run, with those in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from sparsellm.activations.sensitivity import iterate_output_fisher
from sparsellm.models.blocks import blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pipeline.events import SENSITIVITIES, Advance, Observer, run_stage
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.report import Report


def estimate_fisher(
    loaded: LoadedModel, batches: Sequence[Tensor], *, report: Report, observer: Observer, cache: Journal | None
) -> Sequence[Tensor]:
    """The sensitivities by block, as `output_fisher`, from the cache or computed and stored there."""
    with run_stage(SENSITIVITIES, report, observer, unit="block") as advance:
        return _cached_fisher(loaded, batches, cache, advance)


class JournalTensors(Sequence[Tensor]):
    """Numbered tensors of a journal, read on access."""

    def __init__(self, journal: Journal, name: str, count: int) -> None:
        self._journal, self._name, self._count = journal, name, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            raise TypeError("The tensors are read one by one: slices are not supported.")
        number = range(self._count)[index]
        tensors = self._journal.tensors(f"{self._name}-{number}")
        if tensors is None:
            raise KeyError(f"{self._name} {number} is not in the journal.")
        return tensors["x"]


def _cached_fisher(loaded: LoadedModel, batches: Sequence[Tensor], cache: Journal | None, advance: Advance) -> Sequence[Tensor]:
    """The sensitivities by block, from the cache; computed and stored there unless all are present."""
    name, count = "sensitivity", len(blocks_of(loaded.model))
    computed: dict[int, Tensor] = {}
    if cache is None or any(cache.fact(f"{name}-{number}") is None for number in range(count)):
        for number, sensitivity in iterate_output_fisher(loaded, batches):
            if cache is None:
                computed[number] = sensitivity
            else:
                cache.store_tensors(f"{name}-{number}", {"x": sensitivity})
            advance(count - number, count)
    return JournalTensors(cache, name, count) if cache else [computed[number] for number in range(count)]
