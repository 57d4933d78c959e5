"""Write the types of keywords from the fields of recipes: `python docs/make_keyword_types.py`, with `--check` to compare."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "sparsellm"
FIELDS, FILE = PACKAGE / "recipes" / "fields.py", PACKAGE / "recipes" / "keyword_types.py"

TYPES = {
    "Names": "str | Sequence[str]",
    "tuple[str | dict[str, Any], ...]": "str | dict[str, Any] | Sequence[str | dict[str, Any]]",
    "IntegerName | None": 'Literal["int8", "int4", "int3"] | None',
}
"""Types of keywords that stand for the type of a field: a single text needs no list, and a list may be any sequence."""

IN_MEMORY = {"evaluate": "str | Path | Sequence[str | Path] | CalibrationData"}
"""Those of fields that take data in memory too."""

NAMED_BY_PRUNE = ("model", "calibration", "method", "sparsity")
"""Fields that `prune` names in its signature."""

HEADER = '''"""Types of keywords of Python functions, for editors and type checkers. Written by docs/make_keyword_types.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from sparsellm.texts.in_memory import CalibrationData
'''


def read_fields() -> tuple[dict[str, dict[str, str]], set[str]]:
    """The type of every field by its class and name, and the names of the fields that `evaluate` takes."""
    classes: dict[str, dict[str, str]] = {}
    evaluated: set[str] = set()
    sources = [FIELDS, *sorted(PACKAGE.glob("extensions/*/recipe_fields.py"))]
    for node in (node for file in sources for node in ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {
                line.target.id: keyword_type(line.target.id, ast.unparse(line.annotation))
                for line in node.body
                if isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and "ClassVar" not in ast.unparse(line.annotation)
            }
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EVALUATION":
            evaluated.update(x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant))
    return classes, evaluated


def keyword_type(name: str, annotation: str) -> str:
    """The type of the keyword for a field."""
    return IN_MEMORY.get(name) or TYPES.get(annotation, annotation).replace("'", '"')


def typed_dictionary(name: str, base: str, docstring: str, types: dict[str, str]) -> str:
    """The source of a typed dictionary whose keys are all optional."""
    lines = "".join(f"    {field}: {kind}\n" for field, kind in types.items())
    return f'\n\nclass {name}({base}, total=False):\n    """{docstring}"""\n\n{lines}'


def source() -> str:
    """The file with the present fields."""
    classes, evaluated = read_fields()
    run, recipe = classes["RunFields"], classes["PruneFields"] | classes["IntegerFields"]
    shared = {name: kind for name, kind in run.items() if name not in NAMED_BY_PRUNE}
    prune_only = {"dtype": shared.pop("dtype")} | {name: kind for name, kind in recipe.items() if name not in NAMED_BY_PRUNE}
    measured = {name: kind for name, kind in shared.items() if name in evaluated}
    further = {name: kind for name, kind in shared.items() if name not in evaluated}
    text = HEADER
    text += typed_dictionary("MeasurementKeywords", "TypedDict", "Keywords of all functions that measure a model.", measured)
    dtype = {"dtype": run["dtype"]}
    text += typed_dictionary("EvaluationKeywords", "MeasurementKeywords", "Keywords of `evaluate`.", dtype)
    text += typed_dictionary("RunKeywords", "MeasurementKeywords", "Keywords that `prune` and `recover` share.", further)
    text += typed_dictionary("PruneKeywords", "RunKeywords", "Keywords of `prune`, `plan` and `search`.", prune_only)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"{FILE.name} is not up to date." if FILE.read_text(encoding="utf-8") != source() else 0)
    FILE.write_text(source(), encoding="utf-8")
