"""Finds a checkpoint's files, and checks that they are complete. Tensors are not read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.remarks import remark
from sparsellm.errors import BadCheckpoint, InvalidSetting, Unreachable, first_line, printable
from sparsellm.texts import demo
from sparsellm.texts.json_files import IS_POINTER, LFS_POINTER, is_path, read_json
from sparsellm.texts.paths import local_path
from sparsellm.texts.yaml_files import read_value

DEMO = "demo:"
"""Prefix of the names of bundled models."""

SHARDS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files in which transformers looks for weights, in its order."""

WEIGHTS = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf", ".ggml", ".npz",
    ".tflite", ".mlmodel", ".nemo", ".pkl", ".pickle", ".partial",
})  # fmt: skip
"""Suffixes of files with weights, also in other formats."""

WORK = ".sparsellm"
"""Name of the work folder in an unfinished output; a finished output has none."""

REPORT = "sparsellm.json"
"""Name of the report file beside the weights of an output."""

UNFINISHED = "is unfinished. Finish it first: resume the run that writes it."
"""The end of messages about an output that is read before it is finished."""

ADAPTER_CONFIG = "adapter_config.json"
"""Describes an adapter of PEFT, which transformers would load with a model or in its place."""

ADAPTER = re.compile(r"adapter_(config\.json|model\..*)")
"""Names of the files of an adapter."""

TERMS = ("license", "license_name", "license_link", "language")
"""Fields of a model card that apply to derived models too."""


@dataclass(frozen=True)
class Origin:
    """The dense model, as described in the model card of a pruned model.

    Attributes:
        hub: Whether `name` is a hub name.
        terms: The license and language fields of its own card.
        loader: The class of transformers that loads it.
    """

    name: str = ""
    hub: bool = False
    terms: Mapping[str, Any] = field(default_factory=dict)
    loader: str = "AutoModelForCausalLM"


def card_terms(folder: Path) -> dict[str, Any]:
    """Return the license and language fields of a model card (README.md); empty if it is missing or cannot be read."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8-sig")
        head = re.match(r"\s*---[ \t]*\n(.*?)\n---", text, re.DOTALL)
        fields = read_value(head[1]) if head else {}
    except (OSError, ValueError):
        return {}
    terms = {name: fields.get(name) for name in TERMS} if isinstance(fields, dict) else {}
    return {name: value for name, value in terms.items() if value and _is_text(value)}


def _is_text(value: Any) -> bool:
    """Return whether a value is a string or a list of strings."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def is_begun(folder: Path) -> bool:
    """Whether a folder is an output that was begun and is not written; an output that is being replaced is there until then."""
    return (folder / WORK).is_dir() and not (folder / "config.json").exists()


def checkpoint_name(name: str | Path) -> str:
    """Return the name of a checkpoint. Raises InvalidSetting for anything else, such as a model in memory."""
    if not isinstance(name, (str, Path)):
        raise InvalidSetting(f"A folder or hub name is needed, got {type(name).__name__}. Save the model, and name the folder.")
    return str(name)


def is_hub_name(name: str) -> bool:
    """Return whether a model's name is a hub name: neither a local path nor a bundled model."""
    return not name.startswith((DEMO, ".", "/", "~")) and name.count("/") < 2 and not Path(name).exists()


def short_name(name: str) -> str:
    """Return a model's name, without the folders of a local path."""
    return name if is_hub_name(name) else local_path(name).absolute().name


def find_checkpoint(name: str, revision: str | None = None, with_code: bool = False) -> Path:
    """Return the folder of a checkpoint, whose files may be read, after downloading it if `name` is a hub name.

    An adapter beside the weights is ignored, with a remark; transformers would load it where PEFT is installed.

    Args:
        name: A folder, a bundled model such as "demo:opt", or a hub name.
        revision: Branch, tag or commit of a hub name.
        with_code: Whether to download Python files too.

    Raises:
        InvalidSetting: `revision` is set for a local checkpoint.
        BadCheckpoint: There is no such folder or model, it is an unfinished output, or as `check_within`.
        Unreachable: The hub cannot be reached.
    """
    if revision is not None and (name.startswith(DEMO) or local_path(name).exists()):
        raise InvalidSetting(f"`revision` goes with a hub name, got {revision!r} for {name}, which is local. Leave it out.")
    if name.startswith(DEMO):
        return demo.model_path(name.removeprefix(DEMO))  # installers may link the files of a package
    folder = local_path(name)
    if is_begun(folder):
        raise BadCheckpoint(f"{name} {UNFINISHED}")
    if not folder.is_dir():
        if not is_hub_name(name):
            raise BadCheckpoint(
                f"There is no folder {name}. Name a folder with config.json, or a hub name such as facebook/opt-125m."
            )
        folder = _download(name, revision, with_code)
    check_within(name, folder)
    if files := sorted(file.name for file in folder.iterdir() if ADAPTER.fullmatch(file.name)):
        remark(
            f"{short_name(name)} has an adapter beside its weights ({', '.join(files)}), which is ignored. "
            "To have it in the model, merge it first: PEFT's merge_and_unload",
            (folder.resolve(), "adapter"),
        )
    return folder


