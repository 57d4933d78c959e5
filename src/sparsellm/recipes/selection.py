"""Selection of blocks by number, and of layers by name, glob, regular expression, type or role."""

from __future__ import annotations

import difflib
import fnmatch
import re
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from sparsellm.errors import InvalidSetting
from sparsellm.models.blocks import Block

REGEX = "re:"
"""Prefix of a layer-name pattern that is a regular expression, as in llm-compressor."""

MATCHING_SECONDS = 5.0
"""Most processor time that a regular expression may take for all names; those that are meant take microseconds for each."""

ANY_LAYER = "Linear"
"""Type of every layer, whatever the module that stores it."""


HEADS = ("lm_head", "embed_out")
"""Names of output heads, which `exclude` may name although they stay dense unless `include` names them."""


@dataclass(frozen=True)
class LayerName:
    """A layer, with what patterns are compared with.

    Attributes:
        full_name: Path of the layer in the model.
        shape: (out, in).
        name: Name of the layer within its block.
        block: The block; None for a layer without a model.
        labels: Types of the layer and of the modules that hold it within the block, and its role: attention or mlp.
    """

    full_name: str
    shape: tuple[int, int]
    name: str = ""
    block: Block | None = None
    labels: frozenset[str] = field(default_factory=frozenset)


def layer_names(blocks: Sequence[Block]) -> list[LayerName]:
    """The layers of blocks, in running order, with their types and roles."""
    names: list[LayerName] = []
    for block in blocks:
        types = {path: type(module).__name__ for path, module in block.module.named_modules()}
        groups = block.architecture.groups
        attention = groups[0][0].partition(".")[0] if block.architecture.known and len(groups) > 1 else ""
        for name, layer in block.layers.items():
            labels = {ANY_LAYER, *(types.get(path, ANY_LAYER) for path in _holders(name))}
            if attention:
                labels.add("attention" if name.partition(".")[0] == attention else "mlp")
            shape = (layer.out_features, layer.in_features)
            names.append(LayerName(block.full_name(name), shape, name or block.name, block, frozenset(labels)))
    return names


def other_modules(blocks: Sequence[Block]) -> dict[str, tuple[int, int] | None]:
    """The modules of the blocks that are no layers, by full name, with the shape of a weight that is a matrix, else None."""
    modules: dict[str, tuple[int, int] | None] = {}
    for block in blocks:
        layers = {path for name in block.layers for path in _holders(name)}
        for path, module in block.module.named_modules():
            if path and path not in layers:
                weight = getattr(module, "weight", None)
                is_matrix = isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
                shape = (weight.shape[0], weight.shape[1]) if weight is not None and is_matrix else None
                modules[block.full_name(path)] = shape
    return modules


def _holders(name: str) -> list[str]:
    """The name of a layer and of the modules that hold it."""
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]


def name_matcher(pattern: str, setting: str) -> Callable[[str], bool]:
    """Compile a layer-name pattern to a function of a full name.

    Args:
        pattern: A regular expression after "re:", which must match from the start of the name (`re.match`). Otherwise a name
            with `*`, `?` and `[...]`, compared with the full names of the layer and of the modules that hold it, and with their
            ends after a dot.
        setting: Name of the setting, for the error.

    Raises:
        InvalidSetting: The regular expression is invalid. The function raises it for one that takes too long.
    """
    if pattern.startswith(REGEX):
        try:
            compiled = re.compile(pattern.removeprefix(REGEX))
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidSetting(f"{setting} got {pattern!r}, which is not a regular expression: {error}.") from None
        return _bounded(compiled.match, f"{setting} got {pattern!r}")
    translated = fnmatch.translate(pattern)[:-2]  # without its end, which is \z from Python 3.14 on and \Z before
    compiled = re.compile(rf"(?s:.*\.)?(?:{translated})(?s:\..*)?\Z")
    return lambda full_name: compiled.match(full_name) is not None


def _bounded(match: Callable[[str], re.Match[str] | None], got: str) -> Callable[[str], bool]:
    """A function that calls `match` for at most `MATCHING_SECONDS` in all, if it is called in the main thread.

    Nested repetitions as in (a+)+ take time that doubles with every character of a name that they do not match.
    """
    left = MATCHING_SECONDS

    def stop(*_: object) -> None:
        raise InvalidSetting(
            f"{got}, which takes more than {MATCHING_SECONDS:g} seconds to compare with names. "
            "Write it without nested repetitions."
        )

    def is_match(full_name: str) -> bool:
        nonlocal left
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            return match(full_name) is not None
        previous = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, 1e-6))
        try:
            return match(full_name) is not None
        finally:
            left = signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0] or left
            signal.signal(signal.SIGVTALRM, previous)

    return is_match


def matching(layers: Iterable[LayerName], pattern: str, setting: str) -> set[str]:
    """The full names of the layers that a pattern matches by name, type or role. Raises InvalidSetting as `name_matcher`."""
    is_match = name_matcher(pattern, setting)
    return {layer.full_name for layer in layers if pattern in layer.labels or is_match(layer.full_name)}


def unmatched(pattern: str, setting: str, layers: Sequence[LayerName]) -> InvalidSetting:
    """The error for a pattern that matches no layer, with the nearest names, types and roles."""
    message = f"{setting} got {pattern!r}, which matches no layer."
    if pattern.startswith(REGEX):
        expression = re.compile(pattern.removeprefix(REGEX))
        is_inside = _bounded(expression.search, f"{setting} got {pattern!r}")
        inside = next((layer.full_name for layer in layers if is_inside(layer.full_name)), None)
        first = layers[0].full_name if layers else ""
        hint = f" Write {REGEX}.*{expression.pattern} to match it anywhere." if inside else ""
        return InvalidSetting(f"{message} It must match from the start of a full name, such as {inside or first}.{hint}")
    ends: Mapping[str, None] = dict.fromkeys(
        end
        for layer in layers
        for end in (layer.name.rpartition(".")[2], layer.name, layer.name.partition(".")[0], *sorted(layer.labels))
        if not end.isdigit()
    )
    bare = pattern.strip("*.")
    if close := difflib.get_close_matches(bare, ends):
        return InvalidSetting(f"{message} Did you mean {' or '.join(map(repr, close))}?")
    known = [end for end in ends if "." not in end]
    return InvalidSetting(f"{message} Known: {', '.join(known)}.")
