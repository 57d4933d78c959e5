"""Who may import whom: folders have an order, files have no circles. docs/architecture.md shows the same order."""

from __future__ import annotations

import ast
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sparsellm

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PACKAGE = ROOT / "src" / "sparsellm"

MAY_IMPORT = {
    "errors": set(),
    "runtime": {"errors", "extension"},
    "texts": {"errors", "runtime"},
    "solvers": {"errors", "runtime", "extension"},
    "models": {"errors", "runtime", "texts", "solvers"},
    "checkpoints": {"errors", "runtime", "texts", "solvers", "models", "extension"},
    "activations": {"errors", "runtime", "solvers", "models"},
    "methods": {"errors", "runtime", "solvers", "models", "activations"},
    "allocation": {"errors", "runtime", "solvers", "models", "activations", "methods"},
    "evaluation": {"errors", "runtime", "texts", "solvers", "models", "checkpoints", "activations"},
}
"""By folder (or lone file), the folders that it may import besides itself, in the order of docs/architecture.md."""

BELOW_RECIPES = set(MAY_IMPORT) | {"extension"}
MAY_IMPORT |= {
    "recipes": BELOW_RECIPES,
    "outputs": BELOW_RECIPES | {"recipes"},
    "observers": BELOW_RECIPES | {"recipes", "outputs"},
    "pipeline": BELOW_RECIPES | {"recipes", "outputs", "observers"},
    "testing": BELOW_RECIPES | {"recipes", "outputs", "pipeline"},
    "cli": BELOW_RECIPES | {"recipes", "outputs", "observers", "pipeline"},
    "__main__": {"cli"},
    "extension": {"errors"},
    "extensions": BELOW_RECIPES | {"recipes", "outputs", "observers", "pipeline", "testing", "cli"},
}

FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def within(*folders: str) -> list[str]:
    """The files of folders of the package."""
    files = [file for file in FILES if file.split("/")[0] in folders]
    assert {file.split("/")[0] for file in files} == set(folders)
    return files


QUIET = within("runtime", "solvers", "models", "activations", "methods", "allocation")
QUIET += [x for x in FILES if x.startswith(("extensions/recover/training/", "extensions/packed/formats/"))]

LOUD_LIBRARIES = {"datasets", "lm_eval", "typer", "click", "rich", "logging", "requests", "httpx", "huggingface_hub"}
LOUD_LIBRARIES |= {"wandb", "tensorboard", "trackio"}
"""Libraries that print, log, or use the network."""


@cache
def parse(file: str) -> ast.Module:
    """The parsed source of a file of the package."""
    return ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))


