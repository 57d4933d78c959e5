"""Converts the weight files of a model one by one into an output, with the report and other files that go with them.

Conversion is continued after an interruption.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from sparsellm import __version__
from sparsellm.checkpoints.configuration import check_doubles, read_config
from sparsellm.checkpoints.documents import DocumentFiles, copy_documents, documents_of
from sparsellm.checkpoints.files import REPORT, WORK, check_files, checkpoint_name, find_checkpoint
from sparsellm.checkpoints.headers import file_metadata, read_headers
from sparsellm.checkpoints.readers import quantization_settings
from sparsellm.checkpoints.stamps import SourceChanged, Stamps, unchanged
from sparsellm.checkpoints.stored_form import shard_names, write_index
from sparsellm.checkpoints.tensor_index import TensorDigest, tensor_digests
from sparsellm.errors import BadCheckpoint, InvalidSetting, VerificationFailed, checkpoint_errors
from sparsellm.extensions.packed.formats.packed_tensors import packed_weights
from sparsellm.extensions.packed.packed_files import PACKED_METHOD, PACKED_VERSION, FileWriter, is_packed
from sparsellm.extensions.packed.record import MatrixSize
from sparsellm.outputs.folder import ANEW, free_disk, locked, replacing
from sparsellm.outputs.saving import raise_system_errors, set_default_permissions
from sparsellm.outputs.verification import proven, raise_if_any, read_finished, tensor_differences
from sparsellm.pipeline.planning import check_disk
from sparsellm.texts.json_files import FORMAT, durable, read_json, strict_json


@dataclass(frozen=True)
class Source:
    """A checkpoint to pack or to unpack.

    Attributes:
        name: Its name as the user wrote it.
        folder: Its folder.
        fields: The fields of its config.json.
        files: Its weight files.
        stamps: Its files as they were when it was opened.
    """

    name: str
    folder: Path
    fields: dict[str, Any]
    files: Sequence[Path]
    stamps: Stamps

    @classmethod
    def open(cls, name: str | Path) -> Source:
        """Find a checkpoint by its folder, hub name or "demo:opt"."""
        folder = find_checkpoint(checkpoint_name(name))
        files = check_files(str(name), folder)
        stamps = Stamps.of(str(name), folder, files, documents_of(folder, weights=files, trusted=True))
        check_doubles(str(name), files)
        return cls(str(name), folder, read_config(str(name), folder), files, stamps)

    def check_plain(self, verb: str) -> None:
        """Raise InvalidSetting for a quantized model, which `verb` does not apply to; one that is packed passes."""
        settings = quantization_settings(self.fields)
        if settings is not None and not is_packed(self.fields):
            method = str(settings.get("quant_method", "unknown"))[:40]
            raise InvalidSetting(
                f"{self.name} is quantized already ({method}). {verb} the plain checkpoint that it was made from."
            )

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens: the rows of its embeddings and of its head."""
        text = self.fields.get("text_config")
        size = (text if isinstance(text, dict) else self.fields).get("vocab_size")
        return size if isinstance(size, int) else None

    def targets(self) -> list[str]:
        """Return the names of the weight files that are written for its own."""
        return shard_names(len(self.files))


def matrix_sizes(files: Sequence[Path], digests: Mapping[str, TensorDigest], *, positive_zeros: bool) -> tuple[MatrixSize, ...]:
    """Return the sizes of the matrices in packed weight files.

    Args:
        files: The files.
        digests: What the tensors were before they were packed, by name.
        positive_zeros: Whether -0.0 became 0.0.
    """
    sizes = []
    for file in files:
        weights = packed_weights(file)
        for name in (name for name in read_headers(file) if len(digests[name].shape) > 1):
            digest, weight = digests[name], weights.get(name)
            negative = 0 if positive_zeros else digest.negative_zeros
            dense = digest.dtype, digest.zeros, negative, digest.nbytes
            size, bits = (sum(weight.sizes.values()), weight.entry.bits) if weight else (digest.nbytes, None)
            sizes.append(MatrixSize(name, digest.shape, *dense, size, packed=weight is not None, value_bits=bits))
    return tuple(sorted(sizes, key=lambda matrix: matrix.name))


def read_checked(source: Source) -> tuple[dict[str, TensorDigest], dict[str, Any]]:
    """Read all tensors of a model that something else is made from, and check that they are those that its run wrote.

    Returns:
        Their digests and zeros, by stored name; and the report of `report_of`.

    Raises:
        BadCheckpoint: A file is damaged, or a tensor holds NaN or infinity.
        VerificationFailed: A tensor was changed since the run that pruned the model.
    """
    digests = read_digests(source)
    report = report_of(source, digests)
    if "digests" in report:
        raise_if_any(source.name, tensor_differences(report["digests"].get("tensors", {}), digests))
    return digests, report


def read_digests(source: Source) -> dict[str, TensorDigest]:
    """Read all tensors of a model: their digests and zeros. Raises BadCheckpoint for NaN or infinity."""
    digests: dict[str, TensorDigest] = {}
    for file in source.files:
        with checkpoint_errors(source.name):
            digests |= tensor_digests(file)
    if bad := [name for name, digest in digests.items() if not digest.finite]:
        raise BadCheckpoint(f"{source.name} holds NaN or infinity in {bad[0]}. Get a sound copy of the checkpoint.")
    return digests


