"""Reading of recipes from settings, YAML files and saved reports, with short error messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sparsellm.checkpoints.files import REPORT
from sparsellm.errors import BadCheckpoint, InvalidSetting, nearest, printable
from sparsellm.extension import check_plugins
from sparsellm.recipes.fields import ALLOCATIONS
from sparsellm.recipes.path_names import is_file, local_files
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.recipes.registry import is_known, is_object, names_in
from sparsellm.solvers.patterns import UnknownPattern, stored_pattern
from sparsellm.texts.json_files import Unreadable, check_value, is_path, read_record
from sparsellm.texts.paths import local_path
from sparsellm.texts.yaml_files import read_mapping

Kind = TypeVar("Kind", bound=RunRecipe)


@dataclass(frozen=True)
class HasRecipe:
    """The entry of a report that a recipe is read from."""

    recipe: dict[str, Any]


READ_RUN = TypeAdapter(HasRecipe).validate_python


def read_recipe(settings: Mapping[str, Any], config: str | Path | None = None, kind: type[Recipe] = Recipe) -> Recipe:
    """Read a recipe.

    Args:
        settings: Recipe fields; they override those of the file.
        config: YAML file with recipe fields, or a saved report: a sparsellm.json or the folder that has it.
        kind: The class of the recipe.

    Raises:
        InvalidSetting: A field or value is invalid; the message has the field, its value and the nearest valid name. Or
            a report names local files that do not exist here.
        BadCheckpoint: The report is missing or damaged.
    """
    recipe = validated(kind, _merged(settings, config))
    _check_files(recipe, settings, config)
    return recipe


def read_recipes(settings: Mapping[str, Any], config: str | Path | None = None, kind: type[Recipe] = Recipe) -> list[Recipe]:
    """Read a recipe for each of one or several sparsities.

    Args:
        settings: As for `read_recipe`; `sparsity` may be a list, or a text with commas.
        config: As for `read_recipe`.
        kind: As for `read_recipe`.

    Raises:
        InvalidSetting: As `read_recipe`, and if two of the sparsities are equal.
        BadCheckpoint: As `read_recipe`.
    """
    merged = _merged(settings, config)
    several = split_sparsity(merged.get("sparsity", ()))
    recipes = [validated(kind, merged | {"sparsity": sparsity}) for sparsity in several] or [validated(kind, merged)]
    _check_files(recipes[0], settings, config)
    patterns = [recipe.label for recipe in recipes]
    if repeated := [pattern for pattern in patterns if patterns.count(pattern) > 1]:
        raise InvalidSetting(f"`sparsity` names {repeated[0]} {patterns.count(repeated[0])} times. Name each only once.")
    return recipes


def read_search(settings: Mapping[str, Any], config: str | Path | None, varied: Mapping[str, Any]) -> Recipe:
    """Read the recipe of a search, as `read_recipe` does.

    Args:
        settings: As for `read_recipe`.
        config: As for `read_recipe`; its values of what is varied are not used.
        varied: The fields that the search sets, with a value that the other fields allow.

    Raises:
        InvalidSetting: As `read_recipe`, and if something else sets the sparsities: a field in their place, or a file.
        BadCheckpoint: As `read_recipe`.
    """
    merged = _merged(settings, config)
    for name in ("sparsity", *Recipe.in_place_of_sparsity):
        if (value := (settings if name in varied else merged).get(name)) is not None:
            raise InvalidSetting(
                f"`{name}` {value} sets what a search looks for. Leave it out; `over` names the setting that is searched over."
            )
    recipe = read_recipe({**settings, **varied}, config)
    if (rule := recipe.allocation_rule) not in (*ALLOCATIONS, *varied):
        raise InvalidSetting(
            f"`allocation` {rule} sets the sparsities itself, but a search needs a rule: {', '.join(ALLOCATIONS)}."
        )
    return recipe


def split_sparsity(value: Any) -> list[Any]:
    """The sparsities in a recipe's value: the items of a list or of a text with commas; empty for one sparsity."""
    if isinstance(value, str):
        return value.split(",") if "," in value else []
    return list(value) if isinstance(value, (list, tuple)) else []


