"""Exports a pruned model as a checkpoint of compressed-tensors with integer weights, for vLLM and transformers.

And compares an export with the model that it was made from: its weights must be the model's, rounded as was asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from sparsellm.checkpoints.comparison import StoredTensors, compare, layers_by_parameter
from sparsellm.checkpoints.documents import read_config_text, with_member, write_config
from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.headers import found_weights, read_headers
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint
from sparsellm.checkpoints.side_files import formats_of
from sparsellm.checkpoints.tensor_index import TensorLocation, index_tensors, locations_of, read_stored
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel, VerificationFailed
from sparsellm.evaluation.results import Summarized
from sparsellm.extensions.integers.formats import BITS_OF, IntegerFormat, integer_name
from sparsellm.extensions.integers.quantization import Quantized, Scales, dequantized, expand_groups, round_to_nearest
from sparsellm.extensions.integers.scales_file import check_unrounded, exact_integers, read_scales
from sparsellm.extensions.packed.conversion import Observe, Source, converted, copy_files, finish, read_checked
from sparsellm.extensions.packed.packed_files import FileWriter
from sparsellm.extensions.quantized.schemes import pack_integers, unpack_integers
from sparsellm.outputs.folder import CARD, SCALES_FILE
from sparsellm.outputs.saving import claimed
from sparsellm.outputs.sections import Section
from sparsellm.outputs.verification import Output, read_output
from sparsellm.runtime.memory import human_bytes

MAX_EXPORTED_GROUP = 128
"""Largest group of columns that is written: vLLM's kernels read groups of 32, 64 or 128 columns, and whole rows."""


def export_format(bits: int) -> IntegerFormat:
    """The format that a weight without scales is rounded to: int8 by rows, int4 by groups of `MAX_EXPORTED_GROUP` columns."""
    return IntegerFormat(bits, 0 if bits == 8 else MAX_EXPORTED_GROUP)


def exported_weights(tensors: StoredTensors) -> dict[str, IntegerFormat]:
    """The formats of the weights of an export that are integers, by their names in the model; empty for other checkpoints."""
    found = {}
    for name, stored in tensors.files.items():
        for location in locations_of(stored):
            found_in = found_weights(location.file.parent)
            weights = found_in.weights.get(location.file, {}) if found_in and not found_in.lossless else {}
            if (weight := weights.get(location.key)) and weight.integers:
                found[name] = weight.integers
    return found


@dataclass(frozen=True)
class ExportSection(Section):
    """The section of an export, in the report that it has from the model that it was made from.

    Attributes:
        form: The `quant_method` of its config.json.
        exported_bytes: Bytes of its weight files.
    """

    form: str
    exported_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.exported_bytes

    @classmethod
    def from_dict(cls, data: Any) -> ExportSection:
        return TypeAdapter(cls).validate_python(data)

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)

    def compare(
        self, output: Output, tensors: StoredTensors, model: Checkpoint | InMemoryModel, model_tensors: StoredTensors
    ) -> tuple[list[str], int] | None:
        """Compare an export with its model. That of a model without a report, pruned by other software, lists no layers."""
        folder = model.folder
        has_report = folder is not None and (folder / REPORT).is_file()
        is_source = output.repeats(read_output(folder)) if folder and has_report else not output.report.layers
        return export_differences(tensors, model_tensors, model.name) if is_source else None


EXPORT_SECTION = "export"
"""Name of the section."""


