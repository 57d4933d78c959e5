"""The schemes by which published checkpoints store quantized weights: which tensors a weight is stored in, and what they mean.

A weight is `numbers · factors`, in float32: numbers of 2, 4 or 8 bits, less a zero point in some schemes, times the scale of
their block, group, row or tensor. Matrices are (rows, columns) as they are stored; the schemes that store a weight transposed
say so.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsellm.checkpoints.readers import TensorHeader
from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import IntegerFormat

WORD_BITS = 32
"""Bits of the integers that several numbers are packed into."""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
"""Names of the dtypes of weights in 8 bits, and of scales."""

BITS_READ = {"int": (2, 4, 8), "float": (4, 8)}
"""Bits of the numbers of compressed-tensors that are read, by their type."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of FP4, by their bits (OCP Microscaling Formats 1.0, section 5.3.3)."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""By column of eight, which four bits of an AWQ word hold its number."""


LARGEST_BLOCK = 2**31
"""Largest size of a block that is read."""


class Contradiction(Exception):
    """Tensors that are not what the scheme says. The message says what is wrong with them."""


ReadPart = Callable[[str], bytes]
"""Reads the bytes of a stored tensor, given by its name."""


@dataclass(frozen=True)
class Layout:
    """How the numbers and scales of a weight lie in its tensors.

    Attributes:
        shape: Its shape as it is stored, such as (experts, rows, columns).
        bits: Bits of a number.
        block: Rows and columns that share a scale.
        kind: "integers", "floats", or "words" for integers in words of 32 bits. Integers have no negative zero.
        details: Further numbers of the scheme.
    """

    shape: tuple[int, ...]
    bits: int
    block: tuple[int, int]
    kind: Literal["integers", "words", "floats"]
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of one matrix."""
        return self.shape[-1]


