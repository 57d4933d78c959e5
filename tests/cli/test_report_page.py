"""The report: one page that fetches nothing, with every plot, each also in words and as a table."""

from __future__ import annotations

import builtins
import html
import json
import math
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

import sparsellm
from sparsellm.cli import prune as cli_prune
from sparsellm.errors import BadCheckpoint, InvalidSetting, MissingPackage, TooLarge
from sparsellm.methods import BlockResult, EpochResult
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.recipe_file import validated
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import PrunedReport, Report, load_report
from sparsellm.studies.commands import run_command, sweep_yaml
from sparsellm.studies.figures import Plot
from sparsellm.studies.page import report_page, verdict
from sparsellm.studies.run_plots import at_bound, convergence, run_plots
from sparsellm.studies.sweep_file import read_sweep
from sparsellm.studies.sweep_runner import saved_sweep
from tests import made_up
from tests.made_up import accuracy, perplexity

Command = Callable[..., Result]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run_folder(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned tiny model, with epochs and a text's perplexity."""
    from typer.testing import CliRunner

    from sparsellm.cli.app import app

    out = tmp_path_factory.mktemp("page") / "out"
    words = ["prune", tiny["opt"], out, "--as-published", "--sparsity", "60%", "--calibration", text_file, "--samples", 4]
    words += ["--sequence-length", 32, "--evaluate", text_file]
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
    left_out += [{"samples": 4, "alpha": 0.2}, {"samples": 4, "beta": 0.2}]
    values = {"opt": {"50%": 3.5}}
    entry = {"source": "A & B <2024>", "measure": "perplexity", "axes": ["model", "sparsity"], "values": values}
    content = {"title": "Small & wide", "recipe": shared, "axes": axes, "leave_out": left_out, "published": [entry]}
    (place / "s.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    done = CliRunner().invoke(app, ["sweep", str(place / "s.yaml"), str(place / "out")])
    assert done.exit_code == 1, done.stderr
    return place / "out"


Drawn = tuple[str, list[Plot]]


@pytest.fixture(scope="module")
def run_page(run_folder: Path) -> Drawn:
    """The page of the run, and its plots."""
    return report_page(run_folder)


@pytest.fixture(scope="module")
def sweep_page(sweep_folder: Path) -> Drawn:
    """The page of the sweep, and its plots."""
    return report_page(sweep_folder)


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
    assert "@media print" in text
    for rule in ("h1,h2,summary{break-after:avoid}", "details::details-content{content-visibility:visible"):
        assert rule in text[text.index("@media print") :]
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


def test_the_page_of_a_run(run_folder: Path, run_page: Drawn) -> None:
    text, found = run_page
    check(text, found)
    assert [plot.name for plot in found] == ["error-map", "convergence", "time"], "the sparsities are equal"
    told = load_report(run_folder)
    values = next(iter(told.perplexity.values()))
    dense, pruned = values["dense"].value, values["pruned"].value
    assert "60\N{NO-BREAK SPACE}% of the weights in the pruned layers removed; perplexity on words.txt " in text
    assert f"words.txt {dense:.0f} → {pruned:.0f}, " in text
    change = part_of(text, r"words\.txt \d+ → \d+, (.*?); verified when written\.").replace("\N{NO-BREAK SPACE}", " ")
    assert change == str(values["pruned"].against(values["dense"]))
    assert "±" in change
    assert "sparsity: 60%" in text
    maps = {plot.name: plot for plot in found}
    assert len(maps["error-map"].rows) == 3
    assert list(maps["error-map"].rows[1][1:]) == [f"{x.error:.2g}" for x in told.blocks[1].layers]
    assert len(maps["convergence"].rows) == sum(len(block.epochs) for block in told.blocks)


def test_the_page_of_a_sweep(sweep_page: Drawn) -> None:
    text, found = sweep_page
    check(text, found)
    names = [plot.name for plot in found]
    assert names[:2] == ["sparsity-0", "samples-0"]
    assert sum(name.startswith("grid-0-") for name in names) == 6
    assert {"depth", "epochs", "seconds"} <= set(names)
    depth = next(plot for plot in found if plot.name == "depth")
    assert depth.inline().count('id="depth-axes_') == 3, "a panel for each sparsity of the one model that could be pruned"
    assert "Small &amp; wide" in text
    assert "perplexity on words.txt (before " in text
    assert {row[0] for row in found[0].rows} == {"opt"}
    assert all(float(row[3].split()[0]) > 0 and " %" in row[5] for row in found[0].rows), "dense and change"
    assert all("before" in plot.inline() for plot in found if plot.name.startswith("sparsity-"))
    assert "A &amp; B &lt;2024&gt;" in text
    assert "There is no folder" in text
    assert ["opt", "alpha 0.1, beta 0.1, samples 2", "50%"] in [list(row[:3]) for row in found[0].rows]


def test_the_command_writes_page_and_pictures(run_folder: Path, tmp_path: Path, command: Command) -> None:
    done = command("report", run_folder, "--figures", tmp_path / "figures", "--output", tmp_path / "deep" / "page.html")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "deep" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    svgs, pngs = (sorted((tmp_path / "figures").glob(f"*.{kind}")) for kind in ("svg", "png"))
    assert [file.stem for file in svgs] == [file.stem for file in pngs]
    assert len(svgs) == 3
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pngs)
    beside = command("report", run_folder)
    assert beside.exit_code == 0
    assert run_folder.with_name("out.html").is_file()


def test_pages_are_the_same_twice(run_folder: Path, run_page: Drawn) -> None:
    assert report_page(run_folder)[0] == run_page[0]


PERPLEXITY = {"demo": {"dense": perplexity(43.5, 1.0), "pruned": perplexity(50.9, 1.5)}}
BOOLQ = {"boolq": {"dense": accuracy(0.61, 0.01), "pruned": accuracy(0.58, 0.01)}}
OTHERS = {"book.txt": {"pruned": perplexity(1234.5)}}
OVERFLOWED = {"demo": {"dense": perplexity(43.5, 1.0), "pruned": perplexity(math.inf)}}
ROSE = "43.5 → 50.9, +17.0 %, error unknown"
FELL = "61.0 % → 58.0 %, -3.0 points, error unknown"
REMOVED = "70 % of the weights in the pruned layers removed"


def recovered(before: dict[str, Any], **fields: Any) -> Report:
    """A report of a recovery from a checkpoint with these perplexities."""
    recipe = RecoveryRecipe(model="m", pruned="p", calibration="demo")
    return made_up.report(recipe, pruned=PrunedReport(made_up.report().recipe, perplexity=before), **fields)


@pytest.mark.parametrize(
    ("fields", "verified", "expected"),
    [
        (
            {"perplexity": PERPLEXITY},
            True,
            f"{REMOVED}; perplexity on demo {ROSE}; verified when written.",
        ),
        ({}, False, f"{REMOVED}; perplexity not measured; not verified."),
        (
            {"perplexity": PERPLEXITY | OTHERS},
            True,
            f"{REMOVED}; perplexity on demo {ROSE}; perplexity on book.txt 1,234; verified when written.",
        ),
        ({"perplexity": OVERFLOWED}, True, f"{REMOVED}; perplexity on demo 43.5 → inf; verified when written."),
        (
            {"tasks": BOOLQ},
            True,
            f"{REMOVED}; accuracy on boolq 61.0 % → 58.0 %, -3.0 points, error unknown; verified when written.",
        ),
        (
            {"tasks": BOOLQ | {"rte": BOOLQ["boolq"]}},
            True,
            f"{REMOVED}; mean accuracy {FELL}; verified when written.",
        ),
        (
            {"perplexity": PERPLEXITY, "before": {"demo": PERPLEXITY["demo"] | {"pruned": perplexity(87.0)}}},
            True,
            f"{REMOVED}; perplexity on demo {ROSE} (87.0, +100 % before the recovery; "
            "by the recovery -41.5 %, error unknown); verified when written.",
        ),
    ],
    ids=["measured", "nothing", "two texts", "overflow", "a task", "tasks", "recovery"],
)
def test_the_verdict(fields: dict[str, Any], verified: bool, expected: str) -> None:
    assert verdict((recovered if "before" in fields else made_up.report)(**fields), verified) == expected


def test_the_verdict_claims_no_difference_within_its_error() -> None:
    """Not from the dense model, and not by a recovery; a difference of the same size on every sequence is one."""
    dense = made_up.measured(3.0, 4.0, 5.0)
    pairs = {"demo": {"dense": dense, "pruned": made_up.measured(3.0, 4.1, 4.96)}}
    said = f"{REMOVED}; perplexity on demo 54.6 → 55.7, no difference measurable (+2.0 ± 4.2 %); verified when written."
    assert verdict(made_up.report(perplexity=pairs), True) == said
    after = {"demo": {"dense": dense, "pruned": made_up.measured(2.98, 4.08, 4.94)}}
    said = verdict(recovered(pairs, perplexity=after), True)
    assert "before the recovery; by the recovery -2.0 ± 0.0 %);" in said
    after = {"demo": {"dense": dense, "pruned": made_up.measured(3.0, 4.1, 4.9)}}
    said = verdict(recovered(pairs, perplexity=after), True)
    assert "by the recovery no difference measurable (-2.0 ± 2.0 %));" in said


def test_the_verdict_names_a_pattern_of_n_of_m() -> None:
    block = BlockResult(0, "a", (made_up.layer("a.x", "2:4"),), (), 1.0)
    assert verdict(made_up.report(blocks=[block]), True).startswith("2:4 sparsity, 50 % of the weights")


def test_an_edited_report_is_not_verified(run_folder: Path, tmp_path: Path) -> None:
    report = json.loads((run_folder / "sparsellm.json").read_text(encoding="utf-8"))
    report["blocks"][0]["layers"][0]["pattern"] = "90%"
    (tmp_path / "sparsellm.json").write_text(json.dumps(report), encoding="utf-8")
    assert "; not verified." in report_page(tmp_path)[0]


def test_one_step_has_no_plot_of_convergence(run_folder: Path) -> None:
    blocks = load_report(run_folder).blocks
    assert convergence(blocks) is not None
    assert convergence([replace(block, epochs=block.epochs[:1]) for block in blocks]) is None


def test_the_plot_of_convergence_says_what_its_steps_minimize() -> None:
    """Accepted rounds lower the error that is shown; the objective of Algorithm 1 and rounding are others."""

    def told(*steps: tuple[str, float]) -> str:
        epochs = tuple(EpochResult("a", 1, kind, x, accepted=True) for kind, x in steps)
        plot = convergence([BlockResult(0, "a", (), epochs, 1.0)])
        assert plot
        return plot.text

    assert told(("solve", 0.2), ("newton", 0.1)).endswith("is on average 0.5 times the error after the first.")
    assert told(("published", 0.1), ("published", 0.117)).endswith(
        "1.17 times the error after the first. Algorithm 1 minimizes its objective, not this error, which may rise."
    )
    assert told(("solve", 0.1), ("round", 0.117)).endswith("to integers, which may raise it.")


def test_layers_at_a_bound_of_the_allocation_are_marked() -> None:
    layers = [
        [made_up.layer("a.x", "60%"), made_up.layer("a.y", "80%")],
        [made_up.layer("b.x", "72%"), made_up.layer("b.y", "80%")],
    ]
    report = made_up.report(blocks=[BlockResult(n, "ab"[n], tuple(x), (), 1.0) for n, x in enumerate(layers)])
    assert at_bound(report.layers) == {"a.x": "minimum", "a.y": "maximum", "b.y": "maximum"}
    plot = next(plot for plot in run_plots(report) if plot.name == "sparsity-map")
    assert plot.rows == [["0", "60.0▼", "80.0▲"], ["1", "72.0", "80.0▲"]]
    assert "The allocation has 1 at its minimum (▼) and 2 at its maximum (▲)." in plot.text
    assert plot.inline().count("80.0▲") == 2, "the numbers are in the cells"
    assert at_bound(made_up.report().layers) == {}


def part_of(text: str, pattern: str) -> str:
    """The first group of a pattern in a page, without escapes."""
    match = re.search(pattern, text, re.DOTALL)
    assert match
    return html.unescape(match[1])


def typed(line: str) -> list[str]:
    """The arguments that a shell gives to sparsellm for a command line."""
    script = f"sparsellm() {{ printf '%s\\0' \"$@\"; }}\n{line}\n"
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def again(text: str) -> tuple[list[str], str]:
    """The arguments of the command on a page, and the content of the file to download."""
    content = part_of(text, r'<a download="[^"]*" href="data:application/yaml;base64,([^"]*)"')
    return typed(part_of(text, r"<h2>Run it again</h2>\s*<pre>(.*?)</pre>")), b64decode(content).decode()


def test_the_command_and_the_recipe_of_a_page_give_the_same_run(run_folder: Path, run_page: Drawn, command: Command) -> None:
    text, _ = run_page
    words, recipe = again(text)
    expected = load_report(run_folder).recipe
    assert validated(Recipe, yaml.safe_load(recipe)) == expected
    assert words[:3] == ["prune", "opt", "out-again"]
    assert command(*words, "--print-config").stdout == recipe
    assert "<code>opt</code>, <code>words.txt</code>" in text, "the names that stand for local paths"


@pytest.mark.parametrize(
    "fields",
    [
        {"exclude": ['It\'s "two"\nlines, $HOME `x` \\', "-x", "--y", "", "é*"], "evaluate": ["a b.txt", "demo"]},
        {"offload": False, "trust_remote_code": True, "max_memory": "16 GiB", "include": ["*.q_proj"]},
        {"method": "sparsellm", "as_published": True, "alpha": 1e-05, "scope": "0:2", "sparsity": "2:4"},
        {"allocation": "owl", "sparsity": 0.7, "effort": "best", "samples": 3, "seed": 2**40},
    ],
)
def test_commands_give_their_recipe(fields: dict[str, Any], command: Command) -> None:
    recipe = validated(Recipe, {"model": "demo:opt", "calibration": "demo"} | fields)
    assert command(*typed(run_command(recipe, "out folder")), "--print-config").stdout == recipe.to_yaml()


def test_a_recovery_s_command_gives_its_recipe(run_folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    fields = {"model": "demo:opt", "pruned": str(run_folder), "calibration": "demo", "train": "lora", "lora_targets": ["It's"]}
    recipe = validated(RecoveryRecipe, fields)
    written: list[list[RecoveryRecipe]] = []
    monkeypatch.setattr(cli_prune, "_write", lambda context, recipes, *_, **__: written.append(recipes))
    done = command(*typed(run_command(recipe, "out-again")))
    assert done.exit_code == 0, done.stderr
    assert written == [[recipe]]


@pytest.mark.parametrize("smoke", [False, True])
def test_the_sweep_of_a_page_reads_as_the_same_sweep(smoke: bool, tmp_path: Path) -> None:
    values = {"demo:opt": {"wanda": {"70%": 20.0}, "ours": {"2:4": 3}}}
    content = {
        "title": "A & B",
        "recipe": {"calibration": "demo", "samples": 2},
        "axes": {
            "model": ["demo:opt", "demo:llama"],
            "method": {"wanda": {"method": "wanda"}, "ours": {"method": "sparsellm", "effort": "fast"}},
            "sparsity": ["70%", "2:4"],
            "seed": [0, 1],
        },
        "leave_out": [{"method": "ours", "seed": 1}, {"model": "demo:llama", "sparsity": "2:4"}],
        "columns": "sparsity",
        "published": [{"source": "x", "measure": "perplexity", "axes": ["model", "method", "sparsity"], "values": values}],
        "smoke": {"axes": {"sparsity": ["70%"]}, "recipe": {"samples": 1}},
    }
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(content), encoding="utf-8")
    sweep = read_sweep(first, smoke=smoke)
    second.write_text(sweep_yaml(sweep), encoding="utf-8")
    again = read_sweep(second, smoke=smoke)
    assert again.model_dump(exclude={"published"}) == sweep.model_dump(exclude={"published"})
    beside = [[entry.beside(cell.labels) for entry in x.published for cell in x.cells] for x in (sweep, again)]
    assert beside[0] == beside[1]
    assert any(beside[0])


def test_the_page_of_a_sweep_has_its_file_without_local_paths(sweep_folder: Path, sweep_page: Drawn, tmp_path: Path) -> None:
    text, _ = sweep_page
    words, content = again(text)
    assert words == ["sweep", "sweep.yaml", "out-again"]
    (tmp_path / "sweep.yaml").write_text(content, encoding="utf-8")
    sweep, saved = read_sweep(tmp_path / "sweep.yaml"), saved_sweep(sweep_folder)
    assert [cell.labels for cell in sweep.cells] == [cell.labels for cell in saved.cells]
    assert [cell.recipe.model_copy(update={"model": "", "calibration": "", "evaluate": ()}) for cell in sweep.cells] == [
        cell.recipe.model_copy(update={"model": "", "calibration": "", "evaluate": ()}) for cell in saved.cells
    ]
    assert str(sweep_folder.parent) not in text
    assert {cell.recipe.calibration for cell in sweep.cells} == {"words.txt"}


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
    with pytest.raises(InvalidSetting, match="does not exist"):
        report_page(run_folder / "none")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_in_a_browser(kind: str, run_page: Drawn, sweep_page: Drawn, tmp_path: Path) -> None:
    """Opened from a file, without a network: every plot is there, the console stays silent, something is painted."""
    text, found = run_page if kind == "run" else sweep_page
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
    # A window has a smallest width, a frame has none.
    frame = f'<iframe style="width:390px" srcdoc="{html.escape(text)}"></iframe>'
    measure = "let page = document.querySelector('iframe').contentDocument.documentElement"
    measure += "; document.title = page.scrollWidth - page.clientWidth"
    (tmp_path / "frame.html").write_text(f"{frame}<script>onload = () => {{ {measure} }}</script>", encoding="utf-8")
    narrow = [*words[:-1], f"file://{tmp_path / 'frame.html'}", "--dump-dom"]
    shown = subprocess.run(narrow, capture_output=True, text=True, timeout=120, check=True)
    assert "<title>0</title>" in shown.stdout, "nothing is wider than a phone"
    picture = tmp_path / "page.png"
    subprocess.run([*words, f"--screenshot={picture}"], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 10_000


def test_results_name_settings_as_the_run_that_was_started(
    loud: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the command line as its options, in Python as its arguments: notes in card, page and report."""

    def warnings(_: Report) -> Iterator[str]:
        yield "no step lowered the loss. Use more text, with more `samples`, or more `steps`"

    monkeypatch.setattr(Report, "recovery_warnings", warnings)
    half = sparsellm.prune(loud["llama"], "magnitude", "50%").save_pretrained(tmp_path / "half")
    few = {"calibration": str(text_file), "samples": 4, "sequence_length": 32, "steps": 3}
    words = [word for name, x in few.items() for word in (f"--{name.replace('_', '-')}", x)]
    cases = [
        (
            lambda out: command("recover", half, out, "--against", loud["llama"], "--scope", "block", *words),
            lambda out: sparsellm.recover(half, loud["llama"], scope="block", **few).save_pretrained(out),
            ("more --samples, or more --steps", "more `samples`, or more `steps`"),
        ),
        (
            lambda out: command("prune", half, out, "--method", "magnitude"),
            lambda out: sparsellm.prune(half, "magnitude").save_pretrained(out),
            ("Pass --keep-zeros to", "Pass `keep_zeros=True` to"),
        ),
        (
            lambda out: command("search", half, out, "--method", "magnitude", "--max-size", "1GB", "--step", "40%"),
            lambda out: sparsellm.search(half, out, max_size="1GB", method="magnitude", step=0.4),
            ("Pass a smaller --step", "Pass a smaller `step`"),
        ),
    ]
    for number, (from_command, from_python, said) in enumerate(cases):
        for start, told, other in ((from_command, *said), (from_python, *said[::-1])):
            out = tmp_path / f"{number} {start is from_python}"
            assert getattr(start(out), "exit_code", 0) == 0
            texts = [(out / name).read_text(encoding="utf-8") for name in ("README.md", "sparsellm.json")]
            for text in (*texts, report_page(out)[0]):
                text = text.replace("\\`", "`")  # noqa: PLW2901
                assert told in text, (number, told)
                assert other not in text, (number, other)


@pytest.mark.parametrize("started", ["by the command", "in Python"])
def test_errors_of_a_sweep_name_settings_as_it_was_started(
    started: str, loud: dict[str, Path], tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TooLarge("Too large. Pass `batch_size=1`.")

    monkeypatch.setattr("sparsellm.pipeline.run_set.prune_run", fail)
    file, out = tmp_path / "sweep.yaml", tmp_path / "sweep"
    recipe = {"model": str(loud["llama"]), "method": "magnitude"}
    file.write_text(yaml.safe_dump({"recipe": recipe, "axes": {"sparsity": ["50%", "60%"]}}), encoding="utf-8")
    if started == "in Python":
        sparsellm.sweep(file, out)
    else:
        command("sweep", file, out)
    told = {json.loads(failed.read_text())["error"] for failed in out.rglob("failed.json")}
    assert told == {f"Too large. Pass {'`batch_size=1`' if started == 'in Python' else '--set batch_size=1'}."}
