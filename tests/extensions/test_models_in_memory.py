"""`plan`, `inspect`, `verify`, `recover`, `sweep` and `report` with objects in place of files, and how results print."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import sparsellm
from sparsellm.cli.result_text import print_summary
from sparsellm.errors import InvalidSetting, SparseLLMError, VerificationFailed
from sparsellm.extensions.studies.page import report_page


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
    with pytest.raises(VerificationFailed, match=r"model\.norm\.weight"):
        sparsellm.verify(out, dense)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_in_memory_is_planned_like_its_folder(family: str, tiny: dict[str, Path], text_file: Path) -> None:
    """The same shapes and the same memory of each stage; what the model takes already is not counted twice."""
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
    assert in_memory.stages == by_path.stages
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
                rf"plan: {tiny['opt'].name}, 18 layers in 3 blocks, by sparsellm, .*",
                r"needs: [\d.]+ [KM]iB of [\d.]+ [MG]iB on \w+ while .*, [\d.]+ [KM]iB of .* on disk; it fits",
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
            r"folder that a run wrote .*OPTForCausalLM",
        ),
        (sparsellm.load_report, r"folder that a run wrote"),
        (sparsellm.report, r"folder that a run wrote"),
        (lambda model: sparsellm.recover(model, "demo:opt", "demo"), r"folder that a run wrote"),
        (lambda model: sparsellm.inspect(model.to("meta")), r"model\.\S+ is not in memory"),
        (lambda _: sparsellm.inspect(3), r"a model of transformers in memory, got int\."),  # type: ignore[arg-type]
        (lambda _: sparsellm.sweep(3), r"sweep .*got int\."),  # type: ignore[arg-type]
        (lambda _: sparsellm.prune(None), r"a model of transformers in memory, got NoneType\."),  # type: ignore[arg-type]
        (lambda model: sparsellm.prune(model, "magnitude", sparsty=0.5), r"'sparsty'\. Did you mean 'sparsity'"),
        (lambda model: sparsellm.evaluate(model, "demo", sample=1), r"'sample'\. Known: "),
        (lambda model: sparsellm.evaluate(model, "demo", evaluate_limits=1), r"Did you mean 'evaluate_limit'"),
        (lambda model: sparsellm.prune(model, "wnda"), r"`method` is unknown: got 'wnda'\. Did you mean 'wanda'"),
        (lambda model: sparsellm.prune(model, "magnitude", 70), r"`sparsity` .*\[0, 1\), got 70"),
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


class FourBits(torch.Tensor):
    """A weight as torchao quantizes it: of a class of its own, and of the dtype that it stands for."""


def changed_weight(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """The model with one weight changed to another kind of tensor."""
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    layer.weight = torch.nn.Parameter(change(layer.weight.detach()), requires_grad=False)  # type: ignore[assignment]
    return model


def without_inv_freq(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a buffer on the meta device, as a load that lacked it leaves one."""
    model.model.rotary_emb.to("meta")
    return model


