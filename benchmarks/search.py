"""A search for the sparsity that raises the perplexity by 5 %, beside a sweep over all sparsities: docs/search.md.

    python benchmarks/search.py demo:opt demo:llama
    python benchmarks/search.py PATH/wt2-opt PATH/wt2-llama --calibration PATH/train.txt --evaluate PATH/test.txt
    python benchmarks/search.py PATH/stories260K-llama --calibration calibrate.json --evaluate measure.json
    python benchmarks/render.py                                     # the page, from the figures

The sweep prunes with the effort "fast" at 1, 2, ..., 95 % and shares the dense model's results, as `sparsellm sweep` does. The
search prunes with "fast" by bisection and then once with "standard". Both decide by the increase and its standard error. A
third measurement writes three outputs by one command and by three runs. Seconds are processor time of this process on one
thread; imports are not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import MEASURED, markdown_table, read_figures, record

import sparsellm
from sparsellm.extensions.studies.search import bisect
from sparsellm.extensions.studies.target import Target, point_of
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.several import RunSet, output_folders, run_each
from sparsellm.recipes.file import read_recipe

FILE = MEASURED / "search.json"
INCREASE, HIGHEST = 0.05, 95
SEVERAL = ("50%", "60%", "70%")


def measure(model: str, settings: dict[str, Any]) -> None:
    """Measure a model, and record the figures."""
    fast = read_recipe({"model": model, **settings, "effort": "fast"})
    prune_run(fast)  # imports
    with tempfile.TemporaryDirectory() as folder:
        started, curve, met, target = time.process_time(), [], [], Target.read(INCREASE)
        shared = DenseCache(Path(folder) / "dense")
        for percent in range(1, HIGHEST + 1):
            report = prune_run(fast.model_copy(update={"sparsity": f"{percent}%"}), shared=shared).report
            point = point_of("sparsity", percent / 100, "fast", report, size=None, target=target)
            curve.append(point.increase)
            met.append(point.met)
        swept = time.process_time() - started
        started = time.process_time()
        search = sparsellm.search(model, Path(folder) / "out", max_perplexity_increase=INCREASE, **settings)
        searched = time.process_time() - started
    figures = {
        "settings": {key: value for key, value in settings.items() if key not in ("calibration", "evaluate")},
        "largest": max((number for number, is_met in enumerate(met, 1) if is_met), default=0),
        "first_missed": met.index(False) + 1 if False in met else HIGHEST + 1,
        "bisected": bisect(lambda number: met[number - 1], HIGHEST),
        "found": round(100 * search.value),
        "points": len(search.points),
        "increase": search.points[-1].increase,
        "sweep_seconds": swept,
        "search_seconds": searched,
        "curve": curve,
        "several": {effort: several(model, settings | {"effort": effort}) for effort in ("fast", "standard")},
    }
    record(FILE, Path(model.replace("demo:", "demo-")).name, figures)


def several(model: str, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of three outputs with shared results of the dense model, and of three runs without."""
    recipes = [read_recipe({"model": model, **settings, "sparsity": sparsity}) for sparsity in SEVERAL]
    seconds = {}
    for label in ("shared", "apart"):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            runs = RunSet(lambda _: None, Path(folder) / "dense" if label == "shared" else None)
            anew = {"finished": [False] * len(recipes), "resume": False, "restart": False, "overwrite": False}
            run_each(output_folders(folder, recipes), runs, **anew)
            seconds[label] = time.process_time() - started
    return seconds


def table() -> list[str]:
    """Sparsities and seconds of the sweep and of the search."""
    rows = []
    for name, x in read_figures(FILE).items():
        if name != "machine":
            largest = (
                f"{x['largest']} %" if x["largest"] + 1 == x["first_missed"] else f"{x['first_missed'] - 1}–{x['largest']} %"
            )
            increase, ratio = f"{100 * x['increase']:.1f} %", x["search_seconds"] / x["sweep_seconds"]
            seconds = [f"{x['sweep_seconds']:.0f}", f"{x['search_seconds']:.0f}", f"{ratio:.2f}"]
            rows.append([name, largest, f"{x['found']} %", increase, *seconds])
    head = ["model", "sweep finds", "search finds", "increase of the output", "sweep, s", "search, s", "ratio"]
    return markdown_table(head, rows)


def several_table() -> list[str]:
    """Seconds of three outputs by one command and by three runs."""
    rows = []
    for name, x in read_figures(FILE).items():
        for effort, seconds in x["several"].items() if name != "machine" else ():
            ratio = seconds["shared"] / seconds["apart"]
            rows.append([name, effort, f"{seconds['apart']:.1f}", f"{seconds['shared']:.1f}", f"{ratio:.2f}"])
    return markdown_table(["model", "effort", "three runs, s", "one command, s", "ratio"], rows, left=(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--evaluate", default="demo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = {"calibration": options.calibration, "evaluate": options.evaluate}
    for model in options.models:
        print(model, file=sys.stderr)
        measure(model, {**texts, "samples": 8, "sequence_length": 128, "evaluate_limit": 16})


if __name__ == "__main__":
    main()
