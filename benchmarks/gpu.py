"""What one decoder block of Llama-2-7B's shape takes on a GPU, phase by phase, and the kernel against the plain loop.

    python benchmarks/gpu.py                                   # 64 windows of 2,048 tokens, bf16, 70 %: to measured/gpu.json
    python benchmarks/gpu.py --pattern 2:4 --samples 16

Random weights and tokens, which time does not care about. A block's seconds run from what enters it to what enters the next:
its solves, the results and the passes of all batches; the loss's sensitivities, which are the whole model's, are left out.
Each phase's share of the roofline: the least seconds of its operations, each by this GPU's own best rate of products in their
dtype or by its memory, over the seconds that the phase takes. Without an NVIDIA or AMD GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from clock import MOMENTS, watched
from operations import PASS, tensors_in, work_of
from results import MEASURED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from sparsellm.activations.sensitivity import output_sensitivities
from sparsellm.activations.walk import walk
from sparsellm.methods import BlockMethod
from sparsellm.methods.algorithm1 import PublishedSparseLLM
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.pruning.plan import uniform_plan
from sparsellm.solvers import sparsegpt_triton
from sparsellm.solvers.patterns import Pattern, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram

FILE = MEASURED / "gpu.json"

LLAMA_2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
"""Of meta-llama/Llama-2-7b, which has 32 blocks."""

METHODS: dict[str, tuple[Callable[[], BlockMethod], float]] = {
    "SparseGPT": (lambda: LayerWise(SparseGPT()), 1.5),
    "SparseLLM as published, 4 epochs": (PublishedSparseLLM, 8.0),
    "default, closed form": (lambda: SparseLLM(gauss_newton_steps=0), 12.0),
}
"""Each with the seconds that it is to stay under."""

PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("models.blocks:Block.__call__",),
    "moments": MOMENTS,
    "factorisation": ("solvers.linalg:cholesky", "solvers.linalg:upper_factor", "solvers.linalg:invert_triangular_"),
    "regression": ("solvers.problem:LayerProblem.from_targets",),
    "masks": ("solvers.patterns:keep_largest",),
    "column loop": ("solvers.sparsegpt:_sweep", "solvers.sparsegpt_triton:prune_columns"),
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
    "gate": ("models.gate_update:solve_gate",),
}
"""What each phase's time is spent in; what a phase calls that belongs to another counts there."""


