"""The form in which a checkpoint stores a model: the names of its tensors in the files, and tensors that the model lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.headers import locate_all, read_headers, stored_weights
from sparsellm.checkpoints.tensor_index import ConvertedTensor, Stored, TensorLocation, index_tensors, locations_of, read_stored
from sparsellm.errors import BadCheckpoint, dtype_name
from sparsellm.models.blocks import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids|cos_cached|sin_cached)$")
CAUSAL_MASK = re.compile(r"(attn|attention)\.bias$")
"""Names of buffers that a model computes, and that older versions of transformers stored. A causal mask has four dimensions."""


def is_computed(key: str, shape: Sequence[int]) -> bool:
    """Whether a stored tensor that is not a parameter of the model is a buffer that the model computes itself."""
    return bool(COMPUTED.search(key) or (CAUSAL_MASK.search(key) and len(shape) == 4))


def is_added_bias(key: str, location: TensorLocation) -> bool:
    """Whether a tensor that the model lacks is the bias of a layer of GPTQ; raise BadCheckpoint unless it is 0."""
    weight = stored_weights(location.file).get(f"{key.removesuffix('bias')}weight") if key.endswith(".bias") else None
    if weight is None or not weight.adds_bias:
        return False
    if read_stored(location).any():
        raise BadCheckpoint(f"{location.file.name} holds {key[:120]}, which is not 0, and the model has no such bias.")
    return True


@dataclass(frozen=True)
class StoredForm:
    """The tensors of a checkpoint's files.

    Attributes:
        model: The skeleton of the model, in the dtype that the output has.
        locations: Where each tensor of the model is stored, by its name there.
        dtypes: The dtype of each of these in its file, by stored name.
        carried: Where tensors are that the model does not have, such as those for predicting several tokens, by stored name.
        computed: Names of stored buffers that the model computes itself.
        zero_biases: Names of biases that are 0 and that the model does not have; GPTQ's programs wrote one for each layer.
        conversions: The entries of transformers' conversion mapping that apply.
    """

    model: PreTrainedModel
    locations: Mapping[str, Stored]
    dtypes: Mapping[str, str]
    carried: Mapping[str, TensorLocation]
    computed: tuple[str, ...] = ()
    zero_biases: tuple[str, ...] = ()
    conversions: Sequence[Any] = ()

    @classmethod
    def of(cls, files: Iterable[Path], model: PreTrainedModel) -> StoredForm:
        """Read the headers of the files."""
        headers = {file: read_headers(file) for file in files}
        locations, unknown, conversions = index_tensors(headers, model)
        places = [place for stored in locations.values() for place in locations_of(stored)]
        dtypes = {place.key: headers[place.file][place.key].dtype for place in places}
        computed = tuple(key for key, x in unknown.items() if is_computed(key, headers[x.file][key].shape))
        biases = tuple(key for key, x in unknown.items() if is_added_bias(key, x))
        carried = {key: x for key, x in unknown.items() if key not in {*computed, *biases}}
        return cls(model, locations, dtypes, carried, computed, biases, conversions)

    def fixed(self) -> set[str]:
        """The model's names of what is never trained, such as biases of routers, and is therefore stored as it came."""
        frozen = {name for name, x in self.model.named_parameters(remove_duplicate=False) if not x.requires_grad}
        return frozen | {name for name, _ in self.model.named_buffers()}

    def converted(self) -> dict[str, torch.dtype]:
        """The stored tensors that have another dtype in the model, with that dtype; without those that are `fixed`."""
        state, fixed = self.model.state_dict(), self.fixed()
        trained = [(state[name].dtype, locations_of(x)) for name, x in self.locations.items() if name not in fixed]
        loaded = {place.key: dtype for dtype, places in trained for place in places}
        return {key: dtype for key, dtype in loaded.items() if self.dtypes[key] != dtype_name(dtype)}

    def rounded(self) -> dict[str, str]:
        """The stored tensors that cannot be converted to their dtype in the model without rounding, with their own."""
        pairs = {key: (self.dtypes[key], dtype) for key, dtype in self.converted().items()}
        return {key: own for key, (own, dtype) in pairs.items() if torch.promote_types(getattr(torch, own), dtype) != dtype}

    def changes(self, dtype: torch.dtype) -> bool:
        """Whether the output of a model in this dtype has a tensor in another one than the files; see `tensors`."""
        rounded = self.rounded()
        return any(key in rounded or self.dtypes[key] != dtype_name(dtype) for key in self.converted())

    def tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to store for some of the model's, by stored name; none for those that are not in the files.

        What is `fixed` and unchanged is stored as it came. What the model's class keeps in a wider dtype is stored in that of
        the model if nothing is lost.

        Args:
            parameters: By name in the model; all that are converted from the same pieces together.
        """
        from transformers.core_model_loading import revert_weight_conversion

        stored: dict[str, Tensor] = {}
        groups: dict[str, dict[str, Tensor]] = {}
        dtype, fixed, self.model._weight_conversions = self.model.config.dtype, self.fixed(), list(self.conversions)
        for name, tensor in parameters.items():
            location = self.locations.get(name)
            if isinstance(location, TensorLocation):
                stored[location.key] = tensor
                if name in fixed and not tensor.is_meta and self.dtypes[location.key] != dtype_name(tensor.dtype):
                    own = read_stored(location)
                    stored[location.key] = own if torch.equal(own.to(tensor), tensor) else tensor
            elif location is not None:
                groups.setdefault(location.first, {})[name] = tensor
        for group in groups.values():
            stored |= revert_weight_conversion(self.model, group)
        for key, tensor in stored.items():
            is_wider = tensor.dtype != dtype and torch.promote_types(dtype, tensor.dtype) == tensor.dtype
            if is_wider and self.dtypes.get(key) != dtype_name(tensor.dtype) and not tensor.is_meta:
                narrow = tensor.to(dtype)
                stored[key] = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
        return stored

    def by_file(self, files: Sequence[Path]) -> list[list[str]]:
        """The names of the model's tensors in each file; those that are converted from pieces are where the first piece is."""
        return [[name for name, location in self.locations.items() if location.file == file] for file in files]

    def by_block(self) -> list[list[str]]:
        """The names of the tensors of each block, and then of each group outside of the blocks that is stored together."""
        tied, groups = tied_names(self.model), dict[str, list[str]]()
        blocks = [f"{block.name}." for block in blocks_of(self.model)]
        for name, location in self.locations.items():
            block = next((prefix for prefix in blocks if name.startswith(prefix)), None)
            groups.setdefault(block or (location.first if isinstance(location, ConvertedTensor) else tied[name]), []).append(
                name
            )
        return [*(groups.pop(block) for block in blocks if block in groups), *groups.values()]


def write_shard(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a weight file. Tensors that share memory are stored each."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.data_ptr() in seen or own.untyped_storage().nbytes() > own.nbytes:
            own = own.clone(memory_format=torch.contiguous_format)
        seen.add(own.data_ptr())
        plain[name] = own
    save_file(plain, file, metadata)


def write_index(folder: Path, names: Sequence[str]) -> None:
    """Write the index of several weight files in a folder."""
    if len(names) == 1:
        return
    stored = {name: locate_all(folder / name) for name in names}
    places = {key: name for name, tensors in stored.items() for key in tensors}
    headers = [header for tensors in stored.values() for header, _ in tensors.values()]
    index = {"metadata": {"total_size": sum(header.nbytes for header in headers)}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def shard_names(count: int) -> list[str]:
    """The names of so many weight files."""
    return ["model.safetensors"] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
