"""Tasks: what lm-eval gives for the saved folder, from local files or any data set; what is missing is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadText, InvalidSetting, MissingPackage, Unreachable
from sparsellm.evaluation import task_definitions
from sparsellm.evaluation.results import mean
from sparsellm.evaluation.task_definitions import prepare_tasks, spec
from sparsellm.pipeline.evaluate import evaluate
from tests.conftest import SHARED, extensions

Command = Callable[..., Result]
HERE = find_spec("lm_eval") is not None
WITH = pytest.mark.skipif(not HERE, reason="lm-eval is not installed (the extra `eval`)")
PAPER = ["boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]


def by_hand(model: Path, tasks: list[Any], limit: int | None = None) -> dict[str, dict[str, float]]:
    """lm-eval's own results for a saved folder, as its command line gives them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    words = {"pretrained": str(model), "dtype": "float32"}
    given = {"num_fewshot": 0, "batch_size": 8, "device": "cpu", "limit": limit, "log_samples": False}
    found = simple_evaluate("hf", words, tasks=tasks, task_manager=TaskManager(include_defaults=False), **given)
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
    tasks = [spec(task, words, tmp_path) for task, words in changed.items()]
    same({task: values["dense"] for task, values in found.items()}, by_hand(SHARED / "models" / name, tasks, 12))
    same({task: values["pruned"] for task, values in found.items()}, by_hand(tmp_path / "out", tasks, 12))


