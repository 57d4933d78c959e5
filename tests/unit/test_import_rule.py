"""Who may import whom: the files have one order, and each imports only files before it. docs/architecture.md says the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sparsellm"

STOREYS = {
    "Contents": ["__init__"],
    "Ground": ["errors", "json_files", "devices", "distributed", "watch"],
    "Tensors": [
        "patterns",
        "moments",
        "linalg",
        "problem",
        "regression",
        "solvers/__init__",
        "solvers/criteria",
        "solvers/column_loop",
        "solvers/sparsegpt",
        "solvers/admm",
        "solvers/alps",
        "solvers/swift",
        "curves",
        "gate",
    ],
    "Modules": [
        "storage",
        "feedforward",
        "views",
        "experts",
        "architectures",
        "calls",
        "modes",
        "blocks",
        "coverage",
        "memory",
        "stand_ins",
        "ahead",
        "headers",
        "places",
        "weights",
        "recall",
        "routes",
        "looks",
        "onward",
        "activations",
        "walk",
        "loaded_model",
        "descent",
        "sensitivity",
        "fisher",
    ],
    "Methods": [
        "refinement",
        "methods/__init__",
        "methods/owners",
        "methods/layerwise",
        "methods/signals",
        "methods/published",
        "methods/part",
        "methods/settings",
        "methods/targets",
        "methods/two_streams",
        "methods/sparsellm",
        "yaml_files",
        "allocation",
        "journal",
        "sequential",
        "balance",
        "budgets",
        "distillation",
    ],
    "Words": [
        "demo/__init__",
        "demo/text",
        "texts",
        "calibration",
        "recipe_fields",
        "choices",
        "recipe",
        "recipe_file",
        "records",
        "markdown",
        "files",
        "report",
        "architecture_file",
        "digests",
        "publication",
        "model_classes",
        "configuration",
        "checkpoint",
        "evaluation",
        "inspection",
        "finished",
        "verification",
        "output_lock",
        "export",
        "events",
        "log",
        "residence",
        "first_pass",
        "generation",
        "zeroshot",
        "recovery",
        "preparation",
        "fingerprint",
        "measuring",
        "work",
        "sharing",
        "pruning",
        "tracking",
        "meter",
        "miniature",
        "trial",
        "forecasting",
        "planning",
        "together",
        "remarks",
        "run",
        "demonstration",
        "sweep_file",
        "sweeping",
        "comparison",
        "drawing",
        "plots",
        "sweep_plots",
        "page",
        "hub",
        "pages",
        "display",
        "options",
        "commands/__init__",
        "commands/pruning",
        "commands/comparing",
        "commands/looking",
        "commands/pushing",
        "cli",
        "__main__",
        "demo/train",
    ],
}
ORDER = [file for files in STOREYS.values() for file in files]
STOREY = {file: storey for storey, files in STOREYS.items() for file in files}
QUIET = [file for file in ORDER if STOREY[file] != "Words"]

SPEAKING = {"datasets", "lm_eval", "typer", "click", "rich", "logging", "requests", "httpx", "huggingface_hub"}
SPEAKING |= {"wandb", "trackio"}
"""Libraries that print, log, or reach for the network."""


def tree(file: str) -> ast.Module:
    """The parsed source of a file of the package."""
    return ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement binds or runs; "a.b" for `from a import b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def files_of(name: str) -> set[str]:
    """The package's files that an import of the dotted name runs: its own, and the `__init__` of each folder on the way."""
    parts = name.split(".")
    if parts[0] != "sparsellm":
        return set()
    found = {"__init__"}
    for end in range(2, len(parts) + 1):
        path = "/".join(parts[1:end])
        found |= {file for file in (path, f"{path}/__init__") if (PACKAGE / f"{file}.py").is_file()}
    return found


def run_time_nodes(module: ast.Module) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def test_every_file_has_its_place() -> None:
    there = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")}
    assert len(ORDER) == len(set(ORDER))
    assert there == set(ORDER), "give each file its place in STOREYS and in docs/architecture.md"


