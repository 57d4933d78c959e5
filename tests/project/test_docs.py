"""Every command and every Python example of README.md and docs/ runs, offline, page by page in a fresh folder.

The quick tests run each in this process at the sizes of SMALL, with random models of two blocks in place of the bundled ones.
The long ones run those of AS_WRITTEN with the bundled models at the sizes that are written, those of LAUNCHED by a launcher.
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from typer.testing import Result

from sparsellm.models.architectures import ARCHITECTURES
from sparsellm.recipes.recipe import Recipe
from sparsellm.texts.yaml_files import read_mapping
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
AS_WRITTEN = (ROOT / "README.md", ROOT / "docs" / "quick-start.md")
"""Pages that a newcomer types from."""
LAUNCHED = tuple(page for page in PAGES if "\ntorchrun " in page.read_text(encoding="utf-8"))
"""Pages with commands of several processes, which the quick tests run in one."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE = "sparsellm serve "
"""Runs until it is stopped; tests/extensions/packed/test_serving.py has it."""

DEMO = "sparsellm demo --output "
"""Takes a minute, so it is run once, as written, on README's page; other pages may show it with another folder."""
SMALL = {"samples": 2, "sequence_length": 32, "evaluate_limit": 1}
"""Fields of a recipe: windows and tokens, few enough that a page takes seconds."""
INSTALLS = ("pip install", "bash tests/all.sh", "python -m venv", ". .venv/bin/activate", "git clone", "cd ")


