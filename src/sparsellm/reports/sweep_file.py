"""Sweep files: YAML files with axes, every combination of which is a cell with its own recipe, and with published values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import isfinite, prod
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from sparsellm.data.yaml_files import read_mapping, read_value
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.runs.recipe import Recipe
from sparsellm.runs.recipe_file import explain, read_recipe
from sparsellm.runs.result_records import Finite
from sparsellm.solvers.patterns import parse_pattern

MAX_CELLS = 10_000
"""The most combinations of the axes in one file. Each is a run that takes at least a minute."""

Points = dict[str, dict[str, Any]]  # the values of an axis: by label, the recipe fields that it sets


class Cell(BaseModel, frozen=True):
    """One run of a sweep: its label on each axis, and its recipe."""

    labels: dict[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """All labels as text."""
        return in_words(self.labels)


def in_words(labels: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Labels as text, numbers with the name of their axis. `without`: axes to leave out."""
    items = ((axis, label) for axis, label in labels.items() if axis not in without)
    return ", ".join(f"{axis} {label}" if re.fullmatch(r"[\d.]+", label) else label for axis, label in items)


class Published(BaseModel, frozen=True):
    """Published values, to compare with those of a sweep.

    Attributes:
        measure: Name of the measure, as in `comparison.measures`.
        figures: Pairs of labels by axis, which select cells, and a value.
    """

    source: str
    measure: str
    figures: tuple[tuple[dict[str, str], Finite], ...]

    def beside(self, labels: Mapping[str, str]) -> float | None:
        """The published value for a cell, or None."""
        return next((value for selected, value in self.figures if selected.items() <= labels.items()), None)


