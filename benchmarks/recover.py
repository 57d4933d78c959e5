"""What training wins back of what pruning lost, by what is trained: docs/recover.md.

    python benchmarks/recover.py measure demo:opt
    python benchmarks/recover.py measure PATH/wt2-llama --calibrate train.txt --test test.txt
    python benchmarks/recover.py measure PATH/wt2-llama --calibrate train.txt --test test.txt --patterns 80% --seeds 0
    python benchmarks/recover.py time demo:opt
    python benchmarks/recover.py table

The share is that of the lost logarithm of the perplexity, on a text that neither pruning nor training reads. Every cell is
written to benchmarks/measured/recover-MODEL.json as soon as it is known, so that a killed run continues. With a .json list of
stories for both texts, the first 1,800 stories calibrate and the rest measure. `time` trains for a fifth of the steps.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measuring import CUT, MEASURED, markdown_table, read_figures, record
from results import split_stories

import sparsellm
from sparsellm.extensions.recover.block_recovery import read_recovery
from sparsellm.extensions.recover.model_training import GENERATING, TRAINING, ModelTraining
from sparsellm.extensions.recover.run import recover_run
from sparsellm.extensions.recover.training import masked_training
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe

PATTERNS = ("70%", "80%", "90%", "2:4")
SEEDS = (0, 1, 2)
SAMPLES, LENGTH, WINDOWS = 128, 256, 200
PRODUCTS: dict[str, Any] = {"compute_dtype": "bfloat16"}
"""The training's products in bfloat16: at 60 and 80 % the shares were those of float32 within 0.3 %, in half of the time."""

PRUNERS: dict[str, dict[str, Any]] = {"sparsellm": {}, "sparsegpt": {"method": "sparsegpt"}}

ROADS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"train": "lora"},
}

TIMED_ROADS, TIMED_STEPS, TIMED_VALIDATIONS = ("full", "lora"), 240, 2
"""Validations are as frequent as in a training of the usual length."""


FILES = [file for file in sorted(MEASURED.glob("recover-*.json")) if file.stem != "recover-memory"]


def file_of(model: str) -> Path:
    """The file of a model's figures."""
    return MEASURED / f"recover-{Path(model.replace('demo:', 'demo-')).name}.json"


