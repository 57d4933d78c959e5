"""Finished outputs as they are read again, and their verification against the report and the dense model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsellm.checkpoints.block_loader import DiskWeights, tied_names
from sparsellm.checkpoints.comparison import StoredTensors, compare, layers_by_parameter
from sparsellm.checkpoints.files import REPORT, UNFINISHED, WORK, check_files, within
from sparsellm.checkpoints.headers import read_headers, stored_weights
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_source
from sparsellm.checkpoints.side_files import formats_of
from sparsellm.checkpoints.stored_form import StoredForm
from sparsellm.checkpoints.tensor_index import (
    TensorDigest,
    TensorLocation,
    bit_identical,
    file_digest,
    locations_of,
    read_finite,
    read_stored,
    report_digest,
    tensor_digests,
)
from sparsellm.errors import BadCheckpoint, InvalidSetting, UnsupportedModel, VerificationFailed, dtype_name, first_line, plural
from sparsellm.evaluation.results import Summarized
from sparsellm.methods import LayerResult, Plan
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.outputs.folder import CARD, folder_path
from sparsellm.outputs.report import Digests, Report, read_report
from sparsellm.outputs.views import Plotted
from sparsellm.solvers.linalg import count_zeros
from sparsellm.texts.json_files import finite, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOADED = (".safetensors", ".bin", ".json", ".jinja", ".model", ".py")
"""Suffixes of files that can affect what is loaded from a folder."""

SHOWN_DIFFERENCES = 5
"""Number of differences that a message names; all are in the error's `differences`."""


@dataclass(frozen=True, repr=False)
class Verification(Summarized):
    """An output without differences from its report.

    Attributes:
        against: Dense model that all other tensors were compared with, if any.
        changed: Number of other tensors that the run changed, which are not compared with the dense model's.
        converted: Dtype in which tensors equal the dense model's that have another dtype there; empty if there are none.
        rounded: Number of layers of an export that equal those of `against`, from which it was made, after rounding.
        rounded_outside: Number of tensors without pruned layers that `pack` or `export` rounded, which are not compared either.
    """

    output: str
    files: int
    tensors: int
    layers: int
    against: str | None = None
    changed: int = 0
    converted: str = ""
    rounded: int = 0
    rounded_outside: int = 0

    def summary(self) -> dict[str, str]:
        """The output, the numbers of what was checked, and the comparison, each in one line."""
        return {
            "output": f"{PurePath(self.output).name} is unchanged since the run wrote it",
            "checked": f"{self.files} files, {self.tensors} tensors, {self.layers} pruned layers",
            "against": self.compared() if self.against else "compared with no dense model",
        }

    def compared(self) -> str:
        """How the tensors that the run did not change compare with the dense model's."""
        if self.rounded:
            name = PurePath(self.against or "").name
            return f"{plural(self.rounded, 'layer')} equal those of {name} rounded to integers, all other tensors bit by bit"
        verb = "rounding" if "16" in self.converted else "conversion"
        after = f" after {verb} to {self.converted}" if self.converted else ""
        but = f" but {self.rounded_outside} that were rounded since" if self.rounded_outside else ""
        return f"all other tensors{but} equal those of {PurePath(self.against or '').name}{after}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self) | {"holds": True, "differences": []}


