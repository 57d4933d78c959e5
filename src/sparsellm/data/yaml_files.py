"""YAML that users wrote, read so that whatever a file holds, reading it ends in a value or in one message."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sparsellm.data.json_files import MAX_DEPTH, Unreadable, check_value, decoded, integer, read_bytes, repeated
from sparsellm.errors import InvalidSetting

MAX_BYTES = 4 * 2**20
"""The largest file that is read: an allocation that names 40,000 layers one by one, which takes half a minute."""

MAX_VALUES = 1_000_000
"""Values in a file, those of an alias counted each time: a few lines of aliases of aliases can stand for any number."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with text, numbers, true, null, lists and mappings only, each key once.

    Numbers to the base 60 are text (`sparsity: 2:4` is a pattern, not 124), and so are dates. `<<` is a key like any other.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # here, since the parser takes seconds for what is nested far deeper
            raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, (dict, list)):
                raise Unreadable(f"a key is a {type(key).__name__}")
        if (twice := repeated(keys)) is not None:
            raise twice
        return {key: self.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


class _Words(_Loader):
    """The same with every value as it is written: `2:4`, `80` and `true` are text."""


def _scalar(pattern: str, convert: Callable[[str], Any], what: str) -> Callable[[_Loader, yaml.Node], Any]:
    """A constructor of scalars of one form; raises Unreadable for a tag on a text of another."""
    form = re.compile(pattern, re.IGNORECASE)

    def construct(loader: _Loader, node: yaml.Node) -> Any:
        text = node.value if isinstance(node, yaml.ScalarNode) else None
        if text is None or not form.fullmatch(text):
            raise Unreadable(f"line {node.start_mark.line + 1} is tagged as {what}, which it is not")
        return convert(text)

    return construct


def _unknown(loader: _Loader, node: yaml.Node) -> Any:
    """What becomes of a value with any other tag."""
    raise Unreadable(f"line {node.start_mark.line + 1} has the tag {str(node.tag)[:80]!r}; a file of settings needs none")


_TAG = "tag:yaml.org,2002:"
_INTEGER, _FLOAT = r"[-+]?\d+", r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?"
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

_Loader.yaml_constructors = {
    f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
    f"{_TAG}int": _scalar(_INTEGER, integer, "an integer"),
    f"{_TAG}float": _scalar(_FLOAT, float, "a number"),
    f"{_TAG}bool": _scalar("|".join(_TRUTH), lambda text: _TRUTH[text.lower()], "true or false"),
    f"{_TAG}null": _scalar(r"~|null|", lambda text: None, "null"),
    f"{_TAG}seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    f"{_TAG}map": lambda loader, node: loader.construct_mapping(node, deep=True),
    None: _unknown,
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag in (f"{_TAG}bool", f"{_TAG}null")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^{_INTEGER}$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^{_FLOAT}$"), list("-+.0123456789"))
_Words.yaml_implicit_resolvers = {}


def read_mapping(path: Path, what: str, advice: str = "", as_written: bool = False) -> dict[Any, Any]:
    """What a YAML file of `field: value` lines holds.

    Args:
        path: A regular file in UTF-8 of at most `MAX_BYTES`.
        what: What messages call the file.
        advice: A sentence for a file that holds no such lines.
        as_written: Whether every key and value is the text that stands there.

    Raises:
        InvalidSetting: For a file that is missing, is not a regular one or not YAML, names a key twice, is nested more than
            `json_files.MAX_DEPTH` levels deep, or holds tags, over-long integers or more than `MAX_VALUES` values.
    """
    try:
        content = _value(decoded(read_bytes(path, MAX_BYTES)), _Words if as_written else _Loader)
    except Unreadable as error:
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
        return _value(text, _Loader)
    except (yaml.YAMLError, Unreadable):
        return text


def read_words(text: str) -> Any:
    """What a text of YAML holds, every key and value as it is written; raises Unreadable for what cannot be read."""
    try:
        return _value(text, _Words)
    except yaml.YAMLError as error:
        raise Unreadable(f"it is not YAML: {' '.join(str(error).split())}") from None


def _value(text: str, loader: type[_Loader]) -> Any:
    """The value of a text of YAML, checked."""
    value = yaml.load(text, loader)
    check_value(value, MAX_VALUES)
    return value
