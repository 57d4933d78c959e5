"""A decoder block, seen by the names of its parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm.errors import InvalidSetting, NonFinite, UnsupportedModel, nearest
from sparsellm.models.activation_functions import ACTIVATION_FUNCTIONS
from sparsellm.models.architectures import Architecture, architecture_of, discover_architecture, is_linear
from sparsellm.models.block_calls import Call
from sparsellm.models.contexts import replace_forward
from sparsellm.models.experts import Rows, experts_of, forward_by_expert
from sparsellm.models.linear_views import Layer, LinearView, RouteMatmulThroughLayers, forward_by_views, piece_rows
from sparsellm.solvers.linalg import all_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOWERS = ("", "model.language_model.", "language_model.", "model.text_model.", "language_model.model.")
"""Where the language model is in a model that sees: the path of its blocks begins anew there."""

ARCHITECTURE_ATTRIBUTE = "sparsellm_architecture"
"""The attribute of a model that holds what its user says of its form."""


@dataclass(frozen=True)
class Block:
    """One decoder block of a model.

    index: from 0. name: its path in the model. module: what runs. architecture: the family's line of the table, as far as the
    block has it. dtypes: what each parameter is stored in, which may be less than what the block is computed in. views: by
    name, the layers that are part of a parameter.
    """

    index: int
    name: str
    module: nn.Module
    architecture: Architecture
    dtypes: Mapping[str, torch.dtype]
    views: Mapping[str, LinearView] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, Layer]:
        """The linear layers by their name within the block, in running order."""
        return {name: self.layer(name) for group in self.architecture.groups for name in group}

    @property
    def device(self) -> torch.device:
        """Where the block computes."""
        return next(self.module.parameters()).device

    def layer(self, name: str) -> Layer:
        """The layer of that name within the block; raises UnsupportedModel for anything but a plain linear layer."""
        if name in self.views:
            return self.views[name]
        try:
            layer = self.module.get_submodule(name)
        except AttributeError:
            raise UnsupportedModel(f"{self.name} has no layer {name}, which its family's form calls for.") from None
        if not is_linear(layer):
            raise UnsupportedModel(
                f"{self.full_name(name)} is a {type(layer).__name__}, not a torch.nn.Linear. "
                "Quantised and adapted models cannot be pruned: load the plain checkpoint, or merge its adapters."
            )
        assert isinstance(layer, nn.Linear)
        return layer

    def module_of(self, name: str) -> nn.Module:
        """The layer or the module of that name within the block: what can be hooked."""
        return self.views[name] if name in self.views else self.module.get_submodule(name)

    def parameter(self, name: str) -> str:
        """The name, within the block, of the parameter that holds a layer's weight."""
        view = self.views.get(name)
        if view is None:
            return f"{name}.weight"
        return f"{self._owner(view)}.{view.stored}"

    def bias(self, name: str) -> str:
        """The name, within the block, of the parameter that holds a layer's bias, if it has one."""
        view = self.views.get(name)
        return f"{name}.bias" if view is None else f"{self._owner(view)}.{view.stored_bias}"

    def _owner(self, view: LinearView) -> str:
        """The path, within the block, of the module that holds a view's parameter."""
        found: str = next(path for path, module in self.module.named_modules() if module is view.owner)
        return found

    def linear_view(self, name: str, whole: Tensor) -> Tensor:
        """A layer's part, (out, in), of a tensor that is shaped as the parameter that holds it."""
        view = self.views.get(name)
        return whole if view is None else view.slice_of(whole)

    def masks(self, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By parameter, the masks of all its layers together, from those by layer; True where a parameter has no layer."""
        found: dict[str, Tensor] = {}
        parameters = dict(self.module.named_parameters())
        for name, mask in keep.items():
            parameter = self.parameter(name)
            if name not in self.views:
                found[parameter] = mask
                continue
            whole = found.setdefault(parameter, torch.ones_like(parameters[parameter], dtype=torch.bool))
            self.views[name].assign(whole, mask)
        return found

    def parameters_of(self, names: Iterable[str]) -> set[str]:
        """The parameters that hold these layers, weights and biases, by name within the block."""
        return {parameter for name in names for parameter in (self.parameter(name), self.bias(name))}

    def unpruned_parameters(self) -> dict[str, nn.Parameter]:
        """By name, the parameters that hold no layer's weight: biases, norms, routers."""
        weights = {self.parameter(name) for name in self.layers}
        return {name: tensor for name, tensor in self.module.named_parameters() if name not in weights}

    def write(self, name: str, weight: Tensor) -> None:
        """Put a weight, (out, in), into a layer, rounded to the dtype in which it will be stored.

        Raises NonFinite, naming the layer, where that dtype cannot hold it.
        """
        rounded = self.rounded_to_storage(name, weight)
        if not all_finite(rounded):
            raise NonFinite(f"The pruned weight of {self.full_name(name)} overflows {rounded.dtype}. Try --dtype float32.")
        self.assign(name, rounded)

    def rounded_to_storage(self, name: str, weight: Tensor) -> Tensor:
        """A weight in the dtype in which the layer's will be stored."""
        return weight.to(self.dtypes[self.parameter(name)])

    def assign(self, name: str, weight: Tensor) -> None:
        """Put a weight, (out, in), into a layer as it is."""
        layer = self.layer(name)
        with torch.no_grad():
            if isinstance(layer, LinearView):
                layer.assign(self.module.get_parameter(self.parameter(name)), weight)
            else:
                layer.weight.copy_(weight)

    def write_bias(self, name: str, bias: Tensor) -> None:
        """Put a bias, (out,), into a layer that has one, rounded as its weight is."""
        layer = self.layer(name)
        rounded = bias.to(self.dtypes[self.bias(name)])
        with torch.no_grad():
            if isinstance(layer, LinearView):
                layer.assign_bias(rounded)
            else:
                layer.bias.copy_(rounded)

    @contextmanager
    def expose_layers(self, names: Iterable[str], rows: Rows | None = None) -> Iterator[None]:
        """Within the context hooks on these layers are called: modules that hold layers as views run layer by layer.

        rows: which tokens each expert is shown, if not those that are routed to it.
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
        """Round every parameter to the dtype in which it will be stored, so that what travels on is what will be written."""
        with torch.no_grad():
            for name, tensor in self.module.named_parameters():
                tensor.copy_(tensor.to(self.dtypes[name]))

    def copy(self) -> Block:
        """The block as it stands, with weights of its own."""
        states = (value for module in self.module.modules() for value in vars(module).values() if isinstance(value, Tensor))
        memo: dict[int, Any] = {id(state): state.detach().clone() for state in states if not state.is_leaf}
        module = copy.deepcopy(self.module, memo)  # which refuses what a pass with gradients left in a module
        return replace(self, module=module, views=_views(module, self.architecture))

    def full_name(self, name: str) -> str:
        """The layer's path in the model."""
        return f"{self.name}.{name}"

    def __call__(self, hidden: Tensor, call: Call) -> Tensor:
        """The block's output for hidden states of (batch, seq, model)."""
        output: Tensor | Sequence[Tensor] = self.module(hidden, *call.arguments, **call.keywords)
        return output if isinstance(output, Tensor) else output[0]


def blocks_of(model: PreTrainedModel) -> list[Block]:
    """All decoder blocks of a model, in order; of a model that sees, its language tower's.

    Their form is what the user says (`describe`), or the table, or what can be found. Raises UnsupportedModel where none is.
    """
    architecture = getattr(model, ARCHITECTURE_ATTRIBUTE, None) or architecture_of(model.config) or discover_architecture(model)
    paths = [f"{tower}{architecture.blocks.removeprefix('model.') if tower else architecture.blocks}" for tower in TOWERS]
    modules = dict(model.named_modules())
    path = next((path for path in paths if path in modules), None)
    if path is None:
        raise UnsupportedModel(f"A {type(model).__name__} has no {architecture.blocks}. Load it with AutoModelForCausalLM.")
    blocks: list[Block] = []
    for index, module in enumerate(modules[path].children()):
        dtypes = {name: tensor.dtype for name, tensor in module.named_parameters()}
        own = architecture.of(module)
        try:
            views = _views(module, own)
        except (AttributeError, ValueError) as error:
            raise UnsupportedModel(f"{path}.{index} is not of the form that is described: {error}.") from None
        blocks.append(Block(index, f"{path}.{index}", module, own, dtypes, views))
    if hasattr(model, ARCHITECTURE_ATTRIBUTE):
        _check_described(architecture, blocks)
    _check_unshared(blocks)
    return blocks


def _check_unshared(blocks: Sequence[Block]) -> None:
    """Raise UnsupportedModel where two blocks hold one layer: pruned in the one, it would not be dense in the other."""
    holders: dict[int, str] = {}
    for block in blocks:
        parameters = {name: id(tensor) for name, tensor in block.module.named_parameters()}
        for held in {block.parameter(name) for name in block.layers if block.parameter(name) in parameters}:
            first = holders.setdefault(parameters[held], block.name)
            if first != block.name:
                raise UnsupportedModel(
                    f"{first} and {block.name} share {held}. Models whose blocks share weights cannot be pruned."
                )


def _check_described(architecture: Architecture, blocks: Sequence[Block]) -> None:
    """Raise InvalidSetting where a user names what no block has: a slip of the pen would leave it dense without a word."""
    there = {name for block in blocks for group in block.architecture.groups for name in group}
    modules = {name for block in blocks for name, _ in block.module.named_modules() if name}
    for name in (name for group in architecture.groups for name in group):
        if name not in there or not any(_has(block, name) for block in blocks):
            raise InvalidSetting(f"The architecture names {name!r}, which no block has. {nearest(name, modules)}")
    if architecture.experts and not any(block.architecture.experts for block in blocks):
        raise InvalidSetting(f"The architecture's experts, {architecture.experts!r}, are in no block.")
    if architecture.activation not in ("none", "relu", *ACTIVATION_FUNCTIONS):
        raise InvalidSetting(
            f"The architecture's activation is {architecture.activation!r}, neither a key of the configuration nor one that is "
            f"solved: relu, {', '.join(ACTIVATION_FUNCTIONS)}. Leave `feed_forward` and `activation` out to prune its layers "
            "one by one."
        )


def _has(block: Block, name: str) -> bool:
    """Whether a block has a layer of that name."""
    return name in block.views or any(path == name for path, _ in block.module.named_modules())


def describe(model: PreTrainedModel, architecture: Architecture | None) -> PreTrainedModel:
    """The model, with what its user says of its form; unchanged where nothing is said."""
    if architecture is not None:
        setattr(model, ARCHITECTURE_ATTRIBUTE, architecture.resolved(model.config.get_text_config()))
    return model


def _views(module: nn.Module, architecture: Architecture) -> dict[str, LinearView]:
    """By name, the layers of a block that are part of a parameter."""
    found: dict[str, LinearView] = {}
    for whole, split in architecture.splits.items():
        if not any(name.startswith(f"{whole}.") for group in architecture.groups for name in group):
            continue
        owner = module.get_submodule(whole)
        transposed = type(owner).__name__ == "Conv1D"
        total = owner.get_parameter("weight").shape[1 if transposed else 0]
        shares = [int(share) for share in split.shares]
        for piece, rows in zip(split.pieces, piece_rows(total, shares, int(split.repeated)), strict=True):
            found[f"{whole}.{piece}"] = LinearView(owner, rows=rows, transposed=transposed)
    for name in (name for group in architecture.groups for name in group if name not in found):
        if not (architecture.experts and name.startswith(f"{architecture.experts}.")):
            layer = module.get_submodule(name)
            if type(layer).__name__ == "Conv1D" and not isinstance(layer, nn.Conv1d):
                found[name] = LinearView(layer, transposed=True)
    experts = experts_of(module.get_submodule(architecture.experts)) if architecture.experts else None
    if experts:
        found |= experts.views(architecture.experts)
    return found
