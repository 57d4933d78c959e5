"""Products of one layer on a GPU, packed and dense, beside the speed of its memory: docs/deploying.md.

    python benchmarks/gpu_products.py measure    # on a machine with an NVIDIA GPU
    python benchmarks/gpu_products.py table

The layer is a projection of Llama-2-7B with random bfloat16 weights, pruned by magnitude. Copies of it that no cache holds are
multiplied one after the other in one CUDA graph, so that no launch waits for Python; a figure is the shortest of several runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from clock import best
from measuring import MEASURED, markdown_table, measure_or_show, read_figures, record, require_gpu
from torch import Tensor
from torch.nn.functional import linear
from torch.sparse import to_sparse_semi_structured

from sparsellm.solvers.patterns import parse_pattern
from sparsellm.sparse.bitmask import Bitmask
from sparsellm.sparse.csr_triton import CompressedRows, matmul

FILE = MEASURED / "gpu-products.json"
ROWS, COLUMNS = 11008, 4096
PATTERNS = ("50%", "70%", "90%")
SEMI_STRUCTURED = "2:4, torch's semi-structured"
TOKENS = (1, 4, 16, 64, 2048)
COPIES = 8
"""Of a layer with 90 MB: more than any cache holds, also at 90 %."""

Product = Callable[[Tensor], Tensor]


def measure() -> None:
    """Measure every pattern with each number of tokens."""
    device, machine = require_gpu()
    keep = functools.partial(record, FILE, machine=machine)
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator, device=device)
    inputs = {tokens: torch.randn(tokens, COLUMNS, generator=generator, device=device).bfloat16() for tokens in TOKENS}
    dense = weight.bfloat16()
    long = torch.empty(2**28, device=device)
    read = best(functools.partial(torch.sum, long), device)
    keep("bandwidth", long.nbytes / read)
    del long
    seconds = timed([functools.partial(linear, weight=dense.clone()) for _ in range(COPIES)], inputs)
    keep("dense", {"bytes": dense.nbytes, "seconds": seconds})
    for name in PATTERNS:
        packed = Bitmask.from_dense(dense.where(parse_pattern(name).keep(weight.abs()), 0.0))
        rows = [CompressedRows.from_bitmask(Bitmask(*copied(packed))) for _ in range(COPIES)]
        seconds = timed([functools.partial(matmul, weight=weight) for weight in rows], inputs)
        keep(name, {"bytes": rows[0].nbytes, "seconds": seconds})
    pruned = dense.where(parse_pattern("2:4").keep(weight.abs()), 0.0)
    seconds = timed([functools.partial(linear, weight=to_sparse_semi_structured(pruned)) for _ in range(COPIES)], inputs)
    keep(SEMI_STRUCTURED, {"bytes": dense.nbytes * 9 // 16, "seconds": seconds})  # two of four values, and two bits for each
    print("\n".join(table()))


def copied(weight: Bitmask) -> tuple[tuple[int, int], Tensor, Tensor, Tensor]:
    """The parts of a weight in memory of their own."""
    return weight.shape, weight.mask.clone(), weight.values.clone(), weight.row_starts.clone()


def timed(products: Sequence[Product], inputs: dict[int, Tensor]) -> dict[str, float]:
    """By number of tokens, the seconds of one product."""
    return {str(tokens): graph_seconds(products, x) / len(products) for tokens, x in inputs.items()}


def graph_seconds(products: Sequence[Product], x: Tensor) -> float:
    """Seconds of all products of the same inputs, one after the other."""
    for product in products:
        product(x)  # compiles, and chooses algorithms
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    return best(graph.replay, x.device, 20)


def table() -> list[str]:
    """Microseconds of a product, and how often it fits into the dense one's time, in Markdown."""
    figures = read_figures(FILE)
    if "bandwidth" not in figures:
        return []
    dense, rows = figures["dense"]["seconds"], []
    for name in ("dense", *PATTERNS, SEMI_STRUCTURED):
        cell = figures[name]
        row = [name, f"{cell['bytes'] / 1e6:.1f}", f"{1e6 * cell['bytes'] / figures['bandwidth']:.0f}"]
        for tokens in dense:
            found = cell["seconds"].get(tokens)
            row.append("" if found is None else f"{1e6 * found:.0f} ({dense[tokens] / found:.2f})")
        rows.append(row)
    head = ["", "MB", "µs to read it", *(f"{tokens} token{'s' if tokens > 1 else ''}, µs" for tokens in TOKENS)]
    return [
        *markdown_table(head, rows),
        "",
        f"{figures['machine']}; its memory delivers {figures['bandwidth'] / 1e12:.2f} TB/s.",
    ]


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
