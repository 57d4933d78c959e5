"""Paths that the system cannot follow, on which methods of `Path` disagree between versions of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import sparsellm
from sparsellm.errors import InvalidSetting, SparseLLMError
from sparsellm.texts.paths import local_path
from tests.conftest import extensions


def no_paths(folder: Path) -> dict[str, Path]:
    """A link to itself, a path through one, and names that are too long."""
    (folder / "circle").symlink_to(folder / "circle")
    return {
        "circle": folder / "circle",
        "within": folder / "circle" / "model",
        "long": folder / ("x" * 300),
        "bare": Path("x" * 300),
    }


@extensions
@pytest.mark.parametrize("name", ["circle", "within", "long", "bare"])
def test_paths_that_cannot_be_followed_get_one_message(name: str, tmp_path: Path) -> None:
    """Wherever a function takes a path: of a model, a text, an output or a page."""
    path = no_paths(tmp_path)[name]
    with pytest.raises(InvalidSetting, match="names no file or folder"):
        local_path(path)
    output = tmp_path / "out"
    calls: dict[str, Callable[[], object]] = {
        "inspect": lambda: sparsellm.inspect(path),
        "prune": lambda: sparsellm.prune(path, "magnitude"),
        "recover": lambda: sparsellm.recover("demo:opt", path, "demo"),
        "recover from": lambda: sparsellm.recover(path, "demo:opt", "demo"),
        "verify": lambda: sparsellm.verify(path),
        "pack": lambda: sparsellm.pack(path, output),
        "pack to": lambda: sparsellm.pack("demo:opt", path, allow_dense=True),
        "load": lambda: sparsellm.load(path),
        "load_report": lambda: sparsellm.load_report(path),
        "evaluate": lambda: sparsellm.evaluate(path, "demo"),
        "text": lambda: sparsellm.prune("demo:opt", "wanda", calibration=path),
        "sweep": lambda: sparsellm.sweep(path, output),
        "sweep to": lambda: sparsellm.sweep({"recipe": {"model": "demo:opt"}, "axes": {"method": ["magnitude"]}}, path),
        "plan to": lambda: sparsellm.plan("demo:opt", "magnitude", output=path),
    }
    for function, call in calls.items():
        with pytest.raises(SparseLLMError):
            pytest.fail(f"{function}: {call()}")


def test_other_paths_stay(tmp_path: Path) -> None:
    """A missing file, one below a file, a dangling link, and a text that is no path for the system."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for path in (tmp_path / "missing", tmp_path / "file" / "x", tmp_path / "link", Path("zero\0byte")):
        assert local_path(path) == path
