"""The methods and solvers that recipes name. The module of one is imported when a recipe names it."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

from sparsellm.methods import BlockMethod
from sparsellm.methods.layerwise import LayerWise
from sparsellm.recipes.own_method import ObjectRecipe
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.selection import select_blocks
from sparsellm.solvers import LayerSolver

SOLVERS = {
    "magnitude": "sparsellm.solvers.scores:Magnitude",
    "wanda": "sparsellm.solvers.scores:Wanda",
    "sparsegpt": "sparsellm.solvers.sparsegpt:SparseGPT",
    "fast-admm": "sparsellm.solvers.fast_admm:FastADMM",
    "alps": "sparsellm.solvers.alps:ALPS",
    "alps-accurate": "sparsellm.solvers.alps:ALPS.accurate",
}
"""Where the layer solvers are, by name; each is also a layer-wise method of that name."""

METHODS_OF_BLOCKS = {
    "sparsellm": "sparsellm.methods.sparsellm:SparseLLM",
    "algorithm 1": "sparsellm.methods.algorithm1:PublishedSparseLLM",
    "true-sequential": "sparsellm.methods.sparsellm:TrueSequential",
}
"""Where the other methods are."""


def solver_named(name: str) -> LayerSolver:
    """The solver of this name, with its default settings."""
    solver: LayerSolver = _imported(SOLVERS[name])()
    return solver


def method_of(recipe: Recipe, blocks: int) -> BlockMethod:
    """Build the pruning method of a recipe for a model with this number of blocks, or take the one that it was given."""
    given = recipe.given if isinstance(recipe, ObjectRecipe) else None
    if isinstance(given, BlockMethod):
        return given
    solver = given or solver_named(recipe.inner_solver if recipe.method == "sparsellm" else recipe.method)
    if recipe.in_float32 and given is None and hasattr(solver, "in_float32"):
        solver = solver.in_float32()
    kind: Any = LayerWise
    settings: dict[str, Any] = {"keep_zeros": recipe.keep_zeros, "after_solve": recipe.after_solve(recipe.pattern)}
    if recipe.method != "sparsellm":
        kind = _imported(METHODS_OF_BLOCKS["true-sequential"]) if recipe.true_sequential else LayerWise
    elif recipe.as_published:
        kind = _imported(METHODS_OF_BLOCKS["algorithm 1"])
        scope = None if recipe.scope in (None, "feedforward") else select_blocks(recipe.scope, blocks)
        settings |= {"epochs": recipe.epochs, "alpha": recipe.alpha, "beta": recipe.beta, "scope": scope}
    else:
        kind = _imported(METHODS_OF_BLOCKS["sparsellm"])
        scope_name = "none" if recipe.resolved_scope == "none" else "feedforward"
        settings |= {"gauss_newton_steps": recipe.gauss_newton_steps, "scope": scope_name}
    method: BlockMethod = kind(solver=solver, **settings)
    return method


def _imported(place: str) -> Any:
    """Import the object at a place, "module:name"."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(module))
