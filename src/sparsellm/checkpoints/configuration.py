"""Reads a model's configuration, checks it against the tensors in the weight files, and builds models from it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.documents import folder_for_transformers
from sparsellm.checkpoints.files import SHARDS
from sparsellm.checkpoints.headers import FLOATS, locate_all, read_headers
from sparsellm.checkpoints.readers import TensorHeader
from sparsellm.checkpoints.stored_form import is_computed
from sparsellm.checkpoints.tensor_index import TensorLocation, equal_stored, index_tensors
from sparsellm.errors import BadCheckpoint, MissingPackage, SparseLLMError, UnsupportedModel, first_line, plural
from sparsellm.models.architectures import ARCHITECTURES
from sparsellm.texts.json_files import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LARGEST = 1_000_000
"""Size that is accepted in every model. Sizes that appear in no tensor, such as a chunk size, are smaller."""

MOST_LAYERS = 256
"""Number of layers or labels that is accepted in every model. transformers builds that many on the meta device in seconds."""

MOST_EXPERTS = 64
"""Number of experts per layer that is accepted in every model."""

LAYER_COUNTS = re.compile(r"layers?$|depths?$|blocks$|labels$")
EXPERTS = re.compile(r"experts?$")
"""Names of fields with the number of layers, labels or experts."""

NO_SIZE = re.compile(
    r"position|length|len$|window|theta|base|token|_id$|_ids$|_index$|ctx|context|max_|seed|version|step|sample|param|pixel|rate|time"
)
"""Names of fields whose values are not limited: lengths of texts, numbers of tokens, records of training."""

ROOM = 2**28
"""Elements of buffers, such as position tables, that a model may compute beyond its number of weights."""

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
"""Fields that have another name in some families. Aliases of other fields have a meaning of their own in some checkpoints."""

ROPE_TYPES = {"mrope": "default", "su": "longrope"}
"""Older names of types of position embeddings."""


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """Return the fields of config.json.

    Raises:
        BadCheckpoint: config.json is missing, or is not the configuration of a model.
    """
    content = read_json(folder / "config.json", BadCheckpoint)
    fields = content if isinstance(content, dict) else {}
    wrong = [] if isinstance(fields.get("model_type"), str) else ["model_type"]
    wrong += [key for key, value in fields.items() if key.endswith("_config") and not isinstance(value, (dict, type(None)))]
    if wrong:
        raise BadCheckpoint(f"{name}: config.json is not the configuration of a model: it needs a valid `{wrong[0]}`.")
    return fields


def read_configuration(
    name: str, folder: Path, *, trusted: bool, fields: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> PretrainedConfig:
    """Load the configuration, and check it against the weight files.

    Args:
        trusted: Whether the checkpoint's own code may run.

    Raises:
        BadCheckpoint: The configuration cannot be read, or does not match the weight files.
        UnsupportedModel: The installed transformers does not have the model type.
        MissingPackage: transformers has no models at all, since it takes torch for another version.
    """
    from transformers import AutoConfig

    family = fields["model_type"]
    _check_sizes(name, fields, headers)
    _check_dtypes(name, fields)
    try:
        with silence_transformers(), folder_for_transformers(folder) as readable:
            config = AutoConfig.from_pretrained(readable, local_files_only=True, trust_remote_code=trusted)
            auto_model(config)  # raises UnsupportedModel for a type without a class
            _check_blocks(name, config.get_text_config(), headers)
    except (SparseLLMError, MemoryError):
        raise
    except Exception as error:  # configurations validate their fields in different ways, or not at all
        _check_torch()
        if "auto_map" in fields and not trusted:
            raise UnsupportedModel(
                f"{name} brings its own code, which is not run: transformers itself has no models of type {family!r}. "
                "If you trust it, pass `trust_remote_code=True`."
            ) from None
        if family in ARCHITECTURES or not isinstance(error, (OSError, ValueError, KeyError, ImportError)):
            raise BadCheckpoint(f"{name}: config.json cannot be read: {_error_text(error)}.") from error
        raise UnsupportedModel(
            f"The installed transformers {version('transformers')} has no models of type {family!r}: {_error_text(error)}."
        ) from None
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)  # of weights that are decoded when they are read
    check_fields(name, fields, config)
    return config


def _check_torch() -> None:
    """Raise MissingPackage if transformers does not use torch, since the metadata of an older installation are left."""
    from transformers.utils import is_torch_available

    if not is_torch_available():
        raise MissingPackage(
            f"transformers takes torch {torch.__version__} for torch {version('torch')}, since two versions are installed. "
            "Repeat pip uninstall torch until none is left, then install one."
        )


def auto_model(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that builds a language, vision-language or multimodal model from a configuration.

    Raises:
        UnsupportedModel: The installed transformers has no such class for the model type.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    try:
        is_text_model = config.get_text_config() is config
    except ValueError as error:
        raise UnsupportedModel(
            f"A {config.model_type} holds several language models, and it is not defined which to prune."
        ) from error
    multimodal = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    classes = (AutoModelForCausalLM, *multimodal) if is_text_model else (*multimodal, AutoModelForCausalLM)
    if getattr(config, "auto_map", None):
        return classes[0]  # models with code of their own are not in transformers' tables
    for auto in classes:
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(f"The installed transformers has no causal language model of type {config.model_type!r}.")


def empty_model(name: str, config: PretrainedConfig, trusted: bool, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model from its configuration, on the device of the context.

    Args:
        trusted: Whether the checkpoint's own code may run.
        dtype: The dtype to load in. Each parameter and buffer has the dtype that `from_pretrained` gives it: this one, or that
            in which the class makes it or keeps it.

    Raises:
        UnsupportedModel: transformers does not have the model.
        MissingPackage: The model needs a package that is not installed.
        BadCheckpoint: The model cannot be built.
    """
    try:
        with silence_transformers():
            own = copy.deepcopy(config)  # whose dtype is set
            model: PreTrainedModel = auto_model(own).from_config(own, trust_remote_code=trusted, dtype=dtype)
    except (SparseLLMError, MemoryError):
        raise
    except ImportError as error:
        raise MissingPackage(f"{name} needs a package that is not installed: {_error_text(error)}.") from error
    except Exception as error:  # inconsistent fields may raise any exception
        raise BadCheckpoint(f"{name}: no model can be built from config.json: {_error_text(error)}.") from error
    kept = model._get_dtype_plan(dtype)
    for key, tensor in model.state_dict(keep_vars=True).items():
        for pattern, wider in kept.items():
            if re.search(pattern.replace("*", ".*"), key):
                tensor.data = tensor.data.to(wider)
    return model


