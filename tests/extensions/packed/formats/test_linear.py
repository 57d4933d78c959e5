"""Packed layers against `nn.Linear` with the same weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.packed.formats import csr_triton
from sparsellm.extensions.packed.formats import linear as module
from sparsellm.extensions.packed.formats.bitmask import bits_of
from sparsellm.extensions.packed.formats.linear import DenseLinear, PackedLinear
from tests.pairwise import pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pruned(rows: int, columns: int, dtype: torch.dtype = torch.float32, sparsity: float = 0.6) -> Tensor:
    """A random weight with zeros, an empty row, a -0.0 and, at its end, a kept weight."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * (torch.rand(rows, columns) >= sparsity)
    weight[0], weight[-1, 0], weight[-1, -1] = 0.0, -0.0, 1.5
    return weight.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "shape", "batch"), pairwise(DTYPES, [(7, 70), (64, 64), (3, 1)], [(70,), (1, 1), (2, 5), (0,)]), ids=str
)
def test_outputs_are_those_of_a_dense_layer(dtype: torch.dtype, shape: tuple[int, int], batch: tuple[int, ...]) -> None:
    weight, bias = pruned(*shape, dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(*batch, shape[1]).to(dtype)
    outputs = PackedLinear.from_dense(weight, bias)(x)
    assert outputs.dtype == dtype
    assert outputs.shape == (*batch, shape[0])
    expected = linear(x.double(), weight.double(), bias.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(outputs.double(), expected, rtol=tolerance, atol=tolerance)


def test_transposed_layer_computes_as_conv1d_does() -> None:
    weight, x = pruned(9, 5), torch.randn(4, 9)
    layer = PackedLinear.from_dense(weight, transposed=True)
    assert (layer.in_features, layer.out_features) == (9, 5)
    assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(layer(x), x @ weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_state_dict_is_the_stored_form_and_is_read_again(dtype: torch.dtype, transposed: bool) -> None:
    weight, bias = pruned(11, 67, dtype), torch.randn(67 if transposed else 11).to(dtype)
    layer = PackedLinear.from_dense(weight, bias, transposed=transposed)
    state = layer.state_dict()
    assert state["weight"].dim() == 1
    assert {"bias", "weight", "weight_mask"} <= set(state)
    assert not set(state) & {"mask", "values", "row_starts"}
    again = PackedLinear(layer.in_features, layer.out_features, transposed=transposed, dtype=dtype)
    again.load_state_dict(state)
    assert torch.equal(bits_of(again.weight), bits_of(weight))
    assert torch.equal(again.bias, bias)
    assert all(torch.equal(part, state[name]) for name, part in again.state_dict().items())


def test_dense_state_dict_is_read() -> None:
    weight = pruned(11, 67)
    parent, dense = nn.ModuleDict({"a": PackedLinear(67, 11)}), nn.Linear(67, 11)
    dense.weight = nn.Parameter(weight)
    parent.load_state_dict({f"a.{name}": tensor for name, tensor in dense.state_dict().items()})
    assert torch.equal(parent["a"].weight, weight)


def test_incomplete_state_dict_is_refused() -> None:
    layer = PackedLinear.from_dense(pruned(11, 67))
    state = layer.state_dict()
    with pytest.raises(BadCheckpoint, match="weight_mask"):
        layer.load_state_dict({"weight": state["weight"]})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def test_gradients_pass_through_the_layer() -> None:
    weight, bias = pruned(11, 67), torch.randn(11)
    x = torch.randn(2, 3, 67, requires_grad=True)
    layer = PackedLinear.from_dense(weight, bias)
    direction = torch.randn(2, 3, 11)
    layer(x).backward(direction)
    torch.testing.assert_close(x.grad, direction @ weight)
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, direction.sum((0, 1)))


def test_layer_follows_dtype_and_is_copied() -> None:
    weight = pruned(11, 67)
    layer = PackedLinear.from_dense(weight, torch.zeros(11))
    other = copy.deepcopy(layer).to(torch.bfloat16)
    assert other(torch.randn(1, 67).bfloat16()).dtype == torch.bfloat16
    assert torch.equal(other.weight, weight.bfloat16())
    assert torch.equal(layer.weight, weight)
    assert other.row_starts.dtype == torch.int64


def test_repr_tells_the_sparsity() -> None:
    weight = torch.ones(4, 8)
    weight[:, ::2] = 0
    assert "in_features=8, out_features=4, bias=False, sparsity=50.00%" in repr(PackedLinear.from_dense(weight))


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_compiled_layer_has_the_same_outputs(tokens: int) -> None:
    layer, x = PackedLinear.from_dense(pruned(11, 67), torch.randn(11)), torch.randn(tokens, 67)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("tokens", [(1, 1), (8,), (9,), (2, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_layer_computes_as_linear_does(tokens: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(67, 11, bias=bias, dtype=torch.bfloat16), torch.randn(*tokens, 67).bfloat16()
    expected = layer.double()(x.double())
    layer.bfloat16().__class__ = DenseLinear
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), expected, rtol=2e-2, atol=2e-2)
        assert torch.compile(layer, backend="eager", fullgraph=True)(x).shape == expected.shape
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.skipif(csr_triton.triton is None, reason="Triton is not installed: it has wheels for Linux only")
def test_layer_on_a_gpu_compresses_its_weight_once_and_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, by Triton's interpreter if there is none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = []
    function = csr_triton.CompressedRows.from_bitmask
    monkeypatch.setattr(csr_triton.CompressedRows, "from_bitmask", lambda weight: made.append(weight) or function(weight))
    weight, bias, x = pruned(11, 67).to(device), torch.randn(11, device=device), torch.randn(2, 3, 67, device=device)
    layer = PackedLinear.from_dense(weight, bias).to(device)
    for _ in range(2):
        torch.testing.assert_close(layer._multiply_compressed(x), linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    layer.to(torch.bfloat16)
    assert layer._multiply_compressed(x.bfloat16()).dtype == torch.bfloat16
    assert [part.values.dtype for part in made] == [torch.float32, torch.bfloat16]
    copy.deepcopy(layer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
def test_layer_on_a_gpu_takes_its_form() -> None:
    layer, x = PackedLinear.from_dense(pruned(11, 67)).cuda(), torch.randn(3, 67, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ pruned(11, 67).cuda().T, rtol=1e-4, atol=1e-4)
    assert layer in module._compressed


def test_layer_becomes_dense() -> None:
    weight, bias, x = pruned(11, 67), torch.randn(11), torch.randn(3, 67)
    dense = PackedLinear.from_dense(weight, bias).to_dense(torch.float64)
    assert type(dense) is nn.Linear
    torch.testing.assert_close(dense.double()(x.double()), linear(x.double(), weight.double(), bias.double()))