def imported_names(node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement binds or runs; "a.b" for `from a import b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def nodes(files: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of files, after its file."""
    yield from ((file, node) for file in files for node in ast.walk(parse(file)))


def imports(files: list[str]) -> Iterator[tuple[str, str]]:
    """Every name that files import, after the place of the statement."""
    for file, node in nodes(files):
        yield from ((f"{file}.py line {getattr(node, 'lineno', 0)}", name) for name in imported_names(node))


@cache
def imported_files(name: str) -> set[str]:
    """The package's files that hold an imported name: a module, or the `__init__` of a folder that defines it."""
    parts = name.split(".")
    if parts[0] != "sparsellm":
        return set()
    path = "/".join(parts[1:])
    if (PACKAGE / f"{path}.py").is_file():
        return {path}
    parent = "/".join(parts[1:-1])
    return {file for file in (f"{path}/__init__", parent, f"{parent}/__init__") if (PACKAGE / f"{file}.py").is_file()}


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


def test_pruning_in_python_imports_few_files() -> None:
    """What `LayerWise(SparseGPT())` and `prune_blocks` import, without the `__init__` of folders."""
    files, waiting = set(), {"methods/layerwise", "solvers/sparsegpt", "pipeline/sequential"}
    while waiting:
        files |= waiting
        nodes = (node for file in waiting for node in run_time_nodes(parse(file)))
        waiting = {file for node in nodes for name in imported_names(node) for file in imported_files(name)} - files
    assert len([file for file in files if not file.endswith("__init__")]) <= 28


def test_the_package_has_these_folders_and_no_lone_files() -> None:
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} - {"__pycache__", "__init__", "py.typed"}
    entries.remove("native")  # the sources in C
    assert entries == set(MAY_IMPORT)
    assert len(entries) <= 19


def test_the_types_of_keywords_are_those_of_the_fields() -> None:
    """`recipes/keyword_types.py` is what docs/make_keyword_types.py writes from `recipes/fields.py`."""
    subprocess.run([sys.executable, ROOT / "docs" / "make_keyword_types.py", "--check"], check=True)


def test_a_folder_imports_only_folders_above_it() -> None:
    """Imports for types count too, and delayed ones. Names are whole: a relative one is not looked up."""
    wrong = []
    for place, name in imports([file for file in FILES if file != "__init__"]):
        folder = re.split(r"/|\.py ", place, maxsplit=1)[0]
        others = {other.split("/")[0] for other in imported_files(name)} - {folder, "__init__"}
        if name.startswith(".") or not others <= MAY_IMPORT[folder]:
            wrong.append(f"{place} imports {name}")
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    """`sparsellm/__init__.py` is left out: it names public names for type checkers and loads them on demand."""
    graph = {
        file: {other for node in ast.walk(parse(file)) for name in imported_names(node) for other in imported_files(name)}
        - {file, "__init__"}
        for file in FILES
        if file != "__init__"
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the circle


def test_no_import_is_delayed() -> None:
    """A delayed import hides a circle; only commands delay theirs, to start fast."""
    delayed = [
        f"{file}.py: {function.name} imports {name}"
        for file, function in nodes(QUIET)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        for name in imported_names(node)
        if imported_files(name)
    ]
    assert not delayed


def test_numerical_code_prints_nothing() -> None:
    """No printing, no environment variables, no network."""
    loud = [f"{place} imports {name}" for place, name in imports(QUIET) if name.split(".")[0] in LOUD_LIBRARIES]
    for file, node in nodes(QUIET):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "input"}:
            loud.append(f"{file}.py line {node.lineno} calls {node.func.id}")
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "stdout", "stderr"}:
            used = ast.unparse(node)
            if used in {"os.environ", "os.getenv", "sys.stdout", "sys.stderr"}:
                loud.append(f"{file}.py line {node.lineno}: {used}")
    assert not loud


def test_runtime_knows_no_models() -> None:
    allowed = sys.stdlib_module_names | {"torch", "sparsellm", "numpy", "psutil", "pydantic", "safetensors"}
    assert [found for found in imports(within("runtime")) if found[1].split(".")[0] not in allowed] == []


def test_solvers_know_no_modules_and_no_files() -> None:
    modules = re.compile(r"(transformers|safetensors|pathlib|io)\b|torch\.nn(?!\.functional)")
    wrong = [found for found in imports(within("solvers")) if modules.match(found[1])]
    for file, node in nodes(within("solvers")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            wrong.append((f"{file}.py line {node.lineno}", "open"))
        if isinstance(node, ast.Attribute) and node.attr == "Module":
            wrong.append((f"{file}.py line {node.lineno}", "nn.Module"))
    assert not wrong


def test_models_and_streams_know_no_solver_and_no_pattern() -> None:
    """Statistics, linear algebra and regressions are theirs to use; which weights stay is not their matter."""
    solvers = {other for other in FILES if other.startswith("solvers/")}
    unshared = solvers - {"solvers/linalg", "solvers/statistics", "solvers/regression", "extensions/integers/formats"}
    found = imports(within("models", "checkpoints", "activations"))
    assert [(place, name) for place, name in found if imported_files(name) & unshared] == []


@pytest.mark.parametrize("command", ["import sparsellm", "--help", "--version", "prune --help", "prune --help-all"])
def test_commands_that_only_print_are_light(command: str) -> None:
    """What the heavy libraries cost is paid by the command that needs them."""
    run = command if command.startswith("import") else f"from sparsellm.cli.app import app; app({command.split()}, 'sparsellm')"
    code = f"import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr)); {run}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "datasets", "numpy"} & set(done.stderr.split())


def test_public_names_are_listed_before_they_are_imported() -> None:
    """`dir` shows them, and needs neither torch nor transformers for it."""
    code = "import sys, sparsellm; print(*dir(sparsellm)); print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names, loaded = result.stdout.split("\n")[:2]
    assert not loaded
    assert names.split() == sorted(sparsellm.__all__)
    typed = {
        name.split(".")[-1]
        for node in ast.walk(parse("__init__"))
        if isinstance(node, ast.If)
        for x in node.body
        for name in imported_names(x)
    }
    assert typed | {"__version__"} == set(sparsellm.__all__), "the imports for type checkers name the public names"


def test_no_public_function_hides_a_folder() -> None:
    assert not set(sparsellm.__all__) & set(MAY_IMPORT) - {"__version__"}


def test_help_shows_every_public_name() -> None:
    text = pydoc.plain(pydoc.render_doc(sparsellm))
    for name in set(sparsellm.__all__) - {"__version__"}:
        assert re.search(rf"^ +(class )?{name}\b", text, re.MULTILINE), name


def test_files_that_texts_name_are_there() -> None:
    """As `sparsellm.folder.file`, with a name in it or without, and in the documentation as `folder/file`."""
    folders = {file.split("/")[0] for file in FILES if "/" in file}
    there = {*FILES, *(file.removesuffix("/__init__") for file in FILES)}
    there |= {f"testing/{name.split('.')[-1]}" for node in ast.walk(parse("testing/__init__")) for name in imported_names(node)}
    wrong = []
    for file in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md")]):
        text = file.read_text(encoding="utf-8")
        named = {name.replace(".", "/") for name in re.findall(r"sparsellm\.([a-z_]+(?:\.[a-z_0-9]+)+)", text)}
        named |= {f"{folder}/{name}" for folder, name in re.findall(r"`([a-z]+)/([a-z_0-9]+)(?:\.py|\.\w+)?`", text)}
        for name in named:
            known = there & {name, name.rpartition("/")[0] if name.count("/") > 1 else name} or [*ROOT.glob(f"{name}.*")]
            if name.split("/")[0] in folders and not known:
                wrong.append(f"{file.name}: {name}")
    assert not wrong


def test_a_public_name_is_unique_in_the_package() -> None:
    """But for commands, each of which has a function of its name in Python, and variables of types."""
    places: dict[str, set[str]] = {}
    for file in (file for file in FILES if not (file.startswith("cli/") or file.endswith("/commands"))):
        for node in parse(file).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and "TypeVar(" not in ast.unparse(node):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            else:
                continue
            for name in names:
                places.setdefault(name, set()).add(str(file))
    del places["EXTENSION"]  # one in each extension
    assert {name: found for name, found in places.items() if len(found) > 1 and not name.startswith("_")} == {}


def test_functions_take_few_positional_arguments() -> None:
    """At most four, and further ones by keyword; Triton's kernels and torch's hooks have signatures that are not ours."""
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef) and not node.name.endswith(("_kernel", "__torch_function__")):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                assert len([name for name in names if name not in ("self", "cls")]) <= 4, f"{file}: {node.name}"
