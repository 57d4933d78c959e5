"""The English of Python's own standard library: the demo's text, gathered from the Python that runs it.

Documentation topics (`help("assert")` and its like) and the docstrings of the library's modules: some two megabytes. Sources
are parsed, never imported, so that gathering them runs none of their code.
"""

from __future__ import annotations

import ast
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "held-out"]

# Not the library's own English: its tests, other people's packages, applications, and (pydoc_data) the topics themselves,
# which are taken whole below.
SKIPPED = frozenset({
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__", "site-packages",
    "dist-packages",
})  # fmt: skip


def documents(split: Split) -> list[str]:
    """The texts of one `split`, in the order of their names: one a documentation topic, one a module with docstrings."""
    return list(named_documents(split).values())


def named_documents(split: Split) -> dict[str, str]:
    """The texts of one `split` by name (`topic assert`, `asyncio.events`), in the order of their names.

    A name decides its own split, so a module is held out on every version of Python or on none. Takes about two seconds.

    Raises `ValueError` for an unknown split, `FileNotFoundError` when the running Python carries no sources or no topics.
    """
    if split not in get_args(Split):
        raise ValueError(f"`split` must be one of {', '.join(get_args(Split))}, got {split!r}.")
    library = Path(sysconfig.get_path("stdlib"))
    chosen = {name: path for name, path in _modules(library) if is_held_out(name) == (split == "held-out")}
    texts = {name: "\n\n".join(_docstrings(path)) for name, path in chosen.items()}
    texts |= {name: text for name, text in _topics() if is_held_out(name) == (split == "held-out")}
    texts = {name: texts[name] for name in sorted(texts) if texts[name]}
    if not any(name in texts for name in chosen):
        raise FileNotFoundError(
            f"No docstrings in the standard library at {library}: this Python ships without its sources. "
            "The demo needs a full Python, such as one from python.org, conda or uv."
        )
    return texts


def is_held_out(name: str) -> bool:
    """Whether the text of this name is for measuring only: about one in ten is."""
    return zlib.crc32(name.encode()) % 10 == 0


def _topics() -> Iterator[tuple[str, str]]:
    """The names and texts of the language reference's topics, as `help()` shows them."""
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
    """The dotted names and source files of the modules under `folder`."""
    for path in folder.iterdir() if folder.is_dir() else ():  # a zipped library is no folder
        name = package + path.stem
        if path.name in SKIPPED or not path.stem.isidentifier():
            continue  # names that are no identifiers (`config-3.12-x86_64-linux-gnu`, `lib-dynload`) cannot be imported
        if path.is_dir():
            yield from _modules(path, f"{name}.")
        elif path.suffix == ".py":
            yield name.removesuffix(".__init__"), path


def _docstrings(path: Path) -> list[str]:
    """The docstrings of a source file, in their order there, without their indentation."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError):  # broken on purpose, a template, or of another encoding than it says
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, owners)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # the module has no line of its own and comes first
    return [text.strip() for node in nodes if (text := ast.get_docstring(node))]
