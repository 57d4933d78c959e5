"""Compares an export with the pruned model that it was made from: its weights must be the model's, rounded as was asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from sparsellm.checkpoints.comparison import StoredTensors, compare
from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.headers import found_weights
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.checkpoints.side_files import formats_of
from sparsellm.checkpoints.tensor_index import locations_of
from sparsellm.extensions.integers.formats import IntegerFormat, integer_name
from sparsellm.extensions.integers.quantization import round_to_nearest
from sparsellm.outputs.sections import Section
from sparsellm.outputs.verification import Output, read_output

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
    """

    form: str

    @classmethod
    def from_dict(cls, data: Any) -> ExportSection:
        return TypeAdapter(cls).validate_python(data)

    def to_dict(self) -> dict[str, str]:
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
