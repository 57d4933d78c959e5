"""The demo text: English documentation from the standard library of the running Python.

About two megabytes: documentation topics (such as `help("assert")`) and the docstrings of all modules. Sources are parsed, not
imported, so none of their code runs.
"""

from __future__ import annotations

import ast
import gc
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "held-out"]

# Folders without documentation of the library: tests, third-party packages, applications, and pydoc_data, whose topics
# `_topics` reads.
SKIPPED = frozenset({
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__", "site-packages",
    "dist-packages",
})  # fmt: skip


def documents(split: Split) -> list[str]:
    """Texts of a split, sorted by name: one per documentation topic and one per module with docstrings."""
    return list(named_documents(split).values())


def named_documents(split: Split) -> dict[str, str]:
    """Texts of a split by name (`topic assert`, `asyncio.events`), sorted by name.

    The split depends on the name only, so it is the same for every version of Python. Takes about a second.

    Raises:
        ValueError: If the split is unknown.
        FileNotFoundError: If the running Python has no library sources or no topics.
    """
    if split not in get_args(Split):
        raise ValueError(f"`split` must be one of {', '.join(get_args(Split))}, got {split!r}.")
    library = Path(sysconfig.get_path("stdlib"))
    sources = {name: path for name, path in _modules(library) if is_held_out(name) == (split == "held-out")}
    with _without_collection():
        texts = {name: "\n\n".join(_docstrings(path)) for name, path in sources.items()}
    texts |= {name: text for name, text in _topics() if is_held_out(name) == (split == "held-out")}
    texts = {name: texts[name] for name in sorted(texts) if texts[name]}
    if not any(name in texts for name in sources):
        raise FileNotFoundError(
            f"No docstrings in the standard library at {library}: this Python ships without its sources. "
            "The demo needs a full Python, such as one from python.org, conda or uv."
        )
    return texts


def is_held_out(name: str) -> bool:
    """Whether a text belongs to the held-out split, about one in ten."""
    return zlib.crc32(name.encode()) % 10 == 0


def _topics() -> Iterator[tuple[str, str]]:
    """Names and texts of the documentation topics of `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "This Python ships without `pydoc_data.topics`, a fifth of the demo's text. "
            "The demo needs a full Python, such as one from python.org, conda or uv."
        ) from error
    for name, text in topics.items():
        yield f"topic {name}", text.strip()


def _modules(folder: Path, package: str = "") -> Iterator[tuple[str, Path]]:
    """Dotted names and source files of the modules under `folder`."""
    for path in folder.iterdir() if folder.is_dir() else ():  # not a folder if the library is zipped
        name = package + path.stem
        if path.name in SKIPPED or not path.stem.isidentifier():
            continue  # not importable: `config-3.12-x86_64-linux-gnu`, `lib-dynload`
        if path.is_dir():
            yield from _modules(path, f"{name}.")
        elif path.suffix == ".py":
            yield name.removesuffix(".__init__"), path


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector, which takes half of the time: syntax trees are many objects, and hold no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _docstrings(path: Path) -> list[str]:
    """Docstrings of a source file in source order, without indentation."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError):  # test data, a template, or a wrong encoding declaration
        return []
    nodes = sorted(_documented(tree), key=lambda node: getattr(node, "lineno", 0))  # the module has no line number: it is first
    return [text.strip() for node in nodes if (text := ast.get_docstring(node))]


def _documented(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The modules, classes and functions in a tree, found without a walk through its expressions."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _documented(child)
