"""The report: one page that fetches nothing, with every plot, each also in words and as a table."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from sparsellm.errors import BadCheckpoint, MissingPackage
from sparsellm.reports.figures import Plot
from sparsellm.reports.page import report_page

Command = Callable[..., Result]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run_folder(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned tiny model, with epochs, two texts' perplexities, and samples that would be mark-up."""
    from typer.testing import CliRunner

    from sparsellm.cli.app import app

    out = tmp_path_factory.mktemp("page") / "out"
    words = ["prune", tiny["opt"], out, "--as-published", "--sparsity", "60%", "--calibration", text_file, "--samples", 4]
    words += ["--sequence-length", 32, "--evaluate", text_file, "--prompt", "<script>the sum</script>"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def sweep_folder(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over everything that has a plot of its own, with a cell that failed and a paper's figure."""
    from typer.testing import CliRunner

    from sparsellm.cli.app import app

    place = tmp_path_factory.mktemp("sweep")
    shared = {
        "calibration": str(text_file),
        "sequence_length": 32,
        "evaluate": [str(text_file)],
        "evaluate_limit": 2,
        "as_published": True,
        "epochs": 2,
    }
    axes = {"model": {"opt": str(tiny["opt"]), "none": str(place / "none")}, "sparsity": ["50%", "2:4", "70%"]}
    axes |= {"samples": [2, 4], "alpha": [0.1, 0.2], "beta": [0.1, 0.2]}
    left_out = [{"model": "none", "alpha": 0.2}, {"model": "none", "beta": 0.2}, {"model": "none", "samples": 2}]
    values = {"opt": {"50%": 3.5}}
    entry = {"source": "A & B <2024>", "measure": "perplexity", "axes": ["model", "sparsity"], "values": values}
    content = {"title": "Small & wide", "recipe": shared, "axes": axes, "leave_out": left_out, "published": [entry]}
    (place / "s.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    done = CliRunner().invoke(app, ["sweep", str(place / "s.yaml"), str(place / "out")])
    assert done.exit_code == 1, done.stderr
    return place / "out"


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def check(text: str, found: list[Plot]) -> Page:
    """What holds of every page."""
    page = Page(text)
    assert len(text.encode()) < 2_000_000
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert page.count("svg") == page.count("figure") == len(found) > 0
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    fetched = [a.get(key) for _, a in page.tags for key in ("src", "href", "xlink:href") if a.get(key)]
    assert all(link.startswith(("#", "data:")) for link in fetched if link)
    assert "url(http" not in text
    for plot in found:
        assert plot.text.endswith(".")
        assert plot.rows
        assert all(len(row) <= len(plot.head) for row in plot.rows)
    labels = {attributes.get("aria-labelledby") for tag, attributes in page.tags if tag == "svg"}
    assert labels == {f"{plot.name}-title" for plot in found}
    assert labels <= set(ids)
    references = {link[1:] for link in fetched if link and link.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert references <= set(ids)
    return page


def test_the_page_of_a_run(run_folder: Path) -> None:
    text, found = report_page(run_folder)
    check(text, found)
    assert [plot.name for plot in found] == ["before-and-after", "error-map", "sparsity-map", "convergence", "time"]
    told = json.loads((run_folder / "sparsellm.json").read_text(encoding="utf-8"))
    assert "60 % removed" in text
    assert f"{next(iter(told['perplexity'].values()))['pruned']['value']:.4g}" in text
    assert "&lt;script&gt;the sum" in text
    assert "sparsity: 60%" in text
    maps = {plot.name: plot for plot in found}
    assert len(maps["error-map"].rows) == 3
    block = told["blocks"][1]
    assert list(maps["error-map"].rows[1][1:]) == [f"{x['error']:.3g}" for x in block["layers"]]
    assert len(maps["convergence"].rows) == sum(len(block["epochs"]) for block in told["blocks"])


def test_the_page_of_a_sweep(sweep_folder: Path) -> None:
    text, found = report_page(sweep_folder)
    check(text, found)
    names = [plot.name for plot in found]
    assert names[:2] == ["sparsity-0", "samples-0"]
    assert sum(name.startswith("grid-0-") for name in names) == 6
    assert {"depth", "epochs", "seconds"} <= set(names)
    depth = next(plot for plot in found if plot.name == "depth")
    assert depth.inline().count('id="depth-axes_') == 3, "a panel for each sparsity of the one model that could be pruned"
    assert "Small &amp; wide" in text
    assert "A &amp; B &lt;2024&gt;" in text
    assert "There is no folder" in text
    assert ["opt", "alpha 0.1, beta 0.1, samples 2", "50%"] in [list(row[:3]) for row in found[0].rows]


def test_the_command_writes_page_and_pictures(run_folder: Path, tmp_path: Path, command: Command) -> None:
    done = command("report", run_folder, "--figures", tmp_path / "figures", "--output", tmp_path / "deep" / "page.html")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "deep" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    svgs, pngs = (sorted((tmp_path / "figures").glob(f"*.{kind}")) for kind in ("svg", "png"))
    assert [file.stem for file in svgs] == [file.stem for file in pngs]
    assert len(svgs) == 5
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pngs)
    beside = command("report", run_folder)
    assert beside.exit_code == 0
    assert run_folder.with_name("out.html").is_file()


def test_pages_are_the_same_twice(run_folder: Path) -> None:
    assert report_page(run_folder)[0] == report_page(run_folder)[0]


def test_a_folder_that_is_none(tmp_path: Path, command: Command) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        done = command("report", folder)
        assert done.exit_code == 1
        assert "output folder of a run" in done.stderr
    (tmp_path / "sparsellm.json").write_text('{"recipe": 3', encoding="utf-8")
    with pytest.raises(BadCheckpoint, match="not JSON"):
        report_page(tmp_path)
    (tmp_path / "sparsellm.json").write_text('{"recipe": 3}', encoding="utf-8")
    with pytest.raises(BadCheckpoint, match="is damaged"):
        report_page(tmp_path)


def test_without_matplotlib(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingPackage, match=r"pip install 'sparsellm\[plots\]'"):
        report_page(run_folder)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_in_a_browser(kind: str, run_folder: Path, sweep_folder: Path, tmp_path: Path) -> None:
    """Opened from a file, without a network: every plot is there, the console stays silent, something is painted."""
    text, found = report_page(run_folder if kind == "run" else sweep_folder)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    quiet = [
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
    ]
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--enable-logging=stderr", "--window-size=380,900", f"file://{tmp_path / 'page.html'}"]
    shown = subprocess.run([*words, "--dump-dom"], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.count("<figure>") == len(found)
    assert shown.stdout.count("<svg") == len(found)
    assert "CONSOLE" not in shown.stderr
    picture = tmp_path / "page.png"
    subprocess.run([*words, f"--screenshot={picture}"], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 10_000
