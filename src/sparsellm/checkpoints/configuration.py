"""A model's configuration: read, held against what the weight files hold before anything is built of it, and built."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.files import first_line
from sparsellm.checkpoints.headers import FLOATS, TensorHeader
from sparsellm.checkpoints.model_classes import auto_model
from sparsellm.checkpoints.tensor_index import NotStreamable, Stored, TensorLocation, index_tensors, read_stored, row_chunks
from sparsellm.data.json_files import read_json
from sparsellm.errors import BadCheckpoint, MissingPackage, SparseLLMError, UnsupportedModel
from sparsellm.models.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LARGEST = 1_000_000
"""What a size may be in every model: those that its files do not show, such as a chunk's, are smaller."""

MOST_LAYERS = 256
"""What a number of layers or labels may be in every model; transformers makes as many, without weights, in a few seconds."""

MOST_EXPERTS = 64
"""The same of experts, of which every layer has as many."""

LAYERS = re.compile(r"layers?$|depths?$|blocks$|labels$")
EXPERTS = re.compile(r"experts?$")
"""Names of fields that say how many there are of something."""

NO_SIZE = re.compile(
    r"position|length|len$|window|theta|base|token|_id$|_ids$|_index$|ctx|context|max_|seed|version|step|sample|param|pixel|rate|time"
)
"""Names of fields that may be of any size: lengths of texts, numbers of tokens, what a training recorded."""

ROOM = 2**28
"""Numbers that a model may compute at its start, beyond as many as it has weights: tables of positions, for one."""


def check_dtypes(name: str, entries: Mapping[str, TensorHeader]) -> None:
    """Raise UnsupportedModel for weights that are no floating point numbers of 16 bits or more.

    Whole numbers that are no weights, such as masks and positions in older files, are as they should be.
    """
    for key, entry in entries.items():
        weight = "weight" in key.rpartition(".")[2] or (entry.dtype in ("int8", "uint8") and len(entry.shape) in (2, 3))
        if entry.dtype not in FLOATS and (weight or entry.dtype.startswith(("float", "complex"))):
            raise UnsupportedModel(
                f"{name} holds {key[:200]} in {entry.dtype}, and only weights in {', '.join(FLOATS[:-1])} or {FLOATS[-1]} are "
                "pruned. Prune the plain checkpoint that it was made from."
            )


