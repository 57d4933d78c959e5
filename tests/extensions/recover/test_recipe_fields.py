"""Bounds of settings stand in their fields, for the command line, Python and YAML alike."""

from __future__ import annotations

from typing import Any

import annotated_types
import pytest

from sparsellm.errors import InvalidSetting
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.recover.recipe_fields import RecoveryFields
from sparsellm.recipes.fields import RecipeFields
from sparsellm.recipes.file import read_recipe, validated
from sparsellm.recipes.recipe import Recipe

FIELDS = RecipeFields.model_fields | RecoveryFields.model_fields
INTEGERS = [name for name, field in FIELDS.items() if field.annotation in (int, int | None)]
NEEDED = {"model": "demo:opt", "calibration": "demo"}


def refused(name: str, value: Any) -> str:
    """The message by which the recipe that has the field refuses a value."""
    of_pruning = name in RecipeFields.model_fields
    kind, needed = (Recipe, NEEDED) if of_pruning else (RecoveryRecipe, {**NEEDED, "pruned": "p"})
    with pytest.raises(InvalidSetting) as refusal:
        validated(kind, {**needed, name: value})
    return str(refusal.value)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_bounded_on_both_sides(name: str) -> None:
    """Without a bound, torch is asked for more than its integers hold, and raises an error of its own."""
    kinds = {type(bound) for bound in FIELDS[name].metadata}
    assert kinds & {annotated_types.Gt, annotated_types.Ge}
    assert kinds & {annotated_types.Lt, annotated_types.Le}
    for value in (2**63, 10**23):
        assert f"`{name}`: input should be less than" in refused(name, value)


def test_true_is_no_number_and_no_name() -> None:
    names = [name for name, field in FIELDS.items() if "bool" not in str(field.annotation)]
    for name in names:
        if name not in ("sparsity", "blocks"):  # texts, which are checked as texts
            assert refused(name, True) == f"`{name}` got true, which is no value of it."
    assert len(names) > 35


def test_switches_are_read() -> None:
    recipe = read_recipe({**NEEDED, "keep_zeros": "yes", "offload": "no", "bos": "no"})
    assert (recipe.keep_zeros, recipe.offload, recipe.bos) == (True, False, "no")
    assert Recipe(**NEEDED, keep_zeros=True).keep_zeros
