r"""LoRA that keeps zeros, by layers of PEFT: $W = M \odot (W_0 + s B A)$.

M is the mask of the pruned weight $W_0$, A and B are the matrices of an ordinary adapter of PEFT (Hu et al., LoRA, ICLR 2022),
and s is its scale. The mask inside the product is that of Zimmer et al., PERP (2023).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from sparsellm.errors import BadCheckpoint, InvalidSetting, MissingPackage, UnsupportedModel, first_line
from sparsellm.extensions.recover.training.fixed_masks import INITIAL, StoredMasks, check_supported, pruned_masks

try:
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, ModulesToSaveWrapper
    from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
except ImportError:
    raise MissingPackage("LoRA needs PEFT, which is not installed: pip install 'sparsellm[train]'.") from None

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SparseLinear(lora.Linear):  # type: ignore[misc]
    """A linear layer with LoRA whose weight keeps its zeros; an `lora.Linear` becomes one by its `__class__`."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The change of the weight by an adapter, of the weight's shape, in float32."""
        _check_factors(self.lora_A[adapter], self.lora_B[adapter], self.get_base_layer().weight)
        factors = self.lora_A[adapter].weight.float(), self.lora_B[adapter].weight.float()
        with torch.autocast(factors[0].device.type, enabled=False):
            delta = (factors[1] * self.scaling[adapter]) @ factors[0]  # in few passes, as each costs time at every step
        masked: Tensor = (delta.T if self.fan_in_fan_out else delta).masked_fill_(self.get_base_layer().weight == 0, 0)
        return masked

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not adapters:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        if kwargs.get("adapter_names") is not None:
            raise InvalidSetting("Masked adapters cannot be mixed within a batch: leave out `adapter_names`.")
        if self.training and any(not isinstance(self.lora_dropout[name], nn.Identity) for name in adapters):
            output: Tensor = self.base_layer(x, *args, **kwargs)
            for name in adapters:
                output = output + _recompute(self._update, self.lora_dropout[name](x), name).to(output.dtype)
        else:
            output = _recompute(self._product, x, adapters, *args)
        for name in adapters:
            if self.lora_bias[name]:
                output = output + (self.lora_B[name].bias * self.scaling[name]).to(output.dtype)
        return output

    def _product(self, x: Tensor, adapters: list[str], *args: Any) -> Tensor:
        """The output of the layer with its merged weight."""
        base = self.get_base_layer()
        weight = base.weight
        for name in adapters:
            weight = self.get_delta_weight(name).add_(weight).to(weight.dtype)
        output: Tensor = functional_call(base, {"weight": weight}, (x, *args))
        return output

    def _update(self, x: Tensor, adapter: str) -> Tensor:
        """The product of the inputs with the change of the weight."""
        delta = self.get_delta_weight(adapter).to(x.dtype)
        return x @ (delta if self.fan_in_fan_out else delta.T)


