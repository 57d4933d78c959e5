"""Architectures that users describe in a YAML file with the fields of `Architecture`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsellm.errors import InvalidSetting, nearest
from sparsellm.models.architectures import Architecture, Split
from sparsellm.models.blocks import ARCHITECTURE_ATTRIBUTE, Block, blocks_of
from sparsellm.models.feedforward import ACTIVATION_FUNCTIONS, FeedForward, GatedFeedForward, PlainFeedForward
from sparsellm.texts.paths import local_path
from sparsellm.texts.yaml_files import read_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELDS = ("blocks", "groups", "feed_forward", "activation", "splits", "experts")
"""Fields of the file; `blocks` and `groups` are required."""

ADVICE = "docs/families.md has an example."


def read_architecture(path: str | Path) -> Architecture:
    """Read an architecture from a YAML file.

    Raises:
        InvalidSetting: The file cannot be read, a field is unknown, missing or malformed, or the feed-forward part names a
            layer that is in no group.
    """
    content = read_mapping(local_path(path), "architecture", advice=ADVICE)
    for field in content:
        if field not in FIELDS:
            raise InvalidSetting(f"The architecture {path} has an unknown field {field!r}. {nearest(str(field), FIELDS)}")
    for field in FIELDS[:2]:
        if field not in content:
            raise InvalidSetting(f"The architecture {path} lacks `{field}:`. {ADVICE}")
    try:
        return _architecture(content)
    except InvalidSetting as error:
        raise InvalidSetting(f"The architecture {path}: {error} {ADVICE}") from None


def _architecture(content: dict[str, Any]) -> Architecture:
    """Build the architecture from the content of a file."""
    groups = content["groups"]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, list) and group for group in groups):
        raise InvalidSetting("`groups:` must be lists of layers, in running order, those that share an input in one.")
    splits = content.get("splits") or {}
    if not isinstance(splits, dict):
        raise InvalidSetting(f"`splits:` must name fused layers, each with its pieces, got {splits!r}.")
    layers = [_text("groups", name) for group in groups for name in group]
    feed_forward = None
    if content.get("feed_forward") is not None:
        feed_forward = _feed_forward(content["feed_forward"], layers)
        if "activation" not in content:
            raise InvalidSetting("`feed_forward:` needs `activation:`: its name, or the configuration's key that names it.")
    return Architecture(
        blocks=_text("blocks", content["blocks"]),
        groups=tuple(tuple(str(name) for name in group) for group in groups),
        feed_forward=feed_forward,
        activation=_text("activation", content.get("activation", "none")),
        splits={str(name): _split(name, value) for name, value in splits.items()},
        experts=_text("experts", content.get("experts", "")),
    )


def _feed_forward(value: Any, layers: Iterable[str]) -> FeedForward:
    """Build a plain or a gated feed-forward part; the keys of `value` are the fields of its class."""
    classes = {("up", "out_proj"): PlainFeedForward, ("gate", "up", "out_proj"): GatedFeedForward}
    cls = next((cls for keys, cls in classes.items() if isinstance(value, dict) and set(value) == set(keys)), None)
    if cls is None:
        raise InvalidSetting(
            f"`feed_forward:` must name `up:` and `out_proj:`, or `gate:`, `up:` and `out_proj:`, got {value!r}."
        )
    for name in value.values():
        if name not in layers:
            raise InvalidSetting(f"`feed_forward:` names {name!r}, which is in no group. {nearest(str(name), layers)}")
    feed_forward: FeedForward = cls(**value)
    return feed_forward


def _split(name: str, value: Any) -> Split:
    """Build the split of a fused layer from a list of pieces, or from `shares` by piece and `repeated`."""
    if isinstance(value, list) and value:
        return Split(tuple(_text("splits", piece) for piece in value))
    shares = value.get("shares") if isinstance(value, dict) else None
    if not isinstance(shares, dict) or not shares or not set(value) <= {"shares", "repeated"}:
        raise InvalidSetting(
            f"`splits:` of {name} must be a list of pieces, or `shares:` by piece and `repeated:`, got {value!r}."
        )
    numbers = [*shares.values(), value.get("repeated", 1)]
    if not all(isinstance(number, (str, int)) and not isinstance(number, bool) for number in numbers):
        raise InvalidSetting(f"`splits:` of {name} must be numbers, or the configuration's keys for them, got {numbers}.")
    return Split(tuple(str(piece) for piece in shares), tuple(shares.values()), value.get("repeated", 1))


def _text(field: str, value: Any) -> str:
    """Return the value of a field that must be a string."""
    if not isinstance(value, str):
        raise InvalidSetting(f"`{field}:` must be text, got {value!r}.")
    return value


def describe(model: PreTrainedModel, architecture: Architecture | None) -> PreTrainedModel:
    """Attach a user's architecture, resolved with the model's configuration, to the model; None changes nothing.

    Raises:
        UnsupportedModel: As `blocks_of`.
        InvalidSetting: The architecture names layers that no block has, or an activation function that is not supported.
    """
    if architecture is not None:
        resolved = architecture.resolved(model.config.get_text_config())
        setattr(model, ARCHITECTURE_ATTRIBUTE, resolved)
        _check_described(resolved, blocks_of(model))
    return model


def _check_described(architecture: Architecture, blocks: Sequence[Block]) -> None:
    """Raise InvalidSetting where a user names a layer that no block has: a typing error would silently leave it dense."""
    layers = {name for block in blocks for group in block.architecture.groups for name in group}
    modules = {name for block in blocks for name, _ in block.module.named_modules() if name}
    for name in (name for group in architecture.groups for name in group):
        if name not in layers or not any(name in {*block.views, *dict(block.module.named_modules())} for block in blocks):
            raise InvalidSetting(f"The architecture names {name!r}, which no block has. {nearest(name, modules)}")
    if architecture.experts and not any(block.architecture.experts for block in blocks):
        raise InvalidSetting(f"The architecture's experts, {architecture.experts!r}, are in no block.")
    if architecture.activation not in ("none", "relu", *ACTIVATION_FUNCTIONS):
        raise InvalidSetting(
            f"The architecture's activation is {architecture.activation!r}, neither a key of the configuration nor one that is "
            f"supported: relu, {', '.join(ACTIVATION_FUNCTIONS)}. Leave `feed_forward:` and `activation:` out to prune its "
            "layers one by one."
        )
