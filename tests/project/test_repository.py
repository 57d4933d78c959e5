"""The files for a public host: workflows, forms, the citation, the hooks of pre-commit, and what a release is checked for."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import sparsellm
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROGRAMS = {"bash", "python", "pytest", "sparsellm", "git", "gh"}
"""What the steps of the workflows call."""


def content(file: Path) -> Any:
    """A YAML file; as text throughout, since YAML takes the key `on` of workflows for true."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    for job in content(workflow)["jobs"].values():
        yield from job.get("steps", ())


def test_workflows_call_what_is_there() -> None:
    """Their scripts, the files that they name and the workflows that they call are in the repository."""
    missing, scripts = [], set()
    for workflow in WORKFLOWS:
        for command in "\n".join(step.get("run", "") for step in steps(workflow)).splitlines():
            words = shlex.split(command)
            assert not words or words[0] in PROGRAMS, f"{workflow.name}: {command}"
            named = words[1:2] if words[:1] in (["bash"], ["python"]) and not words[1].startswith("-") else []
            scripts |= set(named)
            named += [word for word in words if word.startswith(("tests/", "constraints"))]
            missing += [f"{workflow.name}: {name}" for name in named if not (ROOT / name).exists()]
        called = [job["uses"] for job in content(workflow)["jobs"].values() if "uses" in job]
        missing += [f"{workflow.name}: {name}" for name in called if not (ROOT / name).is_file()]
    assert missing == []
    assert scripts == {".ci/run", ".ci/oldest", ".ci/newest", "tests/all.sh", "dev/deploy_site.sh", "dev/release_notes.py"}


def test_workflows_may_only_read_unless_a_job_says_so() -> None:
    """And no step has a secret of its own: the index trusts the workflow, and GitHub gives each run a token."""
    writing: dict[str, dict[str, str]] = {}
    for workflow in WORKFLOWS:
        whole = content(workflow)
        assert whole["permissions"] == {"contents": "read"}, workflow.name
        assert "secrets." not in workflow.read_text(encoding="utf-8"), workflow.name
        writing |= {
            f"{workflow.stem}/{name}": job["permissions"] for name, job in whole["jobs"].items() if "permissions" in job
        }
        assert all("timeout-minutes" in job or "uses" in job for job in whole["jobs"].values()), workflow.name
    assert writing == {
        "site/deploy": {"contents": "write"},
        "release/site": {"contents": "write"},
        "release/publish": {"contents": "write", "id-token": "write", "attestations": "write"},
    }


def test_a_release_needs_the_tests_the_wheels_and_provenance() -> None:
    jobs = content(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"tests", "wheels"}
    used = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"] if "uses" in step]
    assert used.index("actions/attest-build-provenance") < used.index("pypa/gh-action-pypi-publish")


