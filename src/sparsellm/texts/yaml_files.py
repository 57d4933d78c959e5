"""YAML files of settings: a value, or an error with one message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sparsellm.errors import InvalidSetting, first_line
from sparsellm.texts.json_files import Unreadable, build_mapping, check_value, parse_integer, read_utf8

MAX_VALUES = 1_000_000
"""Maximum number of values in a file. Aliases count each time they expand, since nested aliases grow exponentially."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?\d+", list("-+0123456789")),
    "float": (r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?", list("-+.0123456789")),
}
"""By type, the scalars that are of it, and the characters that they begin with."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, limited to strings, numbers, booleans, null, lists and mappings without equal keys.

    Base-60 numbers are strings (`sparsity: 2:4` is a pattern, not 124), and so are dates, and yes, no, on and off, as in YAML
    1.2: `bos: no` is a value by that name. `<<` is an ordinary key.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = ((self.construct_object(key, deep=True), self.construct_object(value, deep=True)) for key, value in node.value)
        return build_mapping(pairs)


_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in ("str", "seq", "map", *_SCALARS)
}
_Loader.add_constructor(f"{_TAG}int", lambda _, node: parse_integer(node.value))  # YAML 1.1 takes 010 for 8
_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^({_pattern})$"), _first)


def read_mapping(path: Path, kind: str) -> dict[Any, Any]:
    """Read a YAML file that contains a mapping.

    Args:
        kind: What the file is, for error messages, such as "recipe".

    Raises:
        InvalidSetting: If the file cannot be read, is not YAML, has equal keys or tags, is nested more than
            `json_files.MAX_DEPTH` levels deep, or contains more than `MAX_VALUES` values.
    """
    try:
        content = _load(read_utf8(path))
    except Unreadable as error:
        raise InvalidSetting(f"The {kind} {path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise InvalidSetting(f"The {kind} {path} must hold `field: value` lines, got {type(content).__name__}.")
    return content


def read_value(text: str) -> Any:
    """Parse a single value as in a YAML file, such as `80`, `true` or `[a, b]`; invalid YAML is returned as is."""
    try:
        return _load(text)
    except Unreadable:
        return text


def _load(text: str) -> Any:
    """Parse and check a YAML text; raise Unreadable if it is invalid."""
    try:
        value = yaml.load(text, _Loader)
        check_value(value, MAX_VALUES)
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise Unreadable(f"it is not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise Unreadable(first_line(error)) from None
    return value
