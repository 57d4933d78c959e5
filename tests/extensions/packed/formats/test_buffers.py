"""Buffers of packed layers, tokens and biases that kernels would read wrongly are refused, however they are set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.linear import DenseLinear, PackedLinear

ROWS, COLUMNS = 5, 70
FORMS = (torch.float32, torch.bfloat16, torch.float16, 8, 4, 3)
"""The dtype of the values, or the bits of integers."""


def packed(form: torch.dtype | int) -> Bitmask:
    """A matrix of a form with zeros, an empty row and, at its end, a kept weight."""
    torch.manual_seed(0)
    keep = torch.rand(ROWS, COLUMNS) < 0.5
    keep[1], keep[-1, -1] = False, True
    if isinstance(form, torch.dtype):
        return Bitmask.from_dense((torch.ones(ROWS, COLUMNS) * keep).to(form))
    integers = keep.to(torch.int8)
    return Bitmask.from_quantized(Quantized(integers, torch.ones(ROWS, 2).bfloat16(), IntegerFormat(form, 64)), keep=keep)


def layer_of(form: torch.dtype | int) -> PackedLinear:
    """A layer with such a weight."""
    return PackedLinear.from_bitmask(packed(form), dtype=torch.float32)


def strided(part: Tensor) -> Tensor:
    """The same numbers with every second element of the memory."""
    return torch.stack([part, part], dim=-1)[..., 0]


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of their size, as in a mapped file."""
    memory = torch.empty(tensor.nbytes + 1, dtype=torch.uint8)
    memory[1:] = tensor.flatten().view(torch.uint8)
    return torch.frombuffer(memory.numpy(), dtype=tensor.dtype, offset=1).view(tensor.shape)


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "mask int64": ("mask", lambda part: part.long()),
    "mask strided": ("mask", strided),
    "mask of fewer rows": ("mask", lambda part: part[:-1]),
    "mask on another device": ("mask", lambda part: part.to("meta")),
    "mask of other columns": ("mask", lambda part: part | 255 >> 5),
    "mask behind the last column": ("mask", lambda part: part | torch.tensor([0] * 8 + [64] + [0] * 7, dtype=torch.uint8)),
    "mask behind the last byte": ("mask", lambda part: part | torch.tensor([0] * 15 + [1], dtype=torch.uint8)),
    "rows int32": ("row_starts", lambda part: part.int()),
    "a row far away": ("row_starts", lambda part: part.index_fill(0, torch.tensor(2), 2**40)),
    "rows of the next row": ("row_starts", lambda part: part.index_copy(0, torch.tensor(1), part[2:3] + 1)),
    "values float64": ("values", lambda part: part.double()),
    "values of two dimensions": ("values", lambda part: part[None]),
    "values on another device": ("values", lambda part: part.to("meta")),
    "values short": ("values", lambda part: part[:-1]),
    "values long": ("values", lambda part: torch.cat([part, part])),
    "scales float32": ("scales", lambda part: part.float()),
    "scales of fewer groups": ("scales", lambda part: part[:, :1]),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sound_buffers_are_accepted(form: torch.dtype | int) -> None:
    layer = layer_of(form)
    for change in (copy.deepcopy, lambda x: x.to(torch.bfloat16), lambda x: x.float().requires_grad_(False)):
        assert change(layer)._checked
    assert layer_of(form).to("meta")._checked is False


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_layers_refuse_buffers_that_contradict_each_other(name: str) -> None:
    """However they are set: one at a time, in a module that is moved, or copied. With the right one a layer is of use again."""
    for form in FORMS:
        if "scales" not in name or isinstance(form, int):
            check_buffer(*WRONG[name], layer_of(form))


def check_buffer(part: str, change: Callable[[Tensor], Tensor], layer: PackedLinear) -> None:
    """A layer refuses to be used with a part that is changed."""
    x = torch.ones(1, COLUMNS)
    right, expected = getattr(layer, part), layer(x)
    wrong = change(right)
    setattr(layer, part, wrong)
    for use in (layer, layer.product, torch.nn.Sequential(copy.deepcopy(layer)), lambda _: layer.weight):
        with pytest.raises(InvalidSetting):
            use(x)
    with pytest.raises(InvalidSetting):
        layer(x.clone().requires_grad_())
    assert "in_features=70" in repr(layer)
    layer.register_buffer(part, right)
    assert torch.equal(layer(x), expected)
    layer.register_buffer(part, wrong)
    with pytest.raises(InvalidSetting):
        layer(x)
    setattr(layer, part, right)
    assert torch.equal(layer(x), expected)
    if part != "scales":  # which a module that is moved keeps
        with pytest.raises(InvalidSetting):
            layer._apply(lambda tensor: change(tensor) if tensor is getattr(layer, part) else tensor)(x)


