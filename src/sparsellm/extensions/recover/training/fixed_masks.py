"""Fixed masks in the user's own training: zeros that stay while an optimizer, of any kind, updates the other weights.

`sparsellm recover` holds its masks itself, in `MaskedParameters`. Masks here are True where a weight is zero; those are True
where it is kept.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel, TrainerCallback

from sparsellm.checkpoints.comparison import StoredTensors
from sparsellm.errors import InvalidSetting, UnsupportedModel, VerificationFailed
from sparsellm.runtime import collectives

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of a parameter's name that DDP, torch.compile and activation checkpointing add."""

INSERTED = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)(?=\.)")
"""Parts of a parameter's name that PEFT adds: around the weight of a layer with an adapter, and to a trained copy of it."""

INITIAL = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are; PiSSA, OLoRA and others change them."""

DEEPSPEED = (
    "The masks cannot be held under DeepSpeed, which keeps the weights in copies of its own. Train with DDP or with FSDP, "
    "`fsdp=True`."
)
"""Message for every kind of training under DeepSpeed."""


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of a model by name, without embeddings and output heads tied to them: their zeros are padding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {_unwrapped(name): parameter for name, parameter in model.named_parameters() if id(parameter) not in embeddings}
    return {name: parameter for name, parameter in found.items() if parameter.ndim >= 2 and parameter.is_floating_point()}


def pruned_masks(model: nn.Module) -> dict[str, Tensor]:
    """Find the pruned weights of a model: the zeros of its `matrices`.

    A matrix of zeros alone, such as B of LoRA before training, is not pruned.

    Returns:
        By the name of the parameter, a mask of its shape, True where a weight is pruned; only parameters with zeros.
    """
    found = matrices(model).items()
    return {name: mask for name, weight in found if 0 < _count(mask := weight.detach() == 0) < mask.numel()}


class StoredMasks:
    """The zeros of a model's matrices as its folder has them, from which it was loaded: weights may have changed since then.

    A model that was built or pruned in memory has no folder, and its zeros are what they are. `sparsellm.prune` empties its
    `name_or_path`. Cost: `lost` reads the folder once, a tensor at a time.

    Raises:
        InvalidSetting: There is no folder, and an adapter may have changed the weights as it was added.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = matrices(model)
        self._places: dict[int, tuple[StoredTensors, str]] = {}
        self._folders: list[str] = []
        seen: set[int] = set()
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and id(part) not in seen:
                seen |= {id(module) for module in part.modules()}
                self._locate(part)
        configs = [] if self._folders else [vars(module).get("peft_config") for module in model.modules()]
        for config in [config for found in configs if isinstance(found, Mapping) for config in found.values()]:
            if (init := getattr(config, "init_lora_weights", True)) not in INITIAL:
                raise InvalidSetting(
                    f"`init_lora_weights={init!r}` changes the weights as the adapter is added, and no folder says which of "
                    "them were pruned. Save the pruned model, load it, and add the adapter to that."
                )

    def _locate(self, model: PreTrainedModel) -> None:
        """Find the tensors of the model's folder."""
        if stored := StoredTensors.of_source(model):
            self._folders.append(str(model.name_or_path))
            keys = {_unwrapped(stored.one_name(key)): key for key in stored.files}
            for name, parameter in model.named_parameters():
                if key := keys.get(_unwrapped(stored.one_name(INSERTED.sub("", name)))):
                    self._places[id(parameter)] = stored, key

    def read(self, parameter: Tensor) -> Tensor:
        """The stored tensor of a parameter, on its device."""
        stored, key = self._places[id(parameter)]
        return stored.read(key, parameter.dtype).to(parameter.device)

    @torch.no_grad()
    def lost(self) -> dict[str, int]:
        """How many zeros of the folder are other numbers in the model, by the name of the parameter, where there are any.

        Of a parameter with another shape, they are all lost.
        """
        lost: dict[str, int] = {}
        for name, parameter in self.parameters.items():
            if id(parameter) not in self._places:
                continue
            zeros = self.read(parameter) == 0
            if not 0 < _count(zeros) < zeros.numel():
                continue
            if zeros.shape == parameter.shape:
                zeros = _sharded_like(zeros, parameter) & (parameter != 0)
            if count := _count(zeros):
                lost[name] = count
        return lost

    def check(self, lost: Mapping[str, int]) -> None:
        """Raise InvalidSetting if zeros are lost."""
        if lost:
            worst = max(lost, key=lost.__getitem__)
            raise InvalidSetting(
                f"The model has lost {sum(lost.values())} zeros of the folder that it was loaded from, {self._folders[0]}, "
                f"{lost[worst]} of them in {worst}. Load it again, and let nothing change its weights before. If it was pruned "
                'since then, say that it is another model: model.name_or_path = "".'
            )