def check_tensors(
    name: str, model: PreTrainedModel, *, fields: Mapping[str, Any], files: list[Path], headers: Mapping[str, TensorHeader]
) -> bool:
    """Raise BadCheckpoint unless stored tensors have the shapes in the configuration, and tensors that it ties are equal.

    Tensors that transformers converts from several pieces are checked when they are read.

    Returns:
        Whether all tied tensors are equal. If not, no field ties them, and transformers loads each.
    """
    stored = sum(header.numel for header in headers.values())
    computed = sum(buffer.numel() for buffer in model.buffers())
    if computed > stored + ROOM:
        raise BadCheckpoint(
            f"{name}: a model built from config.json would compute {computed:,} numbers at its start. Check its fields."
        )
    locations, _, _ = index_tensors(files, model)
    state = model.state_dict()
    joined = next(
        (key for key in state if key not in locations and re.search(r"\.experts\.(gate_up_proj|down_proj)$", key)), None
    )
    if joined and (single := next((key for key in headers if re.search(r"\.experts\.\d+\.", key)), None)):
        raise UnsupportedModel(
            f"{name} stores each expert on its own, as {single[:120]}, and the installed transformers does not join them to "
            f"{joined} in models of this type. Take a checkpoint that stores them joined."
        )
    for key, location in locations.items():
        shape = tuple(state[key].shape)
        if isinstance(location, TensorLocation) and headers[location.key].shape != shape:
            raise BadCheckpoint(
                f"{name}: {location.key} is {headers[location.key].shape}, but the configuration calls for {shape}. "
                "config.json may belong to another model."
            )
    first: dict[str, str] = {}
    for key, tied_name in tied_names(model).items():
        other = first.setdefault(tied_name, key) if key in locations else key
        if other != key and not equal_stored(locations[other], locations[key]):
            if not any(part.get("tie_word_embeddings") for _, part in config_parts(fields)):
                return False
            raise BadCheckpoint(
                f"{name}: {other} and {key} are tied in config.json, but they differ in the weight files. "
                "If both are needed, set `tie_word_embeddings` to false in config.json."
            )
    return True


