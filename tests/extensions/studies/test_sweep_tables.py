"""Tables of sweeps: figures beside the dense model's and a paper's, errors, and what is best."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparsellm.cli.console import show, text_table
from sparsellm.evaluation.differences import Parts
from sparsellm.extensions.studies.figures import style
from sparsellm.extensions.studies.measures import Figure, mean_over_seeds
from sparsellm.extensions.studies.page import sweep_verdict
from sparsellm.extensions.studies.plots import axis_positions, sweep_plots
from sparsellm.extensions.studies.sweep_file import Sweep, read_sweep
from sparsellm.extensions.studies.sweep_runner import Outcome, read_outcomes
from sparsellm.extensions.studies.tables import Row, grid, table, to_csv, to_json, to_markdown
from tests import made_up
from tests.extensions.studies.test_sweep import AXES, SHARED, written
from tests.made_up import perplexity


def with_figures(tmp_path: Path, dense: float | None = None, **parts: Any) -> tuple[Sweep, list[Outcome]]:
    """A sweep with made-up results, three seeds, and a paper's figure for one of its rows; of a dense model if it is given."""
    values = {"demo:opt": {"wanda": {"70%": 20.0}}}
    published = [
        {"source": "Someone 2024, Table 1", "measure": "perplexity", "axes": ["model", "method", "sparsity"], "values": values}
    ]
    axes = AXES | {"seed": [0, 1, 2]}
    sweep = read_sweep(written(tmp_path, axes=axes, published=published, **parts))
    outcomes = []
    before = {} if dense is None else {"dense": perplexity(dense, 0.25)}
    for number, cell in enumerate(sweep.cells):
        measured = {"te_xt": {**before, "pruned": perplexity(10.0 + number, 0.5)}}
        outcomes.append(Outcome(cell, "finished", made_up.report(perplexity=measured)))
    outcomes[-1] = Outcome(sweep.cells[-1], "failed", error="out of luck")
    return sweep, outcomes


def test_figures_beside_the_paper_s(tmp_path: Path) -> None:
    sweep, outcomes = with_figures(tmp_path)
    rows = table(sweep, outcomes)
    assert len(rows) == 4
    figure = rows[2].figures["perplexity te_xt"]  # seeds 6, 7, 8: mean 17, deviation 1
    assert (figure.value, figure.standard_error, figure.published, figure.ratio) == (
        17.0,
        pytest.approx(1 / 3**0.5),
        20.0,
        0.85,
    )
    assert rows[3].seeds == 2
    assert rows[3].trouble == "failed"
    assert rows[0].figures["perplexity te_xt"].published is None
    lines = list(csv.DictReader(to_csv(sweep, rows).splitlines()))
    beside = [line for line in lines if line["published"]]
    assert [(x["method"], x["sparsity"], x["published"], x["ratio"]) for x in beside] == [("wanda", "70%", "20.0", "0.85")]
    data = to_json(sweep, rows, outcomes)
    assert data["rows"][2]["figures"]["perplexity te_xt"]["source"] == "Someone 2024, Table 1"
    assert data["cells"][-1]["error"] == "out of luck"
    text = to_markdown(sweep, rows)
    assert "17.00 ± 0.58 (paper 20.00, ×0.85)" in text
    assert "over 2 to 3 seeds" in text
    assert "Paper: Someone 2024, Table 1." in text
    assert "demo:opt, wanda, 2:4 (failed)" in text


def test_the_change_from_the_dense_model(tmp_path: Path) -> None:
    """In all three files; with an axis as the columns, the dense model has a line of its own too."""
    sweep, outcomes = with_figures(tmp_path, dense=8.0)
    rows = table(sweep, outcomes)
    assert "17.00 ± 0.58 (+112 %; paper 20.00, ×0.85)" in to_markdown(sweep, rows)
    line = next(x for x in csv.DictReader(to_csv(sweep, rows).splitlines()) if x["measure"] == "perplexity te_xt")
    assert (float(line["dense"]), float(line["change"])) == (8.0, 11 / 8 - 1)
    assert to_json(sweep, rows, outcomes)["rows"][0]["figures"]["perplexity te_xt"]["change"] == 11 / 8 - 1
    sweep, outcomes = with_figures(tmp_path, dense=8.0, columns="sparsity")
    head, lines = grid(sweep, table(sweep, outcomes))
    assert head == ["model", "method", "70%", "2:4"]
    assert lines[0] == ["demo:opt", "dense", "8.00 ± 0.25", "8.00 ± 0.25"]


