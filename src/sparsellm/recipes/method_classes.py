"""The classes of a method that are not of sparsellm: where each comes from.

A run is known again by them: when it is resumed, when its finished output is kept, and among the runs of one command.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from sparsellm.extension import package_with, place_of
from sparsellm.methods import BlockMethod
from sparsellm.recipes.fields import METHODS
from sparsellm.recipes.own_method import ObjectRecipe
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.recipes.registry import build, names_in
from sparsellm.solvers import LayerSolver

KNOWN = {"sparsellm", *sys.stdlib_module_names}
"""Packages whose classes are known by the versions of sparsellm and of Python."""

CONSTANTS = (bool, int, float, str, type)
"""Types of attributes of classes whose text is that of their value."""


@dataclass(frozen=True)
class ClassOrigin:
    """Where a class comes from.

    Attributes:
        name: Its place, "module:name".
        package: The installed package that has the module, with its version; empty if none has.
        files: The files of its module and of those of its bases, by module.
        source: The source of those of these classes that a script or a notebook defines; empty for none, None if it is not
            known.
    """

    name: str
    package: str
    files: dict[str, Path]
    source: str | None

    @classmethod
    def of(cls, kind: type) -> ClassOrigin:
        """The origin of a class."""
        files, sources = dict[str, Path](), list[str | None]()
        for base in (x for x in kind.__mro__ if _package(x) not in KNOWN):
            file = Path(getattr(sys.modules.get(base.__module__), "__file__", None) or "")
            if file.is_file() and base.__module__ != "__main__":  # a script is edited between runs, if only for `resume=True`
                files[base.__module__] = file
            else:
                sources.append(_source(base))
        source = None if None in sources else "\n".join(map(str, sources))
        return cls(place_of(kind), package_with(_package(kind), files.get(kind.__module__, Path())), files, source)


def class_origins(recipe: RunRecipe) -> list[ClassOrigin]:
    """The origins of all classes of a recipe's method, and of the solvers in it, that are not of sparsellm."""
    if not isinstance(recipe, Recipe):
        return []
    if isinstance(recipe, ObjectRecipe):
        method = recipe.given
    elif {*names_in(recipe.model_dump(include={"method", "settings"})).values()} <= METHODS.keys():
        return []  # without building it
    else:
        method = build(recipe.method, recipe.resolved_settings, keep_zeros=recipe.keep_zeros)
    kinds = dict.fromkeys(type(x) for x in _objects(method))
    return [ClassOrigin.of(kind) for kind in kinds if _package(kind) not in KNOWN]


def _fields(made: Any) -> dict[str, Any]:
    """The fields of a dataclass, or the attributes of another object, by name."""
    if is_dataclass(made):
        return {x.name: getattr(made, x.name) for x in fields(made) if x.init}
    return dict(getattr(made, "__dict__", {}))


def _objects(value: Any) -> Iterator[Any]:
    """A method or solver, and all solvers and dataclasses in its fields."""
    if isinstance(value, (list, tuple)):
        yield from (x for item in value for x in _objects(item))
    elif _is_object(value):
        yield value
        yield from (x for item in _fields(value).values() for x in _objects(item))


def _is_object(value: Any) -> bool:
    """Whether a value is a solver, a method or another object of a dataclass."""
    return not isinstance(value, type) and (is_dataclass(value) or isinstance(value, (LayerSolver, BlockMethod)))


def _source(kind: type) -> str | None:
    """The source of a class, or of its functions and constants where a notebook knows no more; None if a function has none."""
    with suppress(OSError, TypeError):
        return inspect.getsource(kind)
    parts = []
    for name, member in vars(kind).items():
        function = getattr(member, "fget", member)
        if isinstance(member, CONSTANTS) and not name.startswith("__"):
            parts.append(f"{name} = {member!r}")
        elif inspect.isroutine(function):
            try:
                parts.append(inspect.getsource(function))
            except (OSError, TypeError):
                if not name.startswith("__"):  # as those that dataclasses write
                    return None
    return "\n".join(parts)


def _package(kind: type) -> str:
    """The first part of the name of a class's module."""
    return kind.__module__.partition(".")[0]
