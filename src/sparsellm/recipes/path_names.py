"""Names of the files and folders that recipes read, which outputs have in place of their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from sparsellm.checkpoints.files import DEMO, is_hub_name
from sparsellm.recipes.fields import ALLOCATIONS, fields_with
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.texts.paths import TEXT_NAMES, is_task_file, local_path

Kind = TypeVar("Kind", bound=RunRecipe)
Value = TypeVar("Value")


class PathNames:
    """The names of the paths in recipes: their last components. Two paths with the same one get different names."""

    def __init__(self, *recipes: RunRecipe) -> None:
        self._names: dict[str, str] = {}
        known: dict[Path, str] = {}
        for recipe in recipes:
            for field, text in _values(recipe):
                if not is_hub_name(text) if field == "model" else is_file(text):
                    path = local_path(text).absolute()
                    name = known.setdefault(path.resolve(), _distinct(path.name or text, known))
                    self._names |= {text: name, str(path): name}

    def __getitem__(self, text: str) -> str:
        """The name of a value of the recipes; one that is no path is its own name."""
        return self._names.get(text, text)

    def keys(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Copy a mapping with names as keys."""
        return {self[key]: value for key, value in values.items()}

    def error(self, text: str) -> str:
        """Copy an error message with names in place of paths, which it holds as the recipe has them or as absolute ones."""
        for path in sorted(self._names, key=len, reverse=True):
            text = text.replace(path, self._names[path]) if "/" in path else text
        return text

    def recipe(self, recipe: Kind) -> Kind:
        """Copy a recipe with names in place of paths."""
        values = {field: value for field in _path_fields(recipe) if (value := getattr(recipe, field))}
        named = {field: self[x] if isinstance(x, str) else tuple(self[text] for text in x) for field, x in values.items()}
        return recipe.model_copy(update=named)


def _path_fields(recipe: RunRecipe) -> list[str]:
    """The fields of a recipe that may be paths; models come first."""
    return sorted(fields_with(type(recipe), "path"), key=lambda name: name not in ("model", recipe.argument))


def _values(recipe: RunRecipe) -> Iterator[tuple[str, str]]:
    """The values of the fields that may be paths, each with its field."""
    for field in _path_fields(recipe):
        value = getattr(recipe, field)
        yield from ((field, text) for text in ((value,) if isinstance(value, str) else value or ()))


def _distinct(name: str, known: Mapping[Path, str]) -> str:
    """A name, with a number if it is known already."""
    result, number = name, 1
    while result in known.values():
        number += 1
        result = f"{name} ({number})"
    return result


def local_files(recipe: RunRecipe) -> list[tuple[str, str]]:
    """Fields and values of a recipe that may be the last part of a local path, which outputs keep of it."""
    values = []
    for field, name in _values(recipe):
        known = (*TEXT_NAMES, *ALLOCATIONS) if field in ("calibration", "evaluate", "allocation") else ()
        on_hub = field == "model" and ("/" in name or recipe.revision is not None)
        is_name = field == "task" and not is_task_file(name)
        if not (name in known or on_hub or is_name or name.startswith(DEMO)):
            values.append((field, name))
    return values


def is_file(path: str) -> bool:
    """Whether a recipe's value is a path, and not the name of a text or of an allocation rule."""
    try:
        return local_path(path).is_absolute() or local_path(path).exists()
    except (OSError, ValueError, RuntimeError):
        return False
