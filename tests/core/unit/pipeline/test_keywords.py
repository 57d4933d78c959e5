"""Fields of a recipe in the docstring of a function, as every version of Python hands it over."""

from __future__ import annotations

import inspect
from typing import Any

from sparsellm.recipes.fields import RecipeFields
from sparsellm.recipes.keyword_types import PruneKeywords
from sparsellm.recipes.keywords import recipe_keywords

DOCSTRING = """Prune.

    Args:
        model: A model.
        **settings: Any other field.

    Returns:
        The result.
    """


def test_a_docstring_with_and_without_its_indentation_becomes_the_same() -> None:
    """Python 3.13 removes the indentation when it compiles; earlier versions leave it to `inspect`."""
    made = []
    for text in (DOCSTRING, inspect.cleandoc(DOCSTRING), inspect.cleandoc(DOCSTRING) + "\n"):

        def function(model: str, **settings: Any) -> None:
            pass

        function.__doc__ = text
        made.append(recipe_keywords(PruneKeywords)(function).__doc__ or "")
    assert made[0] == made[1] == made[2].rstrip()
    lines = made[0].splitlines()
    assert lines[:4] == ["Prune.", "", "Args:", "    model: A model."]
    assert lines[-2:] == ["Returns:", "    The result."]
    assert max(map(len, lines)) <= 123
    words = " ".join(made[0].split())
    fields = {name: field for name, field in RecipeFields.model_fields.items() if name in PruneKeywords.__annotations__}
    assert fields
    for name, field in fields.items():
        assert f" {name}: {field.description}" in words, "broken within a word"
