"""How much log-perplexity pruning costs, by method, ingredient and text: docs/results.md.

    python benchmarks/excess.py measure demo:opt                              # the main table of one model
    python benchmarks/excess.py measure PATH/wt2-llama --calibrate train.txt --test test.txt
    python benchmarks/excess.py measure demo:opt --suite ingredients --patterns 80% --seeds 0
    python benchmarks/excess.py measure PATH/wt2-llama --calibrate c4.jsonl --test test.txt --patterns 80%
    python benchmarks/excess.py tables                                        # what was measured, as Markdown

Excess is the logarithm of the pruned model's perplexity over the dense one's. Every cell is written to
benchmarks/measured/excess-MODEL.json as soon as it is known; a killed run continues, and two processes may fill one file with
different `--patterns`. With a .json list of stories for both texts, the first 1,800 stories calibrate and the rest measure.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from statistics import mean, stdev

import torch
from forms import EFFORTS, INGREDIENTS, MAIN, SUITES
from measuring import CUT, MEASURED, add_measure, markdown_table, processor
from results import split_stories

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.observers.display import with_standard_error
from sparsellm.observers.events import Stage
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text

PATTERNS = ("60%", "70%", "80%", "90%", "2:4", "3:4")
SEEDS = (0, 1, 2)
SAMPLES, LENGTH, WINDOWS = 128, 256, 200


def measure_model(words: argparse.Namespace) -> None:
    """Fill the model's file of figures, cell by cell."""
    name = Path(words.model.replace("demo:", "demo-")).name
    with tempfile.TemporaryDirectory() as folder:
        calibrate, test = words.calibrate, words.test
        if calibrate == test and calibrate.endswith(".json"):
            calibrate, test = split_stories(calibrate, folder)
        source = open_checkpoint(words.model)
        tests = test_windows(read_text(test, "test"), source.tokenizer(), LENGTH, limit=WINDOWS, **CUT).windows
        dense = measure_perplexity(source.load(), tests)
        text = Path(words.calibrate).stem
        _record(name, "dense", {"perplexity": dense.value, "standard_error": dense.standard_error, "windows": len(tests)})
        suite = {label: change for label, change in SUITES[words.suite].items() if change is not None}
        chosen = {label: change for label, change in suite.items() if label in (words.only or suite)}
        for seed in words.seeds:
            for pattern in words.patterns:
                for label, change in chosen.items():
                    key = f"{label} | {pattern} | {seed} | {SAMPLES} | {text}"
                    if key in known(name):
                        continue
                    if change.get("allocation") in ("owl", "fisher") and ":" in pattern:
                        continue
                    settings = {
                        "model": words.model,
                        "calibration": calibrate,
                        "samples": SAMPLES,
                        "sequence_length": LENGTH,
                    } | CUT
                    clock = Clock()
                    result = prune_run(read_recipe(settings | change | {"sparsity": pattern, "seed": seed}), clock)
                    seconds = clock.seconds()
                    found = measure_perplexity(result.model, tests)
                    cell = {"excess": math.log(found.value / dense.value), "perplexity": found.value}
                    _record(name, key, cell | {"seconds": round(seconds, 1)})
                    print(f"{name:18} {key:70} {cell['excess']:8.4f} {seconds:7.1f} s", file=sys.stderr, flush=True)


class Clock:
    """Seconds of the processor that a run's pruning takes: what else runs on the machine hardly changes them."""

    def __init__(self) -> None:
        self._stage, self._since, self._spent = "", time.process_time(), defaultdict[str, float](float)

    def __call__(self, event: object) -> None:
        """Told what happens in the run."""
        if isinstance(event, Stage):
            self._settle(event.name)

    def seconds(self) -> float:
        """So far, without opening, reading and loading."""
        self._settle(self._stage)
        return sum(spent for stage, spent in self._spent.items() if stage not in ("", "opening", "reading texts", "loading"))

    def _settle(self, stage: str) -> None:
        now = time.process_time()
        self._spent[self._stage] += now - self._since
        self._stage, self._since = stage, now


