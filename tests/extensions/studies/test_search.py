"""Searches for a sparsity: bisection against brute force, whole searches on tiny models, interrupted ones, and bad input."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting, OutputExists, TargetNotReached
from sparsellm.evaluation.differences import Difference
from sparsellm.evaluation.results import Accuracy
from sparsellm.extensions.studies import search as searching
from sparsellm.extensions.studies.search import bisect
from sparsellm.extensions.studies.search_result import Point, SearchResult
from sparsellm.extensions.studies.sweep_runner import CellFolder
from sparsellm.extensions.studies.target import Decision, Target, outcome, undecided_note
from sparsellm.extensions.studies.target import point_of as real_point
from sparsellm.methods import BlockResult
from sparsellm.observers.events import NextRun, Note
from sparsellm.outputs.report import Report, load_report
from tests import processes
from tests.core.cli.test_bad_input import refused
from tests.core.cli.test_several import compared

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

Command = Callable[..., Result]

ACCURACY = ("--method", "magnitude", "--min-accuracy", "arc_easy:0.3", "--step", "20%")
"""Options of a search for an accuracy on a task."""

INCREASE: dict[str, Any] = {"max_perplexity_increase": "5%"}
"""A target in Python."""


@pytest.fixture
def words(loud: dict[str, Path], text_file: Path) -> tuple[object, ...]:
    """A search on the tiny Llama but for its output and target."""
    texts = ("--calibration", text_file, "--evaluate", text_file, "--samples", 4, "--sequence-length", 32)
    return (loud["llama"], *texts, "--evaluate-limit", 8, "--step", "10%")


@pytest.fixture
def settings(text_file: Path) -> dict[str, Any]:
    """The same in Python."""
    texts = {"calibration": text_file, "evaluate": str(text_file), "samples": 4, "sequence_length": 32}
    return {**texts, "evaluate_limit": 8, "step": "10%"}


def test_bisection_of_monotone_curves_finds_what_brute_force_finds() -> None:
    """In as few trials as there are bits; also where all numbers meet the target, or none."""
    for count in range(1, 40):
        for largest in range(count + 1):
            tried: list[int] = []

            def is_met(number: int, largest: int = largest, tried: list[int] = tried) -> bool:
                tried.append(number)
                return number <= largest

            assert bisect(is_met, count) == largest
            assert len(tried) == len(set(tried)) <= math.ceil(math.log2(count + 1))


def test_bisection_of_noisy_curves_ends_at_a_crossing() -> None:
    """What it finds meets the target, and the next larger one does not."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        curve = torch.linspace(0, 1, 60) + 0.2 * torch.randn(60, generator=generator)
        met = [True, *(curve <= 0.5).tolist(), False]
        found = bisect(met.__getitem__, 60)
        assert met[found]
        assert not met[found + 1]


