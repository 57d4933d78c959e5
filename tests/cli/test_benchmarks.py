"""The scripts that measure can still be run: each imports what the package has, and what they measured can be shown."""

from __future__ import annotations

import importlib
import io
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_script_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says how it is run, or the script that it is part of."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in sorted(file.stem for file in FOLDER.glob("*.py")):
        module = importlib.import_module(name)
        run = f"{name}.py" if hasattr(module, "main") else ""
        assert f"python benchmarks/{run}" in str(module.__doc__), name


def test_pages_hold_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table of `render.py` is in a page, as the measured figures are now."""
    monkeypatch.syspath_prepend(str(FOLDER))
    render = importlib.import_module("render")
    pages = {name: (FOLDER.parent / name).read_text(encoding="utf-8") for name in render.PAGES}
    assert [name for name, page in pages.items() if render.render(page) != page] == []
    assert {block[1] for page in pages.values() for block in render.BLOCK.finditer(page)} == render.TABLES.keys()


def test_the_charts_show_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, with the version of matplotlib that is pinned; others draw otherwise."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    if f"matplotlib=={version('matplotlib')}\n" not in (FOLDER.parent / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib than the pinned one draws otherwise")
    from matplotlib.image import imread

    monkeypatch.syspath_prepend(str(FOLDER))
    render = importlib.import_module("render")
    for picture, chart in render.CHARTS.items():
        assert picture.read_text(encoding="utf-8") == chart()
    drawn, saved = (imread(io.BytesIO(content)) for content in (render.quality.card(), render.CARD.read_bytes()))
    assert np.abs(drawn - saved).max() < 0.02  # processors may round a pixel's edge differently


def test_where_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that a phase names is there and is told of, wherever it was imported; afterwards all is as before."""
    monkeypatch.syspath_prepend(str(FOLDER))
    clock, layerwise = importlib.import_module("clock"), importlib.import_module("sparsellm.methods.layerwise")
    linalg, solver = importlib.import_module("sparsellm.solvers.linalg"), importlib.import_module("sparsellm.solvers.sparsegpt")
    before = linalg.upper_factor_, solver.SparseGPT.solve, layerwise.solve
    phases = clock.Phases()
    with clock.instrumented(phases.wrap, clock.PHASES):
        assert solver.upper_factor_ is linalg.upper_factor_ is not before[0]
        solver.upper_factor_(torch.eye(3))
        assert phases.seconds["factorization"] > 0
    assert (linalg.upper_factor_, solver.SparseGPT.solve, layerwise.solve) == before
    assert solver.upper_factor_ is before[0]
