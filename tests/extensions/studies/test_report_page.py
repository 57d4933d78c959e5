"""The pages of runs, comparisons and sweeps: three of made-up reports byte by byte, and what no bytes show.

In tests/pages/ a page stands without its style, and a chart as the texts in it. CONTRIBUTING.md says how they are written.
"""

from __future__ import annotations

import builtins
import html
import json
import math
import os
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting, MissingPackage, TooLarge
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.studies.compare import read_comparison
from sparsellm.extensions.studies.figures import Plot
from sparsellm.extensions.studies.page import comparison_page, report_page, verdict
from sparsellm.extensions.studies.plots import convergence, run_plots
from sparsellm.extensions.studies.run_again import run_command, sweep_yaml
from sparsellm.extensions.studies.sweep_file import read_sweep
from sparsellm.methods import BlockResult
from sparsellm.outputs.report import PrunedReport, Report, load_report
from sparsellm.recipes.file import validated
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import Recipe
from tests import made_up
from tests.conftest import ROOT
from tests.made_up import accuracy, perplexity

Command = Callable[..., Result]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ROOT / "tests" / "pages"
PINNED = (PAGES.parents[1] / "constraints.txt").read_text(encoding="utf-8")

MAKE: dict[str, Callable[[Path], str]] = {
    "run": lambda place: report_page(made_up.a_run(place))[0],
    "comparison": lambda place: comparison_page(read_comparison(made_up.some_runs(place))),
    "sweep": lambda place: report_page(made_up.a_sweep(place))[0],
}


def kept(page: str) -> str:
    """The page without its style, with the texts of a broad chart in its place, and without the second copy of the settings."""

    def texts(svg: re.Match[str]) -> str:
        return "\n".join(["<svg>", *re.findall(r"<text[^>]*>(.*?)</text>", svg[0], re.DOTALL), "</svg>"])

    page = re.sub(r"<style>.*?</style>", "<style></style>", page, flags=re.DOTALL)
    page = re.sub(r'<svg [^>]*class="slim".*?</svg>\s*', "", page, flags=re.DOTALL)
    settings = re.search(r"data:application/yaml;base64,([^\"]*)", page)
    assert settings
    assert b64decode(settings[1]).decode().rstrip() == html.unescape(re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)[-1])
    return re.sub(r"<svg.*?</svg>", texts, page.replace(settings[1], ""), flags=re.DOTALL)


@pytest.mark.parametrize("name", MAKE)
def test_golden_pages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version of matplotlib that is pinned; others write other numbers at the axes."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    if f"matplotlib=={version('matplotlib')}\n" not in PINNED:
        pytest.skip("another matplotlib than the pinned one writes other numbers at the axes")
    monkeypatch.chdir(tmp_path)
    page, file = kept(MAKE[name](Path("made"))), PAGES / f"{name}.html"
    if "WRITE_PAGES" in os.environ:
        file.write_text(page, encoding="utf-8")
    assert page == file.read_text(encoding="utf-8")


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


Drawn = tuple[str, list[Plot]]


@pytest.fixture(params=[made_up.a_run, made_up.a_sweep], ids=["run", "sweep"])
def drawn(request: pytest.FixtureRequest, tmp_path: Path) -> Drawn:
    """The page of a run or of a sweep, and its plots."""
    return report_page(request.param(tmp_path / "made"))


def test_a_page_fetches_nothing_and_has_what_it_refers_to(drawn: Drawn) -> None:
    """Every chart is labelled by its title, and described in a sentence and a table."""
    text, found = drawn
    page = Page(text)
    assert len(text.encode()) < 2_000_000
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert page.count("svg") == 2 * page.count("figure") == 2 * len(found) > 0, "each for two widths of the page"
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    fetched = [a.get(key) for _, a in page.tags for key in ("src", "href", "xlink:href") if a.get(key)]
    assert all(link.startswith(("#", "data:")) for link in fetched if link)
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


def test_the_command_writes_page_and_pictures(tmp_path: Path, command: Command) -> None:
    run = made_up.a_run(tmp_path)
    done = command("report", run, "--figures", tmp_path / "figures", "--output", tmp_path / "deep" / "page.html")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "deep" / "page.html").read_text(encoding="utf-8") == report_page(run)[0]
    svgs, pngs = (sorted((tmp_path / "figures").glob(f"*.{kind}")) for kind in ("svg", "png"))
    assert [file.stem for file in svgs] == [file.stem for file in pngs]
    assert len(svgs) == len(report_page(run)[1])
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pngs)
    assert command("report", run).exit_code == 0
    assert run.with_name(f"{run.name}.html").is_file()


PERPLEXITY = {"demo": {"dense": perplexity(43.5, 1.0), "pruned": perplexity(50.9, 1.5)}}
BOOLQ = {"boolq": {"dense": accuracy(0.61, 0.01), "pruned": accuracy(0.58, 0.01)}}
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
        ({}, False, f"{REMOVED}; perplexity not measured; not verified."),
        ({"perplexity": OVERFLOWED}, True, f"{REMOVED}; perplexity on demo 43.5 → inf; verified when written."),
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
    ids=["nothing", "overflow", "tasks", "recovery"],
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


def test_an_edited_report_is_not_verified(tmp_path: Path) -> None:
    run = made_up.a_run(tmp_path)
    report = json.loads((run / "sparsellm.json").read_text(encoding="utf-8"))
    report["blocks"][0]["layers"][0]["pattern"] = "90%"
    (run / "sparsellm.json").write_text(json.dumps(report), encoding="utf-8")
    assert "; not verified." in report_page(run)[0]


