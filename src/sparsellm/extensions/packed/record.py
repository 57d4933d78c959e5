"""The record of a packed model in its report: sizes of it and of its matrices, and the speeds that `bench` measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from pydantic import TypeAdapter

from sparsellm.errors import plural, printable
from sparsellm.evaluation.results import Summarized
from sparsellm.extensions.integers.formats import integer_name
from sparsellm.outputs.report import Report
from sparsellm.outputs.sections import Section
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
            f"{dense[x.threads, x.batch]:.1f} dense; {self.ratio(x, TORCH):.2f} × torch, "
            f"{self.ratio(x, CEILING):.2f} of memory's speed"
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


@dataclass(frozen=True)
class MatrixSize:
    """Size of a matrix of a packed model.

    Attributes:
        name: Its stored name.
        shape: Its shape.
        dtype: Name of its dtype.
        zeros: Number of its zeros.
        negative_zeros: How many of them are -0.0 and kept.
        dense_bytes: Its bytes as an ordinary tensor.
        packed_bytes: Its bytes in the packed model; the same if it is not packed.
        packed: Whether it is packed.
        value_bits: Bits of an integer of a quantized matrix; None for another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: int
    negative_zeros: int
    dense_bytes: int
    packed_bytes: int
    packed: bool
    value_bits: int | None = None


@dataclass(frozen=True, repr=False)
class Packed(Summarized, Section):
    """A packed model and its sizes.

    Attributes:
        output: Its folder; empty for one that is read from a report.
        form: "plain" or "archive".
        dense_bytes: Bytes of the model's weight files.
        packed_bytes: Bytes of the packed weight files.
        matrices: Every matrix.
        skipped: Files of the model that were not copied.
        rounded: Whether the weights were rounded as they were packed, so that they are others than the model's.
        bench: Its speeds, if `bench` recorded them in its report.
    """

    form: str
    dense_bytes: int
    packed_bytes: int
    matrices: tuple[MatrixSize, ...]
    skipped: tuple[str, ...] = ()
    rounded: bool = False
    bench: Bench | None = None
    output: str = ""

    @property
    def size(self) -> str:
        """The bytes of the packed weight files, and how many of the model's they are."""
        percent = 100 * self.packed_bytes / max(self.dense_bytes, 1)
        return f"{human_bytes(self.packed_bytes)}, {percent:.0f} % of {human_bytes(self.dense_bytes)}"

    @property
    def description(self) -> str:
        """The form, and the integers of the quantized matrices, if there are any."""
        kinds = sorted({matrix.value_bits for matrix in self.packed if matrix.value_bits is not None})
        return f"{self.form} form" + (f", {' and '.join(map(integer_name, kinds))} values" if kinds else "")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight files."""
        return self.packed_bytes

    @property
    def packed(self) -> list[MatrixSize]:
        """The matrices that are packed."""
        return [matrix for matrix in self.matrices if matrix.packed]

    @property
    def dense(self) -> list[MatrixSize]:
        """The matrices that stay dense."""
        return [matrix for matrix in self.matrices if not matrix.packed]

    @property
    def bits(self) -> float:
        """Bits that a weight of the packed matrices takes, removed ones included."""
        weights = sum(math.prod(matrix.shape) for matrix in self.packed)
        return 8 * sum(matrix.packed_bytes for matrix in self.packed) / max(weights, 1)

    def summary(self) -> dict[str, str]:
        """The sizes, what is packed and what stays dense, each in one line."""
        return {
            "output": f"{PurePath(self.output).name}, {self.description}",
            "size": self.size,
            "packed": f"{len(self.packed)} of {len(self.matrices)} matrices, {self.bits:.2f} bits a weight",
            "dense": ", ".join(matrix.name for matrix in self.dense[:3]) + (", …" if len(self.dense) > 3 else "")
            or "no matrix",
        }

    def describe(self) -> str:
        """The sizes in one sentence, and the speed in another."""
        text = f"Packed ({printable(self.form, 20)} form): {self.size}; {self.bits:.2f} bits a weight of the packed matrices."
        if self.bench is None:
            return text
        return f"{text} Decoding on {printable(self.bench.machine)}: {'. '.join(self.bench.describe())}."

    @classmethod
    def from_dict(cls, data: Any) -> Packed:
        """Read plain data. Raises pydantic's ValidationError."""
        return TypeAdapter(cls).validate_python(data)

    @classmethod
    def of(cls, report: Report) -> Packed | None:
        """The sizes in the report of a packed model; None in that of another one."""
        section = report.sections.get(PACKING)
        return section if isinstance(section, cls) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        speeds = {"bench": self.bench.to_dict()} if self.bench else {}
        return {key: x for key, x in asdict(self).items() if key not in ("output", "bench")} | {"bits": self.bits} | speeds


PACKING = "packing"
"""Name of the section of a report that has the sizes."""


@dataclass(frozen=True, repr=False)
class Unpacked(Summarized):
    """An unpacked model and its sizes.

    Attributes:
        output: Its folder.
        packed_bytes: Bytes of the packed weight files.
        dense_bytes: Bytes of its own weight files.
    """

    output: str
    packed_bytes: int
    dense_bytes: int

    def summary(self) -> dict[str, str]:
        """The folder and the sizes."""
        return {
            "output": PurePath(self.output).name,
            "size": f"{human_bytes(self.dense_bytes)}, from {human_bytes(self.packed_bytes)}",
        }