def export_differences(tensors: StoredTensors, model: StoredTensors, name: str) -> tuple[list[str], int]:
    """Differences of an export from the model that it was made from, and the number of its layers with integers.

    Integers and scales of the model are compared as they are; any other weight after it is rounded as `export` does.
    """
    formats, exact, differences = exported_weights(tensors), formats_of(model.files), []
    names = {model.one_name(key): key for key in model.files}
    for key, format in formats.items():
        there = names.get(tensors.one_name(key))
        if there is None:
            continue  # `compare` has it
        weight, decoded = model[there], tensors[key]
        if weight.shape != decoded.shape:
            differences.append(f"{key} has the shape {list(decoded.shape)}, and in {name} {list(weight.shape)}")
        elif bool(decoded[weight == 0].any()):
            differences.append(f"{key} has other numbers than 0 where it is 0 in {name}")
        elif not torch.equal(decoded, weight if there in exact else _rounded(weight, format.bits)):
            verb = "has other values than" if there in exact else f"is not rounded to {integer_name(format.bits)} from that of"
            differences.append(f"{key} {verb} {name}")
    comparison = compare(tensors, model)
    different = [key for key in (*comparison.changed, *comparison.converted) if key not in formats]
    differences += [f"{key} has other values than in {name}" for key in different]
    differences += [f"{key} is not in {name}" for key in comparison.only_here]
    return differences + [f"{key} of {name} is missing" for key in comparison.only_there], len(formats)


def _rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A weight rounded as `export` rounds it, in its dtype."""
    return round_to_nearest(weight, export_format(bits)).to_dense().to(weight.dtype)


NOTE = """The weights of the pruned layers are integers of a few bits with a scale for each group of columns, in the format of
compressed-tensors. Removed weights are stored as integers that are 0: they save no bytes.
"""
"""Paragraph of the model card."""

STORED_BITS = (4, 8)
"""Bits of an integer in an export."""


@dataclass(frozen=True, repr=False)
class Exported(Summarized):
    """A model in the format of compressed-tensors, in the folder `output`.

    Attributes:
        layers: Number of layers with integer weights.
        dense_bytes: Bytes of the model's weight files.
        exported_bytes: Bytes of the exported weight files.
        zeros: Number of the zeros among the integers, which take as much as others.
        schemes: Each format of a layer.
    """

    output: str
    layers: int
    dense_bytes: int
    exported_bytes: int
    zeros: int
    schemes: tuple[IntegerFormat, ...]

    def summary(self) -> dict[str, str]:
        """The folder and the sizes."""
        size = f"{human_bytes(self.exported_bytes)}, from {human_bytes(self.dense_bytes)}"
        layers = f"{self.layers:,} with integer weights, {self.zeros:,} of these zero, which saves no bytes"
        return {"output": PurePath(self.output).name, "size": size, "layers": layers}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the fields of schemes as in compressed-tensors."""
        schemes = [{"num_bits": scheme.bits, "group_size": scheme.group_size} for scheme in self.schemes]
        return vars(self) | {"schemes": schemes}


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
        values: Integers to round to, for a model that was pruned without `values`.
        overwrite: Replace an existing folder that sparsellm wrote.
        observe: Receives what is being done.

    Returns:
        The sizes.

    Raises:
        InvalidSetting: `values` is missing, or the model has been rounded already.
        UnsupportedModel: A layer is not a `torch.nn.Linear` of its own, or the model is packed or quantized.
        OutputExists: The folder exists.
        BadCheckpoint: The model is missing, incomplete or damaged, or holds NaN or infinity.
        VerificationFailed: The model is not what the run that pruned it wrote, or the result differs from the model.
        TooLarge: The disk has too little room.
    """
    source = Source.open(model)
    source.check_plain("Export")
    scales = read_scales(source.folder)
    layers, ignored = _linear_layers(source, scales)
    _check_values(source, scales, values)
    shapes = {key: header.shape for file in source.files for key, header in read_headers(file).items() if key in layers}
    schemes = _schemes(shapes, scales, values)

    def quantize(key: str, weight: Tensor) -> Quantized:
        """The integers and scales of a layer."""
        if key in scales:
            return exact_integers(key, weight, scales[key])
        return round_to_nearest(weight, export_format(schemes[key].bits))

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
        return sum(math.prod(x.shape) * schemes[key].bits // 8 if key in layers else x.nbytes for key, x in tensors)

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
            before, after = (sum(x.stat().st_size for x in y) for y in (source.files, [work / x for x in source.targets()]))
            report = {**report, EXPORT_SECTION: ExportSection("compressed-tensors", after).to_dict()}
            finish(work, report, unchanged, difference="differs from the model's. Check memory and disk.")
    return Exported(str(output), len(layers), before, after, zeros, tuple(dict.fromkeys(schemes.values())))


def _check_values(source: Source, scales: Mapping[str, Scales], values: str | None) -> None:
    """Raise InvalidSetting if `values` is missing, unknown, or given for a model that is rounded already."""
    if values is None and scales:
        return
    if values is None or BITS_OF.get(values) not in STORED_BITS:
        reason = f"{source.name} was not pruned with them" if values is None else f"got {values!r}"
        raise InvalidSetting(f"An export needs `values`, int4 or int8, to round weights to: {reason}.")
    check_unrounded(source.name, scales)


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


def _schemes(shapes: Mapping[str, Sequence[int]], scales: Mapping[str, Scales], values: str | None) -> dict[str, IntegerFormat]:
    """The scheme of each layer by the stored name of its weight; the same for those that vLLM may fuse."""
    fused: dict[tuple[str, int], list[IntegerFormat]] = {}
    keys = {name: (name.removesuffix(".weight").rpartition(".")[0], shape[1]) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        found = scales[name].format if name in scales else export_format(BITS_OF[str(values)])
        group = 0 if found.groups(shape[1]) == 1 else math.gcd(found.group_size, shape[1], MAX_EXPORTED_GROUP)
        fused.setdefault(keys[name], []).append(IntegerFormat(max(found.bits, *STORED_BITS[:1]), group))
    common = {}
    for (parent, columns), together in fused.items():
        sizes = {scheme.group_size for scheme in together}
        group = 0 if sizes == {0} else math.gcd(*sizes, columns, MAX_EXPORTED_GROUP)
        common[parent, columns] = IntegerFormat(max(scheme.bits for scheme in together), group)
    return {name: common[keys[name]] for name in shapes}


def _stored(key: str, quantized: Quantized, scheme: IntegerFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer under their names. Raises UnsupportedModel for scales that the dtype cannot hold."""
    rows, columns = quantized.integers.shape
    expanded = expand_groups(quantized.scales, quantized.format.group_size, columns)
    scales = expanded[:, :: scheme.group_size or columns].contiguous()
    if not torch.equal(scales.to(dtype).float(), scales.float()):
        raise UnsupportedModel(f"The scales of {key} are too small for {dtype}. Convert the model to bfloat16, and prune it.")
    return {
        f"{key}_packed": pack_integers(quantized.integers, scheme.bits),
        f"{key}_scale": scales.to(dtype),
        f"{key}_shape": torch.tensor([rows, columns]),
    }