def config_parts(fields: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of config.json, and those of the configurations within it, with what their names begin with."""
    yield "", fields
    for key, part in fields.items():
        if key.endswith("_config") and isinstance(part, dict) and key != "quantization_config":
            yield from ((f"{key}.{within}", inner) for within, inner in config_parts(part))


def _check_dtypes(name: str, fields: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint for a dtype in config.json that weights cannot have."""
    for where, part in config_parts(fields):
        field = "torch_dtype" if part.get("dtype") is None else "dtype"  # as transformers reads them
        if part.get(field) not in (None, *FLOATS):
            raise BadCheckpoint(
                f"{name}: config.json says {where}{field} {str(part[field])[:80]!r}, and weights cannot be loaded in it. "
                f"Write {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, or remove the field: the weight files then decide."
            )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disable progress bars and warnings of transformers within the context."""
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


def check_kind(name: str, fields: Mapping[str, Any], trusted: bool) -> None:
    """Raise UnsupportedModel for a model that is not a causal language model."""
    text = fields.get("text_config")
    listed = fields.get("architectures") or []
    heads = [str(head) for head in listed] if isinstance(listed, list) else [str(listed)]
    is_multimodal = isinstance(text, dict) or "vision_config" in fields
    suffixes = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if is_multimodal else ()))
    if fields.get("is_encoder_decoder") or (heads and not trusted and not any(head.endswith(suffixes) for head in heads)):
        kind = heads[0] if heads else fields["model_type"]
        raise UnsupportedModel(f"{name} is a {kind}, not a causal language model (one that ends in ForCausalLM).")


def _check_sizes(name: str, fields: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> None:
    """Raise BadCheckpoint for a size too large for the stored tensors: building such a model could exhaust time or memory."""
    lengths = {length for header in headers.values() for length in header.shape}
    longest = max(lengths, default=0)
    for field, value in _integers(fields):
        limit = max(longest, len(headers), LARGEST)
        if LAYER_COUNTS.search(field):
            limit = max(len(headers), MOST_LAYERS)
        elif EXPERTS.search(field) and value not in lengths:
            limit = MOST_EXPERTS
        if abs(value) > limit and not NO_SIZE.search(field):
            raise BadCheckpoint(
                f"{name}: config.json says {field} {value:,}, and the {len(headers):,} tensors in its weight files, of at most "
                f"{longest:,} rows or columns, do not match it. config.json may be damaged, or belong to another model."
            )


def _integers(value: Any, field: str = "") -> Iterator[tuple[str, int]]:
    """Yield the innermost field name and the value of each integer in a configuration."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _integers(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _integers(item, field)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield field, value


def _check_blocks(name: str, config: PretrainedConfig, headers: Mapping[str, TensorHeader]) -> None:
    """Raise BadCheckpoint if a configuration calls for no blocks, or for more than the tensors' names contain."""
    if config.attribute_map.get("num_hidden_layers", "").startswith("encoder"):
        return  # the files of a decoder alone have no encoder layers
    blocks = getattr(config, "num_hidden_layers", None)
    numbers = [int(part) for key in headers for part in key.split(".") if part.isdecimal() and len(part) < 10]
    stored = max(numbers, default=-1) + 1
    if isinstance(blocks, int) and not 1 <= blocks <= stored:
        raise BadCheckpoint(
            f"{name}: config.json says num_hidden_layers {blocks:,}, and the weight files hold {stored:,} blocks. "
            "The download may be incomplete, or config.json belongs to another model."
        )


def _error_text(error: Exception) -> str:
    """Return an error's first line, preceded by its class unless the text is meaningful without it."""
    text = first_line(error)[:300]
    return text if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: {text}"


# ---- Checkpoints whose files contradict each other, so that programs differ in what they read. Other fields and files count
# in the order in which transformers reads them, as docs/sharing.md lists.


def check_fields(name: str, fields: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise BadCheckpoint if config.json gives a field different values by its present and by an older name.

    Args:
        fields: The fields of config.json.
        config: The configuration that transformers makes of them.
    """
    for where, part in config_parts(fields):
        of = reduce(lambda outer, key: getattr(outer, key, None), where.split(".")[:-1], config)
        for first, second in _doubles(part, of):
            if first[1] != second[1]:
                (one, value), (other, different) = first, second
                raise BadCheckpoint(
                    f"{name}: config.json contradicts itself: {where}{one} is {value!r}, and {where}{other} is {different!r}. "
                    "Remove the wrong one."
                )
    _check_class(name, fields)


def _doubles(part: Mapping[str, Any], config: Any) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Pairs of names of one field, with their values; fields without a value are left out."""
    given = {key: value for key, value in part.items() if value is not None}
    if "dtype" in given and "torch_dtype" in given:
        yield ("dtype", str(given["dtype"]).split(".")[-1]), ("torch_dtype", str(given["torch_dtype"]).split(".")[-1])
    aliases = getattr(config, "attribute_map", {})
    for old in SIZES:
        new = aliases.get(old, "encoder")
        if not new.startswith("encoder") and old in given and new in given:
            yield (old, given[old]), (new, given[new])
    positions = given.get("rope_parameters")
    if not isinstance(positions, dict) or any(isinstance(value, dict) for value in positions.values()):
        return  # by kind of layer
    positions = {"rope_type": "default", **positions}
    if "rope_theta" in given and "rope_theta" in positions:
        yield ("rope_theta", given["rope_theta"]), ("rope_parameters.rope_theta", positions["rope_theta"])
    scaling = given.get("rope_scaling")
    for key, value in scaling.items() if isinstance(scaling, dict) else ():
        today = "rope_type" if key == "type" else key
        if today in positions and not (today == "rope_type" and ROPE_TYPES.get(value) == positions[today]):
            yield (f"rope_scaling.{key}", value), (f"rope_parameters.{today}", positions[today])


def _check_class(name: str, fields: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint if the class that config.json names belongs to another type of model than it names."""
    from transformers.models.auto import modeling_auto as tables

    listed, kind = fields.get("architectures"), str(fields.get("model_type"))
    if not isinstance(listed, list) or not listed or "auto_map" in fields:
        return
    types: set[str] = set()
    for table in (tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for of, classes in table.items():
            if listed[0] in (classes if isinstance(classes, (list, tuple)) else (classes,)):
                types.add(of)
    if types and not any(kind.startswith(of) or of.startswith(kind) for of in types):  # such as gemma3 and gemma3_text
        raise BadCheckpoint(
            f"{name}: config.json contradicts itself: model_type is {kind!r}, and the class {listed[0]} in architectures is "
            f"that of {min(types)!r}. Correct the wrong one."
        )


def check_doubles(name: str, files: Sequence[Path]) -> None:
    """Raise BadCheckpoint if two weight files hold a tensor of the same name with different values."""
    first: dict[str, Path] = {}
    for file in files if len(files) > 1 else ():
        for key in read_headers(file, decoded=False):
            other = first.setdefault(key, file)
            if other != file and not equal_stored(TensorLocation(other, key), TensorLocation(file, key), decoded=False):
                raise BadCheckpoint(
                    f"{name}: {other.name} and {file.name} both hold {key}, with different values. "
                    "Get a sound copy of the checkpoint."
                )


def check_index(
    name: str, folder: Path, model: PreTrainedModel, *, files: Iterable[Path], headers: Mapping[str, TensorHeader]
) -> None:
    """Raise BadCheckpoint if the index of the weight files names tensors that no file holds.

    An index may name a tensor that is tied to another one, of which a file need hold only one.
    """
    main = next(folder / shard for shard in SHARDS if (folder / shard).is_file())
    if main.suffix != ".json":
        return
    stored = set(headers)
    for file in files:
        if file.suffix == ".safetensors":  # also the parts of packed tensors
            stored |= set(locate_all(file))
    tied = tied_names(model)
    groups = {first for key, first in tied.items() if key in stored or key.partition(".")[2] in stored}  # without a prefix
    absent = [
        key
        for key in read_json(main, BadCheckpoint)["weight_map"]
        if key not in stored and tied.get(key) not in groups and not is_computed(key, ())
    ]
    if absent:
        raise BadCheckpoint(
            f"{name}: {main.name} names {plural(len(absent), 'tensor')} that its files do not hold, {absent[0]} first. "
            "The download may be incomplete: get a sound copy of the checkpoint."
        )
