"""The side file of an output whose layers are rounded, written and read: the scales by stored weight and by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.checkpoints.comparison import StoredTensors, layers_by_parameter
from sparsellm.checkpoints.tensor_index import TensorLocation
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.integers.scales_file import read_scales, write_scales
from sparsellm.models.blocks import Block
from sparsellm.outputs.report import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScalesFile:
    """The side file of scales."""

    @staticmethod
    def write(folder: Path, model: PreTrainedModel, report: Report) -> str:
        """Write it, and note weights that share a tensor with others, or are stored in pieces; `pack` rounds them no more."""
        formats = {x.name: format for x in report.layers if (format := IntegerFormat.of(x))}
        scales = {name: x for block in report.blocks for name, x in block.scales.items() if name in formats}
        left_out = _save_scales(folder, model, scales, formats) if scales else []
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


def _save_scales(
    folder: Path, model: PreTrainedModel, scales: Mapping[str, Tensor], formats: Mapping[str, IntegerFormat]
) -> list[str]:
    """Write the side file of a checkpoint that was just written.

    Args:
        folder: The folder of the checkpoint.
        model: The pruned model, or a skeleton that gives the names of its parameters.
        scales: By full name of a layer, its scales, (out, groups).
        formats: By full name, the format that the layer was rounded to.

    Returns:
        Names of parameters whose scales cannot be written, since their layers were not all rounded alike, or are stored in
        pieces; `pack` stores their weights as other numbers.
    """
    stored, left_out, written = StoredTensors(folder, model), [], {}
    for parameter, layers in layers_by_parameter(model, scales).items():
        rounded = [(block, name) for block, name in layers if block.full_name(name) in scales]
        location = stored.files.get(parameter)
        found = {formats[block.full_name(name)] for block, name in rounded}
        if len(found) == 1 and len(rounded) == len(layers) and isinstance(location, TensorLocation):
            written[location.key] = _of_parameter(layers, stored[parameter].shape, scales, found.pop())
        elif rounded:
            left_out.append(parameter)
    write_scales(folder, written)
    return left_out


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