def fences(page: Path) -> list[tuple[str, str]]:
    """The page's fenced blocks: language and content."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def runnable(page: Path) -> bool:
    """Whether a page has anything to run."""
    return any(language in ("bash", "python") for language, _ in fences(page))


def smaller(words: list[str]) -> list[str]:
    """A command at the sizes of SMALL: of an option that is given twice, the last one counts."""
    options = [[f"--{name.replace('_', '-')}", str(size)] for name, size in SMALL.items()]
    if words[0] == "sweep":
        options = [["--set", f"{name}={size}"] for name, size in SMALL.items()]
    elif words[0] == "evaluate":
        del options[0]
    elif words[0] == "recover":
        options.append(["--steps", "2"])
    elif words[0] not in ("prune", "plan", "search") or "--calibration" not in words:
        return words
    return [*words, *(word for option in options for word in option)]


@patch.dict(ARCHITECTURES)
@pytest.mark.parametrize(
    ("page", "bundled"),
    [
        pytest.param(
            page,
            bundled,
            id=f"{page.relative_to(ROOT)}-{'bundled models' if bundled else 'small'}",
            marks=pytest.mark.long if bundled else (),
        )
        for page in PAGES
        for bundled in (False, True)
        if runnable(page) and (not bundled or page in (*AS_WRITTEN, *LAUNCHED))
    ],
)
def test_every_example_runs(
    page: Path,
    bundled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Result],
    small_models: dict[str, Path],
) -> None:
    """Shell examples exit with 0, Python examples raise nothing, no connection is tried; examples may build on earlier ones."""
    if "--report-to tensorboard" in page.read_text(encoding="utf-8"):
        pytest.importorskip("tensorboard", reason="the page uses it: pip install tensorboard")
    if "from trl import" in page.read_text(encoding="utf-8"):
        pytest.importorskip("trl", reason="the page uses it: pip install 'sparsellm[train]'")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # as the page says
    monkeypatch.chdir(tmp_path)
    as_written = bundled and page in AS_WRITTEN
    if not bundled:
        monkeypatch.setattr("sparsellm.texts.demo.model_path", small_models.__getitem__)
    tried: list[object] = []

    def refuse(*words: object, **_: object) -> None:
        tried.append(words)
        raise OSError("the tests have no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # as in a clone, where they are
    names: dict[str, object] = {}
    ran, printed = 0, ""
    for language, content in fences(page):
        if language == "text" and as_written and printed and not content.startswith("sparsellm "):
            check_shown(content, printed)
        printed = ""
        if language == "python":
            code = (
                content
                if as_written
                else re.sub(r"\b(samples|sequence_length)=\d+", lambda found: f"{found[1]}={SMALL[found[1]]}", content)
            )
            exec(compile(code, str(page), "exec", dont_inherit=True), names)
            ran += 1
        for line in content.replace("\\\n", " ").splitlines() if language == "bash" else ():
            for part in (part.strip() for part in line.split("&&")):
                if not part or part.startswith(("#", SERVE, *INSTALLS)):
                    continue
                if part.startswith(DEMO) and not (as_written and page.name == "README.md"):
                    assert DEMO in (ROOT / "README.md").read_text(encoding="utf-8")
                    continue
                words = shlex.split(part, comments=True)
                ran += 1
                if words[0] == "torchrun" and not bundled:
                    words = words[words.index("-m") + 1 :]
                if words[0] == "torchrun":
                    whole = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
                    done = subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False)
                    assert done.returncode == 0, f"{part}\n{done.stderr}\n{done.stdout}"
                    continue
                assert words[0] == "sparsellm", f"{page.name}: {part}: only sparsellm's own commands are tested here"
                result = command(*(words[1:] if as_written else smaller(words[1:])))
                assert result.exit_code == 0, f"{part}\n{result.stderr}\n{result.stdout}"
                printed += result.stdout
    assert not tried, f"{page.name} asked the network: {tried}"
    assert ran or page.name == "CONTRIBUTING.md"


def check_shown(shown: str, printed: str) -> None:
    """The lines that a page shows are those that the commands before them print; percentages and values with ± nearly so."""
    for line in (line for line in shown.splitlines() if line != "..."):
        alike = [measured(other) for other in printed.splitlines() if masked(other) == masked(line)]
        assert any(found == pytest.approx(measured(line), rel=0.1, abs=0.5) for found in alike), f"{line}\n{printed}"


def measured(line: str) -> list[float]:
    """The percentages of a line, and its values with ±."""
    return [float(number) for number in re.findall(r"([\d.]+) ?[%±]", line)]


def masked(line: str) -> str:
    """A line without its numbers, folders and widths of columns."""
    return " ".join(re.sub(r"[\d.,]*\d", "#", re.sub(r"\S*/(?=\S)", "", line)).split())


def outputs(page: Path) -> set[str]:
    """The folders and files that the commands and examples of a page write."""
    written: set[str] = set()
    for language, content in fences(page):
        for line in content.replace("\\\n", " ").splitlines() if language == "bash" else ():
            for words in (shlex.split(part, comments=True) for part in line.split("&&")):
                options = words.index("--output") + 1 if "--output" in words else None
                positional = (
                    words[3:4] if words[1:2] in (["prune"], ["recover"], ["search"], ["pack"], ["unpack"], ["sweep"]) else []
                )
                named = [word for word in positional if not word.startswith("-")]
                written |= {*named, *([words[options]] if options else [])}
        written |= set(re.findall(r"save_pretrained\(\"([^\"]+)\"", content)) if language == "python" else set()
    return written


def test_pages_that_are_read_one_after_the_other_write_other_folders() -> None:
    """Who follows the quick start after README.md, in one folder, is not told that an output exists."""
    first, second = map(outputs, AS_WRITTEN)
    assert {"pruned-demo", "opt-70"} <= first
    assert second
    assert not first & second


def test_every_yaml_block_is_read(command: Callable[..., Result], tmp_path: Path) -> None:
    """Sweep files are listed, recipes are printed; other blocks are allocations, or published values of a sweep."""
    kinds: Counter[str] = Counter()
    for page in PAGES:
        for language, content in fences(page):
            if language not in ("yaml", "yml"):
                continue
            file = tmp_path / "block.yaml"
            file.write_text(content, encoding="utf-8")
            fields = set(read_mapping(file, "block"))
            if fields == {"published"}:
                axes = {"model": ["facebook/opt-125m"], "method": ["sparsegpt"], "sparsity": ["70%", "80%"]}
                whole = content + yaml.safe_dump({"calibration": "demo", "axes": axes})
                file.write_text(whole, encoding="utf-8")
            kind, words = "allocation", ("plan", "demo:opt", "--allocation", file, "--method", "magnitude", "--sparsity", "50%")
            if fields == {"axes"}:  # a part of a sweep, with methods of a package
                assert "ria" in content
                continue
            if fields & {"axes", "published"}:
                kind, words = "sweep", ("sweep", file, tmp_path / "out", "--list")
            elif fields <= Recipe.model_fields.keys():
                kind, words = "recipe", ("prune", "--config", file, "--print-config")
            kinds[kind] += 1
            done = command(*words)
            assert done.exit_code == 0, f"{page.name}:\n{content}\n{done.stderr}"
    assert kinds["sweep"] >= 2


def test_commands_fit_the_site() -> None:
    """A code block of the site has 80 columns in a window of 1280 pixels. docs/cli.md is for reference."""
    for page in (page for page in PAGES if page.name != "cli.md"):
        for line in (line for language, content in fences(page) if language == "bash" for line in content.splitlines()):
            assert len(line) <= 80 or not line.startswith(("sparsellm ", "torchrun ", "  --")), f"{page.name}: {line}"


def test_every_link_leads_somewhere() -> None:
    """Relative links name files that are there."""
    link = re.compile(r"\]\((?!https?:)([^)#]+)")
    links = [(page, target) for page in PAGES for target in link.findall(page.read_text(encoding="utf-8"))]
    assert [f"{page.name} links to {target}" for page, target in links if not (page.parent / target).exists()] == []
    assert links


def test_commands_that_need_the_network_are_well_formed(command: Callable[..., Result]) -> None:
    """Examples in `text` fences are not run, but their options must exist and their recipes must be sound."""
    seen = 0
    for page in PAGES:
        for language, content in fences(page):
            for line in content.replace("\\\n", " ").splitlines() if language == "text" else ():
                if line.startswith("sparsellm prune") and "[" not in line:  # not the synopsis
                    result = command(*shlex.split(line)[1:], "--print-config")
                    assert result.exit_code == 0, f"{page.name}: {line}\n{result.stderr}"
                    seen += 1
    assert seen
