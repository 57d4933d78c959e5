"""`sparsellm.prune` on folders and on models in memory; what `save_pretrained` writes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import jedi
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsellm
from sparsellm.errors import BadCheckpoint, BadText, InvalidSetting, MissingPackage, OutputExists, VerificationFailed
from sparsellm.extensions.recover.interface import RecoveryKeywords
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.methods import BlockResult, EpochResult, LayerResult
from sparsellm.observers.events import NextRun, Note, Stage
from sparsellm.recipes.keyword_types import EvaluationKeywords, PruneKeywords
from sparsellm.recipes.recipe import Recipe
from sparsellm.texts.in_memory import CalibrationData
from tests.conftest import ROOT


def test_path_and_memory_give_the_same_model(tiny: dict[str, Path], text_file: Path) -> None:
    """A model in memory is pruned in place, to the same weights as from its folder."""
    settings = {"method": "alps", "sparsity": "60%", "calibration": text_file, "samples": 8, "sequence_length": 32}
    by_path = sparsellm.prune(tiny["llama"], **settings).model
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    tokenizer = AutoTokenizer.from_pretrained(tiny["llama"])
    result = sparsellm.prune(model, tokenizer=tokenizer, **settings)
    assert result.model is model
    for (name, one), other in zip(by_path.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_texts_and_tokens_in_place_of_a_name(tiny: dict[str, Path], text_file: Path) -> None:
    """A list of texts serves like the file that holds them; token numbers need no tokenizer."""
    text = text_file.read_text()
    settings = {"method": "wanda", "samples": 4, "sequence_length": 32}
    one = sparsellm.prune(tiny["opt"], calibration=[text], **settings).model
    other = sparsellm.prune(tiny["opt"], calibration=text_file, **settings).model
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tiny["opt"])
    result = sparsellm.prune(model, method="wanda", sparsity=0.5, calibration=tokens)
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)
    assert result.report.layers[0].tokens == 4 * 32


def test_nothing_is_printed(tiny: dict[str, Path], text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither by this library nor by transformers while it works."""
    result = sparsellm.prune(tiny["opt"], calibration=text_file, samples=4, sequence_length=32, evaluate=(str(text_file),))
    result.save_pretrained(tmp_path / "out")
    assert capfd.readouterr() == ("", "")


def test_observer_sees_every_step(tiny: dict[str, Path], text_file: Path) -> None:
    """Stages, layers, epochs and blocks, in the order in which they happen."""
    seen: list[object] = []
    sparsellm.prune(tiny["llama"], calibration=text_file, samples=8, sequence_length=32, observe=seen.append)
    stages = [event.name for event in seen if isinstance(event, Stage)]
    assert [name for name in stages if "takes" not in name] == [
        "opening",
        "reading texts",
        "reading the model's files",
        "loading",
        "estimating sensitivity",
        "choosing per-layer sparsity (fisher)",
        "pruning",
    ]
    assert [event.index for event in seen if isinstance(event, BlockResult)] == [0, 1, 2]
    steps = " ".join(event.step for event in seen if isinstance(event, EpochResult))
    assert re.fullmatch("solve( newton)+ solve( newton)+ solve( newton)+", steps)
    assert sum(isinstance(event, LayerResult) for event in seen) == 3 * 7
    notes = [event.text for event in seen if isinstance(event, Note)]
    assert [note for note in notes if "different calibration tokens" not in note] == []


