"""An exhausted memory is told as what it is, by every command and wherever other errors are translated."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.testing import Result

from sparsellm.cli.console import report_errors
from sparsellm.runtime.devices import is_out_of_memory
from tests.conftest import extensions

PACKAGE = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "src" / "sparsellm"

BROAD = {"Exception", "RuntimeError"}
LET_PASS = ("raise_unless_damaged(error)", "out_of_memory(error)", "MemoryError")

ELSEWHERE = {
    "extension.py": "imports of other packages",
    "cli/run_options.py": "imports of other packages",
    "recipes/registry.py": "imports of other packages",
    "extensions/recover/peft.py": "an adapter on a model that is in memory already",
    "runtime/devices.py": "the trial of a device",
    "texts/tokenized.py": "a template may ask for endless memory",
    "extensions/sharing/hub.py": "an upload",
    "extensions/checks/commands.py": "imports of other packages",
    "testing/checks.py": "an object of others, on tiny models",
    "cli/options.py": "usage",
    "checkpoints/files.py": "a circle of links",
    "texts/paths.py": "an unknown home folder",
}
"""Files whose translations are of something else."""


def translations(file: Path) -> Iterator[tuple[int, str, str]]:
    """The handlers of a file that catch torch's errors of memory and raise another error: line, and text with earlier ones."""
    for block in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(block, ast.Try):
            earlier = ""
            for handler in block.handlers:
                text = ast.unparse(handler)
                kinds = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else BROAD
                raised = [node for node in ast.walk(handler) if isinstance(node, ast.Raise) and node.exc is not None]
                if kinds & BROAD and raised:
                    yield handler.lineno, text, earlier
                earlier += text


@extensions
def test_translated_errors_are_not_of_memory() -> None:
    found = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        for line, text, earlier in translations(file):
            found += 1
            is_let_pass = any(words in text.partition("raise ")[0] + earlier for words in LET_PASS)
            assert is_let_pass or file.relative_to(PACKAGE).as_posix() in ELSEWHERE, f"{file}:{line} takes it for damage"
    assert found > 10


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: x")])
def test_every_kind_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


@extensions
@pytest.mark.parametrize(
    ("name", "words", "where"),
    [
        ("prune", ("prune", "demo:opt", "OUT/new", "--method", "magnitude"), "sparsellm.pipeline.several.run_each"),
        ("plan", ("plan", "demo:opt", "--method", "magnitude"), "sparsellm.extensions.planning.measured_plan.plan_pruning"),
        ("verify", ("verify", "OUT"), "sparsellm.outputs.verification.verify"),
        ("pack", ("pack", "demo:opt", "OUT/new"), "sparsellm.extensions.packed.packing.pack"),
        ("report", ("report", "OUT"), "sparsellm.extensions.studies.interface.report"),
    ],
)
def test_every_command_says_so(
    name: str,
    words: tuple[str, ...],
    where: str,
    tmp_path: Path,
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the options of the command that take less."""
    (tmp_path / "sparsellm.json").write_text("{}")
    monkeypatch.setattr(where, Mock(side_effect=MemoryError()))
    result = command(*(word.replace("OUT", str(tmp_path)) for word in words))
    assert result.exit_code == 1
    assert "error: The device is out of memory." in result.stderr
    assert ("--batch-size" in result.stderr) == (name in ("prune", "plan"))


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    context = typer.Context(Mock(params=[]), obj=True)
    with pytest.raises(MemoryError), report_errors(context):
        raise MemoryError
