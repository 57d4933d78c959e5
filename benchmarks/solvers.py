"""Layer error against seconds for every solver, and how far each is from the best mask: docs/results.md.

    python benchmarks/solvers.py measure demo:opt demo:llama          # benchmarks/measured/solvers.json
    python benchmarks/solvers.py tables

Layers: every group's first, in the first and the last block, on the dense model's inputs (64 windows of 256 tokens of the
bundled calibration text). Curvature: the readers' own, as far as the feed-forward's output. The oracle tries all masks of small
corners of these layers: 3 rows, 6 inputs, 9 of 18 weights kept.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import geometric_mean

import torch
from measuring import MEASURED, markdown_table, read_figures, write_figures
from torch import Tensor

from sparsellm.activations.streams import CaptureRequest
from sparsellm.activations.walk import Activations, walk
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.methods.feedforward_problem import FeedForwardProblem, weights_of
from sparsellm.methods.layerwise import collect_statistics, problem_of
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.recipes.registry import SOLVERS, solver_named
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import Unstructured, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram
from sparsellm.texts.samples import calibration_windows
from sparsellm.texts.texts import read_text

PATTERNS = ("70%", "80%", "90%", "2:4", "3:4")
FILE = MEASURED / "solvers.json"
TRIED: dict[str, LayerSolver] = {name: solver_named(name) for name in SOLVERS} | {
    "fast-admm, 12 steps": FastADMM(steps=12),
    "ALPS, penalty growth 0.5": ALPS(penalty_growth=0.5),
    "ALPS, penalty growth 0.25": ALPS(penalty_growth=0.25, iterations=600),
    "ALPS, relaxation 1.6": ALPS(relaxation=1.6),
    "ALPS, 50 refit steps": ALPS(refit_steps=50),
}


def layers(model_name: str) -> Iterator[tuple[str, LayerProblem]]:
    """Layer problems of a model: each group's first layer in the first and last block, readers also with their curvature."""
    source = open_checkpoint(model_name)
    model = source.load("float32")
    windows = calibration_windows(
        read_text("demo", "calibration"), source.tokenizer(), samples=64, sequence_length=256, seed=0
    ).windows
    last = len(blocks_of(model)) - 1
    for block, inputs in walk(model, windows.split(16)):
        if block.index not in (0, last):
            continue
        names = [group[0] for group in block.architecture.groups]
        statistics = collect_statistics(block, inputs, dict.fromkeys(names, Gram))
        problems = {name: problem_of(block, name, gram) for name, gram in statistics.items()}
        for name, problem in problems.items():
            yield f"{model_name} {block.full_name(name)}", problem
        for name, curvature in _curvatures(block, inputs).items():
            if name in problems:
                curved = replace(problems[name], curvature=curvature)
                yield f"{model_name} {block.full_name(name)}, curvature", curved


def _curvatures(block: Block, inputs: Activations) -> dict[str, Tensor]:
    """The readers' curvature as far as the feed-forward's output, all of whose errors count alike, on the dense model."""
    part = block.architecture.feed_forward
    assert part is not None
    seen = [captured.inputs[part.in_proj[0]] for captured in inputs.run(block, CaptureRequest([part.in_proj[0]]))]
    fisher = torch.eye(block.layer(part.out_proj).out_features)
    return FeedForwardProblem(part, fisher, seen, seen).curvatures(weights_of(block, (*part.in_proj, part.out_proj)))


def measure(models: list[str]) -> None:
    """Error and seconds of every solver on every layer and pattern; and the oracle."""
    rows, gaps = [], defaultdict(list)
    for model in models:
        for name, problem in layers(model):
            for pattern in PATTERNS:
                for label, solver in TRIED.items():
                    started = time.perf_counter()
                    weight = solver.solve(problem, parse_pattern(pattern))
                    seconds = time.perf_counter() - started
                    rows.append(
                        {"layer": name, "pattern": pattern, "solver": label, "error": problem.error(weight), "seconds": seconds}
                    )
            print(name, file=sys.stderr)
            if "curvature" not in name:
                for corner in _corners(problem):
                    best = _best(corner)
                    for label, solver in TRIED.items():
                        error = _refitted(corner, solver.solve(corner, Unstructured(0.5)) != 0)
                        gaps[label].append((error / max(best, 1e-12), error <= best * 1.001))
    oracle = {
        label: {
            "excess": geometric_mean(max(ratio, 1.0) for ratio, _ in pairs) - 1,
            "best": sum(is_best for _, is_best in pairs) / len(pairs),
        }
        for label, pairs in gaps.items()
    }
    write_figures(FILE, {"rows": rows, "oracle": oracle, "corners": len(next(iter(gaps.values())))})


