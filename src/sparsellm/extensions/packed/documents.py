"""The sizes, report and other files that go with the weights of a packed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from sparsellm import __version__
from sparsellm.checkpoints.configuration import check_doubles, read_config
from sparsellm.checkpoints.documents import DocumentFiles, copy_documents, documents_of
from sparsellm.checkpoints.files import REPORT, check_files, checkpoint_name, find_checkpoint
from sparsellm.checkpoints.headers import locate_all
from sparsellm.checkpoints.readers import quantization_settings
from sparsellm.checkpoints.stamps import Stamps
from sparsellm.checkpoints.stored_form import shard_names
from sparsellm.checkpoints.tensor_index import TensorDigest, tensor_digests
from sparsellm.errors import BadCheckpoint, InvalidSetting, checkpoint_errors
from sparsellm.extensions.packed.packed_files import is_packed, packed_entries, parts_of
from sparsellm.extensions.packed.sizes import MatrixSize
from sparsellm.outputs.folder import ANEW
from sparsellm.outputs.verification import raise_if_any, read_finished, tensor_differences
from sparsellm.texts.json_files import FORMAT


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
        stored, entries = locate_all(file), packed_entries(file)
        for name in (name for name in stored if name in digests and len(digests[name].shape) > 1):
            parts = parts_of(name, stored).values() if name in entries else ()
            size = sum(stored[part][0].numel for part in parts) if parts else digests[name].nbytes
            digest = digests[name]
            negative = 0 if positive_zeros else digest.negative_zeros
            bits = entries[name].bits if parts else None
            dense = digest.dtype, digest.zeros, negative, digest.nbytes
            sizes.append(MatrixSize(name, digest.shape, *dense, size, packed=bool(parts), value_bits=bits))
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
    totals = {"pruned_layers": 0, "sparsity_of_pruned_layers": 0.0, "parameters": count, "zeros": zeros}
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
