"""A sweep as data: a YAML file whose axes multiply out to cells, each cell a recipe; and the figures of a paper beside them."""

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
from sparsellm.runs.records import Finite
from sparsellm.solvers.patterns import parse_pattern

MAX_CELLS = 10_000
"""Combinations of the axes that a file may have: a run each, and one takes a minute at least."""

Points = dict[str, dict[str, Any]]
"""An axis: by label, the recipe's fields that it sets."""


class Cell(BaseModel, frozen=True):
    """One run of a sweep. labels: by axis, where it stands. recipe: what is run."""

    labels: dict[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Its labels in a row."""
        return in_words(self.labels)


def in_words(labels: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Labels in a row, numbers with the names of their axes. without: axes to leave out."""
    shown = {axis: label for axis, label in labels.items() if axis not in without}
    return ", ".join(f"{axis} {label}" if re.fullmatch(r"[\d.]+", label) else label for axis, label in shown.items())


class Published(BaseModel, frozen=True):
    """Figures that a paper prints, to stand beside a sweep's own.

    source: where they are printed. measure: what they measure, as `comparison` names it. figures: each after the labels, by
    axis, of the cells that it belongs to.
    """

    source: str
    measure: str
    figures: tuple[tuple[dict[str, str], Finite], ...]

    def beside(self, labels: Mapping[str, str]) -> float | None:
        """The figure for a cell, if there is one."""
        return next((figure for place, figure in self.figures if place.items() <= labels.items()), None)


class Sweep(BaseModel, frozen=True):
    """Cells in order, and how to show them.

    axes: by name, the labels in order. columns: the axis whose labels are the columns of the printed table; None for one row a
    cell. keep: whether pruned models are written. smoke: whether this is the small form of a sweep.
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
    def _agrees(self) -> Sweep:
        if self.columns is not None and self.columns not in self.axes:
            raise ValueError("`columns` names no axis")
        if any(cell.labels.keys() != self.axes.keys() for cell in self.cells):
            raise ValueError("a cell's labels are not of the axes")
        return self

    def at(self, words: Sequence[str]) -> list[Cell]:
        """The cells at the labels named, as "axis=label"; several of one axis widen, several axes narrow. All without words."""
        wanted: dict[str, set[str]] = {}
        for word in words:
            axis, _, label = word.partition("=")
            _known(axis, self.axes, "--only names an unknown axis")
            _known(label, self.axes[axis], f"--only names an unknown label of `{axis}`")
            wanted.setdefault(axis, set()).add(label)
        cells = [cell for cell in self.cells if all(cell.labels[axis] in labels for axis, labels in wanted.items())]
        if not cells:
            raise InvalidSetting(f"No cell of the sweep is at {', '.join(words)}.")
        return cells


class _Settings(BaseModel, extra="forbid"):
    """What the cells share, and what they differ in."""

    recipe: dict[str, Any] = {}
    axes: dict[str, Any] = {}


class _Entry(BaseModel, extra="forbid"):
    """A paper's figures: `values` nested in the order of `axes`."""

    source: str
    measure: str
    axes: list[str]
    values: dict[Any, Any]


class _SweepFile(_Settings, coerce_numbers_to_str=True):
    """A sweep file."""

    title: str = ""
    note: str = ""
    leave_out: list[dict[str, Any]] = []
    columns: str | None = None
    keep: bool = False
    published: list[_Entry] = []
    smoke: _Settings | None = None


def read_sweep(path: str | Path, smoke: bool = False, changes: Sequence[str] = ()) -> Sweep:
    """The sweep that a YAML file describes, every cell's recipe checked.

    Args:
        path: The file.
        smoke: Whether to read its small form, which its `smoke:` describes.
        changes: "field=value" for fields that all cells share, or "axis.label=value" for the field that an axis is named after.

    Raises:
        InvalidSetting: For an empty axis, for two cells of one name or of one recipe, and for whatever a recipe refuses.
    """
    path = Path(path)
    try:
        content = {field: value for field, value in read_mapping(path, "sweep").items() if value is not None}
        return _sweep(_SweepFile.model_validate(content), path.stem, smoke, changes)
    except ValidationError as error:
        fields = {*_SweepFile.model_fields, *_Entry.model_fields}
        raise InvalidSetting(f"{path}: {explain(error.errors()[0], fields)}") from None
    except InvalidSetting as error:
        error.add_note(f"in {path}")
        raise


def _sweep(content: _SweepFile, name: str, smoke: bool, changes: Sequence[str]) -> Sweep:
    """The sweep of a file's content; `name` is its title where it has none."""
    small = content.smoke if smoke else _Settings()
    if small is None:
        raise InvalidSetting(
            "The sweep has no small form. Give it a `smoke:` with `recipe:` and `axes:`, or leave out --smoke."
        )
    shared = content.recipe | small.recipe
    axes = {axis: _points(axis, spec) for axis, spec in (content.axes | small.axes).items()}
    full_axes = {axis: _points(axis, spec) for axis, spec in content.axes.items()}
    if not axes:
        raise InvalidSetting("The sweep has no axes. Write for example `axes:` with `method: [sparsegpt, alps]` below it.")
    for change in changes:
        _change(change, shared, axes)
    labels = {name: tuple(points) for name, points in axes.items()}
    if (count := prod(map(len, labels.values()))) > MAX_CELLS:
        raise InvalidSetting(f"The axes multiply out to {count:,} cells, more than {MAX_CELLS:,}. Make several sweeps.")
    cells = tuple(_cells(shared, axes, [_places(entry, labels) for entry in content.leave_out]))
    _check_apart(cells)
    if content.columns is not None:
        _known(content.columns, axes, "`columns` names an unknown axis")
    return Sweep(
        title=content.title or name,
        note=content.note,
        axes=labels,
        cells=cells,
        columns=content.columns,
        keep=content.keep,
        published=tuple(_published(entry, full_axes) for entry in content.published),
        smoke=smoke,
    )


def _points(axis: str, spec: Any) -> Points:
    """An axis by label. A list holds values of the field that it is named after; a mapping gives values, or fields, a label."""
    if not spec:
        raise InvalidSetting(f"The axis `{axis}` is empty. Give it at least one value, or leave it out.")
    if not isinstance(spec, (list, dict)):
        raise InvalidSetting(f"The axis `{axis}` must be a list or `label: fields` lines, got {spec!r}.")
    points: Points = {}
    for item in spec:
        value = spec[item] if isinstance(spec, dict) else item
        fields = value if isinstance(value, dict) else {axis: value}
        for field in fields:
            _known(str(field), Recipe.model_fields, f"The axis `{axis}` sets an unknown field")
        label = _label(axis, item)
        if label in points:
            raise InvalidSetting(f"The axis `{axis}` has two values of one name, {label!r}. Give each a `label:`.")
        points[label] = dict(fields)
    return points


def _label(axis: str, value: Any) -> str:
    """A value in a word or two: patterns as they are printed, of a path the last part."""
    if axis == "sparsity":
        return str(parse_pattern(str(value)))
    return PurePath(value).name if axis == "model" and isinstance(value, str) else str(value)


def _change(change: str, shared: dict[str, Any], axes: dict[str, Points]) -> None:
    """Carry out one "field=value" or "axis.label=value"."""
    where, equals, text = change.partition("=")
    axis, dot, label = where.partition(".")
    if not equals:
        raise InvalidSetting(f"--set needs FIELD=VALUE or AXIS.LABEL=VALUE, got {change!r}.")
    fields = shared
    if dot:
        points = axes[_known(axis, axes, "--set names an unknown axis")]
        fields = points[_known(label, points, f"--set names an unknown label of `{axis}`")]
    fields[_known(axis, Recipe.model_fields, "--set names an unknown field")] = read_value(text)


def _places(entry: Mapping[str, Any], labels: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """An entry of `leave_out`: by axis, the labels that it is about. Labels that the axes lack stand for nothing."""
    for axis in entry:
        _known(axis, labels, "`leave_out` names an unknown axis")
    return {
        axis: {_label(axis, value) for value in (wanted if isinstance(wanted, list) else [wanted])}
        for axis, wanted in entry.items()
    }


def _cells(shared: Mapping[str, Any], axes: Mapping[str, Points], left_out: Sequence[Mapping[str, set[str]]]) -> Iterator[Cell]:
    """Every combination of the axes that is not left out."""
    for labels in product(*axes.values()):
        where = dict(zip(axes, labels, strict=True))
        if any(all(where[axis] in wanted for axis, wanted in entry.items()) for entry in left_out):
            continue
        fields: dict[str, Any] = {}
        for axis, label in where.items():
            if twice := fields.keys() & axes[axis][label]:
                raise InvalidSetting(f"Two axes set `{min(twice)}` at {label!r}. Let one of them set it.")
            fields |= axes[axis][label]
        try:
            yield Cell(labels=where, recipe=read_recipe({**shared, **fields}))
        except InvalidSetting as error:
            error.add_note(f"in the cell {in_words(where)}; `leave_out` takes cells out of a sweep")
            raise


def _check_apart(cells: Sequence[Cell]) -> None:
    """Raise InvalidSetting for a sweep without cells, and for two cells of one name or of one recipe."""
    if not cells:
        raise InvalidSetting("`leave_out` leaves out every cell. Take something off it.")
    names: set[str] = set()
    recipes: dict[str, str] = {}
    for cell in cells:
        if cell.name in names:
            raise InvalidSetting(f"Two cells have the name {cell.name!r}. Give the axes' values other labels.")
        same = recipes.setdefault(cell.recipe.model_dump_json(), cell.name)
        if same != cell.name:
            raise InvalidSetting(f"The cells {same!r} and {cell.name!r} are one recipe. Take one of them out.")
        names.add(cell.name)


def _published(entry: _Entry, labels: Mapping[str, Collection[str]]) -> Published:
    """A paper's figures with their labels. Raises InvalidSetting for a label that no axis has, and for what is no number."""
    places: list[tuple[dict[str, str], Any]] = [({}, entry.values)]
    for axis in entry.axes:
        _known(axis, labels, "`published` names an unknown axis")
        unknown = f"`published` names an unknown label of `{axis}`"
        for place, below in places:
            if not isinstance(below, dict):
                raise InvalidSetting(f"`published` at {place} must hold `label: value` lines, got {below!r}.")
        places = [
            (place | {axis: _known(_label(axis, key), labels[axis], unknown)}, value)
            for place, below in places
            for key, value in below.items()
        ]
    for place, value in places:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise InvalidSetting(f"`published` at {place} must be a number, got {value!r}.")
    return Published(source=entry.source, measure=entry.measure, figures=tuple(places))


def _known(word: str, known: Collection[str], what: str) -> str:
    """The word, if it is among the known ones; raises InvalidSetting otherwise."""
    if word not in known:
        raise InvalidSetting(f"{what}: {word!r}. {nearest(word, known)}")
    return word