def test_plots_without_data_are_left_out(tmp_path: Path) -> None:
    """A map of equal sparsities, one step, no search, no training and no times."""
    assert [plot.name for plot in run_plots(made_up.report())] == ["error-map"]
    blocks = load_report(made_up.a_run(tmp_path)).blocks
    assert convergence(blocks) is not None
    assert convergence([replace(block, epochs=block.epochs[:1]) for block in blocks]) is None


@pytest.mark.parametrize("length", [1, 70, 91, 300])
def test_a_map_of_layers_with_long_names(length: int) -> None:
    """Names that leave no room, or less, for the cells beside them."""
    blocks = [BlockResult(0, "a", (made_up.layer(f"a.{'n' * length}"),), (), 1.0)]
    [plot] = run_plots(made_up.report(blocks=blocks))
    assert plot.name == "error-map"
    assert "n" * length in plot.save("svg").decode()


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


def test_the_command_and_the_recipe_of_a_page_give_the_same_run(tmp_path: Path, command: Command) -> None:
    run = made_up.a_run(tmp_path)
    words, recipe = again(report_page(run)[0])
    assert validated(Recipe, yaml.safe_load(recipe)) == load_report(run).recipe
    assert words[:3] == ["prune", made_up.MODEL, f"{run.name}-again"]
    assert command(*words, "--print-config").stdout == recipe


@pytest.mark.parametrize(
    "fields",
    [
        {"exclude": ['It\'s "two"\nlines, $HOME `x` \\', "-x", "--y", "", "é*"], "evaluate": ["a b.txt", "demo"]},
        {"offload": False, "trust_remote_code": True, "max_memory": "16 GiB", "include": ["*.q_proj"]},
        {"method": "algorithm1", "settings": {"alpha": 1e-05, "blocks": "0:2", "solver": "alps"}, "sparsity": "2:4"},
        {"allocation": "owl", "sparsity": 0.7, "effort": "best", "samples": 3, "seed": 2**40},
    ],
)
def test_commands_give_their_recipe(fields: dict[str, Any], command: Command) -> None:
    recipe = validated(Recipe, {"model": "demo:opt", "calibration": "demo"} | fields)
    assert command(*typed(run_command(recipe, "out folder")), "--print-config").stdout == recipe.to_yaml()


def test_a_recovery_s_command_gives_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    fields = {
        "model": "demo:opt",
        "pruned": str(made_up.a_run(tmp_path)),
        "calibration": "demo",
        "train": "lora",
        "lora_targets": ["It's"],
    }
    recipe = validated(RecoveryRecipe, fields)
    written: list[list[RecoveryRecipe]] = []
    monkeypatch.setattr(
        "sparsellm.extensions.recover.commands.write_outputs", lambda context, recipes, *_, **__: written.append(recipes)
    )
    done = command(*typed(run_command(recipe, "out-again")))
    assert done.exit_code == 0, done.stderr
    assert written == [[recipe]]


@pytest.mark.parametrize("changes", [[], ["samples=3", "sparsity.70%=60%"]])
@pytest.mark.parametrize("smoke", [False, True])
def test_the_sweep_of_a_page_reads_as_the_same_sweep(smoke: bool, changes: list[str], tmp_path: Path) -> None:
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
    sweep = read_sweep(first, smoke=smoke, changes=changes)
    second.write_text(sweep_yaml(sweep, PathNames()), encoding="utf-8")
    again = read_sweep(second, smoke=smoke)
    assert again.model_dump(exclude={"published", "content"}) == sweep.model_dump(exclude={"published", "content"})
    beside = [[entry.beside(cell.labels) for entry in x.published for cell in x.cells] for x in (sweep, again)]
    assert beside[0] == beside[1]
    assert any(beside[0])


@pytest.mark.parametrize(
    ("report", "error", "named"),
    [
        (None, InvalidSetting, "out holds no run"),
        ('{"recipe": 3', BadCheckpoint, r"sparsellm\.json"),
        ('{"recipe": 3}', BadCheckpoint, r"sparsellm\.json .*recipe"),
    ],
)
def test_a_folder_that_is_none(report: str | None, error: type[Exception], named: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    if report:
        (tmp_path / "out" / "sparsellm.json").write_text(report, encoding="utf-8")
    with pytest.raises(error, match=named):
        sparsellm.report(tmp_path / "out")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up.a_run(tmp_path)
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingPackage, match=r"pip install 'sparsellm\[plots\]'"):
        report_page(run)
    with pytest.raises(InvalidSetting, match="none"):
        sparsellm.report(run.parent / "none")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser(drawn: Drawn, tmp_path: Path) -> None:
    """Opened from a file, without a network: every plot is there, the console stays silent, something is painted."""
    text, found = drawn
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
    assert shown.stdout.count("<svg") == 2 * len(found)
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

    monkeypatch.setattr("sparsellm.extensions.recover.run.recovery_warnings", warnings)
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

    monkeypatch.setattr("sparsellm.pipeline.several.prune_run", fail)
    file, out = tmp_path / "sweep.yaml", tmp_path / "sweep"
    recipe = {"model": str(loud["llama"]), "method": "magnitude"}
    file.write_text(yaml.safe_dump({"recipe": recipe, "axes": {"sparsity": ["50%", "60%"]}}), encoding="utf-8")
    if started == "in Python":
        sparsellm.sweep(file, out)
    else:
        command("sweep", file, out)
    told = {json.loads(failed.read_text())["error"] for failed in out.rglob("failed.json")}
    assert told == {f"Too large. Pass {'`batch_size=1`' if started == 'in Python' else '--set batch_size=1'}."}
