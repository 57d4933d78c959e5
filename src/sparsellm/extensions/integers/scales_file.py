"""The side file of a quantized checkpoint: the scales of its weights, which are ordinary numbers in the weight files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sparsellm.checkpoints.comparison import StoredTensors, layers_by_parameter
from sparsellm.checkpoints.tensor_index import TensorLocation, read_stored
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, Scales
from sparsellm.extensions.packed.formats.encoding import decode_scales
from sparsellm.extensions.packed.formats.packed_tensors import packed_weights
from sparsellm.models.blocks import Block
from sparsellm.outputs.folder import SCALES_FILE
from sparsellm.outputs.report import Report
from sparsellm.runtime.devices import raise_unless_damaged
from sparsellm.texts.json_files import durable, first_fault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


class ScalesFile:
    """The side file of scales."""

    @staticmethod
    def write(folder: Path, model: PreTrainedModel, report: Report) -> str:
        """Write it, and note weights that share a tensor with layers of another format, or are stored in pieces.

        `pack` stores these as other numbers.
        """
        formats = {x.name: format for x in report.layers if (format := IntegerFormat.of(x))}
        scales = {name: x for block in report.blocks for name, x in block.scales.items() if name in formats}
        if not scales:
            return ""
        stored, left_out, written = StoredTensors(folder, model), [], {}
        for parameter, layers in layers_by_parameter(model, scales).items():
            rounded = [name for name in (block.full_name(name) for block, name in layers) if name in scales]
            location, found = stored.files.get(parameter), {formats[name] for name in rounded}
            if len(found) == 1 and len(rounded) == len(layers) and isinstance(location, TensorLocation):
                written[location.key] = _of_parameter(layers, stored[parameter].shape, scales, found.pop())
            elif rounded:
                left_out.append(parameter)
        write_scales(folder, written)
        if not left_out:
            return ""
        return (
            f"{len(left_out)} rounded weights are packed without their integers, {left_out[0]} first: "
            "they share a tensor with other weights, or are stored in pieces"
        )

    @staticmethod
    def formats(folder: Path) -> dict[str, IntegerFormat]:
        """The formats of the weights by their stored names."""
        return {name: x.format for name, x in read_scales(folder).items()}


def layer_scales(folder: Path, model: PreTrainedModel, pruned: Collection[str]) -> tuple[dict[str, Scales], list[str]]:
    """Read the side file of a checkpoint.

    Args:
        folder: The folder of the checkpoint.
        model: A skeleton that gives the names of its parameters.
        pruned: Full names of the pruned layers.

    Returns:
        By full name of a pruned layer, its scales, (out, groups); and the names of the stored tensors whose scales belong to
        no pruned layer, or to a part of a parameter.

    Raises:
        BadCheckpoint: The file is damaged.
    """
    stored = read_scales(folder)
    if not stored:
        return {}, []
    tensors, found = StoredTensors(folder, model), dict[str, Scales]()
    for parameter, layers in layers_by_parameter(model, pruned).items():
        location = tensors.files.get(parameter)
        names = [block.full_name(name) for block, name in layers]
        if not isinstance(location, TensorLocation) or location.key not in stored or not set(names) <= set(pruned):
            continue
        scales = stored.pop(location.key)
        for block, name in layers:
            places = _places(block, name, tensors[parameter].shape, transposed=scales.transposed)
            found[block.full_name(name)] = Scales(scales.scales[places], scales.format)
    return found, sorted(stored)


def _of_parameter(
    layers: Sequence[tuple[Block, str]], shape: Sequence[int], scales: Mapping[str, Tensor], format: IntegerFormat
) -> Scales:
    """The scales of a parameter that consists of these layers, each row's at the place that the row has in the parameter."""
    views = [block.views.get(name) for block, name in layers]
    transposed = any(view is not None and view.transposed for view in views)
    rows = _rows(shape, transposed=transposed)
    groups = {scales[block.full_name(name)].shape[1] for block, name in layers}
    joined = torch.zeros(rows, max(groups), dtype=torch.bfloat16)
    for block, name in layers:
        joined[_places(block, name, shape, transposed=transposed)] = scales[block.full_name(name)].cpu()
    return Scales(joined, format, transposed)


def _rows(shape: Sequence[int], *, transposed: bool) -> int:
    """Number of rows of a parameter as a matrix, (rows, in)."""
    return shape[-1] if transposed else torch.Size(shape[:-1]).numel()


def _places(block: Block, name: str, shape: Sequence[int], *, transposed: bool) -> Tensor:
    """The numbers of a layer's rows among those of the parameter that holds it."""
    numbers = torch.arange(_rows(shape, transposed=transposed))
    numbers = numbers if transposed else numbers.view(*shape[:-1], 1)
    return block.linear_view(name, numbers.expand(*shape))[:, 0]