def verify(
    output: str | Path,
    against: str | Path | PreTrainedModel | None = None,
    *,
    trust_remote_code: bool = False,
) -> Verification:
    """Check that an output is unchanged since a run wrote it, one tensor at a time.

    Every file except the model card, every tensor and the report must have the digest recorded in the report; no other file
    may be present that loading would read; every pruned layer must have the recorded zeros and follow its pattern.

    Args:
        output: Folder that a run wrote.
        against: The dense model: a folder, a hub name, "demo:opt", or a model in memory. Both must have the same tensors, and
            those that the run did not change must have the same bytes; or, if the report says that the run changed the dtype,
            equal values after rounding to it. Of an export, also the pruned model that it was made from: every layer with
            integers must be that of the model, rounded, and all other tensors must have the same bytes.
        trust_remote_code: Run the Python code that comes with the output.

    Returns:
        The numbers of files, tensors and layers that were verified.

    Raises:
        VerificationFailed: The output differs; its `differences` holds one sentence for each difference.
        InvalidSetting: The folder is not a finished output, or has no report.
        BadCheckpoint: The report or the model cannot be read.
    """
    finished = read_finished(output)
    folder, report = finished.folder, finished.report
    dense = None if against is None else open_source(against, trusted=trust_remote_code, packed=True)
    raise_if_any(output, _shape_differences(folder, report.files, finished.digests.tensors))
    tensors, unreadable = _digests_in(folder, report.files)
    differences = unreadable or tensor_differences(finished.digests.tensors, tensors)
    raise_if_any(output, [*differences, *_file_differences(finished)])
    stored, totals = finished.content["totals"], report.totals.to_dict()
    layers = {layer.name: layer for layer in report.layers}
    wrong = [
        f"`{x}` is {stored.get(x)} in {REPORT}, and {value} by its layers"
        for x, value in totals.items()
        if stored.get(x) != value
    ]
    repeated = [f"{REPORT} names a layer twice"] * (len(layers) < len(report.layers))
    raise_if_any(output, wrong + repeated)
    counts = len(report.files), len(tensors), len(layers)
    if dense is None and _are_stored_as_reported(folder, layers):
        return Verification(str(output), *counts, changed=len(report.changed_parameters))
    model = open_source(folder, trusted=trust_remote_code, packed=True).skeleton()
    written, dense_tensors, rounded = StoredTensors(folder, model), None, 0
    if dense is not None:
        dense_tensors = StoredTensors(dense.folder, dense.skeleton(), dense.model)
        for section in report.sections.values():
            if (compared := section.compare(finished, written, dense, dense_tensors)) is not None:
                differences, rounded = compared
                raise_if_any(output, differences)
                dense_tensors = None
                break
    differences, converted, outside = _layer_differences(model, written, dense_tensors, report)
    if converted and not report.dtype_changed:
        differences += [f"{key} has another dtype than in the dense model, which the report does not say" for key in converted]
    raise_if_any(output, differences)
    dtype = written.dtype(converted[0]) if converted else ""
    against = dense.name if dense else None
    return Verification(str(output), *counts, against, len(report.changed_parameters), dtype, rounded, outside)


def check_written(folder: Path, report: Report, dense: Path | None, *, model: PreTrainedModel, in_memory: bool) -> None:
    """Read back a checkpoint that was just written and compare it with its report.

    Every pruned layer must have the reported zeros and follow its pattern. Every other tensor, unless the report lists it as
    changed, must equal the dense model's bit by bit after conversion to the output's dtype; so must the layers that were not
    pruned in a parameter that holds several layers.

    Args:
        dense: Folder of the dense model; None if there is none.
        model: The pruned model, or a skeleton that gives the names of its parameters.
        in_memory: Whether `model` holds the weights that were written; then every tensor is compared with it bit by bit.

    Raises:
        VerificationFailed: The checkpoint differs.
    """
    written = StoredTensors(folder, model)
    state = model.state_dict() if in_memory else {}
    differences = []
    for key, tensor in written:
        held = state.get(key, tensor).cpu()
        if not bit_identical(held, tensor.to(held.dtype)):  # the class may convert tensors
            differences.append(f"{key} has other values than in memory")
    raise_if_any("The written checkpoint", differences)
    differences, *_ = _layer_differences(model, written, None if dense is None else StoredTensors(dense, model), report)
    raise_if_any("The written checkpoint", differences)


