"""The files of a checkpoint besides its weights: which go along to outputs, and config.json with one field changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from json.decoder import JSONDecoder
from pathlib import Path, PurePath
from typing import Any

import torch

from sparsellm.checkpoints.files import ADAPTER, ADAPTER_CONFIG, SHARDS, WEIGHTS
from sparsellm.errors import BadCheckpoint, dtype_name
from sparsellm.texts.json_files import BOM, read_json

CONFIG_FILE = "config.json"

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Fields of config.json that say how the weights are quantized or packed."""

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files of quantized checkpoints that say how: GPTQ's, AWQ's and modelopt's. No output is quantized in their way."""

MODULES = "modules.json"
"""Lists the modules of a sentence-transformers model, whose folders belong to the model with their weights."""

TRAINING_FILES = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args)\b.*", re.IGNORECASE)
INDEX = re.compile(r"\.(safetensors|bin)\.index(\..+)?\.json$")


@dataclass
class DocumentFiles:
    """The files of a checkpoint's folder and its subfolders, by relative path.

    Attributes:
        copied: Those that go along.
        left_out: Why each of the others does not, but for the weights and documents that are written anew, and hidden files.
    """

    copied: list[Path] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def noted(self) -> dict[str, str]:
        """The files that are left out, except an adapter, of which there is a note when the checkpoint is opened."""
        return {name: reason for name, reason in self.left_out.items() if not ADAPTER.fullmatch(name)}

    def note(self) -> str:
        """Name the files in `noted`, grouped by the reason; empty if there are none."""
        groups: dict[str, list[str]] = {}
        for name, reason in self.noted.items():
            groups.setdefault(reason, []).append(name)
        parts = (f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} ({reason})" for reason, names in groups.items())
        return f"not copied: {'; '.join(parts)}" if groups else ""


def documents_of(folder: Path, *, weights: Collection[Path], trusted: bool, written: Collection[str] = ()) -> DocumentFiles:
    """Tell which files of a checkpoint go along to a model made from it.

    Args:
        folder: The checkpoint.
        weights: The weight files that are read.
        trusted: Whether Python files go along.
        written: Names of files in the folder that the output has in another form.
    """
    result = DocumentFiles()
    modules = _modules(folder)
    index = SHARDS[1] if next(iter(weights)).suffix == ".safetensors" else SHARDS[3]
    own = {*weights, *(folder / name for name in (index, CONFIG_FILE, *written))}
    for file in _files(folder):
        name = file.relative_to(folder)
        if file in own:
            continue
        if reason := _left_out(name, file, trusted=trusted, modules=modules):
            result.left_out[str(name)] = reason
        else:
            result.copied.append(name)
    return result


def copy_documents(folder: Path, documents: DocumentFiles, target: Path) -> None:
    """Copy the files that go along, byte for byte, except for paths in configurations: see `without_paths`."""
    for name in documents.copied:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if fnmatch(str(name), "*config*.json"):
            (target / name).write_bytes(without_paths((folder / name).read_bytes()))
        else:
            shutil.copyfile(folder / name, target / name)


def without_paths(content: bytes) -> bytes:
    """Shorten each string of a JSON text that is an absolute path of this machine to its last component.

    transformers before version 5 wrote such paths to configurations. A path is one of this machine if its first folder is
    there. Every other byte stays.
    """

    def shortened(match: re.Match[bytes]) -> bytes:
        path = PurePath(os.fsdecode(match[1]))
        is_local = path.is_absolute() and len(path.parts) > 2 and Path(*path.parts[:2]).is_dir()
        return b'"%b"' % os.fsencode(path.name) if is_local else match[0]

    return re.sub(rb'"((?:[^"\\]|\\.)*)"', shortened, content, flags=re.DOTALL)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders in sorted order, and links to folders; hidden ones are left out."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise BadCheckpoint(f"{folder} cannot be read ({error.strerror}). Make it readable, or remove it.") from None
    for path in paths:
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        else:
            yield path


def _modules(folder: Path) -> set[str]:
    """Return the subfolders of the modules of a sentence-transformers model."""
    file = folder / MODULES
    content: Any = read_json(file, BadCheckpoint) if file.is_file() else None
    entries = content if isinstance(content, list) else []
    return {str(entry["path"]) for entry in entries if isinstance(entry, dict) and entry.get("path")}


