"""A sweep as data: a YAML file whose axes multiply out to cells, each cell a recipe; and the figures of a paper beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod
from pathlib import Path, PurePath
from typing import Any

from sparsellm.errors import InvalidSetting, nearest
from sparsellm.patterns import parse_pattern
from sparsellm.recipe import Recipe
from sparsellm.recipe_file import read_recipe
from sparsellm.yaml_files import read_mapping, read_value

FIELDS = ("title", "note", "recipe", "axes", "leave_out", "columns", "keep", "published", "smoke")
"""What a sweep file may hold."""

MAX_CELLS = 10_000
"""Combinations of the axes that a file may have: a run each, and one takes a minute at least."""

Points = dict[str, dict[str, Any]]
"""An axis: by label, the recipe's fields that it sets."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. labels: by axis, where it stands. recipe: what is run."""

    labels: Mapping[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Its labels in a row."""
        return in_words(self.labels)


def in_words(labels: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Labels in a row, numbers with the names of their axes. without: axes to leave out."""
    shown = {axis: label for axis, label in labels.items() if axis not in without}
    return ", ".join(f"{axis} {label}" if re.fullmatch(r"[\d.]+", label) else label for axis, label in shown.items())


@dataclass(frozen=True)
class Published:
    """Figures that a paper prints, to stand beside a sweep's own.

    source: where they are printed. measure: what they measure, as `comparison` names it. figures: by cell, as pairs of axis and
    label.
    """

    source: str
    measure: str
    figures: Mapping[frozenset[tuple[str, str]], float]

    def beside(self, labels: Mapping[str, str]) -> float | None:
        """The figure for a cell, if there is one."""
        at = set(labels.items())
        return next((figure for where, figure in self.figures.items() if where <= at), None)


@dataclass(frozen=True)
class Sweep:
    """Cells in order, and how to show them.

    axes: by name, the labels in order. columns: the axis whose labels are the columns of the printed table; None for one row a
    cell. keep: whether pruned models are written. smoke: whether this is the small form of a sweep.
    """

    title: str
    note: str
    axes: Mapping[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    columns: str | None = None
    keep: bool = False
    published: tuple[Published, ...] = ()
    smoke: bool = False

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


def read_sweep(path: str | Path, smoke: bool = False, changes: Sequence[str] = ()) -> Sweep:
    """The sweep that a YAML file describes, every cell's recipe checked.

    smoke: its small form, which the file's `smoke:` describes. changes: "field=value" for fields that all cells share, or
    "axis.label=value" for the field that an axis is named after.
    Raises InvalidSetting for an empty axis, for two cells of one name or of one recipe, and for whatever a recipe refuses.
    """
    path = Path(path)
    content = read_mapping(path, "sweep")
    for key in content:
        _known(str(key), FIELDS, f"The sweep {path} has an unknown field")
    small = _mapping(content.get("smoke"), f"{path}: `smoke`")
    if smoke and not small:
        raise InvalidSetting(f"{path} has no small form. Give it a `smoke:` with `recipe:` and `axes:`, or leave out --smoke.")
    parts = {name: _mapping(content.get(name), f"{path}: `{name}`") for name in ("recipe", "axes")}
    if smoke:
        for key in small:
            _known(str(key), ("recipe", "axes"), f"The `smoke` of {path} has an unknown field")
            parts[key] |= _mapping(small[key], f"{path}: `{key}` of `smoke`")
    shared = parts["recipe"]
    axes = {str(name): _points(path, str(name), spec) for name, spec in parts["axes"].items()}
    if not axes:
        raise InvalidSetting(f"{path} has no axes. Write for example `axes:` with `method: [sparsegpt, alps]` below it.")
    for change in changes:
        _change(change, shared, axes)
    labels = {name: tuple(points) for name, points in axes.items()}
    count = prod(len(points) for points in axes.values())
    if count > MAX_CELLS:
        raise InvalidSetting(
            f"The axes of {path} multiply out to {count:,} cells, more than {MAX_CELLS:,}. Make several sweeps."
        )
    cells = tuple(_cells(path, shared, axes, _left_out(path, _list(content, "leave_out", path), labels)))
    _check_apart(path, cells)
    columns = content.get("columns")
    if columns is not None:
        _known(str(columns), axes, f"`columns` of {path} names an unknown axis")
    full = labels if not smoke else {str(name): tuple(_points(path, str(name), s)) for name, s in content["axes"].items()}
    published = tuple(_published(path, entry, full) for entry in _list(content, "published", path))
    title = str(content.get("title") or path.stem)
    return Sweep(title, str(content.get("note") or ""), labels, cells, columns, bool(content.get("keep")), published, smoke)


def _points(path: Path, axis: str, spec: Any) -> Points:
    """An axis by label. A list holds values of the field that it is named after; a mapping gives values, or fields, a label."""
    if not spec:
        raise InvalidSetting(f"The axis `{axis}` of {path} is empty. Give it at least one value, or leave it out.")
    if not isinstance(spec, (list, dict)):
        raise InvalidSetting(f"The axis `{axis}` of {path} must be a list or `label: fields` lines, got {spec!r}.")
    points: Points = {}
    for item in spec:
        value = spec[item] if isinstance(spec, dict) else item
        fields = value if isinstance(value, dict) else {axis: value}
        for field in fields:
            _known(str(field), Recipe.model_fields, f"The axis `{axis}` of {path} sets an unknown field")
        label = _label(axis, item)
        if label in points:
            raise InvalidSetting(f"The axis `{axis}` of {path} has two values of one name, {label!r}. Give each a `label:`.")
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
    if not dot:
        shared[_known(where, Recipe.model_fields, "--set names an unknown field")] = read_value(text)
        return
    _known(axis, axes, "--set names an unknown axis")
    _known(label, axes[axis], f"--set names an unknown label of `{axis}`")
    axes[axis][label][_known(axis, Recipe.model_fields, "--set changes the field that an axis is named after")] = read_value(
        text
    )


def _left_out(path: Path, entries: Sequence[Any], labels: Mapping[str, Sequence[str]]) -> list[dict[str, set[str]]]:
    """Each entry of `leave_out`: by axis, the labels that it is about. Labels that the axes lack stand for nothing."""
    found = []
    for entry in entries:
        at: dict[str, set[str]] = {}
        for axis, wanted in _mapping(entry, f"{path}: an entry of `leave_out`").items():
            _known(str(axis), labels, f"`leave_out` of {path} names an unknown axis")
            at[str(axis)] = {_label(axis, value) for value in (wanted if isinstance(wanted, list) else [wanted])}
        found.append(at)
    return found


def _cells(
    path: Path, shared: Mapping[str, Any], axes: Mapping[str, Points], left_out: Sequence[Mapping[str, set[str]]]
) -> Iterator[Cell]:
    """Every combination of the axes that is not left out."""
    for labels in product(*axes.values()):
        where = dict(zip(axes, labels, strict=True))
        if any(all(where[axis] in wanted for axis, wanted in entry.items()) for entry in left_out):
            continue
        fields: dict[str, Any] = {}
        for axis, label in where.items():
            for field, value in axes[axis][label].items():
                if field in fields:
                    raise InvalidSetting(f"Two axes of {path} set `{field}` at {label!r}. Let one of them set it.")
                fields[field] = value
        try:
            yield Cell(where, read_recipe({**shared, **fields}))
        except InvalidSetting as error:
            error.add_note(f"in the cell {in_words(where)} of {path}; `leave_out` takes cells out of a sweep")
            raise


def _check_apart(path: Path, cells: Sequence[Cell]) -> None:
    """Raise InvalidSetting for a sweep without cells, and for two cells of one name or of one recipe."""
    if not cells:
        raise InvalidSetting(f"{path} leaves out every cell. Take something off its `leave_out`.")
    names: set[str] = set()
    recipes: dict[str, str] = {}
    for cell in cells:
        if cell.name in names:
            raise InvalidSetting(f"Two cells of {path} have the name {cell.name!r}. Give the axes' values other labels.")
        same = recipes.setdefault(cell.recipe.model_dump_json(), cell.name)
        if same != cell.name:
            raise InvalidSetting(f"The cells {same!r} and {cell.name!r} of {path} are one recipe. Take one of them out.")
        names.add(cell.name)


def _published(path: Path, entry: Any, labels: Mapping[str, Sequence[str]]) -> Published:
    """Figures of a paper: `values` nested in the order of `axes`. Raises InvalidSetting for a label that no axis has."""
    entry = _mapping(entry, f"{path}: an entry of `published`")
    wanted = ("source", "measure", "axes", "values")
    if set(entry) != set(wanted):
        raise InvalidSetting(
            f"An entry of `published` in {path} must have {', '.join(wanted)}, got {', '.join(map(str, entry))}."
        )
    axes = [_known(str(axis), labels, f"`published` in {path} names an unknown axis") for axis in _list(entry, "axes", path)]

    def leaves(values: Any, at: tuple[tuple[str, str], ...]) -> Iterator[tuple[frozenset[tuple[str, str]], float]]:
        if len(at) == len(axes):
            if isinstance(values, bool) or not isinstance(values, (int, float)) or not isfinite(values):
                raise InvalidSetting(f"{path}: `published` at {dict(at)} must be a number, got {values!r}.")
            yield frozenset(at), float(values)
            return
        axis = axes[len(at)]
        for key, below in _mapping(values, f"{path}: `published` at {dict(at)}").items():
            label = _known(_label(axis, key), labels[axis], f"`published` in {path} names an unknown label of `{axis}`")
            yield from leaves(below, (*at, (axis, label)))

    return Published(str(entry["source"]), str(entry["measure"]), dict(leaves(entry["values"], ())))


def _known(word: str, known: Any, what: str) -> str:
    """The word, if it is among the known ones; raises InvalidSetting otherwise."""
    if word not in known:
        raise InvalidSetting(f"{what}: {word!r}. {nearest(word, known)}")
    return word


def _list(content: Mapping[Any, Any], field: str, path: Path) -> list[Any]:
    """A field that must be a list; nothing counts as an empty one."""
    value = content.get(field)
    if value is not None and not isinstance(value, list):
        raise InvalidSetting(f"{path}: `{field}` must be a list, got {value!r}.")
    return value or []


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    """The value as a mapping; nothing counts as an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidSetting(f"{where} must hold `field: value` lines, got {value!r}.")
    return dict(value)
