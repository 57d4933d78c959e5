r"""Bit allocation: the density and the bits of the values of each layer, for a total number of stored bits.

Each layer offers formats, a width of integers and a density, each with a cost in bits and an error (`integers.error_curves`).
A Lagrange multiplier divides the total (Shoham & Gersho, Efficient bit allocation for an arbitrary set of quantizers, IEEE
TASSP 1988); what it leaves is spent by exchanges between two layers, and at last on more kept weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.activations.fisher_diagonal import weight_costs
from sparsellm.errors import InvalidSetting
from sparsellm.extensions.integers.error_curves import CURVE_TOKENS, DENSITIES, MEASURED_ROWS, ErrorCurve, measure_errors
from sparsellm.extensions.integers.formats import WIDTHS, IntegerFormat
from sparsellm.extensions.integers.quantization import IntegerValues
from sparsellm.extensions.integers.recipe_fields import IntegerFields
from sparsellm.methods import BlockResult, BlockShapes, LayerResult, Memory, Plan
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.journal import Journal
from sparsellm.pipeline.cached_allocation import Allocated, keep_factors, plan_digest, read_factors
from sparsellm.pipeline.stage_memory import removal_memory
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import Unstructured

FINE = np.concatenate([np.geomspace(DENSITIES[0], 0.99, 200), [1.0]])
"""Densities among which a layer's is chosen, before the total is made exact."""

PADDING_BITS = 32
"""Bits that a layer's parts may take besides, since each begins with a byte."""

EXCHANGED, PARTNERS = 32, 256
"""Formats are exchanged between so many of the largest layers and so many others. What is left of the total is small beside the
rest."""