def known(name: str) -> dict:
    """What was measured of a model so far."""
    file = MEASURED / f"excess-{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _record(name: str, key: str, cell: dict) -> None:
    """Add a cell to a model's file; processes take turns."""
    MEASURED.mkdir(exist_ok=True)
    with open(Path(tempfile.gettempdir()) / "sparsellm-measured.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = known(name) | {key: cell, "machine": f"{processor()}, torch {torch.__version__}"}
        (MEASURED / f"excess-{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def texts(data: dict) -> list[str]:
    """The texts that a model was calibrated on, its own first."""
    return list(dict.fromkeys(key.split(" | ")[4] for key in data if key.count(" | ") == 4))


def by_seed(data: dict, label: str, pattern: str, samples: int = SAMPLES, text: str = "") -> dict[str, dict]:
    """The cells of one method at one pattern; calibrated on the model's own text unless another is given."""
    wanted = [label, pattern, str(samples), text or next(iter(texts(data)), "")]
    found = {}
    for key, cell in data.items():
        if key.count(" | ") == 4:
            *words, seed, number, name = key.split(" | ")
            if [*words, number, name] == wanted:
                found[seed] = cell
    return found


def summary(found: Mapping[str, dict], figure: str = "excess") -> str:
    """Mean and standard deviation over seeds. figure: `excess` or `perplexity`."""
    if not found:
        return ""
    values = [cell[figure] for cell in found.values()]
    spread = stdev(values) if len(values) > 1 else None
    if figure == "perplexity":
        return with_standard_error(mean(values), spread)
    return f"{mean(values):.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def ratio(data: dict, label: str, base: str, pattern: str) -> float | None:
    """The mean excess of one method as a share of another's, over the seeds that both have."""
    mine, other = by_seed(data, label, pattern), by_seed(data, base, pattern)
    both = mine.keys() & other.keys()
    return sum(mine[seed]["excess"] for seed in both) / sum(other[seed]["excess"] for seed in both) if both else None


def main_table(data: dict) -> list[str]:
    """A model's excess by method and pattern, and the default's as shares of other methods'."""
    rows = [[label, *(summary(by_seed(data, label, p)) for p in PATTERNS)] for label in MAIN]
    for label in (label for label in MAIN if label.startswith("sparsellm") and label != "sparsellm, shared out by error"):
        for base in ("SparseGPT", "ALPS", "Algorithm 1"):
            shares = [ratio(data, label, base, p) for p in PATTERNS]
            rows.append([f"*{label} / {base}*", *("" if share is None else f"{share:.3f}" for share in shares)])
    return markdown_table(["", *PATTERNS], (row for row in rows if any(row[1:])))


def ingredients_table(data: dict) -> list[str]:
    """Excess and seconds with one ingredient off, one more, and one alone, at every pattern that was measured."""
    patterns = [p for p in PATTERNS if any(by_seed(data, label, p) for label in INGREDIENTS)]
    rows = []
    for label in INGREDIENTS if patterns else ():
        found = [by_seed(data, label, p) for p in patterns]
        words = ((summary(some), f"{mean(c['seconds'] for c in some.values()):.0f}" if some else "") for some in found)
        rows += [[label, *chain(*words)]] if any(found) else []
    return markdown_table(["", *chain(*((p, "seconds") for p in patterns))], rows) if rows else []


def other_texts_table(data: dict) -> list[str]:
    """Excess when calibrated on one text and measured on another."""
    lines: list[str] = []
    for text in texts(data)[1:]:
        patterns = [p for p in PATTERNS if any(by_seed(data, label, p, text=text) for label in MAIN)]
        rows = ([label, *(summary(by_seed(data, label, p, text=text)) for p in patterns)] for label in MAIN)
        lines += [f"Calibrated on {text}:", "", *markdown_table(["", *patterns], (row for row in rows if any(row[1:])))]
    return lines


BASE, AT = next(iter(EFFORTS)), "80%"
"""The form that efforts are compared with, and the sparsity."""


def efforts_table() -> list[str]:
    """Seconds and excess of each effort, and as multiples of SparseGPT's, for every model that was measured."""
    models = {name: data for name, data in of_models().items() if by_seed(data, BASE, AT)}

    def cell(data: dict, label: str, figure: str, form: str) -> str:
        """The mean over seeds, with its multiple of SparseGPT's."""
        value = form.format(_mean_at(data, label, figure))
        return value if label == BASE else f"{value} ({_multiple(data, label, figure)} x)"

    rows = []
    for label in EFFORTS:
        option = "--method sparsegpt" if label == BASE else f"--{label}"
        cells = ((cell(data, label, "seconds", "{:.1f} s"), cell(data, label, "excess", "{:.3f}")) for data in models.values())
        rows.append([f"`{option}`", *chain(*cells)])
    return markdown_table(["", *chain(*((f"{name}, time", "excess") for name in models))], rows)


def efforts_in_short() -> list[str]:
    """Of each effort, the multiples of SparseGPT's time and excess on demo:opt, as a sentence."""
    data = of_models()["demo-opt"]
    fast, standard, best = ([_multiple(data, label, x) for x in ("seconds", "excess")] for label in EFFORTS if label != BASE)
    return [
        f"On demo:opt at {AT[:-1]} %, `--effort fast` takes {fast[0]} times SparseGPT's time and leaves {fast[1]} of its",
        f"excess log perplexity, `standard` {standard[0]} times and {standard[1]}, and `best`, which adds training of the",
        f"whole model, {best[0]} times and {best[1]} ([less time](docs/methods/sparsellm.md#less-time)).",
    ]


def _mean_at(data: dict, label: str, figure: str) -> float:
    """The mean over seeds of a figure of a form."""
    return mean(x[figure] for x in by_seed(data, label, AT).values())


def _multiple(data: dict, label: str, figure: str) -> str:
    """The mean of a figure in multiples of SparseGPT's, to two digits at least."""
    times = _mean_at(data, label, figure) / _mean_at(data, BASE, figure)
    return f"{times:.{'0f' if times >= 10 else '2g'}}"


def of_models() -> dict[str, dict]:
    """What was measured of each model, by its name."""
    return {
        name: known(name) for file in sorted(MEASURED.glob("excess-*.json")) for name in [file.stem.removeprefix("excess-")]
    }


def tables() -> list[str]:
    """All that was measured, as Markdown."""
    lines: list[str] = []
    for title, data in of_models().items():
        lines += [f"### {title}", "", f"Dense: {data['dense']['perplexity']:.2f}.", "", *main_table(data), ""]
        rest = {
            "Ingredients": ingredients_table(data),
            "Another text": other_texts_table(data),
        }
        for name, some in rest.items():
            lines += [f"#### {name}, {title}", "", *some, ""] if some else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = add_measure(commands, PATTERNS, SEEDS)
    measuring.add_argument("--suite", choices=SUITES, default="main")
    measuring.add_argument("--only", nargs="+", help="methods of the suite; all by default")
    commands.add_parser("tables")
    words = parser.parse_args()
    if words.command == "tables":
        print("\n".join(tables()))
    else:
        measure_model(words)


if __name__ == "__main__":
    main()
