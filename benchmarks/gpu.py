"""The time of one decoder block of Llama-2-7B's shape on a GPU, phase by phase, and the kernel against the plain loop.

    python benchmarks/gpu.py                                   # 64 windows of 2,048 tokens, bf16, 70 %: to measured/gpu.json
    python benchmarks/gpu.py --pattern 2:4 --samples 16

Weights and tokens are random. The seconds of a block include its solves, the results, and the passes of all batches up to the
next block; the sensitivities, which belong to the whole model, are left out. The share of the roofline is the time that a
phase's operations need at this GPU's measured rates of products and of memory, over the time that the phase takes. Without an
NVIDIA or AMD GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from clock import MOMENTS, PASS, Phases, best, instrumented, now
from measuring import MEASURED, markdown_table, read_figures, record, require_gpu
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from sparsellm.activations.sensitivity import output_fisher
from sparsellm.activations.walk import walk
from sparsellm.methods import BlockMethod
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers import sparsegpt
from sparsellm.solvers.patterns import Pattern, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram

FILE = MEASURED / "gpu.json"

DEFAULT_RUN = "70%, 64 x 2048"
"""The run that the page shows."""

LLAMA_2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
"""Of meta-llama/Llama-2-7b, which has 32 blocks."""

METHODS: dict[str, Callable[[], BlockMethod]] = {
    "SparseGPT": lambda: LayerWise(SparseGPT()),
    "Algorithm 1": Algorithm1,
    "default, closed form": lambda: SparseLLM(rounds=0),
    "default": SparseLLM,
}

PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("models.blocks:Block.__call__",),
    "moments": MOMENTS,
    "factorization": ("solvers.linalg:cholesky_", "solvers.linalg:upper_factor_", "solvers.linalg:invert_triangular_"),
    "regression": ("solvers.problem:LayerProblem.from_targets",),
    "masks": ("solvers.patterns:keep_largest",),
    "column loop": ("solvers.sparsegpt:_sweep", "solvers.sparsegpt:prune_columns"),
    "SparseGPT besides": ("solvers.sparsegpt:SparseGPT._prune",),
    "ADMM": ("solvers.alps:ALPS._search", "solvers.fast_admm:FastADMM._search"),
    "refit": ("solvers.linalg:conjugate_gradient_refit",),
    "errors": (
        "solvers.problem:LayerProblem.energies",
        "solvers.regression:Regression.error",
        "methods.feedforward_problem:FeedForwardProblem.error",
    ),
    "auxiliary updates": (
        "methods.auxiliary_signals:AuxiliarySignals.refit",
        "methods.auxiliary_signals:AuxiliarySignals.error",
    ),
    "gate": ("methods.gate_update:solve_gate",),
}
"""The functions of each phase. A call from one phase into a function of another counts for the other."""


def rates(device: torch.device) -> dict[Any, float]:
    """Operations a second of one large product by dtype, and bytes a second of a copy."""
    result: dict[Any, float] = {}
    size = 8192
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        square = torch.ones(size, size, device=device, dtype=dtype)
        result[dtype] = 2 * size**3 / best(functools.partial(torch.mm, square, square), device)
    long = torch.ones(4 * size**2, device=device)
    return result | {PASS: 2 * 4 * 4 * size**2 / best(long.clone, device)}


def block_seconds(
    shape: Mapping[str, int], batches: Sequence[Tensor], method: BlockMethod, *, pattern: Pattern, phases: Phases, count: bool
) -> float:
    """Seconds from the inputs of the first block of a model with random weights to those of the second."""
    device = phases.device
    torch.manual_seed(0)
    config = LlamaConfig(**shape, num_hidden_layers=2, max_position_embeddings=batches[0].shape[1])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plan = uniform_plan(blocks_of(model), pattern)
    fisher = output_fisher(model, batches) if method.needs_fisher else ()
    visits = walk(model, batches, needs_dense_stream=method.needs_dense_stream, fisher=fisher)
    with torch.no_grad(), instrumented(phases.wrap, PHASES):
        block, inputs = next(visits)
        phases.restart()
        started = now(device)
        with phases if count else nullcontext():
            for _ in method.prune(block, inputs, plan):
                pass
            next(visits)
        phases.settle()
        spent = now(device) - started
        visits.close()
    return spent


def measure(
    shape: Mapping[str, int],
    tokens: Tensor,
    batch: int,
    *,
    pattern: Pattern,
    device: torch.device,
    methods: Sequence[str] = tuple(METHODS),
    observe: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure a block with every method, by phase with its share of the roofline, and the kernel beside the plain loop.

    Args:
        shape: Fields of the Llama configuration.
        tokens: Calibration tokens, (sequences, length).
        batch: Sequences per batch.
        pattern: The sparsity pattern.
        device: The device.
        methods: Names of the methods.
        observe: Called with the figures so far after each method.
    """
    speed, batches = rates(device), tokens.split(batch)
    figures: dict[str, Any] = {"rates": {str(kind): rate for kind, rate in speed.items()}, "methods": {}}
    for name in methods:
        method = METHODS[name]
        timed, counted = Phases(device=device), Phases(count=True, device=device, rates=speed)
        seconds = [  # the first run warms up
            block_seconds(shape, batches, method(), pattern=pattern, phases=phases, count=phases is counted)
            for phases in (Phases(device=device), timed, counted)
        ]
        by_phase = {
            phase: {"seconds": spent, "roofline": counted.least[phase] / spent if spent else 0.0}
            for phase, spent in sorted(timed.seconds.items(), key=lambda item: -item[1])
        }
        figures["methods"][name] = {"seconds": seconds[1], "phases": by_phase}
        observe(figures)
    figures["kernel"] = kernel_beside_loop(shape["hidden_size"], pattern, device)
    return figures