def _corners(problem: LayerProblem, count: int = 6) -> Iterator[LayerProblem]:
    """Small problems cut out of a layer's: 3 rows and 6 inputs, drawn with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    matrix = problem.gram
    for _ in range(count):
        rows = torch.randperm(len(problem.weight), generator=generator)[:3]
        columns = torch.randperm(len(matrix), generator=generator)[:6]
        gram = Gram(6)
        root = torch.linalg.cholesky(add_diagonal(matrix[columns][:, columns], 1e-4))
        gram.update(root.T * 6**0.5)  # six "tokens" whose mean of x xᵀ is the corner of the Gram
        yield LayerProblem(problem.weight[rows][:, columns].contiguous(), gram)


def _refitted(problem: LayerProblem, keep: Tensor) -> float:
    """The least error on a mask, by exact least squares, row by row."""
    gram, total = problem.gram.double(), 0.0
    for target, kept in zip(problem.weight.double(), keep, strict=True):
        weight = torch.zeros_like(target)
        if kept.any():
            weight[kept] = torch.linalg.solve(gram[kept][:, kept], (gram @ target)[kept])
        total += float((weight - target) @ gram @ (weight - target))
    return total


def _best(problem: LayerProblem) -> float:
    """The least error over all masks that keep half: each row's best for every count, then all ways to split the count."""
    rows, columns = problem.weight.shape
    least = []
    for row in range(rows):
        target = LayerProblem(problem.weight[row : row + 1], problem.inputs)
        masks = torch.cartesian_prod(*[torch.tensor([False, True])] * columns)
        errors = [(int(keep.sum()), _refitted(target, keep[None])) for keep in masks]
        least.append([min(error for kept, error in errors if kept == count) for count in range(columns + 1)])
    splits = product(range(columns + 1), repeat=rows)
    return min(sum(map(list.__getitem__, least, split)) for split in splits if sum(split) == rows * columns // 2)


def tables() -> list[str]:
    """Error relative to ALPS (geometric mean over layers) and seconds over all of them, by pattern; and the oracle."""
    data = read_figures(FILE)
    cells = {(row["layer"], row["pattern"], row["solver"]): row for row in data["rows"]}
    layers = list(dict.fromkeys(row["layer"] for row in data["rows"]))
    measured = {row["solver"] for row in data["rows"]}
    lines: list[str] = []
    for title, names in (
        ("Every output has the same weight", [name for name in layers if "curvature" not in name]),
        (
            "Input projections of feed-forward parts, weighted by their curvature",
            [name for name in layers if "curvature" in name],
        ),
    ):
        rows = []
        for label in filter(measured.__contains__, TRIED):
            ratios = []
            for pattern in PATTERNS:
                pairs = [[max(cells[name, pattern, x]["error"], 1e-12) for x in (label, "alps")] for name in names]
                ratios.append(f"{geometric_mean(error / alps for error, alps in pairs):.3f}")
            seconds = sum(cells[name, pattern, label]["seconds"] for name in names for pattern in PATTERNS)
            rows.append([label, *ratios, f"{seconds:.1f}"])
        lines += [f"{title} ({len(names)} layers):", "", *markdown_table(["error / ALPS's", *PATTERNS, "seconds"], rows), ""]
    gaps = ([label, f"{100 * gap['excess']:.1f} %", f"{100 * gap['best']:.0f} %"] for label, gap in data["oracle"].items())
    return lines + markdown_table(["", "error above the best mask's", "best mask found"], gaps)


def main() -> None:
    if sys.argv[1:2] == ["measure"] and sys.argv[2:]:
        measure(sys.argv[2:])
    elif sys.argv[1:] == ["tables"]:
        print("\n".join(tables()))
    else:
        print(__doc__)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
