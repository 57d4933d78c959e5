"""The benchmark of larger models in miniature, on the demo's text, and the English text that it is meant for."""

from __future__ import annotations

import gzip
import importlib
import json
import lzma
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsellm.pipeline.recipe import SCOPE_STEPS
from sparsellm.texts.demo import named_documents

FOLDER = Path(__file__).parents[2] / "benchmarks"
LINE = "The number {} is the sum of the weights that are in the layer, and it is not the same in each of them.\n\n"


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as `python benchmarks/larger_model.py` imports it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("larger_model")


@pytest.fixture
def english(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that makes the text."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("english")


def words(text: Path, work: Path, *more: str) -> list[str]:
    """A command that measures the smallest models."""
    return ["measure", str(text), "--work", str(work), "--size", "tiny", "--file", str(work / "figures.json"), *more]


def figures_of(work: Path) -> dict[str, Any]:
    return json.loads((work / "figures.json").read_text(encoding="utf-8"))


@pytest.mark.long
def test_the_whole_in_miniature(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Time runs out after the first cells; the second call trains nothing again and fills every row of both tables."""
    text, work = tmp_path / "text", tmp_path / "work"
    text.mkdir()
    for split, name in (("train", "train.txt.xz"), ("held-out", "held-back.txt.xz")):
        with lzma.open(text / name, "wt", encoding="utf-8") as file:
            file.write("\n\n".join(named_documents(split).values()))
    monkeypatch.setitem(SCOPE_STEPS, "model", 10)
    device = ("--device", "cpu", "--patterns", "80%", "2:4")
    assert larger.main(words(text, work, "--minutes", "0.5", *device)) == 1
    assert "minutes are over" in capfd.readouterr().err
    first = figures_of(work)
    assert first["models"].keys() == {"llama", "opt"}
    assert first["cells"].keys() >= {"llama | dense", "opt | dense", "llama | SparseGPT | 80% | 0"}
    trained = {family: (work / family / "model.safetensors").read_bytes() for family in first["models"]}

    assert larger.main(words(text, work, "--minutes", "30", *device)) == 0
    second = figures_of(work)
    assert second["cells"].items() >= first["cells"].items()
    assert all((work / family / "model.safetensors").read_bytes() == weights for family, weights in trained.items())
    forms, few = len(larger.FORMS), len(larger.GRIDS) + len(larger.FEW_BITS)
    assert len(second["cells"]) == 2 * (1 + 2 * forms + few)
    for family, record in second["models"].items():
        assert record["tokens trained on"] == record["steps"] * 8 * 64
        dense = second["cells"][f"{family} | dense"]
        cell = second["cells"][f"{family} | SparseGPT | 80% | 0"]
        assert cell["excess"] == pytest.approx(math.log(cell["perplexity"] / dense["perplexity"]), rel=1e-5)
        assert 0 < cell["standard_error"] < dense["standard_error"] / dense["perplexity"]  # paired: less than either alone
        assert 4.125 < second["cells"][f"{family} | dense GPTQ int4 |  | 0"]["bits"] <= 4.25  # a scale for 64 to 128 columns
        budget = second["cells"][f"{family} | `--bits 2.3` |  | 0"]
        assert 2.2 < budget["bits"] <= 2.3
    monkeypatch.setattr(larger, "figures_of", lambda device: second if device == "cpu" else {})
    table = "\n".join(larger.table())
    assert all(table.count(f"| {form} |") == 2 for form in (*larger.FORMS, *larger.GRIDS, *larger.FEW_BITS))
    assert table.count("| *sparsellm / SparseGPT* |") == 2
    assert table.endswith("Not measured yet on a GPU: models of 44 million parameters.")


def test_cells_that_matter_come_first(larger: ModuleType) -> None:
    """Every cell of the tables once, in the order that the time is spent in."""
    cells = larger.cells()
    assert len(set(cells)) == len(cells) == len(larger.FORMS) * len(larger.PATTERNS) + len(larger.GRIDS) + len(larger.FEW_BITS)
    assert {pattern for _, pattern in cells[:6]} == {"80%", "70%"}
    assert {form for form, _ in cells[:6]} == set(larger.COMPARED)
    assert [pattern for _, pattern in cells[6:10]] == ["2:4", "2:4", "2:4", "80%"]
    assert cells[9][0] == larger.BEST


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of some ten thousand tokens."""
    file = tmp_path / "lines.txt"
    file.write_text("".join(LINE.format(number) for number in range(400)), encoding="utf-8")
    return file


def test_what_cannot_be_measured(
    larger: ModuleType, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, short and other texts, a model of another size, and a device without memory: one message, and exit status 1."""

    def refused(source: Path, *more: str, work: str = "work") -> str:
        assert larger.main(words(source, tmp_path / work, "--device", "cpu", *more)) == 1
        (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
        return line

    assert "missing.txt cannot be read" in refused(tmp_path / "missing.txt")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no .txt files" in refused(empty)
    broken = tmp_path / "broken.txt.xz"
    broken.write_bytes(b"no xz")
    assert "broken.txt.xz cannot be read" in refused(broken)
    short = tmp_path / "short.txt"
    short.write_text(LINE.format(1), encoding="utf-8")
    assert "Give more text" in refused(short, work="short")
    assert "more than 4 times each. Give more text, or less time." in refused(text, "--minutes", "5")
    assert not list((tmp_path / "work").glob("[lo.]*"))  # neither model, nor a part of one
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8") * 2, encoding="utf-8")
    assert "Name another --work folder" in refused(other)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(larger, "fit", exhausted)
        assert "out of memory in training with 8 sequences" in refused(text)


def test_time_that_runs_out(
    larger: ModuleType, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a training, which would take an hour: no model is left, and the next call begins with it."""
    monkeypatch.setattr(larger, "TRAINING_SHARE", 1e4)
    monkeypatch.setattr(larger, "REPEATS", None)
    assert larger.main(words(text, tmp_path / "work", "--device", "cpu", "--minutes", "0.02")) == 1
    err = capfd.readouterr().err
    assert "0.02 minutes are over: 0 cells" in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("work/[lo.]*"))


def test_a_cell_without_memory(
    larger: ModuleType, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell is named, the others are measured, and the exit status says that one is missing."""
    work = tmp_path / "work"
    monkeypatch.setattr(larger, "REPEATS", None)
    real = larger.sparsellm.prune

    def prune(*given: Any, **settings: Any) -> Any:
        if settings["method"] == "sparsegpt":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given, **settings)

    monkeypatch.setattr(larger.sparsellm, "prune", prune)
    chosen = ("--device", "cpu", "--minutes", "0.2", "--models", "llama", "--only", "SparseGPT", "Wanda", "--patterns", "80%")
    assert larger.main(words(text, work, *chosen)) == 1
    err = capfd.readouterr().err
    assert "not measured: llama | SparseGPT | 80% | 0: cpu is out of memory. The other cells go on." in err
    assert figures_of(work)["cells"].keys() == {"llama | dense", "llama | Wanda | 80% | 0"}


# ---- English


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


def test_english_is_written_whole(english: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both texts and the counts; nothing at all if it fails, or if there is nothing to read."""
    source = tmp_path / "doc"
    source.mkdir()
    for number in range(60):
        text = "".join(LINE.format(f"{number} {line}") for line in range(8))
        (source / f"{number}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "english"
    record = english.write([source], output, 1)
    assert record == json.loads((output / "english.json").read_text())
    assert record["documents"] == {"text": 60}
    held_back = [file for file in english.find_files([source]) if english.is_held_back(file)]
    with lzma.open(output / "held-back.txt.xz", "rt") as held, lzma.open(output / "train.txt.xz", "rt") as train:
        assert held.read().count("is the sum") == 8 * len(held_back)
        assert train.read().count("is the sum") == 8 * (60 - len(held_back))
    monkeypatch.setattr(english, "documents", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        english.write([source], tmp_path / "other", 1)
    with pytest.raises(SystemExit, match="no manual pages"):
        english.write([tmp_path / "nothing"], tmp_path / "other", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doc", "english"]
