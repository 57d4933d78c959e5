"""A written checkpoint held against what its report says, and against the dense model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsellm.checkpoints.digests import TensorDigest, file_digest, report_digest, tensor_digests
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import BadCheckpoint, VerificationFailed
from sparsellm.models.architecture_file import read_architecture
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.runs.finished import CARD, Layers, changed_files, finished_report, moved_tensors, pruned_layers
from sparsellm.runs.inspection import REPORT, Tensors, compare, follows
from sparsellm.runs.report import Report, finite
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.patterns import Pattern, parse_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOADED = (".safetensors", ".bin", ".json", ".jinja", ".model", ".py")
"""How the names of files end that may decide what is loaded from a folder."""

SHOWN = 5
"""Differences that a message names; all are in the error's `differences`."""


@dataclass(frozen=True)
class Verification:
    """An output that is as it was written. against: the dense model that what was not pruned was compared with, if any."""

    output: str
    files: int
    tensors: int
    layers: int
    against: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self) | {"holds": True, "differences": []}


def verify(
    output: str | Path,
    against: str | None = None,
    trusted: bool = False,
    architecture: str | Path | None = None,
) -> Verification:
    """Check that an output is as a run wrote it, read tensor by tensor.

    Every file but the model card, every tensor and the report itself must have the digests that the report holds; there is no
    further file that loading would read; every pruned layer has the zeros of the report and its pattern.

    Args:
        output: The folder that a run wrote.
        against: The dense model, as a folder, hub name or demo:opt. What the run did not prune or move must equal it bit by
            bit, in the output's dtype.
        trusted: Run code that the output brings.
        architecture: A file that describes the model's form.

    Returns:
        What was verified, in numbers.

    Raises:
        VerificationFailed: Something differs; its `differences` has one sentence for each.
        InvalidSetting: The folder is no finished output, or has no report.
        BadCheckpoint: The report or the model cannot be read.
    """
    path, report = finished_report(output)
    stored = {name: read for name in report["files"] if (read := _tensors_in(path / name)) is not None}
    tensors = {key: tensor for read in stored.values() for key, tensor in read.items()}
    _hold(output, [*_tensor_differences(report["digests"]["tensors"], tensors), *_file_differences(path, report)])
    described = None if architecture is None else read_architecture(architecture)
    model = open_checkpoint(str(path), None, trusted, described).skeleton()
    there = None
    if against is not None:
        dense = open_checkpoint(against, None, trusted, described)
        there = Tensors(dense.folder, dense.skeleton())
    layers = pruned_layers(report)
    moved = moved_tensors(report)
    total = report["totals"]["pruned_layers"]
    _hold(output, [f"{REPORT} lists {len(layers)} layers and counts {total}"] * (total != len(layers)))
    _hold(output, _layer_differences(model, Tensors(path, model), there, layers, moved))
    return Verification(str(output), len(report["files"]), len(tensors), len(layers), against)


def check_written(folder: Path, report: Report, dense: Path | None, model: PreTrainedModel, in_memory: bool) -> None:
    """Read a checkpoint back that was just written; raise VerificationFailed unless it holds what the report says.

    Every pruned layer has the zeros reported and its pattern; every tensor that the report does not call
    moved is bit-identical to the one in `dense`, after conversion where the model was loaded in another dtype than its file's.
    Of a parameter that holds several layers, so are those that were not pruned. model: of that form, for its names. in_memory:
    whether it is what was written; then every tensor must have its bits.
    """
    here = Tensors(folder, model)
    held = model.state_dict() if in_memory else {}
    _hold("What was written", [f"{key} has other numbers than in memory" for key, x in here if not _same(x, held.get(key, x))])
    layers = {layer.name: (layer.zeros, parse_pattern(layer.pattern)) for layer in report.layers}
    changed_parameters = {name for block in report.blocks for name in block.changed_parameters}
    there = None if dense is None else Tensors(dense, model)
    _hold("What was written", _layer_differences(model, here, there, layers, changed_parameters))


