"""Estimates of the memory and disk space of a run, by stage and at the peak, before it begins."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsellm.errors import TooLarge
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.recipe import RunRecipe
from sparsellm.runtime.memory import human_bytes
from sparsellm.texts.paths import local_path


@dataclass(frozen=True)
class StageEstimate:
    """Estimates for one stage."""

    name: str  # as in the run's events
    memory: Mapping[str, int]  # bytes of data at the peak, by device type
    files: int  # bytes of hidden states in files


@dataclass(frozen=True)
class PeakEstimate:
    """Estimates for the moment at which most memory is held."""

    stage: str
    data_bytes: int  # on the device that computes
    libraries_bytes: int  # resident in this process, before the run
    resident_bytes: int  # of the run's process
    disk_bytes: int  # with the output and, block by block, the finished blocks


@dataclass(frozen=True, repr=False)
class Estimate:
    """Estimates for a run, from the shapes of its largest block; all blocks are taken to be like it."""

    recipe: RunRecipe
    blocks: int
    layers: Counter[tuple[str, tuple[int, int]]]  # to prune, by pattern and (out, in)
    samples: int
    length: int  # tokens per sequence
    batch: int  # sequences per batch
    device: str
    placement: Placement
    free_bytes: int  # on the device
    disk_free_bytes: int
    stages: list[StageEstimate]
    peak: PeakEstimate
    most_samples: int | None  # whose hidden states fit into memory or on the disk; None for a run without any
    fits: bool


def human_seconds(seconds: float) -> str:
    """Format seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def check_disk(output: Path, needed: int, free: int) -> None:
    """Raise TooLarge if a command writes more bytes than are free where its output is."""
    if needed > free:
        sizes = f"{human_bytes(needed)} of disk are needed, and {human_bytes(free)} are free"
        raise TooLarge(f"{output}: {sizes}. Write to another disk.")


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is or would be."""
    path = local_path(folder).absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free