def test_a_search_equals_single_runs(
    words: tuple[object, ...], settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """Each point is that of a run of its own, and so is the output; the curve stands in its report and in the page."""
    pytest.importorskip("matplotlib")
    del settings["step"]
    curve, highest = [], []
    for percent in range(20, 100, 20):
        report = sparsellm.prune(loud["llama"], sparsity=f"{percent}%", effort="fast", **settings).report
        pair = next(iter(report.perplexity.values()))
        increase = pair["pruned"].against(pair["dense"])
        curve.append(increase.change)
        highest.append(increase.change + 2 * increase.standard_error)
    limit = (highest[1] + highest[2]) / 2 if highest[1] < highest[2] else highest[1]
    met = [increase <= limit for increase in highest]
    expected = bisect(lambda number: met[number - 1], len(met))
    out = tmp_path / "out"
    done = command("search", *words, out, "--step", "20%", "--max-perplexity-increase", f"{100 * limit!r}%", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    fast = [point for point in result["points"] if point["effort"] == "fast"]
    assert all(point["increase"] == curve[round(5 * point["value"]) - 1] for point in fast)
    assert max(point["value"] for point in fast if point["met"]) == pytest.approx(expected / 5)
    assert {point["met"] for point in result["points"] if point["effort"] == "standard"} >= {True}
    assert result["points"][-1]["value"] <= expected / 5 + 1e-9
    saved = load_report(out)
    search = SearchResult.of(saved)
    assert search is not None
    assert [point.value for point in search.points] == [point["value"] for point in result["points"]]
    assert command("verify", out, "--against", loud["llama"]).exit_code == 0
    alone = sparsellm.prune(loud["llama"], sparsity=result["value"], **settings).save_pretrained(tmp_path / "alone")
    found, single = compared(out), compared(alone)
    assert found["report"].pop("search")["target"] == result["target"]
    assert found == single
    assert "Sparsities that the search tried" in sparsellm.report(out).read_text(encoding="utf-8")


def test_an_interrupted_search_repeats_no_finished_run(settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path) -> None:
    """It ends as one that was not interrupted, and leaves nothing else."""
    target = {"max_perplexity_increase": 0.3, "effort": "fast"}
    whole = sparsellm.search(loud["opt"], tmp_path / "whole", **target, **settings)
    runs: list[str] = []

    def observe(event: object) -> None:
        if isinstance(event, NextRun):
            runs.append(event.name)

    def interrupt_after(blocks: int) -> Callable[[object], None]:
        left = [blocks]

        def interrupting(event: object) -> None:
            observe(event)
            left[0] -= isinstance(event, BlockResult)
            if not left[0]:
                raise KeyboardInterrupt

        return interrupting

    for blocks in (4, 4):  # of three blocks each run
        with pytest.raises(KeyboardInterrupt) as caught:
            sparsellm.search(loud["opt"], tmp_path / "out", **target, **settings, observe=interrupt_after(blocks))
        assert "repeat the command to continue" in caught.value.__notes__[-1]
        assert not any("`resume`" in note for note in caught.value.__notes__)
    result = sparsellm.search(loud["opt"], tmp_path / "out", **target, **settings, observe=observe)
    assert len(runs) == len(set(runs)) + 2  # only the interrupted ones are begun again
    assert [replace(point, seconds=0) for point in result.points] == [replace(point, seconds=0) for point in whole.points]
    files = [load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", tmp_path / "out")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.long
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra `eval`)")
def test_a_search_for_an_accuracy_equals_single_runs(
    loud: dict[str, Path], questions: Path, tmp_path: Path, command: Command
) -> None:
    """The sparsity is that of bisection over single runs, and the accuracy of the output is at least the target."""
    given = {"method": "magnitude", "task": "arc_easy", "task_data": str(questions)}
    accuracies = [
        sparsellm.prune(loud["llama"], sparsity=percent / 100, **given).report.tasks["arc_easy"]["pruned"].value
        for percent in range(20, 95, 20)
    ]
    met = [value >= 0.3 for value in accuracies]
    assert True in met
    assert False in met
    done = command("search", loud["llama"], tmp_path / "out", *ACCURACY, "--task-data", questions, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["value"] == bisect(lambda number: met[number - 1], len(met)) / 5
    for point in result["points"]:
        assert point["accuracy"] == {"arc_easy": accuracies[round(5 * point["value"]) - 1]}
        assert point["met"] == (point["accuracy"]["arc_easy"] >= 0.3)
    again = command("evaluate", tmp_path / "out", "--task", "arc_easy", "--task-data", questions, "--json")
    assert json.loads(again.stdout)["accuracy"]["arc_easy"]["value"] == result["report"]["tasks"]["arc_easy"]["pruned"]["value"]


@pytest.mark.long
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra `eval`)")
@pytest.mark.skipif(sys.platform != "linux", reason="needs processes that are forked from a server, and SIGKILL")
def test_a_search_for_an_accuracy_goes_on_after_a_kill(
    loud: dict[str, Path], questions: Path, tmp_path: Path, server: ForkServerContext, command: Command
) -> None:
    """Killed after its second run, it repeats neither, and ends as one that was not killed."""
    options = (
        *ACCURACY[:-1],
        "10%",
        "--task-data",
        questions,
    )  # the last run replaces the point of its sparsity, here a later one
    words = {name: ("search", loud["llama"], tmp_path / name, *options) for name in ("whole", "out")}
    process, deadline = processes.started(server, words["out"], tmp_path / "said.txt"), time.monotonic() + 120
    kept: list[Path] = []
    while len(kept) < 2 and process.is_alive() and time.monotonic() < deadline:
        kept = list((tmp_path / "out").glob(".sparsellm/search-*/cells/*/result.json"))
    process.kill()
    process.join()
    seconds = {json.loads(file.read_text())["report"]["seconds"]["total"] for file in kept}
    assert len(seconds) == 2, (tmp_path / "said.txt").read_text()
    assert not (tmp_path / "out" / "sparsellm.json").exists()
    resumed, whole = (json.loads(command(*words[name], "--json").stdout)["points"] for name in ("out", "whole"))
    assert {point["seconds"] for point in resumed} >= seconds
    assert [point | {"seconds": 0} for point in resumed] == [point | {"seconds": 0} for point in whole]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "said.txt", "tasks", "whole"]


def test_a_smaller_sparsity_follows_where_the_final_effort_misses_the_target(
    settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, final = searching.run_cell, []

    def worse(cell_folder: CellFolder, *given: Any, finish: Callable[[Any], object] = lambda _: None, **named: Any) -> Any:
        def with_loss(result: Any) -> None:
            if cell_folder.cell.recipe.effort == "standard":
                final.append(cell_folder.cell.recipe.sparsity)
                for pair in result.report.perplexity.values() if len(final) == 1 else ():
                    pair["pruned"] = replace(pair["pruned"], value=math.inf)
            finish(result)

        return real(cell_folder, *given, finish=with_loss, **named)

    monkeypatch.setattr(searching, "run_cell", worse)
    seen: list[object] = []
    result = sparsellm.search(loud["llama"], tmp_path / "out", max_perplexity_increase=1.0, **settings, observe=seen.append)
    assert len(final) == 2
    assert sparsellm.parse_pattern(final[1]).sparsity == result.value
    assert sparsellm.parse_pattern(final[0]).sparsity == pytest.approx(result.value + 0.1)
    assert any(isinstance(event, Note) and "the target is missed" in event.text and final[0] in event.text for event in seen)
    assert [point.met for point in result.points if point.effort == "standard"] == [True, False]
    assert load_report(tmp_path / "out").recipe.sparsity == final[1]


@pytest.mark.parametrize("method", [("--method", "wanda"), ("--effort", "fast"), ("--method", "magnitude")])
def test_a_search_that_ends_at_its_largest_sparsity_says_so(
    method: tuple[str, ...], words: tuple[object, ...], tmp_path: Path, command: Command
) -> None:
    """Where trials have the output's own settings, the last one is the output: no sparsity is pruned twice."""
    target = ("--max-perplexity-increase", "1e9%")
    done = command("search", *words, *method, tmp_path / "out", *target)
    assert done.exit_code == 0, done.stderr
    assert "output at" not in done.stderr
    saved = load_report(tmp_path / "out")
    (note,) = (text for text in saved.notes if "that is tried" in text)
    assert note == (
        "the model at 90% has a perplexity increase of at most 1000000000 %, and has the largest sparsity that is tried. "
        "Pass a smaller --step for larger ones"
    )
    assert f"note: {note}" in done.stderr.splitlines()
    search = SearchResult.of(saved)
    assert search is not None
    assert [point.value for point in search.points] == [0.5, 0.7, 0.8, 0.9]
    assert command("verify", tmp_path / "out").exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / ".sparsellm").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--step", "19%", "--max-perplexity-increase", "1e9%"),
            "the model at 95% has * the largest sparsity * A pruning run takes larger ones",
        ),
        (("--max-size", "1GB"), "the model at 10% has * the smallest sparsity * Pass a smaller --step for smaller ones"),
    ],
)
def test_each_bound_of_a_search(
    options: tuple[str, ...], message: str, words: tuple[object, ...], tmp_path: Path, command: Command
) -> None:
    done = command("search", *words, "--method", "wanda", tmp_path / "out", *options)
    assert done.exit_code == 0, done.stderr
    assert fnmatch(done.stderr, f"*note: {message}*"), done.stderr


