"""The cells of a sweep with their labels, its axes, and published values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, FiniteFloat

from sparsellm.errors import InvalidSetting, nearest
from sparsellm.recipes.fields import split_name
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.patterns import parse_pattern


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


def check_known(name: str, names: Collection[str], problem: str) -> str:
    """The name if it is one of `names`; otherwise raises InvalidSetting, which starts with `problem`."""
    if name not in names:
        raise InvalidSetting(f"{problem}: {name!r}. {nearest(name, names)}")
    return name


def written(value: Any) -> str:
    """A value as YAML has it: true rather than True."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def label_of(axis: str, value: Any) -> str:
    """The label of a value in a list: the canonical text of a pattern, the last part of a model path."""
    if axis == "sparsity":
        with suppress(InvalidSetting):  # the recipe of the cell refuses a value that is no pattern
            return str(parse_pattern(str(value)))
    if isinstance(value, dict):
        name, settings = split_name(value, axis)
        return f"{name}({', '.join(f'{key}={written(x)}' for key, x in settings.items())})"
    return PurePath(value).name if axis == "model" and isinstance(value, str) else written(value)


def known_label(axis: str, value: Any, labels: Collection[str]) -> str:
    """The label of an axis that a value names: as it is written, or else as a value in a list; maybe an unknown one."""
    return written(value) if written(value) in labels else label_of(axis, value)


def not_of_method(method: str) -> tuple[str, ...]:
    """The fields of recipes that a method does not have."""
    return () if method == "sparsellm" else ("effort",)
