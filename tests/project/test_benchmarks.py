"""The scripts that measure can still be run: each imports what the package has, and pages show what they measured."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from sparsellm.testing.tiny_models import tiny_model
from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"


def test_every_script_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says how it is run, or the script that it is part of."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in sorted(file.stem for file in FOLDER.glob("*.py")):
        module = importlib.import_module(name)
        run = f"{name}.py" if hasattr(module, "main") else ""
        assert f"python benchmarks/{run}" in str(module.__doc__), name


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.7])
def test_solvers_that_round(sparsity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense ones leave as many values in a group as its bits have; the compensated one keeps the zeros that were there."""
    monkeypatch.syspath_prepend(str(FOLDER))
    bits, gptq = (importlib.import_module(name) for name in ("bits", "gptq"))
    grid, generator = gptq.Grid(3, 32), torch.Generator().manual_seed(0)
    compensated = bits.SparseLLM(gptq.Compensated(3), scope="none", keep_zeros=True)
    for method in (bits.LayerWise(gptq.RoundToNearest(grid)), bits.TrueSequential(gptq.GPTQ(grid)), compensated):
        model = tiny_model("llama")
        weights = {name: layer.weight.detach() for name, layer in bits.layers_of(model).items()}
        for weight in weights.values():
            weight.mul_(torch.rand(weight.shape, generator=generator) >= sparsity)
        removed = {name: weight == 0 for name, weight in weights.items()}
        bits.apply(model, method, torch.randint(64, (8, 16), generator=generator).split(4))
        for name, layer in bits.layers_of(model).items():
            if method is compensated:
                assert not layer.weight[removed[name]].any()
            else:
                groups = [group for row in layer.weight for group in row.split(grid.group_size)]
                assert max(len(group.unique()) for group in groups) <= 2**grid.bits


@pytest.mark.long
def test_every_call_of_a_script_fits() -> None:
    """The arguments of calls are those that the package's functions have; scripts are not typed otherwise."""
    scripts = [*FOLDER.glob("*.py"), *(ROOT / "dev").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    scripts += (ROOT / "examples" / "papers").glob("*.py")
    words = [sys.executable, "-m", "mypy", "--follow-imports", "silent"]  # with the settings, and what is known, of the package
    path = os.environ | {"MYPYPATH": f"src:{FOLDER}:."}
    done = subprocess.run([*words, *map(str, scripts)], capture_output=True, text=True, check=False, cwd=ROOT, env=path)
    assert "source files)" in done.stdout, done.stderr
    assert [line for line in done.stdout.splitlines() if "[call-arg]" in line or "[attr-defined]" in line] == []


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


@pytest.fixture
def english(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that makes the text of the larger models."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("english")


def test_english_without_markup(english: ModuleType, tmp_path: Path) -> None:
    """Paragraphs of pages, manuals and texts, once each, without code, tables and other languages; documents apart."""
    sentence = "This is the first sentence of a paragraph that is long enough for the text."
    source = tmp_path / "doc" / "pages"
    source.mkdir(parents=True)
    page = f"<html><body><nav>{sentence} Of nav.</nav><h1>The title of it</h1><p>{sentence} Of <b>HTML</b> in a page&#182;</p>"
    page += (
        f"<pre>{sentence} Of code.</pre><ul><li>An item, {sentence}<p>Within it, {sentence}</p>And behind, {sentence}</li></ul>"
    )
    page += "<p>Dies ist ein Absatz in einer anderen Sprache, der lang genug und kein englischer ist.</p>"
    page += "<p>a = b[1] + c[2]; d = {e: f(g)}; h(i)(j) -&gt; k / l ** m // n == o != p</p></body></html>"
    (source / "page.html").write_text(page, encoding="utf-8")
    again = f"<p>{sentence} Of <b>HTML</b> in a page</p>" + "".join(f"<p>Number {n}: {sentence}</p>" for n in range(5))
    (source / "second.html.gz").write_bytes(gzip.compress(again.encode()))
    rst = f"Title\n=====\n\n.. note:: {sentence}\n\n:ref:`A link <target>` and ``code`` and *emphasis*: {sentence}\n\n"
    rst += f"    {sentence} Code.\n"
    (source / "text.rst").write_text(rst + "".join(f"\nLine {n}:\n{sentence}\n" for n in range(5)), encoding="utf-8")
    (source / "broken.html.gz").write_bytes(b"no gzip")
    (source / "empty.html").write_bytes(b"")
    (source / "link.html").symlink_to(source / "page.html")
    found = english.paragraphs(source / "page.html")
    assert found == [
        f"{sentence} Of HTML in a page",
        f"An item, {sentence}",
        f"Within it, {sentence}",
        f"And behind, {sentence}",
    ]
    assert english.paragraphs(source / "text.rst")[0] == f"A link and code and emphasis: {sentence}"
    assert english.paragraphs(source / "broken.html.gz") == english.paragraphs(source / "empty.html") == []
    files = english.find_files([tmp_path / "doc"])
    assert [file.name for file in files] == ["broken.html.gz", "empty.html", "page.html", "second.html.gz", "text.rst"]
    texts = dict(english.documents(files, 1))
    assert [file.name for file in texts] == ["second.html.gz", "text.rst"]  # the page is too short for a document
    assert "Of HTML" not in texts[source / "second.html.gz"]


@pytest.mark.skipif(shutil.which("nroff") is None, reason="nroff is not installed")
def test_manual_pages(english: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "man" / "man1"
    folder.mkdir(parents=True)
    page = ".TH TOOL 1\n.SH DESCRIPTION\n.B tool\nreads the files that are given, and writes\nwhat is in them to the output.\n"
    (folder / "tool.1.gz").write_bytes(gzip.compress(page.encode()))
    assert english.find_files([tmp_path / "man"]) == [folder / "tool.1.gz"]
    assert english.paragraphs(folder / "tool.1.gz") == [
        "tool reads the files that are given, and writes what is in them to the output."
    ]


def test_english_is_written_whole(english: ModuleType, tmp_path: Path) -> None:
    """Both texts and the counts; nothing at all if there is nothing to read."""
    source = tmp_path / "doc"
    source.mkdir()
    for number in range(60):
        lines = (f"The number {number} {line} is the sum of the weights that are in the layer.\n\n" for line in range(8))
        (source / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    output = tmp_path / "english"
    record = english.write([source], output, 1)
    assert record == json.loads((output / "english.json").read_text())
    assert record["documents"] == {"text": 60}
    held_back = [file for file in english.find_files([source]) if english.is_held_back(file)]
    with lzma.open(output / "held-back.txt.xz", "rt") as held, lzma.open(output / "train.txt.xz", "rt") as train:
        assert held.read().count("is the sum") == 8 * len(held_back)
        assert train.read().count("is the sum") == 8 * (60 - len(held_back))
    with pytest.raises(SystemExit, match="no manual pages"):
        english.write([tmp_path / "nothing"], tmp_path / "other", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doc", "english"]
