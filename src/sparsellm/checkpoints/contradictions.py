"""Refuses checkpoints that say two things of the same, of which one program reads the one and another program the other.

Other fields and files count in the order in which transformers reads them, as docs/deploying.md lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.configuration import config_parts
from sparsellm.checkpoints.files import SHARDS
from sparsellm.checkpoints.headers import locate_all, read_headers
from sparsellm.checkpoints.readers import TensorHeader
from sparsellm.checkpoints.stored_form import is_computed
from sparsellm.checkpoints.tensor_index import TensorLocation, stored_row_chunks
from sparsellm.errors import BadCheckpoint, plural
from sparsellm.texts.json_files import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
"""Fields that have another name in some families. Aliases of other fields have a meaning of their own in some checkpoints."""


ROPE_TYPES = {"mrope": "default", "su": "longrope"}
"""Older names of types of position embeddings."""


def check_fields(name: str, fields: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise BadCheckpoint if config.json has a field twice, by its name of today and an older one, with different values.

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
                    f"{name}: config.json says {where}{one} {value!r} and {where}{other} {different!r}, two names of the same, "
                    "and programs differ in which one they read. Remove the wrong one."
                )
    _check_class(name, fields)


def _doubles(part: Mapping[str, Any], config: Any) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Pairs of fields that are two names of the same, with their values; fields without a value are left out."""
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
            f"{name}: config.json says model_type {kind!r}, and the class {listed[0]} of its architectures is that of "
            f"{min(types)!r}: programs differ in which one they read. Correct the wrong one."
        )


def check_doubles(name: str, files: Sequence[Path]) -> None:
    """Raise BadCheckpoint if two weight files hold a tensor of the same name with different values."""
    first: dict[str, Path] = {}
    for file in files if len(files) > 1 else ():
        for key in read_headers(file, decoded=False):
            other = first.setdefault(key, file)
            if other != file and not _equal(TensorLocation(other, key), TensorLocation(file, key)):
                raise BadCheckpoint(
                    f"{name}: {other.name} and {file.name} both hold {key}, with different values. "
                    "Get a sound copy of the checkpoint."
                )


def _equal(first: TensorLocation, second: TensorLocation) -> bool:
    """Whether two stored tensors have the same bits."""
    headers = [read_headers(place.file, decoded=False)[place.key] for place in (first, second)]
    chunks = (stored_row_chunks(place, decoded=False) for place in (first, second))
    return headers[0] == headers[1] and all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in zip(*chunks, strict=True)
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