def kernel_beside_loop(width: int, pattern: Pattern, device: torch.device) -> dict[str, Any]:
    """Seconds of SparseGPT on a layer by the plain loop and by the kernel, and how far the results agree."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(4 * width, width, generator=generator, device=device)
    gram = Gram(width, device)
    gram.update(x + 0.5 * x.roll(1, dims=1))
    problem = LayerProblem(torch.randn(width, width, generator=generator, device=device), gram)
    weights, figures = {}, dict[str, Any]()
    solve = functools.partial(SparseGPT().solve, problem, pattern)
    with mock.patch.object(sparsegpt, "kernel_supports", return_value=False):
        figures["plain loop"], weights["plain loop"] = best(solve, device, 3), solve()
    if sparsegpt.has_kernel(device):
        figures["kernel"], weights["kernel"] = best(solve, device, 3), solve()
        figures["masks alike"] = float(((weights["plain loop"] == 0) == (weights["kernel"] == 0)).float().mean())
        figures["errors"] = [problem.error(weight) for weight in weights.values()]
    return figures


def tables(figures: Mapping[str, Any]) -> list[str]:
    """The figures in Markdown."""
    rows = []
    for name, method in figures["methods"].items():
        rows.append([f"**{name}**", f"{method['seconds']:.2f}", ""])
        rows += [[phase, f"{x['seconds']:.3f}", f"{x['roofline']:.0%}"] for phase, x in method["phases"].items()]
    lines = markdown_table(["method, phase", "seconds", "share of the roofline"], rows)
    return [*lines, *(f"- {name}: {value}" for name, value in figures.get("kernel", {}).items())]


def table() -> list[str]:
    """What was measured, with the machine."""
    figures = read_figures(FILE)
    return [*tables(figures[DEFAULT_RUN]), "", f"{figures['machine']}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pattern", default="70%")
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=METHODS)
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    device, machine = require_gpu()
    size, generator = (options.samples, options.length), torch.Generator().manual_seed(0)
    tokens = torch.randint(LLAMA_2_7B["vocab_size"], size, generator=generator)
    keep = functools.partial(record, options.file, f"{options.pattern}, {options.samples} x {options.length}", machine=machine)
    pattern = parse_pattern(options.pattern)
    settings = {"pattern": pattern, "device": device, "methods": options.methods, "observe": keep}
    figures = measure(LLAMA_2_7B, tokens, options.batch, **settings)
    keep(figures)
    print("\n".join(tables(figures)))


if __name__ == "__main__":
    main()
