"""Sizes of a packed model and of its matrices, as its report holds them, and those of one that was unpacked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from pydantic import TypeAdapter

from sparsellm.errors import printable
from sparsellm.evaluation.measurements import Summarized
from sparsellm.extensions.integers.formats import integer_name
from sparsellm.extensions.packed.speed_record import Bench
from sparsellm.outputs.report import Report
from sparsellm.outputs.sections import Section
from sparsellm.runtime.memory import human_bytes


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
        return PACKED_SIZES.validate_python(data)

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

PACKED_SIZES = TypeAdapter(Packed)


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