class FixedMasks:
    """The masks of a model's pruned weights, and the hooks that hold them during training.

    Gradients of pruned weights are set to zero before they are accumulated and reduced, so that the norm for gradient clipping
    and the optimizer's moments are those of the remaining weights. `apply` then undoes what an optimizer writes nevertheless,
    such as momentum from before, or an orthogonalised update.

    Memory: one byte for each weight of the matrices that have zeros.

    Args:
        model: The pruned model, before or after DDP, FSDP2 or torch.compile wrap it.

    Raises:
        InvalidSetting: The model has no zeros, or has lost some of its folder's, or has other zeros in another process, or an
            adapter that adds to pruned weights.
        UnsupportedModel: The parameters are quantized or packed, or held by DeepSpeed or by version 1 of FSDP.
    """

    def __init__(self, model: nn.Module) -> None:
        check_supported(model)
        self._masks = pruned_masks(model)
        self._held: dict[str, tuple[nn.Parameter, Tensor]] = {}  # with the mask of this process's shard
        self._hooks: list[Any] = []
        counts = {name: _count(mask) for name, mask in self._masks.items()}
        if any(other != counts for other in collectives.all_gather_object(counts)):
            raise InvalidSetting(
                "The processes hold models with different zeros, or some hold none. Load the pruned model in every process: "
                "with FSDP, set `cpu_ram_efficient_loading=False`."
            )
        stored = StoredMasks(model)
        stored.check(stored.lost())
        if not self._masks:
            raise InvalidSetting("The model has no zeros to keep: none of its layers was pruned. Prune the model first.")
        _check_adapters(model, self._masks)

    def attach(self, model: nn.Module) -> None:
        """Begin to hold the masks in a model that training may have wrapped or sharded since they were found."""
        self.detach()
        check_supported(model)
        parameters = {_unwrapped(name): parameter for name, parameter in model.named_parameters()}
        if missing := sorted(self._masks.keys() - parameters.keys()):
            raise InvalidSetting(f"The trained model is not the one that the masks are of: it has no parameter {missing[0]}.")
        for name, mask in self._masks.items():
            parameter = parameters[name]
            local = _local(_sharded_like(mask, parameter)).to(parameter.device)
            self._held[name] = parameter, local
            if parameter.requires_grad:
                self._hooks.append(_hold_gradient(parameter, local))

    @torch.no_grad()
    def apply(self) -> None:
        """Set the pruned weights to zero; to be called after each step of the optimizer."""
        for parameter, mask in self._held.values():
            weight = _local(parameter.detach())  # anew each time: optimizers and casts may give a parameter other memory
            weight.masked_fill_(mask.to(weight.device), 0)

    def check(self) -> None:
        """Check that every pruned weight is zero, in all processes.

        Raises:
            VerificationFailed: A pruned weight is not zero.
        """
        lost: dict[str, int] = {}
        for name, (parameter, mask) in self._held.items():
            weight = _local(parameter.detach())
            if count := collectives.all_reduce_count(int((weight[mask.to(weight.device)] != 0).sum()), weight.device):
                lost[name] = count
        if lost:
            worst = max(lost, key=lost.__getitem__)
            raise VerificationFailed(
                f"{sum(lost.values())} pruned weights are not zero after training, {lost[worst]} of them in {worst}. Something "
                "besides the optimizer changed them: apply the masks after it, too.",
                tuple(f"{name}: {count} pruned weights are not zero" for name, count in lost.items()),
            )

    def detach(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()
        self._held.clear()


@contextmanager
def fixed_masks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[FixedMasks]:
    """Keep a model's zeros within the context, while any training loop updates its weights.

    The zeros are those of the model's matrices as the context begins. They are restored after each step of the optimizer, and
    checked at the end. With several optimizers, nest the contexts.

    >>> with sparsellm.fixed_masks(model, optimizer):
    ...     for batch in batches:
    ...         model(**batch).loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()

    Args:
        model: A pruned model, which DDP, FSDP2 or torch.compile may have wrapped.
        optimizer: The optimizer of its parameters, possibly prepared by accelerate.

    Yields:
        The masks, whose `apply` restores the zeros at any other time.

    Raises:
        InvalidSetting: The model has no zeros, or has lost some of its folder's, or an adapter that adds to pruned weights.
        UnsupportedModel: The parameters are quantized or packed, or held by DeepSpeed or by version 1 of FSDP.
        VerificationFailed: A zero was lost.
    """
    masks = FixedMasks(model)
    masks.attach(model)
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # within accelerate's AcceleratedOptimizer
    hook = inner.register_step_post_hook(lambda *_: masks.apply())
    try:
        yield masks
        masks.check()
    finally:
        hook.remove()
        masks.detach()


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps the zeros of a pruned model while transformers' `Trainer`, or TRL's SFT or DPO trainer, trains it.

    The zeros are those of the model that the trainer is created with, so a resumed run keeps the same ones. They hold with any
    optimizer, weight decay, gradient accumulation and clipping, in one process, under DDP and under FSDP2. They are checked
    at the end of the training.

    >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[sparsellm.SparsityCallback()])

    Memory: one byte for each weight of the matrices that have zeros.

    Raises:
        InvalidSetting: The model has no zeros, or has lost some of its folder's, or an adapter that adds to pruned weights.
        UnsupportedModel: The model is quantized or packed, or the training uses DeepSpeed or version 1 of FSDP.
        VerificationFailed: A zero was lost.
    """

    def __init__(self) -> None:
        self._masks: FixedMasks | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Find the zeros, before a checkpoint is loaded or the model is wrapped."""
        if getattr(args, "deepspeed_plugin", None) is not None:
            raise UnsupportedModel(DEEPSPEED)
        if isinstance(model := objects.get("model"), nn.Module):
            self._masks = FixedMasks(model)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Begin to hold the zeros."""
        model: PreTrainedModel = objects["model"]
        self._masks = self._masks or FixedMasks(model)  # the callback was added after the trainer was created
        self._masks.attach(model)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Restore the zeros after a step."""
        if self._masks is not None:
            self._masks.apply()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Check the zeros."""
        if self._masks is not None:
            self._masks.check()
            self._masks.detach()


def check_supported(model: nn.Module) -> None:
    """Refuse models whose parameters are not the tensors that an optimizer updates, or not in a floating-point dtype."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UnsupportedModel(DEEPSPEED)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedModel(
            "The masks cannot be held under version 1 of FSDP, which concatenates the weights. Use version 2, "
            "which is the default of `fsdp` in training arguments, or torch's fully_shard."
        )
    sized = ((name, module) for name, module in model.named_modules() if isinstance(getattr(module, "in_features", None), int))
    layers = [name for name, module in sized if not any(map(_is_plain, module.parameters()))]
    if layers or any(getattr(module, "is_quantized", False) is True for module in model.modules()):
        raise UnsupportedModel(
            f"Masks cannot be held in quantized or packed weights{f', such as those of {layers[0]}' if layers else ''}. "
            "Load the pruned model in a floating-point dtype; `sparsellm unpack` turns a packed model back."
        )


