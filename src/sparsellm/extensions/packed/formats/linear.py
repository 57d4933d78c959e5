"""Linear layers of packed models: one that computes with a packed weight, and a dense one that uses the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparsellm.errors import InvalidSetting, dtype_name
from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat
from sparsellm.extensions.packed.formats import csr_triton
from sparsellm.extensions.packed.formats.bitmask import DTYPES, VALUES_PADDING, Bitmask, integer_dtype
from sparsellm.extensions.packed.formats.encoding import PARTS, decode_parts, encode
from sparsellm.extensions.packed.formats.kernels import DENSE_TOKENS, decode_rows, dense_matmul, is_faster_dense, packed_matmul
from sparsellm.extensions.packed.packed_files import PackedEntry

RUNNING = ("mask", "values", "row_starts", "scales")
"""Names of the buffers of a `PackedLinear`: the parts of a `Bitmask`. Without integers there are no `scales`."""

_compressed: WeakKeyDictionary[nn.Module, tuple[object, csr_triton.CompressedRows]] = WeakKeyDictionary()
"""Weights of layers on a GPU with what they were made from; outside of the layers, so that copies have none."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is a `Bitmask`. The weight is not trained; gradients pass through the layer.

    The buffers have the running form, which follows the module to a device and to a dtype; integers and their scales keep
    theirs. `state_dict` returns the stored form (see `encoding`), and `load_state_dict` accepts it, or without
    integers a dense weight, but no buffers. Kernels find values by the numbers in the buffers: whatever sets one, these are
    checked before the next product. Numbers that are written into a buffer in place, or set by `torch.func.functional_call`,
    are not checked.

    Args:
        in_features: Number of inputs.
        out_features: Number of outputs.
        bias: Whether the layer has a bias.
        kept: Number of elements for which `values` has room.
        format: The format of integers; None for floating-point values.
        transposed: Whether `weight` is (in, out), as in GPT-2.
        dtype: Dtype of `weight` and of the bias.
        device: Device of the weight.
    """

    mask: Tensor
    values: Tensor
    row_starts: Tensor
    scales: Tensor | None
    keeps_dtype = ("scales",)
    _checked = False
    """Whether the buffers passed `check` since one of them was set."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        kept: int = 0,
        format: IntegerFormat | None = None,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.transposed = in_features, out_features, transposed
        self.format, self._dtype = format, dtype or torch.get_default_dtype()
        kind = self._dtype if format is None else integer_dtype(format)
        width = -(-in_features // MASK_WORD) * MASK_WORD // 8
        self.register_buffer("mask", torch.zeros(out_features, width, dtype=torch.uint8, device=device))
        self.register_buffer("values", torch.zeros(kept + VALUES_PADDING, dtype=kind, device=device))
        self.register_buffer("row_starts", torch.zeros(out_features + 1, dtype=torch.int64, device=device))
        scales = None
        if format is not None:
            scales = torch.zeros(out_features, format.groups(in_features), dtype=torch.bfloat16, device=device)
        self.register_buffer("scales", scales)
        vector = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if vector is None else nn.Parameter(vector)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> PackedLinear:
        """Pack a weight of (out, in); or (in, out), if `transposed`."""
        return cls.from_bitmask(Bitmask.from_dense(weight.T if transposed else weight), bias, transposed=transposed)

    @classmethod
    def from_bitmask(
        cls, weight: Bitmask, bias: Tensor | None = None, *, dtype: torch.dtype | None = None, transposed: bool = False
    ) -> PackedLinear:
        """Build a layer of an (out, in) matrix, whose integers become a `weight` of a dtype; other values have their own."""
        outputs, inputs = weight.shape
        dtype = weight.values.dtype if weight.format is None else dtype
        module = cls(inputs, outputs, bias is not None, format=weight.format, transposed=transposed, dtype=dtype)
        module.assign(weight)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().clone())
        return module

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `weight`."""
        return self.values.dtype if self.format is None else self._dtype

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the buffers of the weight."""
        return RUNNING if self.format is not None else RUNNING[:-1]

    @property
    def bitmask(self) -> Bitmask:
        """The weight, (out, in)."""
        self.check()
        return self._unchecked()

    @property
    def weight(self) -> Tensor:
        """The weight, decoded at each access: (out, in); or (in, out), if `transposed`."""
        weight = self.matrix(self.dtype)
        return weight.T.contiguous() if self.transposed else weight

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded weight in a dtype, (out, in)."""
        return decode_rows(self.bitmask, dtype=dtype).to(dtype)

    def check(self) -> None:
        """Check the buffers, if one was set since this was done. Raises InvalidSetting if they are none of a weight."""
        if not self._checked and not all(getattr(self, name).is_meta for name in self.running):
            self._unchecked().check()
            self._checked = True

    def _unchecked(self) -> Bitmask:
        """Return the weight, of which nothing may be read before it is checked."""
        shape = self.out_features, self.in_features
        return Bitmask(shape, self.mask, self.values, self.row_starts, self.scales, self.format)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Buffers are checked before they are read."""
        super().__setattr__(name, value)
        if name in RUNNING:
            self._checked = False

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Set a buffer. It is checked before it is read."""
        super().register_buffer(name, tensor, persistent)
        self._checked = False

    def assign(self, weight: Bitmask) -> None:
        """Replace the weight by one of the same shape and format."""
        self.mask, self.values, self.row_starts, self.scales = weight.mask, weight.values, weight.row_starts, weight.scales
        self.check()

    def to_dense(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the layer as an `nn.Linear`, or as transformers' `Conv1D` if `transposed`, in its own dtype by default."""
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            dense: nn.Module = nn.Linear(self.in_features, self.out_features, self.bias is not None)
            if self.transposed:
                dense = Conv1D(self.out_features, self.in_features)
        dense.register_parameter("weight", nn.Parameter(self.weight.to(dtype)))
        dense.register_parameter("bias", self.bias)
        return dense

    def weight_formats(self) -> dict[str, IntegerFormat]:
        """The format of the integers of the weight, if it has any, as `sparsellm.checkpoints.side_files.HoldsFormats`."""
        return {"weight": self.format} if self.format else {}

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        if torch.is_grad_enabled() and x.requires_grad:
            outputs: Tensor = Product.apply(x, self)  # type: ignore[no-untyped-call]
            return outputs if self.bias is None else outputs + self.bias
        is_plain = x.is_cuda and x.dtype is self.values.dtype and not torch.compiler.is_compiling()
        if is_plain and csr_triton.is_available(x.device):
            return self._multiply_compressed(x)
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map (..., in) to (..., out) by the kernels, with a bias if one is given."""
        if not self._checked:
            self.check()
        return packed_matmul(x, self._unchecked(), bias)

    def _multiply_compressed(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out) with the weight in the form for its GPU, made at the first call after it changed."""
        key = self.values.data_ptr(), self.values.dtype
        made = _compressed.get(self)
        if made is None or made[0] != key:
            made = _compressed[self] = key, csr_triton.CompressedRows.from_bitmask(self.bitmask)
        outputs = csr_triton.csr_matmul(x.reshape(-1, self.in_features), made[1]).view(*x.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias

    def extra_repr(self) -> str:
        """Describe the layer."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += f", bits={self.format.bits}, group_size={self.format.group_size}" if self.format else ""
        if not (size := self.in_features * self.out_features) or not self._checked:
            return text
        return f"{text}, sparsity={1 - self.bitmask.kept / size:.2%}"

    def packed_entry(self) -> PackedEntry:
        """Return what the metadata of a weight file say of the weight."""
        return PackedEntry.of(self.weight, self.format, transposed=self.transposed and self.format is not None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Move the module. Another dtype is that of `weight`: scales keep theirs, in which kernels read them.

        What `to_empty` leaves in the buffers is refused at the next product.

        Raises:
            InvalidSetting: The dtype is none of float32, bfloat16 and float16.
        """
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if scales is not None and self.scales is not None:
            self._dtype = fn(torch.empty(0, dtype=self._dtype, device=scales.device)).dtype
            is_empty = scales.is_meta or self.scales.is_meta
            self.scales = self.scales.bfloat16() if is_empty else scales.to(self.scales.device)
        if self.dtype not in DTYPES:
            raise InvalidSetting(f"`dtype` got {dtype_name(self.dtype)}; packed layers run in float32, bfloat16 or float16.")
        self._check_moved()
        return self

    def _check_moved(self) -> None:
        """Check the buffers now rather than within `torch.compile`. If they are wrong, a weight may yet be loaded."""
        self._checked = False
        with suppress(InvalidSetting):
            self.check()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write the bias and the parts of the stored form; on the meta device, those of the running form."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.values.is_meta:
            for name in self.running:
                del destination[prefix + name]
            parts = encode(self.weight if self.format is None else self.bitmask)
            destination |= {prefix + name: part for name, part in parts.items()}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Read the bias, and the stored form or a dense weight. The running form is refused."""
        if named := [prefix + name for name in self.running if prefix + name in state_dict]:
            raise InvalidSetting(
                f"The state has {named[0]}, a buffer that a packed layer makes of its weight. Remove it, and give the weight "
                "as `state_dict` of a packed layer does, or dense."
            )
        parts = {name: state_dict[prefix + name] for name in PARTS if prefix + name in state_dict}
        if "weight" in parts:
            self._decode(parts)
            state_dict = {prefix + name: getattr(self, name) for name in self.running} | {
                name: tensor for name, tensor in state_dict.items() if name.removeprefix(prefix) not in parts
            }
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._check_moved()

    def _decode(self, parts: Mapping[str, Tensor]) -> None:
        """Replace the weight by that of parts of the stored form, or of a dense `weight`."""
        place = parts["weight"].device if self.values.is_meta else self.values.device
        if self.format is not None:
            if "weight_scales" not in parts and "weight_scales_deflated" not in parts:
                raise InvalidSetting(
                    f"The layer has integers of {self.format.bits} bits and the state has none. Load the state of such a layer."
                )
            weight = decode_parts(parts, (self.out_features, self.in_features), self.dtype, self.format)
            self.assign(replace(weight, **{name: getattr(weight, name).to(place) for name in self.running}))
            return
        shape = (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)
        dense = parts["weight"]
        if dense.shape != shape:
            dense = decode_parts(parts, shape, self.dtype).to_dense()
        self.assign(Bitmask.from_dense((dense.T if self.transposed else dense).to(place, self.dtype)))


class Product(torch.autograd.Function):
    """The product of inputs and a packed weight, which is decoded for the gradient of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        """Map (..., in) to (..., out)."""
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Map the gradient of the outputs to that of the inputs."""
        return gradient @ ctx.layer.matrix(gradient.dtype), None


class DenseLinear(nn.Linear):
    """A dense linear layer of a packed model, such as its head.

    Few bfloat16 tokens on a CPU are multiplied by this package's kernel where it reads the weight faster than PyTorch.
    An `nn.Linear` becomes one by `layer.__class__ = DenseLinear`.

    Attributes:
        by_kernel: Whether the kernel multiplies few tokens also where PyTorch is faster, for comparisons.
    """

    by_kernel = False

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        trained = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        is_bfloat16 = x.dtype is self.weight.dtype is torch.bfloat16
        tokens = x.numel() // max(self.in_features, 1)
        is_usual = trained or not is_bfloat16 or not x.is_cpu or torch.compiler.is_compiling()
        if is_usual or not 0 < tokens <= DENSE_TOKENS[-1] or not (self.by_kernel or is_faster_dense(tokens)):
            return super().forward(x)
        product = dense_matmul(x.reshape(-1, self.in_features), self.weight).view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias
