"""Parts of a packed matrix that kernels would read wrongly are refused: by every function of the kernels, and by layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.formats import kernels
from sparsellm.formats.bitmask import VALUES_PADDING, Bitmask
from sparsellm.formats.csr_triton import CompressedRows
from sparsellm.formats.linear import DenseLinear, PackedLinear
from sparsellm.formats.running_form import check_layout, check_numbers
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.quantization import Quantized

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


def layer_of(weight: Bitmask) -> PackedLinear:
    """A layer with a weight."""
    return PackedLinear.from_bitmask(weight, dtype=torch.float32)


def strided(part: Tensor) -> Tensor:
    """The same numbers with every second element of the memory."""
    return torch.stack([part, part], dim=-1)[..., 0]


LAYOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "mask int64": ("mask", lambda part: part.long()),
    "mask bool": ("mask", lambda part: part.bool()),
    "mask strided": ("mask", strided),
    "mask of fewer rows": ("mask", lambda part: part[:-1]),
    "mask of fewer columns": ("mask", lambda part: part[:, :8].contiguous()),
    "mask flat": ("mask", lambda part: part.flatten()),
    "mask on another device": ("mask", lambda part: part.to("meta")),
    "rows int32": ("row_starts", lambda part: part.int()),
    "rows float": ("row_starts", lambda part: part.double()),
    "rows strided": ("row_starts", strided),
    "rows short": ("row_starts", lambda part: part[:-1]),
    "rows on another device": ("row_starts", lambda part: part.to("meta")),
    "values int64": ("values", lambda part: part.long()),
    "values float64": ("values", lambda part: part.double()),
    "values strided": ("values", strided),
    "values without padding": ("values", lambda part: part[: VALUES_PADDING - 1]),
    "values of two dimensions": ("values", lambda part: part[None]),
}
NUMBERS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "rows far away": ("row_starts", lambda part: part + 2**40),
    "a row far away": ("row_starts", lambda part: part.index_fill(0, torch.tensor(2), 2**40)),
    "rows negative": ("row_starts", lambda part: part - 1),
    "rows of the next row": ("row_starts", lambda part: part.index_copy(0, torch.tensor(1), part[2:3] + 1)),
    "another mask": ("mask", lambda part: part | 255 >> 5),
    "mask behind the last column": ("mask", lambda part: part | torch.tensor([0] * 8 + [64] + [0] * 7, dtype=torch.uint8)),
    "mask behind the last byte": ("mask", lambda part: part | torch.tensor([0] * 15 + [1], dtype=torch.uint8)),
    "values short": ("values", lambda part: part[:-1]),
    "values long": ("values", lambda part: torch.cat([part, part])),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_sound_matrix_is_accepted(form: torch.dtype | int) -> None:
    weight = packed(form)
    check_numbers(weight)
    layer = layer_of(weight)
    for change in (copy.deepcopy, lambda x: x.to(torch.bfloat16), lambda x: x.float().requires_grad_(False)):
        assert change(layer)._checked
    assert layer_of(weight).to("meta")._checked is False


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wrong_layouts_are_refused_by_every_function(form: torch.dtype | int) -> None:
    weight = packed(form)
    for part, change in LAYOUTS.values():
        wrong = replace(weight, **{part: change(getattr(weight, part))})
        with pytest.raises(InvalidSetting, match=r"of a packed matrix is .* is needed"):
            check_layout(wrong)
        for tokens in (1, 20):
            with pytest.raises(InvalidSetting):
                kernels.packed_matmul(torch.ones(tokens, COLUMNS), wrong)
        with pytest.raises(InvalidSetting):
            kernels.decode_rows(wrong)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["values short", "values long", "rows far away"])
def test_values_of_another_length_are_refused_by_every_function(name: str, form: torch.dtype | int) -> None:
    part, change = NUMBERS[name]
    weight = packed(form)
    wrong = replace(weight, **{part: change(getattr(weight, part))})
    for tokens in (1, 20):
        with pytest.raises(
            InvalidSetting, match=r"`values` of a packed matrix has .* elements, where its `row_starts` calls for"
        ):
            kernels.packed_matmul(torch.ones(tokens, COLUMNS), wrong)
    with pytest.raises(InvalidSetting, match="`values` of a packed matrix has"):
        kernels.decode_rows(wrong)


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of their size, as in a mapped file."""
    memory = torch.empty(tensor.nbytes + 1, dtype=torch.uint8)
    memory[1:] = tensor.flatten().view(torch.uint8)
    return torch.frombuffer(memory.numpy(), dtype=tensor.dtype, offset=1).view(tensor.shape)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_numbers_at_odd_addresses_are_copied_or_refused(form: torch.dtype | int) -> None:
    """Tokens and biases are copied; the parts of a matrix and outputs, which are large, are refused."""
    weight = packed(form)
    x, bias = torch.randn(3, COLUMNS), torch.randn(ROWS)
    for tokens in (x, x.bfloat16()):
        expected = kernels.packed_matmul(tokens, weight, bias.to(tokens.dtype))
        got = kernels.packed_matmul(misaligned(tokens), weight, misaligned(bias.to(tokens.dtype)))
        assert torch.equal(got, expected)
    for part in ("row_starts", "values", "scales"):
        if getattr(weight, part, None) is None or getattr(weight, part).itemsize == 1:
            continue
        wrong = replace(weight, **{part: misaligned(getattr(weight, part))})
        for call in (lambda wrong=wrong: kernels.packed_matmul(x, wrong), lambda wrong=wrong: kernels.decode_rows(wrong)):
            with pytest.raises(
                InvalidSetting, match=rf"`{part}` of a packed matrix is .* at an address that is no multiple of"
            ):
                call()
    with pytest.raises(InvalidSetting, match=r"`out` is .* at an address that is no multiple of"):
        kernels.decode_rows(weight, out=misaligned(torch.zeros_like(kernels.decode_rows(weight))))


def test_dense_weights_at_odd_addresses_are_multiplied_by_torch() -> None:
    """transformers maps the weight of a head, and a header of any length may be in front of it."""
    weight, x = torch.randn(5, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    head = DenseLinear(8, 5, bias=False)
    head.weight = torch.nn.Parameter(misaligned(weight), requires_grad=False)
    with mock.patch.object(kernels, "_call", side_effect=AssertionError("a kernel read it")):
        for result in (kernels.dense_matmul(x, misaligned(weight)), head(x)):
            assert torch.equal(result, x @ weight.T)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float64, torch.bool], ids=str)
def test_tokens_of_other_dtypes_are_refused(dtype: torch.dtype, tokens: int) -> None:
    """Those of a byte are dtypes of values, and were read as though each had four bytes."""
    x = torch.ones(tokens, COLUMNS, dtype=dtype)
    for form in FORMS:
        weight = packed(form)
        for call in (lambda weight=weight: kernels.packed_matmul(x, weight), lambda weight=weight: layer_of(weight)(x)):
            with pytest.raises(InvalidSetting, match="float32, bfloat16 or float16 is needed"):
                call()
    with pytest.raises(InvalidSetting, match="float32, bfloat16 or float16 is needed"):
        kernels.dense_matmul(x, torch.ones(3, COLUMNS).bfloat16())


@pytest.mark.parametrize("name", [*LAYOUTS, *NUMBERS])
@pytest.mark.filterwarnings("ignore")
def test_layers_refuse_buffers_that_contradict_each_other(name: str) -> None:
    """However they are set: one at a time, in a module that is moved, or copied. With the right one a layer is of use again."""
    for form in FORMS:
        check_buffer(*(LAYOUTS | NUMBERS)[name], layer_of(packed(form)))


def check_buffer(part: str, change: Callable[[Tensor], Tensor], layer: PackedLinear) -> None:
    """A layer refuses to be used with a part that is changed."""
    x = torch.ones(1, COLUMNS)
    right, expected = getattr(layer, part), layer(x)
    wrong = change(right)
    setattr(layer, part, wrong)
    for use in (layer, layer.product, torch.nn.Sequential(copy.deepcopy(layer))):
        with pytest.raises(InvalidSetting):
            use(x)
    with pytest.raises(InvalidSetting):
        layer(x.clone().requires_grad_())
    with pytest.raises(InvalidSetting):
        _ = layer.weight
    assert "in_features=70" in repr(layer)
    layer.register_buffer(part, right)
    assert torch.equal(layer(x), expected)
    layer.register_buffer(part, wrong)
    with pytest.raises(InvalidSetting):
        layer(x)
    setattr(layer, part, right)
    assert torch.equal(layer(x), expected)
    layer._apply(lambda tensor: change(tensor) if tensor is getattr(layer, part) else tensor)
    with pytest.raises(InvalidSetting):
        layer(x)


