"""The documentation as a site: it builds without a warning, fetches nothing, and has its pictures, mathematics and names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import sparsellm

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
FETCHING = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Read(HTMLParser):
    """What a page fetches, where its links lead, and which ids it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in FETCHING and value:
                self.fetched.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site itself."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        for target in Read(page).fetched:
            parts = urlsplit(target)
            assert not parts.scheme or parts.scheme == "data", f"{page.name} fetches {target}"
            place = site / parts.path.lstrip("/") if parts.path.startswith("/") else page.parent / unquote(parts.path)
            assert place.exists(), f"{page.name} wants {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_links_lead_somewhere(site: Path) -> None:
    """Also those that were turned, and those within the reference; to a heading where they name one."""
    pages = {page: Read(page) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, read in pages.items():
        for link in read.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = place / "index.html" if place.is_dir() else place
            assert place.exists(), f"{page.name} links to {link}"
            if parts.fragment and place in pages and parts.fragment != "__skip":
                assert unquote(parts.fragment) in pages[place].ids, f"{page.name} links to {link}"


def test_mathematics_is_mathml(site: Path) -> None:
    """Every formula became a `math` element, and none of its LaTeX is left over."""
    text = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert [page.name for page, content in text.items() if "arithmatex" in content] == []
    assert sum(content.count("<math") for content in text.values()) > 150
    assert not [page.name for page, content in text.items() if re.search(r"<math[^>]*>(?:(?!</math>).)*\\", content, re.DOTALL)]


def test_every_public_name_is_explained(site: Path) -> None:
    """The reference has what `sparsellm.__all__` has, with its arguments."""
    page = site / "reference.html"
    ids = Read(page).ids
    missing = [name for name in sparsellm.__all__ if name != "__version__" and f"sparsellm.{name}" not in ids]
    assert missing == []
    assert "<code>tokenizer</code></b>" in page.read_text(encoding="utf-8")


def test_pages_from_outside_docs(site: Path) -> None:
    """They are there, and links to files that are not on the site are text."""
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="recipes/neurips2024/index.html"' in text
    assert 'href="CONTRIBUTING.html"' in text
    paper = (site / "recipes" / "neurips2024" / "index.html").read_text(encoding="utf-8")
    assert 'href="table1-opt.yaml"' in paper
    assert (site / "recipes" / "neurips2024" / "table1-opt.yaml").read_bytes() == (
        ROOT / "recipes" / "neurips2024" / "table1-opt.yaml"
    ).read_bytes()
    assert ".ci/oldest</a>" not in (site / "families.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_pictures_are_small_and_shown(picture: Path) -> None:
    """With words for those who do not see them, and colors that follow the reader's."""
    assert picture.stat().st_size < 100_000
    svg = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in svg
    assert "var(--ink)" in svg
    pages = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("concepts", "few-bits", "results")]
    assert any(re.search(rf"!\[[^\]]{{60,}}\]\(pictures/{picture.name}\)", page) for page in pages)


def test_pictures_are_what_the_script_draws() -> None:
    """Byte for byte, with the version of matplotlib that is pinned; others draw otherwise."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    if f"matplotlib=={version('matplotlib')}\n" not in (ROOT / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib than the pinned one draws otherwise")
    words = [sys.executable, str(ROOT / "docs" / "make_pictures.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_search_finds_what_people_ask_for(site: Path) -> None:
    """Words of users who come from elsewhere are in the search index, each on a page about it."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    texts = {entry["location"]: f"{entry['title']} {entry['text']}".lower() for entry in index["docs"]}
    wanted = {
        "fine-tun": "fine-tuning",
        "callback": "fine-tuning",
        "lora": "fine-tuning",
        "chat": "deploying",
        "vllm": "deploying",
    }
    for word, page in (wanted | {"gguf": "deploying", "llm-compressor": "migrating"}).items():
        assert any(location.startswith(f"{page}.html") and word in text for location, text in texts.items()), word