def test_a_combination_is_best_only_beyond_the_error_of_the_difference(tmp_path: Path) -> None:
    """By the losses of the same sequences: 238 beside 240 with an error of 11 each is one or the other."""
    axes = {"model": ["demo:opt"], "method": ["alps", "wanda", "magnitude"], "sparsity": ["50%", "60%"]}
    sweep = read_sweep(written(tmp_path, axes=axes))
    losses = [5.0, 5.4, 5.8, 5.7]

    def figure(*changes: float, digest: str = "x") -> Figure:
        values = [loss + change for loss, change in zip(losses, changes, strict=True)]
        parts = Parts(digest, tuple(values))
        return Figure(math.exp(statistics.fmean(values)), 11.0, deviations=parts.deviations)

    same, noisy, surely = figure(0, 0, 0, 0), figure(0.05, -0.03, 0.02, 0.0), figure(0.2, 0.21, 0.2, 0.19)
    by_method = {("alps", "50%"): same, ("wanda", "50%"): noisy, ("magnitude", "50%"): surely}
    by_method |= {("alps", "60%"): surely, ("wanda", "60%"): same, ("magnitude", "60%"): figure(0.3, 0.3, 0.3, 0.31)}
    rows = [
        Row({"model": "demo:opt", "method": method, "sparsity": sparsity}, {"perplexity demo": x}, 1)
        for (method, sparsity), x in by_method.items()
    ]
    assert sweep_verdict(sweep, rows, read_outcomes(sweep, tmp_path))[1] == (
        "demo:opt, perplexity on demo: alps is lowest, with no difference measurable from wanda, at 50% (239); "
        "wanda is best at 60% (239)."
    )
    others = [replace(rows[0], figures={"perplexity demo": figure(0, 0, 0, 0, digest="other")}), rows[1], rows[2]]
    assert "by a difference of unknown error, at 50% (239)" in sweep_verdict(sweep, others, [])[1]
    assert "demo: alps at 50% (239)." in sweep_verdict(sweep, rows[:1], [])[1], "nothing is best of one"


def test_sizes_have_columns_or_lines_and_stand_in_bytes_in_the_files(tmp_path: Path) -> None:
    """With an axis as the columns, the size as written has one line, since all cells have the dense model's."""
    for columns in (None, "sparsity"):
        sweep, outcomes = with_figures(tmp_path, dense=8.0, columns=columns)
        sized = [replace(x, report=x.report and replace(x.report, **made_up.SIZE)) for x in outcomes]
        rows = table(sweep, sized)
        head, lines = grid(sweep, rows)
        if columns is None:
            assert head[-2:] == ["size", "packed size"]
            assert [line[-2:] for line in lines[:2]] == [["2.0 MiB", "-"], ["2.0 MiB", "2.0 MiB"]]
        else:
            assert [line[2] for line in lines].count("size") == 1
            assert [line[2] for line in lines].count("packed size") == 2, "of both methods"
        values = [x["value"] for x in csv.DictReader(to_csv(sweep, rows).splitlines()) if x["measure"] == "size"]
        assert {float(value) for value in values} == {made_up.SIZE["weight_bytes"]}


@pytest.mark.parametrize(("methods", "by_depth"), [(["wanda", "sparsegpt"], True), (["wanda", "sparsellm"], False)])
def test_plots_of_a_sweep_say_what_its_verdict_says(methods: list[str], by_depth: bool, tmp_path: Path) -> None:
    """The caption calls nothing best that the verdict does not; errors of different targets are in no plot."""
    axes = {"model": ["demo:opt"], "method": methods, "sparsity": ["50%", "70%", "2:4"]}
    sweep = read_sweep(written(tmp_path, axes=axes))
    outcomes = []
    for cell in sweep.cells:
        losses = (3.1, 4.1, 5.1) if cell.labels["method"] == "wanda" else (3.0, 4.1, 5.15)
        perplexities = made_up.pruned(*losses, text="te_xt")
        outcomes.append(
            Outcome(cell, "finished", made_up.report(cell.recipe, perplexity=perplexities, blocks=made_up.blocks("50%")))
        )
    rows = table(sweep, outcomes)
    with style():
        plots = {plot.name: plot for plot in sweep_plots(sweep, rows, outcomes)}
    claimed = f"{methods[1]} is lowest, with no difference measurable from wanda, at "
    assert claimed in sweep_verdict(sweep, rows, outcomes)[1]
    assert claimed in plots["sparsity-0"].text
    assert ("depth" in plots) == by_depth