def report_of(source: Source, digests: Mapping[str, TensorDigest] | None) -> dict[str, Any]:
    """Return the report in a model's folder as plain data, or an empty one for a model that sparsellm did not write.

    Args:
        source: The model.
        digests: Its tensors; None if they were not read.

    Raises:
        SparseLLMError: As `read_finished`, if there is a report.
    """
    if (source.folder / REPORT).is_file():
        return dict(read_finished(source.folder).content)
    zeros = sum(digest.zeros for digest in (digests or {}).values())
    count = sum(digest.numel for digest in (digests or {}).values())
    size = sum(digest.nbytes for digest in (digests or {}).values())
    totals = {"pruned_layers": 0, "sparsity_of_pruned_layers": 0.0, "parameters": count, "zeros": zeros}
    totals |= {"weight_bytes": size, "packed_bytes": size}
    return {
        "format": FORMAT,
        "recipe": {"command": "prune", "model": PurePath(source.name).name, "method": "magnitude", "sparsity": "0%"},
        "environment": {"sparsellm": __version__},
        "calibration": "",
        "totals": totals | {"sparsity_of_model": zeros / max(count, 1)},
        "perplexity": {},
        "seconds": {},
        "peak_memory_bytes": 0,
        "blocks": [],
    }


def copy_files(source: Source, work: Path) -> DocumentFiles:
    """Copy what a model's folder holds besides weights, configuration, card and report; return which files these are."""
    documents = documents_of(source.folder, weights=source.files, trusted=True, written=ANEW)
    copy_documents(source.folder, documents, work)
    return documents


FINISHED_WEIGHTS = "weights"
"""Subfolder of the work folder with finished weight files."""

Observe = Callable[[str], None]
"""Receives what is being done, such as "packing model.safetensors"."""


@contextmanager
def converted(
    source: Source,
    path: Path,
    convert: Callable[[Path, FileWriter], None],
    *,
    size: Callable[[Path], int],
    settings: Mapping[str, Any],
    verb: str,
    observe: Observe,
) -> Iterator[Path]:
    """Convert the weight files of a model, and provide the folder with them that becomes the output at the end.

    Finished files are kept after an error, unless the model or the settings change before the next call.

    Args:
        source: The model.
        path: The output.
        convert: Writes the tensors of a file.
        size: About how many bytes are written for a file; 0 if it is not known.
        settings: What the content of the files depends on, besides the model.
        verb: What is done to the files, for `observe`.
        observe: Receives what is being done.

    Raises:
        TooLarge: The output needs more than is free on its disk.
    """
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in source.files]
    key = {"version": PACKED_VERSION, "model": str(source.folder.resolve()), "files": stamps, **settings}
    with locked(path):
        finished = path / WORK / FINISHED_WEIGHTS
        try:
            _keep_finished(finished, key)
            targets = dict(zip(source.files, source.targets(), strict=True))
            left = {file: target for file, target in targets.items() if not (finished / target).exists()}
            with checkpoint_errors(source.name):
                sizes = [size(file) for file in left]
            needed = sum(sizes) + max(sizes, default=0)  # a file is written in parts, which are then joined
            check_disk(path, needed, free_disk(path))
            with raise_system_errors(path, needed):
                for file, target in left.items():
                    observe(f"{verb} {file.name}")
                    metadata = {key: x for key, x in file_metadata([file]).items() if key != PACKED_METHOD}
                    with FileWriter(finished / target, metadata) as writer, checkpoint_errors(source.name):
                        convert(file, writer)
                observe("reading back what was written")
                with replacing(path) as work, unchanged(source.stamps):
                    for target in targets.values():
                        (finished / target).rename(work / target)
                    write_index(work, source.targets())
                    yield work
        except SourceChanged:
            shutil.rmtree(finished, ignore_errors=True)
            raise
        except BaseException as error:
            count = len(list(finished.glob("*.safetensors"))) if finished.is_dir() else 0
            if count:
                error.add_note(f"{count} of {len(source.files)} weight files are finished and kept: run it again to continue")
            else:
                shutil.rmtree(finished, ignore_errors=True)
            raise


def _keep_finished(finished: Path, key: Mapping[str, Any]) -> None:
    """Create the folder of finished files; remove those of another model or of other settings, and parts of files."""
    record = finished / "settings.json"
    if finished.is_dir() and (not record.is_file() or read_json(record) != key):
        shutil.rmtree(finished)
    finished.mkdir(exist_ok=True)
    for partial in finished.glob("*.partial"):
        partial.unlink()
    durable(record, json.dumps(key).encode())


def finish(work: Path, report: Mapping[str, Any], recorded: Mapping[str, Any] | None, *, difference: str) -> None:
    """Write the report with new digests, after comparing the tensors that were written with those recorded, if any.

    Args:
        work: The folder that becomes the output.
        report: The report without digests.
        recorded: The digests of the tensors before they were converted.
        difference: What it means if a tensor has another digest, and what to do.
    """
    set_default_permissions(work)
    written = proven(work, report)
    tensors = written["digests"]["tensors"]
    if wrong := sorted(name for name, record in (recorded or {}).items() if record != tensors.get(name)):
        raise VerificationFailed(f"{wrong[0]} {difference}", tuple(wrong))
    (work / REPORT).write_text(strict_json(written) + "\n", encoding="utf-8")
    set_default_permissions(work)
