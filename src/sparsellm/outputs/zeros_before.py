"""Notes on a run on a model that has zeros already: how many there were, how many there are, and how to keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsellm.errors import plural
from sparsellm.methods import NOTABLE, BlockMethod, LayerResult, Totals
from sparsellm.models.blocks import Block
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.solvers.linalg import count_zeros


def initial_sparsity(blocks: Sequence[Block]) -> float:
    """The fraction of the weights of all linear layers that are zero, as 0 where there are too few to be reported."""
    weights = [layer.weight for block in blocks for layer in block.layers.values()]
    share = sum(map(count_zeros, weights)) / max(sum(weight.numel() for weight in weights), 1)
    return share if share >= NOTABLE else 0.0


def describe_start(initial: float, totals: Totals) -> str:
    """The state of a model before a run, for tables: dense, or with how many zeros."""
    share = max(initial, totals.sparsity_before)
    return "dense" if share < NOTABLE else f"initial ({100 * share:.2f} % zeros)"


def note_before(recipe: RunRecipe, totals: Totals) -> Iterator[str]:
    """The note before a run on a model that another run has pruned, from the totals of that one's report."""
    if not isinstance(recipe, Recipe):
        return
    if totals.sparsity_of_pruned_layers >= NOTABLE and (advice := _advice(recipe, totals.sparsity_of_pruned_layers)):
        share, layers = f"{100 * totals.sparsity_of_pruned_layers:.2f} %", plural(totals.pruned_layers, "layer")
        yield f"{recipe.model} is pruned already: {share} of the weights in {layers} are zero. {advice}"


def note_after(recipe: RunRecipe, totals: Totals) -> Iterator[str]:
    """The note on zeros that a model had before its pruning, unless they were kept and others added, as was asked for."""
    zeros = totals.before_and_after
    if isinstance(recipe, Recipe) and zeros and (advice := _advice(recipe, totals.sparsity_before)):
        yield f"of the weights in the pruned layers {zeros}. {advice}"


def note_surplus(layers: Sequence[LayerResult]) -> Iterator[str]:
    """Which layers have more zeros than their pattern removes and than they had before, and why that may be."""
    if surplus := [x for x in layers if x.zeros > max(x.zeros_before, x.pattern.count_removed(x.shape[0] * x.shape[1]))]:
        yield (
            f"{len(surplus)} layers have more zeros than requested, {surplus[0].name} first "
            f"({100 * surplus[0].sparsity:.2f} %): inputs are always zero, "
            "some dense weights were zero already, or small weights round to zero in the model's dtype"
        )


def _advice(recipe: Recipe, before: float) -> str:
    """How to keep the zeros of a model, or to get more; empty if the recipe does, or its method cannot."""
    more = f"a sparsity of more than {100 * before:.2f} % to remove more"
    if isinstance(getattr(recipe, "given", None), BlockMethod):
        return ""  # a method of one's own decides itself
    if not recipe.keep_zeros:
        return f"Pass `keep_zeros=True` to keep these zeros, and {more}"
    return "" if recipe.sparsity is None or recipe.pattern.sparsity > before else f"Pass {more}"
