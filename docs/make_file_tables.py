"""Write the tables of files in docs/architecture.md from the files' own docstrings: `python docs/make_file_tables.py`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("architecture.md")
PACKAGE = PAGE.parents[1] / "src" / "sparsellm"
BEGIN, END = "<!-- files: written by docs/make_file_tables.py -->\n", "<!-- end of files -->\n"
FOLDERS = (
    *("runtime", "texts", "solvers", "models", "checkpoints", "formats", "activations", "methods", "allocation", "evaluation"),
    *("training", "pipeline", "studies", "cli"),
)
"""The folders in the order in which they import each other."""


def summary(file: Path) -> str:
    """The first paragraph of a file's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def tables() -> str:
    """A heading and a table for each folder, and one table for the files outside of them."""
    lines = ["**Outside of the folders.**"]
    lines += ["", "| file | contents |", "|---|---|", *(row(file) for file in sorted(PACKAGE.glob("*.py")))]
    for folder in FOLDERS:
        files = sorted(
            file
            for file in (PACKAGE / folder).rglob("*.py")
            if file.parent.name != folder or file.stem != "__init__" or defines(file)
        )
        lines += ["", f"**{folder}/** {summary(PACKAGE / folder / '__init__.py')}"]
        lines += ["", "| file | contents |", "|---|---|", *(row(file) for file in files)]
    return "\n".join(lines) + "\n"


def defines(file: Path) -> bool:
    """Whether a file defines classes or functions, as the `__init__` of few folders does."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return any(isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("__") for node in nodes)


def row(file: Path) -> str:
    """A row of a table."""
    return f"| `{file.relative_to(PACKAGE).as_posix()}` | {summary(file)} |"


def page() -> str:
    """The page with the present tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"{PAGE.name} is not up to date." if PAGE.read_text(encoding="utf-8") != page() else 0)
    PAGE.write_text(page(), encoding="utf-8")
