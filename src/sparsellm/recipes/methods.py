"""The method of a recipe."""

from __future__ import annotations

from sparsellm.methods import BlockMethod
from sparsellm.methods.layerwise import LayerWise
from sparsellm.recipes.own_method import ObjectRecipe
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.registry import build


def method_of(recipe: Recipe, blocks: int) -> BlockMethod:
    """Build the pruning method of a recipe for a model with this number of blocks, or take the one that it was given."""
    after_solve = recipe.after_solve(recipe.pattern)
    if isinstance(recipe, ObjectRecipe) and recipe.given is not None:
        given = recipe.given
        return given if isinstance(given, BlockMethod) else LayerWise(given, recipe.keep_zeros, after_solve)
    return build(
        recipe.method,
        recipe.resolved_settings,
        depth=blocks,
        keep_zeros=recipe.keep_zeros,
        after_solve=after_solve,
        in_float32=recipe.in_float32,
    )
