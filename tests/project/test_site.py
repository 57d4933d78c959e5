"""The documentation as a site: it builds without a warning, fetches nothing, and has its pictures, mathematics and names.

Also what a host shows beside the pages: sitemap, 404 page, social card, versions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import sparsellm
from tests.conftest import ROOT

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Documentation"]
PREFIX = f"{urlsplit(ADDRESS).path}/"
"""Where the host has the site, by which the 404 page names its files: it is shown at any depth."""
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
    """What a page fetches, where its links lead, which ids it has, and what it says of itself."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.properties: dict[str, str] = {}
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "meta" and (name := named.get("property") or named.get("name")):
            self.properties[name] = named.get("content") or ""
        for name, value in attrs:
            if named.get("rel") == "canonical":
                self.properties["canonical"] = named["href"] or ""
            elif (tag, name) in FETCHING and value:
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
            place = site / parts.path.removeprefix(PREFIX) if parts.path.startswith("/") else page.parent / unquote(parts.path)
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


def test_pictures_are_small_and_shown() -> None:
    """With words for those who do not see them, and colors that follow the reader's."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for picture in PICTURES:
        svg = picture.read_text(encoding="utf-8")
        assert len(svg) < 100_000, picture
        assert "prefers-color-scheme:dark" in svg, picture
        assert "var(--ink)" in svg, picture
        assert re.search(rf"!\[[^\]]{{60,}}\]\(pictures/{picture.name}\)", pages), picture


def test_pictures_are_what_the_script_draws() -> None:
    """Byte for byte, with the version of matplotlib that is pinned; others draw otherwise."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    if f"matplotlib=={version('matplotlib')}\n" not in (ROOT / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib than the pinned one draws otherwise")
    words = [sys.executable, str(ROOT / "docs" / "make_pictures.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Lines(yaml.SafeLoader):
    """YAML with names of Python functions, which are not looked up."""


Lines.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def test_navigation_has_nine_pages_for_users() -> None:
    """The rest is under Reference and Research."""
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Lines)["nav"]
    pages = [entry for entry in navigation if isinstance(next(iter(entry.values())), str)]
    groups = [next(iter(entry)) for entry in navigation if entry not in pages]
    assert (len(pages), groups) == (9, ["Reference", "Research"])


def test_the_sitemap_has_every_page(site: Path) -> None:
    """Each with the address that the page gives as its own."""
    listed = re.findall(r"<loc>(.*?)</loc>", (site / "sitemap.xml").read_text(encoding="utf-8"))
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert sorted(Read(page).properties["canonical"] for page in pages) == sorted(listed)
    assert {f"{ADDRESS}/{page.relative_to(site).as_posix()}" for page in pages} == set(listed)


def test_the_404_page_leads_back(site: Path) -> None:
    """From any depth: its links and files are named from the host's root."""
    page = site / "404.html"
    read = Read(page)
    assert "There is no such page" in page.read_text(encoding="utf-8")
    links = [urlsplit(link).path for link in read.links if not urlsplit(link).scheme and urlsplit(link).path]
    assert f"{PREFIX}quick-start.html" in links
    assert [link for link in links if not link.startswith(PREFIX) or not (site / link.removeprefix(PREFIX)).exists()] == []
    assert all(target.startswith((PREFIX, "data:")) for target in read.fetched)


def test_every_page_has_the_social_card(site: Path) -> None:
    """A PNG of 1200 x 630 pixels, by its whole address."""
    picture = (site / "pictures" / "card.png").read_bytes()
    assert (picture[:8], len(picture) < 200_000) == (b"\x89PNG\r\n\x1a\n", True)
    assert (int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")) == (1200, 630)
    for page in site.rglob("*.html"):
        found = Read(page).properties
        assert found["og:image"] == f"{ADDRESS}/pictures/card.png", page.name
        assert found["og:image:alt"], page.name
        assert found["og:title"].endswith("sparsellm"), page.name
        assert "<" not in found["og:title"], page.name


@pytest.mark.long
def test_versions_lie_beside_each_other(tmp_path: Path) -> None:
    """`dev` of main and `0.1` of a tag, which the root and the host's 404 page lead to."""
    pytest.importorskip("mike", reason="the extra `docs` is not installed")
    clone = tmp_path / "clone"
    leave = shutil.ignore_patterns(".git", ".*_cache", ".venv", "__pycache__", "*.so", "site", "out", "dist", "build")
    shutil.copytree(ROOT, clone, ignore=leave)
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "GIT_CONFIG_GLOBAL": str(tmp_path / "none"), "HOME": str(tmp_path)}
    environment |= {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "commit", "-qm", "all")
    run("bash", "dev/deploy_site.sh", "main")
    run("bash", "dev/deploy_site.sh", "v0.1.0")
    versions = json.loads(run("git", "show", "gh-pages:versions.json"))
    assert [(entry["version"], entry["aliases"]) for entry in versions] == [("dev", []), ("0.1", ["latest"])]
    assert '"latest/"' in run("git", "show", "gh-pages:index.html")
    assert f'href="{PREFIX}0.1/quick-start.html"' in run("git", "show", "gh-pages:404.html")
    assert f"<loc>{ADDRESS}/0.1/index.html</loc>" in run("git", "show", "gh-pages:0.1/sitemap.xml")
    assert f"{ADDRESS}/dev/pictures/card.png" in run("git", "show", "gh-pages:dev/cli.html")
    assert '"provider": "mike"' in run("git", "show", "gh-pages:dev/cli.html")


def test_options_in_a_line_do_not_break(site: Path) -> None:
    """At their hyphens; code blocks stay as they are, and so does the text."""
    page = (site / "recover.html").read_text(encoding="utf-8")
    assert '<code><span class="option">--lora-rank</span></code>' in page
    assert not [block for block in re.findall(r"<pre.*?</pre>", page, re.DOTALL) if 'class="option"' in block]
    assert 'class="option"' not in (site / "search" / "search_index.json").read_text(encoding="utf-8")
