"""A linear layer of a packed model whose weight is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparsellm.checkpoints.packed_files import PackedEntry
from sparsellm.errors import InvalidSetting
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.sparse.bitmask import PADDING, Bitmask
from sparsellm.sparse.encoding import decode, encode
from sparsellm.sparse.kernels import decode as decode_rows
from sparsellm.sparse.kernels import multiply
from sparsellm.sparse.linear import RUNNING, PackedLinear, Product


class QuantizedLinear(PackedLinear):
    """A linear layer whose weight is a `Bitmask`: scales times integers.

    The weight is not trained; gradients pass through the layer. Its scales stay in bfloat16 when the module is moved to another
    dtype. `state_dict` returns the stored form (`sparsellm.sparse.integer_encoding`), and `load_state_dict` accepts it.

    Args:
        in_features: Number of inputs.
        out_features: Number of outputs.
        bias: Whether the layer has a bias.
        format: The format of the integers.
        kept: Bytes of integers for which `values` has room.
        transposed: Whether `weight` is (in, out), as in GPT-2.
        dtype: Dtype of `weight` and of the bias.
        device: Device of the weight.
    """

    scales: Tensor
    running = (*RUNNING, "scales")
    keeps_dtype = ("scales",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: IntegerFormat,
        kept: int = 0,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, transposed=transposed, dtype=dtype, device=device)
        self.format, self._dtype = format, dtype or torch.get_default_dtype()
        kind = torch.int8 if format.bits == 8 else torch.uint8
        self.values = torch.zeros(kept + PADDING, dtype=kind, device=device)
        groups = format.groups(in_features)
        self.register_buffer("scales", torch.zeros(out_features, groups, dtype=torch.bfloat16, device=device))

    @classmethod
    def from_bitmask(
        cls, weight: Bitmask, bias: Tensor | None = None, *, dtype: torch.dtype, transposed: bool = False
    ) -> QuantizedLinear:
        """Build a layer of a weight."""
        outputs, inputs = weight.shape
        module = cls(
            inputs,
            outputs,
            bias is not None,
            format=weight.format or IntegerFormat(8, 0),
            transposed=transposed,
            dtype=dtype,
        )
        module.assign_quantized(weight)
        if bias is not None:
            module.bias = torch.nn.Parameter(bias.detach().clone())
        return module

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `weight`."""
        return self._dtype

    @property
    def quantized(self) -> Bitmask:
        """The weight, (out, in)."""
        self.check()
        return self._unchecked()

    def _unchecked(self) -> Bitmask:
        """Return the weight, of which nothing may be read before it is checked."""
        shape = self.out_features, self.in_features
        return Bitmask(shape, self.mask, self.values, self.row_starts, self.scales, self.format)

    def assign_quantized(self, weight: Bitmask) -> None:
        """Replace the weight by one of the same shape and format."""
        self.mask, self.values, self.row_starts, self.scales = weight.mask, weight.values, weight.row_starts, weight.scales  # type: ignore[assignment]
        self.check()

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded weight in a dtype, (out, in)."""
        return decode_rows(self.quantized, dtype=dtype)

    def product(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out) without the bias."""
        return self._multiply(x, None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        if torch.is_grad_enabled() and x.requires_grad:
            outputs: Tensor = Product.apply(x, self)  # type: ignore[no-untyped-call]
            return outputs if self.bias is None else outputs + self.bias
        return self._multiply(x, self.bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map (..., in) to (..., out) by the kernels."""
        if not self._checked:
            self.check()
        options = {"columns": self.in_features, "group_size": self.format.group_size}
        return multiply(x, self.mask, self.values, self.row_starts, scales=self.scales, bias=bias, **options)

    def extra_repr(self) -> str:
        """Describe the layer."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text = f"{text}, bits={self.format.bits}, group_size={self.format.group_size}"
        if not (size := self.in_features * self.out_features) or not self._checked:
            return text
        return f"{text}, sparsity={1 - self.quantized.kept / size:.2%}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move the module. Another dtype is that of `weight`: the scales keep theirs, in which kernels read them."""
        scales = self.scales
        nn.Module._apply(self, fn, recurse)
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=scales.device)).dtype
        is_empty = scales.is_meta or self.scales.is_meta
        self.scales = self.scales.bfloat16() if is_empty else scales.to(self.scales.device)
        self._check_moved()
        return self

    def packed_entry(self) -> PackedEntry:
        """Return what the metadata of a weight file say of the weight."""
        return PackedEntry.of(self.weight, self.format, transposed=self.transposed)

    def _encode(self) -> dict[str, Tensor]:
        """Return the parts of the stored form."""
        return encode(self.quantized)

    def _decode(self, parts: Mapping[str, Tensor]) -> None:
        """Replace the weight by that of parts of the stored form."""
        if "weight_scales" not in parts and "weight_scales_deflated" not in parts:
            raise InvalidSetting(
                f"The layer has integers of {self.format.bits} bits, and the state has none. Load the state of such a layer."
            )
        shape = self.out_features, self.in_features
        weight = decode(parts, shape, self.dtype, self.format)
        place = self._place(parts["weight"])
        self.assign_quantized(replace(weight, **{name: getattr(weight, name).to(place) for name in self.running}))
