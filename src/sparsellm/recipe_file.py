"""Recipes from settings and YAML files, with every complaint in one sentence or two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sparsellm.errors import InvalidSetting, nearest
from sparsellm.recipe import Recipe


def read_recipe(settings: Mapping[str, Any], config: str | Path | None = None) -> Recipe:
    """A recipe from settings, over those of a YAML file if there is one.

    Raises InvalidSetting that names the field, what it got, and the nearest right name.
    """
    merged: dict[str, Any] = {}
    if config is not None:
        merged.update(read_yaml(Path(config)))
    merged.update(settings)
    if "model" not in merged:
        raise InvalidSetting("There is no model: name one on the command line, or as `model:` in the recipe.")
    try:
        return Recipe(**merged)
    except ValidationError as error:
        raise InvalidSetting(_explain(error.errors()[0])) from None


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without numbers to the base 60: `sparsity: 2:4` is a pattern, not 124."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d+$"), list("-+0123456789"))
_NUMBER = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def read_mapping(path: Path, what: str, advice: str = "") -> dict[Any, Any]:
    """What a YAML file of `field: value` lines holds. Messages call the file `what`, and give advice where it is none."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"The {what} {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise InvalidSetting(f"The {what} {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        message = f"The {what} {path} must hold `field: value` lines, got {type(content).__name__}. {advice}"
        raise InvalidSetting(message.rstrip())
    return content


def read_value(text: str) -> Any:
    """A value as a YAML file would hold it: a word, a number, true, [a list]."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a recipe file."""
    content = read_mapping(path, "recipe")
    for key in content:
        if str(key) not in Recipe.model_fields:
            raise InvalidSetting(
                f"The recipe {path} has an unknown field {str(key)!r}. {nearest(str(key), Recipe.model_fields)}"
            )
    return content


def _explain(error: Any) -> str:
    """One sentence or two for pydantic's first complaint."""
    own = (error.get("ctx") or {}).get("error")
    if isinstance(own, InvalidSetting):
        return str(own)
    field = str(error["loc"][0]) if error["loc"] else "recipe"
    if error["type"] == "extra_forbidden":
        return f"Unknown field {field!r}. {nearest(field, Recipe.model_fields)}"
    if error["type"] == "literal_error":
        known = [word.strip("' ") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"`{field}` is unknown: got {error['input']!r}. {nearest(str(error['input']), known)}"
    return f"`{field}`: {error['msg'].lower()}, got {error['input']!r}."