def _download(name: str, revision: str | None, with_code: bool) -> Path:
    """Return the local copy of a hub checkpoint."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    advice = "Pass the path of a local folder, or download it where there is a network."
    try:
        others = sorted(WEIGHTS - {".safetensors", ".bin"})
        ignored = [*(f"*{suffix}" for suffix in others), "original/*", *([] if with_code else ["*.py"])]
        return Path(snapshot_download(name, revision=revision, ignore_patterns=ignored))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        of = "" if revision is None else f" with the revision {revision!r}"
        reason = f"There is no folder {name}, and no such model on the hub{of} (or it is private)."
        raise BadCheckpoint(f"{reason} {advice}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise Unreachable(f"There is no folder {name}, and the hub cannot be reached ({first_line(error)}). {advice}") from None


def file_stamp(file: Path) -> tuple[int, int]:
    """Size and time of modification of a file, in bytes and nanoseconds, which tell that it was changed."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def check_files(name: str, folder: Path) -> list[Path]:
    """Return the weight files.

    Raises:
        BadCheckpoint: A file is missing or outside the folder.
    """
    main = next((folder / shard for shard in SHARDS if (folder / shard).is_file()), None)
    if main is None:
        raise BadCheckpoint(
            f"{name} has no weights: no model.safetensors and no index of shards. The download may be incomplete."
        )
    files = _shards(name, main) if main.suffix == ".json" else [main]
    for file in files:
        _check_pointer(name, file)
    return files


def check_within(name: str, folder: Path) -> None:
    """Raise BadCheckpoint if a checkpoint refers to files outside its folder, which could copy private files to an output.

    Refused are links to files outside the folder, except those in the hub's cache from a snapshot to the blobs of its
    repository, and file names in special_tokens_map.json, which transformers would open. So are pointers of Git LFS, and an
    adapter without a model.
    """
    for file in folder.rglob("*"):
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue  # hidden files are neither read nor copied
        if file.is_file() or file.is_symlink():
            _check_link(name, file, folder)
        if file.is_file() and file.suffix not in WEIGHTS:  # of these only the ones that are read must be there
            _check_pointer(name, file)
    if (folder / ADAPTER_CONFIG).is_file() and not any((folder / shard).is_file() for shard in SHARDS):
        content = read_json(folder / ADAPTER_CONFIG, BadCheckpoint)
        base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
        raise BadCheckpoint(f"{name} is only an adapter of {printable(str(base))}. Merge it first: PEFT's merge_and_unload.")
    if (tokens := folder / "special_tokens_map.json").is_file():
        content = read_json(tokens, BadCheckpoint)
        files = [key for key in content if key.endswith("_file")] if isinstance(content, dict) else []
        if files:
            raise BadCheckpoint(f"{name}: {tokens.name} names a file ({files[0]}), which is not a token. Remove that line.")


def _check_pointer(name: str, file: Path) -> None:
    """Raise BadCheckpoint for a pointer of Git LFS. A file that cannot be read is refused where it is read or copied."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
    except OSError:
        return
    if start == LFS_POINTER:
        raise BadCheckpoint(f"{name}: {file.name} {IS_POINTER}.")


def _check_link(name: str, file: Path, folder: Path) -> None:
    """Raise BadCheckpoint for a file that is not `within` its folder."""
    if not within(file, folder):
        raise BadCheckpoint(
            f"{name}: {file.name} is a link to {os.path.realpath(file)}, outside the folder. "
            "Put a copy of the file in its place, or name the folder that holds the files."
        )


def within(file: Path, folder: Path) -> bool:
    """Whether a file is in a folder or, as a link in a snapshot of the hub's cache, in the blobs of its repository."""
    target = Path(os.path.realpath(file))  # of a link to itself `Path.resolve` raises an error, as the version of Python has it
    resolved = folder.resolve()
    is_snapshot = resolved.parent.name == "snapshots" and resolved.parents[1].name.startswith("models--")
    parents = (resolved, resolved.parents[1] / "blobs") if is_snapshot else (resolved,)
    return any(target.is_relative_to(parent) for parent in parents)


def _shards(name: str, index: Path) -> list[Path]:
    """Return the weight files in an index; raise BadCheckpoint if one is missing or outside the index's folder."""
    content = read_json(index, BadCheckpoint)
    fields = content if isinstance(content, dict) else {}
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")  # without which transformers does not load files
    suffix = ".bin" if ".bin" in index.suffixes else ".safetensors"
    named = list(weight_map.values()) if isinstance(weight_map, dict) else []
    strange = [file for file in named if not _is_inside(file, suffix)]
    if not named or strange or not isinstance(metadata, dict):
        got = f", got {str(strange[0])[:80]!r}" if strange else ""
        raise BadCheckpoint(
            f"{name}: {index.name} is damaged: it must have `metadata`, and in `weight_map` a {suffix} file in its folder for "
            f"each tensor{got}. Download it again."
        )
    files = [index.parent / file for file in sorted(set(named))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BadCheckpoint(f"{name} lacks {len(missing)} of {len(files)} weight files, {missing[0]} among them.")
    for file in files:
        _check_link(name, file, index.parent)
    return files


def _is_inside(name: object, suffix: str) -> bool:
    """Whether an index names a file with this suffix, below its folder."""
    if not isinstance(name, str) or not is_path(name):
        return False
    return not Path(name).is_absolute() and ".." not in Path(name).parts and Path(name).suffix == suffix