def test_the_last_trial_is_no_output_where_it_misses_the_target(
    settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest sparsity that met the target is pruned again, to the bytes of a run of its own."""
    monkeypatch.setattr(
        searching, "point_of", lambda over, value, *x, **y: replace(real_point(over, value, *x, **y), met=value < 0.85)
    )
    runs: list[str] = []
    observe = {"observe": lambda event: runs.append(event.name) if isinstance(event, NextRun) else None}
    target = {"max_perplexity_increase": 1e-9, "method": "wanda"}
    result = sparsellm.search(loud["llama"], tmp_path / "out", **target, **settings, **observe)
    assert runs == ["trying 50%", "trying 70%", "trying 80%", "trying 90%", "output at 80%"]
    assert result.value == 0.8
    del settings["step"]
    sparsellm.prune(loud["llama"], "wanda", "80%", **settings).save_pretrained(tmp_path / "alone")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "alone")]
    assert files[0] == files[1]


def test_an_unreachable_target_shows_the_curve_and_leaves_nothing(
    words: tuple[object, ...], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "decide", lambda self, increases, accuracy: Decision(met=not list(increases), undecided=False))
    done = command("search", *words, tmp_path / "out", "--max-perplexity-increase", "1%")
    refused(done, "No sparsity has a perplexity increase of at most 1 %: a perplexity increase of")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["sparsity", "10", "20", "50"]
    assert not (tmp_path / "out").exists()
    done = command("search", *words, tmp_path / "out", "--max-perplexity-increase", "1%", "--json")
    assert done.exit_code == 1
    assert [point["value"] for point in json.loads(done.stdout)["points"]] == [0.1, 0.2, 0.5]


def test_a_dense_model_that_misses_the_target_ends_the_search_at_once(
    settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "decide", lambda *_: Decision(met=False, undecided=False))
    stages: list[object] = []
    with pytest.raises(TargetNotReached, match="The dense model itself"):
        sparsellm.search(loud["opt"], tmp_path / "out", max_perplexity_increase="1%", **settings, observe=stages.append)
    assert sum(isinstance(event, NextRun) for event in stages) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_size_is_met_by_the_smallest_sparsity(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """The size of the tensors that `pack` writes, for which the search has an estimate from above."""

    def size(folder: Path) -> int:
        sparsellm.pack(folder, packed := folder.with_name(f"{folder.name}-packed"))
        return sum(tensor.nbytes for tensor in load_file(packed / "model.safetensors").values())

    sparsellm.prune(tiny[family], "magnitude", "60%").save_pretrained(tmp_path / "60")
    limit = size(tmp_path / "60") * 105 // 100
    result = sparsellm.search(tiny[family], tmp_path / "out", max_size=limit, method="magnitude")
    assert result.value == pytest.approx(0.6, abs=0.04)
    assert 0.93 * limit < size(tmp_path / "out") <= limit
    with pytest.raises(TargetNotReached, match="95% takes"):
        sparsellm.search(tiny[family], tmp_path / "none", max_size="1kB", method="magnitude")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("method", ["sparsegpt", "sparsellm"])
def test_a_search_over_bits_finds_the_fewest(
    method: str, words: tuple[object, ...], settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """The next number of bits does not meet the target, and the output is that of a run with these bits."""
    pytest.importorskip("matplotlib")
    options = ("--over", "bits", "--step", "1", "--method", method, "--max-perplexity-increase", "3%")
    done = command("search", *words[:-2], *options, tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["over"] == "bits"
    tried = {point["value"]: point["met"] for point in found["points"] if point["effort"] != "standard"}
    assert tried[found["value"]]
    assert not tried.get(found["value"] - 1, False)
    assert sorted(tried, reverse=True) == list(tried)
    del settings["step"]
    sparsellm.prune(loud["llama"], method, bits=found["value"], **settings).save_pretrained(tmp_path / "alone")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "alone")]
    assert files[0] == files[1]
    assert command("verify", tmp_path / "out", "--against", loud["llama"]).exit_code == 0
    assert "Bits that the search tried" in sparsellm.report(tmp_path / "out").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_size_is_met_by_the_most_bits(
    family: str, tiny: dict[str, Path], settings: dict[str, Any], tmp_path: Path, command: Command
) -> None:
    """Nothing is tried. A size that masks and scales alone exceed is refused with that of the fewest bits."""

    def size(bits: float) -> int:
        out = tmp_path / f"{bits}"
        sparsellm.prune(tiny[family], "magnitude", bits=bits, output=out, overwrite=True, **settings)
        sparsellm.pack(out, packed := tmp_path / f"{bits}-packed", allow_dense=True, overwrite=True)
        return sum(tensor.nbytes for tensor in load_file(packed / "model.safetensors").values())

    del settings["step"], settings["evaluate"]
    over: dict[str, Any] = {"method": "magnitude", "over": "bits", "step": 1.0, **settings}
    events: list[object] = []
    limit = 102 * size(4.0) // 100
    result = sparsellm.search(tiny[family], tmp_path / "out", max_size=limit, observe=events.append, **over)
    assert result.value in (3.0, 4.0)
    assert size(result.value) <= limit
    assert sum(isinstance(event, NextRun) for event in events) == 1
    with pytest.raises(TargetNotReached, match=r"No number of bits has .*: [12] bits a weight takes"):
        sparsellm.search(tiny[family], tmp_path / "none", max_size="1kB", **over)
    assert not (tmp_path / "none").exists()


def test_a_search_over_bits_of_a_model_that_is_mostly_embeddings_says_so(
    settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path
) -> None:
    """Once. The output head is refused as by `prune`."""
    over: dict[str, Any] = {"method": "magnitude", "over": "bits", "max_size": "1GB", **settings, "step": 2}
    events: list[object] = []
    sparsellm.search(loud["llama"], tmp_path / "some", observe=events.append, blocks="0", **over)
    assert sum(isinstance(event, Note) and "embeddings, output head and other weights" in event.text for event in events) == 1
    with pytest.raises(InvalidSetting, match="leave the output head out"):
        sparsellm.search(loud["llama"], tmp_path / "head", include=["*_proj", "lm_head"], **over)
    assert not (tmp_path / "head").exists()


def test_what_targets_mean() -> None:
    increase = Target.read("5%")
    assert increase == Target.read(0.05) == Target.read("0.05")
    assert increase.decide([Difference(0.05), Difference(0.0)], {}) == Decision(met=True, undecided=False)
    assert increase.decide([Difference(0.0), Difference(0.1)], {}) == Decision(met=False, undecided=False)
    assert increase.decide([Difference(0.0), None], {}) == Decision(met=False, undecided=False)
    accuracy = Target.read(min_accuracy=["boolq:0.6", "rte:55%"])
    assert accuracy == Target.read(min_accuracy={"boolq": 0.6, "rte": 0.55})
    scores = {"boolq": Accuracy(0.6, None, None, 5), "rte": Accuracy(0.7, None, None, 5)}
    assert accuracy.decide([], scores).met
    assert not accuracy.decide([], scores | {"rte": Accuracy(0.5, None, None, 5)}).met
    assert Target.read(max_size="2MB") == Target.read(max_size=2_000_000)
    with pytest.raises(InvalidSetting, match="got none"):
        Target.read()


@pytest.mark.parametrize(
    ("change", "error", "answer"),
    [(0.045, 0.076, "undecided"), (0.053, 0.076, "undecided"), (0.045, 0.001, "yes"), (0.053, 0.001, "no")],
)
def test_an_increase_within_its_error_of_the_target_is_undecided(change: float, error: float, answer: str) -> None:
    """4.5 and 5.3 % with an error of 7.6 % are one or the other; with one of 0.1 % they are below and above 5 %."""
    decision = Target.read("5%").decide([Difference(-0.5, 0.01), Difference(change, error)], {})
    assert decision == Decision(met=answer == "yes", undecided=answer == "undecided")
    point = Point("sparsity", 0.5, "fast", decision.met, {}, change, {}, None, 1.0, decision.undecided, error)
    assert point.answer == answer
    assert point.describe() == f"a perplexity increase of {100 * change:.1f} ± {100 * error:.1f} % at 50%"
    note = undecided_note([point, point], Target.read("5%"))
    assert bool(note) == (answer == "undecided")
    if note:
        assert "the model at 50% and 50%" in note
        assert "`evaluate_limit`" in note
    assert outcome(replace(point, increase_error=None, undecided=False), Target.read("5%")).endswith("with an unknown error")


def test_an_accuracy_within_its_error_of_the_target_is_told() -> None:
    """It is compared as it is."""
    target = Target.read(min_accuracy="boolq:0.6")
    for value, met, undecided in ((0.61, True, True), (0.59, False, True), (0.7, True, False), (0.5, False, False)):
        assert target.decide([], {"boolq": Accuracy(value, 0.02, None, 600)}) == Decision(met, undecided)
    point = Point("sparsity", 0.5, "magnitude", True, {}, None, {"boolq": 0.61}, None, 1.0, undecided=True)
    assert "within the error" in outcome(point, target)
    assert "within the error" not in outcome(replace(point, undecided=False), target)


def test_a_search_says_which_sparsities_it_cannot_decide(
    words: tuple[object, ...], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sparsity that it finds meets the target by more than the error, and the table has the errors."""
    made: dict[float, float] = {}

    def noisy(report: Report, text: str) -> Difference:
        """Of the first sparsity that is tried 9 %, of others 2 %, each with an error of 2 %."""
        return Difference(made.setdefault(report.perplexity[text]["pruned"].value, 0.02 if made else 0.09), 0.02)

    monkeypatch.setattr(Report, "change", noisy)
    done = command("search", *words, tmp_path / "out", "--max-perplexity-increase", "10%", "--effort", "fast")
    assert done.exit_code == 0, done.stderr
    assert "+9.0 ± 2.0 %  undecided" in done.stdout
    assert "+2.0 ± 2.0 %        yes" in done.stdout
    assert "the model at 50% has a perplexity increase of at most 10 % (a perplexity" in done.stderr
    assert "--evaluate-limit" in done.stderr
    assert "The model at 40% has a perplexity increase of at most 10 %." in done.stdout


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "`max_perplexity_increase`, `min_accuracy` or `max_size`"),
        (INCREASE | {"max_size": "3MB"}, "`max_perplexity_increase`, `min_accuracy` or `max_size`"),
        ({"max_perplexity_increase": "5"}, "`max_perplexity_increase`"),
        ({"max_perplexity_increase": "-5%"}, "`max_perplexity_increase`"),
        ({"min_accuracy": ":0.6"}, "`min_accuracy`"),
        ({"min_accuracy": "boolq:120%"}, "`min_accuracy` .* at most 100%"),
        ({"min_accuracy": "boolq"}, "`min_accuracy`"),
        ({"max_size": "large"}, "`max_size`"),
        (INCREASE | {"step": "0%"}, "`step` .* got 0%"),
        (INCREASE | {"step": "1e-9%"}, "`step` .* got 1e-09%"),
        (INCREASE | {"step": "none"}, "`step`"),
        (INCREASE | {"allocation": "shares.yaml"}, "`allocation`"),
        (INCREASE | {"bits": 3.0}, "`bits`"),
        (INCREASE | {"sparsity": 0.5}, "`sparsity`"),
        (INCREASE | {"over": "scales"}, "`over` must be sparsity or bits"),
        (INCREASE | {"over": "bits", "step": "1%"}, "`step` must be a number of bits"),
        (INCREASE | {"over": "bits", "step": 3}, "`step` must be from 0.01 bits a weight to 2 bits a weight"),
        (INCREASE | {"over": "bits", "step": 1, "values": "int4"}, "`values`"),
        (INCREASE | {"over": "bits", "step": 1, "allocation": "owl"}, "`allocation`"),
        (INCREASE | {"over": "bits", "step": 1, "bits": 3.0}, "`bits`"),
        (INCREASE | {"evaluate": []}, "`evaluate`"),
    ],
)
def test_wrong_searches_are_refused(
    given: dict[str, Any], named: str, settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=named):
        sparsellm.search(loud["llama"], tmp_path / "out", **settings | given)
    assert not (tmp_path / "out").exists()


def test_a_search_needs_an_output_that_is_free(settings: dict[str, Any], loud: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(OutputExists, match=tmp_path.name):
        sparsellm.search(loud["opt"], tmp_path, **INCREASE, **settings)


def test_a_search_by_several_processes_is_refused(
    words: tuple[object, ...], settings: dict[str, Any], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those of a launcher, and in Python by those of a process group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(command("search", *words, tmp_path / "out", "--max-size", "3MB"), "one process")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("sparsellm.runtime.collectives.world", lambda: 2)
    with pytest.raises(InvalidSetting, match="one process"):
        sparsellm.search(words[0], tmp_path / "out", max_size="3MB", **settings)
    assert not (tmp_path / "out").exists()