@WITH
def test_every_process_of_a_machine_has_results(
    tiny: dict[str, Path], questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's simple_evaluate has none where LOCAL_RANK is not 0."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert evaluate(str(tiny["opt"]), task=["arc_easy"], task_data=str(questions)).accuracy["arc_easy"].questions == 5


@WITH
def test_the_error_of_a_difference_is_that_of_the_same_questions(tiny: dict[str, Path], questions: Path) -> None:
    """The deviation of the differences of the scores, question by question; of other questions it is unknown."""
    given = {"task": ["boolq", "arc_easy"], "task_data": str(questions)}
    found = evaluate(str(tiny["opt"]), against=str(tiny["llama"]), **given)
    assert found.against
    for task, one in found.accuracy.items():
        other, count = found.against.accuracy[task], one.questions
        assert one.parts and other.parts  # noqa: PT018
        assert sum(one.parts.values) / count == pytest.approx(one.value)
        scores = [x - y for x, y in zip(one.parts.values, other.parts.values, strict=True)]
        mean = sum(scores) / count
        difference = found.differences[task]
        assert difference
        assert difference.share
        assert difference.change == pytest.approx(mean)
        expected = (sum((x - mean) ** 2 for x in scores) / count / (count - 1)) ** 0.5
        assert difference.standard_error == pytest.approx(expected)
    fewer = evaluate(str(tiny["opt"]), **given, task_limit=4).accuracy["boolq"]
    assert str(fewer.against(found.accuracy["boolq"])).endswith("points, error unknown")


def test_the_mean_and_its_error() -> None:
    assert mean([(0.5, 0.03), (0.7, 0.04)]) == (pytest.approx(0.6), pytest.approx(0.025))
    assert mean([(0.5, None), (0.7, 0.04)]) == (pytest.approx(0.6), None)


ROWS = [{"question": f"{n} is", "choices": ["odd", "even"], "answer": n % 2, "text": f"the number {n} is"} for n in range(6)]

CHOICE = {"output_type": "multiple_choice", "doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer"}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": "question",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 4},
    "filter_list": [{"name": "first-word", "filter": [{"function": "take_first"}]}],
}
OWN = {
    "choice_acc": CHOICE | {"metric_list": [{"metric": "acc"}], "tag": "choices"},
    "choice_norm": CHOICE | {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}], "tag": "choices"},
    "choice_shots": CHOICE | {"metric_list": [{"metric": "acc"}], "num_fewshot": 2, "fewshot_split": "test"},
    "generated": GENERATE | {"metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}]},
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "unsafe": GENERATE | {"metric_list": [{"metric": "exact_match"}], "unsafe_code": True},
    "absent": CHOICE | {"metric_list": [{"metric": "acc"}], "dataset_path": "some/where", "dataset_kwargs": None},
    "other_fields": CHOICE | {"metric_list": [{"metric": "acc"}], "doc_to_text": "{{no_such_field[0][1]}}"},
}
GROUPS = {
    "combined": {
        "task": ["choice_acc", "choice_norm"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    },
    "listed": {"task": ["combined", "rolling"]},
    "several": {"task": ["choice_acc", "generated"], "aggregate_metric_list": [{"metric": "acc"}, {"metric": "exact_match"}]},
}


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """lm-eval's index of a few small tasks with data from a file, in place of that of its own tasks."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "own"
    folder.mkdir()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, fields in OWN.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | common | fields), encoding="utf-8")
    for name, fields in GROUPS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"group": name} | fields), encoding="utf-8")
    index = TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(task_definitions, "task_manager", lambda: index)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return index


@WITH
def test_any_task_group_or_tag_is_measured_by_its_own_metric(tiny: dict[str, Path], own_tasks: Any, command: Command) -> None:
    """acc_norm before acc before the first metric; generated answers and whole texts too; as lm-eval by itself."""
    from lm_eval import simple_evaluate

    expected = {
        "choice_shots": ("acc", "acc,none"),
        "generated": ("exact_match,first-word", "exact_match,first-word"),
        "rolling": ("word_perplexity", "word_perplexity,none"),
        "choice_acc": ("acc", "acc,none"),
        "choice_norm": ("acc_norm", "acc_norm,none"),
    }
    measured = evaluate(str(tiny["llama"]), task=["choice_shots", "generated", "rolling", "choices"]).accuracy
    assert list(measured) == list(expected)
    arguments = {"pretrained": str(tiny["llama"]), "dtype": "float32"}
    settings = {"batch_size": 8, "device": "cpu", "log_samples": False, "task_manager": own_tasks}
    theirs = simple_evaluate("hf", arguments, tasks=list(expected), **settings)
    assert theirs is not None
    for name, (metric, key) in expected.items():
        assert (measured[name].metric, measured[name].value) == (metric, theirs["results"][name][key])
        assert measured[name].questions == 6
    assert theirs["n-shot"]["choice_shots"] == 2
    assert measured["choice_norm"].normalised == measured["choice_norm"].value
    done = command("evaluate", tiny["llama"], "--task", "listed", "--task", "generated")
    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[1:]] == [
        ["combined", "acc,"],
        ["rolling", "word_perplexity"],
        ["generated", lines[3][1]],
    ]
    assert lines[1][-1] == "12"  # the questions of both tasks of the group
    assert "mean" not in done.stdout  # of one accuracy
    assert list(evaluate(str(tiny["llama"]), task="several").accuracy) == ["choice_acc", "generated"]


@WITH
def test_a_report_names_the_metric_of_each_task(
    tiny: dict[str, Path], own_tasks: Any, tmp_path: Path, command: Command
) -> None:
    words = ["--method", "magnitude", "--task", "rolling", "--task", "choice_norm"]
    done = command("prune", tiny["llama"], tmp_path / "out", *words)
    assert done.exit_code == 0, done.stderr
    assert "word_perplexity on rolling, dense: " in done.stderr
    assert "accuracy on choice_norm, pruned: " in done.stderr
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| rolling | word_perplexity | " in card
    assert "| choice_norm | acc_norm | " in card
    head, *rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("task", "rolling", "choice_norm"))]
    assert head == ["task", "metric", "dense", "pruned"]
    assert [row[1] for row in rows] == ["word_perplexity", "acc_norm,"]


@WITH
@pytest.mark.parametrize(
    ("task", "error", "named"),
    [
        ("choice_nrm", InvalidSetting, "`task`.*'choice_nrm'.*'choice_norm'"),
        ("zzzzzzz", InvalidSetting, "`task`.*'zzzzzzz'.*lm-eval ls tasks"),
        ("unsafe", InvalidSetting, "unsafe runs code"),
        ("absent", Unreachable, "absent .*some/where.*network"),
    ],
)
def test_a_task_that_cannot_run_is_refused_before_any_work(
    task: str, error: type[Exception], named: str, tiny: dict[str, Path], own_tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights_are_read(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("sparsellm.pipeline.evaluate.load_model", weights_are_read)
    with pytest.raises(error, match=named):
        evaluate(str(tiny["opt"]), task=task)


@extensions
@WITH
def test_a_task_of_one_s_own_is_a_file(
    tiny: dict[str, Path], own_tasks: Any, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in lm-eval's index, and is reported by its file, as a text is; in `evaluate`, `prune` and a search's target."""
    monkeypatch.setattr(task_definitions, "task_manager", lambda: own_tasks)
    fields = yaml.safe_load((tmp_path / "own" / "choice_acc.yaml").read_text(encoding="utf-8"))
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(fields | {"task": "mine", "tag": []}), encoding="utf-8")
    measured = evaluate(str(tiny["llama"]), task=[str(mine), "choice_acc"]).accuracy
    assert list(measured) == [str(mine), "choice_acc"]
    assert measured[str(mine)] == measured["choice_acc"]
    done = command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude", "--task", mine, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["tasks"][str(mine)]["dense"]["questions"] == 6
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| mine.yaml | acc | " in card
    assert str(tmp_path) not in card + (tmp_path / "out" / "sparsellm.json").read_text(encoding="utf-8")
    words = ["--method", "magnitude", "--min-accuracy", f"{mine}:0", "--step", "45%"]
    assert command("search", tiny["llama"], tmp_path / "found", *words).exit_code == 0


