"""Loads a checkpoint's tokenizer, and tells one whose files are missing from one that is damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsellm.checkpoints.configuration import silence_transformers
from sparsellm.checkpoints.documents import folder_for_transformers
from sparsellm.checkpoints.files import short_name
from sparsellm.errors import BadCheckpoint, MissingPackage, first_line
from sparsellm.texts.json_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CONFIG, WHOLE_TOKENIZER = "tokenizer_config.json", "tokenizer.json"

NO_VOCABULARY = ("tokenizer_file", "tokenizer_config_file", "normalizer_file")
"""Roles of files in `vocab_files_names` of a tokenizer class that a vocabulary can do without."""

CONVERTED = ("tokenizer.model*", "tiktoken.model", "tekken.json")
"""Files that transformers converts to a vocabulary, whatever the class calls its own."""


class NoTokenizer(BadCheckpoint):
    """A checkpoint without the files that its tokenizer is read from: it has a model, but no text can be tokenized."""


def load_tokenizer(name: str, folder: Path, *, trusted: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    transformers makes a tokenizer without a vocabulary where a class finds none of its files, which is refused here.

    Args:
        name: The checkpoint's name as the user wrote it.
        trusted: Whether the checkpoint's own code may run.

    Raises:
        NoTokenizer: Files that the tokenizer's class reads are missing.
        MissingPackage: The tokenizer is read by packages that are not installed.
        BadCheckpoint: The tokenizer does not load, or two of its files contradict each other.
    """
    from transformers import AutoTokenizer

    try:
        with silence_transformers(), folder_for_transformers(folder) as readable:
            tokenizer = AutoTokenizer.from_pretrained(readable, local_files_only=True, trust_remote_code=trusted)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # transformers raises many kinds of errors, including ImportError
        if packages := _packages_missing(folder):
            raise MissingPackage(
                f"The tokenizer of {short_name(name)} is a SentencePiece model, which needs {' and '.join(packages)}: "
                "pip install 'sparsellm[sentencepiece]'."
            ) from error
        if (missing := _missing_files(folder, _class_named(folder))) is not None:
            raise _no_tokenizer(name, missing) from error
        raise BadCheckpoint(
            f"{name} has no tokenizer that loads ({first_line(error)}). Copy the model's tokenizer files into the folder."
        ) from error
    if (missing := _missing_files(folder, type(tokenizer))) is not None:
        raise _no_tokenizer(name, missing)
    _check_added(name, folder, tokenizer)
    _normalize(folder, tokenizer)
    return tokenizer


def _no_tokenizer(name: str, missing: str) -> NoTokenizer:
    """The error for a checkpoint that lacks these files."""
    return NoTokenizer(
        f"{short_name(name)} has no tokenizer: it lacks {missing}. Copy the model's tokenizer files into the folder."
    )


def _missing_files(folder: Path, kind: type | None) -> str | None:
    """The files that a tokenizer's class reads and that a folder lacks, in words; None if it has them, or none are known."""
    from transformers import TokenizersBackend

    names: Mapping[str, str] = getattr(kind, "vocab_files_names", {})
    if kind is None or not names:
        return None
    is_whole = issubclass(kind, TokenizersBackend) or "tokenizer_file" in names
    if is_whole and any((folder / file).is_file() for file in _whole_files(folder)):
        return None
    own = [file for role, file in names.items() if role not in NO_VOCABULARY]
    missing = [file for file in own if not (folder / file).is_file()]
    if is_whole and len(own) < 2 and any(file.is_file() for pattern in CONVERTED for file in folder.glob(pattern)):
        return None
    if own and not missing:
        return None
    parts = " and ".join(missing)
    return f"{WHOLE_TOKENIZER}{f' (or {parts})' if parts else ''}" if is_whole else parts


def _whole_files(folder: Path) -> list[str]:
    """Names of tokenizer.json, of which a folder may have one for each of several versions of transformers."""
    versions = _settings(folder).get("fast_tokenizer_files")
    return [WHOLE_TOKENIZER, *(str(file) for file in versions)] if isinstance(versions, list) else [WHOLE_TOKENIZER]


def _settings(folder: Path) -> Mapping[str, Any]:
    """The fields of tokenizer_config.json; none if it is missing or cannot be read."""
    try:  # not as strictly as other files: models without a limit write a `model_max_length` of 31 digits
        content = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _class_named(folder: Path) -> type | None:
    """The tokenizer's class by the settings of tokenizer_config.json or the model's type; None for one of its own code."""
    from transformers import TokenizersBackend
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    settings, fields = _settings(folder), read_json(folder / "config.json", BadCheckpoint)
    if "auto_map" in settings:
        return None
    own = TOKENIZER_MAPPING_NAMES.get(fields.get("model_type"))
    named = settings.get("tokenizer_class") or fields.get("tokenizer_class") or own
    kind = tokenizer_class_from_name(named) if isinstance(named, str) else None
    return kind if isinstance(kind, type) and hasattr(kind, "from_pretrained") else TokenizersBackend


def _packages_missing(folder: Path) -> list[str]:
    """The packages that are not installed and that a folder's tokenizer needs, which has the files of SentencePiece alone."""
    from transformers import utils

    if not _sentencepiece_files(folder):
        return []
    found = {"sentencepiece": utils.is_sentencepiece_available(), "protobuf": utils.is_protobuf_available()}
    return [package for package, is_installed in found.items() if not is_installed]


def _sentencepiece_files(folder: Path) -> list[Path]:
    """The models of SentencePiece in a folder without a tokenizer.json: messages of protobuf, which begin with a piece."""
    files = [] if (folder / WHOLE_TOKENIZER).is_file() else sorted(folder.glob("*.model"))
    return [file for file in files if file.is_file() and file.read_bytes().startswith(b"\x0a")]


def _normalize(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Normalize texts as the SentencePiece model does that a tokenizer was read from, where its class normalizes nothing.

    transformers takes the pieces of the model alone for some classes, such as Llama's: spaces and line breaks that the model
    replaces stay, and a text that begins with a space gets no other one in front.
    """
    backend, files = getattr(tokenizer, "backend_tokenizer", None), _sentencepiece_files(folder)
    if backend is None or backend.normalizer is not None or len(files) != 1:
        return
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    model.ParseFromString(files[0].read_bytes())
    spec, spaces = model.normalizer_spec, backend.pre_tokenizer
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if isinstance(spaces, pre_tokenizers.Metaspace) and spaces.prepend_scheme == "always":  # at each part of a text, as here
        steps += [normalizers.Prepend("\u2581")] if spec.add_dummy_prefix else []
        steps.append(normalizers.Replace(" ", "\u2581"))
        backend.pre_tokenizer = None
    if steps:
        backend.normalizer = normalizers.Sequence(steps)


def _check_added(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BadCheckpoint if tokenizer_config.json gives an added token another number than the tokenizer has."""
    added = _settings(folder).get("added_tokens_decoder")
    if not isinstance(added, dict) or not added:
        return
    vocabulary = tokenizer.get_vocab()
    for number, token in added.items():
        text = str(token.get("content") if isinstance(token, dict) else token)
        if number.isdecimal() and text in vocabulary and vocabulary[text] != int(number):
            raise BadCheckpoint(
                f"{name}: {TOKENIZER_CONFIG} gives the token {text!r} the number {number}, and the tokenizer's other files "
                f"give it {vocabulary[text]}. Copy the model's own tokenizer files into the folder."
            )
