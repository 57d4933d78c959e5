"""`plan`, `inspect`, `verify`, `recover`, `sweep` and `report` with objects in place of files, and how results print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import sparsellm
from sparsellm.errors import InvalidSetting, SparseLLMError, VerificationFailed


def loaded(folder: Path) -> PreTrainedModel:
    """The model of a folder, in memory."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_in_memory_is_inspected_like_its_folder(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Embeddings that are tied to the head count once, as a folder holds them once."""
    result = sparsellm.prune(tiny[family], "magnitude", "2:4", exclude="*q_proj")
    out = result.save_pretrained(tmp_path / "out")
    by_path = sparsellm.inspect(out, tiny[family])
    for against in (tiny[family], loaded(tiny[family])):
        in_memory = sparsellm.inspect(result.model, against)
        for name in ("layers", "parameters", "zeros", "changed", "alike", "only_here", "only_there"):
            assert getattr(in_memory, name) == getattr(by_path, name), name
    pruned = {layer.name for layer in result.report.layers}
    expected = sparsellm.inspect(result.model, expect=sparsellm.NM(2, 4))
    assert {layer.name for layer in expected.layers if layer.holds} == pruned
    assert expected.as_expected == (len(pruned) == len(expected.layers))
    half = sparsellm.inspect(result.model, expect=0.5)
    assert half.layers == sparsellm.inspect(result.model, expect="50%").layers


def test_one_changed_weight_is_found_in_memory(tiny: dict[str, Path]) -> None:
    model, dense = loaded(tiny["llama"]), loaded(tiny["llama"])
    changed = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(changed)[0, 0] += 1
    found = sparsellm.inspect(model, dense)
    assert found.changed == (changed,)
    assert found.alike == len(list(model.parameters())) - 1


def test_an_output_is_verified_against_a_model_in_memory(tiny: dict[str, Path], tmp_path: Path) -> None:
    out = sparsellm.prune(tiny["llama"], "magnitude", "2:4").save_pretrained(tmp_path / "out")
    dense = loaded(tiny["llama"])
    assert sparsellm.verify(out, dense).tensors == sparsellm.verify(out, tiny["llama"]).tensors
    with torch.no_grad():
        dense.get_parameter("model.norm.weight")[0] += 1
    with pytest.raises(VerificationFailed, match=r"model\.norm\.weight was not pruned and differs"):
        sparsellm.verify(out, dense)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_in_memory_is_planned_like_its_folder(family: str, tiny: dict[str, Path], text_file: Path) -> None:
    """The same shapes, operations and peak; what the model takes already is not counted twice."""
    settings: dict[str, Any] = {
        "sparsity": 0.7,
        "calibration": text_file,
        "samples": 4,
        "sequence_length": 32,
        "offload": False,
    }
    model, tokenizer = loaded(tiny[family]), AutoTokenizer.from_pretrained(tiny[family])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_path = sparsellm.plan(tiny[family], **settings)
    in_memory = sparsellm.plan(model, **settings, tokenizer=tokenizer)
    assert in_memory.layers == by_path.layers
    assert [stage.operations for stage in in_memory.stages] == [stage.operations for stage in by_path.stages]
    assert in_memory.peak.data_bytes == by_path.peak.data_bytes
    size = sum(tensor.nbytes for tensor in model.parameters())
    assert in_memory.placement.model == size
    documents = sum(file.stat().st_size for file in tiny[family].iterdir() if file.suffix != ".safetensors")
    assert by_path.peak.disk_bytes - in_memory.peak.disk_bytes == size + documents  # no block is kept in a file while it runs
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    small = sparsellm.plan(model, **settings, tokenizer=tokenizer, max_memory="1MB")
    assert small.placement.memory == 10**6 + size
    with pytest.raises(InvalidSetting, match="`tokenizer`"):
        sparsellm.plan(model, **settings)


def test_a_plan_of_a_model_in_memory_that_does_not_fit(tiny: dict[str, Path]) -> None:
    """It would be pruned nevertheless, so nothing refuses it; `fits` says that memory may not suffice."""
    plan = sparsellm.plan(loaded(tiny["llama"]), "magnitude", max_memory="1kB")
    assert not plan.fits
    assert not plan.refusal
    assert repr(plan).endswith("memory may not suffice")


