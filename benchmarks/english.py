"""English text from the documentation that a Debian machine has installed, to train the models of `larger_model.py` on.

    apt-get install python3.11-doc postgresql-doc-15 git-doc gnome-user-docs debian-handbook erlang-doc perl-doc manpages-dev
    python benchmarks/english.py FOLDER                                    # from /usr/share/doc and /usr/share/man
    python benchmarks/english.py FOLDER --sources ~/texts /usr/share/man

Writes train.txt.xz, held-back.txt.xz (5 % of the documents) and english.json (what was read, counted) to a new FOLDER. Fifty
packages whose names end in -doc give 100 MB or more. Read are manual pages, .html, .rst and .txt files, also in gzip's form.
Paragraphs of English are kept, without markup, code and tables; one that stands in several documents is kept once, so that no
text that is held back was trained on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lxml import etree, html

SOURCES = (Path("/usr/share/doc"), Path("/usr/share/man"))
HELD_BACK = 20
"""One document of so many is held back."""

MIN_WORDS = 8
"""Words of the shortest paragraph that is kept."""

LETTERS = 0.75
"""Least fraction of letters and spaces in a paragraph; code and tables have fewer."""

COMMON = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "for", "from", "has", "have", "if", "in", "is", "it", "not", "of",
    "on", "or", "that", "the", "this", "to", "which", "will", "with",
})  # fmt: skip
COMMON_WORDS = 0.2
"""Least fraction of a paragraph's words that are in `COMMON`: a third is usual in English, and few in other languages."""

MIN_DOCUMENT = 400
"""Characters of the shortest document that is kept."""

MAX_BYTES = 20_000_000
"""Larger files are generated indexes."""

