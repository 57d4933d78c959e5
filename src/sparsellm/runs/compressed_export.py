"""Exports a pruned model as a checkpoint of compressed-tensors with integer weights, for vLLM and transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparsellm.checkpoints.comparison import layers_by_parameter
from sparsellm.checkpoints.documents import read_config_text, with_member, write_config
from sparsellm.checkpoints.exported_files import FORMAT, METHOD, decoded, pack_integers, unpack_integers
from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.checkpoints.packed_files import FileWriter
from sparsellm.checkpoints.tensor_index import TensorLocation, index_tensors, read_stored
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel, VerificationFailed
from sparsellm.evaluation.measurements import Summarized
from sparsellm.methods.rounding import Scales
from sparsellm.runs.conversion import Observe, converted, finish
from sparsellm.runs.export import claimed
from sparsellm.runs.exported import MAX_GROUP, rounded_to_export
from sparsellm.runs.output_folder import CARD, SCALES_FILE
from sparsellm.runs.packed_documents import Source, copy_files, read_checked
from sparsellm.runs.quantization_file import read_scales
from sparsellm.runtime.memory import human_bytes
from sparsellm.solvers.quantization import Quantized, expand_groups

Values = Literal["int4", "int8"]

NOTE = """The weights of the pruned layers are integers of a few bits with a scale for each group of columns, in the format of
compressed-tensors. Removed weights are stored as integers that are 0: they save no bytes.
"""
"""Paragraph of the model card."""


@dataclass(frozen=True)
class Scheme:
    """How the layers of a group are stored. Fields as in compressed-tensors.

    Attributes:
        num_bits: Bits of an integer, 4 or 8.
        group_size: Columns that share a scale; 0 for whole rows.
    """

    num_bits: int
    group_size: int

    def __str__(self) -> str:
        return f"int{self.num_bits} in {f'groups of {self.group_size} columns' if self.group_size else 'whole rows'}"

    def to_dict(self) -> dict[str, Any]:
        """The `weights` of an entry of `config_groups`."""
        group = {"strategy": "group", "group_size": self.group_size} if self.group_size else {"strategy": "channel"}
        return {"num_bits": self.num_bits, "type": "int", "symmetric": True, "dynamic": False, **group}


@dataclass(frozen=True, repr=False)
class Exported(Summarized):
    """A model in the format of compressed-tensors, in the folder `output`.

    Attributes:
        layers: Number of layers with integer weights.
        dense_bytes: Bytes of the model's weight files.
        exported_bytes: Bytes of the exported weight files.
        zeros: Number of the zeros among the integers, which take as much as others.
        schemes: Each combination of bits and group size.
    """

    output: str
    layers: int
    dense_bytes: int
    exported_bytes: int
    zeros: int
    schemes: tuple[Scheme, ...]

    def summary(self) -> dict[str, str]:
        """The folder and the sizes."""
        size = f"{human_bytes(self.exported_bytes)}, from {human_bytes(self.dense_bytes)}"
        layers = f"{self.layers:,} with integer weights, {self.zeros:,} of these zero, which saves no bytes"
        return {"output": PurePath(self.output).name, "size": size, "layers": layers}


def export(
    model: str | Path,
    output: str | Path,
    *,
    values: str | None = None,
    overwrite: bool = False,
    observe: Observe = lambda text: None,
) -> Exported:
    """Write a pruned model as a compressed-tensors checkpoint (`pack-quantized`), which vLLM and transformers load.

    The integers and scales of a model pruned with `values` are written as they are, those of 3 bits with 4; any other model is
    rounded to nearest, in groups of 128 columns for int4 and whole rows for int8. Zeros stay zero and save no bytes. Layers of
    one module with equally many columns get equal groups, since vLLM fuses them: a smaller group repeats the scale.

    Args:
        model: Folder of a pruned model, hub name, or "demo:opt".
        output: Folder to write.
        values: What a model is rounded to that was pruned without `values`.
        overwrite: Replace an existing folder that sparsellm wrote.
        observe: Receives what is being done.

    Returns:
        The sizes.

    Raises:
        InvalidSetting: `values` is missing, or the model has been rounded already.
        UnsupportedModel: A layer is not a `torch.nn.Linear` of its own, or the model is packed or quantised.
        OutputExists: The folder exists.
        BadCheckpoint: The model is missing, incomplete or damaged, or holds NaN or infinity.
        VerificationFailed: The model is not what the run that pruned it wrote, or the result differs from the model.
        TooLarge: The disk has too little room.
    """
    source = Source.open(model)
    scales = read_scales(source.folder)
    layers, ignored = _linear_layers(source, scales)
    _check_values(source, scales, values)
    shapes = {key: header.shape for file in source.files for key, header in read_headers(file).items() if key in layers}
    schemes = _schemes(shapes, scales, values)

    def quantize(key: str, weight: Tensor) -> Quantized:
        """The integers and scales of a layer."""
        if key in scales:
            return _exact(source.name, key, weight, scales[key])
        return rounded_to_export(weight, schemes[key].num_bits)

    def convert(file: Path, writer: FileWriter) -> None:
        """Write the tensors of a file, those of the layers as integers."""
        for key in read_headers(file):
            tensor = read_stored(TensorLocation(file, key))
            parts = _stored(key, quantize(key, tensor), schemes[key], tensor.dtype) if key in layers else {key: tensor}
            for name, part in parts.items():
                writer.add(name, part)

    def size(file: Path) -> int:
        """About how many bytes are written for a file: of a layer the integers, without the scales."""
        tensors = read_headers(file).items()
        return sum(math.prod(x.shape) * schemes[key].num_bits // 8 if key in layers else x.nbytes for key, x in tensors)

    settings = {"form": "compressed-tensors", "values": values}
    with claimed(output, overwrite, source.folder) as path:
        observe(f"reading {model}")
        digests, report = read_checked(source)
        with converted(source, path, convert, size=size, settings=settings, verb="exporting", observe=observe) as work:
            zeros = 0
            for file, target in zip(source.files, source.targets(), strict=True):
                for key in (key for key in read_headers(file) if key in layers):
                    weight = read_stored(TensorLocation(file, key))
                    zeros += _check_written(work / target, key, quantize(key, weight), weight=weight, scheme=schemes[key])
            copy_files(source, work)
            config = _quantization_config({layers[key]: scheme for key, scheme in schemes.items()}, ignored)
            write_config(work, with_member(read_config_text(source.folder), "quantization_config", config))
            if (source.folder / CARD).is_file():
                _write_card(work / CARD, (source.folder / CARD).read_text(encoding="utf-8"))
            unchanged = {key: digest.to_dict() for key, digest in digests.items() if key not in layers}
            finish(work, report, unchanged, difference="differs from the model's. Check memory and disk.")
    before, after = (sum(x.stat().st_size for x in files) for files in (source.files, [path / x for x in source.targets()]))
    return Exported(str(output), len(layers), before, after, zeros, tuple(dict.fromkeys(schemes.values())))


def _check_values(source: Source, scales: Mapping[str, Scales], values: str | None) -> None:
    """Raise InvalidSetting if `values` is missing, unknown, or given for a model that is rounded already."""
    if values is not None and values not in get_args(Values):
        raise InvalidSetting(f"`values` must be int4 or int8 in an export, got {values!r}.")
    if scales and values is not None:
        bits = max(entry.bits for entry in scales.values())
        raise InvalidSetting(f"{source.name} has been rounded to int{bits} already. Leave out `values`.")
    if not scales and values is None:
        raise InvalidSetting(f"{source.name} was not pruned with `values`. Pass `values`, int4 or int8, to round its weights.")


def _linear_layers(source: Source, scales: Mapping[str, Scales]) -> tuple[dict[str, str], list[str]]:
    """The layers with integer weights and those without.

    Returns:
        The module path of each layer by the stored name of its weight, and the module paths of other linear layers.

    Raises:
        UnsupportedModel: compressed-tensors cannot hold a layer.
        BadCheckpoint: The side file names a weight that the model does not have.
    """
    skeleton = open_checkpoint(source.name).skeleton()
    locations, _, _ = index_tensors(source.files, skeleton)
    linear = {f"{path}.weight": path for path, module in skeleton.named_modules() if type(module) is nn.Linear}
    stored = {place.key for place in locations.values()}
    if missing := sorted(scales.keys() - stored):
        raise BadCheckpoint(f"{SCALES_FILE} names {missing[0][:80]}, which the model does not have. Get a sound copy of it.")
    in_blocks = layers_by_parameter(skeleton, ())
    chosen = {place.key: name for name, place in locations.items() if (place.key in scales if scales else name in in_blocks)}
    for key, name in chosen.items():
        if name not in linear or not isinstance(locations[name], TensorLocation):
            raise UnsupportedModel(
                f"{key} is not the weight of a torch.nn.Linear of its own, which compressed-tensors needs: layers of GPT-2 and "
                "experts that transformers joins cannot be exported."
            )
    return {key: linear[name] for key, name in chosen.items()}, sorted(linear[x] for x in linear.keys() - set(chosen.values()))


def _schemes(shapes: Mapping[str, Sequence[int]], scales: Mapping[str, Scales], values: str | None) -> dict[str, Scheme]:
    """The scheme of each layer by the stored name of its weight; the same for those that vLLM may fuse."""
    fused: dict[tuple[str, int], list[Scheme]] = {}
    keys = {name: (name.removesuffix(".weight").rpartition(".")[0], shape[1]) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name in scales:
            bits, size = max(scales[name].bits, 4), scales[name].group_size
            whole = scales[name].scales.shape[1] == 1
        else:
            bits, size, whole = (8, 0, True) if values == "int8" else (4, MAX_GROUP, shape[1] <= MAX_GROUP)
        group = 0 if whole else math.gcd(size, shape[1], MAX_GROUP)
        fused.setdefault(keys[name], []).append(Scheme(bits, group))
    common = {}
    for (parent, columns), found in fused.items():
        sizes = {scheme.group_size for scheme in found}
        group = 0 if sizes == {0} else math.gcd(*sizes, columns, MAX_GROUP)
        common[parent, columns] = Scheme(max(scheme.num_bits for scheme in found), group)
    return {name: common[keys[name]] for name in shapes}


def _exact(model: str, key: str, weight: Tensor, scales: Scales) -> Quantized:
    """The integers of a weight that is scales times integers. Raises BadCheckpoint if it is not."""
    quantized = scales.quantized(weight)
    if quantized is None:
        raise BadCheckpoint(f"{model}: {key} is not its scales in {SCALES_FILE} times integers. Prune the model again.")
    return quantized


def _stored(key: str, quantized: Quantized, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer under their names. Raises UnsupportedModel for scales that the dtype cannot hold."""
    rows, columns = quantized.integers.shape
    scales = expand_groups(quantized.scales, quantized.group_size, columns)[:, :: scheme.group_size or columns].contiguous()
    if not torch.equal(scales.to(dtype).float(), scales.float()):
        raise UnsupportedModel(f"The scales of {key} are too small for {dtype}. Convert the model to bfloat16, and prune it.")
    return {
        f"{key}_packed": pack_integers(quantized.integers, scheme.num_bits),
        f"{key}_scale": scales.to(dtype),
        f"{key}_shape": torch.tensor([rows, columns]),
    }


