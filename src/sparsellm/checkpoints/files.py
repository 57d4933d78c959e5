"""A checkpoint's files: where they are, each there and whole. Nothing of a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.headers import read_headers
from sparsellm.data import demo
from sparsellm.data.json_files import is_path, read_json
from sparsellm.data.yaml_files import read_words
from sparsellm.errors import BadCheckpoint, InvalidSetting, Unreachable

DEMO = "demo:"
"""What a bundled model's name begins with."""

SHARDS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where transformers looks for weights, in its order."""


LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY", "ACCEPTABLE_USE")
"""What names of files with a model's terms begin with, in capitals or not."""

TEMPLATES = "additional_chat_templates"
"""The folder within a checkpoint's where transformers looks for further chat templates."""

TERMS = ("license", "license_name", "license_link", "language")
"""What of a model's card holds of what is made from it too."""


@dataclass(frozen=True)
class Origin:
    """The dense model as the card tells of it. name: on the hub, or its folder's; empty for a model without one.

    hub: whether it is a hub name. terms: what the dense model's own card says of licence and language. loader: the class of
    transformers that loads it.
    """

    name: str = ""
    hub: bool = False
    terms: Mapping[str, Any] = field(default_factory=dict)
    loader: str = "AutoModelForCausalLM"


def licence_files(folder: Path) -> list[Path]:
    """The files that hold a model's terms."""
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name.upper().startswith(LICENCES))


def card_terms(folder: Path) -> dict[str, Any]:
    """What a model's card (README.md) says of licence and language; nothing where there is none, or none that can be read."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8-sig")
        head = re.match(r"\s*---[ \t]*\n(.*?)\n---", text, re.DOTALL)
        found = read_words(head[1]) if head else {}  # as text: to YAML the language "no" is false
    except (OSError, ValueError):
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
    """The weight files; raises BadCheckpoint unless each is there, in the folder and, for safetensors, sound by its header."""
    present = next((folder / shard for shard in SHARDS if (folder / shard).is_file()), None)
    if present is None:
        raise BadCheckpoint(
            f"{name} has no weights: no model.safetensors and no index of shards. The download may be incomplete."
        )
    try:
        files = _shards(present) if present.suffix == ".json" else [present]
        for file in files:
            if file.suffix == ".safetensors":
                read_headers(file)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{name}: {error}") from None
    return files


def check_within(name: str, folder: Path) -> None:
    """Raise BadCheckpoint where a checkpoint leads out of its folder: a private file of the user's might end in an output.

    So does a link to a file outside, but for those of the hub's cache, from a snapshot to the blobs of the same repository; and
    a file's name among the special tokens, which transformers would read in place of the tokenizer's own.
    """
    for file in (*folder.iterdir(), *(folder / TEMPLATES).glob("*")):
        if file.is_file() and not _is_within(file, folder):
            raise BadCheckpoint(
                f"{name}: {file.name} is a link to {file.resolve()}, outside the folder. "
                "Put a copy of the file in its place, or name the folder that holds the files."
            )
    if (tokens := folder / "special_tokens_map.json").is_file():
        content = read_json(tokens, BadCheckpoint)
        files = [key for key in content if key.endswith("_file")] if isinstance(content, dict) else []
        if files:
            raise BadCheckpoint(f"{name}: {tokens.name} names a file ({files[0]}), which is no token. Remove that line.")


def _is_within(file: Path, folder: Path) -> bool:
    """Whether a file, all links followed, is in a folder, or where the hub's cache keeps that folder's files."""
    real = folder.resolve()
    cached = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
    homes = (real, real.parents[1] / "blobs") if cached else (real,)
    return any(file.resolve().is_relative_to(loaded) for loaded in homes)


def _shards(index: Path) -> list[Path]:
    """The weight files that an index names; raises BadCheckpoint unless each is there and in the index's folder."""
    content = read_json(index, BadCheckpoint)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
        raise BadCheckpoint(f"{index.name} is damaged: its `weight_map` must name a file for each tensor. Download it again.")
    kind = ".bin" if ".bin" in index.suffixes else ".safetensors"
    named = sorted(set(weight_map.values()))
    files = [index.parent / file for file in named]
    for name, file in zip(named, files, strict=True):
        if not is_path(name) or Path(name).is_absolute() or ".." in Path(name).parts or file.suffix != kind:
            raise BadCheckpoint(
                f"{index.name} names {name[:80]!r}, which is no {kind} file of its folder. Get a sound copy of the checkpoint."
            )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BadCheckpoint(f"it lacks {len(missing)} of {len(files)} weight files, {missing[0]} among them.")
    outside = [file for file in files if not _is_within(file, index.parent)]
    if outside:
        raise BadCheckpoint(
            f"{outside[0].name} is a link to {outside[0].resolve()}, outside the folder. Put a copy in its place."
        )
    return files


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its last full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