class Sweep(BaseModel, frozen=True):
    """The cells of a sweep, and how to display them.

    Attributes:
        title: Heading of tables and report.
        note: A remark for tables and report.
        axes: By name, the labels in order.
        columns: Axis whose labels are the columns of the printed table; None for one line per cell.
        keep: Whether pruned models are saved.
        smoke: Whether this is the small form of the sweep, for a trial run.
    """

    title: str
    note: str
    axes: dict[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    columns: str | None = None
    keep: bool = False
    published: tuple[Published, ...] = ()
    smoke: bool = False

    @model_validator(mode="after")
    def _check_axes(self) -> Sweep:
        if self.columns is not None and self.columns not in self.axes:
            raise ValueError("`columns:` names no axis")
        if any(cell.labels.keys() != self.axes.keys() for cell in self.cells):
            raise ValueError("the labels of a cell do not match the axes")
        return self

    def at(self, selection: Sequence[str]) -> list[Cell]:
        """The cells with the given labels.

        Args:
            selection: Labels as "axis=label". Cells match any of the labels given for one axis, on every axis given. An empty
                sequence selects all cells.

        Raises:
            InvalidSetting: For an unknown axis or label, or if no cell matches.
        """
        selected: dict[str, set[str]] = {}
        for condition in selection:
            axis, _, label = condition.partition("=")
            _check_known(axis, self.axes, "The selection of cells names an unknown axis")
            _check_known(label, self.axes[axis], f"The selection of cells names an unknown label of {axis!r}")
            selected.setdefault(axis, set()).add(label)
        cells = [cell for cell in self.cells if all(cell.labels[axis] in labels for axis, labels in selected.items())]
        if not cells:
            raise InvalidSetting(f"No cell of the sweep matches {', '.join(selection)}.")
        return cells


class _Settings(BaseModel, extra="forbid"):
    """The recipe fields that all cells share, and the axes."""

    recipe: dict[str, Any] = {}
    axes: dict[str, Any] = {}


class _Entry(BaseModel, extra="forbid"):
    """Published values: `values` is nested in the order of `axes`."""

    source: str
    measure: str
    axes: list[str]
    values: dict[Any, Any]


class _SweepFile(_Settings, coerce_numbers_to_str=True):
    """The content of a sweep file."""

    title: str = ""
    note: str = ""
    leave_out: list[dict[str, Any]] = []
    columns: str | None = None
    keep: bool = False
    published: list[_Entry] = []
    smoke: _Settings | None = None


def read_sweep(file: str | Path | Mapping[str, Any], *, smoke: bool = False, changes: Sequence[str] = ()) -> Sweep:
    """Read a sweep file and check the recipe of every cell.

    Args:
        file: The YAML file, or its content.
        smoke: Whether to read the small form that the file describes under `smoke:`.
        changes: "field=value" for a field that all cells share, or "axis.label=value" for a field that an axis is named after.

    Raises:
        InvalidSetting: For an empty axis, for two cells with the same name or recipe, and for an invalid recipe.
    """
    name, title = ("the sweep", "Sweep") if isinstance(file, Mapping) else (str(file), Path(file).stem)
    try:
        content = file if isinstance(file, Mapping) else read_mapping(Path(file), "sweep")
        given = {field: value for field, value in content.items() if value is not None}
        return _sweep(_SweepFile.model_validate(given), title, smoke=smoke, changes=changes)
    except ValidationError as error:
        fields = {*_SweepFile.model_fields, *_Entry.model_fields}
        raise InvalidSetting(f"{name}: {explain(error.errors()[0], fields)}") from None
    except InvalidSetting as error:
        error.add_note(f"in {name}")
        raise


def _sweep(content: _SweepFile, title: str, *, smoke: bool, changes: Sequence[str]) -> Sweep:
    """The sweep that the content of a file describes, with a default title."""
    overrides = content.smoke if smoke else _Settings()
    if overrides is None:
        raise InvalidSetting(
            "The sweep has no small form. Give it a `smoke:` with `recipe:` and `axes:`, or leave out `smoke`."
        )
    shared = content.recipe | overrides.recipe
    full_axes = {axis: _points(axis, spec) for axis, spec in content.axes.items()}
    axes = full_axes | {axis: _points(axis, spec) for axis, spec in overrides.axes.items()}
    if not axes:
        raise InvalidSetting("The sweep has no axes. Write for example `axes:` with `method: [sparsegpt, alps]` below it.")
    for change in changes:
        _apply_change(change, shared, axes)
    labels = {name: tuple(points) for name, points in axes.items()}
    if (count := prod(map(len, labels.values()))) > MAX_CELLS:
        raise InvalidSetting(
            f"The axes have {count:,} combinations, more than {MAX_CELLS:,}. Split the file into several sweeps."
        )
    cells = tuple(_cells(shared, axes, [_excluded(entry, labels) for entry in content.leave_out]))
    _check_distinct(cells)
    if content.columns:
        _check_known(content.columns, axes, "`columns:` names an unknown axis")
    published = tuple(_published(entry, full_axes) for entry in content.published)
    display = content.model_dump(include={"note", "columns", "keep"})
    return Sweep(title=content.title or title, axes=labels, cells=cells, published=published, smoke=smoke, **display)


def _points(axis: str, spec: Any) -> Points:
    """The values of an axis by label: a list of values of the field that the axis is named after, or a mapping by label."""
    if not spec:
        raise InvalidSetting(f"The axis {axis!r} is empty. Give it at least one value, or leave it out.")
    if not isinstance(spec, (list, dict)):
        raise InvalidSetting(f"The axis {axis!r} must be a list or `label: fields` lines, got {spec!r}.")
    points: Points = {}
    for item in spec:
        value = spec[item] if isinstance(spec, dict) else item
        fields = value if isinstance(value, dict) else {axis: value}
        for field in fields:
            _check_known(str(field), Recipe.model_fields, f"The axis {axis!r} sets an unknown field")
        label = _label(axis, item)
        if label in points:
            raise InvalidSetting(f"The axis {axis!r} has two values named {label!r}. Give each a `label:`.")
        points[label] = dict(fields)
    return points


def _label(axis: str, value: Any) -> str:
    """The label of a value: the canonical text of a pattern, the last part of a model path."""
    if axis == "sparsity":
        return str(parse_pattern(str(value)))
    return PurePath(value).name if axis == "model" and isinstance(value, str) else str(value)


def _apply_change(change: str, shared: dict[str, Any], axes: dict[str, Points]) -> None:
    """Apply one "field=value" or "axis.label=value" in place."""
    target, equals, text = change.partition("=")
    axis, dot, label = target.partition(".")
    if not equals:
        raise InvalidSetting(f"`changes` needs FIELD=VALUE or AXIS.LABEL=VALUE, got {change!r}.")
    fields = shared
    if dot:
        _check_known(axis, axes, f"The change {change!r} names an unknown axis")
        fields = axes[axis][_check_known(label, axes[axis], f"The change {change!r} names an unknown label of {axis!r}")]
    fields[_check_known(axis, Recipe.model_fields, f"The change {change!r} names an unknown field")] = read_value(text)


def _excluded(entry: Mapping[str, Any], labels: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """An entry of `leave_out`: the excluded labels by axis. Labels that are not on the axis have no effect."""
    excluded = {}
    for axis, values in entry.items():
        _check_known(axis, labels, "`leave_out:` names an unknown axis")
        excluded[axis] = {_label(axis, value) for value in (values if isinstance(values, list) else [values])}
    return excluded


def _cells(shared: Mapping[str, Any], axes: Mapping[str, Points], excluded: Sequence[Mapping[str, set[str]]]) -> Iterator[Cell]:
    """Every combination of the axes that is not excluded."""
    for combination in product(*axes.values()):
        labels = dict(zip(axes, combination, strict=True))
        if any(all(labels[axis] in values for axis, values in entry.items()) for entry in excluded):
            continue
        fields: dict[str, Any] = {}
        for axis, label in labels.items():
            if duplicates := fields.keys() & axes[axis][label]:
                raise InvalidSetting(f"Two axes set {min(duplicates)!r} at {label!r}. Let one of them set it.")
            fields |= axes[axis][label]
        try:
            yield Cell(labels=labels, recipe=read_recipe({**shared, **fields}))
        except InvalidSetting as error:
            error.add_note(f"in the cell {in_words(labels)}; `leave_out:` removes cells from a sweep")
            raise


def _check_distinct(cells: Sequence[Cell]) -> None:
    """Raise InvalidSetting if there are no cells, or two cells have the same name or recipe."""
    if not cells:
        raise InvalidSetting("`leave_out:` leaves out every cell. Remove some of its entries.")
    recipes: dict[str, str] = {}
    for cell in cells:
        if cell.name in recipes.values():
            raise InvalidSetting(f"Two cells have the name {cell.name!r}. Give the values of the axes other labels.")
        if (first := recipes.setdefault(cell.recipe.model_dump_json(), cell.name)) != cell.name:
            raise InvalidSetting(f"The cells {first!r} and {cell.name!r} have the same recipe. Remove one of them.")


def _published(entry: _Entry, labels: Mapping[str, Collection[str]]) -> Published:
    """Published values with their labels. Raises InvalidSetting for an unknown axis or label, or a value of another type."""
    branches: list[tuple[dict[str, str], Any]] = [({}, entry.values)]
    for axis in entry.axes:
        _check_known(axis, labels, "`published:` names an unknown axis")
        parents, branches = branches, []
        for selected, values in parents:
            if not isinstance(values, dict):
                raise InvalidSetting(f"`published:` at {selected} must hold `label: value` lines, got {values!r}.")
            for key, value in values.items():
                label = _check_known(_label(axis, key), labels[axis], f"`published:` names an unknown label of {axis!r}")
                branches.append((selected | {axis: label}, value))
    for selected, value in branches:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise InvalidSetting(f"`published:` at {selected} must be a number, got {value!r}.")
    return Published(source=entry.source, measure=entry.measure, figures=tuple(branches))


def _check_known(name: str, names: Collection[str], problem: str) -> str:
    """The name if it is one of `names`; otherwise raises InvalidSetting, which starts with `problem`."""
    if name not in names:
        raise InvalidSetting(f"{problem}: {name!r}. {nearest(name, names)}")
    return name