def test_what_a_model_in_memory_cannot_have(tiny: dict[str, Path], text_file: Path) -> None:
    """A text without a tokenizer, another dtype, tokens of the wrong kind: refused, the model untouched."""
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(InvalidSetting, match="tokenizer"):
        sparsellm.prune(model, calibration=text_file, sequence_length=32)
    with pytest.raises(InvalidSetting, match="dtype"):
        sparsellm.prune(model, method="magnitude", dtype="float16")
    with pytest.raises(BadText, match=r"\(4, 32\) torch\.float32"):
        sparsellm.prune(model, calibration=torch.rand(4, 32))
    with pytest.raises(BadText, match=r"65.*64"):
        sparsellm.prune(model, calibration=torch.zeros(4, 65, dtype=torch.long))
    with pytest.raises(BadText, match=r"token 260.* 260 tokens"):
        sparsellm.prune(model, calibration=torch.full((4, 32), 260))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_shards_index_and_chat_template(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model in memory is written in shards with an index, with its tokenizer and chat template; all verified."""
    monkeypatch.setattr("sparsellm.outputs.saving.SHARD_SIZE", "20KB")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny["llama"]), AutoTokenizer.from_pretrained(tiny["llama"])
    tokenizer.chat_template = "{{ messages }}"
    out = sparsellm.prune(model, "magnitude", "3:4", tokenizer=tokenizer).save_pretrained(tmp_path / "out")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    found = sparsellm.inspect(str(out), against=str(tiny["llama"]), expect="3:4")
    assert found.as_expected
    assert len(found.changed) == 21
    assert sparsellm.prune(out, method="magnitude", sparsity="3:4").report.sparsity == 0.75


def test_verification_finds_what_was_not_written_as_meant(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight or a norm that changes on its way to the disk is found, and nothing is kept."""
    result = sparsellm.prune(tiny["llama"], method="magnitude", sparsity="2:4")
    norm = result.model.model.norm.weight
    with torch.no_grad():
        norm[0] += 1
    with pytest.raises(VerificationFailed, match=r"model\.norm\.weight"):
        result.save_pretrained(tmp_path / "out")
    with torch.no_grad():
        norm[0] -= 1
        result.model.model.layers[1].mlp.up_proj.weight[0, :4] = 1
    with pytest.raises(VerificationFailed, match=r"layers\.1\.mlp\.up_proj"):
        result.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(OutputExists):
        result.save_pretrained(tmp_path / "out")


def test_damping_is_raised_only_as_recorded(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a factorization fails, the damping that helped stands in each layer's result and in a note."""
    from sparsellm.solvers import sparsegpt

    real = sparsegpt.add_diagonal_

    def reluctant(gram: torch.Tensor, damping: float) -> torch.Tensor:
        return real(gram, damping) if damping > 0.5 else -gram

    monkeypatch.setattr(sparsegpt, "add_diagonal_", reluctant)
    tokens = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    report = sparsellm.prune(model, method="sparsegpt", calibration=tokens).report
    assert {layer.damping for layer in report.layers} == {1.0}
    assert any("damping was raised from 0.01 on 21 layers" in note for note in report.notes)


TEXTS = str | Path | Sequence[str | Path] | CalibrationData
"""The type of `evaluate`, which takes data in memory too."""

NAMED = {"model", "method", "sparsity", "calibration", "pruned", "steps"}
"""Fields of recipes that are arguments with their own line in a docstring; of a recovery `scope` too."""


def accepted(annotation: Any) -> Any:
    """The type of a keyword for a field: a sequence may be any, and one text needs no list."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0] | Sequence[get_args(annotation)[0]]
    return annotation


@pytest.mark.parametrize(
    ("function", "settings", "fields", "named"),
    [
        (sparsellm.prune, PruneKeywords, Recipe, NAMED),
        (sparsellm.plan, PruneKeywords, Recipe, NAMED),
        (sparsellm.search, PruneKeywords, Recipe, NAMED),
        (sparsellm.evaluate, EvaluationKeywords, Recipe, set(Recipe.model_fields) - set(EvaluationKeywords.__annotations__)),
        (sparsellm.recover, RecoveryKeywords, RecoveryRecipe, NAMED | {"scope", "dtype"}),
    ],
)
def test_keywords_are_the_fields_of_the_recipe(function: Any, settings: Any, fields: Any, named: set[str]) -> None:
    """The same names, order, types, defaults and descriptions, for editors and for `help`."""
    expected = {name: field for name, field in fields.model_fields.items() if name not in named}
    hints = get_type_hints(settings)
    types = {name: accepted(field.annotation) for name, field in expected.items()}
    assert hints == types | ({"evaluate": TEXTS} if "evaluate" in types else {})
    parameters = inspect.signature(function).parameters
    assert [name for name in parameters if name in hints] == list(expected)
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    text = " ".join(function.__doc__.split())
    for name, field in expected.items():
        assert parameters[name].default == field.default
        assert f" {name}: {field.description}" in text


@pytest.mark.parametrize(
    ("call", "completed"),
    [
        ("sparsellm.prune('m', setti", ["settings="]),
        ("sparsellm.prune('m', metho", ["method="]),
        ("sparsellm.prune(model, inpl", ["inplace="]),
        ("sparsellm.plan('m', eff", ["effort="]),
        ("sparsellm.recover('m', 'p', lora_", ["lora_rank=", "lora_targets="]),
        ("sparsellm.evaluate('m', task", ["task=", "task_data=", "task_limit="]),
        ("sparsellm.search('m', 'out', max_p", ["max_perplexity_increase="]),
    ],
)
def test_notebooks_complete_keywords(call: str, completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Jedi does, which IPython and Jupyter ask."""
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path))  # processes that share one read halves of files
    assert [found.name for found in jedi.Interpreter(call, [{"sparsellm": sparsellm}]).complete()] == completed


