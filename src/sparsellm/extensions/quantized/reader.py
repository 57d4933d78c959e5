"""Quantized checkpoints as they are published: which of their tensors form a weight, and its dequantization, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsellm.checkpoints.readers import FoundWeights, TensorHeader, quantization_settings
from sparsellm.errors import BadCheckpoint, UnsupportedModel, plural
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.quantized.schemes import (
    AWQ,
    FLOAT8,
    GPTQ,
    MXFP4,
    BitsAndBytes4,
    CompressedTensors,
    Contradiction,
    Float8,
    Layout,
    Scheme,
)
from sparsellm.runtime.memory import human_bytes
from sparsellm.solvers.linalg import all_finite

READ = "FP8 (fp8, fbgemm_fp8), MXFP4, compressed-tensors, bitsandbytes of 4 bits, GPTQ and AWQ"
"""The schemes that are read, for messages."""

FLOATS_READ = ("bfloat16", "float16", "float32")
"""Names of the dtypes in which a configuration may have its weights dequantized."""

CHUNK = 2**20
"""Numbers that are dequantized at a time, in float32."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is stored as numbers with scales.

    Attributes:
        shape: Its shape in the model.
        dtype: Name of the dtype in which it is read unless another one is asked for.
        parts: The file of each of its tensors and its name there, by its ending in the scheme.
    """

    scheme: Scheme
    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, tuple[Path, str]] = field(hash=False)

    @property
    def integers(self) -> IntegerFormat | None:
        """The format of its integers, of schemes that are one."""
        return self.scheme.integers(self.layout)

    @property
    def adds_bias(self) -> bool:
        """Whether the programs that write this form add a bias of 0 to the layer."""
        return isinstance(self.scheme, GPTQ)

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
        """Return the weight: its numbers times their factors in float32, rounded once.

        Args:
            parts: Its tensors, by ending.
            dtype: The dtype of the result; None for the weight's own.

        Raises:
            BadCheckpoint: A scale is not finite, or the tensors contradict each other.
        """
        layout, weight = self.layout, torch.empty(self.shape, dtype=dtype or getattr(torch, self.dtype))
        if len(layout.shape) == 2:
            target = weight.view(layout.shape[::-1]).T if self.scheme.transposed else weight.view(layout.shape)
            self._fill(target, parts)
            return weight
        for index, matrix in enumerate(weight):
            own = {name: part[index] if part.shape[:1] == layout.shape[:1] else part for name, part in parts.items()}
            self._fill(matrix.T if self.scheme.transposed else matrix, own)
        return weight

    def _fill(self, matrix: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Dequantize a matrix, (rows, columns) as it is stored, in chunks of rows."""
        parts = self.scheme.prepared(parts, self.layout)
        if not all_finite(parts["scales"]):
            raise BadCheckpoint("its scales hold NaN or infinity")
        rows = max(1, CHUNK // self.layout.columns // WORD_ROWS) * WORD_ROWS
        for start in range(0, self.layout.rows, rows):
            chunk = slice(start, min(start + rows, self.layout.rows))
            product = self.scheme.numbers(parts, self.layout, chunk).mul_(self.scheme.factors(parts, self.layout, chunk))
            matrix[chunk] = product if self.layout.kind == "floats" else product.add_(0.0)


WORD_ROWS = 16
"""Rows of a chunk are a multiple of the numbers that a word may hold."""


class QuantizedReader:
    """Reads quantized checkpoints. Arguments and errors as `scheme_of`."""

    lossless: ClassVar[bool] = False

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self._fields, self._scheme = fields, scheme_of(name, fields)

    def register(self) -> None:
        """Nothing: the weights are read as those of a dense model."""

    def find(
        self,
        headers: Mapping[Path, Mapping[str, TensorHeader]],
        metadata: Mapping[Path, Mapping[str, str]],
        read: Callable[[Path, str], bytes],
    ) -> FoundWeights:
        """Find the quantized weights, as `sparsellm.checkpoints.readers.Reader.find`."""
        fields, scheme = self._fields, self._scheme
        places = {key: file for file, stored in headers.items() for key in stored}
        scales = [key for key in places if key.endswith(("_scale_inv", ".weight_scale"))]
        if isinstance(scheme, Float8) and scales and not any(key.endswith("_scale_inv") for key in scales):
            scheme = CompressedTensors({"format": "FP8", **scheme.settings})  # AutoFP8 names the scales as llm-compressor does
        weights: dict[Path, dict[str, QuantizedWeight]] = {file: {} for file in headers}
        parts_of: dict[str, dict[str, str]] = {}
        for key in places:
            for ending in (scheme.scales_in, *scheme.others, *filter(None, scheme.numbers_in)):
                base = key.removesuffix(ending)
                if key.endswith(ending) and (not scheme.weight or base.endswith(".")):
                    parts_of.setdefault(base, {})[ending] = key
        hidden: set[str] = set()
        for base, parts in sorted(parts_of.items()):
            if "" in scheme.numbers_in and base in places:
                parts[""] = base
            if list(parts) == ["weight"] and headers[places[parts["weight"]]][parts["weight"]].dtype not in (*FLOAT8, "int8"):
                continue  # a plain weight
            weight = base + scheme.weight
            if weight in places and weight not in parts.values():
                raise BadCheckpoint(f"{weight[:120]} is stored both plain and quantized ({scheme.name}). Get a sound copy.")
            one = _weight(
                weight,
                scheme,
                {ending: (places[key], key) for ending, key in parts.items()},
                headers=headers,
                read=read,
                dtype=_dtype(fields),
            )
            weights[next(one.parts[ending][0] for ending in scheme.numbers_in if ending in parts)][weight] = one
            hidden |= {key for key in parts.values() if key != weight}
        activation_scales = {key for key in places if key not in hidden and key.endswith(scheme.activation_scales)}
        hidden |= activation_scales
        found = {key for some in weights.values() for key in some}
        _check_all(fields, scheme, headers, found=found, hidden=hidden)
        dtype = min(weight.dtype for some in weights.values() for weight in some.values())
        describe = _description(scheme, dtype, len(activation_scales))
        return FoundWeights(weights, frozenset(hidden), dtype=dtype, describe=describe)


def _description(scheme: Scheme, dtype: str, activation_scales: int) -> Callable[[str, int, int], str]:
    """The function that says how a checkpoint, of a name, bytes and parameters, is quantized, and what is read of it.

    Args:
        dtype: Name of the dtype in which the weights are read unless another one is asked for.
        activation_scales: How many of its tensors are scales of activations.
    """
    left_out = f"; {plural(activation_scales, 'scale')} of activations are left out" if activation_scales else ""
    default = "" if dtype == "bfloat16" else f", {dtype} by default"

    def describe(name: str, stored: int, parameters: int) -> str:
        return (
            f"{name} is quantized ({scheme.name}, {human_bytes(stored)}): each weight is dequantized as it is read"
            f"{default}, and outputs are not quantized; the model takes {human_bytes(2 * parameters)} in 16 bits"
            f"{left_out}"
        )

    return describe


def scheme_of(name: str, fields: Mapping[str, Any]) -> Scheme:
    """Return how the weights of a checkpoint are quantized.

    Args:
        name: Its name, for messages.
        fields: The fields of config.json.

    Raises:
        UnsupportedModel: They are quantized in a way that is not read.
    """
    settings = quantization_settings(fields) or {}
    method = settings.get("quant_method")
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    layout = settings.get("checkpoint_format")
    read: dict[str, tuple[type[Scheme], bool]] = {
        "fp8": (Float8, True),
        "fbgemm_fp8": (CompressedTensors, True),
        "mxfp4": (MXFP4, True),
        "compressed-tensors": (CompressedTensors, CompressedTensors(settings).is_read),
        "bitsandbytes": (BitsAndBytes4, bool(settings.get("load_in_4bit"))),
        "gptq": (GPTQ, type(bits) is int and bits in (2, 4, 8) and layout in (None, "gptq", "gptq_v2")),
        "awq": (AWQ, bits == 4 and version == "gemm"),
    }
    if str(method) in read and read[str(method)][1]:
        return read[str(method)][0](settings)
    said = [f"{key} {settings[key]}" for key in ("bits", "checkpoint_format", "version", "load_in_8bit") if key in settings]
    kind = CompressedTensors(settings).name if method == "compressed-tensors" else ", ".join([str(method)[:40], *said])
    raise UnsupportedModel(
        f"{name} is quantized by {kind[:90]}, which is not read; what is read is {READ}. Prune the plain checkpoint that "
        "it was made from, or dequantize it with the program that wrote it."
    )


def _weight(
    weight: str,
    scheme: Scheme,
    parts: Mapping[str, tuple[Path, str]],
    *,
    headers: Mapping[Path, Mapping[str, TensorHeader]],
    read: Callable[[Path, str], bytes],
    dtype: str | None,
) -> QuantizedWeight:
    """Return a quantized weight, after a check of its parts."""
    stored = {ending: headers[file][key] for ending, (file, key) in parts.items()}
    first = next(iter(parts.values()))
    where = f"{first[0].name}: {weight[:120]}"
    if isinstance(scheme, AWQ) and list(parts) == [scheme.scales_in]:
        raise UnsupportedModel(f"AWQ scales of activations are not supported, and {first[1][:120]} is one.")
    if wrong := next((x for x in stored.values() if min(x.shape, default=1) < 1 or not hasattr(torch, x.dtype)), None):
        raise BadCheckpoint(f"{where} has a part of shape {list(wrong.shape)} in {wrong.dtype}. Get a sound copy.")
    numbers = next((stored[ending] for ending in scheme.numbers_in if ending in parts), None)
    if numbers is None or scheme.scales_in not in parts:
        lost = "numbers" if numbers is None else f"scales (…{scheme.scales_in})"
        raise BadCheckpoint(
            f"{where} is quantized ({scheme.name}) and has no {lost}. The download may be incomplete: get a sound copy."
        )
    if numbers.dtype.startswith("float") and numbers.dtype not in (*FLOAT8, *FLOATS_READ):
        raise UnsupportedModel(
            f"{where} is in {numbers.dtype}, which is not supported; {READ} are. Prune the plain checkpoint that it was "
            "made from, or dequantize it with the program that wrote it."
        )
    try:
        layout = scheme.layout(stored, lambda ending: read(*parts[ending]))
    except Contradiction as error:
        raise BadCheckpoint(
            f"{where} {error}, which is not {scheme.name}. config.json may belong to another model, or the folder be "
            "dequantized in part: get a sound copy."
        ) from None
    own = stored[scheme.scales_in].dtype if scheme.integers(layout) else ""
    shape = layout.details.get("shape", layout.shape)
    if scheme.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return QuantizedWeight(scheme, layout, shape, dtype or (own if own in FLOATS_READ else "bfloat16"), parts)


def _check_all(
    fields: Mapping[str, Any],
    scheme: Scheme,
    headers: Mapping[Path, Mapping[str, TensorHeader]],
    *,
    found: Set[str],
    hidden: Set[str],
) -> None:
    """Raise BadCheckpoint if weights that should be quantized are not, or those that are have no scales."""
    known = found | hidden
    plain = {key: stored for content in headers.values() for key, stored in content.items() if key not in known}
    if not found:
        raise BadCheckpoint(
            f"config.json says that the weights are quantized ({scheme.name}), and none of them is. If they were dequantized, "
            "remove quantization_config from config.json."
        )
    roles = {_role(key) for key in found} if isinstance(scheme, Float8) else set()  # others keep some layers plain
    for key, stored in plain.items():
        is_matrix = _role(key) in roles and len(stored.shape) > 1
        if stored.dtype in FLOAT8 or (is_matrix and not _is_left_out(key, fields)):
            raise BadCheckpoint(
                f"{key[:120]} is in {stored.dtype} and has no scales, while the weights are quantized ({scheme.name}), and "
                "config.json does not list it as left out: the folder is incomplete, or dequantized in part. Get a sound copy."
            )


def _role(key: str) -> str:
    """The name of a tensor without the numbers of blocks and experts."""
    return re.sub(r"\d+", "*", key)


def _is_left_out(key: str, fields: Mapping[str, Any]) -> bool:
    """Whether a configuration lists the module of a weight as not quantized, under any prefix, or has no such block."""
    text = fields.get("text_config")
    blocks = (text if isinstance(text, dict) else fields).get("num_hidden_layers")
    if isinstance(blocks, int) and any(int(number) >= blocks for number in re.findall(r"layers\.(\d{1,9})\.", key)):
        return True  # such as a block that predicts further tokens
    listed = (quantization_settings(fields) or {}).get("modules_to_not_convert")
    names = [name for name in listed if isinstance(name, str) and name] if isinstance(listed, list) else []
    return any(name in key or name.rpartition("layers.")[2] in key.rpartition("layers.")[2] for name in names)


def _dtype(fields: Mapping[str, Any]) -> str | None:
    """The dtype that a configuration names for the weights; None for another one or none."""
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if (name := str(part.get(key)).removeprefix("torch.")) in FLOATS_READ:
                return name
    return None