class Phases:
    """Seconds by phase, the device waited for at every change; with rates, also the least seconds of what each does."""

    def __init__(self, device: torch.device, rates: Mapping[Any, float] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.least: dict[str, float] = defaultdict(float)
        self._device, self.rates, self._stack = device, rates, ["other"]
        self._since = now(device)

    def settle(self) -> None:
        """What was done since the last change belongs to the present phase."""
        moment = now(self._device)
        self.seconds[self._stack[-1]] += moment - self._since
        self._since = moment

    def telling(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """A function that says when it is entered and left."""

        @functools.wraps(function)
        def told(*arguments: Any, **keywords: Any) -> Any:
            self.settle()
            self._stack.append(phase)
            try:
                return function(*arguments, **keywords)
            finally:
                self.settle()
                if self.rates and function.__name__ == "sweep":  # a kernel is no operation of torch's: in and out
                    self.least[phase] += 2 * arguments[0].nbytes / self.rates[PASS]
                self._stack.pop()

        return told

    def add(self, function: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Count an operation: by its arithmetic or by its memory, whichever takes longer."""
        assert self.rates is not None
        kind, amount = work_of(function.overloadpacket.__name__, list(inputs), list(outputs))
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)) / self.rates[PASS]
        dtype = inputs[0].dtype if inputs else torch.float32
        done = 0.0 if kind == PASS else amount / self.rates.get(dtype, self.rates[torch.float32])
        if amount:
            self.least[self._stack[-1]] += max(done, moved)


class Counting(TorchDispatchMode):
    """Within its context, every operation is added to the phases."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: Mapping | None = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        self._phases.add(function, tensors_in((arguments, keywords or {})), tensors_in(result))
        return result


def now(device: torch.device) -> float:
    """The time, with nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def best(act: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Seconds of one call, the best of several after a first."""
    act()
    found = []
    for _ in range(times):
        started = now(device)
        act()
        found.append(now(device) - started)
    return min(found)


def rates(device: torch.device, size: int = 8192) -> dict[Any, float]:
    """Operations a second of one large product by dtype, and bytes a second of a copy."""
    found: dict[Any, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        square = torch.ones(size, size, device=device, dtype=dtype)
        found[dtype] = 2 * size**3 / best(functools.partial(torch.mm, square, square), device)
    long = torch.ones(4 * size**2, device=device)
    return found | {PASS: 2 * 4 * 4 * size**2 / best(long.clone, device)}


def model_of(shape: Mapping[str, int], length: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Two blocks of the shape with random weights: what leaves the first enters the second."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, num_hidden_layers=2, max_position_embeddings=length)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def block_seconds(
    model: PreTrainedModel, batches: Sequence[Tensor], method: BlockMethod, pattern: Pattern, phases: Phases | None = None
) -> float:
    """From what enters the first block to what enters the second."""
    device, plan = model.device, uniform_plan(blocks_of(model), pattern)
    metrics = output_sensitivities(model, batches) if method.needs_fisher else ()
    counting = phases is not None and phases.rates is not None
    visits = walk(model, batches, teacher=method.needs_dense_stream, metrics=metrics)
    with torch.no_grad(), watched(phases.telling, PHASES) if phases else nullcontext():
        block, inputs = next(visits)
        if phases:
            phases.settle()
            phases.seconds.clear()
        started = now(device)
        with Counting(phases) if counting and phases else nullcontext():
            for _ in method.prune(block, inputs, plan):
                pass
            next(visits)
        if phases:
            phases.settle()
        spent = now(device) - started
        visits.close()
    return spent


def measure(
    shape: Mapping[str, int], samples: int, length: int, batch: int, pattern: Pattern, device: torch.device, size: int = 8192
) -> dict[str, Any]:
    """Every method's seconds for a block, by phase with its share of the roofline, and the kernel beside the plain loop."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    speed = rates(device, size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape["vocab_size"], (samples, length), generator=generator)
    found: dict[str, Any] = {"rates": {str(kind): rate for kind, rate in speed.items()}, "methods": {}}
    for name, (method, limit) in METHODS.items():
        timed, counted = Phases(device), Phases(device, speed)
        seconds = []
        for phases in (None, None, timed, counted):  # the first of all warms up
            batches = tokens.split(batch)
            seconds.append(block_seconds(model_of(shape, length, device, dtype), batches, method(), pattern, phases))
        by_phase = {
            phase: {"seconds": spent, "roofline": counted.least[phase] / spent if spent else 0.0}
            for phase, spent in sorted(timed.seconds.items(), key=lambda item: -item[1])
        }
        found["methods"][name] = {"seconds": seconds[1], "limit": limit, "phases": by_phase}
    found["kernel"] = kernel_beside_loop(shape, pattern, device)
    return found


def kernel_beside_loop(shape: Mapping[str, int], pattern: Pattern, device: torch.device) -> dict[str, Any]:
    """Seconds of SparseGPT on a layer by the plain loop and by the kernel, and how far the answers agree."""
    wide = shape["hidden_size"]
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(4 * wide, wide, generator=generator, device=device)
    gram = Gram(wide, device)
    gram.update(x + 0.5 * x.roll(1, dims=1))
    problem = LayerProblem(torch.randn(wide, wide, generator=generator, device=device), gram)
    serves, answers, found = sparsegpt_triton.is_supported, {}, {}
    for name, some in (("plain loop", lambda *_: False), ("kernel", serves)):
        if name == "kernel" and not sparsegpt_triton.is_available(device):
            continue
        sparsegpt_triton.is_supported = some
        try:
            found[name] = best(lambda: SparseGPT().solve(problem, pattern), device, 3)
            answers[name] = SparseGPT().solve(problem, pattern)
        finally:
            sparsegpt_triton.is_supported = serves
    if len(answers) == 2:
        plain, kernel = answers.values()
        found["masks alike"] = float(((plain == 0) == (kernel == 0)).float().mean())
        found["errors"] = [problem.error(plain), problem.error(kernel)]
    return found


def tables(found: Mapping[str, Any]) -> list[str]:
    """What was measured, in Markdown."""
    lines = ["| method, phase | seconds | share of the roofline |", "|---|---|---|"]
    for name, method in found["methods"].items():
        lines.append(f"| **{name}** (to stay under {method['limit']:g}) | {method['seconds']:.2f} | |")
        lines += [f"| {phase} | {x['seconds']:.3f} | {x['roofline']:.0%} |" for phase, x in method["phases"].items()]
    kernel = found["kernel"]
    return [*lines, "", *(f"- {name}: {value}" for name, value in kernel.items())]


def main() -> None:
    """Measure and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pattern", default="70%")
    parser.add_argument("--file", type=Path, default=FILE)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: torch finds no NVIDIA or AMD GPU here, so nothing was measured.")
    device = torch.device("cuda")
    found = measure(LLAMA_2_7B, asked.samples, asked.length, asked.batch, parse_pattern(asked.pattern), device)
    found["machine"] = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    known = json.loads(asked.file.read_text()) if asked.file.exists() else {}
    known[f"{asked.pattern}, {asked.samples} x {asked.length}"] = found
    asked.file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print("\n".join(tables(found)))


if __name__ == "__main__":
    main()
