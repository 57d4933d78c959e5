"""Opens the folder of a checkpoint, for every command alike: finds it, checks its files, tells what beside them is not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.configuration import check_kind, read_config
from sparsellm.checkpoints.documents import ADAPTER, documents_of, without_quantization
from sparsellm.checkpoints.files import DEMO, check_files, check_within, find_checkpoint, short_name
from sparsellm.checkpoints.headers import check_dtypes, found_weights, read_all_headers
from sparsellm.checkpoints.readers import TensorHeader, reader_of
from sparsellm.checkpoints.remarks import remark
from sparsellm.checkpoints.stamps import Stamps
from sparsellm.errors import UnsupportedModel, checkpoint_errors


@dataclass(frozen=True)
class OpenedFiles:
    """The files of a checkpoint, checked as far as can be without the class of its model.

    Attributes:
        fields: The fields of config.json, without those on how the weights are packed or quantized.
        files: The weight files.
        stamps: The files as they were when they were opened.
        headers: The headers of the tensors in all weight files, by name.
        packed: Whether the weights are packed.
        quantization: How they are quantized, in a sentence; empty if they are not. They are dequantized as they are read.
    """

    folder: Path
    fields: dict[str, Any]
    files: list[Path]
    stamps: Stamps
    headers: Mapping[str, TensorHeader]
    packed: bool
    quantization: str


def open_folder(name: str, revision: str | None = None, with_code: bool = False) -> Path:
    """Return the folder of a checkpoint, whose files may be read.

    Args:
        name: A folder, a bundled model such as "demo:opt", or a hub name.
        revision: Branch, tag or commit of a hub name.
        with_code: Whether to download Python files too.

    Raises:
        SparseLLMError: As `find_checkpoint` and `check_within`.
    """
    folder = find_checkpoint(name, revision, with_code)
    if not name.startswith(DEMO):  # installers may link the files of a package
        check_within(name, folder)
    _tell_adapter(name, folder)
    return folder


def open_files(name: str, folder: Path, *, trusted: bool = False, packed: bool = False) -> OpenedFiles:
    """Check the files of a checkpoint's folder. The weights are not read, and transformers is not needed.

    Args:
        name: Its name as the user wrote it.
        folder: The folder, as `open_folder` returns it.
        trusted: Whether the checkpoint's own code may run.
        packed: Whether it may be packed.

    Raises:
        BadCheckpoint: A file is missing or damaged, or the tensors are not what config.json says of them.
        UnsupportedModel: The model cannot be pruned.
    """
    fields = read_config(name, folder)
    reader = reader_of(name, fields)
    found_packed = reader is not None and reader.lossless
    if found_packed and not packed:
        raise UnsupportedModel(f"{name} is packed. Unpack it, and name the result: sparsellm unpack {name} FOLDER.")
    is_quantized = reader is not None and not found_packed
    fields = without_quantization(fields)
    check_kind(name, fields, trusted)
    files = check_files(name, folder)
    if is_quantized and any(file.suffix != ".safetensors" for file in files):
        raise UnsupportedModel(
            f"{name} is quantized, and its weights are not in safetensors files, the only ones that are dequantized. "
            "Get a copy in safetensors files."
        )
    stamps = Stamps.of(name, folder, files, documents_of(folder, weights=files, trusted=trusted))
    with checkpoint_errors(name):
        headers = read_all_headers(files)
        quantization = describe_quantization(short_name(name), folder)
    check_dtypes(name, headers, packed=found_packed)
    if quantization and not packed:
        remark(quantization, (folder.resolve(), "quantized"))
    return OpenedFiles(folder, fields, files, stamps, headers, found_packed, quantization)


def describe_quantization(name: str, folder: Path) -> str:
    """Return how the weights of a checkpoint are quantized, in a sentence; empty if they are not."""
    found = found_weights(folder)
    if found is None or found.lossless:
        return ""
    files = check_files(name, folder)
    parameters = sum(header.numel for header in read_all_headers(files).values())
    return found.describe(name, sum(file.stat().st_size for file in files), parameters)


def _tell_adapter(name: str, folder: Path) -> None:
    """Remark that an adapter beside the weights is not read; transformers would load it where PEFT is installed."""
    if files := sorted(file.name for file in folder.iterdir() if ADAPTER.fullmatch(file.name)):
        remark(
            f"{short_name(name)} has an adapter beside its weights ({', '.join(files)}), which is neither loaded nor copied. "
            "To have it in the model, merge it first: PEFT's merge_and_unload",
            (folder.resolve(), "adapter"),
        )