EXCHANGE_ROUNDS = 20
"""Most rounds of exchanges; usually two or three are enough."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerFormat:
    """How a layer is stored.

    Attributes:
        shape: (out, in).
        kept: Number of weights that are kept.
        format: The format of its integers.
    """

    shape: tuple[int, int]
    kept: int
    format: IntegerFormat

    @classmethod
    def of(cls, shape: tuple[int, int], bits: int, density: float) -> LayerFormat:
        """The format with the default group size, of all weights where fewer of them with a mask would take more."""
        size = math.prod(shape)
        return cls(shape, size, IntegerFormat.default(bits, density)).with_kept(math.floor(density * size))

    def with_kept(self, kept: int) -> LayerFormat:
        """The same format with so many kept weights, or all where these do not take more."""
        fewer, every = replace(self, kept=kept), replace(self, kept=math.prod(self.shape))
        return fewer if kept < every.kept and fewer.stored_bits < every.stored_bits else every

    @property
    def pattern(self) -> Unstructured:
        """The sparsity."""
        return Unstructured(1 - self.kept / math.prod(self.shape))

    @property
    def stored_bits(self) -> float:
        """Most bits of the stored form: mask, values, scales and what fills the last bytes.

        Kept weights that round to 0 are not stored, and the mask of weights that are removed side by side takes less.
        """
        size = math.prod(self.shape)
        return size * self.format.bits_per_weight(self.kept / size, self.shape[1]) + PADDING_BITS


@dataclass(frozen=True, eq=False)
class _Unit:
    """Layers of one stored tensor, which have one format: those that no other one beats in both cost and error."""

    names: tuple[str, ...]
    formats: list[LayerFormat]
    costs: Floats  # bits, increasing
    errors: Floats  # nats per token, decreasing

    @classmethod
    def of(cls, names: tuple[str, ...], shapes: Mapping[str, tuple[int, int]], curves: Mapping[str, ErrorCurve]) -> _Unit:
        """The unit of some layers, whose rows are stored together."""
        shape = sum(shapes[name][0] for name in names), shapes[names[0]][1]
        formats = [LayerFormat.of(shape, bits, density) for bits in WIDTHS for density in FINE]
        errors = [sum(_error_at_fine(curves[name][number]) for name in names) for number in range(len(WIDTHS))]
        costs, joined = np.array([layer.stored_bits for layer in formats]), np.concatenate(errors)
        order = np.lexsort((joined, costs))
        best = np.minimum.accumulate(joined[order])
        frontier = order[np.concatenate([[True], best[1:] < best[:-1]])]
        return cls(names, [formats[number] for number in frontier], costs[frontier], joined[frontier])

    def cheapest_at(self, multiplier: float) -> int:
        """The format with the least sum of error and cost times the multiplier."""
        return int((self.errors + multiplier * self.costs).argmin())

    def best_within(self, costs: Floats) -> NDArray[np.intp]:
        """The format with the least error for at most each of these costs; -1 where none is so cheap."""
        return np.searchsorted(self.costs, costs, side="right") - 1


def _error_at_fine(measured: list[float]) -> Floats:
    """The errors at `FINE` from those at `DENSITIES`, linear between logarithms."""
    logs = np.log(np.maximum.accumulate(np.maximum(measured, 1e-30)[::-1])[::-1])  # they do not rise with the density
    interpolated: Floats = np.exp(np.interp(np.log(FINE), np.log(DENSITIES), logs))
    return interpolated


class BitBudget:
    """A total number of bits that the layers of a run share, and what each of them gets.

    What a layer takes is known once it is rounded: never more than its format says, and up to some percent less. `spend`
    therefore shares what is left among the layers that follow.

    Args:
        curves: From `measure_errors`.
        shapes: (out, in) of each layer.
        bits: Bits a weight, within `bit_range`.
        together: Layers that are stored in one tensor, which get the same format; other layers have their own.

    Attributes:
        formats: The format of each layer.
        left: Bits that are left for the layers that are not pruned yet.
    """

    def __init__(
        self,
        curves: Mapping[str, ErrorCurve],
        shapes: Mapping[str, tuple[int, int]],
        bits: float,
        *,
        together: Iterable[Collection[str]] = (),
    ) -> None:
        self._shapes, groups = shapes, [tuple(names) for names in together]
        grouped = {name for names in groups for name in names}
        groups += [(name,) for name in shapes if name not in grouped]
        self._units = [_Unit.of(names, shapes, curves) for names in groups]
        self.left = bits * sum(map(math.prod, shapes.values()))
        self.formats: dict[str, LayerFormat] = {}
        self._share()

    def spend(self, layers: Iterable[LayerResult]) -> None:
        """Subtract what rounded layers take, and share the rest among those that are left.

        Args:
            layers: With their `bits_per_weight`; all layers of one tensor.
        """
        names = set()
        for layer in layers:
            names.add(layer.name)
            self.left -= (layer.bits_per_weight or 0.0) * math.prod(layer.shape)
        self._units = [unit for unit in self._units if names.isdisjoint(unit.names)]
        self._share()

    def _share(self) -> None:
        """Choose the format of each unit that is left, with a small sum of errors within the bits that are left."""
        chosen = _choose(self._units, self.left)
        stored = _keep_more([x.formats[number] for x, number in zip(self._units, chosen, strict=True)], self.left)
        for unit, each in zip(self._units, stored, strict=True):
            for name in unit.names:  # one density, rounded down
                shape, size = self._shapes[name], math.prod(self._shapes[name])
                self.formats[name] = replace(each, shape=shape, kept=each.kept * size // math.prod(each.shape))


def _choose(units: Sequence[_Unit], total: float) -> list[int]:
    """Choose a format of each unit: by a multiplier from bisection, then by exchanges."""
    low, high, chosen = -100.0, 100.0, [0] * len(units)
    for _ in range(100):
        middle = (low + high) / 2
        picked = [unit.cheapest_at(math.exp(middle)) for unit in units]
        fits = _cost(units, picked) <= total
        low, high, chosen = (low, middle, picked) if fits else (middle, high, chosen)
    by_size = sorted(range(len(units)), key=lambda number: -units[number].costs[-1])
    for _ in range(EXCHANGE_ROUNDS):
        before, rest = list(chosen), total - _cost(units, chosen)
        for first in by_size[:EXCHANGED]:
            for second in by_size[:PARTNERS]:
                rest = _exchange(units, chosen, rest, first=first, second=second)
        if chosen == before:
            break
    return chosen


def _cost(units: Sequence[_Unit], chosen: Sequence[int]) -> float:
    """Bits of all units."""
    return float(sum(unit.costs[number] for unit, number in zip(units, chosen, strict=True)))


def _exchange(units: Sequence[_Unit], chosen: list[int], rest: float, *, first: int, second: int) -> float:
    """Choose the best formats of two units, or one, within their bits and the rest of the total; return the new rest."""
    one, other = units[first], units[second]
    room = rest + one.costs[chosen[first]]
    if first == second:
        chosen[first] = max(int(one.best_within(np.array([room]))[0]), chosen[first])
        return float(room - one.costs[chosen[first]])
    room += other.costs[chosen[second]]
    numbers = other.best_within(room - one.costs)
    errors = np.where(numbers >= 0, one.errors + other.errors[numbers], np.inf)
    best = int(errors.argmin())
    if errors[best] < (1 - 1e-9) * (one.errors[chosen[first]] + other.errors[chosen[second]]):
        chosen[first], chosen[second] = best, int(numbers[best])
    return float(room - one.costs[chosen[first]] - other.costs[chosen[second]])


def _keep_more(formats: list[LayerFormat], total: float) -> list[LayerFormat]:
    """Raise the densities of pruned layers by a common factor, then those of single layers, up to the total."""

    def raised(factor: float) -> list[LayerFormat]:
        return [layer.with_kept(math.floor(factor * layer.kept)) for layer in formats]

    low, high = 1.0, 1 / DENSITIES[0]
    for _ in range(40):
        middle = (low + high) / 2
        fits = sum(layer.stored_bits for layer in raised(middle)) <= total
        low, high = (middle, high) if fits else (low, middle)
    formats = raised(low)
    rest = total - sum(layer.stored_bits for layer in formats)
    for number, layer in enumerate(formats):
        if layer.kept < math.prod(layer.shape):
            more = math.floor(max(rest, 0.0) / (layer.format.bits + 4))  # a kept weight adds at most four bits to the mask
            formats[number] = layer.with_kept(layer.kept + more)
            rest -= formats[number].stored_bits - layer.stored_bits
    return formats


def bit_range(shapes: Mapping[str, tuple[int, int]]) -> tuple[float, float]:
    """The least and the most bits a weight that layers of these shapes can have."""
    least, most = (
        sum(LayerFormat.of(shape, bits, density).stored_bits for shape in shapes.values())
        for bits, density in ((WIDTHS[0], DENSITIES[0]), (WIDTHS[-1], 1.0))
    )
    size = sum(map(math.prod, shapes.values()))
    return least / size, most / size


def shapes_of(blocks: Sequence[Block], plan: Plan) -> dict[str, tuple[int, int]]:
    """The (out, in) of each planned layer."""
    layers = {block.full_name(name): layer for block in blocks for name, layer in block.layers.items()}
    return {name: (layers[name].out_features, layers[name].in_features) for name in plan}


def stored_together(blocks: Sequence[Block], plan: Plan) -> list[tuple[str, ...]]:
    """The planned layers of each parameter that holds several.

    Raises:
        InvalidSetting: Some layers of a parameter are planned and others are not, so that it has no integers.
    """
    result = []
    for block in blocks:
        parameters: dict[str, list[str]] = {}
        for name in block.layers:
            parameters.setdefault(block.parameter(name), []).append(block.full_name(name))
        for names in parameters.values():
            planned = tuple(name for name in names if name in plan)
            if planned and len(planned) < len(names):
                left_out = next(name for name in names if name not in plan)
                raise InvalidSetting(
                    f"{planned[0]} and {left_out} are stored in one tensor, so that with `bits` both are rounded or neither. "
                    "Change `include` or `exclude`."
                )
            if len(planned) > 1:
                result.append(planned)
    return result


def check_budget(budget: float, blocks: Sequence[Block], plan: Plan) -> None:
    """Raise InvalidSetting for bits a weight that the planned layers cannot have, and for a planned output head."""
    if any(block.is_head and block.full_name(name) in plan for block in blocks for name in block.layers):
        raise InvalidSetting("`bits` are shared out among the layers of the blocks: leave the output head out of `include`.")
    stored_together(blocks, plan)
    least, most = bit_range(shapes_of(blocks, plan))
    if not least <= budget <= most:
        least, most = math.ceil(100 * least) / 100, math.floor(100 * most) / 100
        raise InvalidSetting(
            f"`bits` must be between {least:g} and {most:g} for the layers of this model, got {budget:g}: masks and scales "
            "take bits too, and 8 bits a value are the most."
        )


class BitAllocation:
    """The rule: each layer's density and integers, as `BitBudget` chooses them."""

    def __init__(self, recipe: Recipe) -> None:
        fields: object = recipe  # which has the fields of all extensions
        if not isinstance(fields, IntegerFields) or fields.bits is None:
            raise InvalidSetting("`allocation` bits needs the number of bits a weight. Pass `bits` in place of it.")
        self._bits = fields.bits

    def check(self, blocks: Sequence[Block], plan: Plan) -> None:
        """Raise InvalidSetting for bits that the planned layers cannot have."""
        check_budget(self._bits, blocks, plan)

    def memory(self, shapes: BlockShapes, model: float) -> Memory:
        """Gradients as of `fisher`, then a pass with a Gram matrix for each group of layers, and solves of some rows."""
        gradients = removal_memory(shapes, model)
        rows = [(min(out, MEASURED_ROWS), into) for out, into in shapes.layers]
        block = LayerWise(FastADMM()).block_memory(replace(shapes, layers=rows, tokens=min(shapes.tokens, CURVE_TOKENS)))
        return Memory(max(gradients.peak, model + block.peak), max(gradients.lists, block.lists, key=sum))

    def allocate(self, loaded: LoadedModel, batches: Sequence[Tensor], plan: Plan, cache: Journal | None) -> BitsAllocated:
        """Allocate by error curves that are measured or in the cache; the Fisher factors weight the errors."""
        fact, factors = f"errors-{plan_digest(plan)}", read_factors(plan, cache)
        curves: dict[str, ErrorCurve] | None = cache.fact(fact) if cache else None
        if not factors:
            for _ in weight_costs(loaded, batches, plan, factors=factors):
                pass
            if cache:
                keep_factors(plan, factors, cache)
        if curves is None:
            curves = measure_errors(loaded, batches, plan, factors)
            if cache:
                cache.store_fact(fact, curves)
        blocks = blocks_of(loaded.model)
        together = stored_together(blocks, plan)
        return BitsAllocated.of(dict(plan), BitBudget(curves, shapes_of(blocks, plan), self._bits, together=together))


