"""The kind and amount of work of a torch operation, for the scripts that are run as `python benchmarks/...`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

PRODUCT, FACTOR, SPECTRUM, PASS = "products", "factorisations", "eigenvectors", "passes"
"""Kinds of work: matrix products, and triangular factors and solves, in floating-point operations; eigenvectors in theirs; and
everything else, which goes through memory once, in bytes."""

EIGEN = 9
"""Operations of eigenvalues and vectors of a symmetric (n, n) matrix, in n³: the textbooks' count."""

SUMS_OVER: dict[str, Callable[[list[Tensor]], int]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), lambda inputs: inputs[-1].shape[-2]),
    **dict.fromkeys(("mv", "addmv", "dot"), lambda inputs: inputs[-1].shape[0]),
    "addr": lambda _: 1,
}
"""Products, and how many terms each of their numbers is a sum of."""

VIEWS = frozenset(
    ("detach", "view", "_unsafe_view", "alias", "t", "transpose", "permute", "expand", "slice", "select", "split", "as_strided")
) | frozenset(("unsqueeze", "squeeze", "diagonal", "chunk", "unbind", "empty", "empty_like", "empty_strided"))
"""Operations that move nothing."""


def work_of(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[str, float]:
    """The kind of an operation, and how much of it."""
    name = name.rstrip("_")
    kind, amount = PASS, 0.0
    if name in SUMS_OVER:
        kind, amount = PRODUCT, 2.0 * outputs[0].numel() * SUMS_OVER[name](inputs)
    elif "scaled_dot_product" in name:
        scores = inputs[0].numel() // inputs[0].shape[-1] * inputs[1].shape[-2]
        kind, amount = PRODUCT, (10.0 if "backward" in name else 4.0) * scores * inputs[0].shape[-1]
    elif name == "linalg_cholesky_ex":
        kind, amount = FACTOR, inputs[0].numel() * inputs[0].shape[-1] / 3
    elif name in ("linalg_solve_triangular", "cholesky_solve"):
        side = min(tensor.shape[-1] for tensor in inputs if tensor.shape[-1] == tensor.shape[-2])
        kind, amount = FACTOR, (2.0 if name == "cholesky_solve" else 1.0) * outputs[0].numel() * side
    elif name == "_linalg_eigh":
        kind, amount = SPECTRUM, EIGEN * float(inputs[0].shape[-1]) ** 3
    elif name not in VIEWS:
        amount = float(sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)))
    return kind, amount


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (tuple, list)) else []