@WITH
@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, r"mine\.yaml"),
        ("[1", r"mine\.yaml"),
        ("{doc_to_text: x}", r"mine\.yaml"),
        ("{group: mine, task: [choice_acc]}", r"mine\.yaml"),
        (CHOICE | {"task": "choice_acc"}, "mine.yaml .*choice_acc"),
        (CHOICE | {"task": "mine", "unsafe_code": True}, "mine runs code"),
        (CHOICE | {"task": "mine", "test_split": "no"}, r"mine\.yaml"),
    ],
)
def test_a_file_without_a_task_is_told_before_any_work(
    content: Any, named: str, tiny: dict[str, Path], own_tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.yaml"
    if isinstance(content, dict):
        fields = yaml.safe_load((tmp_path / "own" / "choice_acc.yaml").read_text(encoding="utf-8"))
        content = yaml.safe_dump(fields | content)
    if content is not None:
        mine.write_text(content, encoding="utf-8")
    monkeypatch.setattr("sparsellm.pipeline.evaluate.load_model", lambda *_, **__: pytest.fail("the weights are read"))
    with pytest.raises((InvalidSetting, BadText), match=named):
        evaluate(str(tiny["opt"]), task=["choice_acc", str(mine)])


@extensions
@WITH
def test_a_sweep_measures_a_changed_task_again(tiny: dict[str, Path], own_tasks: Any, tmp_path: Path) -> None:
    """The dense model's accuracy is kept for all cells; a task's file counts by its content."""
    mine = tmp_path / "own" / "choice_acc.yaml"
    content = {"model": str(tiny["llama"]), "method": "magnitude", "task": str(mine), "axes": {"sparsity": ["50%"]}}
    sparsellm.sweep(content, tmp_path / "out")
    fields = yaml.safe_load(mine.read_text(encoding="utf-8"))
    mine.write_text(yaml.safe_dump(fields | {"doc_to_target": 0}), encoding="utf-8")
    outcomes = sparsellm.sweep(content | {"axes": {"sparsity": ["60%"]}}, tmp_path / "out")
    expected = evaluate(str(tiny["llama"]), task=str(mine)).accuracy[str(mine)]
    assert outcomes[0].report is not None
    assert outcomes[0].report.tasks[str(mine)]["dense"].value == expected.value


@WITH
@pytest.mark.parametrize(
    ("file", "content", "tasks", "error", "named"),
    [
        (None, "", ["boolq", "choice_acc"], InvalidSetting, "`task_data`.*choice_acc"),
        (None, "", ["rte"], BadText, r"rte\*validation\*\.jsonl"),
        ("boolq_validation_2.jsonl", "{}", ["boolq"], BadText, r"boolq\*validation\*\.jsonl"),
        ("rte_validation.jsonl", "", ["rte"], BadText, r"rte_validation\.jsonl"),
    ],
)
def test_local_files_that_are_no_task_are_told_before_any_work(
    file: str | None, content: str, tasks: list[str], error: type[Exception], named: str, own_tasks: Any, questions: Path
) -> None:
    if file is not None:
        (questions / file).write_text(content, encoding="utf-8")
    with pytest.raises(error, match=named):
        prepare_tasks(tasks, str(questions))


@WITH
def test_other_fields_are_told(tiny: dict[str, Path], questions: Path) -> None:
    (questions / "rte_validation.jsonl").write_text('{"premise": "a", "hypothesis": "b"}\n', encoding="utf-8")
    with pytest.raises(BadText, match=r"rte .*fields"):
        evaluate(str(tiny["opt"]), task=["rte"], task_data=str(questions))


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Path]) -> None:
    monkeypatch.setattr(task_definitions, "find_spec", lambda _: None)
    with pytest.raises(MissingPackage, match=r"pip install 'sparsellm\[eval\]'"):
        evaluate(str(tiny["opt"]), task=["boolq"])


def test_nothing_to_measure_on_is_wrong_usage(tiny: dict[str, Path], command: Command) -> None:
    done = command("evaluate", tiny["opt"])
    assert done.exit_code == 1
    assert "name a --text or a --task" in done.stderr