class Scheme(ABC):
    """A scheme.

    Args:
        settings: The `quantization_config` of a checkpoint.

    Attributes:
        numbers_in: Endings of the names of the tensors that hold a weight's numbers, of which there is one.
        scales_in: Ending of the name of the tensor with its scales.
        others: Endings of its other tensors.
        weight: Ending of the weight's name in the model, in place of these.
        transposed: Whether the model's weight is the transpose of the stored matrix.
        activation_scales: Endings of tensors that serve to quantize activations, which a dense model does without.
    """

    numbers_in: ClassVar[tuple[str, ...]]
    scales_in: ClassVar[str]
    others: ClassVar[tuple[str, ...]] = ()
    weight: ClassVar[str] = ""
    transposed: ClassVar[bool] = False
    activation_scales: ClassVar[tuple[str, ...]] = (
        ".input_scale",
        ".activation_scale",
        *(f".{of}_{part}" for of in "kvq" for part in ("scale", "zero_point")),
        ".kv_scale",
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def name(self) -> str:
        """The scheme, for notes and messages."""

    @abstractmethod
    def layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        """Return the layout of a weight.

        Args:
            parts: Dtype and shape of its tensors, by ending.
            read: Reads a tensor, given by its ending.

        Raises:
            Contradiction: The tensors are not what the scheme says.
        """

    @abstractmethod
    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        """Return the numbers of some rows of a matrix, less their zero points: (rows, columns), float32."""

    def factors(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        """Return the factors of some rows of a matrix: (rows, columns) or (rows, 1), float32."""
        return by_block(parts["scales"], layout, rows)

    def prepared(self, parts: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """Return the tensors of a matrix, with what its rows share: `scales`, `zeros` in float32, and the columns' `groups`."""
        return {**parts, "scales": as_scales(parts[self.scales_in])}

    def integers(self, layout: Layout) -> IntegerFormat | None:
        """The format of integers whose scales are those of groups of columns of a row; None in any other scheme."""
        return None


class Float8(Scheme):
    """FP8 with a scale for each block or tensor: `quant_method` "fp8" of DeepSeek-V3, Qwen3-FP8 and MiniMax."""

    numbers_in, scales_in = ("",), "_scale_inv"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.block = _pair(settings.get("weight_block_size"))

    @property
    def name(self) -> str:
        return "FP8" + (f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else "")

    def layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        weight = parts[""]
        if weight.dtype not in FLOAT8:
            raise Contradiction(f"is in {weight.dtype}")
        return Layout(weight.shape, 8, block_of(weight.shape, parts[self.scales_in], self.block), "floats")

    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        return parts[""][rows].float()


class MXFP4(Scheme):
    """MXFP4 of GPT-OSS: experts as (experts, outputs, groups of 32 inputs, 16 bytes), with scales that are powers of two."""

    numbers_in, scales_in, transposed = ("_blocks",), "_scales", True
    name = "MXFP4"

    def layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        blocks, scales = parts["_blocks"], parts["_scales"]
        if (blocks.dtype, scales.dtype, len(blocks.shape)) != ("uint8", "uint8", 4) or blocks.shape[:3] != scales.shape:
            raise Contradiction(f"has numbers {_said(blocks)} and scales {_said(scales)}")
        size = 2 * blocks.shape[3]
        return Layout((*blocks.shape[:2], blocks.shape[2] * size), 4, (1, size), "floats")

    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        return unpack_e2m1(parts["_blocks"][rows].flatten(1))


class CompressedTensors(Scheme):
    """compressed-tensors of llm-compressor: FP8, int8 or FP4 numbers, and integers packed into words of 32 bits."""

    numbers_in, scales_in, weight = ("weight_packed", "weight"), "weight_scale", "weight"
    others = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    activation_scales = (
        *Scheme.activation_scales,
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        ".output_zero_point",
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        groups = settings.get("config_groups")
        listed = groups.values() if isinstance(groups, dict) else ()
        parts = [group.get("weights") for group in listed if isinstance(group, dict)]
        weights = [given for given in parts if isinstance(given, dict)]
        self.kinds = [(given.get("type", "int"), given.get("num_bits", "")) for given in weights]
        self.block = next((pair for given in weights if (pair := _pair(given.get("block_structure")))), None)

    @property
    def name(self) -> str:
        kinds = sorted({f"{kind}{bits}" for kind, bits in self.kinds})
        format = self.settings.get("format") or self.settings.get("quant_method")
        return f"compressed-tensors {format}" + (f", {' and '.join(kinds)}" if kinds else "")

    @property
    def is_read(self) -> bool:
        """Whether weights are in kinds of numbers that are read, with all zeros, and for activations that are not rotated."""
        transforms, sparse = self.settings.get("transform_config"), self.settings.get("sparsity_config")
        formats = {str(self.settings.get("format")), str(sparse.get("format") if isinstance(sparse, dict) else None)}
        return (
            all(bits in ("", *BITS_READ.get(str(kind), ())) for kind, bits in self.kinds)
            and not (isinstance(transforms, dict) and transforms.get("config_groups"))
            and not formats & {"sparse-bitmask", "sparse-24-bitmask", "marlin-24", "mxfp6-pack-quantized"}
        )

    def layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        scale = parts["weight_scale"]
        if "weight" in parts:
            weight = parts["weight"]
            if weight.dtype not in (*FLOAT8, "int8"):
                raise Contradiction(f"is in {weight.dtype}")
            kind: Literal["integers", "floats"] = "integers" if weight.dtype == "int8" else "floats"
            return Layout(weight.shape, 8, block_of(weight.shape, scale, self.block), kind)
        packed = parts["weight_packed"]
        if packed.dtype == "uint8" and len(packed.shape) >= 2:
            shape = (*packed.shape[:-1], 2 * packed.shape[-1])
            return Layout(shape, 4, block_of(shape, scale, None, (*SCALES, "float8_e4m3fn", "uint8")), "floats")
        return self._packed_layout(parts, read)

    def _packed_layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        """Return the layout of integers in words of 32 bits."""
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        stored = parts.get("weight_shape")
        if stored is None or stored.dtype not in ("int64", "int32") or stored.shape != (2,):
            raise Contradiction("has no weight_shape of two integers")
        shape = tuple(torch.frombuffer(bytearray(read("weight_shape")), dtype=getattr(torch, stored.dtype)).tolist())
        listed = [bits for _, bits in self.kinds if bits != ""]
        widths = [bits for bits in BITS_READ["int"] if not listed or bits in listed]
        fits = [bits for bits in widths if packed.shape == (shape[0], -(-shape[1] * bits // WORD_BITS)) and min(shape) > 0]
        if packed.dtype != "int32" or not fits:
            raise Contradiction(f"of shape {shape} is not in {_said(packed)}")
        if "weight_g_idx" in parts:
            index = parts["weight_g_idx"]
            if index.shape != shape[1:] or index.dtype != "int32" or len(scale.shape) != 2 or scale.shape[0] != shape[0]:
                raise Contradiction(f"has groups {_said(index)} and scales {_said(scale)}")
            return Layout(shape, fits[0], (1, -(-shape[1] // scale.shape[1])), "integers")
        block = block_of(shape, scale, None)
        if block[0] != 1 and scale.shape not in ((1,), (1, 1)):
            raise Contradiction(f"has scales {_said(scale)}")
        return Layout(shape, fits[0], block, "integers" if "weight_zero_point" in parts else "words")

    def prepared(self, parts: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        found = super().prepared(parts, layout)
        if "weight_global_scale" in parts:
            found["scales"] = found["scales"] / parts["weight_global_scale"].float()
        if "weight_g_idx" in parts:
            found["groups"] = _groups(parts["weight_g_idx"], found["scales"].shape[1])
        if (zero := parts.get("weight_zero_point")) is not None:
            is_packed = zero.dtype == torch.int32  # along the rows
            found["zeros"] = (unpack_integers(zero.T.contiguous(), layout.bits, layout.rows).T if is_packed else zero).float()
        return found

    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        if "weight" in parts:
            numbers = parts["weight"][rows].float()
        elif layout.kind == "floats":
            numbers = unpack_e2m1(parts["weight_packed"][rows])
        else:
            numbers = unpack_integers(parts["weight_packed"][rows], layout.bits, layout.columns).float()
        return numbers.sub_(_by_group(parts["zeros"], parts, layout, rows)) if "zeros" in parts else numbers

    def factors(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        return _by_group(parts["scales"], parts, layout, rows)

    def integers(self, layout: Layout) -> IntegerFormat | None:
        if layout.kind != "words" or layout.block[0] != 1:
            return None
        return IntegerFormat(layout.bits, 0 if layout.block[1] == layout.columns else layout.block[1])


class BitsAndBytes4(Scheme):
    """4 bits of bitsandbytes (NF4, FP4): blocks of consecutive numbers, whose scales may be quantized themselves."""

    numbers_in, scales_in = ("",), ".absmax"
    states = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
    others = (".quant_map", ".nested_absmax", ".nested_quant_map", *states)
    name = "bitsandbytes 4-bit"

    def layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        try:
            state = json.loads(read(next(ending for ending in self.states if ending in parts)))
            shape, size = tuple(map(int, state["shape"])), int(state["blocksize"])
            nested = int(state.get("nested_blocksize") or 0)
            offset = float(state.get("nested_offset") or 0.0)
        except (StopIteration, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise Contradiction("has no quant_state that can be read") from error
        count, packed, scales = math.prod(shape), parts[""], parts[".absmax"]
        if (
            len(shape) < 2
            or not 1 <= min((*shape, size)) <= max(size, nested) <= LARGEST_BLOCK
            or nested < 0
            or math.prod(packed.shape) * getattr(torch, packed.dtype).itemsize != -(-count // 2)
            or math.prod(scales.shape) != -(-count // size)
            or ".quant_map" not in parts
            or math.prod(parts[".quant_map"].shape) != 16
            or (scales.dtype == "uint8") != (nested > 0)
            or (nested and {".nested_absmax", ".nested_quant_map"} - parts.keys())
        ):
            raise Contradiction(f"of shape {shape} in blocks of {size} is not in {_said(packed)} with scales {_said(scales)}")
        return Layout(
            (count // shape[-1], shape[-1]),
            4,
            (1, size),
            "floats",
            details={"shape": shape, "nested": nested, "offset": offset},
        )

    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        first, last = rows.start * layout.columns, rows.stop * layout.columns
        packed = parts[""].flatten().view(torch.uint8)[first // 2 : -(-last // 2)]
        places = torch.stack([packed >> 4, packed & 15], 1).flatten()[first % 2 :][: last - first]
        return parts[".quant_map"].float()[places.int()].view(-1, layout.columns)

    def factors(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        size, places = layout.block[1], torch.arange(rows.start * layout.columns, rows.stop * layout.columns)
        return parts["scales"][places // size].view(-1, layout.columns)

    def prepared(self, parts: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        scales, nested = parts[".absmax"].flatten(), layout.details["nested"]
        if not nested:
            return {**parts, "scales": scales.float()}
        outer, places = parts[".nested_absmax"].float().flatten(), torch.arange(scales.numel()) // nested
        if places[-1] >= outer.numel() or parts[".nested_quant_map"].numel() != 256:
            raise BadCheckpoint("its nested scales are not those of its blocks")
        scale_map = parts[".nested_quant_map"].float()
        return {**parts, "scales": scale_map[scales.int()] * outer[places] + layout.details["offset"]}


class GPTQ(Scheme):
    """Integers of GPTQModel and AutoGPTQ: (inputs, outputs), several inputs in a word, with a zero point for each group."""

    numbers_in, scales_in, others, weight = ("qweight",), "scales", ("qzeros", "g_idx"), "weight"
    transposed = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.bits: int = settings.get("bits", 4)
        # The first format stores zero points less 1, as a subtraction from whole words, which may borrow from the next number.
        is_second = settings.get("checkpoint_format") == "gptq_v2"
        self.added = 0 if is_second else sum(1 << place for place in range(0, WORD_BITS, self.bits))

    @property
    def name(self) -> str:
        return f"GPTQ int{self.bits}"

    def layout(self, parts: Mapping[str, TensorHeader], read: ReadPart) -> Layout:
        words, scales, zeros = parts["qweight"], parts["scales"], parts.get("qzeros")
        are_matrices = words.dtype == "int32" and len(words.shape) == len(scales.shape) == 2 and scales.dtype in SCALES
        shape = self._shape(*words.shape) if are_matrices else (0, 0)
        size = self._group_size(shape[0], scales.shape[0]) if are_matrices else None
        is_listed = "g_idx" not in parts or parts["g_idx"].shape == shape[:1]
        zeros_shape = (*scales.shape[:1], -(-scales.shape[-1] * self.bits // WORD_BITS)) if are_matrices else ()
        if size is None or scales.shape[1] != shape[1] or not is_listed or zeros is None or zeros.shape != zeros_shape:
            raise Contradiction(f"has numbers {_said(words)}, scales {_said(scales)} and other zero points or groups")
        return Layout(shape, self.bits, (size, 1), "integers")

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the numbers in words of a shape."""
        return rows * WORD_BITS // self.bits, columns

    def _group_size(self, rows: int, groups: int) -> int | None:
        """Rows that share a scale; None if so many groups are not those of so many rows."""
        size: Any = self.settings.get("group_size")
        return size if type(size) is int and size >= 1 and -(-rows // size) == groups else -(-rows // groups)

    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        held = WORD_BITS // self.bits
        words = parts["qweight"][rows.start // held : -(-rows.stop // held)]
        numbers = unpack_unsigned(words.T, self.bits).T[rows.start % held :][: rows.stop - rows.start]
        return numbers.float().sub_(parts["zeros"][parts["groups"][rows]])

    def factors(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        return parts["scales"][parts["groups"][rows]]

    def prepared(self, parts: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        index = parts.get("g_idx", torch.arange(layout.rows) // layout.block[0])
        groups = _groups(index, parts["scales"].shape[0])
        return super().prepared(parts, layout) | {"groups": groups, "zeros": self._zeros(parts["qzeros"], layout)}

    def _zeros(self, packed: Tensor, layout: Layout) -> Tensor:
        """Return the zero points, (groups, outputs), float32."""
        return unpack_unsigned(packed + self.added, self.bits)[:, : layout.columns].float()


class AWQ(GPTQ):
    """Integers of AutoAWQ, version "gemm": (inputs, outputs), eight outputs in a word, in an order of their own."""

    @property
    def name(self) -> str:
        return f"AWQ int{self.bits}"

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns * WORD_BITS // self.bits

    def _group_size(self, rows: int, groups: int) -> int | None:
        return None if rows % groups else rows // groups

    def numbers(self, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
        numbers = _in_order(unpack_unsigned(parts["qweight"][rows], self.bits)).float()
        return numbers.sub_(parts["zeros"][parts["groups"][rows]])

    def _zeros(self, packed: Tensor, layout: Layout) -> Tensor:
        return _in_order(unpack_unsigned(packed, self.bits)).float()


def block_of(
    shape: Sequence[int], scale: TensorHeader, declared: tuple[int, int] | None, dtypes: Sequence[str] = (*SCALES, "uint8")
) -> tuple[int, int]:
    """Return the rows and columns that share a scale.

    Args:
        shape: Shape of the weight, (…, rows, columns).
        scale: Its scales.
        declared: The block in the configuration, whose last rows and columns may be cut off by the edges of the weight.
        dtypes: Names of the dtypes that the scales may have.

    Raises:
        Contradiction: The scales are not those of the weight.
    """
    if len(shape) < 2 or min(shape) < 1 or scale.dtype not in dtypes:
        raise Contradiction(f"of shape {tuple(shape)} has scales {_said(scale)}")
    rows, columns = shape[-2:]
    if math.prod(scale.shape) == 1 or (len(shape) == 3 and scale.shape in (shape[:1], (shape[0], 1, 1))):
        return rows, columns
    given = (*scale.shape, 1) if len(scale.shape) == len(shape) - 1 else scale.shape
    is_like = given[:-2] == tuple(shape[:-2]) and len(given) == len(shape)
    if is_like and declared and given[-2:] == (-(-rows // declared[0]), -(-columns // declared[1])):
        return declared
    if not is_like or declared or rows % given[-2] or columns % given[-1]:
        blocks = f", and config.json says blocks of {declared[0]} x {declared[1]}" if declared else ""
        raise Contradiction(f"of shape {tuple(shape)} has scales {_said(scale)}{blocks}")
    return rows // given[-2], columns // given[-1]


def by_block(values: Tensor, layout: Layout, rows: slice) -> Tensor:
    """Return the value of the block of each number in some rows, (rows, columns); for whole rows (rows, 1)."""
    (height, width), columns = layout.block, layout.columns
    values = values.reshape(-(-layout.rows // height), -(-columns // width))
    by_row = values[torch.arange(rows.start, rows.stop) // height]
    return by_row if by_row.shape[1] == 1 else by_row.repeat_interleave(width, 1)[:, :columns]


def as_scales(stored: Tensor) -> Tensor:
    """Return scales in float32; bytes are exponents of two less 127, of which 255 stands for NaN."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the numbers of FP4, two a byte, lower bits first: (rows, 2 · bytes), float32."""
    table = torch.tensor(E2M1)
    pairs = torch.stack([table.expand(16, 16), table[:, None].expand(16, 16)], 2).view(256, 2)  # by byte
    return pairs[packed.int()].flatten(1)


def pack_integers(integers: Tensor, num_bits: int) -> Tensor:
    """Pack (out, in) integers, plus 2^(num_bits - 1), into (out, ceil(in · num_bits / 32)) int32, lowest bits first."""
    unsigned = (integers.int() + 2 ** (num_bits - 1)).to(torch.uint8)
    unsigned = pad(unsigned, (0, -unsigned.shape[1] % (WORD_BITS // num_bits)))
    if num_bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    words: Tensor = unsigned.contiguous().view(torch.int32)
    return words


def unpack_integers(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """Unpack what `pack_integers` packed: (out, columns) int8."""
    unsigned = unpack_unsigned(words, num_bits)[:, :columns]
    return (unsigned.int() - (1 << num_bits - 1)).to(torch.int8)


def unpack_unsigned(words: Tensor, bits: int) -> Tensor:
    """Unpack numbers of 2, 4 or 8 bits from (rows, words) int32, lowest bits first: (rows, words · 32 / bits) uint8."""
    unsigned = words.contiguous().view(torch.uint8)
    if bits == 8:
        return unsigned
    shifts = range(0, 8, bits)
    return torch.stack([unsigned >> shift & (1 << bits) - 1 for shift in shifts], 2).flatten(1)


def _in_order(numbers: Tensor) -> Tensor:
    """Return the columns of AWQ's numbers in their order."""
    return numbers.view(numbers.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)


def _by_group(values: Tensor, parts: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
    """Return the value of each column's group, which `groups` lists where columns are in another order."""
    return values[rows][:, parts["groups"]] if "groups" in parts else by_block(values, layout, rows)


def _groups(index: Tensor, count: int) -> Tensor:
    """Return a list of groups. Raises BadCheckpoint for one that names more groups than there are."""
    if int(index.min()) < 0 or int(index.max()) >= count:
        raise BadCheckpoint(f"its columns are in groups up to {int(index.max())}, and it has scales for {count}")
    return index.long()


def _pair(value: Any) -> tuple[int, int] | None:
    """Return two positive integers in a configuration; None for anything else."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)
    return (value[0], value[1]) if is_pair else None


def _said(stored: TensorHeader) -> str:
    """Dtype and shape, for messages."""
    return f"{list(stored.shape)} in {stored.dtype}"
