"""The plan of a run: the pattern of each layer, from one pattern or from an allocation file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from sparsellm.errors import InvalidSetting
from sparsellm.methods import Plan, StoredPattern
from sparsellm.models.architectures import ROUTERS
from sparsellm.models.blocks import Block
from sparsellm.recipes.selection import HEADS, LayerName, layer_names, matching, name_matcher, other_modules, unmatched
from sparsellm.solvers.patterns import Pattern, Unstructured, parse_pattern
from sparsellm.texts.paths import local_path
from sparsellm.texts.yaml_files import read_mapping


@dataclass(frozen=True)
class PlannedLayer:
    """A linear layer of the blocks as a plan has it.

    Attributes:
        shape: (out, in).
        pattern: Its pattern; None for a layer that stays dense.
        reason: Why it stays dense; empty for a layer of the plan.
    """

    name: str
    shape: tuple[int, int]
    pattern: StoredPattern | None
    reason: str = ""


PLANNED_LAYERS = TypeAdapter(list[PlannedLayer])
"""Converts layers of a plan to JSON-serializable data."""


def list_layers(
    blocks: Sequence[Block],
    pattern: Pattern,
    *,
    chosen: frozenset[int] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[PlannedLayer]:
    """Decide for each linear layer of the blocks whether it gets the pattern, whose fit to the shapes is not checked.

    Arguments as for `uniform_plan`. Modules that are never pruned, such as routers, come after the layers of their block. An
    output head is left out unless `include` names it.

    Raises:
        InvalidSetting: A layer-name pattern is invalid or matches no layer.
    """
    layers = layer_names(blocks)
    never_pruned = other_modules(blocks)
    head = {layer.full_name for layer in layers if layer.block and layer.block.is_head}
    included, excluded = set[str](), set[str]()
    for setting, patterns, names in (("`include`", include, included), ("`exclude`", exclude, excluded)):
        for wildcard in patterns:
            matched = matching(layers, wildcard, setting)
            if setting == "`include`" and matched - head and not any(name in wildcard for name in head):
                matched -= head
            is_match = name_matcher(wildcard, setting)
            if not matched and not (setting == "`exclude`" and any(map(is_match, (*never_pruned, *HEADS)))):
                raise unmatched(wildcard, setting, [layer for layer in layers if layer.full_name not in head])
            names.update(matched)
    result: list[PlannedLayer] = []
    for block in blocks:
        for layer in (layer for layer in layers if layer.block is block and not (block.is_head and head - included)):
            reason = ""
            if chosen is not None and block.index not in chosen and not block.is_head:
                reason = "not in blocks"
            elif layer.full_name in excluded:
                reason = "excluded"
            elif include and layer.full_name not in included:
                reason = "not included"
            result.append(PlannedLayer(layer.full_name, layer.shape, None if reason else pattern, reason))
        prefix = f"{block.name}."
        result += [
            PlannedLayer(name, shape, None, "router" if set(name.split(".")) & set(ROUTERS) else "not a known layer")
            for name, shape in never_pruned.items()
            if shape and name.startswith(prefix)
        ]
    return result


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
        blocks: The blocks of the model, with the output head after them if it may be pruned: `blocks_and_head`.
        chosen: Numbers of the blocks to prune; None for all. The head is in none of them.
        include: Layer-name patterns (`sparsellm.recipes.selection`) of the layers to prune; empty for all in the blocks. The
            head is pruned only where one of them matches it and no other layer, or has its name in it.
        exclude: Layer-name patterns of layers to leave dense; they override `include`, and may match modules that are never
            pruned, such as routers and the head.

    Raises:
        InvalidSetting: The shape of a layer does not fit the pattern, a name matches no layer, or no layer is left.
    """
    layers = list_layers(blocks, pattern, chosen=chosen, include=include, exclude=exclude)
    plan: Plan = {layer.name: pattern for layer in layers if layer.pattern is not None}
    errors: list[tuple[str, InvalidSetting]] = []
    for layer in (layer for layer in layers if layer.pattern is not None):
        try:
            pattern.check(layer.shape)
        except InvalidSetting as error:
            errors.append((layer.name, error))
    if errors:
        more = f" (and {len(errors) - 1} more layers)" if len(errors) > 1 else ""
        raise InvalidSetting(f"{errors[0][0]}{more}: {errors[0][1]}")
    if not plan:
        raise InvalidSetting("Nothing is left to prune: `blocks`, `include` and `exclude` together leave out every layer.")
    return plan


def plan_from_file(path: str | Path, plan: Plan, layers: Sequence[LayerName], pattern: Pattern) -> Plan:
    """Read the patterns of a plan from a YAML file.

    The file maps layer-name patterns, as in `uniform_plan`, to patterns: `"mlp.*": 80%`, `"self_attn.*": "2:4"`. The first
    entry that matches a layer applies. The remaining layers get one unstructured sparsity, chosen so that as many weights are
    removed in total as by `pattern`.

    Args:
        plan: The layers to prune; their patterns are ignored.
        layers: The layers of the model, with those of the plan among them.
        pattern: The pattern whose sparsity sets the total.

    Raises:
        InvalidSetting: A name matches no layer, the shape of a layer does not fit its pattern, or the total cannot be reached.
    """
    patterns = _read_patterns(local_path(path))
    planned = [layer for layer in layers if layer.full_name in plan]
    shapes = {layer.full_name: layer.shape for layer in planned}
    matches = {wildcard: matching(planned, wildcard, str(path)) for wildcard in patterns}
    for wildcard, names in matches.items():
        if not names:
            raise unmatched(wildcard, str(path), planned)
    result: Plan = {}
    for name in plan:
        first = next((wildcard for wildcard in patterns if name in matches[wildcard]), None)
        if first is not None:
            result[name] = patterns[first]
            try:
                patterns[first].check(shapes[name])
            except InvalidSetting as error:
                raise InvalidSetting(f"{path}, {name}: {error}") from None
    sizes = {name: shapes[name][0] * shapes[name][1] for name in plan}
    together = round(pattern.sparsity * sum(sizes.values()))
    total = together if pattern.is_shareable else sum(pattern.count_removed(shape) for shape in shapes.values())
    removed = sum(result[name].count_removed(shapes[name]) for name in result)
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
    content = read_mapping(path, "allocation")
    patterns: dict[str, Pattern] = {}
    for name, value in content.items():
        try:
            patterns[str(name)] = parse_pattern(value)
        except InvalidSetting as error:
            raise InvalidSetting(f"The allocation {path}, {name}: {error}") from None
    return patterns
