"""The methods and solvers that recipes name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sparsellm.methods import BlockMethod
from sparsellm.methods.algorithm1 import PublishedSparseLLM
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.pipeline.own_method import ObjectRecipe
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.selection import select_blocks
from sparsellm.solvers import LayerSolver, Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.sparsegpt import SparseGPT

SOLVERS: dict[str, Callable[[], LayerSolver]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "sparsegpt": SparseGPT,
    "fast-admm": FastADMM,
    "alps": ALPS,
    "alps-accurate": ALPS.accurate,
}
"""Layer solvers by name; each is also a layer-wise method of that name."""


def method_of(recipe: Recipe, blocks: int) -> BlockMethod:
    """Build the pruning method of a recipe for a model with this number of blocks, or take the one that it was given."""
    given = recipe.given if isinstance(recipe, ObjectRecipe) else None
    if isinstance(given, BlockMethod):
        return given
    solver = given or SOLVERS[recipe.inner_solver if recipe.method == "sparsellm" else recipe.method]()
    if recipe.in_float32 and given is None:
        solver = _in_float32(solver)
    after_solve = recipe.after_solve(recipe.pattern)
    if recipe.method != "sparsellm":
        layerwise = TrueSequential if recipe.true_sequential else LayerWise
        return layerwise(solver, recipe.keep_zeros, after_solve)
    if recipe.as_published:
        scope = None if recipe.scope in (None, "feedforward") else select_blocks(recipe.scope, blocks)
        return PublishedSparseLLM(
            solver, recipe.epochs, recipe.alpha, recipe.beta, scope=scope, keep_zeros=recipe.keep_zeros, after_solve=after_solve
        )
    return SparseLLM(
        solver=solver,
        gauss_newton_steps=recipe.gauss_newton_steps,
        scope="none" if recipe.resolved_scope == "none" else "feedforward",
        keep_zeros=recipe.keep_zeros,
        after_solve=after_solve,
    )


def _in_float32(solver: LayerSolver) -> LayerSolver:
    """A solver without products in bfloat16."""
    if isinstance(solver, ALPS) and solver.with_curvature:
        return replace(solver, with_curvature=replace(solver.with_curvature, low_precision=False))
    return replace(solver, low_precision=False) if isinstance(solver, FastADMM) else solver
