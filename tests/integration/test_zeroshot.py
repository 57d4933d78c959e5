"""Zero-shot tasks: what lm-eval gives for the saved folder, from local files; what is missing is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from sparsellm.errors import BadText, InvalidSetting, MissingPackage
from sparsellm.evaluation import zeroshot
from sparsellm.evaluation.measurements import SPLITS
from sparsellm.evaluation.zeroshot import definition, mean, prepare_tasks
from sparsellm.runs.measuring import evaluate
from sparsellm.runs.recipe_file import read_recipe

Command = Callable[..., Result]
HERE = find_spec("lm_eval") is not None
WITH = pytest.mark.skipif(not HERE, reason="lm-eval is not installed (the extra `eval`)")
SHARED = Path(__file__).parents[3] / "shared"
PAPER = ["boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A folder with a few questions for two tasks, fields as on the hub."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    yes_no = [{"question": f"is {n} the sum", "passage": "the sum of the weights", "label": n % 2} for n in range(6)]
    choices = {"text": ["the sum", "the rest", "a layer"], "label": ["A", "B", "C"]}
    picks = [{"id": str(n), "question": f"what stays {n}", "choices": choices, "answerKey": "ABC"[n % 3]} for n in range(5)]
    for name, rows in (("boolq_validation", yes_no), ("arc_easy_test", picks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@cache
def every_task() -> Any:
    """lm-eval's own list of its tasks, which takes it seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def by_hand(model: Path, tasks: list[Any], limit: int | None = None) -> dict[str, dict[str, float]]:
    """lm-eval's own results for a saved folder, as its command line gives them."""
    from lm_eval import simple_evaluate

    words = {"pretrained": str(model), "dtype": "float32"}
    given = {"num_fewshot": 0, "batch_size": 8, "device": "cpu", "limit": limit, "log_samples": False}
    found = simple_evaluate("hf", words, tasks=tasks, task_manager=every_task(), **given)
    assert found is not None
    return dict(found["results"])


BOOLQ = {
    "task": "boolq",
    "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
    "doc_to_target": "label",
    "doc_to_choice": ["no", "yes"],
    "metric_list": [{"metric": "acc"}],
}
ARC = {
    "task": "arc_easy",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
    "doc_to_choice": "{{choices.text}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def as_on_paper(file: Path, words: dict[str, Any]) -> dict[str, Any]:
    """A task written out, without lm-eval's own definition of it."""
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return {**where, "output_type": "multiple_choice", **words}


def same(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, float]]) -> None:
    """Accuracy, standard error and normalised accuracy, to the last bit."""
    assert ours.keys() == theirs.keys()
    for task, found in ours.items():
        assert found["value"] == theirs[task]["acc,none"]
        assert found["standard_error"] == theirs[task]["acc_stderr,none"]
        assert found["normalised"] == theirs[task].get("acc_norm,none")


@WITH
@pytest.mark.parametrize("family", ["opt", pytest.param("llama", marks=pytest.mark.long)])
def test_equal_to_lm_eval_by_hand(
    family: str, tiny: dict[str, Path], questions: Path, tmp_path: Path, command: Command
) -> None:
    """A model in memory, dense and pruned, against the written folder and lm-eval on its own."""
    words = ["--method", "magnitude", "--sparsity", "50%", "--task", "boolq", "--task", "arc_easy", "--task-data", questions]
    done = command("prune", tiny[family], tmp_path / "out", *words, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]
    tasks = [as_on_paper(questions / "boolq_validation.jsonl", BOOLQ), as_on_paper(questions / "arc_easy_test.jsonl", ARC)]
    same({task: values["dense"] for task, values in found.items()}, by_hand(tiny[family], tasks))
    same({task: values["pruned"] for task, values in found.items()}, by_hand(tmp_path / "out", tasks))
    assert [values["dense"]["questions"] for values in found.values()] == [6, 5]
    assert "| boolq |" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    again = command("evaluate", tmp_path / "out", "--task", "boolq", "--task-data", questions, "--task-limit", 4, "--json")
    assert json.loads(again.stdout)["accuracy"]["boolq"]["questions"] == 4


@WITH
@pytest.mark.long
@pytest.mark.skipif(not (SHARED / "data" / "zeroshot").is_dir(), reason="the shared task files are not here")
@pytest.mark.parametrize("name", ["wt2-opt", "wt2-llama"])
def test_the_paper_s_tasks_from_local_files(name: str, tmp_path: Path, command: Command) -> None:
    data = SHARED / "data"
    words = [word for task in PAPER for word in ("--task", task)] + ["--task-data", data / "zeroshot", "--task-limit", 12]
    given = ["--calibration", data / "wikitext-2" / "valid.txt", "--samples", 4, "--method", "sparsegpt", "--sparsity", "70%"]
    done = command("prune", SHARED / "models" / name, tmp_path / "out", *given, *words, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]
    changed = prepare_tasks(PAPER, str(data / "zeroshot"))
    tasks = [str(definition(task, words, tmp_path)) for task, words in changed.items()]
    same({task: values["dense"] for task, values in found.items()}, by_hand(SHARED / "models" / name, tasks, 12))
    same({task: values["pruned"] for task, values in found.items()}, by_hand(tmp_path / "out", tasks, 12))


def test_the_mean_and_its_error() -> None:
    assert mean([(0.5, 0.03), (0.7, 0.04)]) == (pytest.approx(0.6), pytest.approx(0.025))
    assert mean([(0.5, None), (0.7, 0.04)]) == (pytest.approx(0.6), None)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"`task` is unknown: got 'helaswag'\. Did you mean 'hellaswag'"):
        read_recipe({"model": "x", "method": "magnitude", "task": "helaswag"})
    assert set(PAPER) < set(SPLITS)


@WITH
def test_a_task_without_its_data_is_told_before_any_work(tiny: dict[str, Path], questions: Path, command: Command) -> None:
    words = ["--method", "magnitude", "--task", "rte", "--task-data", questions]
    done = command("prune", tiny["opt"], questions / "out", *words)
    assert done.exit_code == 1
    assert "The task rte has no data: none of" in done.stderr
    assert "rte*validation*.jsonl" in done.stderr
    (questions / "boolq_validation_2.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(BadText, match="2 files of"):
        prepare_tasks(["boolq"], str(questions))
    (questions / "rte_validation.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(BadText, match="cannot be read"):
        prepare_tasks(["rte"], str(questions))


@WITH
def test_other_fields_are_told(tiny: dict[str, Path], questions: Path) -> None:
    (questions / "rte_validation.jsonl").write_text('{"premise": "a", "hypothesis": "b"}\n', encoding="utf-8")
    with pytest.raises(BadText, match="fields must be as on the hub"):
        evaluate(str(tiny["opt"]), task=["rte"], task_data=str(questions))


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Path]) -> None:
    monkeypatch.setattr(zeroshot, "find_spec", lambda _: None)
    with pytest.raises(MissingPackage, match=r"pip install 'sparsellm\[eval\]'"):
        evaluate(str(tiny["opt"]), task=["boolq"])


def test_nothing_to_measure_on_is_wrong_usage(tiny: dict[str, Path], command: Command) -> None:
    done = command("evaluate", tiny["opt"])
    assert done.exit_code == 2
    assert "--text or --task" in done.stderr
