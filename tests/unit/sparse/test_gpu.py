"""Which form a layer takes on a GPU; without one, the device's properties are made up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.sparse import semi_structured

from sparsellm.runtime import devices
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.sparse import csr_triton, gpu
from sparsellm.sparse.bitmask import Bitmask

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < gpu.SEMI_STRUCTURED_CAPABILITY,
    reason="2:4 tensor cores are in NVIDIA GPUs from compute capability 8.0 on",
)


def pruned(pattern: str, shape: tuple[int, int] = (64, 128), dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return weight.where(parse_pattern(pattern).keep(weight.abs()), 0.0).to(dtype)  # a product would leave -0.0, which is kept


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is an NVIDIA GPU of compute capability 8.0 on which the kernels run."""
    monkeypatch.setattr(devices, "is_nvidia", lambda _: True)
    monkeypatch.setattr(devices, "capability", lambda _: (8, 0))
    monkeypatch.setattr(csr_triton, "is_available", lambda _: True)


@pytest.mark.parametrize(
    ("weight", "form"),
    [
        (pruned("2:4"), "semi-structured"),
        (pruned("2:4", dtype=torch.float16), "semi-structured"),
        (pruned("3:4"), "semi-structured"),
        (torch.zeros(64, 128, dtype=torch.bfloat16), "semi-structured"),
        (pruned("4:8"), "csr"),
        (pruned("50%"), "csr"),
        (pruned("2:4", dtype=torch.float32), "csr"),
        (pruned("2:4", (48, 128)), "csr"),
        (pruned("2:4", (64, 96)), "csr"),
    ],
    ids=["2:4", "float16", "3:4", "empty", "4:8", "unstructured", "float32", "rows", "columns"],
)
@pytest.mark.usefixtures("ampere")
def test_two_of_four_in_sixteen_bits_is_semi_structured(weight: Tensor, form: str) -> None:
    assert gpu.form(Bitmask.from_dense(weight)) == form


@pytest.mark.usefixtures("ampere")
def test_older_gpus_have_no_two_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "capability", lambda _: (7, 5))
    assert gpu.form(Bitmask.from_dense(pruned("2:4"))) == "csr"


@pytest.mark.usefixtures("ampere")
def test_gpus_without_triton_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr_triton, "is_available", lambda _: False)
    assert gpu.form(Bitmask.from_dense(pruned("50%"))) == "dense"
    assert gpu.form(Bitmask.from_dense(pruned("2:4"))) == "semi-structured"


def test_processors_decode() -> None:
    assert gpu.form(Bitmask.from_dense(pruned("2:4"))) == "dense"


def test_a_group_of_four_crosses_no_byte() -> None:
    """Counted against the weight itself, for every kept pair and triple of eight columns."""
    for bits in range(256):
        weight = torch.tensor([[float(bits >> column & 1) for column in range(8)]])
        expected = all(int((half != 0).sum()) <= 2 for half in weight.view(2, 4))
        assert gpu.is_two_of_four(Bitmask.from_dense(weight)) == expected


def test_torch_takes_the_shapes_that_are_given_to_it() -> None:
    """`SEMI_STRUCTURED_MULTIPLES` are multiples of what each of torch's backends demands."""
    for backend in (semi_structured.SparseSemiStructuredTensorCUTLASS, semi_structured.SparseSemiStructuredTensorCUSPARSELT):
        for dtype in (torch.float16, torch.bfloat16):
            limits = backend._DTYPE_SHAPE_CONSTRAINTS[dtype]
            rows, columns = gpu.SEMI_STRUCTURED_MULTIPLES
            assert rows % limits.sparse_min_rows == columns % limits.sparse_min_cols == 0


@pytest.mark.parametrize("pattern", ["2:4", "50%"])
def test_every_form_gives_the_dense_product(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By decoding, and by the Triton kernels where it can be interpreted or run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight, x = pruned(pattern).to(device), torch.randn(3, 128).bfloat16().to(device)
    packed = Bitmask.from_dense(weight)
    forms = ["dense"] + (["csr"] if csr_triton.triton else [])
    for form in forms:
        monkeypatch.setattr(gpu, "form", lambda _, form=form: form)
        torch.testing.assert_close(gpu.linear_function(packed)(x), x @ weight.T, rtol=0.02, atol=0.02)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_semi_structured_products_on_a_gpu(tokens: int) -> None:
    weight, x = pruned("2:4").cuda(), torch.randn(tokens, 128).bfloat16().cuda()
    packed = Bitmask.from_dense(weight)
    assert gpu.form(packed) == "semi-structured"
    torch.testing.assert_close(gpu.linear_function(packed)(x), x @ weight.T, rtol=0.02, atol=0.02)