def check_unpruned(source: Checkpoint, loaded: LoadedModel, plan: Plan) -> None:
    """Compare a model that was just loaded, as it would be written, with its checkpoint, so that no run fails on it at its end.

    Names and shapes must be those of the files; tensors without a planned layer must also have the same values.

    Raises:
        UnsupportedModel: They differ: the model's class stores tensors otherwise, or changes them.
        BadCheckpoint: The checkpoint holds NaN or infinity.
    """
    model, weights, files = loaded.model, loaded.weights, source.files()
    form, tied = StoredForm.of(files, source.skeleton(dtype_name(model.config.dtype))), tied_names(model)
    layers = ((block, name) for block in blocks_and_head(model, plan) for name in block.layers if block.full_name(name) in plan)
    planned = {tied[block.full_name(block.parameter(name))] for block, name in layers}
    wrong = []
    for names in form.by_block():
        places = {place.key: place for name in names for place in locations_of(form.locations[name])}
        pruned = {place for name in names if tied[name] in planned for place in locations_of(form.locations[name])}
        read = {name for name in names if pruned.isdisjoint(locations_of(form.locations[name]))}
        with weights.filled(read) if isinstance(weights, DiskWeights) else nullcontext():
            state = model.state_dict()
            held = {name: state[name] if name in read else state[name].to("meta") for name in names}
            tensors = form.tensors(held)
            wrong += sorted(places.keys() ^ tensors.keys())
            wrong += [key for key in sorted(places.keys() & tensors.keys()) if not _is_stored(tensors[key], places[key])]
    if wrong:
        raise UnsupportedModel(
            f"A {type(model).__name__} does not keep {plural(len(wrong), 'tensor')} of {source.name} as they are stored, "
            f"{wrong[0]} first, and its output would differ in more than the pruned layers."
        )
    for place in form.carried.values():
        read_finite(place)


def _is_stored(tensor: Tensor, place: TensorLocation) -> bool:
    """Whether a tensor has the values of a stored one in its own dtype, or on the meta device its shape."""
    if tensor.is_meta:
        return tensor.shape == read_headers(place.file)[place.key].shape
    return bit_identical(tensor.cpu(), read_finite(place, tensor.dtype).to(tensor.dtype))


