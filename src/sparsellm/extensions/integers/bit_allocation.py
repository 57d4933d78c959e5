"""The allocation rule of `bits`: a total of stored bits is shared out among the layers, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparsellm.activations.fisher_diagonal import weight_costs
from sparsellm.errors import InvalidSetting
from sparsellm.extensions.integers.bit_budget import BitBudget, check_budget, shapes_of, stored_together
from sparsellm.extensions.integers.error_curves import CURVE_TOKENS, MEASURED_ROWS, ErrorCurve, measure_errors
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.recipe_fields import IntegerFields
from sparsellm.extensions.integers.rounding import IntegerValues
from sparsellm.methods import BlockResult, BlockShapes, Memory, Plan
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.journal import Journal
from sparsellm.pipeline.cached_allocation import Allocated, keep_factors, plan_digest, read_factors
from sparsellm.pipeline.stage_memory import removal_memory
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.fast_admm import FastADMM


class BitAllocation:
    """The rule: each layer's density and integers, as `sparsellm.extensions.integers.bit_budget` chooses them."""

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