@pytest.mark.parametrize("part", ["values", "row_starts"])
def test_buffers_at_odd_addresses_are_refused(part: str) -> None:
    """A kernel reads whole numbers. Copies of the layer have memory of their own."""
    layer = layer_of(torch.float32)
    setattr(layer, part, misaligned(getattr(layer, part)))
    with pytest.raises(InvalidSetting, match=part):
        layer(torch.ones(1, COLUMNS))
    assert copy.deepcopy(layer)(torch.ones(1, COLUMNS)).shape == (1, ROWS)


@pytest.mark.parametrize("form", [torch.float32, 4], ids=str)
def test_other_dtypes_of_layers_are_refused(form: torch.dtype | int) -> None:
    with pytest.raises(InvalidSetting, match=r"`dtype`.*float64"):
        layer_of(form).double()


@pytest.mark.parametrize("form", [torch.float32, 8, 4], ids=str)
def test_memory_that_was_never_written_is_not_read(form: torch.dtype | int) -> None:
    """`to_empty` leaves what the memory held; weights may be loaded after it."""
    layer, x = layer_of(form), torch.ones(2, COLUMNS)
    state, expected = layer.state_dict(), layer(x)
    for empty in (copy.deepcopy(layer), copy.deepcopy(layer).to("meta")):
        empty.to_empty(device="cpu")
        empty.row_starts.fill_(2**40)
        empty._check_moved()
        with pytest.raises(InvalidSetting, match="`row_starts`"):
            empty(x)
        empty.load_state_dict(state)
        assert torch.equal(empty(x), expected)
    meta = copy.deepcopy(layer).to("meta")
    with pytest.raises(InvalidSetting, match=r"x .* on cpu; .* meta"):
        meta(x)
    meta.load_state_dict(state, assign=True)
    assert torch.equal(meta(x), expected)


@pytest.mark.parametrize("form", [torch.float32, 8, 4], ids=str)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"strict": False, "assign": True}], ids=str)
def test_states_with_buffers_are_refused(form: torch.dtype | int, options: dict[str, bool]) -> None:
    layer = layer_of(form)
    parent, state = torch.nn.ModuleDict({"a": layer}), {f"a.{name}": part for name, part in layer.state_dict().items()}
    for name in layer.running:
        buffer = getattr(layer, name)
        for others in ({}, state):
            with pytest.raises(InvalidSetting, match=rf"a\.{name}"):
                parent.load_state_dict(others | {f"a.{name}": torch.full_like(buffer, 1)}, **options)
        assert getattr(layer, name) is buffer


TOKENS = torch.ones(20, COLUMNS)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(
    ("x", "bias", "named"),
    [
        *((TOKENS.to(dtype), None, f"x is {dtype}") for dtype in (torch.int8, torch.int64, torch.float64, torch.bool)),
        (TOKENS[:, 1:], None, f"x .*69 columns.* {COLUMNS} columns"),
        (TOKENS.to("meta"), None, "x .* on meta"),
        *((TOKENS, torch.ones(size), "bias") for size in (ROWS - 1, ROWS + 1, 1, (1, ROWS))),
        (TOKENS, torch.ones(ROWS, device="meta"), "bias"),
    ],
    ids=str,
)
def test_wrong_tokens_and_biases_are_refused(x: Tensor, bias: Tensor | None, named: str, count: int) -> None:
    for form in FORMS:
        layer = layer_of(form)
        layer.bias = None if bias is None else torch.nn.Parameter(bias)
        with pytest.raises(InvalidSetting, match=named), torch.no_grad():
            layer(x[:count])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tokens", [3, 20])
def test_tokens_and_biases_that_kernels_cannot_read_are_copied(form: torch.dtype | int, tokens: int) -> None:
    """At odd addresses, with strides, and a bias in another dtype. Of 20 tokens, torch's product rounds by their addresses."""
    weight, bias = packed(form), torch.randn(ROWS).bfloat16().float()
    exact = {"rtol": 0.0, "atol": 0.0} if tokens == 3 else {}
    for x in (torch.randn(tokens, COLUMNS), torch.randn(tokens, COLUMNS).bfloat16()):
        expected = kernels.packed_matmul(x, weight, bias.to(x.dtype))
        for same in (misaligned(bias.to(x.dtype)), strided(bias.to(x.dtype)), bias, bias.bfloat16()):
            torch.testing.assert_close(kernels.packed_matmul(misaligned(x), weight, same), expected, **exact)


def test_dense_weights_that_the_kernel_cannot_read_are_multiplied_by_torch() -> None:
    """transformers maps the weight of a head, and a header of any length may be in front of it."""
    weight, x = torch.randn(5, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    head = DenseLinear(8, 5, bias=False)
    with mock.patch.object(kernels, "_call", side_effect=AssertionError("a kernel read it")):
        for same in (misaligned(weight), strided(weight), weight.T.contiguous().T):
            head.weight = torch.nn.Parameter(same, requires_grad=False)
            for result in (kernels.dense_matmul(x, same), head(x)):
                assert torch.equal(result, x @ weight.T)
