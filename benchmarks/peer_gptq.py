"""Layer errors of dense GPTQ beside llm-compressor's, on the same layers, inputs and scales: docs/few-bits.md.

pip install llmcompressor
python benchmarks/peer_gptq.py measure     # the layers of demo:opt
python benchmarks/peer_gptq.py table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import ClassVar

import torch
from bits import LENGTH, apply
from gptq import GPTQ, Grid
from measuring import MEASURED, markdown_table, measure_or_show, read_figures, record
from torch import Tensor

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import round_compensated
from sparsellm.methods.layerwise import LayerWise
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, TokenCount
from sparsellm.texts.samples import calibration_windows
from sparsellm.texts.texts import read_text

FILE = MEASURED / "peer-gptq.json"
GRIDS = (Grid(4), Grid(3), Grid(2), Grid(3, 64, True))


@dataclass(frozen=True)
class Recorder:
    """A solver that keeps the problems, and changes nothing."""

    problems: list[LayerProblem] = field(default_factory=list)
    needs: ClassVar[type[TokenCount]] = Gram

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        self.problems.append(problem)
        return problem.weight


def peer(problem: LayerProblem, grid: Grid, *, in_order: bool) -> Tensor:
    """llm-compressor's weight, with our scales."""
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    settings = {"num_bits": grid.bits, "symmetric": not grid.zero_points, "strategy": "group", "group_size": grid.group_size}
    arguments = QuantizationArgs(**settings, actorder=None if in_order else "static")
    gram = problem.gram
    scale, zero = (x[:, :: grid.group_size] for x in grid.fit(problem.weight, gram.diagonal()))
    if grid.zero_points:  # the peer's integers begin at -2^(bits - 1)
        zero = zero - 2 ** (grid.bits - 1)
    weight, _, _ = quantize_weight(problem.weight[None].clone(), gram[None].clone(), scale[None], zero[None], None, arguments)
    return weight[0]


def forms(problem: LayerProblem, grid: Grid) -> Iterator[tuple[str, Tensor]]:
    """The weights that are compared, by name."""
    for in_order, label in ((True, "in order"), (False, "largest inputs first")):
        yield f"llm-compressor, {label}", peer(problem, grid, in_order=in_order)
        yield f"gptq.py, {label}", GPTQ(grid, in_order=in_order).solve(problem, None)
    if grid.bits > 2 and not grid.zero_points:
        keep = torch.ones_like(problem.weight, dtype=torch.bool)
        ours = round_compensated(problem.weight, problem.gram, keep, format=IntegerFormat(grid.bits, grid.group_size))
        yield "sparsellm, compensated", ours.to_dense()


def measure() -> None:
    """Measure the relative errors, summed over the layers."""
    source, recorder = open_checkpoint("demo:opt"), Recorder()
    chosen = calibration_windows(
        read_text("demo", "calibration"), source.tokenizer(), samples=32, sequence_length=LENGTH, seed=0
    )
    apply(source.load("float32"), LayerWise(recorder), chosen.windows.split(8))
    for grid in GRIDS:
        errors: dict[str, float] = {}
        for problem in recorder.problems:
            for name, weight in forms(problem, grid):
                errors[name] = errors.get(name, 0.0) + problem.error(weight) / len(recorder.problems)
        label = f"int{grid.bits}, groups of {grid.group_size}" + (", zero points" if grid.zero_points else "")
        record(FILE, label, errors)
    record(FILE, "llm-compressor", version("llmcompressor"))


def table() -> list[str]:
    """Mean relative errors of the layers' outputs."""
    known = {key: x for key, x in read_figures(FILE).items() if isinstance(x, dict)}
    names = list(dict.fromkeys(name for errors in known.values() for name in errors))
    rows = [[name, *(f"{100 * x[name]:.3f}" if name in x else "" for x in known.values())] for name in names]
    return markdown_table(
        [f"mean error of a layer's output, %, llm-compressor {read_figures(FILE)['llm-compressor']}", *known], rows
    )


def main() -> None:
    measure_or_show(__doc__, measure, table)


if __name__ == "__main__":
    main()
