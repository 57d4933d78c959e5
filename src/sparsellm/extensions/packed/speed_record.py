"""The speeds and sizes of a packed model that `bench` measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sparsellm.errors import plural
from sparsellm.evaluation.measurements import Summarized
from sparsellm.runtime.memory import human_bytes

TORCH, KERNEL, PACKED, CEILING = "dense, torch", "dense, own kernel", "packed", "ceiling"
"""Forms of a model: transformers with torch's products, with this package's for bfloat16, and packed. The ceiling is no form:
it is the speed at which the dense weights are read from memory, and nothing else is done."""


@dataclass(frozen=True)
class Speed:
    """The speed of a form with a number of threads and of sequences.

    Attributes:
        form: Name of the form; `CEILING` for the ceiling.
        threads: Threads of torch and of the kernels.
        batch: Sequences that are decoded together.
        decode: Tokens a second of all sequences together, one token of each at a time, with a cache of keys and values.
        prefill: Tokens of the prompts a second; None for the ceiling.
    """

    form: str
    threads: int
    batch: int
    decode: float
    prefill: float | None


@dataclass(frozen=True, repr=False)
class Bench(Summarized):
    """The measurement of a packed model by `bench`.

    Attributes:
        model: Name of the packed model.
        disk_bytes: Size of its weight files.
        memory_bytes: Bytes of the weights in memory, by form.
        step_bytes: Bytes of the dense weights that decoding one token reads.
        bandwidth: Bytes a second at which the dense weights are read from memory, by number of threads.
        prompt: Tokens of each prompt.
        tokens: Tokens of each sequence that a measurement decodes.
        speeds: The speeds; the form `TORCH` comes first among those with the same threads and batch.
        notes: What limits the figures.
        environment: Versions and machine.
        cache_bytes: Size of the processors' last-level caches; None if it is not known.

    Raises:
        ValueError: A speed is not a positive number, or the dense model or the ceiling lacks one of the packed model's.
    """

    model: str
    disk_bytes: int
    memory_bytes: dict[str, int]
    step_bytes: int
    bandwidth: dict[int, float]
    prompt: int
    tokens: int
    speeds: list[Speed]
    notes: list[str]
    environment: dict[str, str]
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the speeds, which may come from a report that was edited."""
        forms: dict[tuple[int, int], set[str]] = {}
        for x in self.speeds:
            forms.setdefault((x.threads, x.batch), set()).add(x.form)
            if not 0 < x.decode < math.inf:
                raise ValueError(f"{x.form} decodes {x.decode} tokens a second")
        if not forms or any(not {TORCH, PACKED, CEILING} <= found for found in forms.values()):
            raise ValueError(f"the speeds of {TORCH}, {PACKED} and {CEILING} belong together")

    def ratio(self, speed: Speed, form: str) -> float:
        """How many times as fast as another form a form decodes, with the same threads and batch."""
        key = (form, speed.threads, speed.batch)
        return speed.decode / next(x.decode for x in self.speeds if (x.form, x.threads, x.batch) == key)

    @property
    def caution(self) -> str:
        """Why the speeds say little: the dense weights fit in the caches, whose size is known. Otherwise empty."""
        if self.cache_bytes is None or self.step_bytes > self.cache_bytes:
            return ""
        weights, cache = human_bytes(self.step_bytes), human_bytes(self.cache_bytes)
        return (
            f"Too small to tell: {weights} of dense weights fit in a processor cache of {cache}, so the speeds do not show "
            "what reading from memory costs"
        )

    def describe(self) -> list[str]:
        """A sentence on the packed model and the dense one for each number of threads and sequences, after the caution."""
        dense = {(x.threads, x.batch): x.decode for x in self.speeds if x.form == TORCH}
        return [self.caution] * bool(self.caution) + [
            f"{plural(x.threads, 'thread')}, {plural(x.batch, 'sequence')}: {x.decode:.1f} tokens a second packed, "
            f"{dense[x.threads, x.batch]:.1f} dense; {self.ratio(x, TORCH):.2f} × torch, {self.ratio(x, CEILING):.2f} × ceiling"
            for x in self.speeds
            if x.form == PACKED
        ]

    @property
    def machine(self) -> str:
        """The device, and the kernel that multiplied by the packed weights."""
        kernel = self.environment.get("kernel", "none")
        return f"{self.environment.get('device', 'cpu')} {'without a' if kernel == 'none' else f'with the {kernel}'} kernel"

    def summary(self) -> dict[str, str]:
        """Size and speeds."""
        size, dense = self.memory_bytes[PACKED], self.memory_bytes[TORCH]
        return {"model": self.model, "size": f"{size / dense:.0%} of the dense weights", "packed": "; ".join(self.describe())}

    def to_dict(self) -> dict[str, Any]:
        """All figures, with the ratios of every speed."""
        ratios = [
            {"times_torch": self.ratio(x, TORCH), "times_ceiling": self.ratio(x, CEILING)} | asdict(x) for x in self.speeds
        ]
        return asdict(self) | {"speeds": ratios}
