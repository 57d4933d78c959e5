"""A checkpoint's files: where they are, each there and whole. Nothing of a tensor is read."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import yaml

from sparsellm import demo
from sparsellm.errors import BadCheckpoint, InvalidSetting, Unreachable

DEMO = "demo:"
"""What a bundled model's name begins with."""

SHARDS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where transformers looks for weights, in its order."""


LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY", "ACCEPTABLE_USE")
"""What names of files with a model's terms begin with, in capitals or not."""

TERMS = ("license", "license_name", "license_link", "language")
"""What of a model's card holds of what is made from it too."""


def licence_files(folder: Path) -> list[Path]:
    """The files that hold a model's terms."""
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name.upper().startswith(LICENCES))


def card_terms(folder: Path) -> dict[str, Any]:
    """What a model's card (README.md) says of licence and language; nothing where there is none, or none that can be read."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8-sig")
        head = re.match(r"\s*---[ \t]*\n(.*?)\n---", text, re.DOTALL)
        # As text all through: to YAML the language "no" is false.
        found = yaml.load(head[1], Loader=yaml.BaseLoader) if head else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    terms = {name: found.get(name) for name in TERMS} if isinstance(found, dict) else {}
    return {name: value for name, value in terms.items() if value and _is_text(value)}


def _is_text(value: Any) -> bool:
    """Whether a value is text, or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def is_hub_name(name: str) -> bool:
    """Whether a model's name is looked for on the hub: it is no folder here, and no bundled model."""
    return not name.startswith((DEMO, ".", "/", "~")) and name.count("/") < 2 and not Path(name).exists()


def find_checkpoint(name: str, revision: str | None = None, code: bool = False) -> Path:
    """The folder that holds a checkpoint; downloaded when it is a hub name.

    revision: of a hub name; a branch, tag or commit. code: whether Python files are wanted too.
    """
    if revision is not None and (name.startswith(DEMO) or Path(name).expanduser().exists()):
        raise InvalidSetting(
            f"`revision` goes with a hub name, got {revision!r} for {name}, which is here already. Leave it out."
        )
    if name.startswith(DEMO):
        return demo.model_path(name.removeprefix(DEMO))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise BadCheckpoint(f"{name} is a file. Name the folder that holds config.json and the weights.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise BadCheckpoint(
            f"There is no folder {name}. Name a folder with config.json, or a hub name such as facebook/opt-125m."
        )
    return _download(name, revision, code)


def _download(name: str, revision: str | None, code: bool) -> Path:
    """The local copy of a hub checkpoint."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    advice = "Pass the path of a local folder, or download it where there is a network."
    try:
        patterns = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", *(["*.py"] if code else [])]
        patterns += ["README.md", *(f"{word}*" for name in LICENCES for word in (name, name.capitalize(), name.lower()))]
        left = ["*.msgpack", "*.h5", "original/*"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=left))
    except RevisionNotFoundError:
        raise BadCheckpoint(f"{name} has no revision {revision!r} on the hub. Name a branch, a tag or a commit.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise BadCheckpoint(f"There is no folder {name}, and no such model on the hub (or it is private). {advice}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise Unreachable(f"There is no folder {name}, and the hub cannot be reached ({first_line(error)}). {advice}") from None


def check_files(name: str, folder: Path) -> list[Path]:
    """The weight files; raises BadCheckpoint unless each is there and, for safetensors, as long as its header says."""
    present = next((folder / shard for shard in SHARDS if (folder / shard).is_file()), None)
    if present is None:
        raise BadCheckpoint(
            f"{name} has no weights: no model.safetensors and no index of shards. The download may be incomplete."
        )
    files = [present]
    if present.suffix == ".json":
        try:
            named = sorted(set(json.loads(present.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            raise BadCheckpoint(f"{name}: {present.name} is damaged. Download it again.") from None
        files = [folder / file for file in named]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(f"{name} lacks {len(missing)} of {len(files)} weight files, {missing[0]} among them.")
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(name, file)
    return files


def _check_safetensors(name: str, file: Path) -> None:
    """Raise BadCheckpoint unless the file is as long as its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(min(header_size, size)))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError):
        raise BadCheckpoint(f"{name}: {file.name} is not a safetensors file, or is cut off. Download it again.") from None
    if 8 + header_size + end != size:
        raise BadCheckpoint(
            f"{name}: {file.name} has {size:,} bytes where its header calls for {8 + header_size + end:,}. Download it again."
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its last full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
