"""Results that no run has: measurements, layers and reports with given values, and folders of runs and sweeps with them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.tensor_index import report_digest
from sparsellm.evaluation.differences import Parts
from sparsellm.evaluation.results import Accuracy, Perplexity
from sparsellm.extensions.packed.record import CEILING, PACKED, TORCH, Bench, MatrixSize, Packed, Speed
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.studies.search_result import Point, SearchResult
from sparsellm.extensions.studies.sweep_file import read_sweep
from sparsellm.extensions.studies.sweep_runner import CellFolder
from sparsellm.methods import BlockResult, CurvePoint, EpochResult, LayerResult, TrainingResult
from sparsellm.outputs.folder import SWEEP
from sparsellm.outputs.report import Digests, PrunedReport, Report
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.texts.json_files import FORMAT, strict_json

TEXT = "words & <b>.txt"
"""The name of a text that must be escaped."""

CURVE = (CurvePoint(0, None, 2.0), CurvePoint(5, 1.9, 1.6), CurvePoint(10, 1.5, 1.7))
MODEL = "some/opt-125m"

SIZE: dict[str, Any] = {"weight_bytes": 2 * 2**20, "resolved": {"dtype": "torch.bfloat16"}}
"""Fields of the report of a model of 2 MiB."""

SHAPE = (100, 1000)
"""A shape of which packing saves more than a header takes."""


def perplexity(value: float, error: float | None = None, parts: Parts | None = None) -> Perplexity:
    """A perplexity on a few sequences."""
    return Perplexity(value, error, windows=4, length=64, tokens=256, source="demo", seconds=0.0, parts=parts)


def measured(*losses: float) -> Perplexity:
    """A perplexity on as many sequences, with these losses."""
    return perplexity(math.exp(statistics.fmean(losses)), 1.0, Parts("x", losses))


def accuracy(value: float, error: float | None = None, metric: str = "acc") -> Accuracy:
    """A score on a hundred questions."""
    return Accuracy(value, error, normalised=None, questions=100, metric=metric)


def layer(name: str, pattern: str = "70%", error: float = 0.1, **fields: Any) -> LayerResult:
    """A layer of 1,000 weights, or of another shape, with as many zeros as its pattern removes."""
    parsed, shape = parse_pattern(pattern), fields.pop("shape", (10, 100))
    zeros = round(math.prod(shape) * parsed.sparsity)
    given = {"known": "Gram", "damping": 0.01, "tokens": 256, "epoch": 1, "seconds": 0.1} | fields
    return LayerResult(name, parsed, shape, zeros, error, **given)


def report(recipe: Any = None, **fields: Any) -> Report:
    """A report of two layers at 70 % of a model of 2,800 parameters."""
    blocks = [BlockResult(0, "a", (layer("a.x"), layer("a.y")), (), 1.0)]
    recipe = recipe or Recipe(model="m", sparsity="70%", calibration="demo")
    return Report(recipe, **{"blocks": blocks, "parameters": 2800, "zeros": 1400, **fields})


def pruned(*losses: float, text: str = TEXT) -> dict[str, Any]:
    """Perplexities of a pruned model with these losses, and of the dense one."""
    return {text: {"dense": measured(3.0, 4.0, 5.0), "pruned": measured(*losses)}}


def blocks(*patterns: str, error: float = 0.1, **fields: Any) -> list[BlockResult]:
    """Two blocks of as many layers as patterns, the second one with twice the error."""
    made = []
    for number, name in enumerate(("h.0", "h.1")):
        layers = (layer(f"{name}.{x}", y, error * (1 + number), **fields) for x, y in zip("abc", patterns, strict=False))
        made.append(BlockResult(number, name, tuple(layers), (), 1.0))
    return made


def written(folder: Path, report: Report) -> Path:
    """The folder of a run that was verified."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    report.files, report.digests = ("model.safetensors",), Digests({}, {}, "")
    report.digests = Digests({}, {}, report_digest(report.to_dict()))
    (folder / REPORT).write_text(strict_json(report.to_dict()), encoding="utf-8")
    return folder


def a_run(place: Path) -> Path:
    """A search's output with everything that a page of a run has a part for."""
    recipe = Recipe(model=MODEL, method="sparsellm", effort="best", sparsity="60%", calibration=TEXT, exclude=("it's <i>",))
    first, second = blocks("50%", "72%", "80%")
    steps = [("solve", 1, 0.2, True), ("newton", 1, 0.3, False), ("newton", 2, 0.1, True), ("round", 1, 0.12, True)]
    epochs = tuple(EpochResult("h.0", n, step, error, accepted) for step, n, error, accepted in steps)
    published = tuple(EpochResult("h.1", n, "published", 0.1 + n / 100, True, 0.2 / n) for n in (1, 2))
    points = (
        Point("sparsity", 0.6, "standard", True, {TEXT: 60.0}, 0.1, {}, None, 1.0),
        Point("sparsity", 0.8, "fast", False, {TEXT: 90.0}, 0.6, {}, None, 1.0),
        Point("sparsity", 0.7, "fast", False, {TEXT: 66.0}, 0.2, {}, None, 1.0, undecided=True, increase_error=0.02),
    )
    matrix = MatrixSize("h.0.a", (10, 100), "bfloat16", 500, 0, 2000, 1100, packed=True)
    speeds = [Speed(TORCH, 1, 1, 20.0, 100.0), Speed(PACKED, 1, 1, 50.0, 60.0), Speed(CEILING, 1, 1, 200.0, None)]
    sizes = {TORCH: 4 * 2**20, PACKED: 2**20}
    bench = Bench("out", 2**20, sizes, 1000, {1: 1e10}, 8, 2, speeds, [], {"processor": "some <processor>"})
    return written(
        place / "out <b>",
        report(
            recipe,
            **SIZE,
            blocks=[replace(first, epochs=epochs), replace(second, epochs=published)],
            environment={"sparsellm": "0.0", "torch": "<0.0>"},
            calibration=f"4 sequences of 64 tokens of {TEXT}",
            perplexity=pruned(3.1, 4.3, 5.2) | {"book.txt": {"pruned": perplexity(1234.5)}},
            tasks={"boolq": {"dense": accuracy(0.61, 0.01), "pruned": accuracy(0.58, 0.01)}},
            notes=["the texts are short. Pass more `samples`", "<script>"],
            seconds={"loading": 1.0, "pruning": 30.0, "total": 31.0},
            peak_memory_bytes=3 * 2**30,
            recovered=TrainingResult(2.0, 1.6, 5, curve=CURVE),
            sections={
                "search": SearchResult("a perplexity increase of at most 20 %", points),
                "packing": Packed("plain", 2 * 2**20, 2**20, (matrix,), bench=bench),
            },
        ),
    )


