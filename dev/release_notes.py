"""Print the changelog of a release, after checking its tag: `python dev/release_notes.py TAG REPOSITORY`.

Refuses a tag that is not the package's version, a section of CHANGELOG.md without a date, a repository address other than that
in pyproject.toml, and a CITATION.cff of another version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def section(changelog: str, version: str) -> tuple[str, str]:
    """The date of a version's section, empty if it has none, and the text below its heading. Raises SystemExit without one."""
    found = re.search(rf"^## \[{re.escape(version)}\](?: - ([^\n]*))?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"CHANGELOG.md has no section ## [{version}]")
    return found[1] or "", found[2].strip()


def faults(root: Path, tag: str, repository: str) -> list[str]:
    """What has to be corrected before the tag is released."""
    source = (root / "src" / "sparsellm" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.*?)"', source, re.MULTILINE)[0]
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    date, _ = section((root / "CHANGELOG.md").read_text(encoding="utf-8"), tag.removeprefix("v"))
    cited = re.findall(r"^version: (.*)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    found = {
        f"the tag is {tag}, the version in src/sparsellm/__init__.py {version}": tag != f"v{version}",
        f"the section of {tag} in CHANGELOG.md has no date, such as 2026-12-31": not re.fullmatch(r"\d{4}-\d\d-\d\d", date),
        f"[project.urls] of pyproject.toml names {urls['Repository']}, not {repository}": urls["Repository"] != repository,
        f"[project.urls] of pyproject.toml names {urls['Documentation']}": "OWNER" in urls["Documentation"],
        f"CITATION.cff is of version {', '.join(cited)}": cited != [version],
    }
    return [fault for fault, holds in found.items() if holds]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(str(__doc__).splitlines()[0])
    _, tag, repository = sys.argv
    if found := faults(ROOT, tag, repository):
        sys.exit("\n".join(found))
    print(section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tag.removeprefix("v"))[1])


if __name__ == "__main__":
    main()
