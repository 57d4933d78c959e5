"""Every command and every Python example of README.md and docs/ runs as written, offline, page by page in a fresh folder."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEMO = "sparsellm demo --output pruned-demo"
"""Takes a minute, so it is run once, on README's page; other pages may show it in the same words."""
INSTALLS = ("pip install", "bash tests/all.sh", "python -m venv", ". .venv/bin/activate", "git clone", "cd ")


def fences(page: Path) -> list[tuple[str, str]]:
    """The page's fenced blocks: language and content."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def runnable(page: Path) -> bool:
    """Whether a page has anything to run."""
    return any(language in ("bash", "python") for language, _ in fences(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if runnable(page)])
def test_every_example_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Result]
) -> None:
    """Shell examples exit with 0, Python examples raise nothing, no connection is tried; examples may build on earlier ones."""
    if "--track tensorboard" in page.read_text(encoding="utf-8"):
        pytest.importorskip("tensorboard", reason="the page uses it: pip install tensorboard")
    monkeypatch.chdir(tmp_path)
    tried: list[object] = []

    def refuse(*words: object, **_: object) -> None:
        tried.append(words)
        raise OSError("the tests have no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # as in a clone, where they are
    names: dict[str, object] = {}
    ran = 0
    for language, content in fences(page):
        if language == "python":
            exec(compile(content, str(page), "exec"), names)
            ran += 1
        for line in content.replace("\\\n", " ").splitlines() if language == "bash" else ():
            for part in (part.strip() for part in line.split("&&")):
                if not part or part.startswith(("#", *INSTALLS)):
                    continue
                if part == DEMO and page.name != "README.md":
                    assert DEMO in (ROOT / "README.md").read_text(encoding="utf-8")
                    continue
                words = shlex.split(part, comments=True)
                ran += 1
                if words[0] == "torchrun":
                    whole = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
                    done = subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False)
                    assert done.returncode == 0, f"{part}\n{done.stderr}\n{done.stdout}"
                    continue
                assert words[0] == "sparsellm", f"{page.name}: {part}: only sparsellm's own commands are tested here"
                result = command(*words[1:])
                assert result.exit_code == 0, f"{part}\n{result.stderr}\n{result.stdout}"
    assert not tried, f"{page.name} asked the network: {tried}"
    assert ran or page.name == "CONTRIBUTING.md"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    """Relative links name files that are there."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