def some_runs(place: Path) -> list[Path]:
    """Runs of one model: of 2:4, of other sequences and tasks, and a recovery."""
    half = report(
        Recipe(model=MODEL, method="wanda", sparsity="50%", calibration="demo"),
        **SIZE,
        blocks=blocks("50%", "50%", error=0.2, shape=SHAPE, bits=4, bits_per_weight=3.1),
        perplexity=pruned(3.1, 4.12, 5.1),
        tasks={"boolq": {"pruned": accuracy(0.5)}, "wikitext": {"pruned": accuracy(12.5, metric="word_perplexity")}},
    )
    two_four = report(
        Recipe(model=MODEL, method="sparsellm", effort="fast", sparsity="2:4", calibration="demo"),
        **SIZE,
        blocks=blocks("2:4", "2:4", "2:4", shape=SHAPE),
        perplexity=pruned(3.0, 4.1, 4.96),
        tasks={"boolq": {"pruned": accuracy(0.6, 0.01)}},
    )
    other = report(
        Recipe(model=MODEL, method="magnitude", sparsity="70%"),
        perplexity={TEXT: {"dense": replace(measured(3.0, 4.2), windows=2), "pruned": replace(measured(3.2, 4.1), windows=2)}},
    )
    recovered = report(
        RecoveryRecipe(model=MODEL, pruned="two-four", calibration="demo"),
        **SIZE,
        blocks=blocks("2:4", "2:4", "2:4", error=0.05, shape=SHAPE),
        pruned=PrunedReport(two_four.recipe, perplexity=two_four.perplexity),
        perplexity=pruned(3.0, 4.05, 4.96),
        recovered=TrainingResult(2.0, 1.6, 5, curve=CURVE),
    )
    reports = {"half": half, "two-four": two_four, "other": other, "recovered": recovered}
    return [written(place / name, report) for name, report in reports.items()]


def a_sweep(place: Path) -> Path:
    """A sweep over everything that has a plot of its own, with seeds, a failed and an open cell, and a paper's figure."""
    place.mkdir()
    (place / TEXT).touch()
    shared = {"calibration": str(place / TEXT), "method": "algorithm1", "values": "int4"}
    axes = {"model": {"opt": MODEL, "none": "some/none"}, "sparsity": ["50%", "2:4"], "seed": [0, 1]}
    axes |= {"alpha": [0.1, 0.2], "beta": [0.1, 0.2]}
    left_out = [{"model": "none", name: value} for name, value in (("alpha", 0.2), ("beta", 0.2), ("seed", 1))]
    left_out += [{"seed": 1, "alpha": 0.2}, {"seed": 1, "beta": 0.2}]
    entry = {"source": "A & B <2024>", "measure": "perplexity", "axes": ["model", "sparsity"], "values": {"opt": {"50%": 60.5}}}
    content = {"title": "Small & wide", "recipe": shared, "axes": axes, "leave_out": left_out, "published": [entry]}
    file = place / "s.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    sweep, out = read_sweep(file), place / "out"
    out.mkdir()
    (out / SWEEP).write_text(strict_json({"format": FORMAT} | sweep.model_dump(mode="json")), encoding="utf-8")
    for number, cell in enumerate(sweep.cells):
        folder = CellFolder(out, cell)
        folder.folder.mkdir(parents=True)
        if cell.labels["model"] == "none":
            if cell.labels["sparsity"] == "50%":
                folder.fail(ValueError("There is no model <none>."))
            continue
        error, bits = 0.1 + 0.01 * number, 2.5 + (cell.labels["sparsity"] == "50%")
        first, second = blocks(cell.recipe.sparsity, error=error, bits=4, group_size=0, bits_per_weight=bits, shape=SHAPE)
        epochs = tuple(EpochResult("h.0", n, "published", error / n, True, (1 + error) / n) for n in (1, 2))
        found = report(
            cell.recipe,
            **SIZE,
            blocks=[replace(first, epochs=epochs), second],
            perplexity=pruned(3.0 + error, 4.1 + error, 5.0 + 2 * error, text=cell.recipe.calibration),
            notes=["the texts are short"] if number < 3 else [],
            seconds={"pruning": 10.0 + number, "total": 12.0 + number},
        )
        folder.finish(SimpleNamespace(report=found))  # type: ignore[arg-type]
    return out
