"""The perplexity of a model that is loaded, or of a checkpoint, on texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparsellm.blocks import computed_in
from sparsellm.checkpoint import compute_dtype, device_of, open_checkpoint
from sparsellm.evaluation import Perplexity, perplexity
from sparsellm.preparation import read_test, window_length
from sparsellm.recipe_file import read_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measured(model: PreTrainedModel, windows: Tensor, source: str = "") -> Perplexity:
    """A model's perplexity on windows, computed in the dtype that is fast on its device; its own dtype stays."""
    with computed_in(model, compute_dtype(model)):
        return perplexity(model, windows, source)


def measure(
    model: str,
    texts: Sequence[str],
    field: str | None = None,
    length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, dict[str, Any]]:
    """The perplexity of a checkpoint on each text, with its standard error; all texts are read before any is measured.

    The arguments are `Recipe`'s fields of those names.
    """
    recipe = read_recipe(
        {"model": model, "method": "magnitude", "evaluate": tuple(texts), "text_field": field, "length": length, "dtype": dtype}
    )
    place = device_of(device)
    source = open_checkpoint(model)
    window = window_length(recipe, source.length)
    tests = {text: read_test(recipe, source, text, window) for text in recipe.evaluate}
    loaded = source.load(recipe.dtype, place)
    return {text: asdict(measured(loaded, test, text)) for text, test in tests.items()}
