"""The allocation of a pattern to each layer of a run, with what was measured on the dense model in the run's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsellm.activations.fisher_diagonal import FisherFactors
from sparsellm.allocation.rules import allocate
from sparsellm.extension import find
from sparsellm.methods import AfterSolve, BlockResult, BlockShapes, Memory, Plan
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.journal import Journal
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.patterns import Unstructured


@dataclass(frozen=True, eq=False)
class Allocated:
    """The patterns that a rule gives the layers.

    Attributes:
        plan: The pattern of each layer.
        after_solve: What is done to each solved weight; None for what the recipe says.
    """

    plan: Plan
    after_solve: AfterSolve | None = None

    def spend(self, result: BlockResult, block: Block) -> None:
        """Take note of a finished block; may change the plan of the blocks that follow."""


class Rule(Protocol):
    """An allocation rule that an extension brings."""

    def __init__(self, recipe: Recipe) -> None: ...

    def check(self, blocks: Sequence[Block], plan: Plan) -> None:
        """Raise InvalidSetting if the rule cannot give the layers of a plan what the recipe asks for."""
        ...

    def memory(self, shapes: BlockShapes, model: float) -> Memory:
        """The memory that the rule takes. model: bytes of the weights in memory."""
        ...

    def allocate(self, loaded: LoadedModel, batches: Sequence[Tensor], plan: Plan, cache: Journal | None) -> Allocated:
        """Set the pattern of each layer.

        Args:
            batches: Calibration token ids, each (batch, length) without padding.
            plan: The layers, with the recipe's pattern.
            cache: Holds what is known of the dense model on the calibration sequences.
        """
        ...


def rule_of(recipe: Recipe) -> Rule | None:
    """The recipe's allocation rule, if an extension brings it."""
    kind: type[Rule] | None = find("allocations", recipe.allocation_rule)
    return kind(recipe) if kind else None


def cached_allocation(
    recipe: Recipe, loaded: LoadedModel, batches: Sequence[Tensor], *, plan: Plan, cache: Journal | None
) -> Allocated:
    """Allocate by the recipe's rule, with what is in the cache already.

    Args:
        plan: The layers, with the sparsity to share out.
    """
    if rule := rule_of(recipe):
        return rule.allocate(loaded, batches, plan, cache)
    layers = f"blocks {recipe.blocks}, include {recipe.include}, exclude {recipe.exclude}"
    fact = f"shares by {recipe.allocation_rule} of {recipe.sparsity}, {layers}"
    if cache and (sparsities := cache.fact(fact)) is not None:
        return Allocated({name: Unstructured(sparsity) for name, sparsity in sparsities.items()})
    factors = read_factors(plan, cache)
    is_stored = bool(factors)
    allocated = allocate(recipe.allocation_rule, loaded, batches, plan, factors=factors, cache=cache)
    if cache:
        if factors and not is_stored:
            keep_factors(plan, factors, cache)
        cache.store_fact(fact, {name: pattern.sparsity for name, pattern in allocated.items()})
    return Allocated(allocated)


def read_factors(plan: Plan, cache: Journal | None) -> dict[str, FisherFactors]:
    """The Fisher factors of the planned layers from the cache; empty if it has none."""
    stored = (cache.tensors(f"factors-{plan_digest(plan)}") if cache else None) or {}
    return {
        name: FisherFactors(stored[f"{name}/gradients"], stored[f"{name}/inputs"], stored[f"{name}/routed"].item())
        for name in plan
        if f"{name}/gradients" in stored
    }


def keep_factors(plan: Plan, factors: Mapping[str, FisherFactors], cache: Journal) -> None:
    """Store the Fisher factors of the planned layers."""
    tensors = {
        f"{name}/{attribute}": torch.as_tensor(x, dtype=torch.float64 if attribute == "routed" else None)
        for name, layer_factors in factors.items()
        for attribute, x in vars(layer_factors).items()
    }
    cache.store_tensors(f"factors-{plan_digest(plan)}", tensors)


def plan_digest(plan: Plan) -> str:
    """Digest of the names of the planned layers."""
    return hashlib.blake2b(" ".join(plan).encode(), digest_size=8).hexdigest()