def texts(words: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The settings of the texts that calibrate and measure."""
    calibrate, test = words.calibrate, words.test
    if calibrate == test and calibrate.endswith(".json"):
        calibrate, test = split_stories(calibrate, folder)
    reads = {"calibration": calibrate, "samples": SAMPLES, "sequence_length": LENGTH} | CUT
    return reads | {"evaluate": test, "evaluate_limit": WINDOWS}


def measure(words: argparse.Namespace) -> None:
    """Fill the model's file of figures, cell by cell."""
    file = file_of(words.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, shared = texts(words, folder), DenseCache(folder / "dense")
        for seed in words.seeds:
            for pattern in words.patterns:
                for pruner in words.pruners:
                    keys = {road: f"{pruner} | {pattern} | {seed} | {road}" for road in words.roads}
                    known = read_figures(file)
                    missing = [road for road in words.roads if keys[road] not in known]
                    if not missing:
                        continue
                    pruned = folder / f"{pruner}-{pattern.replace(':', '-')}-{seed}"
                    recipe = read_recipe({"model": words.model, "sparsity": pattern, "seed": seed, **data, **PRUNERS[pruner]})
                    prune_run(recipe, shared=shared).save_pretrained(pruned)
                    for road in missing:
                        settings = {**data, "seed": seed, **PRODUCTS, **ROADS[road]}
                        record(file, keys[road], _recovered(words.model, pruned, settings, shared))


def time_roads(words: argparse.Namespace) -> None:
    """Add the seconds of generating text and of training to the model's file."""
    masked_training.VALIDATIONS = TIMED_VALIDATIONS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = texts(words, folder)
        pruning = read_recipe({"model": words.model, "method": "sparsegpt", "sparsity": "80%", **data})
        prune_run(pruning).save_pretrained(folder / "pruned")
        for road in (road for road in TIMED_ROADS if road in words.roads):
            settings = {"model": words.model, "pruned": str(folder / "pruned"), "steps": TIMED_STEPS, **PRODUCTS}
            recipe = read_recovery({**settings, **data, **ROADS[road]})
            report = recover_run(recipe).report
            record(file_of(words.model), f"seconds | {road}", {"seconds": report.seconds[TRAINING], "count": TIMED_STEPS})
            if road == "full":
                count = ModelTraining(recipe.resolved_steps).count_generated(SAMPLES, LENGTH)
                record(file_of(words.model), "seconds | text", {"seconds": report.seconds[GENERATING], "count": count})


def _recovered(model: str, pruned: Path, settings: dict[str, Any], shared: DenseCache) -> dict[str, Any]:
    """The perplexities before and after a recovery."""
    recipe = read_recovery({"model": model, "pruned": str(pruned), **settings})
    report = recover_run(recipe, shared=shared).report
    (text,) = report.perplexity
    dense, before, after = report.in_order(text)
    assert report.recovered is not None
    return {
        "dense": dense.value,
        "pruned": before.value,
        "recovered": after.value,
        "share": math.log(before.value / after.value) / math.log(before.value / dense.value),
        "steps": recipe.resolved_steps if recipe.steps_after else 0,
        "best step": report.recovered.steps,
    }


def table() -> list[str]:
    """The shares in Markdown, mean and standard deviation over seeds, with the perplexities of the models."""
    lines: list[str] = []
    for file in FILES:
        cells: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for key, figure in read_figures(file).items():
            if key.count(" | ") == 3:
                pruner, pattern, _, road = key.split(" | ")
                cells[pruner, pattern][road].append(figure)
        columns = [road for road in ROADS if any(road in roads for roads in cells.values())]
        rows = []
        for (pruner, pattern), roads in cells.items():
            figures = roads["full"] or next(iter(roads.values()))
            states = ("dense", "pruned", "recovered") if roads["full"] else ("dense", "pruned")
            means = [f"{mean(x[state] for x in figures):.2f}" for state in states]
            rows.append([pattern, pruner, " → ".join(means), *(_share(roads.get(road, [])) for road in columns)])
        lines += [f"{file.stem.removeprefix('recover-')}:", ""]
        header = ["pattern", "pruned by", "perplexity: dense → pruned → full", *columns]
        lines += [*markdown_table(header, rows, left=(0, 1)), ""]
    return lines[:-1]


def _share(figures: list[dict[str, Any]]) -> str:
    """Mean share in per cent with its standard deviation over seeds."""
    if not figures:
        return ""
    shares = [100 * figure["share"] for figure in figures]
    spread = f" ± {stdev(shares):.0f}" if len(shares) > 1 else ""
    return f"{round(mean(shares))}{spread} %"


def seconds_table() -> list[str]:
    """Seconds of generating text and of training in Markdown, for 1,000 sequences or steps."""
    rows = []
    for file in FILES:
        figures = {key.removeprefix("seconds | "): x for key, x in read_figures(file).items() if key.startswith("seconds | ")}
        cells = (figures.get(name) for name in ("text", *TIMED_ROADS))
        seconds = [f"{1000 * x['seconds'] / x['count']:.0f}" if x else "" for x in cells]
        rows.append([file.stem.removeprefix("recover-"), *seconds])
    return markdown_table(["seconds for 1,000", "sequences", *(f"steps: {road}" for road in TIMED_ROADS)], rows, left=(0,))


def main() -> None:
    """Measure or time a model, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "time", "table"])
    parser.add_argument("model", nargs="?", default="demo:opt")
    parser.add_argument("--calibrate", default="demo")
    parser.add_argument("--test", default="demo")
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--pruners", nargs="+", default=tuple(PRUNERS), choices=PRUNERS)
    parser.add_argument("--roads", nargs="+", default=tuple(ROADS), choices=ROADS)
    words = parser.parse_args()
    if words.command == "table":
        print("\n".join([*table(), "", *seconds_table()]))
        return
    torch.set_num_threads(1)
    print(sparsellm.__file__, file=sys.stderr)
    (measure if words.command == "measure" else time_roads)(words)


if __name__ == "__main__":
    main()