def test_documentation_lists_the_files_in_this_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w/]+)\.py` \|", text, flags=re.MULTILINE) == ORDER


@pytest.mark.parametrize("file", ORDER)
def test_imports_come_earlier(file: str) -> None:
    """Imports for types count too, and delayed ones; only the table of contents may name what comes after it."""
    module = tree(file)
    nodes = run_time_nodes(module) if file == "__init__" else ast.walk(module)
    before = set(ORDER[: ORDER.index(file)])
    for node in nodes:
        for name in imported(node):
            assert not name.startswith("."), f"{file}: write the whole name of {name}"
            late = files_of(name) - before
            assert not late - {"__init__"}, f"{file}.py line {node.lineno} imports {late}, which come later in the order"


@pytest.mark.parametrize("file", QUIET)
def test_no_delayed_import_below_the_words(file: str) -> None:
    """A delayed import hides a circle; only commands delay theirs, to answer fast."""
    for function in ast.walk(tree(file)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            delayed = {name for node in ast.walk(function) for name in imported(node) if files_of(name)}
            assert not delayed, f"{file}.py: {function.name} imports {delayed}"


@pytest.mark.parametrize("file", QUIET)
def test_only_words_speak(file: str) -> None:
    """Below the storey of words nothing prints, reads the environment, or reaches for the network."""
    for node in ast.walk(tree(file)):
        roots = {name.split(".")[0] for name in imported(node)}
        assert not roots & SPEAKING, f"{file}.py imports {roots & SPEAKING}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"print", "input"}, f"{file}.py line {node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute):
            used = ast.unparse(node)
            assert used not in {"os.environ", "os.getenv", "sys.stdout", "sys.stderr"}, f"{file}.py line {node.lineno}: {used}"


@pytest.mark.parametrize("file", STOREYS["Ground"])
def test_ground_knows_only_torch(file: str) -> None:
    for node in ast.walk(tree(file)):
        for name in imported(node):
            root = name.split(".")[0]
            assert root in sys.stdlib_module_names | {"torch", "sparsellm"}, f"{file}.py imports {name}"


@pytest.mark.parametrize("file", STOREYS["Tensors"])
def test_tensors_know_no_modules_and_no_files(file: str) -> None:
    for node in ast.walk(tree(file)):
        for name in imported(node):
            assert name.split(".")[0] not in {"transformers", "safetensors", "pathlib", "io"}, f"{file}.py imports {name}"
            assert name == "torch" or not name.startswith("torch.nn") or name.startswith("torch.nn.functional"), file
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open", f"{file}.py line {node.lineno} opens a file"
        assert not (isinstance(node, ast.Attribute) and node.attr == "Module"), f"{file}.py line {node.lineno} names nn.Module"


@pytest.mark.parametrize("file", STOREYS["Modules"])
def test_modules_know_no_patterns_and_no_solvers(file: str) -> None:
    for node in ast.walk(tree(file)):
        for name in imported(node):
            foreign = {"patterns", "problem", *(other for other in ORDER if other.startswith("solvers/"))}
            assert not files_of(name) & foreign, f"{file}.py imports {name}"


@pytest.mark.parametrize("name", ["sparsellm", "sparsellm.recipe_fields", "sparsellm.cli"])
def test_import_is_light(name: str) -> None:
    """What the heavy libraries cost is paid by the command that needs them."""
    code = f"import sys, {name}; print(*sorted({{'torch', 'transformers', 'datasets', 'numpy'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not loaded, f"import {name} loads {loaded}"


def test_opening_a_checkpoint_imports_no_method() -> None:
    code = "import sys, sparsellm.checkpoint; print(*(name for name in sys.modules if name.startswith('sparsellm.')))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "sparsellm.checkpoint" in loaded
    assert not [name for name in loaded if "method" in name or "solver" in name]