def _check_written(file: Path, key: str, quantized: Quantized, *, weight: Tensor, scheme: IntegerFormat) -> int:
    """Read a layer back, compare it with what it was made from, and count its zeros. Raises VerificationFailed."""
    packed, scale, shape = (read_stored(TensorLocation(file, f"{key}_{part}")) for part in ("packed", "scale", "shape"))
    integers = unpack_integers(packed, scheme.bits, weight.shape[1])
    dense = dequantized(integers, scale, scheme.group_size).to(weight.dtype)
    if shape.tolist() != list(weight.shape) or not torch.equal(dense, quantized.to_dense().to(weight.dtype)):
        raise VerificationFailed(f"{key} differs from the model's after writing. Check memory and disk.", (key,))
    return int((integers == 0).sum())


def _quantization_config(schemes: Mapping[str, IntegerFormat], ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json: a group of layers for each scheme."""
    targets: dict[IntegerFormat, list[str]] = {}
    for path, scheme in schemes.items():
        targets.setdefault(scheme, []).append(path)
    groups = {}
    for number, (scheme, paths) in enumerate(targets.items()):
        size = scheme.group_size
        group = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(targets) == 1 else paths,
            "weights": {"num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False, **group},
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
    }


def _write_card(file: Path, text: str) -> None:
    """Write a model card with a paragraph on the integers after its title, or at its end."""
    changed, count = re.subn(r"^# .*\n", lambda title: f"{title[0]}\n{NOTE}", text, count=1, flags=re.MULTILINE)
    file.write_text(changed if count else f"{text}\n{NOTE}", encoding="utf-8")
