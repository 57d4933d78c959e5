"""Products of one layer with few tokens: packed in 16, 8 and 4 bits, dense, and the speed of memory.

    python benchmarks/kernel_speed.py measure    # a minute, on a machine that does nothing else
    python benchmarks/kernel_speed.py table

The layer is a projection of TinyLlama with random weights, pruned by magnitude. Copies of it that no cache holds are multiplied
one after the other, all forms in turn; a figure is the median of the rounds. Integers have the default groups.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from statistics import median

import torch
from measuring import MEASURED, markdown_table, measure_or_show, read_figures, write_figures
from torch import Tensor

from sparsellm.formats import kernels, memory_reads
from sparsellm.formats.bitmask import Bitmask
from sparsellm.solvers.integers import BITS_OF, IntegerFormat
from sparsellm.solvers.quantization import round_to_nearest

FILE = MEASURED / "kernel-speed.json"
ROWS, COLUMNS = 5632, 2048
SPARSITIES, FORMS = (0.5, 0.7, 0.9), ("bfloat16", "int8", "int4")
TOKENS, THREADS = (1, 4, 8), (1, 2)
COPIES, ROUNDS = 24, 9


def measure() -> None:
    """Measure every form with each number of tokens and threads."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    dense = [weight.clone() for _ in range(COPIES)]
    packed = {(sparsity, form): [copy(pack(weight, sparsity, form)) for _ in range(COPIES)] for sparsity, form in products()}
    figures: dict[str, float] = {}
    for tokens, threads in itertools.product(TOKENS, THREADS):
        torch.set_num_threads(threads)
        x, seconds = torch.randn(tokens, COLUMNS).bfloat16(), defaultdict[str, list[float]](list)
        for _ in range(ROUNDS):
            seconds["reading"].append(memory_reads.read_seconds(dense))
            seconds["torch"].append(time_of(lambda weight, x=x: x @ weight.T, dense))
            seconds["dense"].append(time_of(lambda weight, x=x: kernels.dense_matmul(x, weight), dense))
            for (sparsity, form), copies in packed.items():
                seconds[f"{form}, {sparsity:.0%}"].append(time_of(lambda weight, x=x: kernels.packed_matmul(x, weight), copies))
        figures |= {f"{tokens} | {threads} | {name}": 1000 * median(times) / COPIES for name, times in seconds.items()}
    sizes = {f"{form}, {sparsity:.0%}": copies[0].nbytes for (sparsity, form), copies in packed.items()}
    write_figures(FILE, {"milliseconds": figures, "bytes": sizes, "kernel": kernels.instruction_set()})
    print("\n".join(table()))


def products() -> list[tuple[float, str]]:
    """Every sparsity with every form."""
    return list(itertools.product(SPARSITIES, FORMS))


def pack(weight: Tensor, sparsity: float, form: str) -> Bitmask:
    """The weight without its smallest numbers, in a form."""
    size = weight.abs().flatten()
    pruned = weight.masked_fill(weight.abs() <= size.kthvalue(int(sparsity * len(size))).values, 0)
    if form == "bfloat16":
        return Bitmask.from_dense(pruned)
    rounded = round_to_nearest(pruned, IntegerFormat.default(BITS_OF[form], 1 - sparsity), mask=pruned != 0)
    return Bitmask.from_quantized(rounded, pruned != 0)


def copy(weight: Bitmask) -> Bitmask:
    """A copy in memory of its own."""
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(weight, **{name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)})


def time_of(multiply: Callable[[object], Tensor], weights: list) -> float:
    """Seconds that all products take."""
    started = time.perf_counter()
    for weight in weights:
        multiply(weight)
    return time.perf_counter() - started


def table() -> list[str]:
    """Milliseconds of a layer, and how many times faster than the packed bfloat16 form integers are."""
    figures = read_figures(FILE)
    times, rows = figures["milliseconds"], []
    for tokens, threads in itertools.product(TOKENS, THREADS):
        key = f"{tokens} | {threads} | "
        cells = [f"{times[key + name]:.2f}" for name in ("reading", "torch", "dense")]
        for sparsity in SPARSITIES:
            base = times[f"{key}bfloat16, {sparsity:.0%}"]
            integers = [times[f"{key}{form}, {sparsity:.0%}"] for form in FORMS[1:]]
            cells += [" / ".join([f"{base:.2f}", *(f"{value:.2f} ({base / value:.2f})" for value in integers)])]
        rows.append([str(tokens), str(threads), *cells])
    head = ["tokens", "threads", "reading", "torch", "dense", *(f"{sparsity:.0%}" for sparsity in SPARSITIES)]
    return [*markdown_table(head, rows, left=()), "", f"{figures['machine']}; kernel {figures['kernel']}."]


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
