"""Which pattern each layer gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from sparsellm.data.yaml_files import read_mapping
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.methods import Plan
from sparsellm.models.blocks import Block
from sparsellm.solvers.patterns import Pattern, Unstructured, parse_pattern


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


def uniform_plan(
    blocks: Sequence[Block],
    pattern: Pattern,
    chosen: frozenset[int] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Plan:
    """The same pattern for every chosen layer, checked against every layer's shape.

    chosen: the blocks, by number; all when None. only, skip: layer-name patterns with `*`, against a layer's full name
    ("model.layers.0.mlp.*") or its end ("fc2", "self_attn.*"); skip wins.
    Raises InvalidSetting, naming the layers, where a shape does not divide, a name matches nothing, or nothing is left.
    """
    every = [(block, name) for block in blocks for name in block.layers]
    for wish in (*include, *exclude):
        if not any(_matches(block.full_name(name), wish) for block, name in every):
            ends = {name for _, name in every} | {name.rsplit(".", 1)[-1] for _, name in every}
            raise InvalidSetting(f"No layer matches {wish!r}. {nearest(wish, ends)}")
    plan: Plan = {}
    refused: list[tuple[str, InvalidSetting]] = []
    for block, name in every:
        full = block.full_name(name)
        if chosen is not None and block.index not in chosen:
            continue
        if include and not any(_matches(full, wish) for wish in include):
            continue
        if any(_matches(full, wish) for wish in exclude):
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
        raise InvalidSetting("Nothing is left to prune: `blocks`, `include` and `exclude` together leave out every layer.")
    return plan


def _matches(full: str, wish: str) -> bool:
    """Whether a layer's full name, or the end of it from a dot on, fits a pattern."""
    return fnmatchcase(full, wish) or fnmatchcase(full, f"*.{wish}")


def plan_from_file(path: str | Path, plan: Plan, shapes: Mapping[str, tuple[int, int]], pattern: Pattern) -> Plan:
    """A plan whose layers get the patterns that a YAML file names; the others share what is left of the total.

    The file maps layer names, with `*` as in `include`, to patterns: `"mlp.*": 80%`, `"self_attn.*": "2:4"`; the first that
    matches a layer counts. Layers that it does not name get the one unstructured sparsity that makes the total `pattern`'s,
    exact to one weight. plan: the layers that may be named. shapes: (out, in) of each.
    Raises InvalidSetting for a name that matches no layer, a shape that does not divide, and a total that cannot be reached.
    """
    given = _read_patterns(Path(path))
    for wish in given:
        if not any(_matches(name, wish) for name in plan):
            raise InvalidSetting(f"{path} names {wish!r}, which no pruned layer matches. {nearest(wish, plan)}")
    found: Plan = {}
    for name in plan:
        first = next((wish for wish in given if _matches(name, wish)), None)
        if first is not None:
            found[name] = given[first]
            try:
                given[first].check(shapes[name])
            except InvalidSetting as error:
                raise InvalidSetting(f"{path}, {name}: {error}") from None
    sizes = {name: shapes[name][0] * shapes[name][1] for name in plan}
    total = pattern.count_removed(sum(sizes.values()))
    removed = sum(found[name].count_removed(sizes[name]) for name in found)
    rest = [name for name in plan if name not in found]
    room = sum(sizes[name] for name in rest)
    if not rest and abs(removed - total) > len(found):
        share = 100 * removed / sum(sizes.values())
        raise InvalidSetting(
            f"{path} names every layer and comes to {share:.2f} %, but `sparsity` is {pattern}. Make them agree."
        )
    if rest and not 0 <= total - removed <= room - len(rest):
        raise InvalidSetting(
            f"{path} removes {removed:,} weights of the layers that it names; {pattern} of all is {total:,}, so that "
            f"{total - removed:,} would have to come from the {room:,} weights of {rest[0]}"
            f"{f' and {len(rest) - 1} more' if len(rest) > 1 else ''}. Change the file or `sparsity`."
        )
    for number, name in enumerate(rest):  # cumulative rounding: the layers' counts add up to the total
        before, after = (sum(sizes[other] for other in rest[:count]) for count in (number, number + 1))
        local = (total - removed) * after // room - (total - removed) * before // room
        found[name] = Unstructured(local / sizes[name])
    return {name: found[name] for name in plan}


def _read_patterns(path: Path) -> dict[str, Pattern]:
    """The patterns of an allocation file, by layer-name pattern."""
    content = read_mapping(path, "allocation", as_written=True)  # 2:4 is text
    if not all(isinstance(value, str) for value in content.values()):
        raise InvalidSetting(f'The allocation {path} must hold `layer: pattern` lines, such as "mlp.*: 80%".')
    found: dict[str, Pattern] = {}
    for name, value in content.items():
        try:
            found[str(name)] = parse_pattern(value)
        except InvalidSetting as error:
            raise InvalidSetting(f"The allocation {path}, {name}: {error}") from None
    return found