@pytest.mark.long
def test_type_checkers_know_the_keywords(tmp_path: Path) -> None:
    """mypy finds a keyword that does not exist and a value of another type, and passes what is right."""
    file = tmp_path / "calls.py"
    file.write_text(
        "import sparsellm\n"
        'sparsellm.prune("m", sparsity="70%", samples=3, exclude=["lm_head"], evaluate="t.txt", effort="best")\n'
        'sparsellm.prune("m", sampels=3)\n'
        'sparsellm.prune("m", effort="slow")\n'
        'sparsellm.recover("m", "p", lora_rank="8")\n'
        'sparsellm.evaluate("m", "t.txt", seed=1)\n'
    )
    root = ROOT
    command = [sys.executable, "-m", "mypy", "--config-file", root / "pyproject.toml", "--cache-dir", tmp_path / "cache", file]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    assert sorted(set(re.findall(r"calls\.py:(\d+): error", said))) == ["3", "4", "5", "6"], said


def test_a_result_prints_in_four_lines(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Method, sparsity, perplexity and size; in notebooks as a table whose texts are escaped."""
    result = sparsellm.prune(tiny["opt"], "magnitude", "2:4", evaluate=str(text_file), sequence_length=32, evaluate_limit=2)
    model, sparsity, perplexity, size = repr(result).splitlines()
    assert model.startswith(f"model: {tiny['opt'].name}, pruned by magnitude, ")
    assert re.fullmatch(r"sparsity: 50\.00 % of the weights in 18 pruned layers, \d+\.\d\d % of the model", sparsity)
    assert re.fullmatch(rf"perplexity: [\d.]+ ± [\d.]+ → [\d.]+ ± [\d.]+ \(.* ± [\d.]+ %\)* on {text_file.name}", perplexity)
    assert size == f"size: {result.report.sizes}"
    assert repr(result.report) == repr(result)
    copied = tmp_path / "<b>model"
    shutil.copytree(tiny["opt"], copied)
    result = sparsellm.prune(copied, "magnitude", "2:4")
    assert "\nperplexity: not measured\n" in repr(result)
    assert "<td>&lt;b&gt;model, pruned by" in result._repr_html_()


def test_layers_as_a_frame(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each layer, the same before and after saving; one line says how to install pandas."""
    result = sparsellm.prune(tiny["llama"], "magnitude", "2:4")
    frame = result.report.to_frame()
    assert list(frame.name) == [layer.name for layer in result.report.layers]
    assert list(frame.columns[:7]) == ["name", "block", "pattern", "shape", "zeros", "sparsity", "error"]
    fields = {field.name for field in dataclasses.fields(LayerResult)}
    known = {name for name in fields if any(getattr(layer, name) is not None for layer in result.report.layers)}
    assert fields & set(frame.columns) == known
    assert set(frame.sparsity) == {0.5}
    assert sorted(set(frame.block)) == [0, 1, 2]
    out = result.save_pretrained(tmp_path / "out")
    saved = sparsellm.load_report(out).to_frame()
    assert saved.equals(frame[saved.columns])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match=r"pip install 'sparsellm\[frame\]'"):
        result.report.to_frame()


