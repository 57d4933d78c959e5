"""The scripts that measure can still be run: each imports what the package has, and what they measured can be shown."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.py")))
def test_a_script_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says how it is run, or the script that it is part of."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module(name)
    run = f"{name}.py" if hasattr(module, "main") else ""
    assert f"python benchmarks/{run}" in str(module.__doc__)


@pytest.mark.parametrize("name", ["excess", "solvers", "speed_tables", "streaming", "planning"])
def test_tables_can_be_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the figures in the repository; each is found on the page of results."""
    monkeypatch.syspath_prepend(str(FOLDER))
    lines = importlib.import_module(name).tables()
    page = (FOLDER.parent / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    assert lines
    assert [line for line in lines if line not in page] == []


def test_where_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that a phase names is there and is told of, wherever it was imported; afterwards all is as before."""
    monkeypatch.syspath_prepend(str(FOLDER))
    clock, layerwise = importlib.import_module("clock"), importlib.import_module("sparsellm.methods.layerwise")
    linalg, solver = importlib.import_module("sparsellm.solvers.linalg"), importlib.import_module("sparsellm.solvers.sparsegpt")
    before = linalg.upper_factor, solver.SparseGPT.solve, layerwise.solve
    phases = clock.Phases()
    with clock.instrumented(phases.wrap, clock.PHASES):
        assert solver.upper_factor is linalg.upper_factor is not before[0]
        solver.upper_factor(torch.eye(3))
        assert phases.seconds["factorisation"] > 0
    assert (linalg.upper_factor, solver.SparseGPT.solve, layerwise.solve) == before
    assert solver.upper_factor is before[0]


@pytest.mark.parametrize(("name", "benchmark"), [("rounding", "rounding"), ("memory", "memory_budget")])
def test_tables_in_large_models_are_as_measured(name: str, benchmark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables in the docs are what the figures say."""
    monkeypatch.syspath_prepend(str(FOLDER))
    page = (FOLDER.parent / "docs" / "large-models.md").read_text(encoding="utf-8")
    table = page.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0]
    assert table.splitlines() == importlib.import_module(benchmark).table()
