"""Strict YAML parsing of settings files: the result is a checked value, or an error with one message."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sparsellm.errors import InvalidSetting
from sparsellm.texts.json_files import (
    MAX_DEPTH,
    TOO_DEEP,
    Unreadable,
    build_mapping,
    check_value,
    decode_utf8,
    parse_integer,
    read_bytes,
)

MAX_YAML_BYTES = 4 * 2**20
"""Largest file that is read: an allocation with an entry for each of 40,000 layers, which takes half a minute to parse."""

MAX_VALUES = 1_000_000
"""Maximum number of values in a file. Aliases count each time they expand, since nested aliases grow exponentially."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, limited to strings, numbers, booleans, null, lists and mappings without duplicate keys.

    Base-60 numbers are strings (`sparsity: 2:4` is a pattern, not 124), and so are dates, and yes, no, on and off, as in YAML
    1.2: `bos: no` is a value by that name. `<<` is an ordinary key.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # checked while parsing, which takes seconds for very deep nesting
            raise Unreadable(TOO_DEEP)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, (dict, list)):
                raise Unreadable(f"a key is a {type(key).__name__}")
        values = (self.construct_object(value, deep=True) for _, value in node.value)
        return build_mapping(zip(keys, values, strict=True))


class _StringLoader(_Loader):
    """The same loader with every scalar as a string, as written: `2:4`, `80`, `true`."""


def _scalar(pattern: str, convert: Callable[[str], Any], type_name: str) -> Callable[[_Loader, yaml.Node], Any]:
    """Build the constructor of a scalar type, which raises Unreadable if a tagged text does not match the pattern."""
    compiled = re.compile(pattern, re.IGNORECASE)

    def construct(loader: _Loader, node: yaml.Node) -> Any:
        text = node.value if isinstance(node, yaml.ScalarNode) else None
        if text is None or not compiled.fullmatch(text):
            raise Unreadable(f"line {node.start_mark.line + 1} is tagged as {type_name}, which it is not")
        return convert(text)

    return construct


def _unknown(loader: _Loader, node: yaml.Node) -> Any:
    """Raise Unreadable for any other tag."""
    raise Unreadable(f"line {node.start_mark.line + 1} has the tag {str(node.tag)[:80]!r}; a file of settings needs none")


_TAG = "tag:yaml.org,2002:"
_INTEGER, _FLOAT = r"[-+]?\d+", r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?"
_TRUTH = {"true": True, "false": False}

_Loader.yaml_constructors = {
    f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
    f"{_TAG}int": _scalar(_INTEGER, parse_integer, "an integer"),
    f"{_TAG}float": _scalar(_FLOAT, float, "a number"),
    f"{_TAG}bool": _scalar("|".join(_TRUTH), lambda text: _TRUTH[text.lower()], "true or false"),
    f"{_TAG}null": _scalar(r"~|null|", lambda text: None, "null"),
    f"{_TAG}seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    f"{_TAG}map": lambda loader, node: loader.construct_mapping(node, deep=True),
    None: _unknown,
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == f"{_TAG}null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^{_INTEGER}$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^{_FLOAT}$"), list("-+.0123456789"))
_StringLoader.yaml_implicit_resolvers = {}


def read_mapping(path: Path, kind: str, *, as_written: bool = False) -> dict[Any, Any]:
    """Read a YAML file that contains a mapping.

    Args:
        path: A regular file of at most `MAX_YAML_BYTES`, in UTF-8.
        kind: What the file is, for error messages, such as "recipe".
        as_written: Whether to keep every key and scalar as a string.

    Raises:
        InvalidSetting: If the file is missing, not a regular file or not YAML, has duplicate keys, is nested more than
            `json_files.MAX_DEPTH` levels deep, or contains tags, too large integers or more than `MAX_VALUES` values.
    """
    try:
        content = _load(decode_utf8(read_bytes(path, MAX_YAML_BYTES)), _StringLoader if as_written else _Loader)
    except Unreadable as error:
        raise InvalidSetting(f"The {kind} {path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise InvalidSetting(f"The {kind} {path} must hold `field: value` lines, got {type(content).__name__}.")
    return content


def read_value(text: str) -> Any:
    """Parse a single value as in a YAML file, such as `80`, `true` or `[a, b]`; invalid YAML is returned as is."""
    try:
        return _load(text, _Loader)
    except Unreadable:
        return text


def read_strings(text: str) -> Any:
    """Parse a YAML text, with every key and scalar as a string; raise Unreadable if it is invalid."""
    return _load(text, _StringLoader)


def _load(text: str, loader: type[_Loader]) -> Any:
    """Parse and check a YAML text; raise Unreadable if it is invalid."""
    try:
        value = yaml.load(text, loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise Unreadable(f"it is not YAML ({reason})") from None
    check_value(value, MAX_VALUES)
    return value