@dataclass(frozen=True, eq=False, kw_only=True)
class BitsAllocated(Allocated):
    """The patterns and integer formats that the bits are shared out as.

    Attributes:
        budget: The bits, which set the patterns.
    """

    budget: BitBudget
    _formats: dict[str, IntegerFormat]

    @classmethod
    def of(cls, plan: Plan, budget: BitBudget) -> BitsAllocated:
        """Share out a budget among the layers of a plan, whose patterns change."""
        formats: dict[str, IntegerFormat] = {}
        allocated = cls(plan=plan, after_solve=IntegerValues(by_layer=formats), budget=budget, _formats=formats)
        allocated._update()
        return allocated

    def spend(self, result: BlockResult, block: Block) -> None:
        """Share what a finished block leaves of the bits among the blocks that follow: plan and integers change.

        A layer that is rounded later counts with what its integers would take now, which is not less.
        """
        weights = {block.full_name(name): layer.weight for name, layer in block.layers.items()}
        self.budget.spend(
            layer
            if layer.bits_per_weight is not None
            else replace(layer, bits_per_weight=self._formats[layer.name].packed_bits(weights[layer.name]))
            for layer in result.layers
        )
        self._update()

    def _update(self) -> None:
        """Write the formats of the budget into the plan and the integers, which the method reads block by block."""
        for name, layer in self.budget.formats.items():
            self.plan[name], self._formats[name] = layer.pattern, layer.format