@pytest.mark.parametrize("form", [torch.float32, 8, 4], ids=str)
def test_memory_that_was_never_written_is_not_read(form: torch.dtype | int) -> None:
    """`to_empty` leaves what the memory held; weights may be loaded after it."""
    layer, x = layer_of(packed(form)), torch.ones(2, COLUMNS)
    state, expected = layer.state_dict(), layer(x)
    for empty in (copy.deepcopy(layer), copy.deepcopy(layer).to("meta")):
        empty.to_empty(device="cpu")
        empty.row_starts.fill_(2**40)
        empty._check_moved()
        with pytest.raises(InvalidSetting, match="it is damaged"):
            empty(x)
        empty.load_state_dict(state)
        assert torch.equal(empty(x), expected)
    meta = copy.deepcopy(layer).to("meta")
    with pytest.raises(InvalidSetting, match="x is on cpu, and the packed matrix on meta"):
        meta(x)
    meta.load_state_dict(state, assign=True)
    assert torch.equal(meta(x), expected)


@pytest.mark.parametrize("form", [torch.float32, 8, 4], ids=str)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"strict": False, "assign": True}], ids=str)
def test_states_with_buffers_are_refused(form: torch.dtype | int, options: dict[str, bool]) -> None:
    layer = layer_of(packed(form))
    parent, state = torch.nn.ModuleDict({"a": layer}), {f"a.{name}": part for name, part in layer.state_dict().items()}
    for name in layer.running:
        buffer = getattr(layer, name)
        for others in ({}, state):
            with pytest.raises(InvalidSetting, match=rf"The state has a\.{name}, a buffer that a packed layer makes"):
                parent.load_state_dict(others | {f"a.{name}": torch.full_like(buffer, 1)}, **options)
        assert getattr(layer, name) is buffer


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_biases_tokens_and_outputs_of_other_shapes_are_refused(form: torch.dtype | int, tokens: int) -> None:
    weight = packed(form)
    x = torch.ones(tokens, COLUMNS)
    biases = [torch.ones(ROWS - 1), torch.ones(ROWS + 1), torch.ones(1), torch.ones(1, ROWS), torch.ones(ROWS, device="meta")]
    for bias in biases:
        with pytest.raises(InvalidSetting, match="The bias has the shape"):
            kernels.packed_matmul(x, weight, bias)
    wide = torch.arange(2 * ROWS).float()
    assert torch.equal(kernels.packed_matmul(x, weight, wide[::2]), kernels.packed_matmul(x, weight, wide[::2].clone()))
    with pytest.raises(InvalidSetting, match="is on meta, and the packed matrix on cpu"):
        kernels.packed_matmul(x.to("meta"), weight)
    for start, stop in ((-1, 2), (0, ROWS + 1), (3, 2), (ROWS + 1, None)):
        with pytest.raises(InvalidSetting, match=f"are not within the {ROWS} rows"):
            kernels.decode_rows(weight, start, stop)
    dtype = weight.values.dtype if weight.format is None else torch.float32
    right = torch.empty(ROWS, COLUMNS, dtype=dtype)
    for out in (right[:-1], right[:, :-1], right.double(), strided(right), right.flatten(), right.to("meta")):
        with pytest.raises(InvalidSetting, match="`out` is"):
            kernels.decode_rows(weight, out=out)
    assert kernels.decode_rows(weight, out=right) is right


def test_other_misuse_is_refused() -> None:
    quantized: Any = packed(8)
    for scales in (quantized.scales.float(), quantized.scales[:, :1], strided(quantized.scales), quantized.scales[:-1]):
        with pytest.raises(InvalidSetting, match="`scales` of a packed matrix"):
            kernels.packed_matmul(torch.ones(1, COLUMNS), replace(quantized, scales=scales))
    for size in (63, -64, 2**31, 2**63):
        with pytest.raises(InvalidSetting, match="`group_size` must be a multiple of 64"):
            kernels.packed_matmul(torch.ones(1, COLUMNS), replace(quantized, format=IntegerFormat(8, size)))
    with pytest.raises(InvalidSetting, match="`values` of a packed matrix is int8"):
        kernels.packed_matmul(
            torch.ones(1, COLUMNS), Bitmask(quantized.shape, quantized.mask, quantized.values, quantized.row_starts)
        )
    with pytest.raises(InvalidSetting, match="`dtype` got torch"):
        kernels.decode_rows(quantized, dtype=torch.int8)
    dense = torch.ones(3, 8).bfloat16()
    for weight in (strided(dense), dense.to("meta"), dense.float(), dense[:, :-1].contiguous()):
        with pytest.raises(InvalidSetting, match="The dense weight is"):
            kernels.dense_matmul(torch.ones(1, 8), weight)


@pytest.mark.parametrize("name", NUMBERS)
def test_rows_for_a_gpu_are_not_made_of_wrong_parts(name: str) -> None:
    part, change = NUMBERS[name]
    weight = packed(torch.float32)
    with pytest.raises(InvalidSetting, match="of a packed matrix"):
        CompressedRows.from_bitmask(replace(weight, **{part: change(getattr(weight, part))}))