@pytest.mark.parametrize("scope", ["block", "model"])
def test_a_dense_model_in_memory_becomes_the_recovered_one(
    scope: Any, tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """The same weights as from its folder, and a folder that verifies."""
    out = sparsellm.prune(tiny["llama"], "magnitude", "2:4").save_pretrained(tmp_path / "out")
    settings: dict[str, Any] = {"scope": scope, "steps": 4, "samples": 8, "sequence_length": 32}
    by_path = sparsellm.recover(out, tiny["llama"], text_file, **settings)
    dense, tokenizer = loaded(tiny["llama"]), AutoTokenizer.from_pretrained(tiny["llama"])
    result = sparsellm.recover(out, dense, text_file, tokenizer=tokenizer, **settings)
    assert result.model is dense
    for one, other in zip(by_path.model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(one, other)
    recovered = result.save_pretrained(tmp_path / "recovered")
    assert sparsellm.inspect(recovered, expect="2:4").as_expected
    assert sparsellm.verify(recovered).layers == 21


def test_the_content_of_a_sweep_file_and_its_outcomes(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A mapping in place of a file; what `sweep` returns is a list with a folder, and `report` takes it."""
    pytest.importorskip("matplotlib")
    content = {"recipe": {"model": str(tiny["opt"]), "method": "magnitude"}, "axes": {"sparsity": ["2:4", "50%"]}}
    outcomes = sparsellm.sweep(content, tmp_path / "out", only={"sparsity": "2:4"})
    assert [outcome.state for outcome in outcomes] == ["finished", "open"]
    assert repr(outcomes) == f"sweep: Sweep, 2 cells in {tmp_path / 'out'}\ncells: 1 finished, 1 open\nerrors: none"
    assert "2:4" in sparsellm.report(outcomes).read_text(encoding="utf-8")
    with pytest.raises(InvalidSetting, match="pass `output`"):
        sparsellm.sweep(content)
    with pytest.raises(InvalidSetting, match=r"the sweep: Unknown field 'axs'\. Did you mean 'axes'"):
        sparsellm.sweep({"axs": {}}, tmp_path / "other")


def test_a_report_of_a_result_is_that_of_its_folder(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    result = sparsellm.prune(tiny["opt"], "magnitude", "2:4")
    page = sparsellm.report(result)
    name = f"{tiny['opt'].name}-pruned"
    assert page == Path(f"{name}.html")
    result.save_pretrained(name)
    saved = sparsellm.report(name, "saved.html")
    given, written = page.read_text(encoding="utf-8"), saved.read_text(encoding="utf-8")
    assert given == written.replace("; verified when written.", "; not verified.")
    assert given != written


def test_every_result_prints_in_two_or_three_lines(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """With a name before each; in notebooks as a table. All that a result holds would fill pages."""
    result = sparsellm.prune(tiny["opt"], "magnitude", "2:4")
    out = result.save_pretrained(tmp_path / "out")
    texts = {"sequence_length": 32, "evaluate_limit": 2}
    plan = sparsellm.plan(tiny["opt"], calibration=text_file, samples=4, sequence_length=32)
    printed: list[tuple[Any, list[str]]] = [
        (
            plan,
            [
                rf"plan: {tiny['opt'].name}, 18 layers in 3 blocks, by sparsellm .*",
                r"needs: [\d.]+ [KM]iB of [\d.]+ [MG]iB on \w+ while .*, [\d.]+ [KM]iB of .* on disk",
                r"time: about \d+s; it fits",
            ],
        ),
        (
            sparsellm.inspect(out, tiny["opt"], "2:4"),
            [
                r"model: out: 50\.00 % zeros in 18 layers, \d+\.\d\d % in the model",
                r"pattern: 2:4 holds",
                rf"against: 18 tensors differ from {tiny['opt'].name}, \d+ are equal",
            ],
        ),
        (
            sparsellm.inspect(result.model, expect="3:4"),
            [r"model: .*", r"pattern: 18 layers do not match 3:4, .*fc1 first", "against: compared with no other model"],
        ),
        (
            sparsellm.verify(out, tiny["opt"]),
            [
                "output: out is unchanged since the run wrote it",
                r"checked: \d+ files, \d+ tensors, 18 pruned layers",
                f"against: all other tensors equal those of {tiny['opt'].name}",
            ],
        ),
        (
            sparsellm.evaluate(tiny["opt"], text_file, **texts),  # type: ignore[arg-type]
            [rf"perplexity: [\d.]+ ± [\d.]+ on 2 sequences of 32 tokens of {text_file.name}", "accuracy: not measured"],
        ),
    ]
    for found, lines in printed:
        assert re.fullmatch("\n".join(lines), repr(found)), repr(found)
        assert found._repr_html_().count("<tr>") == len(lines)
        assert str(found) == repr(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            sparsellm.verify,
            r"A folder that a run wrote is needed, got OPTForCausalLM\. Write .* pass the folder",
        ),
        (sparsellm.load_report, r"folder that a run wrote"),
        (sparsellm.report, r"folder that a run wrote"),
        (lambda model: sparsellm.recover(model, "demo:opt", "demo"), r"folder that a run wrote"),
        (sparsellm.sweep, r"A sweep is a YAML file or its content as a mapping, got OPTForCausalLM"),
        (lambda model: sparsellm.inspect(model.to("meta")), r"\d+ weights of the model are not in memory, model\."),
        (lambda _: sparsellm.inspect(3), r"a model of transformers in memory, got int\."),  # type: ignore[arg-type]
        (lambda _: sparsellm.prune(None), r"a model of transformers in memory, got NoneType\."),  # type: ignore[arg-type]
        (lambda model: sparsellm.prune(model, "magnitude", sparsty=0.5), r"'sparsty'\. Did you mean 'sparsity'"),
        (lambda model: sparsellm.evaluate(model, "demo", sample=1), r"'sample'\. Known: "),
        (lambda model: sparsellm.evaluate(model, "demo", evaluate_limits=1), r"Did you mean 'evaluate_limit'"),
        (lambda model: sparsellm.prune(model, "wnda"), r"`method` is unknown: got 'wnda'\. Did you mean 'wanda'"),
        (lambda model: sparsellm.prune(model, "magnitude", 70), r"`sparsity` must be in \[0, 1\), got 70\. For 70 % write"),
        (lambda model: sparsellm.prune(model, "magnitude", [0.5]), "can have one sparsity, got 1"),
        (lambda model: sparsellm.prune(model, "magnitude", True), r"`sparsity` must be a fraction, .* got 'True'"),
        (lambda model: sparsellm.prune(model, "magnitude", samples="many"), r"`samples`: .*, got 'many'"),
    ],
)
def test_wrong_arguments_get_one_message(call: Callable[[Any], object], message: str, tiny: dict[str, Path]) -> None:
    """What is wrong, and what to pass, with the settings by their names in Python; the model is not changed."""
    model = loaded(tiny["opt"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SparseLLMError, match=message) as error:
        call(model)
    assert "--" not in str(error.value)
    assert all(tensor.is_meta or torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("sparsity", [0.75, "75%", "0.75", "3:4", sparsellm.NM(3, 4), sparsellm.Unstructured(0.75)])
def test_every_spelling_of_a_sparsity(sparsity: Any, tiny: dict[str, Path]) -> None:
    assert sparsellm.prune(loaded(tiny["llama"]), "magnitude", sparsity).report.sparsity == 0.75


def test_the_result_of_a_run_in_place_of_a_model_is_refused(tiny: dict[str, Path]) -> None:
    result = sparsellm.prune(tiny["opt"], "magnitude")
    with pytest.raises(InvalidSetting, match=r"got Result\. Pass its attribute model\."):
        sparsellm.inspect(result)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"got Result\. Write the result of a run with save_pretrained"):
        sparsellm.verify(result)  # type: ignore[arg-type]
