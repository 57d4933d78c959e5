"""Every choice that this machine makes by measuring, on other shapes than the measured one: the speedup over what it replaces.

    python benchmarks/choices.py

A choice that loses more than a tenth is marked. Zeros are skipped at the least favorable density that the machine allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.linear import DenseLinear
from sparsellm.models.contexts import product_dtype_context
from sparsellm.models.sparse_matmul import matmul_of, max_density
from sparsellm.runtime import autotuning, products

SHAPES, TOKENS = ((768, 768), (3072, 768), (768, 3072), (2048, 2048)), 1024


def choices(rows: int, columns: int) -> Iterator[tuple[str, autotuning.Computation, autotuning.Computation]]:
    """The name, the usual computation and the chosen one of every choice on a CPU, for a weight of (rows, columns)."""
    draw = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(TOKENS, columns, generator=draw), torch.randn(rows, columns, generator=draw)
    yield "float32 linear", partial(linear, inputs, weight), partial(products.linear, inputs, weight)
    yield "float32 matmul", partial(torch.matmul, inputs, weight.T), partial(products.matmul, inputs, weight.T)
    for dtype in (None, torch.bfloat16):
        limit = max_density(dtype)
        pruned = weight * (torch.rand(weight.shape, generator=draw) < 0.95 * limit)
        x, dense = inputs.to(dtype or torch.float32), pruned.to(dtype or torch.float32)
        with product_dtype_context(torch.device("cpu"), None):
            yield (
                f"{1 - limit:.0%} zeros, {dtype or torch.float32}",
                partial(products.linear, x, dense),
                partial(matmul_of(pruned, dtype), x, None),
            )
    if kernels.instruction_set():
        dense = weight.bfloat16()
        packed, head = Bitmask.from_dense(dense.where(weight > 0, 0.0)), DenseLinear(columns, rows, bias=False)
        head.weight = nn.Parameter(dense, requires_grad=False)
        for count in kernels.PACKED_TOKENS:
            x = inputs[:count].bfloat16()
            tiles = partial(kernels._multiply_tiles, x, packed, None)
            yield f"packed, {count} tokens", tiles, partial(kernels.packed_matmul, x, packed)
            yield f"dense head, {count} tokens", partial(linear, x, dense), partial(head, x)


def main() -> None:
    print(f"{autotuning.processor()}, {torch.get_num_threads()} threads")
    with torch.no_grad():
        for rows, columns in SHAPES:
            for name, usual, chosen in choices(rows, columns):
                gain = autotuning.measure_speedup(usual, chosen)[0]
                print(f"{rows:5} x {columns:<5} {name:32} {gain:6.2f}{'  loses' if gain < 1 / 1.1 else ''}", flush=True)


if __name__ == "__main__":
    main()