def _left_out(name: Path, file: Path, *, trusted: bool, modules: Collection[str]) -> str:
    """Return why a file does not go along; empty if it does."""
    inside = len(name.parts) > 1
    reasons = {
        "a link to a folder": file.is_dir(),
        "": inside and name.parts[0] in modules,
        "an adapter, which is no part of the model": bool(ADAPTER.fullmatch(name.name)),
        "the state of a training": bool(TRAINING_FILES.fullmatch(name.name)),
        "a description of how the dense model is quantized": name.name in QUANTIZATION_FILES,
        "code, which goes along with `trust_remote_code=True`": name.suffix == ".py" and not trusted,
        "weights that are not loaded": name.suffix.lower() in WEIGHTS or bool(INDEX.search(name.name)),
        "another checkpoint": inside and any((file.parent / shard).is_file() for shard in SHARDS),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@contextmanager
def folder_for_transformers(folder: Path) -> Iterator[Path]:
    """The folder, or a folder of links to its files where transformers would misread it.

    transformers loads an adapter that lies beside a model where PEFT is installed, and no config.json that begins with a
    byte-order mark.
    """
    config = (folder / CONFIG_FILE).read_bytes()
    if not config.startswith(BOM) and not (folder / ADAPTER_CONFIG).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="sparsellm-") as links:
        for path in folder.iterdir():
            if path.name not in (CONFIG_FILE, ADAPTER_CONFIG):
                Path(links, path.name).symlink_to(path.absolute())
        Path(links, CONFIG_FILE).write_bytes(config.removeprefix(BOM))
        yield Path(links)


# ---- config.json


def members(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield each member of a JSON object: its name, where it begins, where its value begins, and where that ends."""
    decoder, at = JSONDecoder(), _skip(text, 0) + 1
    while text[at := _skip(text, at)] != "}":
        start = at
        name, at = decoder.raw_decode(text, at)
        value = _skip(text, _skip(text, at) + 1)
        _, at = decoder.raw_decode(text, value)
        yield name, start, value, at
        at = _skip(text, at)
        at += text[at] == ","


def _skip(text: str, at: int) -> int:
    """The position of the next character that is no white space."""
    while text[at].isspace():
        at += 1
    return at


def with_member(text: str, name: str, value: Any) -> str:
    """Add a member at the end of a JSON object, or replace it where it stands, and keep every other byte."""
    found = {key: (start, end) for key, _, start, end in members(text)}
    written = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    if name in found:
        start, end = found[name]
        return f"{text[:start]}{written}{text[end:]}"
    end = max((end for _, end in found.values()), default=text.index("{") + 1)
    return f"{text[:end]}{',' if found else ''}\n  {json.dumps(name)}: {written}{text[end:]}"


def without_member(text: str, name: str) -> str:
    """Remove a member of a JSON object with the comma and the white space before it: the reverse of `with_member`."""
    before = text.index("{") + 1
    for key, start, _, end in members(text):
        if key == name:
            after = _skip(text, end)
            if before == text.index("{") + 1 and text[after] == ",":  # the first of several: the comma behind it goes
                return f"{text[:start]}{text[_skip(text, after + 1) :]}"
            return f"{text[:before]}{text[end:]}"
        before = end
    return text


def without_quantization(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json without those on how the weights are packed or quantized."""
    text = fields.get("text_config")
    inner = {"text_config": without_quantization(text)} if isinstance(text, dict) else {}
    return {key: value for key, value in (fields | inner).items() if key not in QUANTIZATION_KEYS}


def plain_config(text: str) -> str:
    """Remove what a configuration says of how the weights are quantized."""
    inner = json.loads(text).get("text_config")
    for key in QUANTIZATION_KEYS:
        text = without_member(text, key)
        if isinstance(inner, dict) and key in inner:
            del inner[key]
            text = with_member(text, "text_config", inner)
    return text


def with_dtype(text: str, dtype: torch.dtype) -> str:
    """Set every dtype in a configuration, by the name that it has, or add the field that its version of transformers reads."""
    name = dtype_name(dtype)
    changed, count = re.subn(r'("(?:torch_)?dtype"\s*:\s*)(?:"[^"]*"|null)', rf'\g<1>"{name}"', text)
    if count:
        return changed
    version = json.loads(text).get("transformers_version")
    is_old = isinstance(version, str) and version.split(".")[0].isdecimal() and int(version.split(".")[0]) < 5
    return with_member(text, "torch_dtype" if is_old else "dtype", name)


def read_config_text(folder: Path) -> str:
    """Read config.json as it is, without a byte-order mark, which transformers does not read."""
    return (folder / CONFIG_FILE).read_bytes().removeprefix(BOM).decode("utf-8")


def write_config(target: Path, text: str) -> None:
    """Write config.json with the line breaks of the text, as `without_paths` gives it."""
    (target / CONFIG_FILE).write_bytes(without_paths(text.encode("utf-8")))
