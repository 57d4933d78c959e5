"""Which pattern each layer gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from sparsellm.blocks import Block
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.methods import Plan
from sparsellm.patterns import Pattern


def select_blocks(text: str, count: int) -> frozenset[int]:
    """The blocks that a text means: "all", "none", "first-half", a range "0:12" (12 not included), or a list "3,5".

    count: how many blocks the model has; "first-half" is the first count // 2, as in the paper's tables.
    """
    words = {"all": range(count), "none": range(0), "first-half": range(count // 2)}
    if text in words:
        return frozenset(words[text])
    chosen: set[int] = set()
    for part in text.split(","):
        if match := re.fullmatch(r"\s*(\d*):(\d*)\s*", part):
            start, stop = int(match[1] or 0), int(match[2] or count)
        elif re.fullmatch(r"\s*\d+\s*", part):
            start, stop = int(part), int(part) + 1
        else:
            raise InvalidSetting(f"`blocks` got {text!r}. Write all, first-half, none, a range 0:12, or a list 3,5.")
        if start >= stop or stop > count:
            raise InvalidSetting(f"`blocks` got {text!r}, but the model's {count} blocks are 0 to {count - 1}.")
        chosen.update(range(start, stop))
    return frozenset(chosen)


def uniform(
    blocks: Sequence[Block],
    pattern: Pattern,
    chosen: frozenset[int] | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> Plan:
    """The same pattern for every chosen layer, checked against every layer's shape.

    chosen: the blocks, by number; all when None. only, skip: layer-name patterns with `*`, against a layer's full name
    ("model.layers.0.mlp.*") or its end ("fc2", "self_attn.*"); skip wins.
    Raises InvalidSetting, naming the layers, where a shape does not divide, a name matches nothing, or nothing is left.
    """
    every = [(block, name) for block in blocks for name in block.layers]
    for wish in (*only, *skip):
        if not any(_matches(block.full_name(name), wish) for block, name in every):
            ends = {name for _, name in every} | {name.rsplit(".", 1)[-1] for _, name in every}
            raise InvalidSetting(f"No layer matches {wish!r}. {nearest(wish, ends)}")
    plan: Plan = {}
    refused: list[tuple[str, InvalidSetting]] = []
    for block, name in every:
        full = block.full_name(name)
        if chosen is not None and block.index not in chosen:
            continue
        if only and not any(_matches(full, wish) for wish in only):
            continue
        if any(_matches(full, wish) for wish in skip):
            continue
        layer = block.layer(name)
        try:
            pattern.check((layer.out_features, layer.in_features))
        except InvalidSetting as error:
            refused.append((full, error))
        plan[full] = pattern
    if refused:
        more = f" (and {len(refused) - 1} more layers)" if len(refused) > 1 else ""
        raise InvalidSetting(f"{refused[0][0]}{more}: {refused[0][1]}")
    if not plan:
        raise InvalidSetting("Nothing is left to prune: `blocks`, `only` and `skip` together leave out every layer.")
    return plan


def _matches(full: str, wish: str) -> bool:
    """Whether a layer's full name, or the end of it from a dot on, fits a pattern."""
    return fnmatchcase(full, wish) or fnmatchcase(full, f"*.{wish}")