def read_fields(name: str, folder: Path, trusted: bool) -> dict[str, Any]:
    """What config.json says.

    Raises BadCheckpoint where it is no configuration, UnsupportedModel for a model of a kind that cannot be pruned.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise BadCheckpoint(f"{name} has no config.json. Name the folder of a checkpoint, as save_pretrained writes it.")
    raw = read_json(file, BadCheckpoint)
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise BadCheckpoint(f"{name}: config.json is not the configuration of a model (no `model_type`).")
    parts = [field for field, value in raw.items() if field.endswith("_config") and not isinstance(value, (dict, type(None)))]
    if parts:
        raise BadCheckpoint(f"{name}: config.json is damaged: {parts[0]} must hold fields, got {str(raw[parts[0]])[:80]}.")
    _check_kind(name, raw, trusted)
    return raw


def read_configuration(
    name: str, folder: Path, trusted: bool, raw: Mapping[str, Any], entries: Mapping[str, TensorHeader]
) -> PretrainedConfig:
    """The configuration. raw: what config.json says. entries: what the weight files hold.

    Raises BadCheckpoint for one that cannot be read or is another model's, UnsupportedModel where transformers has none of it.
    """
    from transformers import AutoConfig

    family = raw["model_type"]
    _check_sizes(name, raw, entries)
    try:
        with silence_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
            auto_model(config)  # which refuses a type that it has no class for
            _check_blocks(name, config.get_text_config(), entries)
    except SparseLLMError:
        raise
    except Exception as error:  # each configuration checks its fields in its own way, or not at all
        if "auto_map" in raw and not trusted:
            raise UnsupportedModel(
                f"{name} brings its own code, which is not run: transformers itself has no models of type {family!r}. "
                "If you trust it, pass --trust-remote-code."
            ) from None
        if family in ARCHITECTURES or not isinstance(error, (OSError, ValueError, KeyError, ImportError)):
            raise BadCheckpoint(f"{name}: config.json cannot be read: {_error_text(error)}.") from error
        raise UnsupportedModel(
            f"The installed transformers {version('transformers')} has no models of type {family!r}: {_error_text(error)}."
        ) from None
    return config


def empty_model(name: str, config: PretrainedConfig, trusted: bool, **how: Any) -> PreTrainedModel:
    """The model of a configuration, its weights where the context puts them. how: as for `from_config`.

    Raises UnsupportedModel where transformers has no such model, MissingPackage where that needs a package that is not
    installed, BadCheckpoint where it cannot be built.
    """
    try:
        with silence_transformers():
            model: PreTrainedModel = auto_model(config).from_config(config, trust_remote_code=trusted, **how)
    except SparseLLMError:
        raise
    except ImportError as error:
        raise MissingPackage(f"{name} needs a package that is not installed: {_error_text(error)}.") from error
    except Exception as error:  # fields that do not go together end in any kind of error
        raise BadCheckpoint(f"{name}: no model can be built by config.json: {_error_text(error)}.") from error
    return model


def check_tensors(name: str, model: PreTrainedModel, files: list[Path], entries: Mapping[str, TensorHeader]) -> None:
    """Raise BadCheckpoint unless the files' tensors have the shapes that the configuration calls for, and tied ones agree.

    model: on the meta device. Tensors that are put together or split on their way in are held against it when they are read.
    """
    stored = sum(entry.numel for entry in entries.values())
    computed = sum(buffer.numel() for buffer in model.buffers())
    if computed > stored + ROOM:
        raise BadCheckpoint(
            f"{name}: by config.json the model would compute {computed:,} numbers at its start. Check its fields."
        )
    try:
        places, _, _ = index_tensors(files, model)
    except NotStreamable:
        return
    known = model.state_dict()
    for key, place in places.items():
        wanted = tuple(known[key].shape)
        if isinstance(place, TensorLocation) and entries[place.key].shape != wanted:
            raise BadCheckpoint(
                f"{name}: {place.key} is {entries[place.key].shape}, but the configuration calls for {wanted}. "
                "config.json may belong to another model."
            )
    _check_tied(name, model, places)


def _check_tied(name: str, model: PreTrainedModel, places: Mapping[str, Stored]) -> None:
    """Raise BadCheckpoint where the files hold what the configuration ties under two names with different values."""
    first: dict[str, str] = {}
    for key, one in tied_names(model).items():
        other = first.setdefault(one, key) if key in places else key
        if other != key and not _equal(places[other], places[key]):
            raise BadCheckpoint(
                f"{name}: {other} and {key} are one tensor by config.json, and the weight files hold two that differ. "
                "If both are meant, set `tie_word_embeddings` to false in config.json."
            )


def _equal(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors have the same values, some rows at a time where the files allow it."""
    if (
        isinstance(one, TensorLocation)
        and isinstance(other, TensorLocation)
        and one.file.suffix == other.file.suffix == ".safetensors"
    ):
        pairs = zip(row_chunks(one), row_chunks(other), strict=True)
    else:
        pairs = zip((read_stored(one),), (read_stored(other),), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Within the context transformers prints no bars and no warnings: this package says itself what matters."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _check_kind(name: str, raw: Mapping[str, Any], trusted: bool) -> None:
    """Raise UnsupportedModel for a quantised model, and for one that is no causal language model."""
    text = raw.get("text_config")
    if any("quantization_config" in fields for fields in (raw, text) if isinstance(fields, dict)):
        raise UnsupportedModel(f"{name} is quantised. Prune the plain checkpoint that it was made from.")
    listed = raw.get("architectures") or []
    heads = [str(head) for head in listed] if isinstance(listed, list) else [str(listed)]
    sees = isinstance(text, dict) or "vision_config" in raw
    wanted = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if sees else ()))
    if raw.get("is_encoder_decoder") or (heads and not trusted and not any(head.endswith(wanted) for head in heads)):
        what = heads[0] if heads else raw["model_type"]
        raise UnsupportedModel(f"{name} is a {what}, not a causal language model (one that ends in ForCausalLM).")


def _check_sizes(name: str, raw: Mapping[str, Any], entries: Mapping[str, TensorHeader]) -> None:
    """Raise BadCheckpoint for a size that no tensor bears out: to build a model of it takes hours, or all the memory."""
    lengths = {length for entry in entries.values() for length in entry.shape}
    longest = max(lengths, default=0)
    for field, value in _integers(raw):
        most = max(longest, len(entries), LARGEST)
        if LAYERS.search(field):
            most = max(len(entries), MOST_LAYERS)
        elif EXPERTS.search(field) and value not in lengths:
            most = MOST_EXPERTS
        if abs(value) > most and not NO_SIZE.search(field):
            raise BadCheckpoint(
                f"{name}: config.json says {field} {value:,}, and the {len(entries):,} tensors in its weight files, of at most "
                f"{longest:,} rows or columns, hold no such model. config.json may be damaged, or belong to another model."
            )


def _integers(value: Any, field: str = "") -> Iterator[tuple[str, int]]:
    """The integers of a configuration, each with the name of the nearest field around it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _integers(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner, field)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield field, value


def _check_blocks(name: str, config: PretrainedConfig, entries: Mapping[str, TensorHeader]) -> None:
    """Raise BadCheckpoint where a configuration calls for no blocks, or for more than are numbered in the tensors' names."""
    if config.attribute_map.get("num_hidden_layers", "").startswith("encoder"):
        return  # the files of a decoder alone hold none of these
    wanted = getattr(config, "num_hidden_layers", None)
    if isinstance(wanted, int) and wanted < 1:
        raise BadCheckpoint(f"{name}: config.json says num_hidden_layers {wanted}, and a model has at least one. Correct it.")
    numbers = [int(word) for key in entries for word in key.split(".") if word.isdecimal() and len(word) < 10]
    there = max(numbers, default=-1) + 1
    if isinstance(wanted, int) and wanted > there:
        raise BadCheckpoint(
            f"{name}: config.json calls for {wanted:,} blocks, and the weight files hold {there:,}. "
            "The download may be incomplete, or config.json belongs to another model."
        )


def _error_text(error: Exception) -> str:
    """An error in a line, with its kind where its text alone says nothing."""
    words = first_line(error)[:300]
    return words if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: {words}"