def _is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of floating-point numbers, and not a tensor class that stores them otherwise."""
    plain = isinstance(parameter, DTensor) or not is_traceable_wrapper_subclass(parameter.data)
    return plain and parameter.is_floating_point() and parameter.ndim >= 2


def _check_adapters(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Refuse layers of PEFT whose adapters add to pruned weights: the weights below stay, but merging would fill their zeros.

    Whatever the kind of the adapter: merged into a copy of the layer it must keep the zeros.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # imported by whoever has added an adapter
    for path, layer in model.named_modules():
        if tuners is None or not isinstance(layer, tuners.BaseTunerLayer):
            continue
        prefix = f"{_unwrapped(path)}." if path else ""
        inside = [name.removeprefix(prefix) for name in masks if name.startswith(prefix)]
        pruned = [name for name in inside if name.partition(".")[0] not in layer.adapter_layer_names]
        if pruned and not _keeps_zeros(layer, pruned):
            raise InvalidSetting(
                f"The adapter of {_unwrapped(path)} adds to pruned weights, whose zeros would be lost when it is merged "
                f"({type(layer).__name__}). Add LoRA with sparse_lora, whose training needs no other masks."
            )


@torch.no_grad()
def _keeps_zeros(layer: Any, pruned: list[str]) -> bool:
    """Whether a layer's adapters, with random factors, change its pruned weights when they are merged, but no zeros."""
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    try:
        merged = copy.deepcopy(layer)
        for path, module in merged.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                    if f"{path}.{name}" not in pruned and whole.is_floating_point():
                        whole = torch.randn(whole.shape, generator=generator).to(whole)
                    module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        before = {name: merged.get_parameter(name).clone() for name in pruned}
        merged.merge(adapter_names=sorted(merged._get_available_adapters()))
        after = {name: merged.get_parameter(name) for name in pruned}
    except Exception:  # a kind that cannot be copied or merged is not known to keep them
        return False
    kept = all(bool((after[name][before[name] == 0] == 0).all()) for name in pruned)
    return kept and any(not torch.equal(after[name], before[name]) for name in pruned)


def _unwrapped(name: str) -> str:
    """The name of a parameter without what wrappers add."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def _local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, of the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _count(mask: Tensor) -> int:
    """Number of True entries."""
    total = mask.sum()
    return int(total.full_tensor() if isinstance(total, DTensor) else total)


def _sharded_like(mask: Tensor, parameter: Tensor) -> Tensor:
    """A mask of the whole parameter, sharded as the parameter is."""
    if not isinstance(parameter, DTensor) or isinstance(mask, DTensor):
        return mask
    whole = mask.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _hold_gradient(parameter: Tensor, mask: Tensor) -> Any:
    """Set the gradient of pruned weights to zero, from now on; returns the hook's handle.

    A hook of the parameter runs before DDP reduces the gradient. The parameters that FSDP2 shards get theirs after that.
    """
    if isinstance(parameter, DTensor):

        def fill(sharded: Tensor) -> None:
            if sharded.grad is not None:
                _local(sharded.grad).masked_fill_(mask, 0)

        return parameter.register_post_accumulate_grad_hook(fill)
    return parameter.register_hook(lambda gradient: gradient.masked_fill(mask, 0))
