"""A miniature pruned and measured as a run would be, with all counted that its stages hold and do."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sparsellm.activations.sensitivity import TOKENS
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.errors import InvalidSetting
from sparsellm.evaluation.perplexity import batch_to_measure, measure
from sparsellm.methods import BlockResult, Plan
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.pruning.journal import Journal
from sparsellm.pruning.plan import uniform_plan
from sparsellm.recovery.masked_training import split_batches
from sparsellm.runs.events import Event, Stage
from sparsellm.runs.meter import Meter, Work
from sparsellm.runs.miniature import Miniature
from sparsellm.runs.placement import Placement, load
from sparsellm.runs.preparation import Prepared
from sparsellm.runs.recipe import Recipe
from sparsellm.runs.registry import ALLOCATIONS
from sparsellm.runs.report import Report
from sparsellm.runs.stages import SENSING, prune_model
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.patterns import Unstructured

VISITED = 2
"""Blocks that the miniature prunes: all are alike."""


@dataclass(frozen=True)
class Seen:
    """A stage of the miniature's run. memory: peaks by device type. files, kept: as `Storage` counts them."""

    memory: Mapping[str, int]
    files: int
    kept: int
    work: Work


class _Enough(Exception):
    """As many blocks were pruned as show what each takes."""


@dataclass(frozen=True)
class Trial:
    """A miniature to be pruned as the recipe says. samples: how many windows the real run has. folder: for its files."""

    recipe: Recipe
    ready: Prepared
    place: Placement
    small: Miniature
    batch: int
    samples: int
    folder: Path

    def prune(self, windows: int) -> dict[str, Seen]:
        """What each stage up to the last block takes, on so many calibration windows."""
        ready, seen, done = self.ready, {}, 0
        method = ready.method
        if isinstance(method, SparseLLM):
            method = replace(method, sampled=max(1, method.sampled // self.small.scale))
        with Meter() as meter:
            loaded = self._settled(meter)
            stages = _Stages(meter, loaded.storage)

            def observe(event: Event) -> None:
                nonlocal done
                if isinstance(event, Stage):
                    most = min(self.samples, -(-TOKENS // ready.length)) if event.name == SENSING else self.samples
                    stages.begin(event.name, self._share(windows, most))
                elif isinstance(event, BlockResult):
                    done += 1
                    if done == VISITED:
                        raise _Enough

            journal = Journal.begin(self.folder, {})
            given = split_batches(self._draw(windows), self.batch) if ready.windows.numel() else ()
            with suppress(_Enough):
                prune_model(
                    self._tiny,
                    loaded,
                    method,
                    self._plan(blocks_of(loaded.model)),
                    given,
                    Report(self._tiny, {}),
                    observe,
                    journal,
                )
            seen = stages.end()
        shutil.rmtree(self.folder)
        return seen

    def measure(self) -> list[Seen]:
        """What measuring takes on one batch, and on two."""
        most = max(map(len, self.ready.tests.values()))
        with Meter() as meter:
            loaded = self._settled(meter)
            stages = _Stages(meter, loaded.storage)
            for batches in (1, 2):
                count = min(most, batches * self.measured)
                stages.begin(str(batches), self._share(count, most))
                measure(loaded, self._draw(count), batch=self.measured)
            return list(stages.end().values())

    @property
    def _tiny(self) -> Recipe:
        """The recipe for the miniature."""
        sharing = self.recipe.sharing if self.recipe.sharing in ALLOCATIONS else "uniform"
        form = {"allocation": sharing, "offload": self.place.streamed, "device": str(self.ready.device)}
        return self.recipe.model_copy(update=form | {"model": str(self.small.checkpoint.folder), "dtype": "auto"})

    def _settled(self, meter: Meter) -> LoadedModel:
        """The miniature where the real model will be."""
        loaded = load(self._tiny, self.small.checkpoint, self.ready.device, self.folder, self.place)
        meter.hold(loaded.model.parameters())
        return loaded

    def _draw(self, count: int) -> Tensor:
        """Windows of random tokens."""
        generator = torch.Generator().manual_seed(0)
        shape = (count, self.small.length(self.ready.length))
        return torch.randint(self.small.checkpoint.config.get_text_config().vocab_size, shape, generator=generator)

    def _share(self, windows: int, most: int) -> float:
        """Of the real run's room for lists, that of so many windows where it has `most`: the same lists then go to files."""
        return min(1.0, windows / most) / self.small.scale**2

    def _plan(self, blocks: Sequence[Block]) -> Plan:
        """The recipe's plan, or as many zeros without order where its groups do not fit the miniature."""
        chosen = frozenset(block.index for block in self.ready.blocks if any(name in self.ready.plan for name in _names(block)))
        pattern = self.recipe.pattern
        try:
            return uniform_plan(blocks, pattern, chosen, self.recipe.include, self.recipe.exclude)
        except InvalidSetting:
            share = pattern.count_removed(2**20) / 2**20
            return uniform_plan(blocks, Unstructured(share), chosen, self.recipe.include, self.recipe.exclude)

    @property
    def measured(self) -> int:
        """Windows at a time when the real run measures."""
        words = self.ready.source.skeleton().get_input_embeddings().num_embeddings
        return batch_to_measure(words, self.ready.length, self.place.memory)

    @property
    def touched(self) -> int:
        """How many blocks the real run prunes."""
        return sum(any(name in self.ready.plan for name in _names(block)) for block in self.ready.blocks)


class _Stages:
    """Cuts what a meter and a storage count into stages."""

    def __init__(self, meter: Meter, storage: OffloadManager) -> None:
        self._meter, self._storage, self._name = meter, storage, ""
        self._budget, self._host = storage.budget or 0, storage.host
        self._seen: dict[str, Seen] = {}

    def begin(self, name: str, share: float) -> None:
        """A stage begins, in which this share of the room may be taken."""
        self.end()
        self._name = name
        self._storage.budget, self._storage.host = int(share * self._budget), int(share * self._host)
        self._storage.most_written = self._storage.most_kept = 0
        self._meter.restart()

    def end(self) -> dict[str, Seen]:
        """The present stage ends; all so far."""
        if self._name:
            counted = dict(self._meter.peak), self._storage.most_written, self._storage.most_kept, dict(self._meter.work)
            self._seen[self._name] = Seen(*counted)
        return self._seen


def _names(block: Block) -> list[str]:
    """The full names of a block's layers."""
    return [block.full_name(name) for name in block.layers]
