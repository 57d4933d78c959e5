"""The commands and files that repeat a run or a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from sparsellm.extensions.studies.sweep_cells import Cell, Published, Sweep
from sparsellm.recipes.fields import fields_of_others
from sparsellm.recipes.own_method import ObjectRecipe
from sparsellm.recipes.recipe import Recipe, RunRecipe


def run_command(recipe: RunRecipe, output: str) -> str:
    """The command line that gives a recipe, quoted for a POSIX shell, with each option on a line of its own.

    For a method that is an object, the call in Python.

    Args:
        output: Folder that the command writes.
    """
    if isinstance(recipe, ObjectRecipe):
        fields = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"model", "method"})
        settings = "".join(f", {name}={value!r}" for name, value in fields.items())
        call = f"sparsellm.prune({recipe.model!r}, method={recipe.method}(){settings})"
        return f"# in Python, with the {recipe.method} of this run\n{call}.save_pretrained({output!r})"
    lines = [["sparsellm", recipe.command, getattr(recipe, recipe.argument), output]]
    lines += [[_option(option), getattr(recipe, name)] for name, option in recipe.renamed.items()]
    elsewhere = {recipe.argument, *recipe.renamed, *recipe.inherited}
    for name, value in recipe.model_dump(mode="json", exclude_defaults=True, exclude=elsewhere).items():
        option = _option(name)
        if isinstance(value, bool):
            lines.append([option if value else option.replace("--", "--no-", 1)])
        else:
            for item in map(str, value if isinstance(value, list) else [value]):
                lines.append([f"{option}={item}"] if item.startswith("-") else [option, item])
    return " \\\n  ".join(map(shlex.join, lines))


def _option(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def sweep_command(file: str, output: str, *, smoke: bool) -> str:
    """The command line that runs a sweep file, at the small sizes of a first try if `smoke`."""
    return shlex.join(["sparsellm", "sweep", file, output, *(["--smoke"] if smoke else [])])


def report_command(runs: Sequence[str]) -> str:
    """The command line that compares runs."""
    return shlex.join(["sparsellm", "report", *runs])


def bench_command(
    packed: str | Path, against: str | Path | None, *, batches: Sequence[int], threads: Sequence[int], tokens: int
) -> str:
    """The command line that measures a packed model."""
    dense = [] if against is None else ["--against", str(against)]
    counts = ["--batch", ",".join(map(str, batches)), "--threads", ",".join(map(str, threads)), "--tokens", str(tokens)]
    return shlex.join(["sparsellm", "bench", str(packed), *dense, *counts])


def sweep_yaml(sweep: Sweep) -> str:
    """The file of a sweep, in the form that `read_sweep` reads: its cells, columns and published values."""
    fields = [cell.recipe.model_dump(mode="json") for cell in sweep.cells]
    varied = [name for name in Recipe.model_fields if any(x[name] != fields[0][name] for x in fields)]
    shared = sweep.cells[0].recipe.model_dump(mode="json", exclude_defaults=True, exclude=set(varied))
    axes: dict[str, dict[str, Any]] = {axis: {label: {} for label in labels} for axis, labels in sweep.axes.items()}
    for name in varied:
        # The values of a field are set by one axis, in some sweeps by the one with the field's name or by any of several.
        axis = next(axis for axis in sorted(sweep.axes, key=lambda axis: axis != name) if _sets(sweep, axis, name))
        for cell, values in zip(sweep.cells, fields, strict=True):
            if _has(cell, name):
                axes[axis][cell.labels[axis]][name] = values[name]
    content: dict[str, Any] = {
        "title": sweep.title,
        "note": sweep.note,
        "recipe": shared,
        "axes": axes,
        "leave_out": _left_out(sweep),
    }
    published = [_published_entry(entry, sweep) for entry in sweep.published]
    content |= {"columns": sweep.columns, "keep": sweep.keep, "published": [entry for entry in published if entry["values"]]}
    content = {name: value for name, value in content.items() if value} | ({"smoke": {}} if sweep.smoke else {})
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _sets(sweep: Sweep, axis: str, name: str) -> bool:
    """Whether all cells with the same label on an axis have the same value of a recipe field, of those whose method has it."""
    values = {(cell.labels[axis], repr(getattr(cell.recipe, name))) for cell in sweep.cells if _has(cell, name)}
    return len(values) == len({label for label, _ in values})


def _has(cell: Cell, name: str) -> bool:
    """Whether the method of a cell has a recipe field."""
    return name not in fields_of_others(cell.recipe.method, cell.recipe.as_published)


def _left_out(sweep: Sweep) -> list[dict[str, str | list[str]]]:
    """Entries of `leave_out` for the combinations of labels that are no cells, together for all labels of the last axis."""
    *first, last = sweep.axes
    cells = {tuple(cell.labels.values()) for cell in sweep.cells}
    entries = []
    for labels in product(*(sweep.axes[axis] for axis in first)):
        if missing := [label for label in sweep.axes[last] if (*labels, label) not in cells]:
            entries.append(dict(zip(first, labels, strict=True)) | {last: missing})
    return entries


def _published_entry(entry: Published, sweep: Sweep) -> dict[str, Any]:
    """Published values as a sweep file holds them, those of the sweep's labels."""
    values: dict[str, Any] = {}
    for labels, value in entry.figures:
        if all(label in sweep.axes.get(axis, ()) for axis, label in labels.items()):
            branch = values
            *parents, leaf = labels.values()
            for label in parents:
                branch = branch.setdefault(label, {})
            branch[leaf] = value
    return {"source": entry.source, "measure": entry.measure, "axes": list(entry.figures[0][0]), "values": values}
