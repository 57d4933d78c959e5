"""The plan of a run: the pattern of each layer, from one pattern or from an allocation file."""

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
    """Parse a selection of blocks.

    Args:
        text: "all", "none", "first-half", or a list of numbers and half-open ranges such as "0:12,15". "first-half" is the
            first `count // 2` blocks, as in the paper's tables.
        count: Number of blocks of the model.

    Raises:
        InvalidSetting: The text is malformed, or holds an empty range or a block that the model does not have.
    """
    named = {"all": range(count), "none": range(0), "first-half": range(count // 2)}
    if text in named:
        return frozenset(named[text])
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
    *,
    chosen: frozenset[int] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Plan:
    """Give the same pattern to every chosen layer.

    Args:
        blocks: The blocks of the model.
        pattern: The pattern.
        chosen: Numbers of the blocks to prune; None for all.
        include: Layer-name patterns with `*`, compared with a layer's full name ("model.layers.0.mlp.*") or its end ("fc2",
            "self_attn.*"); empty for all layers.
        exclude: Layer-name patterns of layers to leave dense; they override `include`.

    Raises:
        InvalidSetting: The shape of a layer does not fit the pattern, a name matches no layer, or no layer is left.
    """
    layers = [(block, name) for block in blocks for name in block.layers]
    for wildcard in (*include, *exclude):
        if not any(_matches(block.full_name(name), wildcard) for block, name in layers):
            ends = {name for _, name in layers} | {name.rsplit(".", 1)[-1] for _, name in layers}
            raise InvalidSetting(f"No layer matches {wildcard!r}. {nearest(wildcard, ends)}")
    plan: Plan = {}
    errors: list[tuple[str, InvalidSetting]] = []
    for block, name in layers:
        full_name = block.full_name(name)
        if chosen is not None and block.index not in chosen:
            continue
        if include and not any(_matches(full_name, wildcard) for wildcard in include):
            continue
        if any(_matches(full_name, wildcard) for wildcard in exclude):
            continue
        layer = block.layer(name)
        try:
            pattern.check((layer.out_features, layer.in_features))
        except InvalidSetting as error:
            errors.append((full_name, error))
        plan[full_name] = pattern
    if errors:
        more = f" (and {len(errors) - 1} more layers)" if len(errors) > 1 else ""
        raise InvalidSetting(f"{errors[0][0]}{more}: {errors[0][1]}")
    if not plan:
        raise InvalidSetting("Nothing is left to prune: `blocks`, `include` and `exclude` together leave out every layer.")
    return plan


def _matches(full_name: str, wildcard: str) -> bool:
    """Whether a layer's full name, or the end of it after a dot, matches a layer-name pattern."""
    return fnmatchcase(full_name, wildcard) or fnmatchcase(full_name, f"*.{wildcard}")


def plan_from_file(path: str | Path, plan: Plan, shapes: Mapping[str, tuple[int, int]], pattern: Pattern) -> Plan:
    """Read the patterns of a plan from a YAML file.

    The file maps layer names, with `*` as in `uniform_plan`, to patterns: `"mlp.*": 80%`, `"self_attn.*": "2:4"`. The first
    entry that matches a layer applies. The remaining layers get one unstructured sparsity, chosen so that as many weights are
    removed in total as by `pattern`.

    Args:
        path: The file.
        plan: The layers to prune; their patterns are ignored.
        shapes: Shape (out, in) of each layer.
        pattern: The pattern whose sparsity sets the total.

    Raises:
        InvalidSetting: A name matches no layer, the shape of a layer does not fit its pattern, or the total cannot be reached.
    """
    patterns = _read_patterns(Path(path))
    for wildcard in patterns:
        if not any(_matches(name, wildcard) for name in plan):
            raise InvalidSetting(f"{path} names {wildcard!r}, which no pruned layer matches. {nearest(wildcard, plan)}")
    result: Plan = {}
    for name in plan:
        first = next((wildcard for wildcard in patterns if _matches(name, wildcard)), None)
        if first is not None:
            result[name] = patterns[first]
            try:
                patterns[first].check(shapes[name])
            except InvalidSetting as error:
                raise InvalidSetting(f"{path}, {name}: {error}") from None
    sizes = {name: shapes[name][0] * shapes[name][1] for name in plan}
    total = pattern.count_removed(sum(sizes.values()))
    removed = sum(result[name].count_removed(sizes[name]) for name in result)
    rest = [name for name in plan if name not in result]
    rest_size = sum(sizes[name] for name in rest)
    if not rest and abs(removed - total) > len(result):
        share = 100 * removed / sum(sizes.values())
        raise InvalidSetting(
            f"{path} names every layer and comes to {share:.2f} %, but `sparsity` is {pattern}. Make them agree."
        )
    if rest and not 0 <= total - removed <= rest_size - len(rest):
        raise InvalidSetting(
            f"{path} removes {removed:,} weights of the layers that it names; {pattern} of all is {total:,}, so that "
            f"{total - removed:,} would have to come from the {rest_size:,} weights of {rest[0]}"
            f"{f' and {len(rest) - 1} more' if len(rest) > 1 else ''}. Change the file or `sparsity`."
        )
    for number, name in enumerate(rest):  # cumulative rounding: the layers' counts add up to the total
        before, after = (sum(sizes[layer] for layer in rest[:stop]) for stop in (number, number + 1))
        count = (total - removed) * after // rest_size - (total - removed) * before // rest_size
        result[name] = Unstructured(count / sizes[name])
    return {name: result[name] for name in plan}


def _read_patterns(path: Path) -> dict[str, Pattern]:
    """Read an allocation file: patterns by layer-name pattern."""
    content = read_mapping(path, "allocation", as_written=True)  # 2:4 stays text
    if not all(isinstance(value, str) for value in content.values()):
        raise InvalidSetting(f'The allocation {path} must hold `layer: pattern` lines, such as "mlp.*: 80%".')
    patterns: dict[str, Pattern] = {}
    for name, value in content.items():
        try:
            patterns[str(name)] = parse_pattern(value)
        except InvalidSetting as error:
            raise InvalidSetting(f"The allocation {path}, {name}: {error}") from None
    return patterns
