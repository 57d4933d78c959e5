"""The commands and files that repeat a run or a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from sparsellm.extensions.studies.sweep_cells import Published, Sweep, not_of_method
from sparsellm.recipes.own_method import ObjectRecipe
from sparsellm.recipes.recipe import Recipe, RunRecipe

SETTING = "settings."
"""Begins the name of a setting among the fields of a recipe."""


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
        elif isinstance(value, dict):
            lines += [
                ["--set", f"{key}={yaml.safe_dump(x, default_flow_style=True).splitlines()[0]}"] for key, x in value.items()
            ]
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
    fields = [_flat(cell.recipe) for cell in sweep.cells]
    names = dict.fromkeys(name for values in fields for name in values)
    varied = [name for name in names if any(x.get(name) != fields[0].get(name) for x in fields)]
    defaults = sweep.cells[0].recipe.model_dump(mode="json", exclude_defaults=True)
    shared = {name: x for name, x in fields[0].items() if name not in varied and (name in defaults or name.startswith(SETTING))}
    axes: dict[str, dict[str, Any]] = {axis: {label: {} for label in labels} for axis, labels in sweep.axes.items()}
    for name in varied:
        # The values of a field are set by one axis, in some sweeps by the one with the field's name or by any of several.
        axis = next(axis for axis in sorted(sweep.axes, key=lambda axis: axis != name) if _sets(sweep, axis, name))
        for cell, values in zip(sweep.cells, fields, strict=True):
            if name in values:
                axes[axis][cell.labels[axis]][name] = values[name]
    content: dict[str, Any] = {
        "title": sweep.title,
        "note": sweep.note,
        "recipe": _nested(shared),
        "axes": {axis: {label: _nested(point) for label, point in points.items()} for axis, points in axes.items()},
        "leave_out": _left_out(sweep),
    }
    published = [_published_entry(entry, sweep) for entry in sweep.published]
    content |= {"columns": sweep.columns, "keep": sweep.keep, "published": [entry for entry in published if entry["values"]]}
    content = {name: value for name, value in content.items() if value} | ({"smoke": {}} if sweep.smoke else {})
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _sets(sweep: Sweep, axis: str, name: str) -> bool:
    """Whether all cells with the same label on an axis have the same value of a recipe field, of those that have it."""
    values = {(cell.labels[axis], repr(_flat(cell.recipe)[name])) for cell in sweep.cells if name in _flat(cell.recipe)}
    return len(values) == len({label for label, _ in values})


def _flat(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that its method has, as plain data, with each setting as one."""
    fields = {name: x for name, x in recipe.model_dump(mode="json").items() if name not in not_of_method(recipe.method)}
    return fields | {f"{SETTING}{name}": x for name, x in fields.pop("settings").items()}


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `_flat` as a recipe has them."""
    settings = {name.removeprefix(SETTING): x for name, x in fields.items() if name.startswith(SETTING)}
    own = {name: x for name, x in fields.items() if not name.startswith(SETTING)}
    return own | ({"settings": settings} if settings else {})


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
