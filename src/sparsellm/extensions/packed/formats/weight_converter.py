"""Decodes packed tensors while transformers loads a checkpoint, before it merges or splits them as the model requires."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.linear import RUNNING, PackedLinear
from sparsellm.extensions.packed.formats.packed_experts import FUSED, become_packed, can_be_packed
from sparsellm.extensions.packed.formats.packed_tensors import PackedWeight, decode_matrix, dense_tensor
from sparsellm.models.architectures import is_linear
from sparsellm.models.experts import GATED

PATTERN = "sparsellm"
"""Name under which transformers finds the converter again. No tensor's name is compared with it."""


@dataclass(frozen=True)
class LoadTarget:
    """A packed layer or a dense tensor of the model, which is loaded from packed tensors.

    Attributes:
        name: Name of the dense tensor, or of the first buffer of the layer.
        sources: The stored name of each tensor that it is built from and the pattern of `converter` that matches the name.
        dtype: Its dtype in the model.
        layer: The packed layer, if it is one.
        converter: The converter of transformers, if the tensor is converted from several ones or in other ways.
    """

    name: str
    sources: tuple[tuple[str, str | None], ...]
    dtype: torch.dtype
    layer: PackedLinear | None = None
    converter: WeightConverter | None = None


class PackedConverter(WeightConverter):  # type: ignore[misc]
    """A converter that collects the parts of packed tensors, and decodes them.

    transformers asks it for the name in the model of each stored tensor (`rename_source_key`), copies it for each name, gives
    the copy the stored tensors (`add_tensor`), and takes what it makes of them (`convert`).

    Args:
        packed: The packed tensors by stored name.
        targets: What is loaded from them.
        names: The first name in the model of the tensor that each stored tensor or part belongs to, by its own name after
            transformers' renamings.
        scales: Receives the scales of quantized tensors that are decoded to dense ones, which saving needs, by stored name.
    """

    __slots__ = ("names", "packed", "scales", "stored", "targets")

    def __init__(
        self,
        packed: Mapping[str, PackedWeight],
        targets: Mapping[str, LoadTarget],
        *,
        names: Mapping[str, str],
        scales: dict[str, Tensor],
    ) -> None:
        super().__init__(PATTERN, PATTERN, [Chunk()])  # which does not run
        self.packed, self.targets, self.names, self.scales = packed, targets, names, scales
        self.stored: dict[str, Any] = {}

    def decoded(self) -> list[str]:
        """Return the names of the dense tensors of the model that are loaded from packed ones with zeros."""
        sparse = {key for key, tensor in self.packed.items() if tensor.is_sparse}
        return [x.name for x in self.targets.values() if x.layer is None and sparse & dict(x.sources).keys()]

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedConverter:
        """Return a converter without tensors. transformers makes one for every stored tensor."""
        return PackedConverter(self.packed, self.targets, names=self.names, scales=self.scales)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name in the model for which a stored tensor is loaded, and the pattern if it is of this converter."""
        name = self.names.get(source_key)
        return (source_key, None) if name is None else (name, PATTERN)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect a stored tensor: a tensor, a function that reads one, or a future of one."""
        self.stored[source_key] = future

    def convert(self, layer_name: str, model: Any = None, config: Any = None, **keywords: Any) -> dict[str, Any]:
        """Return the tensors of the model, by name, that are made of the collected ones."""
        target = self.targets[layer_name]
        stored = {key: _materialize(tensor) for key, tensor in self.stored.items()}
        self.stored = {}
        device = next(iter(stored.values())).device
        if target.layer is not None:
            return self._running_form(target, stored, device)
        converter = copy.deepcopy(target.converter)
        dense = {key: self._dense(key, stored).to(device, target.dtype) for key, _ in target.sources}
        if converter is None:
            return {target.name: next(iter(dense.values()))}
        for key, pattern in target.sources:
            converter.add_tensor(target.name, key, pattern, dense[key])
        converted: dict[str, Any] = converter.convert(layer_name, model=model, config=config, **keywords)
        return converted

    def _running_form(self, target: LoadTarget, stored: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the buffers of a packed layer, by name."""
        assert target.layer is not None
        weight = self._matrix(target.sources[0][0], stored)
        path = target.name.rpartition(".")[0]
        if weight.format is None and target.layer.transposed:
            weight = Bitmask.from_dense(weight.to_dense().T)
        buffers = {name: getattr(weight, name).to(device) for name in target.layer.running}
        if weight.format is None:
            buffers["values"] = buffers["values"].to(target.dtype)
        return {f"{path}.{name}": buffer for name, buffer in buffers.items()}

    def _dense(self, key: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return a tensor in its stored shape."""
        if key not in self.packed:
            return stored[key]
        matrix = self._matrix(key, stored)
        if matrix.scales is not None:
            self.scales[key] = matrix.scales
        return dense_tensor(matrix, self.packed[key].entry)

    def _matrix(self, key: str, stored: Mapping[str, Tensor]) -> Bitmask:
        """Return the matrix of a packed tensor."""
        weight = self.packed[key]
        try:
            return decode_matrix({part: stored[name] for part, (_, name) in weight.parts.items()}, weight.entry)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{key}: {error}") from None


def _materialize(tensor: Any) -> Tensor:
    """Return a stored tensor that transformers reads in another thread or when it is asked for, or has read."""
    read: Tensor = tensor.result() if isinstance(tensor, Future) else tensor() if callable(tensor) else tensor
    return read


def plan_conversion(
    model: PreTrainedModel,
    transforms: Sequence[WeightTransform],
    *,
    packed: Mapping[str, PackedWeight],
    dense: Iterable[str],
) -> PackedConverter:
    """Replace the linear layers of packed weights by packed layers, and return the converter that loads them.

    Weights that are packed but belong to other modules, or that transformers merges or splits, are decoded to dense ones.

    Args:
        model: The model, on the meta device.
        transforms: What transformers does with the stored tensors.
        packed: The packed tensors of the checkpoint, by stored name.
        dense: The stored names of its other tensors.

    Raises:
        BadCheckpoint: A packed weight has another shape than the model's, or a stored tensor the name of a layer's buffer.
    """
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    most = sum(tensor.numel() for tensor in state.values())
    if (large := next((key for key, tensor in packed.items() if math.prod(tensor.entry.shape) > most), None)) is not None:
        raise BadCheckpoint(f"{large} is {packed[large].entry.shape}, larger than all that config.json calls for.")
    dense = set(dense)
    sources: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted({*packed, *dense}, key=dot_natural_key):
        name, pattern = _name_of(key, model, state, transforms=(renamings, converters))
        sources.setdefault(name, []).append((key, pattern))
    targets: dict[str, LoadTarget] = {}
    names = {}
    for name, pieces in sources.items():
        if name not in state or not any(key in packed for key, _ in pieces):
            continue
        pattern = pieces[0][1]
        target = LoadTarget(name, tuple(pieces), state[name].dtype, converter=by_pattern[pattern] if pattern else None)
        if len(pieces) == 1 and pattern is None:
            weight, shape = packed[pieces[0][0]], tuple(state[name].shape)
            if weight.shape != shape:
                raise BadCheckpoint(
                    f"{name} is {weight.shape}, but config.json calls for {shape}. It may belong to another model."
                )
            target = _replace_linear(model, target, weight)
        targets[target.name] = target
    targets = _replace_experts(model, targets, packed)
    for target in targets.values():
        for key, _ in target.sources:
            for stored in stored_names(packed[key]) if key in packed else (key,):
                names[rename_source_key(stored, renamings, [])[0]] = target.name
    everything = dense.union(*map(stored_names, packed.values()))
    free = [key for key in sorted(everything) if rename_source_key(key, renamings, [])[0] not in names]
    _check_names(model, free, transforms=(renamings, converters))
    return PackedConverter(packed, targets, names=names, scales={})


def stored_names(weight: PackedWeight) -> list[str]:
    """The names of the parts of a packed tensor in its file."""
    return [name for _, name in weight.parts.values()]


def packed_layer(weight: PackedWeight, *, dtype: torch.dtype, transposed: bool = False) -> PackedLinear:
    """Build a layer on the meta device, without a bias, that has room for a packed tensor."""
    outputs, inputs = weight.shape[::-1] if transposed else weight.shape
    return PackedLinear(
        inputs,
        outputs,
        False,
        kept=weight.sizes["weight"],
        format=weight.integers,
        transposed=transposed,
        dtype=dtype,
        device="meta",
    )


def _name_of(
    key: str,
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    *,
    transforms: tuple[list[WeightRenaming], list[WeightConverter]],
) -> tuple[str, str | None]:
    """Return what transformers calls a stored tensor in a model of a state, and the pattern of its converter."""
    name, pattern = rename_source_key(key, *transforms, model.base_model_prefix, state)
    return (name, pattern) if name in state else rename_source_key(key, [], [], model.base_model_prefix, state)


def _check_names(
    model: PreTrainedModel, keys: Iterable[str], *, transforms: tuple[list[WeightRenaming], list[WeightConverter]]
) -> None:
    """Raise BadCheckpoint for stored tensors with names of buffers of packed layers, which only decoding may set."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    buffers = {f"{path}.{name}" for path, layer in layers.items() for name in layer.running}
    state = model.state_dict()
    for key in keys:
        name = _name_of(key, model, state, transforms=transforms)[0]
        if name in buffers:
            raise BadCheckpoint(
                f"The weight files hold {key[:200]}, which would replace what is decoded for the packed layer "
                f"{name.rpartition('.')[0]}. Remove it from them, or get a sound copy of the checkpoint."
            )


def _replace_experts(
    model: PreTrainedModel, targets: Mapping[str, LoadTarget], packed: Mapping[str, PackedWeight]
) -> dict[str, LoadTarget]:
    """Replace the parameters of experts by packed layers, where each stored tensor is a layer of one of them."""
    result = dict(targets)
    for path, module in [(path, module) for path, module in model.named_modules() if can_be_packed(module)]:
        fused = [targets[name] for name in (f"{path}.{parameter}" for parameter in FUSED) if name in targets]
        keys = {name: key for target in fused for name, key in _layers_of(model, module, target, packed=packed).items()}
        if len(keys) != len(GATED) * len(module.get_parameter("down_proj")):
            continue
        layers = {name: packed_layer(packed[key], dtype=fused[0].dtype) for name, key in keys.items()}
        become_packed(module, layers)
        for target in fused:
            del result[target.name]
        for name, key in keys.items():
            buffer = f"{path}.{name}.{RUNNING[0]}"
            result[buffer] = LoadTarget(buffer, ((key, None),), fused[0].dtype, layers[name])
    return result


def _layers_of(
    model: PreTrainedModel, module: nn.Module, target: LoadTarget, *, packed: Mapping[str, PackedWeight]
) -> dict[str, str]:
    """Return the stored name of every layer that a parameter of experts is made of, by path; empty if one is not packed."""
    parameter = target.name.rpartition(".")[2]
    shape = module.get_parameter(parameter).shape
    rows = (shape[0], len(FUSED[parameter]), 1)
    keys = [key for key, _ in target.sources]
    matrix = (shape[1] // rows[1], shape[2])
    if target.converter is None or len(keys) != rows[0] * rows[1] or not packed.keys() >= set(keys):
        return {}
    if any(not packed[key].is_sparse or packed[key].entry.transposed or packed[key].entry.shape != matrix for key in keys):
        return {}
    # What transformers does with the stored tensors is found by doing it with their numbers.
    converter = copy.deepcopy(target.converter)
    for number, (key, pattern) in enumerate(target.sources):
        converter.add_tensor(target.name, key, pattern, torch.full((1, 1), number))
    numbers = converter.convert(target.name, model=model, config=model.config).get(target.name)
    if numbers is None or numbers.shape != rows:
        return {}
    paths = [f"{expert}.{name}" for expert in range(rows[0]) for name in FUSED[parameter]]
    return {path: keys[number] for path, number in zip(paths, numbers.flatten().tolist(), strict=True)}


def _replace_linear(model: PreTrainedModel, target: LoadTarget, packed: PackedWeight) -> LoadTarget:
    """Replace the module of a weight by a packed layer, if it is a linear layer whose weight no other module has."""
    path, _, name = target.name.rpartition(".")
    module = model.get_submodule(path)
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    if name != "weight" or target.name in tied or not packed.is_sparse or not is_linear(module):
        return target
    transposed = type(module).__name__ == "Conv1D"
    if packed.entry.bits is not None and packed.entry.transposed != transposed:  # its groups are not along the inputs
        return target
    layer = packed_layer(packed, dtype=target.dtype, transposed=transposed)
    layer.bias = module.bias
    model.set_submodule(path, layer)
    return LoadTarget(f"{path}.{RUNNING[0]}", target.sources, target.dtype, layer)
