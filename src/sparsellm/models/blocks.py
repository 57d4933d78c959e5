"""Decoder blocks: access to their linear layers by name, and their parameters in the stored dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm.errors import NonFinite, UnsupportedModel
from sparsellm.models.architectures import Architecture, architecture_of, discover_architecture, is_linear
from sparsellm.models.contexts import product_dtype_context, replace_forward
from sparsellm.models.experts import Rows, experts_of, forward_by_expert
from sparsellm.models.linear_views import Layer, LinearView, RouteMatmulThroughLayers, forward_by_views, piece_rows
from sparsellm.solvers.linalg import all_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOWERS = ("", "model.language_model.", "language_model.", "model.text_model.", "language_model.model.")
"""Path prefixes of the language model; in multimodal models they replace the "model." of `Architecture.blocks`."""

HEAD_ARCHITECTURE = Architecture(blocks="", groups=(("",),), feed_forward=None, activation="")
"""The architecture of an output head as a block: its only layer is the module itself, whose name within the block is empty."""


@dataclass(frozen=True)
class Call:
    """The arguments that a block is called with after the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Block:
    """One decoder block of a model, or its output head. Layers are addressed by their name within the block.

    Attributes:
        index: Number of the block, from 0.
        name: Its path in the model.
        module: The module of the model.
        architecture: The family's architecture, restricted to the layers of this block.
        dtypes: Dtype in which each parameter is stored, by name; the block may compute in a wider one.
        views: The layers that are part of a parameter, by name.
        scales: By name of a quantized layer, its scales, (out, groups) bfloat16; filled in where a layer is rounded.
        products: Dtype of the matrix products of a pass, as in `product_dtype_context`; None for that of the factors.
    """

    index: int
    name: str
    module: nn.Module
    architecture: Architecture
    dtypes: Mapping[str, torch.dtype]
    views: Mapping[str, LinearView] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    products: torch.dtype | None = None

    @property
    def is_head(self) -> bool:
        """Whether this is the model's output head, which `blocks_and_head` puts after the decoder blocks."""
        return self.architecture is HEAD_ARCHITECTURE

    @property
    def layers(self) -> dict[str, Layer]:
        """The linear layers by name, in running order."""
        return {name: self.layer(name) for group in self.architecture.groups for name in group}

    @property
    def device(self) -> torch.device:
        """The device of the block's parameters."""
        return next(self.module.parameters()).device

    def layer(self, name: str) -> Layer:
        """Return a layer by name.

        Raises:
            UnsupportedModel: There is no such module, or it is not a plain linear layer.
        """
        if name in self.views:
            return self.views[name]
        try:
            layer = self.module.get_submodule(name)
        except AttributeError:
            raise UnsupportedModel(f"{self.name} has no layer {name}, which its family's form calls for.") from None
        if not is_linear(layer):
            raise UnsupportedModel(
                f"{self.full_name(name)} is a {type(layer).__name__}, not a torch.nn.Linear. "
                "Quantized and adapted models cannot be pruned: load the plain checkpoint, or merge its adapters."
            )
        assert isinstance(layer, nn.Linear)
        return layer

    def module_of(self, name: str) -> nn.Module:
        """Return the module to hook for a layer or submodule of the block."""
        return self.views[name] if name in self.views else self.module.get_submodule(name)

    def parameter(self, name: str) -> str:
        """Return the name, within the block, of the parameter that holds a layer's weight."""
        view = self.views.get(name)
        return f"{name}.weight".lstrip(".") if view is None else f"{self._owner_path(view)}.{view.stored}"

    def bias(self, name: str) -> str:
        """Return the name, within the block, that the parameter of a layer's bias has if it exists."""
        view = self.views.get(name)
        return f"{name}.bias".lstrip(".") if view is None else f"{self._owner_path(view)}.{view.stored_bias}"

    def _owner_path(self, view: LinearView) -> str:
        """Return the path, within the block, of the module that holds a view's parameter."""
        owner_path: str = next(path for path, module in self.module.named_modules() if module is view.owner)
        return owner_path

    def linear_view(self, name: str, parameter: Tensor) -> Tensor:
        """Return a layer's entries, (out, in), of a tensor shaped like the parameter that holds the layer."""
        view = self.views.get(name)
        return parameter if view is None else view.slice_of(parameter)

    def masks(self, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Combine masks by layer, each (out, in), into masks by parameter; True where no layer of `keep` has an entry."""
        masks: dict[str, Tensor] = {}
        parameters = dict(self.module.named_parameters())
        for name, mask in keep.items():
            parameter = self.parameter(name)
            if name not in self.views:
                masks[parameter] = mask
                continue
            parameter_mask = masks.setdefault(parameter, torch.ones_like(parameters[parameter], dtype=torch.bool))
            self.views[name].assign(parameter_mask, mask)
        return masks

    def parameters_of(self, names: Iterable[str]) -> set[str]:
        """Return the names, within the block, of the parameters that hold the weights and biases of layers."""
        return {parameter for name in names for parameter in (self.parameter(name), self.bias(name))}

    def unpruned_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that hold no layer's weight, by name: biases, norms, routers."""
        weights = {self.parameter(name) for name in self.layers}
        return {name: tensor for name, tensor in self.module.named_parameters() if name not in weights}

    def write(self, name: str, weight: Tensor) -> None:
        """Write a weight, (out, in), into a layer, rounded to the layer's storage dtype.

        Raises:
            NonFinite: The weight overflows that dtype.
        """
        rounded = self.rounded_to_storage(name, weight)
        if not all_finite(rounded):
            raise NonFinite(f"The pruned weight of {self.full_name(name)} overflows {rounded.dtype}. Try `dtype='float32'`.")
        self.assign(name, rounded)

    def rounded_to_storage(self, name: str, weight: Tensor) -> Tensor:
        """Cast a weight to the storage dtype of a layer. Its zeros become +0.0: products with a mask yield -0.0 too."""
        return weight.to(self.dtypes[self.parameter(name)]) + 0.0

    def assign(self, name: str, weight: Tensor) -> None:
        """Copy a weight, (out, in), into a layer without rounding it to the storage dtype."""
        with torch.no_grad():
            self._view(name).assign(self.module.get_parameter(self.parameter(name)), weight)

    def write_bias(self, name: str, bias: Tensor) -> None:
        """Write a bias, (out,), into a layer that has one, rounded to its storage dtype."""
        with torch.no_grad():
            self._view(name).assign_bias(bias.to(self.dtypes[self.bias(name)]))

    def _view(self, name: str) -> LinearView:
        """A layer as a view, of the whole of its own parameter where it is a module."""
        layer = self.layer(name)
        return layer if isinstance(layer, LinearView) else LinearView(layer)

    @contextmanager
    def expose_layers(self, names: Iterable[str], rows: Rows | None = None) -> Iterator[None]:
        """Context in which every one of these layers is called as a module, so that its hooks run.

        Modules with fused layers or experts run layer by layer.

        Args:
            names: The layers.
            rows: Chooses the tokens that each expert runs on; the tokens routed to it by default.
        """
        modules = {id(self.views[name].module): self.views[name].module for name in names if name in self.views}
        with ExitStack() as stack:
            for module in modules.values():
                views = [view for view in self.views.values() if view.module is module]
                experts = experts_of(module)
                forward = forward_by_expert(experts, views, rows) if experts else forward_by_views(views)
                stack.enter_context(replace_forward(module, forward))
            plain = (self.module.get_submodule(name) for name in names if name not in self.views)
            stack.enter_context(RouteMatmulThroughLayers(layer for layer in plain if isinstance(layer, nn.Linear)))
            yield

    def round_to_storage_dtype(self) -> None:
        """Round every parameter to its storage dtype, so that the block computes with the values that are saved."""
        with torch.no_grad():
            for name, tensor in self.module.named_parameters():
                tensor.copy_(tensor.to(self.dtypes[name]))

    def copy(self) -> Block:
        """Copy the block, its weights included."""
        # deepcopy refuses tensors with a gradient history, which a pass may leave in attributes of a module.
        states = (value for module in self.module.modules() for value in vars(module).values() if isinstance(value, Tensor))
        memo: dict[int, Any] = {id(state): state.detach().clone() for state in states if not state.is_leaf}
        module = copy.deepcopy(self.module, memo)
        return replace(self, module=module, views=_views(module, self.architecture))

    def full_name(self, name: str) -> str:
        """Return a layer's path in the model."""
        return f"{self.name}.{name}" if name else self.name

    def __call__(self, hidden: Tensor, call: Call) -> Tensor:
        """Run the block on hidden states of (batch, seq, model)."""
        with product_dtype_context(hidden.device, self.products):
            output: Tensor | Sequence[Tensor] = self.module(hidden, *call.arguments, **call.keywords)
        states = output if isinstance(output, Tensor) else output[0]
        return states if self.products is None else states.to(hidden.dtype)


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of a module's output, the first item if that is a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def blocks_of(model: PreTrainedModel) -> list[Block]:
    """Return the decoder blocks of a model, in order; of a multimodal model, those of its language model.

    The architecture is the family's in the table, else a discovered one.

    Raises:
        UnsupportedModel: No blocks are found, they do not have the described layers, or two of them share weights.
    """
    if not hasattr(model, "config"):
        raise UnsupportedModel(f"A {type(model).__name__} is no model. Load one with AutoModelForCausalLM.")
    architecture = architecture_of(model.config) or discover_architecture(model)
    paths = [f"{tower}{architecture.blocks.removeprefix('model.') if tower else architecture.blocks}" for tower in TOWERS]
    modules = dict(model.named_modules())
    path = next((path for path in paths if path in modules), None)
    if path is None:
        raise UnsupportedModel(f"A {type(model).__name__} has no {architecture.blocks}. Load it with AutoModelForCausalLM.")
    blocks: list[Block] = []
    for index, module in enumerate(modules[path].children()):
        dtypes = {name: tensor.dtype for name, tensor in module.named_parameters()}
        block_architecture = architecture.of(module)
        try:
            views = _views(module, block_architecture)
        except (AttributeError, ValueError) as error:
            raise UnsupportedModel(f"{path}.{index} is not of the form that is described: {error}.") from None
        blocks.append(Block(index, f"{path}.{index}", module, block_architecture, dtypes, views))
    _check_unshared(blocks)
    return blocks


def _check_unshared(blocks: Sequence[Block]) -> None:
    """Raise UnsupportedModel where two blocks share a layer: pruning the first block would change the second."""
    owners: dict[int, str] = {}
    for block in blocks:
        parameters = {name: id(tensor) for name, tensor in block.module.named_parameters()}
        for parameter in {block.parameter(name) for name in block.layers if block.parameter(name) in parameters}:
            owner = owners.setdefault(parameters[parameter], block.name)
            if owner != block.name:
                raise UnsupportedModel(
                    f"{owner} and {block.name} share {parameter}. Models whose blocks share weights cannot be pruned."
                )


def _views(module: nn.Module, architecture: Architecture) -> dict[str, LinearView]:
    """Return, by name, the layers of a block that are part of a parameter: fused, transposed, or of an expert."""
    views: dict[str, LinearView] = {}
    for fused, split in architecture.splits.items():
        if not any(name.startswith(f"{fused}.") for group in architecture.groups for name in group):
            continue
        owner = module.get_submodule(fused)
        transposed = type(owner).__name__ == "Conv1D"
        total = owner.get_parameter("weight").shape[1 if transposed else 0]
        shares = [int(share) for share in split.shares]
        for piece, rows in zip(split.pieces, piece_rows(total, shares, int(split.repeated)), strict=True):
            views[f"{fused}.{piece}"] = LinearView(owner, rows=rows, transposed=transposed)
    for name in (name for group in architecture.groups for name in group if name not in views):
        if not (architecture.experts and name.startswith(f"{architecture.experts}.")):
            layer = module.get_submodule(name)
            if type(layer).__name__ == "Conv1D" and not isinstance(layer, nn.Conv1d):
                views[name] = LinearView(layer, transposed=True)
    experts = experts_of(module.get_submodule(architecture.experts)) if architecture.experts else None
    if experts:
        views |= experts.views(architecture.experts)
    return views
