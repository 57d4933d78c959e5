"""The side file of a quantized checkpoint: the scales of its weights, which are ordinary numbers in the weight files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sparsellm.checkpoints.tensor_index import TensorLocation, read_stored
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, Scales
from sparsellm.extensions.packed.formats.encoding import decode_scales
from sparsellm.extensions.packed.formats.packed_tensors import packed_weights
from sparsellm.outputs.folder import SCALES_FILE
from sparsellm.runtime.devices import raise_unless_damaged
from sparsellm.texts.json_files import durable, first_fault

_METADATA = "sparsellm"
_SUFFIX = "_scale"


@dataclass(frozen=True)
class _Entry:
    """The entry of a weight in the metadata."""

    bits: Literal[3, 4, 8]
    group_size: Annotated[int, Field(ge=0, lt=2**31, multiple_of=MASK_WORD)]
    transposed: bool = False


def write_scales(folder: Path, scales: Mapping[str, Scales]) -> None:
    """Write the side file of a checkpoint.

    Args:
        folder: Its folder.
        scales: Those of each quantized weight, by the stored name of the weight, such as "model.layers.0.mlp.up_proj.weight".
    """
    entries = {name: {**vars(x.format), "transposed": x.transposed} for name, x in sorted(scales.items())}
    tensors = {name + _SUFFIX: x.scales.detach().cpu().contiguous() for name, x in sorted(scales.items())}
    # One entry: safetensors writes several in an order that changes from process to process.
    durable(folder / SCALES_FILE, save(tensors, {_METADATA: json.dumps(entries)}))


def read_scales(folder: Path) -> dict[str, Scales]:
    """Read the side file of a checkpoint: the scales of its quantized weights by stored name; empty if it has none.

    Raises:
        BadCheckpoint: The file is damaged.
    """
    file = folder / SCALES_FILE
    if not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as stream:
            metadata: Any = stream.metadata() or {}
            entries = TypeAdapter(dict[str, _Entry]).validate_json(metadata.get(_METADATA, ""))
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a mapping
    except (ValueError, SafetensorError, OSError, RuntimeError) as error:  # also pydantic's
        raise_unless_damaged(error)
        raise _damaged(first_fault(error)) from None
    wrong = {name + _SUFFIX for name in entries} ^ tensors.keys()
    wrong |= {
        name for name, x in tensors.items() if x.dtype is not torch.bfloat16 or x.dim() != 2 or not bool(x.isfinite().all())
    }
    if wrong:
        raise _damaged(f"{min(wrong)[:80]} must be in its list, and finite bfloat16 numbers in two dimensions")
    return {
        name: Scales(tensors[name + _SUFFIX], IntegerFormat(entry.bits, entry.group_size), entry.transposed)
        for name, entry in entries.items()
    }


def exact_integers(name: str, weight: Tensor, scales: Scales) -> Quantized:
    """The integers of a weight, (out, in), that is scales times integers. Raises BadCheckpoint if it is not."""
    quantized = scales.quantized(weight)
    if quantized is None:
        raise BadCheckpoint(
            f"{name} is not its scales in {SCALES_FILE} times integers: it was changed since. "
            f"Get a sound copy, or remove {SCALES_FILE} to use the weights as they are."
        )
    return quantized


def check_unrounded(name: str, scales: Mapping[str, Scales]) -> None:
    """Raise InvalidSetting if a model, which `values` would round, has scales already."""
    if scales:
        kinds = ", ".join(sorted({x.format.name for x in scales.values()}))
        raise InvalidSetting(f"{name} is quantized already, to {kinds}, and `values` would round it again. Leave it out.")


def stored_scales(files: Iterable[Path]) -> dict[str, Scales]:
    """Return the scales of the quantized tensors in packed weight files, by stored name."""
    found = {}
    for file in files:
        for name, weight in packed_weights(file).items():
            if weight.integers:
                places = {part: TensorLocation(*place) for part, place in weight.parts.items() if "scales" in part}
                parts = {part: read_stored(place).numpy() for part, place in places.items()}
                scales = decode_scales(parts, weight.entry.matrix, weight.integers)
                found[name] = Scales(scales, weight.integers, weight.entry.transposed)
    return found


def stamp(folder: Path) -> list[int] | None:
    """Return size and time of change of the side file; None if there is none."""
    file = folder / SCALES_FILE
    return [file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else None


def _damaged(reason: str) -> BadCheckpoint:
    """Return the error for a damaged file."""
    return BadCheckpoint(f"{SCALES_FILE} is damaged: {reason}. Get a sound copy of the checkpoint.")
