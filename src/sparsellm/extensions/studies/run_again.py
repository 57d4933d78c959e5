"""The commands and files that repeat a run or a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sparsellm.extensions.studies.sweep_file import Sweep
from sparsellm.recipes.own_method import ObjectRecipe
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import RunRecipe


def run_command(recipe: RunRecipe, output: str) -> str:
    """The command line that gives a recipe, quoted for a POSIX shell, with each option on a line of its own.

    For a method that is an object, the call in Python.

    Args:
        output: Folder that the command writes.
    """
    if isinstance(recipe, ObjectRecipe):
        fields = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"model", "method", "settings", "source"})
        settings = "".join(f", {name}={value!r}" for name, value in fields.items())
        call = f"sparsellm.prune({recipe.model!r}, method{settings})"
        return f"# in Python; method is {recipe.method_label}, of {recipe.source}\n{call}.save_pretrained({output!r})"
    lines = [["sparsellm", recipe.command, getattr(recipe, recipe.argument), output]]
    lines += [[_option(option), getattr(recipe, name)] for name, option in recipe.renamed.items()]
    elsewhere = {recipe.argument, *recipe.renamed, *recipe.inherited}
    for name, value in recipe.model_dump(mode="json", exclude_defaults=True, exclude=elsewhere).items():
        option = _option(name)
        if isinstance(value, bool):
            lines.append([option if value else option.replace("--", "--no-", 1)])
        elif isinstance(value, dict):
            lines += [["--set", f"{key}={_in_line(x)}"] for key, x in value.items()]
        else:
            for one in value if isinstance(value, list) else [value]:
                item = _in_line(one) if isinstance(one, dict) else str(one)
                lines.append([f"{option}={item}"] if item.startswith("-") else [option, item])
    return " \\\n  ".join(map(shlex.join, lines))


def _in_line(value: Any) -> str:
    """A value as YAML of one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf")).splitlines()[0]


def _option(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def sweep_command(file: str, output: str, *, smoke: bool, plugins: Sequence[str] = ()) -> str:
    """The command line that runs a sweep file, at the small sizes of a first try if `smoke`."""
    options = ["--smoke"] * smoke + [word for place in plugins for word in ("--plugin", place)]
    return shlex.join(["sparsellm", "sweep", file, output, *options])


def bench_command(
    packed: str | Path, against: str | Path | None, *, batches: Sequence[int], threads: Sequence[int], tokens: int
) -> str:
    """The command line that measures a packed model."""
    dense = [] if against is None else ["--against", str(against)]
    counts = ["--batch", ",".join(map(str, batches)), "--threads", ",".join(map(str, threads)), "--tokens", str(tokens)]
    return shlex.join(["sparsellm", "bench", str(packed), *dense, *counts])


def sweep_yaml(sweep: Sweep, names: PathNames) -> str:
    """The file of a sweep, in the form that `read_sweep` reads, with names in place of paths."""

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {named(key): named(x) for key, x in value.items()}
        if isinstance(value, list):
            return [named(x) for x in value]
        return names.error(names[value]) if isinstance(value, str) else value

    return yaml.safe_dump(named(sweep.content), sort_keys=False, allow_unicode=True)
