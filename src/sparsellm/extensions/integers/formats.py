"""Formats of the integers that weights are rounded to: their names, what they can hold, and what they take in a packed file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from sparsellm.errors import InvalidSetting
from sparsellm.outputs.sizes import mask_bits

if TYPE_CHECKING:
    from torch import Tensor

IntegerName = Literal["int8", "int4", "int3"]
"""Names of the widths of an integer that can be stored, as in recipes and on the command line."""

BITS_OF = {name: int(name.removeprefix("int")) for name in get_args(IntegerName)}
"""Bits of an integer by these names."""

WIDTHS = tuple(sorted(BITS_OF.values()))
"""The same, in increasing order."""

MASK_WORD = 64
"""Columns whose mask bits a kernel reads at once. A group is a multiple of them, so that no word has two scales."""

GROUP_SIZES = range(0, 2**31, MASK_WORD)
"""Columns that a group may have, 0 for whole rows. The kernels count in 64 bits, and would take larger ones for negative."""

GROUP_WEIGHTS = 128
"""Kept weights of a group by default: the usual 128 columns of a dense weight, more of a sparse one."""

SCALE_BITS = 16
"""Bits of a scale (bfloat16)."""


class Rounded(Protocol):
    """A record with the format of a tensor in fields of its own; `bits` is None of one that is not rounded."""

    @property
    def bits(self) -> int | None:
        """Bits of an integer."""

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale."""


@dataclass(frozen=True)
class IntegerFormat:
    """How a weight is stored as integers with a scale for each group of columns of a row.

    Attributes:
        bits: Bits of an integer.
        group_size: Columns that share a scale; the last group of a row may have fewer. 0 for whole rows.
    """

    bits: int
    group_size: int

    @classmethod
    def default(cls, bits: int, density: float) -> IntegerFormat:
        """Whole rows for 8 bits, else groups of about `GROUP_WEIGHTS` kept weights, rounded to a power of two.

        Args:
            density: The fraction of weights that are kept, in [0, 1].
        """
        natural = GROUP_WEIGHTS / max(density, 1 / 1024)
        return cls(bits, 0 if bits == 8 else 1 << max(6, round(math.log2(natural))))

    @classmethod
    def parse(cls, name: str, group_size: int | None, density: float) -> IntegerFormat:
        """The format of a setting `values` and of `group_size`, by default that of a density. Raises InvalidSetting."""
        if name not in BITS_OF:
            raise InvalidSetting(f"`values` got {name!r}; it must be {', '.join(BITS_OF)}.")
        if group_size is None:
            return cls.default(BITS_OF[name], density)
        if group_size not in GROUP_SIZES:
            limits = f"a multiple of {MASK_WORD} columns below 2^31, or 0 for whole rows"
            raise InvalidSetting(f"`group_size` must be {limits}, got {group_size}.")
        return cls(BITS_OF[name], group_size)

    @classmethod
    def of(cls, record: Rounded) -> IntegerFormat | None:
        """The format in the fields of a record; None if it has no bits."""
        return None if record.bits is None else cls(record.bits, record.group_size or 0)

    @property
    def name(self) -> str:
        """The name of the integers, such as "int4"."""
        return integer_name(self.bits)

    def __str__(self) -> str:
        return f"{self.name} in {f'groups of {self.group_size} columns' if self.group_size else 'whole rows'}"

    def groups(self, columns: int) -> int:
        """Number of groups, and scales, of a row."""
        return -(-columns // self.group_size) if self.group_size else 1

    def limits(self, density: float) -> tuple[int, int]:
        """The least and the largest integer.

        With 4 and 3 bits all numbers in two's complement are used. A sparse matrix with 3 bits has, besides, 2^(bits - 1): its
        mask says where 0 is, which needs no number then. With 8 bits no side is favored.

        Args:
            density: The fraction of weights that are kept. Below 1 - 1 / bits, a mask and the kept integers take fewer bits
                than all integers.
        """
        largest = 2 ** (self.bits - 1) - 1
        if self.bits == 8:
            return -largest, largest
        return -largest - 1, largest + (self.bits == 3 and density < 1 - 1 / self.bits)

    def packed_bits(self, weight: Tensor) -> float:
        """Bits that a number of a rounded weight, (out, in), takes in a packed file: integers, mask and scales."""
        from torch.nn.functional import pad  # the command line reads names of formats, and does without torch

        from sparsellm.runtime import devices

        keep = weight.flatten() != 0
        fours = pad(keep, (0, -len(keep) % 8)).view(-1, 4).any(1)
        kept, used = (int(x) for x in devices.to_python([keep.count_nonzero(), fours.count_nonzero()]))
        # Without a mask, where that takes less, zeros are integers too.
        integers = min(self._integer_bytes(len(keep)), self._integer_bytes(kept) + mask_bytes(len(keep), used))
        return (8 * integers + weight.shape[0] * self.groups(weight.shape[1]) * SCALE_BITS) / len(keep)

    def fields_of(self, weight: Tensor) -> dict[str, Any]:
        """The entries of a result on the format of a rounded weight, (out, in)."""
        return {**vars(self), "bits_per_weight": self.packed_bits(weight)}

    def _integer_bytes(self, count: int) -> int:
        """Bytes of so many integers: those of 3 bits are planes of single bits."""
        return 3 * -(-count // 8) if self.bits == 3 else -(-count * self.bits // 8)

    def bits_per_weight(self, density: float, columns: int) -> float:
        """Bits of a number of a weight in a packed file, all included, if removed weights are at random positions.

        Args:
            density: The fraction of weights that are kept, in (0, 1]; without a mask where all are.
            columns: Columns of the weight.
        """
        mask = 0.0 if density == 1 else mask_bits(1 - density)
        return mask + density * self.bits + SCALE_BITS * self.groups(columns) / columns


def integer_name(bits: int) -> str:
    """The name of integers of some bits, such as "int4"."""
    return f"int{bits}"


def mask_bytes(size: int, used: int) -> int:
    """Bytes of a mask of `size` weights: a bit each, or one for each four, and four for those, `used`, with a kept one."""
    whole = -(-size // 8)
    return min(whole, -(-2 * whole // 8) + -(-used // 2))
