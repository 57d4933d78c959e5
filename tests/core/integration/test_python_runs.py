"""`prune` in Python with an output: what the command leaves, with objects as methods, and models and texts in memory."""

from __future__ import annotations

import importlib
import linecache
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.files import WORK
from sparsellm.errors import CannotResume, InvalidSetting, OutputExists
from sparsellm.extension import package_with
from sparsellm.methods import BlockResult
from sparsellm.models.blocks import Block
from sparsellm.outputs.journal import JOURNAL, Journal
from sparsellm.recipes.method_classes import ClassOrigin
from tests import processes
from tests.conftest import extensions, long_unless
from tests.core.cli.test_work_directory import same, weights_of
from tests.core.integration.test_own_method import EachLayer, PowerWanda

Command = Callable[..., Result]
Ends = Callable[[int], None]
SMALL: dict[str, Any] = {"samples": 6, "sequence_length": 32, "batch_size": 2}
METHODS = {"solver": PowerWanda(0.5), "method": EachLayer(PowerWanda(0.5)), "inside": sparsellm.SparseLLM(PowerWanda(0.5))}
PRUNER = """
from dataclasses import dataclass
from typing import ClassVar
import sparsellm

@dataclass(frozen=True)
class Pruner:
    power: float = 1.0
    needs: ClassVar[type] = sparsellm.InputRMS

    def solve(self, problem, pattern):
        return problem.weight * problem.keep(pattern, problem.weight.abs() * problem.rms**self.power)
"""


