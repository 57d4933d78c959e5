"""The allocation of sparsity or bits to the layers of a run, with what was measured on the dense model in the run's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparsellm.activations.fisher_diagonal import FisherFactors, weight_costs
from sparsellm.allocation.bits import BitBudget, shapes_of, stored_together
from sparsellm.allocation.error_curves import ErrorCurve, measure_errors
from sparsellm.allocation.rules import allocate
from sparsellm.extensions.integers.rounding import IntegerValues
from sparsellm.methods import BlockResult, Plan
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.recipe import Recipe
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.quantization import packed_bits


@dataclass(frozen=True, eq=False)
class Allocated:
    """The sparsities, or integer formats, that a rule gives the layers.

    Attributes:
        plan: The pattern of each layer.
        budget: The bits that are shared out, which set the patterns; None for rules that share out sparsity.
    """

    plan: Plan
    budget: BitBudget | None = None
    _formats: dict[str, IntegerFormat] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._update()

    @property
    def values(self) -> IntegerValues | None:
        """Each layer's own integers where bits are shared out, else None."""
        return IntegerValues(by_layer=self._formats) if self.budget else None

    def spend(self, result: BlockResult, block: Block) -> None:
        """Share what a finished block leaves of the bits among the blocks that follow: the plan and the values change.

        A layer that is rounded later counts with what its integers would take now, which is not less.
        """
        if self.budget:
            weights = {block.full_name(name): layer.weight for name, layer in block.layers.items()}
            self.budget.spend(
                layer
                if layer.bits_per_weight is not None
                else replace(layer, bits_per_weight=packed_bits(weights[layer.name], self._formats[layer.name]))
                for layer in result.layers
            )
            self._update()

    def _update(self) -> None:
        """Write the formats of the budget into the plan and the values, which the method reads block by block."""
        for name, layer in self.budget.formats.items() if self.budget else ():
            self.plan[name], self._formats[name] = layer.pattern, layer.format


def cached_allocation(
    recipe: Recipe, loaded: LoadedModel, batches: Sequence[Tensor], *, plan: Plan, cache: Journal | None
) -> Allocated:
    """Allocate sparsity, or bits, by the recipe's rule, with what is in the cache already.

    Args:
        plan: The layers, with the sparsity to share out; of a recipe with `bits` without one.
    """
    if recipe.bits is not None:
        return _allocate_bits(recipe.bits, loaded, batches, plan=plan, cache=cache)
    layers = f"blocks {recipe.blocks}, include {recipe.include}, exclude {recipe.exclude}"
    fact = f"shares by {recipe.allocation_rule} of {recipe.sparsity}, {layers}"
    if cache and (sparsities := cache.fact(fact)) is not None:
        return Allocated({name: Unstructured(sparsity) for name, sparsity in sparsities.items()})
    factors = _read_factors(plan, cache)
    is_stored = bool(factors)
    allocated = allocate(recipe.allocation_rule, loaded, batches, plan, factors=factors, cache=cache)
    if cache:
        if factors and not is_stored:
            _keep_factors(plan, factors, cache)
        cache.store_fact(fact, {name: pattern.sparsity for name, pattern in allocated.items()})
    return Allocated(allocated)


def _allocate_bits(
    bits: float, loaded: LoadedModel, batches: Sequence[Tensor], *, plan: Plan, cache: Journal | None
) -> Allocated:
    """Allocate the bits by error curves that are measured or in the cache; the Fisher factors weight the errors."""
    fact, factors = f"errors-{_digest(plan)}", _read_factors(plan, cache)
    curves: dict[str, ErrorCurve] | None = cache.fact(fact) if cache else None
    if not factors:
        for _ in weight_costs(loaded, batches, plan, factors=factors):
            pass
        if cache:
            _keep_factors(plan, factors, cache)
    if curves is None:
        curves = measure_errors(loaded, batches, plan, factors)
        if cache:
            cache.store_fact(fact, curves)
    blocks = blocks_of(loaded.model)
    together = stored_together(blocks, plan)
    return Allocated(dict(plan), BitBudget(curves, shapes_of(blocks, plan), bits, together=together))


def _read_factors(plan: Plan, cache: Journal | None) -> dict[str, FisherFactors]:
    """The Fisher factors of the planned layers from the cache; empty if it has none."""
    stored = (cache.tensors(f"factors-{_digest(plan)}") if cache else None) or {}
    return {
        name: FisherFactors(stored[f"{name}/gradients"], stored[f"{name}/inputs"], stored[f"{name}/routed"].item())
        for name in plan
        if f"{name}/gradients" in stored
    }


def _keep_factors(plan: Plan, factors: Mapping[str, FisherFactors], cache: Journal) -> None:
    """Store the Fisher factors of the planned layers."""
    tensors = {
        f"{name}/{attribute}": torch.as_tensor(x, dtype=torch.float64 if attribute == "routed" else None)
        for name, layer_factors in factors.items()
        for attribute, x in vars(layer_factors).items()
    }
    cache.store_tensors(f"factors-{_digest(plan)}", tensors)


def _digest(plan: Plan) -> str:
    """Digest of the names of the planned layers."""
    return hashlib.blake2b(" ".join(plan).encode(), digest_size=8).hexdigest()
