"""What mkdocs does not do by itself: its address, pages from outside docs/, links that lead there and back, mathematics without
scripts."""

from __future__ import annotations

import html
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BROUGHT = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "recipes/neurips2024/*",
    "examples/papers/README.md",
)
"""What of the repository outside docs/ is on the site, under the path that it has in the repository."""

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
"""A link to a file, its text, path and anchor; never an address with a scheme."""

MATHEMATICS = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)

OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z0-9_-]{0,30}(?![\w-])")
"""An option of a command, at whose hyphens a line would break."""

CODE = re.compile(r"<pre.*?</pre>|<code>([^<]*)</code>", re.DOTALL)
"""Code within a line, its text; blocks of code match too, and have no group, so that what is in them stays."""


@event_priority(-100)  # after mike, which adds the version without a slash
def on_config(config: Any) -> Any:
    """Take the address from pyproject.toml, for sitemap and 404 page; add the version, and its menu, where mike builds."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    config.site_url = f"{urls['Documentation']}/"
    if version := os.environ.get("MIKE_DOCS_VERSION"):
        config.site_url += f"{version}/"
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Bring the pages from outside docs/."""
    for pattern in BROUGHT:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links that go by the repository's folders into ones that go by the site's, and those to other files into text."""
    brought = (ROOT / page.file.src_uri).is_file() and not (ROOT / "docs" / page.file.src_uri).is_file()
    here = posixpath.dirname(page.file.src_uri if brought else f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        text, target, anchor = link[1], posixpath.normpath(posixpath.join(here, link[2])), link[3] or ""
        on_site = target.removeprefix("docs/")
        if files.get_file_from_path(on_site) is None and (ROOT / target).exists() and not target.startswith("docs/"):
            return text
        return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(turned, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Write the mathematics as MathML, which browsers draw themselves, and keep options on one line."""
    return CODE.sub(_unbroken, MATHEMATICS.sub(_mathml, content))


def _unbroken(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    return "<code>" + OPTION.sub(r'<span class="option">\g<0></span>', found[1]) + "</code>"


def _mathml(found: re.Match[str]) -> str:
    latex = html.unescape(re.sub(r"<[^>]*>", "", found[2])).strip()
    display = "block" if latex.startswith(r"\[") else "inline"
    written = convert(latex[2:-2].strip(), display=display)
    return written.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')  # else ‖ leaves its line, with an index