@pytest.fixture
def run(tiny: dict[str, Path], text_file: Path) -> Callable[..., Any]:
    """Prune the tiny Llama to 60 %."""

    def prune(method: Any, output: Path | None = None, **settings: Any) -> Any:
        return sparsellm.prune(
            **{"model": tiny["llama"], "sparsity": "60%", "calibration": text_file, **SMALL, **settings},
            method=method,
            output=output,
        )

    return prune


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Have Ctrl-C end runs after so many blocks, of all outputs together; with -1 never."""
    plain, kept = Journal.store_block, []

    def after(blocks: int) -> None:
        def keep(self: Journal, block: Block, result: BlockResult) -> Path:
            if len(kept) == blocks:
                raise KeyboardInterrupt
            kept.append(result)
            return plain(self, block, result)

        kept.clear()
        monkeypatch.setattr(Journal, "store_block", keep)

    return after


@pytest.fixture
def pruner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of one's own, in the installed package my-pruner 1.0."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "my_pruner.py").write_text(PRUNER, encoding="utf-8")
    metadata = tmp_path / "site" / "my_pruner-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: my-pruner\nVersion: 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    package_with.cache_clear()
    yield importlib.import_module("my_pruner")
    del sys.modules["my_pruner"]
    package_with.cache_clear()


def prune_and_die(method: str, output: Path, model: Path, text: Path, settings: dict[str, Any]) -> None:
    """Prune in a process that ends by SIGKILL as soon as the journal names a block."""
    processes.die_once_written(str(output / WORK / JOURNAL), b'"block"')
    sparsellm.prune(model, METHODS[method], "60%", calibration=text, output=output, **settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [long_unless(method == "solver", method, settings) for method in METHODS for settings in ({}, {"offload": True})],
    ids=str,
)
def test_a_killed_run_resumes_to_the_same_bytes(
    method: str,
    settings: dict[str, Any],
    run: Callable[..., Any],
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    server: ForkServerContext,
) -> None:
    """SIGKILL once a block is written, in memory and block by block; the weights are those of `save_pretrained` too."""
    run(METHODS[method]).save_pretrained(tmp_path / "saved")
    run(METHODS[method], tmp_path / "whole", **settings)
    out, text = tmp_path / "out", {**SMALL, **settings}
    process = server.Process(target=prune_and_die, args=(method, out, tiny["llama"], text_file, text))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(CannotResume, match=r"unfinished.*`resume=True`"):
        run(METHODS[method], out, **settings)
    ended = run(METHODS[method], out, resume=True, **settings)
    assert same(out, tmp_path / "whole")
    saved = weights_of(tmp_path / "saved")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(out).items())
    assert not (out / WORK).exists()
    assert ended.folder == out
    assert ended.report.sparsity == pytest.approx(0.6, abs=1e-3)
    assert sparsellm.verify(out, against=tiny["llama"]).layers == len(ended.report.layers)
    written = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert run(METHODS[method], out, resume=True, **settings).report.to_dict() == ended.report.to_dict()
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == written


def test_the_command_and_python_write_the_same(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, ends: Ends, run: Callable[..., Any]
) -> None:
    """A run that the one begins is continued by the other, and its output is known to both as finished."""
    words = ("--calibration", text_file, "--sparsity", "60%", "--samples", 6, "--sequence-length", 32, "--batch-size", 2)
    line = ("prune", tiny["llama"], tmp_path / "out", *words, "--method", "wanda", "--resume")
    assert command("prune", tiny["llama"], tmp_path / "whole", *words, "--method", "wanda").exit_code == 0
    ends(1)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run("wanda", tmp_path / "out")
    assert any("1 block is finished and kept: pass `resume=True`" in note for note in interrupt.value.__notes__)
    ends(-1)
    assert command(*line).exit_code == 0
    assert same(tmp_path / "out", tmp_path / "whole")
    run("wanda", tmp_path / "out", resume=True)
    assert "is finished" in command(*line).stderr


def edit(module: ModuleType) -> None:
    """Change the file of a module."""
    assert module.__file__
    file = Path(module.__file__)
    file.write_text(file.read_text(encoding="utf-8").replace("problem.weight.abs() *", "2 * problem.weight.abs() *"))


def install_again(module: ModuleType) -> None:
    """Install another version of the package of a module."""
    assert module.__file__
    metadata = Path(module.__file__).parent / "my_pruner-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("1.0", "2.0"), encoding="utf-8")
    package_with.cache_clear()


@pytest.mark.parametrize(
    ("change", "power", "told"),
    [
        (edit, 1.0, "my_pruner of my_pruner.Pruner|my_pruner.Pruner was changed: module my_pruner"),
        (install_again, 1.0, r"my.pruner\S* 1\.0.*my.pruner\S* 2\.0"),
        (lambda _: None, 0.5, r"power.*1\.0.*0\.5"),
    ],
    ids=["class", "version", "setting"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["solver", "inside a method"])
def test_another_method_does_not_go_on(
    inside: bool,
    change: Callable[[ModuleType], None],
    power: float,
    told: str,
    pruner: ModuleType,
    run: Callable[..., Any],
    tmp_path: Path,
    ends: Ends,
) -> None:
    """Neither an unfinished output nor a finished one is taken for that of a class that was changed, or of another setting."""

    def made(power: float) -> Any:
        return EachLayer(pruner.Pruner(power)) if inside else pruner.Pruner(power)

    ends(1)
    with pytest.raises(KeyboardInterrupt):
        run(made(1.0), tmp_path / "begun")
    ends(-1)
    run(made(1.0), tmp_path / "finished")
    run(made(1.0), tmp_path / "finished", resume=True)
    change(pruner)
    for name in ("begun", "finished"):
        with pytest.raises(CannotResume, match=told):
            run(made(power), tmp_path / name, resume=True)
        run(made(power), tmp_path / name, restart=True, overwrite=True)
    assert same(tmp_path / "begun", tmp_path / "finished")


def test_several_outputs(run: Callable[..., Any], tmp_path: Path, ends: Ends) -> None:
    """A folder each, as those of single runs; interrupted in the second one, and continued."""
    sparsities = {"50": "50%", "2-4": "2:4"}
    ends(4)  # of three blocks each
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run(PowerWanda(), tmp_path / "out", sparsity=[*sparsities.values()])
    assert any("1 of 2 outputs is finished and kept" in note for note in interrupt.value.__notes__)
    ends(-1)
    outputs = run(PowerWanda(), tmp_path / "out", sparsity=[*sparsities.values()], resume=True)
    assert [output.folder for output in outputs] == [tmp_path / "out" / name for name in sparsities]
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == sparsities.keys()
    for output, sparsity in zip(outputs, sparsities.values(), strict=True):
        run(PowerWanda(), tmp_path / output.folder.name, sparsity=sparsity)
        assert same(output.folder, tmp_path / output.folder.name)
    with pytest.raises(OutputExists):
        run(PowerWanda(), tmp_path / "out", sparsity=[*sparsities.values()])


def loaded(folder: Path) -> dict[str, Any]:
    """A model in memory with its tokenizer."""
    return {"model": AutoModelForCausalLM.from_pretrained(folder), "tokenizer": AutoTokenizer.from_pretrained(folder)}


def test_a_model_in_memory(tiny: dict[str, Path], text_file: Path, run: Callable[..., Any], tmp_path: Path, ends: Ends) -> None:
    """Resumed with the dense model, loaded again; not with what the interrupted run left, and not with another model."""
    texts = {"calibration": text_file.read_text(encoding="utf-8").split(" the ")}
    run(PowerWanda(), **loaded(tiny["llama"]), **texts).save_pretrained(tmp_path / "saved")
    ends(2)
    begun = loaded(tiny["llama"])
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run(PowerWanda(), tmp_path / "out", **begun, **texts)
    assert len(interrupt.value.__notes__) == 2  # what is kept, and that the model was changed
    ends(-1)
    with pytest.raises(CannotResume, match="the model in memory"):
        run(PowerWanda(), tmp_path / "out", **begun, **texts, resume=True)
    with pytest.raises(CannotResume, match="calibration tokens"):
        run(PowerWanda(), tmp_path / "out", **loaded(tiny["llama"]), calibration=texts["calibration"][1:], resume=True)
    again = loaded(tiny["llama"])
    run(PowerWanda(), tmp_path / "out", **again, **texts, resume=True)
    assert same(tmp_path / "out", tmp_path / "saved")
    weights: PreTrainedModel = again["model"]
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in weights.state_dict().items())
    run(PowerWanda(), tmp_path / "out", **loaded(tiny["llama"]), **texts, resume=True)  # finished, and kept
    for other in (begun | texts, loaded(tiny["llama"]) | {"calibration": texts["calibration"][1:]}, texts):
        with pytest.raises(CannotResume, match="is finished, but not of this run"):
            run(PowerWanda(), tmp_path / "out", **other, resume=True)
    with pytest.raises(CannotResume, match="does not say which"):  # it was written by save_pretrained
        run(PowerWanda(), tmp_path / "saved", **loaded(tiny["llama"]), **texts, resume=True)


def test_texts_in_memory_to_measure_on(run: Callable[..., Any], tmp_path: Path) -> None:
    texts = ["the sum of the weights that stay is what a layer can still say"] * 8
    run("magnitude", tmp_path / "out", evaluate={"valid": texts})
    assert run("magnitude", tmp_path / "out", evaluate={"valid": list(texts)}, resume=True).report.perplexity["valid"]
    with pytest.raises(CannotResume, match="valid was changed"):
        run("magnitude", tmp_path / "out", evaluate={"valid": ["another", *texts]}, resume=True)


@dataclass(frozen=True)
class Masked:
    """A solver with a setting that JSON cannot hold."""

    mask: Any
    needs: ClassVar[type] = sparsellm.TokenCount

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.weight * problem.keep(pattern, problem.weight.abs())


class NoDataclass(Masked.__mro__[1]):  # type: ignore[misc]
    needs = sparsellm.TokenCount

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    solve = Masked.solve


@pytest.mark.parametrize(
    ("method", "settings", "error", "told"),
    [
        (Masked(torch.ones(2)), {}, InvalidSetting, "`Masked.mask` .*tensor"),
        (Masked((1, Masked(lambda: 1))), {}, InvalidSetting, "`Masked.mask`"),
        (NoDataclass(), {}, InvalidSetting, "`NoDataclass.count` .*tensor"),
        (EachLayer(Masked(print)), {}, InvalidSetting, "`Masked.mask`"),
        (sparsellm.LayerWise(PowerWanda(), after_solve=print), {}, InvalidSetting, "`LayerWise.after_solve`"),
        ("wanda", {"resume": True, "restart": True}, InvalidSetting, "`resume`.*`restart`"),
        ("wanda", {"calibration": iter(["a text"])}, InvalidSetting, "`calibration`.*list_iterator"),
        ("wanda", {"evaluate": {"valid": iter(["a text"])}}, InvalidSetting, "`evaluate`.*list_iterator"),
    ],
    ids=lambda x: "",
)
def test_what_cannot_be_resumed_is_refused_at_once(
    method: Any,
    settings: dict[str, Any],
    error: type[Exception],
    told: str,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a model is opened; nothing is written."""
    monkeypatch.setattr("sparsellm.pipeline.preparation.open_model", None)
    with pytest.raises(error, match=told):
        run(method, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


class PlainMethod:
    """A method that is no dataclass, and has no settings."""

    needs, needs_dense_stream, needs_fisher = sparsellm.InputRMS, False, False
    solver = PowerWanda()
    note, prune = EachLayer.note, EachLayer.prune


def test_the_classes_of_a_run_stand_in_its_report(run: Callable[..., Any], tmp_path: Path) -> None:
    """Those of sparsellm are known by its version."""
    for method, names in (
        (PlainMethod(), {f"{__name__}:PlainMethod"}),
        (sparsellm.LayerWise(PowerWanda()), {f"{PowerWanda.__module__}:PowerWanda"}),
        ("wanda", set()),
    ):
        inputs = run(method, tmp_path / "out", overwrite=True).report.inputs
        assert {name for name in inputs if ":" in name} == names
        assert all("not known" not in entries.values() for entries in inputs.values())


def test_a_class_of_the_same_name_is_another_one(run: Callable[..., Any], tmp_path: Path) -> None:
    run(PlainMethod(), tmp_path / "out")
    run(PlainMethod(), tmp_path / "out", resume=True)
    other = type("PlainMethod", (PlainMethod,), {"__module__": "elsewhere"})
    with pytest.raises(CannotResume, match="elsewhere:PlainMethod"):
        run(other(), tmp_path / "out", resume=True)


@pytest.mark.parametrize("setting", ["resume", "restart", "overwrite"])
def test_settings_of_an_output_need_one(setting: str, run: Callable[..., Any]) -> None:
    with pytest.raises(InvalidSetting, match=f"`{setting}`.*`output`"):
        run("magnitude", **{setting: True})


def test_one_process_at_a_time(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out" / WORK).mkdir(parents=True)
    with FileLock(tmp_path / "out" / WORK / "lock"), pytest.raises(CannotResume, match="Another process is working on"):
        run(PowerWanda(), tmp_path / "out")


@extensions
def test_an_output_has_a_page(run: Callable[..., Any], tmp_path: Path) -> None:
    output = run("magnitude", tmp_path / "out")
    assert str(tmp_path / "out") in str(output)
    assert sparsellm.report(output).read_bytes() == sparsellm.report(tmp_path / "out", tmp_path / "page.html").read_bytes()
    assert (tmp_path / "out.html").is_file()


CELL = """
import sparsellm
OUTSIDE = 1

class Base:
    needs = sparsellm.TokenCount

class Pruner(Base):
    def solve(self, problem, pattern):
        return problem.weight * problem.keep(pattern, problem.weight.abs())

    @property
    def size(self):
        return 1
"""


def in_script(source: str, folder: Path) -> str | None:
    """The source that is known of a class of a script."""
    asked = "from sparsellm.recipes.method_classes import ClassOrigin\nfound = ClassOrigin.of(Pruner).source\n"
    (folder / "script.py").write_text(f"{source}\n{asked}", encoding="utf-8")
    linecache.clearcache()
    found: str | None = runpy.run_path(str(folder / "script.py"), run_name="__main__")["found"]
    return found


def in_notebook(source: str, _: Path) -> str | None:
    """The source that is known of a class of a notebook, whose cells `linecache` has."""
    names, name = {"__name__": "nowhere"}, "<ipython-input-1>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return ClassOrigin.of(names["Pruner"]).source


@pytest.mark.parametrize("known", [in_script, in_notebook])
def test_the_source_of_a_class_of_a_script_or_a_notebook(known: Callable[[str, Path], str | None], tmp_path: Path) -> None:
    """Changes within the class count, and those outside of it do not."""
    found = known(CELL, tmp_path)
    assert found
    assert "problem.keep(" in found
    assert known(CELL.replace("OUTSIDE = 1", "OUTSIDE = 1 + 1 + 1"), tmp_path) == found
    assert known(CELL.replace("weight.abs()", "weight"), tmp_path) != found
    assert known(CELL.replace("return 1", "return 2"), tmp_path) != found
    assert known(CELL.replace("TokenCount", "InputRMS"), tmp_path) != found


def test_a_class_without_source_is_noted(run: Callable[..., Any], tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "nowhere"}
    exec(PRUNER.replace("@dataclass(frozen=True)", ""), names)
    assert ClassOrigin.of(names["Pruner"]).source is None
    output = run(names["Pruner"](), tmp_path / "out")
    assert any("nowhere:Pruner has no source" in note for note in output.report.notes)