def proven(folder: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """A report with the names of the folder's files and the digests of these, of their tensors, and of itself.

    Raises VerificationFailed for a tensor that holds NaN or infinity.
    """
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    tensors = {key: one for name in names for key, one in (_tensors_in(folder / name) or {}).items()}
    _hold("What was written", [f"{key} holds NaN or infinity" for key, one in tensors.items() if not one.finite])
    digests: dict[str, Any] = {
        "files": {name: file_digest(folder / name) for name in names},
        "tensors": {key: one.to_dict() for key, one in tensors.items()},
    }
    message: dict[str, Any] = json.loads(json.dumps(finite({**report, "files": sorted({*names, REPORT}), "digests": digests})))
    digests["report"] = report_digest(message)
    return message | {"digests": digests}


def _hold(output: str | Path, differences: Sequence[str]) -> None:
    """Raise VerificationFailed where there are differences: how many, and the first of them."""
    if not differences:
        return
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    count = f"{len(differences)} difference{'s' * (len(differences) > 1)}"
    raise VerificationFailed(
        f"{output} is not what the run made, {count}: {'; '.join(differences[:SHOWN])}{more}.",
        tuple(differences),
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, the second on any device, have the same bits."""
    return one is other or (one.dtype == other.dtype and one.shape == other.shape and _bits(one).equal(_bits(other.cpu())))


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensors_in(file: Path) -> dict[str, TensorDigest] | None:
    """The tensors of a weight file; None for another file, none for one that cannot be read."""
    if file.suffix != ".safetensors":
        return None
    try:
        return tensor_digests(file)
    except (BadCheckpoint, SafetensorError):
        return {}


def _tensor_differences(recorded: Mapping[str, Any], tensors: Mapping[str, TensorDigest]) -> list[str]:
    """How the tensors of an output's files differ from those of its report."""
    found = [f"the tensor {key} is not there" for key in recorded if key not in tensors]
    found += [f"the tensor {key} was not written by the run" for key in tensors if key not in recorded]
    for key in (key for key in tensors if key in recorded):
        tensor, message = tensors[key], recorded[key]
        if not tensor.finite:
            found.append(f"{key} holds NaN or infinity")
        elif tensor.dtype != message.get("dtype"):
            found.append(f"{key} is {tensor.dtype} where the report says {message.get('dtype')}")
        elif list(tensor.shape) != message.get("shape"):
            found.append(f"{key} has the shape {list(tensor.shape)} where the report says {message.get('shape')}")
        elif tensor.digest != message.get("digest"):
            found.append(f"the numbers of {key} were changed since")
    return found


def _file_differences(path: Path, report: Mapping[str, Any]) -> list[str]:
    """How the files of an output differ from those of its report."""
    found = [f"{name} was changed since" for name in changed_files(path, report) if name != CARD]
    listed, proved = set(report["files"]), {REPORT, *report["digests"]["files"]}
    found += [f"the report lists {name} in one of two places" for name in sorted(listed ^ proved)]
    loaded = [file.name for file in sorted(path.iterdir()) if file.suffix in LOADED and not file.is_dir()]
    return found + [f"{name} was not written by the run" for name in loaded if name not in listed | proved]


def _layer_differences(
    model: PreTrainedModel, here: Tensors, there: Tensors | None, layers: Layers, moved: set[str]
) -> list[str]:
    """How layers differ from what is said of them, and other tensors from the dense model's, where there is one."""
    found: list[str] = []
    pruned, left = set(moved), dict(layers)
    for block in blocks_of(model):
        for parameter, names in _by_parameter(block).items():
            message = {name: left.pop(full) for name in names if (full := block.full_name(name)) in layers}
            if not message or parameter not in here.files:
                found += [f"{block.full_name(name)} is not there" for name in message]
                continue
            pruned.add(parameter)
            whole = here[parameter]
            found += [fault for name, meant in message.items() if (fault := _fault(block, name, whole, *meant))]
            if there is not None and len(message) < len(names):
                other = there[parameter].to(whole.dtype)
                open_ = [name for name in names if name not in message]
                found += [
                    f"{block.full_name(name)} was not pruned and differs from the dense model's"
                    for name in open_
                    if other.shape != whole.shape
                    or not torch.equal(block.linear_view(name, whole), block.linear_view(name, other))
                ]
    found += [f"{name}, which its report says was pruned, is not there" for name in left]
    if there is not None:
        changes = compare(here, there, as_stored=False)
        others = [key for key in (*changes["changed"], *changes["only_here"]) if key not in pruned]
        found += [f"{key} was not pruned and differs from the dense model's" for key in others]
    return found


def _fault(block: Block, name: str, whole: Tensor, zeros: int, pattern: Pattern) -> str:
    """What is wrong with a pruned layer; nothing where all is well."""
    weight = block.linear_view(name, whole)
    if count_zeros(weight) == zeros and follows(weight, pattern):
        return ""
    return f"{block.full_name(name)} has {count_zeros(weight)} zeros where the report says {zeros} ({pattern})"


def _by_parameter(block: Block) -> dict[str, list[str]]:
    """The names of a block's layers, by the full name of the parameter that holds them."""
    found: dict[str, list[str]] = {}
    for name in block.layers:
        found.setdefault(block.full_name(block.parameter(name)), []).append(name)
    return found
