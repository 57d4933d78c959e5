"""The plan of a run: its estimates, what would be refused or noted, and its time if that was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from sparsellm.evaluation.results import Summarized
from sparsellm.models.coverage import Coverage
from sparsellm.observers.progress import human_seconds
from sparsellm.pipeline.planning import Estimate
from sparsellm.recipes.plan import PLANNED_LAYERS, PlannedLayer
from sparsellm.runtime.memory import human_bytes


@dataclass(frozen=True)
class MeasuredTime:
    """The seconds that a run takes if its blocks are alike, from its first block, which was pruned for real.

    Attributes:
        preparation: From the start to the first block, without measuring perplexity.
        block: Of pruning the first block, and of the pass through it that gives the next one its inputs.
        blocks: Number of blocks to prune.
        evaluation: Of measuring perplexity before and after, from some sequences of each text.
        left_out: Stages of the run that were not measured and are not counted.
    """

    preparation: float
    block: float
    blocks: int
    evaluation: float
    left_out: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The sum of all that was measured."""
        return self.preparation + self.blocks * self.block + self.evaluation

    def describe(self) -> str:
        """The sum, what it was computed from, and what is left out."""
        block = human_seconds(self.block) if self.block >= 60 else f"{self.block:.2g}s"
        parts = [f"{human_seconds(self.preparation)} of preparation", f"{self.blocks} times the {block} of the first block"]
        parts += [f"{human_seconds(self.evaluation)} of measuring perplexity"] * bool(self.evaluation)
        return f"about {human_seconds(self.seconds)}: {', '.join(parts)}; without {', '.join(self.left_out)}"


@dataclass(frozen=True, repr=False)
class RunPlan(Estimate, Summarized):
    """The estimates for a run, with what it would say."""

    refusal: str = ""  # why the run would not begin
    coverage: Coverage | None = None  # how much of the blocks' weights is pruned
    each_layer: Sequence[PlannedLayer] = ()  # every linear layer of the blocks; empty from `estimate`
    notes: tuple[str, ...] = ()  # those that the run gives before its work
    time: MeasuredTime | None = None  # None if it was not measured

    def summary(self) -> dict[str, str]:
        """The layers and method, the memory and disk space with whether the run fits, and the time if it was measured."""
        peak, memory = self.peak, human_bytes(self.placement.memory)
        what = f"{PurePath(self.recipe.model).name}, {sum(self.layers.values())} layers in {self.blocks} blocks"
        needs = f"{human_bytes(peak.data_bytes)} of {memory} on {self.device} while {peak.stage}"
        verdict = "it fits" if self.fits else self.refusal or "memory may not suffice"
        disk = f"{human_bytes(peak.disk_bytes)} of {human_bytes(self.disk_free_bytes)} on disk"
        lines = {"plan": f"{what}, by {self.recipe.describe()}", "needs": f"{needs}, {disk}; {verdict}"}
        return lines | ({"time": self.time.describe()} if self.time else {})

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to plain data, ready for JSON."""
        placement, fields = self.placement, asdict(replace(self, layers=Counter(), coverage=None, each_layer=()))
        del fields["placement"]
        return fields | {
            "model": self.recipe.model,
            "recipe": self.recipe.model_dump(mode="json"),
            "layers": [{"pattern": pattern, "shape": list(shape), "count": n} for (pattern, shape), n in self.layers.items()],
            "each_layer": PLANNED_LAYERS.dump_python(list(self.each_layer), mode="json"),
            "coverage": self.coverage and self.coverage.to_dict(),
            "model_bytes": placement.model,
            "streamed": placement.streamed,
            "note": placement.note,
            "memory_bytes": placement.memory,
            "time": self.time and {**asdict(self.time), "seconds": self.time.seconds},
        }