def with_adapter(model: PreTrainedModel) -> Any:
    """The model in PEFT's wrapper."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


UNUSUAL: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "one weight on the meta device": (lambda model: changed_weight(model, lambda weight: weight.to("meta")), "not in memory"),
    "a buffer on the meta device": (without_inv_freq, "not in memory"),
    "int8": (lambda model: changed_weight(model, lambda weight: weight.to(torch.int8)), "int8"),
    "float8": (lambda model: changed_weight(model, lambda weight: weight.to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    "a tensor of a class": (lambda model: changed_weight(model, lambda x: x.as_subclass(FourBits)), "FourBits"),
    "a sparse tensor": (lambda model: changed_weight(model, lambda weight: weight.to_sparse()), "torch.sparse_coo tensor"),
    "an adapter": (with_adapter, "adapter"),
    "compiled": (torch.compile, "attribute _orig_mod|attribute model"),
    "in a wrapper": (torch.nn.DataParallel, "attribute module"),
    "its base": (lambda model: model.model, "AutoModelForCausalLM"),
}
"""Models that cannot be pruned, and what the message names."""


@pytest.mark.parametrize("kind", UNUSUAL)
def test_every_function_refuses_what_is_no_plain_model(kind: str, tiny: dict[str, Path], text_file: Path) -> None:
    """One message for all functions that take a model in memory, whatever it is that the model has, before any work."""
    make, said = UNUSUAL[kind]
    model = make(loaded(tiny["llama"]))
    text: dict[str, Any] = {"calibration": text_file, "samples": 2, "sequence_length": 16}
    calls: dict[str, Callable[[], object]] = {
        "inspect": lambda: sparsellm.inspect(model),
        "plan": lambda: sparsellm.plan(model, "magnitude"),
        "prune": lambda: sparsellm.prune(model, "wanda", tokenizer=AutoTokenizer.from_pretrained(tiny["llama"]), **text),
        "prune by magnitude": lambda: sparsellm.prune(model, "magnitude"),
        "evaluate": lambda: sparsellm.evaluate(model, [torch.arange(32)], sequence_length=16),
    }
    for name, call in calls.items():
        with pytest.raises(SparseLLMError, match=said):
            pytest.fail(f"{name}: {call()}")


def test_perplexity_refuses_weights_without_values(tiny: dict[str, Path]) -> None:
    """torch multiplies by a weight on the meta device, and reads whatever lies in memory."""
    windows = torch.arange(32).view(2, 16)
    with pytest.raises(InvalidSetting, match=r"up_proj\.weight is not in memory"):
        sparsellm.perplexity(changed_weight(loaded(tiny["llama"]), lambda weight: weight.to("meta")), windows)
    with pytest.raises(SparseLLMError, match="LlamaModel"):
        sparsellm.perplexity(loaded(tiny["llama"]).model, windows)
    for wrong in (object(), torch.nn.Linear(2, 2)):
        with pytest.raises(SparseLLMError, match=type(wrong).__name__):
            sparsellm.perplexity(wrong, windows)  # type: ignore[arg-type]
        with pytest.raises(SparseLLMError, match=type(wrong).__name__):
            sparsellm.blocks_of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [sparsellm.load, sparsellm.pack, sparsellm.export, sparsellm.bench, sparsellm.search])
def test_functions_of_folders_refuse_a_model(call: Callable[..., object], tiny: dict[str, Path], tmp_path: Path) -> None:
    output = () if call in (sparsellm.load, sparsellm.bench) else (tmp_path / "out",)
    target = {"max_perplexity_increase": "5%"} if call is sparsellm.search else {}
    with pytest.raises(InvalidSetting, match="LlamaForCausalLM"):
        call(loaded(tiny["llama"]), *output, **target)


def test_numbers_that_are_not_finite_are_counted(tiny: dict[str, Path], tmp_path: Path) -> None:
    """In memory as in files, in the text and in the data."""
    model = loaded(tiny["opt"])
    with torch.no_grad():
        model.get_parameter("model.decoder.layers.1.fc1.weight")[0, :2] = torch.tensor([torch.nan, torch.inf])
        model.get_parameter("model.decoder.layers.2.fc2.bias")[3] = -torch.inf
    model.save_pretrained(tmp_path / "wrong")
    for found in (sparsellm.inspect(model), sparsellm.inspect(tmp_path / "wrong")):
        assert (found.not_finite, found.to_dict()["not_finite"]) == (3, 3)
        assert found.not_finite_in == ("model.decoder.layers.1.fc1.weight", "model.decoder.layers.2.fc2.bias")
        assert "3 numbers NaN or infinite" in repr(found)
    assert sparsellm.inspect(tiny["opt"]).not_finite == 0


class Broken(sparsellm.Magnitude):
    """A solver that fails in the second block of seven layers each."""

    def solve(self, problem: Any, pattern: Any) -> torch.Tensor:
        count = self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        if count > 8:
            raise ValueError("no more")
        return super().solve(problem, pattern)


def interrupt(kind: str, number: int, error: type[BaseException]) -> Callable[[Any], None]:
    """An observer that raises at an event."""
    left = number

    def observe(event: Any) -> None:
        nonlocal left
        left -= type(event).__name__ == kind
        if left == 0:
            raise error

    return observe


@pytest.mark.parametrize(
    ("event", "error", "state"),
    [
        (("Measured", 1), KeyboardInterrupt, None),
        (("LayerResult", 2), KeyboardInterrupt, "pruned in part"),
        (("BlockResult", 3), KeyboardInterrupt, "pruned up to block 2 of 3, and perhaps a part of another one"),
        (("Measured", 2), torch.OutOfMemoryError, "pruned up to block 3 of 3"),
        (None, ValueError, "pruned up to block 1 of 3, and perhaps a part of another one"),
    ],
)
def test_a_run_that_is_interrupted_says_what_the_model_is(
    event: tuple[str, int] | None, error: type[BaseException], state: str | None, loud: dict[str, Path], text_file: Path
) -> None:
    """Its weights keep their dtype, and a run on what is left does not call it dense, whichever layers it prunes."""
    model = loaded(loud["llama"]).to(torch.bfloat16).train()
    settings: dict[str, Any] = {
        "calibration": text_file,
        "tokenizer": AutoTokenizer.from_pretrained(loud["llama"]),
        "samples": 4,
        "sequence_length": 32,
        "evaluate": (text_file,),
        "evaluate_limit": 4,
    }
    observe = interrupt(*event, error) if event else None
    with pytest.raises(error) as caught:
        sparsellm.prune(model, sparsellm.Wanda() if event else Broken(), 0.5, **settings, observe=observe)
    notes = getattr(caught.value, "__notes__", [])
    assert [f"The model in memory was changed: it is {state}. Load it again" in note for note in notes] == [True] * bool(state)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())
    zeros = sparsellm.inspect(model)
    share = sum(layer.zeros for layer in zeros.layers) / sum(layer.shape[0] * layer.shape[1] for layer in zeros.layers)
    result = sparsellm.prune(model, "magnitude", 0.5, blocks="2", **settings)
    assert result.report.start == (f"initial ({100 * share:.2f} % zeros)" if state else "dense")
    console = Console(width=200, record=True, file=StringIO())
    print_summary(console, result.report, "out")
    texts = console.export_text(), result.report.to_markdown(), *([report_page(result)[0]] if find_spec("matplotlib") else [])
    for text in texts:
        assert result.report.start in text
        assert ("dense perplexity" in text.lower() or "dense, pruned" in text.lower()) == (state is None)


@pytest.mark.parametrize(
    ("event", "done"), [(("BlockResult", 2), "up to block 1 of 3"), (("TrainingResult", 1), "up to block 3")]
)
def test_an_interrupted_recovery_says_what_the_model_is(
    event: tuple[str, int], done: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    out = sparsellm.prune(tiny["llama"], "magnitude", "2:4").save_pretrained(tmp_path / "out")
    settings: dict[str, Any] = {
        "steps": 2,
        "samples": 8,
        "sequence_length": 32,
        "observe": interrupt(*event, KeyboardInterrupt),
    }
    tokenizer = AutoTokenizer.from_pretrained(tiny["llama"])
    with pytest.raises(KeyboardInterrupt) as caught:
        sparsellm.recover(out, loaded(tiny["llama"]), text_file, tokenizer=tokenizer, **settings)
    assert f"it is recovered {done}" in caught.value.__notes__[0]
    del settings["observe"]
    assert sparsellm.recover(out, tiny["llama"], text_file, **settings).report.start == "dense"


def test_a_sweep_and_a_comparison_do_not_call_a_pruned_model_dense(
    loud: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """A folder that was pruned before, at other layers than now, with the zeros that it had."""
    half = sparsellm.prune(loud["llama"], "magnitude", 0.5, blocks="0").save_pretrained(tmp_path / "half")
    recipe = {"model": str(half), "method": "magnitude", "blocks": "1:3", "evaluate": [str(text_file)], "evaluate_limit": 4}
    content = {"recipe": recipe | {"sequence_length": 32}, "axes": {"sparsity": ["60%", "70%"]}}
    sparsellm.sweep(content, tmp_path / "sweep")
    table = (tmp_path / "sweep" / "results.md").read_text()
    assert "| initial (16.67 % zeros) |" in table
    assert "| dense |" not in table


@pytest.mark.parametrize("sparsity", [0.75, "75%", "0.75", "3:4", sparsellm.NM(3, 4), sparsellm.Unstructured(0.75)])
def test_every_spelling_of_a_sparsity(sparsity: Any, tiny: dict[str, Path]) -> None:
    assert sparsellm.prune(loaded(tiny["llama"]), "magnitude", sparsity).report.sparsity == 0.75


def test_the_result_of_a_run_in_place_of_a_model_is_refused(tiny: dict[str, Path]) -> None:
    result = sparsellm.prune(tiny["opt"], "magnitude")
    with pytest.raises(InvalidSetting, match=r"Result.*attribute model"):
        sparsellm.inspect(result)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"Result.*save_pretrained"):
        sparsellm.verify(result)  # type: ignore[arg-type]