class SparseParameter(lora.ParamWrapper):  # type: ignore[misc]
    """A parameter with LoRA, such as that of experts, that keeps its zeros; a `lora.ParamWrapper` becomes one by `__class__`.

    Memory: a copy of the whole parameter and of its change in each block, which gradient checkpointing limits to one block.
    """

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        """The change of the parameter by an adapter, in the parameter's shape, in float32."""
        parameter, stacked = self.get_param(), (self.num_experts, -1)
        _check_factors(self.lora_A[adapter], self.lora_B[adapter], parameter)
        factors = self.lora_A[adapter].weight.float(), self.lora_B[adapter].weight.float()
        with torch.autocast(factors[0].device.type, enabled=False):
            a = factors[0].unflatten(0, stacked)  # (experts, rank, in)
            b = factors[1].unflatten(1, stacked[::-1])  # (out, rank, experts)
            delta = torch.einsum("ore,eri->eoi", b, a) * self.scaling[adapter]
        if parameter.ndim == 3 and not self._did_swap_in_out_features:
            delta = delta.mT  # stored as (experts, in, out)
        masked: Tensor = delta.reshape(parameter.shape).masked_fill(parameter == 0, 0)
        return masked

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Context in which the module computes with the changed parameter."""
        adapters = [name for name in active_adapters if name in self.lora_A]
        base, name, trained = self.get_base_layer(), self.parameter_name, self.get_param().requires_grad
        for adapter in adapters:
            parametrize.register_parametrization(base, name, _Sum(self.get_delta_weight(adapter)))
            base.parametrizations[name].original.requires_grad_(trained)
        try:
            with parametrize.cached():
                yield
        finally:
            if adapters:
                parametrize.remove_parametrizations(base, name, leave_parametrized=False)


class _Sum(nn.Module):
    """Adds a change to a parameter."""

    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + self.delta).to(weight.dtype)


def _check_factors(a: nn.Module, b: nn.Module, weight: Tensor) -> None:
    """Raise UnsupportedModel where FSDP gives a layer less than its whole weight and factors."""
    if any(isinstance(x, FullyShardedDataParallel) for x in (a, b)) or isinstance(weight._base, FlatParameter):
        raise UnsupportedModel(
            "LoRA under masks does not train under version 1 of FSDP, which concatenates the weights. Use version 2, "
            "as fully_shard and accelerate do by default, or DDP."
        )
    if any(isinstance(x, DTensor) for x in (a.weight, b.weight, weight)):
        raise UnsupportedModel(
            "LoRA under masks needs the whole weight and factors of a layer, but they are sharded apart. "
            "Shard whole decoder blocks, not the modules within a layer."
        )


def _recompute(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function; its intermediate results are formed again in the backward pass."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    output: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return output


MASKED = {lora.Linear: SparseLinear, lora.ParamWrapper: SparseParameter}
"""The class with masks for each class of PEFT."""


def sparse_lora(model: PreTrainedModel, config: LoraConfig | str | Path) -> PeftModel:
    r"""Add a LoRA adapter to a pruned model that changes only the weights that pruning left.

    A targeted layer computes with $M \odot (W_0 + s B A)$, rounded to the dtype of $W_0$: exactly the weight that `merge`
    writes. The result is an ordinary `PeftModel`: any trainer trains it, and `save_pretrained` writes an ordinary adapter.
    Layers without zeros get an ordinary adapter.

    Cost: more time than training the weights themselves, since their gradient is computed and B A is formed, twice a step.
    Memory: the adapter with its gradients and moments, and a few copies of one weight at a time. With `lora_dropout` above 0,
    a layer takes a second product with its inputs.

    Trains under DDP, and under FSDP2 with whole decoder blocks as its units.

    Args:
        model: A pruned model, not sharded yet, in which the layers are replaced as `peft.get_peft_model` does.
        config: The configuration of a new adapter, or the folder of a saved one, which is trained further.

    Returns:
        The model with the adapter.

    Raises:
        InvalidSetting: No targeted layer has zeros; the adapter is for other layers, or not plain LoRA; the model is sharded.
        UnsupportedModel: The model is quantized or packed.
        BadCheckpoint: The folder has no adapter, or a damaged one.
    """
    _check_whole(model)
    if isinstance(model, PeftModel):
        raise InvalidSetting("The model has an adapter already: merge it, or pass the model without it.")
    check_supported(model)
    stored = StoredMasks(model)
    stored.check(stored.lost())
    saved: dict[str, Tensor] | None = None
    name = "The adapter"
    if isinstance(config, (str, Path)):
        name = f"The adapter {config}"
        config, saved = _read_adapter(Path(config))
    if not isinstance(config, LoraConfig):
        raise InvalidSetting(f"{name} must be LoRA, the only kind that is trained with masks, got {type(config).__name__}.")
    if config.init_lora_weights not in INITIAL:
        raise InvalidSetting(
            f"{name} has `init_lora_weights={config.init_lora_weights!r}`, which changes the pruned weights before training. "
            "Pass True, False, 'gaussian' or 'orthogonal'."
        )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise InvalidSetting(f"{name} does not fit the model ({first_line(error)}). Change `target_modules`.") from error
    if saved is not None:
        _fill(adapted, saved, name)
    problem = _mask_layers(adapted)
    if problem:
        adapted.unload()
        raise InvalidSetting(problem)
    return adapted


def merge(model: PeftModel) -> PreTrainedModel:
    r"""Merge the active adapters into the pruned weights; every zero stays.

    The zeros are those of the folder that the model was loaded from, if it is there, and otherwise those of the weights below
    the adapter. So zeros stay also under PiSSA and other adapters that change these weights as they are loaded.

    In pruned layers, an adapter that `sparse_lora` made is merged without loss: the merged layer computes what the trained one
    does, bit by bit. Other layers compute the same up to rounding, as PEFT merges them. An adapter that was trained without
    masks, of any kind that PEFT can merge, loses what it adds to pruned weights. A warning says how much that is.

    A weight that modules share, such as that of tied embeddings, is merged for each of them as it was trained. Where they then
    differ they are no longer tied.

    Args:
        model: A pruned model with an adapter; its layers are merged in place.

    Returns:
        The model without the adapter, in the dtype of the pruned model.

    Warns:
        UserWarning: The masks remove part of the update, as a fraction of its squared Frobenius norm.

    Raises:
        InvalidSetting: The adapter is merged already, or cannot be merged, or the model is sharded; a layer without adapter has
            lost zeros of its folder; or there is no folder, and the adapter changed the weights as it was loaded.
        UnsupportedModel: The model is quantized or packed.
    """
    _check_whole(model)
    check_supported(model)
    modules = model.named_modules() if isinstance(model, PeftModel) else ()
    layers = {name: layer for name, layer in modules if isinstance(layer, BaseTunerLayer)}
    if not layers:
        kind = type(model).__name__
        raise InvalidSetting(f"The {kind} has no adapter of PEFT with weights to merge. Pass what sparse_lora returned.")
    if any(layer.merged for layer in layers.values()):
        raise InvalidSetting("The adapter is merged already. Load the pruned model and the adapter again.")
    stored = StoredMasks(model)
    lost = stored.lost()
    adapted = {id(parameter) for layer in layers.values() for parameter in layer.get_base_layer().parameters()}
    stored.check({name: count for name, count in lost.items() if id(stored.parameters[name]) not in adapted})
    if filled := [name for name, layer in layers.items() if type(layer) in MASKED.values() and _zeros(layer) < layer.zeros]:
        raise InvalidSetting(f"{filled[0]} has lost zeros since sparse_lora. Load the pruned model and the adapter again.")
    if changed := _copies_without_zeros(model):
        raise InvalidSetting(f"The trained copy of {changed} has lost zeros: train it with sparsellm.SparsityCallback.")
    before: dict[int, Callable[[Tensor], Tensor]] = {
        id(parameter): stored.read if name in lost else Tensor.clone for name, parameter in stored.parameters.items()
    }
    with _untied(model, list(layers.values()), before):
        removed = {name: _merge_layer(name, layer, before) for name, layer in layers.items()}
    outside, total = (sum(part) for part in zip(*removed.values(), strict=True))
    if outside > 0:
        worst = max(removed, key=lambda name: removed[name][0] / (removed[name][1] or 1))
        share = removed[worst][0] / removed[worst][1]
        warnings.warn(
            f"The adapter was not trained with the masks: they remove {outside / total:.1%} of the squared norm of its update, "
            f"at most {share:.1%}, in {worst}. Evaluate the merged model, or train the adapter with sparse_lora.",
            stacklevel=2,
        )
    for layer in layers.values():
        layer.merge = lambda *_, **__: None  # which some kinds of adapters would run twice
    merged: PreTrainedModel = model.merge_and_unload()
    return merged


def _check_whole(model: nn.Module) -> None:
    """Raise InvalidSetting unless this is a model, of which processes share no weights."""
    if not isinstance(model, nn.Module):
        raise InvalidSetting(f"`model` must be a model, got {type(model).__name__}. Load it with from_pretrained first.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise InvalidSetting("The model is sharded. Add an adapter before, and merge a saved one in one process.")


def _zeros(layer: lora.LoraLayer) -> int:
    """Number of zeros of the parameter that a LoRA adapter changes."""
    weight = layer.get_param() if isinstance(layer, lora.ParamWrapper) else getattr(layer.get_base_layer(), "weight", None)
    return 0 if weight is None else int((weight == 0).sum())


def _mask_layers(model: PeftModel) -> str | None:
    """Make the adapters of pruned layers keep zeros; returns what is wrong, if anything is."""
    masked = 0
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and pruned_masks(module.original_module):
            return f"`modules_to_save` would train a dense copy of {name}, which was pruned. Name it in `target_modules`."
        base = module.get_base_layer() if isinstance(module, lora.LoraLayer) else None
        if base is None or isinstance(base, nn.Embedding) or not (zeros := _zeros(module)):
            continue
        if module.lora_variant:
            return "Masks are held for plain LoRA only, not for DoRA and other variants: leave out their settings."
        if type(module) not in MASKED:
            return f"Masks are held in linear layers and experts, but {name} is a {type(module).__name__}. Do not target it."
        module.__class__, module.zeros = MASKED[type(module)], zeros
        masked += 1
    return None if masked else "None of the targeted layers has zeros to keep. Target pruned layers, or use PEFT alone."


@torch.no_grad()
def _merge_layer(path: str, layer: BaseTunerLayer, before: Mapping[int, Callable[[Tensor], Tensor]]) -> tuple[float, float]:
    """Merge a layer's adapters with its masks; the squared norms of what the masks remove, and of the whole update.

    Args:
        before: By the id of a parameter, the function that returns its pruned weights.
    """
    parameters = dict(layer.get_base_layer().named_parameters())
    pruned = {name: before[id(x)](x) for name, x in parameters.items() if id(x) in before}
    try:
        layer.merge()
    except (RuntimeError, ValueError) as error:
        kind = type(layer).__name__
        raise InvalidSetting(f"The adapter of {path}, a {kind}, cannot be merged ({first_line(error)}).") from error
    outside = total = 0.0
    for name, old in pruned.items():
        weight = layer.get_base_layer().get_parameter(name)
        update = weight.float() - old.float()
        weight.masked_fill_(old == 0, 0)  # after rounding to the dtype
        outside, total = outside + float(update[old == 0].square().sum()), total + float(update.square().sum())
    return outside, total


@contextmanager
def _untied(
    model: nn.Module, layers: Sequence[BaseTunerLayer], before: dict[int, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Context in which modules that share an adapted parameter have one each.

    Afterwards they share it again if they are equal, or are the same up to rounding, since the adapters share their factors.
    """
    adapters = {id(layer.get_base_layer()): layer for layer in layers}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    shared = [found for found in owners.values() if len(found) > 1 and any(id(module) in adapters for module, _ in found)]
    for (module, name), *others in shared:
        for other, its_name in others:
            other._parameters[its_name] = copy = nn.Parameter(module.get_parameter(name).detach().clone(), requires_grad=False)
            if function := before.get(id(module.get_parameter(name))):
                before[id(copy)] = function
    yield
    for (module, name), *others in shared:
        for other, its_name in others:
            pair = [adapters[id(part)].parameters() for part in (module, other) if id(part) in adapters]
            memory = [{factor.untyped_storage().data_ptr() for factor in factors} for factors in pair]
            if (len(memory) == 2 and memory[0] & memory[1]) or torch.equal(
                module.get_parameter(name), other.get_parameter(its_name)
            ):
                other._parameters[its_name] = module.get_parameter(name)