SUFFIXES = {".html": "html", ".htm": "html", ".xhtml": "html", ".rst": "text", ".txt": "text"}
DROPPED = ("pre", "table", "script", "style", "nav", "head", "header", "footer", "math", "svg")
BLOCKS = ("p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "div")

BOUNDARY = "\N{PARAGRAPH SEPARATOR}"

NROFF = ("nroff", "-c", "-man", "-rLL=1000n", "-Tutf8")
"""Formats a manual page with one line a paragraph."""


def kind_of(name: str) -> str | None:
    """The kind of a file by its name: "html", "text" or "man"; None if it is not read."""
    path = Path(name.removesuffix(".gz"))
    if re.fullmatch(r"\.[1-9][a-z]*", path.suffix) and path.parts[-3:-2] == ("man",):  # those of other languages lie deeper
        return "man"
    return SUFFIXES.get(path.suffix.lower())


def find_files(sources: Iterable[Path]) -> list[Path]:
    """The files below the folders that are read, in sorted order. Links and the sources of HTML pages are left out."""
    found = []
    for source in sources:
        for folder, folders, files in os.walk(source):
            folders[:] = sorted(name for name in folders if name != "_sources")
            paths = (Path(folder, name) for name in sorted(files) if kind_of(os.path.join(folder, name)))
            found += [path for path in paths if not path.is_symlink() and path.stat().st_size < MAX_BYTES]
    return found


def paragraphs(file: Path) -> list[str]:
    """The English paragraphs of a file; none where it cannot be read."""
    kind = kind_of(str(file))
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if kind == "man":
            return [text for text in of_manual(data) if is_english(text)]
        found = of_html(data) if kind == "html" else of_text(data.decode("utf-8", errors="replace"))
        return [text for text in found if is_english(text)]
    except (OSError, EOFError, zlib.error, etree.LxmlError, subprocess.SubprocessError, ValueError):
        return []


def of_html(data: bytes) -> Iterator[str]:
    """Texts of the blocks of a page; what follows a block within another is a text of its own."""
    if not data.strip():
        return
    page = html.fromstring(data)
    etree.strip_elements(page, etree.Comment, *DROPPED, with_tail=False)
    for block in page.iter(*BLOCKS):
        block.text, block.tail = (f"{BOUNDARY}{text or ''}" for text in (block.text, block.tail))
    yield from (squeezed(part) for part in page.text_content().split(BOUNDARY))


def of_manual(data: bytes) -> Iterator[str]:
    """Paragraphs of a manual page as nroff formats it."""
    done = subprocess.run(NROFF, input=data, capture_output=True, timeout=60, check=True)
    text = re.sub(r".\x08", "", done.stdout.decode("utf-8", errors="replace"))
    yield from (squeezed(part) for part in text.split("\n") if part)


def of_text(text: str) -> Iterator[str]:
    """Paragraphs of plain or reStructured text, without directives, indented code, roles and emphasis."""
    for part in re.split(r"\n[ \t]*\n", text):
        plain = re.sub(r":[\w:+.-]+:(?=`)", "", part.lstrip("\n"))
        if not plain.startswith((" ", "\t", "..", ":", "|", "+", "=")):
            plain = re.sub(r"`+([^`<]*?)(?:\s*<[^`>]*>)?`+_{0,2}", r"\1", plain)
            yield squeezed(re.sub(r"\*+(\S[^*]*)\*+", r"\1", plain))


def squeezed(text: str) -> str:
    """A text in one line, with single spaces and without the marks that pages set behind headings."""
    return re.sub(r"\s+", " ", text.replace("¶", "").replace("\ufffd", "")).strip()


def is_english(text: str) -> bool:
    """Whether a paragraph looks like English prose."""
    words = text.lower().split()
    if len(words) < MIN_WORDS or sum(letter.isalpha() or letter == " " for letter in text) < LETTERS * len(text):
        return False
    return sum(word.strip(".,;:()'\"") in COMMON for word in words) >= COMMON_WORDS * len(words)


def documents(files: Sequence[Path], processes: int) -> Iterator[tuple[Path, str]]:
    """The text of each file, without paragraphs that stand in an earlier one."""
    seen: set[int] = set()
    with multiprocessing.Pool(processes) as pool:
        for file, found in zip(files, pool.imap(paragraphs, files, chunksize=16), strict=True):
            fresh = []
            for text in found:
                key = hash(text)
                if key not in seen:
                    seen.add(key)
                    fresh.append(text)
            document = "\n".join(fresh)
            if len(document) >= MIN_DOCUMENT:
                yield file, document


def is_held_back(file: Path) -> bool:
    """Whether a document is held back: its path decides, so that it stays so from one machine to another."""
    return zlib.crc32(str(file).encode()) % HELD_BACK == 0


def write(sources: Sequence[Path], output: Path, processes: int) -> dict[str, object]:
    """Write the texts and what they hold, counted."""
    files = find_files(sources)
    if not files:
        folders = ", ".join(map(str, sources))
        sys.exit(f"error: no manual pages, .html, .rst or .txt files in {folders}. Install packages that end in -doc.")
    counts: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with (
            lzma.open(folder / "train.txt.xz", "wt", encoding="utf-8") as train,
            lzma.open(folder / "held-back.txt.xz", "wt", encoding="utf-8") as held,
        ):
            for file, document in documents(files, processes):
                split = "held back" if is_held_back(file) else "train"
                (held if split == "held back" else train).write(f"{document}\n\n")
                counts[str(kind_of(str(file)))] += 1
                characters[split] += len(document)
        record = {
            "documents": dict(counts),
            "characters": dict(characters),
            "bytes": {name: (folder / f"{name}.txt.xz").stat().st_size for name in ("train", "held-back")},
            "without nroff": shutil.which(NROFF[0]) is None,
        }
        (folder / "english.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--sources", type=Path, nargs="+", default=SOURCES, help="folders that are read")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"error: {options.folder} exists. Name a new folder; nothing is overwritten.")
    if not options.folder.absolute().parent.is_dir():
        sys.exit(f"error: {options.folder.absolute().parent} is not a folder. Make it first.")
    print(json.dumps(write(options.sources, options.folder.absolute(), options.processes), indent=1))


if __name__ == "__main__":
    main()
