"""Which form a pruned layer takes on a GPU: 2:4 of torch, the compressed sparse rows of the Triton kernels, or dense."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.sparse import to_sparse_semi_structured

from sparsellm.runtime import devices
from sparsellm.sparse import csr_triton
from sparsellm.sparse.bitmask import Bitmask, count_bits
from sparsellm.sparse.kernels import matmul

Form = Literal["semi-structured", "csr", "dense"]

SEMI_STRUCTURED_CAPABILITY = (8, 0)
"""Lowest compute capability with 2:4 tensor cores."""

SEMI_STRUCTURED_MULTIPLES = (32, 64)
"""Rows and columns of a 16-bit 2:4 matrix are multiples of these in both of torch's backends (CUTLASS and cuSPARSELt)."""


def is_two_of_four(weight: Bitmask) -> bool:
    """Whether at most two of every four weights along a row are kept."""
    quarters = torch.stack([weight.mask & 15, weight.mask >> 4]).flatten()
    return weight.shape[1] % 4 == 0 and bool((count_bits(quarters[:, None]) <= 2).all())


def form(weight: Bitmask) -> Form:
    """The form in which a weight is multiplied on the device of its parts.

    2:4 sparsity in 16 bits takes torch's semi-structured form on NVIDIA GPUs from compute capability 8.0 on. Other weights
    become compressed sparse rows where the Triton kernels run, and are decoded for each product elsewhere.
    """
    device, (rows, columns) = weight.values.device, weight.shape
    fits = rows % SEMI_STRUCTURED_MULTIPLES[0] == 0 and columns % SEMI_STRUCTURED_MULTIPLES[1] == 0
    is_half = weight.values.dtype in (torch.float16, torch.bfloat16)
    has_cores = devices.is_nvidia(device) and devices.capability(device) >= SEMI_STRUCTURED_CAPABILITY
    if has_cores and fits and is_half and is_two_of_four(weight):
        return "semi-structured"
    return "csr" if csr_triton.is_available(device) else "dense"


def linear_function(weight: Bitmask) -> Callable[[Tensor], Tensor]:
    """Convert a weight whose parts are on a GPU once, into a function of its inputs.

    Args:
        weight: (out, in), in the form of `form`.

    Returns:
        A function from (tokens, in), in the dtype of the weight, to (tokens, out).
    """
    chosen = form(weight)
    if chosen == "csr":
        return partial(csr_triton.matmul, weight=csr_triton.CompressedRows.from_bitmask(weight))
    if chosen == "semi-structured":
        return partial(linear, weight=to_sparse_semi_structured(weight.to_dense()))
    return partial(matmul, weight=weight)