def test_wheels_are_built_for_the_platforms_of_pyproject() -> None:
    """Each architecture there has a runner of its own."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    platforms = {
        (system, arch) for system in ("linux", "macos", "windows") for arch in settings.get(system, {}).get("archs", ())
    }
    runners = content(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["runner"]
    known = {
        "ubuntu-latest": ("linux", "x86_64"),
        "ubuntu-24.04-arm": ("linux", "aarch64"),
        "macos-14": ("macos", "arm64"),
        "windows-latest": ("windows", "AMD64"),
    }
    assert {known[runner] for runner in runners} == platforms


def test_issue_forms_ask_for_info() -> None:
    """Every form has a required field for the output of `sparsellm info`."""
    forms = [file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml"]
    assert len(forms) == 3
    for form in forms:
        fields = {field["id"]: field for field in content(form)["body"]}
        assert "`sparsellm info`" in fields["info"]["attributes"]["label"], form.name
        assert fields["info"]["validations"]["required"] == "true", form.name


def test_files_that_these_pages_name_are_there() -> None:
    """In backticks, with a folder: sources, tests and scripts."""
    pages = [ROOT / name for name in ("SECURITY.md", "CONTRIBUTING.md", ".github/pull_request_template.md")]
    named = re.compile(r"`((?:\.github|\.ci|benchmarks|dev|docs|pipeline|tests)/[\w./-]+\.\w+)`")
    places = (ROOT, ROOT / "src" / "sparsellm")
    found = [(page.name, name) for page in pages for name in named.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 10
    assert [pair for pair in found if not any((place / pair[1]).exists() for place in places)] == []


def test_security_gives_the_limits_of_the_code() -> None:
    from sparsellm.texts import json_files, yaml_files

    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert (json_files.MAX_DEPTH, json_files.MAX_INTEGER, yaml_files.MAX_VALUES) == (64, 2**64, 1_000_000)
    assert "At most 64 levels, integers below 2^64, no key twice, UTF-8" in text
    assert "The same, and at most a million values" in text


def test_the_citation_is_of_this_version() -> None:
    """And names the papers of the methods."""
    cited = content(ROOT / "CITATION.cff")
    assert cited["version"] == sparsellm.__version__.partition(".dev")[0]
    assert cited["license"] == "Apache-2.0"
    notes = " ".join(paper["notes"] for paper in cited["references"])
    assert all(name in notes for name in ("algorithm1", "alps", "sparsegpt", "wanda", "owl"))


def test_scripts_stop_at_a_failing_command() -> None:
    """An empty script would pass."""
    scripts = [file for pattern in (".ci/*", "tests/*.sh", "dev/*.sh") for file in ROOT.glob(pattern)]
    assert len(scripts) > 6
    contents = {file.name: file.read_text(encoding="utf-8") for file in scripts}
    stops = ("\nset -euo pipefail\n", "\nexec ")
    assert [name for name, text in contents.items() if not any(words in text for words in stops)] == []


def test_pre_commit_runs_what_the_tests_run() -> None:
    """All hooks are local, so that nothing is fetched; each check of tests/all.sh has one."""
    (repository,) = content(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    entries = [hook["entry"] for hook in repository["hooks"]]
    for check in ("ruff check", "ruff format --check", "mypy"):
        assert check in (ROOT / "tests" / "all.sh").read_text(encoding="utf-8")
        assert any(entry.startswith(check) for entry in entries), check
    assert "bash tests/all.sh" in entries
    named = [word for entry in entries for word in entry.split() if word.startswith("tests/")]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.fixture
def notes() -> ModuleType:
    specification = importlib.util.spec_from_file_location("release_notes", ROOT / "dev" / "release_notes.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def released(root: Path, version: str = "1.2.0", date: str = " - 2030-01-31", owner: str = "me") -> Path:
    """A repository with what a release is checked for."""
    (root / "src" / "sparsellm").mkdir(parents=True)
    (root / "src" / "sparsellm" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    urls = f'Repository = "https://host/{owner}/it"\nDocumentation = "https://{owner}.host/it"\n'
    (root / "pyproject.toml").write_text(f"[project.urls]\n{urls}")
    (root / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {version}\n")
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## [1.2.0]{date}\n\n- New.\n\n## [1.1.0] - 2029-01-31\n\n- Old.\n")
    return root


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"version": "1.2.0.dev0"}, ["the tag is v1.2.0, the version"]),
        ({"date": ""}, ["has no date"]),
        ({"date": " - Unreleased"}, ["has no date"]),
        ({"owner": "OWNER"}, ["names https://host/OWNER/it, not https://host/me/it", "names https://OWNER.host/it"]),
    ],
)
def test_a_release_is_checked(notes: ModuleType, changes: dict[str, str], words: list[str], tmp_path: Path) -> None:
    found = notes.faults(released(tmp_path, **changes), "v1.2.0", "https://host/me/it")
    assert len(found) == len(words)
    assert all(part in fault for part, fault in zip(words, found, strict=True))


def test_notes_are_the_section_of_the_version(notes: ModuleType, tmp_path: Path) -> None:
    changelog = (released(tmp_path) / "CHANGELOG.md").read_text()
    assert notes.section(changelog, "1.2.0") == ("2030-01-31", "- New.")
    assert notes.section(changelog, "1.1.0") == ("2029-01-31", "- Old.")
    with pytest.raises(SystemExit, match=r"no section ## \[1\.0\.0\]"):
        notes.section(changelog, "1.0.0")


def test_the_changelog_is_one_page_of_what_a_user_can_do(notes: ModuleType) -> None:
    """With a section of the version, which names every command; its links lead somewhere."""
    import typer

    from sparsellm.cli.app import app

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, text = notes.section(changelog, sparsellm.__version__.partition(".dev")[0])
    assert len(changelog.splitlines()) <= 110
    assert [name for name in vars(typer.main.get_command(app))["commands"] if name not in text] == []
    links = re.findall(r"\]\((?!https?:)([^)#]+)", changelog)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_present_state_is_not_released_by_accident() -> None:
    """The script runs, and refuses a tag while the version has `.dev` or the owner is not set."""
    words = [sys.executable, str(ROOT / "dev" / "release_notes.py"), "v9.9.9", "https://host/me/it"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no section ## [9.9.9]" in done.stderr
