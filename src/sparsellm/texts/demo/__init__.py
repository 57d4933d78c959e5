"""Two small bundled models and the text they were trained on, so that `sparsellm demo` needs no network.

The models are in `models/`; benchmarks/train_demo_models.py of the repository trained them. The text is the English
documentation in the standard library of the running Python, about two megabytes: documentation topics (such as
`help("assert")`) and the docstrings of all modules. Sources are parsed, not imported, so none of their code runs.
"""

from __future__ import annotations

import ast
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sparsellm.errors import BadCheckpoint, BadText, InvalidSetting

FAMILIES = ("opt", "llama")
"""Names of the bundled models."""

SKIPPED = frozenset({
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__", "site-packages",
    "dist-packages",
})  # fmt: skip
"""Folders without documentation of the library: tests, installed packages, applications, and the topics of `_topics`."""

FULL_PYTHON = "The demo needs a full Python, such as one from python.org, conda or uv."


def model_path(family: str) -> Path:
    """Return the folder of a bundled model, for `from_pretrained`.

    Args:
        family: A name of `FAMILIES`.

    Raises:
        InvalidSetting: If the name is not in `FAMILIES`.
        BadCheckpoint: If the installation does not include the model.
    """
    if family not in FAMILIES:
        raise InvalidSetting(f"There is no bundled model demo:{family}. Name one of demo:{', demo:'.join(FAMILIES)}.")
    path = Path(__file__).parent / "models" / family
    if not (path / "model.safetensors").is_file():
        raise BadCheckpoint(
            f"The bundled {family} model is not at {path}: this installation does not include it. Reinstall sparsellm from its "
            f"wheel, or train it again in a clone of the repository: python benchmarks/train_demo_models.py {family} {path}"
        )
    return path


def named_documents(split: Literal["train", "held-out"]) -> dict[str, str]:
    """Return the texts of a split by name (`topic assert`, `asyncio.events`), sorted by name.

    The split of a text depends on its name only, so it is the same for every version of Python. Takes about two seconds.

    Raises:
        BadText: If the running Python has no library sources or no topics.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = {name: path for name, path in _modules(library) if is_held_out(name) == (split == "held-out")}
    texts = {name: "\n\n".join(_docstrings(path)) for name, path in sources.items()}
    texts |= {name: text for name, text in _topics() if is_held_out(name) == (split == "held-out")}
    texts = {name: texts[name] for name in sorted(texts) if texts[name]}
    if not any(name in texts for name in sources):
        raise BadText(
            f"No docstrings in the standard library at {library}: this Python ships without its sources. {FULL_PYTHON}"
        )
    return texts


def is_held_out(name: str) -> bool:
    """Return whether a text belongs to the held-out split, about one in ten."""
    return zlib.crc32(name.encode()) % 10 == 0


def _topics() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the documentation topics of `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BadText(f"This Python ships without pydoc_data.topics, a fifth of the demo's text. {FULL_PYTHON}") from error
    for name, text in topics.items():
        yield f"topic {name}", text.strip()


def _modules(folder: Path, package: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the dotted names and source files of the modules in a folder and its subfolders."""
    for path in folder.iterdir() if folder.is_dir() else ():  # not a folder if the library is zipped
        name = package + path.stem
        if path.name in SKIPPED or not path.stem.isidentifier():
            continue  # not importable: `config-3.12-x86_64-linux-gnu`, `lib-dynload`
        if path.is_dir():
            yield from _modules(path, f"{name}.")
        elif path.suffix == ".py":
            yield name.removesuffix(".__init__"), path


def _docstrings(path: Path) -> list[str]:
    """Return the docstrings of a source file in source order, without indentation."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError):  # test data, a template, or a wrong encoding declaration
        return []
    nodes = [tree, *_statements(tree)]
    owners = [node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    owners.sort(key=lambda node: getattr(node, "lineno", 0))  # the module has no line number and comes first
    return [text.strip() for node in owners if (text := ast.get_docstring(node))]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements within a node, however deep; expressions, most of the tree, hold none and are passed over."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)
