"""Shows fields of a recipe as keywords in the signature and the docstring of a Python function."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast, get_type_hints

from sparsellm.recipes.fields import RecipeFields, RunFields
from sparsellm.recipes.plugins import load_plugins

Function = TypeVar("Function", bound=Callable[..., Any])


def recipe_keywords(keywords: type, fields: type[RunFields] = RecipeFields) -> Callable[[Function], Function]:
    """Show fields of a recipe in place of `**settings` in a function's signature and docstring.

    Args:
        keywords: The typed dictionary that names the fields.
        fields: The class that declares them.

    Returns:
        A decorator for a function with `**settings`, before which the plugins are loaded that it is called with.
    """
    types = get_type_hints(keywords)
    chosen = {name: field for name, field in fields.model_fields.items() if name in types}

    def show_fields(undecorated: Function) -> Function:
        @wraps(undecorated)
        def loading_plugins(*arguments: Any, **given: Any) -> Any:
            plugins = load_plugins({"plugin": given.pop("plugin", ())})
            return undecorated(*arguments, **given, **plugins)

        function = cast("Function", loading_plugins)
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            for name, field in chosen.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        lines = [f"{name}: {_describe(field)}" for name, field in chosen.items()]

        def wrapped(match: re.Match[str]) -> str:
            indent = match[1]
            fill = partial(textwrap.fill, width=123, initial_indent=indent, subsequent_indent=indent + 4 * " ")
            return "\n".join(fill(line, break_on_hyphens=False) for line in lines)

        plain = inspect.cleandoc(function.__doc__ or "")  # as Python 3.13 and later have it from the start
        function.__doc__ = re.sub(r"^( *)\*\*settings: .*$", wrapped, plain, flags=re.MULTILINE)
        return function

    return show_fields


def _describe(field: Any) -> str:
    """The description of a field, with what is used when it is None."""
    default = field.json_schema_extra["default_text"]
    return f"{field.description} Default: {default}." if default else field.description