def proven(folder: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a report the names of the folder's files, their digests, and those of their tensors and of the report itself.

    Args:
        report: The report as plain data.

    Raises:
        VerificationFailed: A tensor holds NaN or infinity.
    """
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    tensors, unreadable = _digests_in(folder, names)
    not_finite = [f"{key} holds NaN or infinity" for key, tensor in tensors.items() if not tensor.finite]
    raise_if_any("The written checkpoint", [*unreadable, *not_finite])
    digests: dict[str, Any] = {
        "files": {name: file_digest(folder / name) for name in names},
        "tensors": {key: tensor.to_dict() for key, tensor in tensors.items()},
    }
    data: dict[str, Any] = json.loads(json.dumps(finite({**report, "files": sorted({*names, REPORT}), "digests": digests})))
    digests["report"] = report_digest(data)
    return data | {"digests": digests}


def _digests_in(folder: Path, names: Sequence[str]) -> tuple[dict[str, TensorDigest], list[str]]:
    """Digests of the tensors in the safetensors files among these, and the reasons why files cannot be read."""
    digests: dict[str, TensorDigest] = {}
    unreadable = []
    for name in names:
        if name.endswith(".safetensors") and "/" not in name:  # those in subfolders belong to other modules
            try:
                digests |= tensor_digests(folder / name)
            except (BadCheckpoint, UnsupportedModel, SafetensorError) as error:
                unreadable.append(first_line(error))
    return digests, unreadable


def _shape_differences(folder: Path, names: Sequence[str], recorded: Mapping[str, Any]) -> list[str]:
    """Packed tensors in these files of other shapes than in the report, which are not decoded. Other faults are found later."""
    differences = []
    for file in (folder / name for name in names if name.endswith(".safetensors") and "/" not in name):
        with suppress(OSError, SafetensorError, UnsupportedModel):
            headers = read_headers(file)
            packed = stored_weights(file)
            differences += [shape_difference(key, headers[key].shape, recorded) for key in headers if key in packed]
    return [difference for difference in differences if difference]


def _file_differences(output: Output) -> list[str]:
    """Differences between the files of an output and those in its report."""
    differences = [f"{name} was changed since" for name in output.changed_files() if name != CARD]
    listed, digested = set(output.report.files), {REPORT, *output.digests.files}
    differences += [f"the report does not list {name} in both `files` and `digests`" for name in sorted(listed ^ digested)]
    loaded = [file.name for file in sorted(output.folder.iterdir()) if file.suffix in LOADED and not file.is_dir()]
    return differences + [f"{name} was not written by the run" for name in loaded if name not in listed | digested]


def _are_stored_as_reported(folder: Path, layers: Mapping[str, LayerResult]) -> bool:
    """Whether each pruned layer is a tensor of its own, under the layer's name, and as the report says.

    If not, only the model's class can tell where a layer is stored: in a fused tensor, under another name, or transposed. To
    import it takes longer than all else that is done for a small model.
    """
    stored = {key: TensorLocation(file, key) for file in check_files(folder.name, folder) for key in read_headers(file)}
    keys = {f"{name}.weight": layer for name, layer in layers.items()}
    if not keys.keys() <= stored.keys():
        return False
    rounded = formats_of(stored)
    return not any(_layer_difference(read_stored(stored[key]), layer, rounded=key in rounded) for key, layer in keys.items())


def _layer_differences(
    model: PreTrainedModel, tensors: StoredTensors, dense: StoredTensors | None, report: Report
) -> tuple[list[str], list[str], int]:
    """Differences between pruned layers and their report, and between other tensors and the dense model's, if given.

    Returns:
        The differences; the names of other tensors that equal the dense model's in another dtype; and the number of those that
        were rounded since.
    """
    differences: list[str] = []
    converted: list[str] = []
    rounded = formats_of(tensors.files)
    layers = {layer.name: layer for layer in report.layers}
    skipped, missing = set(report.changed_parameters), dict(layers)
    for key, pairs in layers_by_parameter(model, layers).items():
        pruned = [full_name for block, name in pairs if (full_name := block.full_name(name)) in layers]
        if not pruned:
            continue
        for name in pruned:
            del missing[name]
        if key not in tensors.files:
            differences += [f"{name} is missing" for name in pruned]
            continue
        skipped.add(key)
        parameter = tensors[key]
        original = None if dense is None or len(pruned) == len(pairs) else dense[key].to(parameter.dtype)
        for block, name in pairs:
            full_name, weight = block.full_name(name), block.linear_view(name, parameter)
            if full_name in pruned:
                differences += _layer_difference(weight, layers[full_name], rounded=key in rounded)
            elif original is not None and (
                original.shape != parameter.shape or not torch.equal(weight, block.linear_view(name, original))
            ):
                differences.append(f"{full_name} was not pruned and differs from the dense model's")
    differences += [f"{name}, which its report says was pruned, is missing" for name in missing]
    if dense is not None:
        comparison = compare(tensors, dense)
        # tied tensors may have another of their names in the files
        known = {tensors.one_name(key) for key in skipped | rounded.keys()}
        unexpected = [key for key in (*comparison.changed, *comparison.only_here) if tensors.one_name(key) not in known]
        differences += [f"{key} was not pruned and differs from the dense model's" for key in unexpected]
        differences += [f"{key} of the dense model is missing" for key in comparison.only_there]
        converted = [key for key in comparison.converted if tensors.one_name(key) not in known]
    return differences, converted, len(rounded.keys() - skipped)


def _layer_difference(weight: Tensor, expected: LayerResult, *, rounded: bool) -> list[str]:
    """How a pruned layer differs from its report; empty if it does not. More weights may be 0 if it was rounded since."""
    zeros = count_zeros(weight)
    if (zeros == expected.zeros or (rounded and zeros > expected.zeros)) and expected.pattern.holds(weight):
        return []
    return [f"{expected.name} has {zeros} zeros where the report says {expected.zeros} ({expected.pattern})"]


def raise_if_any(output: str | Path, differences: Sequence[str]) -> None:
    """Raise VerificationFailed if there are differences, with their number and the first of them."""
    if not differences:
        return
    rest = f"; and {len(differences) - SHOWN_DIFFERENCES} more" if len(differences) > SHOWN_DIFFERENCES else ""
    first = "; ".join(differences[:SHOWN_DIFFERENCES])
    raise VerificationFailed(
        f"{output} is not what the run made, {plural(len(differences), 'difference')}: {first}{rest}.",
        tuple(differences),
    )


def tensor_differences(recorded: Mapping[str, Any], tensors: Mapping[str, TensorDigest]) -> list[str]:
    """Differences between the tensors in an output's files and those in its report."""
    differences = [f"the tensor {key} is missing" for key in recorded if key not in tensors]
    differences += [f"the tensor {key} was not written by the run" for key in tensors if key not in recorded]
    for key in (key for key in tensors if key in recorded):
        tensor, record = tensors[key], recorded[key]
        if not tensor.finite:
            differences.append(f"{key} holds NaN or infinity")
        elif tensor.dtype != record.get("dtype"):
            differences.append(f"{key} is {tensor.dtype} where the report says {record.get('dtype')}")
        elif difference := shape_difference(key, tensor.shape, recorded):
            differences.append(difference)
        elif tensor.digest != record.get("digest"):
            differences.append(f"the values of {key} were changed since")
    return differences


def shape_difference(key: str, shape: Sequence[int], recorded: Mapping[str, Any]) -> str:
    """How a tensor's shape differs from that in a report, if it has one; empty if it does not."""
    record = recorded.get(key)
    if record is None or list(shape) == record.get("shape"):
        return ""
    return f"{key} has the shape {list(shape)} where the report says {record.get('shape')}"


@dataclass(frozen=True, repr=False)
class Output(Plotted):
    """A folder that a run wrote. The model is not in memory: `AutoModelForCausalLM.from_pretrained` loads it from the folder.

    Attributes:
        folder: The folder.
        report: The results of the run.
        digests: The digests in the report.
        content: The report as plain data, unchanged, as its own digest requires.
    """

    folder: Path
    report: Report
    digests: Digests
    content: Mapping[str, Any]

    def summary(self) -> dict[str, str]:
        """The folder, and the summary of the report."""
        return {"output": str(self.folder), **self.report.summary()}

    def repeats(self, other: Output) -> bool:
        """Whether `pack` or `export` made this output from another one: its report has all of the other's but digests."""
        own = ("files", "digests", "packing")
        return all(self.content.get(name) == value for name, value in other.content.items() if name not in own)

    def changed_files(self) -> list[str]:
        """Return the files, including the report, that exist and differ from what the run wrote."""
        present = [name for name in self.report.files if name != REPORT and (self.folder / name).is_file()]
        changed = [name for name in present if file_digest(self.folder / name) != self.digests.files.get(name)]
        return changed + [REPORT] * (report_digest(self.content) != self.digests.report)


def read_output(folder: Path) -> Output:
    """Read the report in a folder. Raises InvalidSetting if there is none, BadCheckpoint if it is damaged."""
    file = folder / REPORT
    if not file.is_file():
        reason = f"was not written by sparsellm: it has no {REPORT}" if folder.is_dir() else "is not a folder"
        raise InvalidSetting(f"{folder} {reason}. Name a folder that a run wrote.")
    report, content = read_report(file)
    if report.digests is None or "files" not in content:
        raise BadCheckpoint(f"{file} holds no digests, so {folder} cannot be verified. Prune the model again.")
    if foreign := [name for name in report.files if not (is_path(name) and within(folder / name, folder))]:
        raise BadCheckpoint(f"{file} lists {foreign[0]}, which is not in the folder or is a link out of it.")
    return Output(folder, report, report.digests, content)


def read_finished(output: str | Path) -> Output:
    """Read the report of a finished output.

    Raises:
        InvalidSetting: The folder is not an output, or is unfinished.
        BadCheckpoint: The report is damaged, or files are missing.
    """
    folder = folder_path(output)
    if (folder / WORK).exists():
        raise InvalidSetting(f"{output} {UNFINISHED}")
    finished = read_output(folder)
    if missing := sorted(name for name in finished.report.files if not (folder / name).is_file()):
        raise BadCheckpoint(f"{output} lacks {len(missing)} of the files that the run wrote, {missing[0]} first.")
    return finished


def report_before(source: Checkpoint | InMemoryModel) -> Report | None:
    """The report of the run that wrote a model; None for one in memory, or that no run wrote."""
    folder = source.folder
    return None if folder is None or not (folder / REPORT).is_file() else read_output(folder).report


def foreign_file(folder: Path, kept: Collection[str]) -> str:
    """Name the first of the `kept` files that is not exactly as a run wrote it, with the reason; empty if all are."""
    if not kept:
        return ""
    try:
        output = read_output(folder)
    except InvalidSetting:
        return f"{min(kept)}, which sparsellm did not write"
    except BadCheckpoint:
        return f"{REPORT}, which is damaged"
    if foreign := sorted(set(kept) - set(output.report.files)):
        return f"{foreign[0]}, which sparsellm did not write"
    changed = output.changed_files()
    return f"{changed[0]}, which was changed since" if changed else ""