def test_a_plan_takes_the_arguments_of_prune(tiny: dict[str, Path], text_file: Path) -> None:
    settings = {"method": "wanda", "sparsity": "2:4", "calibration": [text_file.read_text()], "samples": 4}
    plan = sparsellm.plan(tiny["opt"], **settings, sequence_length=32)
    assert plan.fits
    assert plan.samples == 4
    assert {pattern for pattern, _ in plan.layers} == {"2:4"}
    with pytest.raises(InvalidSetting, match=r"'sample'\. Did you mean 'samples'"):
        sparsellm.plan(tiny["opt"], "magnitude", sample=4)


def test_evaluation_of_a_folder_and_of_a_model_in_memory(tiny: dict[str, Path], text_file: Path) -> None:
    """The same perplexity; the model in memory is not changed; without anything to measure on it is refused."""
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    tokenizer = AutoTokenizer.from_pretrained(tiny["llama"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_path = sparsellm.evaluate(tiny["llama"], text_file, sequence_length=32, evaluate_limit=3)
    in_memory = sparsellm.evaluate(model, [str(text_file)], tokenizer=tokenizer, sequence_length=32, evaluate_limit=3)
    values = [evaluation.perplexity[str(text_file)] for evaluation in (by_path, in_memory)]
    assert values[0].value == values[1].value > 1
    assert values[0].windows == 3
    assert by_path.accuracy == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(InvalidSetting, match="name a `text` or a `task`"):
        sparsellm.evaluate(tiny["llama"])
    with pytest.raises(InvalidSetting, match="`tokenizer`"):
        sparsellm.evaluate(model, text_file, sequence_length=32)


def test_an_evaluation_against_another_model_has_the_paired_error(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """Of the difference of the sequences' losses; none where the models read other sequences."""
    reads = {"text": text_file, "sequence_length": 32, "evaluate_limit": 6}
    pruned = sparsellm.prune(tiny["llama"], "magnitude", "80%").model
    tokenizer = AutoTokenizer.from_pretrained(tiny["llama"])
    found = sparsellm.evaluate(pruned, against=tiny["llama"], tokenizer=tokenizer, **reads)
    alone = sparsellm.evaluate(tiny["llama"], **reads)
    name = str(text_file)
    assert found.against is not None
    one, other = found.perplexity[name], found.against.perplexity[name]
    assert other.value == alone.perplexity[name].value
    assert one.parts and other.parts  # noqa: PT018
    losses = torch.tensor([one.parts.values, other.parts.values], dtype=torch.float64)
    assert losses.mean(1).exp().tolist() == pytest.approx([one.value, other.value], rel=1e-5)
    difference = found.differences[name]
    assert difference is not None
    assert difference.change == one.value / other.value - 1
    assert difference.standard_error == pytest.approx(one.value / other.value * float((losses[0] - losses[1]).std()) / 6**0.5)
    assert difference.standard_error < other.standard_error / other.value
    assert f"differences: {text_file.name}: {difference}" in repr(found)
    notes: list[object] = []
    other_length = tmp_path / "shorter"
    shutil.copytree(tiny["llama"], other_length)
    config = json.loads((other_length / "config.json").read_text())
    (other_length / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    reads = {"text": text_file, "evaluate_limit": 6, "observe": notes.append}
    strange = sparsellm.evaluate(tiny["llama"], against=other_length, **reads)
    assert str(strange.differences[name]).endswith(" %, error unknown")
    assert any(
        isinstance(x, Note) and "as other token sequences: their perplexities cannot be compared" in x.text for x in notes
    )


def test_paths_serve_wherever_a_folder_is_named(tiny: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = sparsellm.prune(tiny["opt"], "magnitude", "2:4").save_pretrained(tmp_path / "out")
    assert sparsellm.inspect(out, tiny["opt"], "2:4").as_expected
    assert sparsellm.verify(out, tiny["opt"]).against == str(tiny["opt"])
    saved = sparsellm.load_report(out)
    assert [layer.sparsity for layer in saved.layers] == [0.5] * 18
    page = sparsellm.report(out, figures=tmp_path / "figures")
    assert page == tmp_path / "out.html"
    assert "2 of every 4" in page.read_text(encoding="utf-8")
    assert list((tmp_path / "figures").glob("*.svg"))
    with pytest.raises(BadCheckpoint):
        sparsellm.load_report(tmp_path)


def test_a_saved_report_prints_as_the_result(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Of a recovery with the figures of the dense, the pruned and the recovered model."""
    folder, settings = str(tiny["llama"]), {"calibration": str(text_file), "samples": 4, "sequence_length": 32}
    result = sparsellm.prune(folder, "wanda", evaluate=str(text_file), evaluate_limit=2, **settings)
    out = result.save_pretrained(tmp_path / "out")
    assert str(sparsellm.load_report(out)) == str(result.report)
    more = sparsellm.recover(out, folder, steps=1, evaluate=str(text_file), evaluate_limit=2, **settings)
    again = sparsellm.load_report(more.save_pretrained(tmp_path / "more"))
    assert str(again) == str(more.report)
    assert str(again).splitlines()[2].count("→") == 2
    assert re.match("model: llama, pruned(; nothing was| and) recovered", str(again))
    assert max(len(str(x)) for x in (result, more, sparsellm.report([out, tmp_path / "more"]))) < 1200
    recipe = sparsellm.Recipe(model="demo:opt", method="magnitude")
    assert str(recipe) == "model='demo:opt' method='magnitude' sparsity='50%'", "without what is at its default"


def test_a_sweep_from_python(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Cells are chosen and changed by mappings; called again, only the open cells run."""
    file = tmp_path / "sweep.yaml"
    content = {"recipe": {"model": str(tiny["opt"]), "method": "magnitude"}, "axes": {"sparsity": ["2:4", "50%"], "seed": [0]}}
    file.write_text(json.dumps(content))
    first = sparsellm.sweep(file, tmp_path / "out", only={"sparsity": "2:4"}, changes={"include": ["fc1"]})
    assert [outcome.state for outcome in first] == ["finished", "open"]
    assert first[0].report is not None
    assert {layer.name.split(".")[-1] for layer in first[0].report.layers} == {"fc1"}
    cells: list[object] = []
    second = sparsellm.sweep(file, tmp_path / "out", changes={"include": ["fc1"]}, observe=cells.append)
    assert [outcome.state for outcome in second] == ["finished", "finished"]
    assert [event.number for event in cells if isinstance(event, NextRun)] == [2]
    assert (tmp_path / "out" / "results.csv").exists()
    with pytest.raises(InvalidSetting, match="'sample=1' names an unknown field"):
        sparsellm.sweep(file, tmp_path / "out", changes={"sample": 1})


def test_pruning_within_inference_mode(tiny: dict[str, Path], text_file: Path) -> None:
    """The default method takes gradients, which a caller's inference mode would leave out; the weights are the same."""
    settings = {"sparsity": "50%", "calibration": str(text_file), "samples": 4, "sequence_length": 32}
    outside = sparsellm.prune(tiny["llama"], **settings).model.state_dict()
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            inside = sparsellm.prune(tiny["llama"], **settings).model.state_dict()
        assert all(torch.equal(weight, outside[name]) for name, weight in inside.items())
