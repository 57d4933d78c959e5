"""Products of one layer on a GPU, packed and dense, beside the speed of its memory, and a whole model: docs/deploying.md.

    python benchmarks/gpu_products.py measure    # on a machine with an NVIDIA GPU
    python benchmarks/gpu_products.py table

The layer is a projection of Llama-2-7B with random bfloat16 weights, pruned by magnitude. Copies of it that no cache holds are
multiplied one after the other in one CUDA graph, so that no launch waits for Python; a figure is the shortest of several runs.
Weights of 4 bits, which are decoded for each product, run without a graph. A whole model of TinyLlama's shape decodes one
sequence, dense and packed at 70 %, by a plain loop over transformers' forward pass.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import decode
import torch
from clock import best
from measuring import MEASURED, markdown_table, measure_or_show, read_figures, record, require_gpu
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.sparse import to_sparse_semi_structured
from transformers import PreTrainedConfig

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import round_to_nearest
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.csr_triton import CompressedRows, csr_matmul
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.record import TORCH
from sparsellm.runtime.devices import synchronize
from sparsellm.solvers.patterns import parse_pattern

FILE = MEASURED / "gpu-products.json"
ROWS, COLUMNS = 11008, 4096
PATTERNS = ("50%", "70%", "90%")
SEMI_STRUCTURED = "2:4, torch's semi-structured"
INTEGERS, BITS = "70%, int4", 4
WHOLE = "whole model, tokens a second"
STEPS = 64
"""Tokens that the whole model decodes."""

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
        seconds = timed([functools.partial(csr_matmul, weight=weight) for weight in rows], inputs)
        keep(name, {"bytes": rows[0].nbytes, "seconds": seconds})
    pruned = dense.where(parse_pattern("2:4").keep(weight.abs()), 0.0)
    seconds = timed([functools.partial(linear, weight=to_sparse_semi_structured(pruned)) for _ in range(COPIES)], inputs)
    keep(SEMI_STRUCTURED, {"bytes": dense.nbytes * 9 // 16, "seconds": seconds})  # two of four values, and two bits for each
    keep(INTEGERS, measure_integers(weight, inputs))
    del weight, dense, pruned, inputs
    keep(WHOLE, whole_model(device))
    print("\n".join(table()))


def measure_integers(weight: Tensor, inputs: dict[int, Tensor]) -> dict[str, Any]:
    """Seconds of products with a weight of 4 bits, each of which decodes it."""
    device, pattern = weight.device, parse_pattern("70%")
    layer = PackedLinear.from_bitmask(quantized(weight, pattern.keep(weight.abs())), dtype=torch.bfloat16)
    with torch.inference_mode():
        seconds = {str(tokens): best(functools.partial(layer, x), device, 20) for tokens, x in inputs.items()}
    return {"bytes": layer.bitmask.nbytes, "seconds": seconds}


def quantized(weight: Tensor, keep: Tensor) -> Bitmask:
    """The kept weights rounded to nearest."""
    rounded = round_to_nearest(weight, IntegerFormat.default(BITS, float(keep.float().mean())), mask=keep)
    return Bitmask.from_quantized(rounded, keep)


def whole_model(device: torch.device, config: PreTrainedConfig = decode.SHAPES[decode.RACED]) -> dict[str, float]:
    """Tokens a second of a model with random weights, dense and packed with a dense head."""
    forms = decode.make_forms(config)
    chosen = {name: forms[name] for name in (TORCH, decode.packed_name(0.7))}
    return {name: STEPS / min(decoding_seconds(form.to(device), device) for _ in range(3)) for name, form in chosen.items()}


@torch.inference_mode()
def decoding_seconds(model: nn.Module, device: torch.device) -> float:
    """Seconds of a greedy continuation, without its prompt."""
    output = model(torch.zeros(1, decode.PROMPT, dtype=torch.long, device=device), use_cache=True)
    synchronize(device)
    started = time.perf_counter()
    for _ in range(STEPS):
        output = model(output.logits[:, -1:].argmax(-1), past_key_values=output.past_key_values, use_cache=True)
    synchronize(device)
    return time.perf_counter() - started


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
    for name in (name for name in ("dense", *PATTERNS, SEMI_STRUCTURED, INTEGERS) if name in figures):
        cell = figures[name]
        row = [name, f"{cell['bytes'] / 1e6:.1f}", f"{1e6 * cell['bytes'] / figures['bandwidth']:.0f}"]
        for tokens in dense:
            found = cell["seconds"].get(tokens)
            row.append("" if found is None else f"{1e6 * found:.0f} ({dense[tokens] / found:.2f})")
        rows.append(row)
    head = ["", "MB", "µs to read it", *(f"{tokens} token{'s' if tokens > 1 else ''}, µs" for tokens in TOKENS)]
    lines = [
        *markdown_table(head, rows),
        "",
        f"{figures['machine']}; its memory delivers {figures['bandwidth'] / 1e12:.2f} TB/s.",
    ]
    if WHOLE in figures:
        speeds = "; ".join(f"{name}: {speed:.0f}" for name, speed in figures[WHOLE].items())
        lines += ["", f"A whole model of {decode.RACED}'s shape decodes, in tokens a second: {speeds}."]
    return lines


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