def _merged(settings: Mapping[str, Any], config: str | Path | None) -> dict[str, Any]:
    """The fields of a file and of the settings, which override it. Raises InvalidSetting if there is no model."""
    merged = (read_recipe_fields(local_path(config)) if config is not None else {}) | dict(settings)
    if "model" not in merged:
        raise InvalidSetting("There is no model: pass `model`, or set `model:` in the recipe file.")
    return merged


def _check_files(recipe: Recipe, settings: Mapping[str, Any], config: str | Path | None) -> None:
    """Raise InvalidSetting if a report, which has only the last component of local paths, names files that are not here."""
    if config is not None and _is_report(local_path(config)):
        files = [(field, name) for field, name in local_files(recipe) if field not in settings]
        if missing := [f"`{field}` {printable(name, 80)}" for field, name in files if not is_file(name)]:
            raise InvalidSetting(
                f"{config} names local files without their folders, and these do not exist here: {', '.join(missing)}. "
                "Pass these settings again."
            )


def validated(kind: type[Kind], settings: Mapping[str, Any]) -> Kind:
    """Build a recipe of a class from its settings. Raises InvalidSetting as `read_recipe` does."""
    try:
        # A path may contain bytes that JSON cannot represent. Objects are no part of the recipe's data.
        check_value({name: x for name, x in settings.items() if not getattr(kind.model_fields.get(name), "exclude", False)})
        return kind(**settings)
    except Unreadable as error:
        raise InvalidSetting(f"The recipe cannot be run: {error}.") from None
    except ValidationError as error:
        raise InvalidSetting(explain(error.errors()[0], kind.model_fields)) from None


def read_recipe_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a recipe file or of a report's recipe. Raises InvalidSetting for an unknown field."""
    saved = _is_report(path)
    content = _recipe_in_report(path) if saved else read_mapping(path, "recipe")
    if saved and content.pop("command", None) != Recipe.command:
        raise InvalidSetting(f"{path} is the report of a recovery: name the report of a pruning run.")
    if saved and is_object(content):
        raise InvalidSetting(
            f"{path} is of the method {content.get('method')}, an object of {content['source']}: pass it as `method` in Python."
        )
    if saved and isinstance(plugins := content.get("plugin"), list):
        check_plugins(plugins, str(path))
    packages, named = content.pop("packages", {}) if saved else {}, names_in(content)
    for key in content:
        is_missing = not is_known(named[key]) if key in named else key not in Recipe.model_fields
        is_missing |= key == "sparsity" and isinstance(stored_pattern(str(content[key])), UnknownPattern)
        if isinstance(packages, dict) and key in packages and is_missing:
            brought = content[key] if key == "sparsity" else named.get(key, key)
            raise InvalidSetting(f"{path} needs the package {packages[key]}, which brings {brought!r} and is not installed.")
        if str(key) not in Recipe.model_fields:
            similar = nearest(str(key), Recipe.model_fields)
            raise InvalidSetting(f"The recipe {path} has an unknown field {str(key)!r}. {similar}")
    return content


def _recipe_in_report(path: Path) -> dict[str, Any]:
    """The fields of the recipe in a report."""
    return read_record(path / REPORT if path.is_dir() else path, READ_RUN, "report of a run", refusal=BadCheckpoint)[0].recipe


def _is_report(path: Path) -> bool:
    """Whether a recipe is read from a report rather than from YAML."""
    return path.suffix == ".json" or (is_path(str(path)) and path.is_dir())


def explain(error: Any, fields: Collection[str]) -> str:
    """Describe one of pydantic's errors in a sentence or two. fields: the valid field names."""
    own = (error.get("ctx") or {}).get("error")
    if isinstance(own, InvalidSetting):
        return str(own)
    field = ".".join(map(str, error["loc"])) or "recipe"
    if error["type"] == "extra_forbidden":
        return f"Unknown field {field!r}. {nearest(str(error['loc'][-1]), fields)}"
    if error["type"] == "literal_error":
        valid = [value.strip("' ") for value in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        name = field.rstrip("0123456789").rstrip(".")  # of a list, the field rather than the position in it
        return f"`{name}` is unknown: got {error['input']!r}. {nearest(str(error['input']), valid)}"
    return f"`{field}`: {error['msg'].lower()}, got {printable(repr(error['input']), 80)}."
