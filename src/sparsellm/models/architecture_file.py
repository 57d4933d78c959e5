"""A model's form as its user describes it, in a file of YAML: the same fields as a line of the table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsellm.data.yaml_files import read_mapping
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.models.architectures import Architecture, Split
from sparsellm.models.feedforward import FeedForward, GatedFeedForward, PlainFeedForward

FIELDS = ("blocks", "groups", "feed_forward", "activation", "splits", "experts")
"""What a file may hold; `blocks` and `groups` it must."""

ADVICE = "docs/families.md has an example."


def read_architecture(path: str | Path) -> Architecture:
    """The form that a file describes.

    Raises InvalidSetting for a file that cannot be read, a field that is unknown, missing or of another shape than it must be,
    and a feed-forward part whose layers are in no group.
    """
    content = read_mapping(Path(path), "architecture", ADVICE)
    for field in content:
        if field not in FIELDS:
            raise InvalidSetting(f"The architecture {path} has an unknown field {field!r}. {nearest(str(field), FIELDS)}")
    for field in FIELDS[:2]:
        if field not in content:
            raise InvalidSetting(f"The architecture {path} lacks `{field}`. {ADVICE}")
    try:
        return _architecture(content)
    except InvalidSetting as error:
        raise InvalidSetting(f"The architecture {path}: {error} {ADVICE}") from None


def _architecture(content: dict[str, Any]) -> Architecture:
    """The form from a file's content."""
    groups = content["groups"]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, list) and group for group in groups):
        raise InvalidSetting("`groups` must be lists of layers, in running order, those that share an input in one.")
    splits = content.get("splits") or {}
    if not isinstance(splits, dict):
        raise InvalidSetting(f"`splits` must name fused layers, each with its pieces, got {splits!r}.")
    layers = [_text("groups", name) for group in groups for name in group]
    part = None
    if content.get("feed_forward") is not None:
        part = _feed_forward(content["feed_forward"], layers)
        if "activation" not in content:
            raise InvalidSetting("`feed_forward` needs `activation`: its name, or the configuration's key that names it.")
    return Architecture(
        blocks=_text("blocks", content["blocks"]),
        groups=tuple(tuple(str(name) for name in group) for group in groups),
        feed_forward=part,
        activation=_text("activation", content.get("activation", "none")),
        splits={str(name): _split(name, value) for name, value in splits.items()},
        experts=_text("experts", content.get("experts", "")),
    )


def _feed_forward(value: Any, layers: Iterable[str]) -> FeedForward:
    """A plain or a gated part."""
    forms = {("up", "out_proj"): PlainFeedForward, ("gate", "up", "out_proj"): GatedFeedForward}
    form = next((form for keys, form in forms.items() if isinstance(value, dict) and set(value) == set(keys)), None)
    if form is None:
        raise InvalidSetting(f"`feed_forward` must name `up` and `out_proj`, or `gate`, `up` and `out_proj`, got {value!r}.")
    for name in value.values():
        if name not in layers:
            raise InvalidSetting(f"`feed_forward` names {name!r}, which is in no group. {nearest(str(name), layers)}")
    found: FeedForward = form(**value)
    return found


def _split(name: str, value: Any) -> Split:
    """What a fused layer holds: a list of pieces, or their shares by name and how often they take turns."""
    if isinstance(value, list) and value:
        return Split(tuple(_text("splits", piece) for piece in value))
    shares = value.get("shares") if isinstance(value, dict) else None
    if not isinstance(shares, dict) or not shares or not set(value) <= {"shares", "repeated"}:
        raise InvalidSetting(
            f"`splits` of {name} must be a list of pieces, or `shares:` by piece and `repeated:`, got {value!r}."
        )
    numbers = [*shares.values(), value.get("repeated", 1)]
    if not all(isinstance(number, (str, int)) and not isinstance(number, bool) for number in numbers):
        raise InvalidSetting(f"`splits` of {name} must be numbers, or the configuration's keys for them, got {numbers}.")
    return Split(tuple(str(piece) for piece in shares), tuple(shares.values()), value.get("repeated", 1))


def _text(field: str, value: Any) -> str:
    """A field's value that must be text."""
    if not isinstance(value, str):
        raise InvalidSetting(f"`{field}` must be text, got {value!r}.")
    return value
