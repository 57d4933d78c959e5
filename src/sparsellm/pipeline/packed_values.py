"""Which weights of a model are packed as integers with scales: those that its side file lists, or its layers, rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from sparsellm.checkpoints.comparison import Tensors, layers_by_parameter
from sparsellm.checkpoints.headers import dtype_name
from sparsellm.checkpoints.packed_files import PackedEntry
from sparsellm.checkpoints.tensor_index import TensorLocation, locations_of
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.formats.bitmask import Bitmask
from sparsellm.pipeline.loading import open_source
from sparsellm.pipeline.output_folder import SCALES_FILE
from sparsellm.pipeline.packed_documents import Source
from sparsellm.pipeline.quantization_file import check_unrounded, read_scales
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.quantization import Quantized, Scales, round_to_nearest


@dataclass(frozen=True)
class NearestIntegers:
    """How a weight is rounded as it is packed.

    Attributes:
        name: The name of the integers, such as "int4".
        group_size: Columns that share a scale, 0 for whole rows; None to choose by the fraction of kept weights.
        transposed: Whether the weight is stored as (in, out).
    """

    name: str
    group_size: int | None
    transposed: bool = False

    def quantized(self, weight: Tensor) -> Quantized:
        """Round the kept weights of (out, in)."""
        keep = weight != 0
        return round_to_nearest(weight, format_of(self, float(keep.float().mean())), mask=keep)


Values = NearestIntegers | Scales
"""How a weight is packed as integers: rounded, or with the scales of a weight that is quantized already."""


def format_of(values: Values, density: float) -> IntegerFormat:
    """The format that a weight with a fraction of kept weights is packed in."""
    return values.format if isinstance(values, Scales) else IntegerFormat.parse(values.name, values.group_size, density)


def quantize(name: str, tensor: Tensor, values: Values) -> tuple[Bitmask, PackedEntry]:
    """Return the matrix of a tensor, and what is stored of it besides; raise BadCheckpoint if its scales do not fit."""
    entry = PackedEntry(tuple(tensor.shape), dtype_name(tensor.dtype), "", transposed=values.transposed)
    quantized = values.quantized(entry.matrix_of(tensor))
    if quantized is None:
        raise BadCheckpoint(
            f"{name} is not what {SCALES_FILE} says, its scales times integers: it was changed since. "
            f"Remove {SCALES_FILE} to pack the weights as they are."
        )
    # A kept weight that is rounded to 0 is removed: with an integer it would be the same number in more bits.
    matrix = Bitmask.from_quantized(quantized, quantized.integers != 0)
    return matrix, replace(entry, **vars(quantized.format))


def values_of(source: Source, values: str | None, group_size: int | None) -> dict[str, Values]:
    """Return the weights of a model that are packed as integers, by stored name.

    Args:
        source: The model.
        values: "int8", "int4" or "int3": round the layers of the blocks. None packs what is quantized already.
        group_size: Columns that share a scale, a multiple of 64, or 0 for whole rows; None chooses it for each layer.

    Raises:
        InvalidSetting: The format is impossible, or the model is quantized already.
        BadCheckpoint: The side file is damaged.
        UnsupportedModel: The model's layers are unknown.
    """
    scales = read_scales(source.folder)
    if values is None:
        if group_size is not None:
            raise InvalidSetting("`group_size` goes with `values`. Name the integers, as in `values='int4'`, or leave it out.")
        return dict(scales)
    IntegerFormat.parse(values, group_size, density=1)  # which checks them
    check_unrounded(source.name, scales)
    return {name: NearestIntegers(values, group_size, transposed) for name, transposed in _layer_weights(source).items()}


def check_plain(source: Source) -> None:
    """Raise InvalidSetting for a model that other software quantized."""
    settings = source.fields.get("quantization_config", source.fields.get("compression_config"))
    if settings is not None:
        method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown"
        raise InvalidSetting(
            f"{source.name} is quantized already ({str(method)[:40]}). Pack the plain checkpoint that it was made from."
        )


def _layer_weights(source: Source) -> dict[str, bool]:
    """Return the stored names of the weights of the linear layers in the blocks, and whether each is (in, out)."""
    skeleton = open_source(source.name, None, trusted=False).skeleton()
    tensors = Tensors(source.folder, skeleton)
    weights: dict[str, bool] = {}
    for parameter, ((block, name), *_) in layers_by_parameter(skeleton, ()).items():
        stored = tensors.files.get(parameter)
        if isinstance(stored, TensorLocation):
            view = block.views.get(name)
            weights[stored.key] = view is not None and view.transposed
        elif stored is not None:
            weights |= {location.key: False for location in locations_of(stored)}
    return weights