def _check_written(file: Path, key: str, quantized: Quantized, *, weight: Tensor, scheme: Scheme) -> int:
    """Read a layer back, compare it with what it was made from, and count its zeros. Raises VerificationFailed."""
    packed, scale, shape = (read_stored(TensorLocation(file, f"{key}_{part}")) for part in ("packed", "scale", "shape"))
    integers = unpack_integers(packed, scheme.num_bits, weight.shape[1])
    dense = decoded(integers, scale)
    if shape.tolist() != list(weight.shape) or not torch.equal(dense, quantized.to_dense().to(weight.dtype)):
        raise VerificationFailed(f"{key} differs from the model's after writing. Check memory and disk.", (key,))
    return int((integers == 0).sum())


def _quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json: a group of layers for each scheme."""
    targets: dict[Scheme, list[str]] = {}
    for path, scheme in schemes.items():
        targets.setdefault(scheme, []).append(path)
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if len(targets) == 1 else paths,
            "weights": scheme.to_dict(),
            "input_activations": None,
            "output_activations": None,
        }
        for number, (scheme, paths) in enumerate(targets.items())
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
    }


def _write_card(file: Path, text: str) -> None:
    """Write a model card with a paragraph on the integers after its title, or at its end."""
    changed, count = re.subn(r"^# .*\n", lambda title: f"{title[0]}\n{NOTE}", text, count=1, flags=re.MULTILINE)
    file.write_text(changed if count else f"{text}\n{NOTE}", encoding="utf-8")
