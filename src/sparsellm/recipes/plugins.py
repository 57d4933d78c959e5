"""Plugins that a command line names, and import paths in place of names of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsellm.errors import InvalidSetting
from sparsellm.extension import is_place, load_plugin, name_at
from sparsellm.recipes.fields import METHODS
from sparsellm.recipes.registry import brought_methods

DOORS = {"method": "methods", "solver": "methods", "then": "steps"}
"""By a field or setting that names something, the attribute of `Extension` that brings it."""


def load_plugins(values: Mapping[str, Any], find: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Load the plugins among the values of a command's options, and put names in place of import paths.

    Only what the user writes on a command line or in Python may pass here: it imports code.

    Args:
        values: The values by option.
        find: Called before each import.

    Returns:
        The values, with the plugin of each import path in `plugin`.

    Raises:
        InvalidSetting: A plugin cannot be loaded, or an import path is no method.
    """
    given = values.get("plugin") or ()
    plugins = [given] if isinstance(given, str) else list(given)
    for place in plugins:
        find()
        load_plugin(place)

    def named(field: str, value: Any) -> Any:
        if not (field in DOORS and isinstance(value, str) and is_place(value)):
            return value
        plugins.append(value)
        find()
        return _name_at(value, DOORS[field])

    def assigned(text: str) -> str:
        name, equals, value = text.partition("=")
        return f"{name}{equals}{named(name.partition('.')[0], value)}"

    changed = {name: named(name, x) for name, x in values.items() if name != "plugin"}
    if "then" in values:
        changed["then"] = [named("then", x) for x in values["then"]]
    for name in ("settings", "changes"):
        if isinstance(values.get(name), Sequence):
            changed[name] = [assigned(text) for text in values[name]]
    brought_methods()  # notes names that sparsellm has
    return changed | ({"plugin": plugins} if plugins else {})


def _name_at(place: str, door: str) -> str:
    """The name of a class that a plugin brings."""
    name = name_at(place, door)
    if not name:
        raise InvalidSetting(f"{place} cannot stand here: it is none of the {door}.")
    if name in METHODS:
        raise InvalidSetting(f"{place} has the name of the method {name} of sparsellm. Give its class another text `name`.")
    return name
