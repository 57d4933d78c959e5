"""Two numbers of the source that only fall: lines by folder, and imports from what prunes to what else the package does.

A commit that lowers one lowers it here; one that raises one says for what in its message.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PACKAGE = ROOT / "src" / "sparsellm"

LINES = {
    ".": 684,
    "activations": 1_317,
    "allocation": 254,
    "checkpoints": 3_098,
    "cli": 1_403,
    "evaluation": 1_007,
    "extensions": 15_514,
    "methods": 2_555,
    "models": 2_127,
    "observers": 700,
    "outputs": 2_787,
    "pipeline": 3_084,
    "recipes": 2_233,
    "runtime": 1_473,
    "solvers": 2_377,
    "testing": 871,
    "texts": 2_315,
}
"""Lines of Python by folder."""

IMPORTS = 0
"""Names that files of the core import from files of extensions, at the top or in a function."""

FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def extension_files() -> set[str]:
    """Every file of an extension."""
    return {file for file in FILES if file.startswith("extensions/")}


def imports(file: str, files: set[str]) -> Iterator[tuple[str, str]]:
    """The names that a file imports from `files`, at its top or in a function, with where they come from."""
    for node in ast.walk(ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            paths = (alias.name.removeprefix("sparsellm").strip(".").replace(".", "/") for alias in node.names)
            yield from ((name, name) for path in paths for name in (path, f"{path}/__init__") if name in files)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                for module in (node.module, f"{node.module}.{alias.name}"):
                    path = module.removeprefix("sparsellm").strip(".").replace(".", "/")
                    yield from ((alias.name, name) for name in (path, f"{path}/__init__") if name in files)


def test_lines_fall() -> None:
    counts: Counter[str] = Counter()
    for file in FILES:
        counts[file.split("/")[0] if "/" in file else "."] += len((PACKAGE / f"{file}.py").read_text("utf-8").splitlines())
    assert counts == LINES


def test_imports_of_extensions_fall() -> None:
    extensions = extension_files()
    found = [(file, *place) for file in FILES if file not in extensions | {"__init__"} for place in imports(file, extensions)]
    assert len(found) == IMPORTS, found
