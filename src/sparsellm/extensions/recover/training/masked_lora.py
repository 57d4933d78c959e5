"""Layers of PEFT whose LoRA adapters keep the zeros of a pruned weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from sparsellm.errors import InvalidSetting, UnsupportedModel


class SparseLinear(lora.Linear):  # type: ignore[misc]
    """A linear layer with LoRA whose weight keeps its zeros; an `lora.Linear` becomes one by its `__class__`."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The change of the weight by an adapter, of the weight's shape, in float32."""
        _check_whole(self.lora_A[adapter], self.lora_B[adapter], self.get_base_layer().weight)
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
        _check_whole(self.lora_A[adapter], self.lora_B[adapter], parameter)
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


def _check_whole(a: nn.Module, b: nn.Module, weight: Tensor) -> None:
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
