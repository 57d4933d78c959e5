"""Sweeps: files with axes, every combination of which is a cell with its own recipe, and with published values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import isfinite, prod
from pathlib import Path, PurePath
from typing import Any, get_origin

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from sparsellm.errors import InvalidSetting, nearest
from sparsellm.recipes.fields import label_with, split_name, written
from sparsellm.recipes.file import explain, read_recipe
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.registry import method_names, settings_of
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.texts.paths import local_path
from sparsellm.texts.yaml_files import read_mapping, read_value

MAX_CELLS = 10_000
"""The most combinations of the axes in one file. Each is a run that takes at least a minute."""

Points = dict[str, dict[str, Any]]  # the values of an axis: by label, the recipe fields that it sets
Excluded = dict[str, set[str]]  # an entry of `leave_out`: the excluded labels by axis


class Cell(BaseModel, frozen=True):
    """One run of a sweep: its label on each axis, and its recipe."""

    labels: dict[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """All labels as text."""
        return labels_in_words(self.labels)

    @property
    def model(self) -> str:
        """The label of its model, or the last part of the model's name if models are no axis."""
        return self.labels.get("model", PurePath(self.recipe.model).name)


def labels_in_words(labels: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Labels as text, numbers with the name of their axis. `without`: axes to leave out."""
    items = ((axis, label) for axis, label in labels.items() if axis not in without)
    return ", ".join(f"{axis} {label}" if re.fullmatch(r"[\d.]+", label) else label for axis, label in items)


class Published(BaseModel, frozen=True):
    """Published values, to compare with those of a sweep.

    Attributes:
        measure: Name of the measure, as in `measures.measures`.
        figures: Pairs of labels by axis, which select cells, and a value.
    """

    source: str
    measure: str
    figures: tuple[tuple[dict[str, str], FiniteFloat], ...]

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
        ignored: Which fields the cells of which methods are run without, in sentences.
        content: The content of a file that gives this sweep again.
    """

    title: str
    note: str
    axes: dict[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    columns: str | None = None
    keep: bool = False
    published: tuple[Published, ...] = ()
    smoke: bool = False
    ignored: str = ""
    content: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_axes(self) -> Sweep:
        """Raise ValueError, as for a damaged file, if cells or columns are of other axes."""
        if self.columns not in {None, *self.axes} or any(cell.labels.keys() != self.axes.keys() for cell in self.cells):
            raise ValueError("its columns or cells are of other axes")
        return self

    @property
    def models(self) -> list[str]:
        """The model of each cell, each once."""
        return list(dict.fromkeys(cell.model for cell in self.cells))

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
            axis, _, value = condition.partition("=")
            check_known(axis, self.axes, "The selection of cells names an unknown axis")
            label = known_label(axis, value, self.axes[axis])
            check_known(label, self.axes[axis], f"The selection of cells names an unknown label of {axis!r}")
            selected.setdefault(axis, set()).add(label)
        cells = [cell for cell in self.cells if all(cell.labels[axis] in labels for axis, labels in selected.items())]
        if not cells:
            raise InvalidSetting(f"No cell of the sweep matches {', '.join(selection)}.")
        return cells


class _Settings(BaseModel, extra="forbid"):
    """The recipe fields that all cells share, below `recipe:` or beside it, and the axes."""

    recipe: dict[str, Any] = {}
    axes: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _move_fields(cls, content: Any) -> Any:
        """Move the recipe fields that stand beside `recipe:` below it."""
        if not isinstance(content, Mapping) or not isinstance(content.get("recipe") or {}, Mapping):
            return content
        below, beside = content.get("recipe") or {}, {name: content[name] for name in content if name in Recipe.model_fields}
        if repeated := [name for name in beside if name in below]:
            raise InvalidSetting(f"`{repeated[0]}:` stands both in `recipe:` and beside it. Leave out one of them.")
        return {name: content[name] for name in content if name not in beside} | {"recipe": {**below, **beside}}


class _Entry(BaseModel, extra="forbid"):
    """Published values: `values` is nested in the order of `axes`."""

    source: str
    measure: str
    axes: list[str]
    values: dict[Any, Any]


class _SweepFile(_Settings, coerce_numbers_to_str=True):
    """The content of a sweep file."""

    axes: dict[str, Any] = Field(min_length=1)
    title: str = ""
    note: str = ""
    leave_out: list[dict[str, Any]] = []
    columns: str | None = None
    keep: bool = False
    published: list[_Entry] = []
    smoke: _Settings | None = None


def read_sweep(
    file: str | Path | Mapping[str, Any], *, smoke: bool = False, changes: Sequence[str] = (), plugins: Sequence[str] = ()
) -> Sweep:
    """Read a sweep file and check the recipe of every cell.

    Args:
        file: The YAML file, or its content.
        smoke: Whether to read the small form that the file describes under `smoke:`.
        changes: "field=value" for a field that all cells share, or "axis.label=value" for a field that an axis is named after.
        plugins: Plugins that are loaded, for names that they bring.

    Raises:
        InvalidSetting: For an empty axis, for two cells with the same name or recipe, and for an invalid recipe.
    """
    name, title = ("the sweep", "Sweep") if isinstance(file, Mapping) else (str(file), Path(file).stem)
    try:
        content = file if isinstance(file, Mapping) else read_mapping(local_path(file), "sweep")
        given = {field: value for field, value in content.items() if value is not None}
        return _sweep(_SweepFile.model_validate(given), title, smoke=smoke, changes=changes, plugins=plugins)
    except ValidationError as error:
        fields = {*_SweepFile.model_fields, *_Entry.model_fields, *Recipe.model_fields}
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")  # perhaps a missing one, misspelled
        raise InvalidSetting(f"{name}: {explain(first, fields)}") from None
    except InvalidSetting as error:
        error.add_note(f"in {name}")
        raise


def _sweep(content: _SweepFile, title: str, *, smoke: bool, changes: Sequence[str], plugins: Sequence[str]) -> Sweep:
    """The sweep that the content of a file describes, with a default title."""
    overrides = content.smoke if smoke else _Settings()
    if overrides is None:
        raise InvalidSetting(
            "The sweep has no small form. Give it a `smoke:` with `recipe:` and `axes:`, or leave out `smoke`."
        )
    shared = content.recipe | overrides.recipe | ({"plugin": [*plugins]} if plugins else {})
    full_axes = {axis: _points(axis, spec) for axis, spec in content.axes.items()}
    axes = full_axes | {axis: _points(axis, spec) for axis, spec in overrides.axes.items()}
    for change in changes:
        _apply_change(change, shared, axes)
    for name, value in shared.items():
        holds_several = name not in Recipe.model_fields or get_origin(Recipe.model_fields[name].annotation) is tuple
        if isinstance(value, list) and not holds_several:
            raise InvalidSetting(f"`{name}:` has several values for one recipe, got {value}. Move it below `axes:`.")
    labels = {name: tuple(points) for name, points in axes.items()}
    if (count := prod(map(len, labels.values()))) > MAX_CELLS:
        raise InvalidSetting(
            f"The axes have {count:,} combinations, more than {MAX_CELLS:,}. Split the file into several sweeps."
        )
    cells, ignored = _cells(shared, axes, [_excluded(entry, labels) for entry in content.leave_out])
    if content.columns:
        check_known(content.columns, axes, "`columns:` names an unknown axis")
    published = tuple(_published(entry, full_axes) for entry in content.published)
    title = content.title or title
    changed: dict[str, Any] = {"recipe": shared, "axes": axes} if changes else {}
    again = content.model_copy(update={"smoke": _Settings(**changed)} if smoke and changes else changed)
    return Sweep(
        axes=labels,
        cells=tuple(cells),
        published=published,
        smoke=smoke,
        ignored=ignored,
        content={"title": title, **again.model_dump(mode="json", exclude_defaults=True, fallback=str)},
        title=title,
        **content.model_dump(include={"note", "columns", "keep"}),
    )


def _points(axis: str, spec: Any) -> Points:
    """The values of an axis by label: a list of values of the field that the axis is named after, or a mapping by label."""
    if not spec or not isinstance(spec, (list, dict)):
        raise InvalidSetting(f"The axis {axis!r} must be a list of values, or `label: fields` lines, got {spec!r}.")
    points: Points = {}
    for item in spec if isinstance(spec, dict) else [x for value in spec for x in _expanded(axis, value)]:
        value = spec[item] if isinstance(spec, dict) else item
        problem, is_method = f"The axis {axis!r} sets an unknown field", axis in ("method", "then") and isinstance(value, dict)
        fields = value if isinstance(value, dict) and not (is_method and "name" in value) else _fields(axis, value, problem)
        for field in fields:
            check_known(str(field), Recipe.model_fields, problem)
        label = written(item) if isinstance(spec, dict) else label_of(axis, item)
        if label in points:
            raise InvalidSetting(f"The axis {axis!r} has two values named {label!r}. Give each a `label:`.")
        points[label] = dict(fields)
    return points


def _expanded(axis: str, item: Any) -> list[Any]:
    """A value of an axis; of a method or step with lists of values for its settings, each combination."""
    if axis not in ("method", "then") or not isinstance(item, dict):
        return [item]
    several = {key: x if isinstance(x, list) else [x] for key, x in item.items()}
    return [dict(zip(several, values, strict=True)) for values in product(*several.values())]


def _fields(name: str, value: Any, problem: str) -> dict[str, Any]:
    """The field of a recipe of a name, or the setting of a method; an error for any other name starts with `problem`."""
    if name in Recipe.model_fields:
        return {name: value}
    settings = set[str]()
    for method in method_names():
        with suppress(InvalidSetting):  # a package's that cannot be used; a cell of it is refused
            settings.update(settings_of(method))
    return {"settings": {check_known(name, {*Recipe.model_fields, *settings}, problem): value}}


def _apply_change(change: str, shared: dict[str, Any], axes: dict[str, Points]) -> None:
    """Apply one "field=value" or "axis.label=value" in place."""
    target, equals, text = change.partition("=")
    axis, dot, label = target.partition(".")
    if not equals:
        raise InvalidSetting(f"`changes` needs FIELD=VALUE or AXIS.LABEL=VALUE, got {change!r}.")
    fields = shared
    if dot:
        check_known(axis, axes, f"The change {change!r} names an unknown axis")
        label = known_label(axis, label, axes[axis])
        fields = axes[axis][check_known(label, axes[axis], f"The change {change!r} names an unknown label of {axis!r}")]
    for name, value in _fields(axis, read_value(text), f"The change {change!r} names an unknown field").items():
        fields[name] = {**_settings_in(fields), **value} if name == "settings" else value


def _excluded(entry: Mapping[str, Any], labels: Mapping[str, Sequence[str]]) -> Excluded:
    """An entry of `leave_out`: the excluded labels by axis. Labels that are not on the axis have no effect."""
    excluded = {}
    for axis, values in entry.items():
        check_known(axis, labels, "`leave_out:` names an unknown axis")
        several = values if isinstance(values, list) else [values]
        excluded[axis] = {known_label(axis, value, labels[axis]) for value in several}
    return excluded


def _cells(shared: Mapping[str, Any], axes: Mapping[str, Points], excluded: Sequence[Excluded]) -> tuple[list[Cell], str]:
    """Every combination of the axes that is not excluded, without an effort if its method has none.

    Of cells that differ only in it, the first one is kept. Where no cell's method has efforts, the recipe refuses them.

    Returns:
        The cells, and which left out an effort, in sentences.
    """
    combinations = list(_combinations(shared, axes, excluded))
    has_effort = any("effort" in fields and _method(fields) == "sparsellm" for _, fields in combinations)
    cells: dict[str, Cell] = {}
    without: dict[str, None] = {}  # the methods that do not have it
    for labels, fields in combinations:
        if unused := has_effort and "effort" in fields and _method(fields) != "sparsellm":
            del fields["effort"]
        try:
            recipe = read_recipe(fields)
        except InvalidSetting as error:
            error.add_note(f"in the cell {labels_in_words(labels)}; `leave_out:` removes cells from a sweep")
            raise
        cell, key = Cell(labels=labels, recipe=recipe), recipe.model_dump_json()
        if unused:
            without[recipe.method] = None
        cells.setdefault(key if unused else f"{key} {cell.name}", cell)
    _check_distinct(list(cells.values()))
    who = ("have", "their") if len(without) > 1 else ("has", "its")
    lines = [f"{' and '.join(without)} {who[0]} no `effort`; {who[1]} cells ignore it."] if without else []
    if len(cells) < len(combinations):
        lines.append("Combinations that differ in it only are one cell.")
    return list(cells.values()), " ".join(lines)


def _method(fields: Mapping[str, Any]) -> str:
    """The name of the method in these fields."""
    return str(split_name(fields.get("method", Recipe.model_fields["method"].default), "method")[0])


def _combinations(
    shared: Mapping[str, Any], axes: Mapping[str, Points], excluded: Sequence[Excluded]
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The labels and recipe fields of every combination of the axes that is not excluded."""
    for combination in product(*axes.values()):
        labels = dict(zip(axes, combination, strict=True))
        if any(all(labels[axis] in values for axis, values in entry.items()) for entry in excluded):
            continue
        fields: dict[str, Any] = {}
        for axis, label in labels.items():
            point = axes[axis][label]
            settings, more = _settings_in(fields), _settings_in(point)
            if duplicates := fields.keys() & (point.keys() - {"settings"}) | (settings.keys() & more.keys()):
                raise InvalidSetting(f"Two axes set {min(duplicates)!r} at {label!r}. Let one of them set it.")
            fields |= point | ({"settings": {**settings, **more}} if settings or more else {})
        settings = {**_settings_in(shared), **_settings_in(fields)}
        yield labels, {**shared, **fields} | ({"settings": settings} if settings else {})


def _settings_in(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the method among fields of a recipe."""
    settings = {} if fields.get("settings") is None else fields["settings"]
    if not isinstance(settings, Mapping):
        raise InvalidSetting(f"`settings:` must be `name: value` lines, got {settings!r}.")
    return settings


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
        check_known(axis, labels, "`published:` names an unknown axis")
        parents, branches = branches, []
        for selected, values in parents:
            if not isinstance(values, dict):
                raise InvalidSetting(f"`published:` at {selected} must hold `label: value` lines, got {values!r}.")
            for key, value in values.items():
                label = known_label(axis, key, labels[axis])
                check_known(label, labels[axis], f"`published:` names an unknown label of {axis!r}")
                branches.append((selected | {axis: label}, value))
    for selected, value in branches:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise InvalidSetting(f"`published:` at {selected} must be a number, got {value!r}.")
    return Published(source=entry.source, measure=entry.measure, figures=tuple(branches))


def check_known(name: str, names: Collection[str], problem: str) -> str:
    """The name if it is one of `names`; otherwise raises InvalidSetting, which starts with `problem`."""
    if name not in names:
        raise InvalidSetting(f"{problem}: {name!r}. {nearest(name, names)}")
    return name


def label_of(axis: str, value: Any) -> str:
    """The label of a value in a list: the canonical text of a pattern, the last part of a model path."""
    if axis == "sparsity":
        with suppress(InvalidSetting):  # the recipe of the cell refuses a value that is no pattern
            return str(parse_pattern(str(value)))
    if isinstance(value, dict):
        return label_with(*split_name(value, axis))
    return PurePath(value).name if axis == "model" and isinstance(value, str) else written(value)


def known_label(axis: str, value: Any, labels: Collection[str]) -> str:
    """The label of an axis that a value names: as it is written, or else as a value in a list; maybe an unknown one."""
    return written(value) if written(value) in labels else label_of(axis, value)