def test_patterns_stand_apart_from_unstructured_sparsity() -> None:
    """On the right of the largest sparsity, each at a place of its own, beyond a border; alone they need none."""
    places, border = axis_positions("sparsity", ["50%", "2:4", "70%", "4:8"])
    assert border
    assert places["50%"] < places["70%"] < border < places["2:4"] < places["4:8"]
    assert axis_positions("sparsity", ["2:4", "4:8"])[1] is None
    assert axis_positions("sparsity", ["50%", "60%"])[1] is None
    assert axis_positions("samples", ["8", "16"]) == ({"8": 8.0, "16": 16.0}, None)


def test_an_error_of_zero_is_shown() -> None:
    """Over seeds that change nothing, and over questions of which all are answered; one that is not known is not."""
    assert mean_over_seeds([Figure(10.0, 1.0), Figure(10.0, 1.0)]).measured == "10.00 ± 0.00"
    assert Figure(1.0, 0.0, share=True).measured == "100.0 ± 0.0 %"
    assert Figure(10.0).measured == "10.00"


def test_the_error_of_a_mean_over_seeds_has_both_parts() -> None:
    """Over the sequences that all seeds share, and over the seeds."""
    dense = Parts("x", (1.0, 2.0, 3.0)).deviations
    seeds = [Figure(10.0, 1.0, Figure(8.0, 0.5, deviations=dense), Parts("x", (1.2, 2.3, 3.1)).deviations)]
    seeds.append(replace(seeds[0], value=11.0, deviations=Parts("x", (1.4, 2.3, 3.3)).deviations))
    mean = mean_over_seeds(seeds)
    assert mean.difference
    assert mean.difference.change == 10.5 / 8 - 1
    deviations = [(0.3, 0.3, 0.2)[number] - 0.8 / 3 for number in range(3)]
    over_sequences = 10.5 / 8 * math.sqrt(sum(x * x for x in deviations) / 6)
    assert mean.difference.standard_error == pytest.approx(math.hypot(over_sequences, 0.5 / 8))


def test_the_dense_line_has_the_labels_on_which_it_depends(tmp_path: Path) -> None:
    """Of a sweep over sequence lengths there are several dense figures; without other axes the line is named in the first."""
    axes = {"sequence_length": [16, 32], "method": ["magnitude", "wanda"]}
    for columns, method, expected in (
        (None, ["magnitude", "wanda"], [["16", "dense", "16.00"], ["32", "dense", "32.00"]]),
        (None, ["wanda"], [["16", "dense", "16.00"], ["32", "dense", "32.00"]]),
        ("sequence_length", ["wanda"], [["dense", "16.00", "32.00"]]),
    ):
        sweep = read_sweep(
            written(tmp_path, recipe=SHARED | {"model": "demo:opt"}, axes=axes | {"method": method}, columns=columns)
        )
        rows = []
        for cell in sweep.cells:
            dense = Figure(float(cell.labels["sequence_length"]))
            rows.append(Row(cell.labels, {"perplexity demo": Figure(40.0, dense=dense)}, 1))
        assert [line for line in grid(sweep, rows)[1] if "dense" in line] == expected
    only_columns = read_sweep(
        written(tmp_path, recipe=SHARED | {"model": "demo:opt"}, axes={"samples": [1, 2]}, columns="samples")
    )
    rows = [Row(cell.labels, {"perplexity demo": Figure(3.0, dense=Figure(2.0))}, 1) for cell in only_columns.cells]
    assert grid(only_columns, rows) == (["", "1", "2"], [["dense", *["2.00"] * 2], ["pruned", *["3.00 (+50.0 %)"] * 2]])


def test_a_narrow_console_keeps_every_column() -> None:
    """A table is printed as wide as it is: no column is dropped, no figure cut."""
    said = StringIO()
    made = text_table(["model", "method", *(f"{n}0%" for n in range(9))], [["a model", "a method", *["1,234.5 ± 67.8"] * 9]])
    show(Console(file=said, width=40), made)
    assert said.getvalue().split("\n")[1].split() == ["a", "model", "a", "method", *["1,234.5", "±", "67.8"] * 9]
