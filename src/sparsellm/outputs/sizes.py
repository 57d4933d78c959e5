"""Bytes of a model's weights: as a run writes them, and as `pack` stores them, estimated from above where nothing is packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsellm.methods import LayerResult

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by the dtypes of weights that are pruned."""

SPARSE = 0.1
"""Fraction of zeros from which a matrix is packed for running. With fewer, decoding costs more time than its bytes."""

CODED_BITS = {"bfloat16": 11.2, "float16": 14.2, "float32": 27.2}
"""Bits that a number of a dense Gaussian matrix takes in the plain packed form, by the dtypes that are packed."""

SAVED_BITS, SAVED_FROM = 0.7, 0.3
"""Bits that a kept number takes less where so many small ones are removed, since few exponents are left."""

HEADER_BYTES = 1024
"""Bytes of a packed matrix in the header of its file, from above."""


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of the parameters of a model.

    Attributes:
        written: As ordinary tensors, which runs write.
        packed: As `pack` stores them, or `export`.
        measured: Whether `packed` is the size of packed files, and not an estimate from above.
        bits: Bits that a weight of the pruned layers takes once it is packed; None unless all of them are rounded.
    """

    written: int
    packed: int
    measured: bool = False
    bits: float | None = None

    @classmethod
    def columns(cls, found: Sequence[WeightSizes | None]) -> list[list[str]]:
        """The columns of a table, each under its heading: as written, packed, and the bits a weight if any are rounded."""
        written = [x.written_text if x else "-" for x in found]
        packed = [x.packed_text.replace("at most", "≤") if x else "" for x in found]
        either = [x or y for x, y in zip(packed, written, strict=True)]
        columns = [["size", *written], ["packed", *either]] if any(found) else []
        if any(x and x.bits is not None for x in found):
            columns.append(["bits a weight", *("-" if not x or x.bits is None else f"{x.bits:.3f}" for x in found)])
        return columns

    @property
    def packed_text(self) -> str:
        """The packed bytes with a unit, and that they are an estimate if they are one; empty if packing saves none."""
        from sparsellm.runtime.memory import human_bytes

        if self.measured:
            return human_bytes(self.packed)
        return f"at most {human_bytes(self.packed)}" if self.packed < self.written else ""

    @property
    def written_text(self) -> str:
        """The bytes of ordinary tensors with a unit."""
        from sparsellm.runtime.memory import human_bytes  # the command line reads this module, and does without torch

        return human_bytes(self.written)

    def __str__(self) -> str:
        parts = [f"{self.written_text} {'as ordinary tensors' if self.measured else 'as written'}"]
        parts.append(f"{self.packed_text} packed" if self.packed_text else "no less packed")
        return ", ".join(parts + ([] if self.bits is None else [f"{self.bits:.3f} bits a weight of the pruned layers"]))


def layer_bytes(layer: LayerResult, dtype: str) -> tuple[int, int]:
    """The bytes of a pruned layer as an ordinary tensor of a dtype, and packed: of a rounded one as counted, else estimated."""
    count = layer.shape[0] * layer.shape[1]
    dense = count * ITEM_BYTES.get(dtype, 0)
    bits = layer.bits_per_weight
    if bits is None:
        packed = estimated_bytes(count, layer.zeros, dtype, layer.pattern.is_shareable)
    else:
        packed = math.ceil(count * bits / 8)
    return dense, min(dense, packed + HEADER_BYTES)


def packed_bytes(layers: Sequence[LayerResult], written: int, dtype: str) -> int:
    """The bytes of a model of so many bytes, its pruned layers packed. Other tensors are taken as they are."""
    return written - sum(dense - packed for dense, packed in (layer_bytes(layer, dtype) for layer in layers))


def estimated_bytes(numel: int, removed: int, dtype: str, by_size: bool = True) -> int:
    """Estimate the bytes of a matrix in the plain form from above, within a few per cent for weights pruned by their size.

    Args:
        numel: Number of its weights.
        removed: How many are removed.
        dtype: Name of its dtype.
        by_size: Whether the smallest weights are removed wherever they are, and not as many in each group, as N:M does, where
            small weights are kept and the mask is not shorter.
    """
    sparsity, dense = removed / max(numel, 1), numel * ITEM_BYTES.get(dtype, 0)
    if sparsity < SPARSE or dtype not in CODED_BITS:
        return dense
    value, mask = CODED_BITS[dtype], 1.0
    if by_size:
        value, mask = value - SAVED_BITS * min(1.0, sparsity / SAVED_FROM) ** 2, mask_bits(sparsity)
    return min(dense, math.ceil((numel * mask + (numel - removed) * value) / 8))


def mask_bits(sparsity: float) -> float:
    """Bits that a weight takes in a mask: one, or less where groups of four at random positions are removed together."""
    return min(1.0, 1.25 - sparsity**4)