def _copies_without_zeros(model: PeftModel) -> str | None:
    """The first module of `modules_to_save` whose trained copy has lost a zero."""
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            masks = pruned_masks(module.original_module)
            copies = [dict(copy.named_parameters()) for copy in module.modules_to_save.values()]
            if any(bool((copy[weight][mask] != 0).any()) for copy in copies for weight, mask in masks.items()):
                return str(name)
    return None


def _read_adapter(folder: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """The configuration and the weights of a saved adapter, for further training."""
    weights = [folder / name for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)]
    if not (folder / CONFIG_NAME).is_file() or not any(file.is_file() for file in weights):  # PEFT would look on the hub
        raise BadCheckpoint(f"{folder} is not the folder of an adapter: it needs {CONFIG_NAME} and {SAFETENSORS_WEIGHTS_NAME}.")
    try:
        config, saved = PeftConfig.from_pretrained(folder), load_peft_weights(str(folder), device="cpu")
    except (ValueError, TypeError, KeyError, SafetensorError, RuntimeError, UnpicklingError) as error:
        raise BadCheckpoint(f"The adapter in {folder} is damaged ({first_line(error)}). Save it again.") from error
    config.inference_mode, config.base_model_name_or_path = False, None
    return config, saved


def _fill(adapted: PeftModel, saved: Mapping[str, Tensor], name: str) -> None:
    """Set the weights of an adapter, after a check that they are for this model's layers."""
    needed, known = (get_peft_model_state_dict(adapted, save_embedding_layers=whole) for whole in (False, True))
    shapes = [{key: tuple(tensor.shape) for key, tensor in part.items()} for part in (saved, known)]
    if others := [key for key in sorted(saved.keys() | needed.keys()) if shapes[0].get(key) != shapes[1].get(key)]:
        adapted.unload()
        has = [f"has {part[others[0]]}" if others[0] in part else "has nothing" for part in shapes]
        raise InvalidSetting(
            f"{name} is for other layers: for {others[0].removeprefix('base_model.model.')} it {has[0]}, and "
            f"the model {has[1]}. Use the model that it was made for."
        )
    set_peft_model_state_dict(adapted, saved)
