"""The perplexity of a checkpoint on texts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsellm.checkpoint import device_of, open_checkpoint
from sparsellm.preparation import read_test, window_length
from sparsellm.recipe_file import read_recipe
from sparsellm.residence import settle


def measure(
    model: str,
    texts: Sequence[str],
    field: str | None = None,
    length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    memory: str | None = None,
    revision: str | None = None,
    trusted: bool = False,
) -> dict[str, dict[str, Any]]:
    """The perplexity of a checkpoint on each text, with its standard error; all texts are read before any is measured.

    The arguments are `Recipe`'s fields of those names. A model that is larger than the memory is read block by block, and
    hidden states that are go to temporary files.
    """
    recipe = read_recipe(
        {"model": model, "method": "magnitude", "evaluate": tuple(texts), "text_field": field, "length": length, "dtype": dtype}
        | {"memory": memory, "revision": revision, "trust_remote_code": trusted}
    )
    place = device_of(device)
    source = open_checkpoint(model, revision, trusted)
    window = window_length(recipe, source.length)
    tests = {text: read_test(recipe, source, text, window) for text in recipe.evaluate}
    home = settle(recipe, source, place, Path(tempfile.gettempdir()))
    return {text: asdict(home.measured(test, text)) for text, test in tests.items()}
