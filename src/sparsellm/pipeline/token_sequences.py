"""The token sequences of a run: those that it is calibrated on, and those that perplexity is measured on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.errors import BadText, InvalidSetting, plural
from sparsellm.outputs.fingerprint import contents, text_contents
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.loading import OpenedModel
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.runtime.memory import available
from sparsellm.texts.in_memory import SOURCE, Given, read_in_memory
from sparsellm.texts.padding import PADDING, count_tokens, sequence_lengths
from sparsellm.texts.samples import REPEATED, Sequences, calibration_windows, test_windows
from sparsellm.texts.texts import Text, TextUse, read_text
from sparsellm.texts.tokenized import twice_notes

Value = TypeVar("Value")

ENOUGH_TOKENS = 20
"""Number of calibration tokens for each input of a layer below which a note asks for more (`benchmarks/tokens.py`)."""

USUAL_LENGTH = 2048
"""Tokens per sequence where the model allows it, as in the papers."""


def read_tokens(
    recipe: RunRecipe,
    source: Checkpoint | InMemoryModel,
    length: int,
    *,
    given: Given | None,
    shared: DenseCache | None,
) -> tuple[Sequences, dict[str, Sequences]]:
    """Read the calibration sequences, and the test sequences by text.

    Args:
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        shared: Keeps the sequences for other runs of this process.
    """

    def recall(find: Callable[[], Value], *settings: object) -> Value:
        if shared is None:
            return find()
        if isinstance(source, InMemoryModel):  # copies of a model have one tokenizer
            tokenizer: tuple[object, ...] = (id(source.own_tokenizer),)
        else:
            tokenizer = (source.folder, *map(contents, source.stamps.documents))  # its files among them
        return shared.in_memory((*tokenizer, length, recipe.text_field, recipe.documents, recipe.bos, *settings), find)

    def identity(field: str, name: str) -> object:
        """The key of a text: data in memory, of which some can be read only once, are not compared."""
        data = None if given is None or field not in given else given[field]
        if data is None:
            return name, *text_contents(name).values()
        return id(data[name] if field == "evaluate" else data)

    calibration = recall(
        partial(draw_windows, recipe, source, length, given=given),
        recipe.reads_text and identity("calibration", str(recipe.calibration)),
        recipe.samples,
        recipe.seed,
    )
    tests = {
        name: recall(
            partial(read_test, recipe, source, name, length=length, given=given),
            identity("evaluate", name),
            recipe.evaluate_limit,
        )
        for name in recipe.evaluate
    }
    return calibration, tests


def window_length(recipe: RunRecipe, longest: int) -> int:
    """Tokens per sequence. Raises InvalidSetting for more than the model's maximum, `longest`."""
    if recipe.sequence_length is not None and recipe.sequence_length > longest:
        raise InvalidSetting(
            f"`sequence_length` is {recipe.sequence_length}, but {recipe.model} takes at most {longest} tokens."
        )
    return recipe.sequence_length or min(USUAL_LENGTH, longest)


def draw_windows(
    recipe: RunRecipe, source: Checkpoint | InMemoryModel, length: int, *, given: Given | None = None
) -> Sequences:
    """Draw the calibration sequences; none for a run that needs no text.

    Raises:
        BadText: `given` has no form that can be read, or the text is too short.
    """
    if not recipe.reads_text:
        return Sequences(torch.empty(0, dtype=torch.long), "")
    text = _read_text(recipe, str(recipe.calibration), "calibration", given)
    if isinstance(text, Tensor):
        return _given_sequences(text, source, "Calibration")
    drawn = _form(recipe, source) | {"samples": recipe.samples, "sequence_length": length, "seed": recipe.seed}
    return calibration_windows(text, source.tokenizer(), **drawn)


def read_test(
    recipe: RunRecipe, source: Checkpoint | InMemoryModel, text: str, *, length: int, given: Given | None = None
) -> Sequences:
    """Read a test text as token ids."""
    read = _read_text(recipe, text, "test", given)
    if isinstance(read, Tensor):
        return _given_sequences(read[: recipe.evaluate_limit], source, "Test")
    return test_windows(read, source.tokenizer(), length, limit=recipe.evaluate_limit, **_form(recipe, source))


def _read_text(recipe: RunRecipe, text: str, split: TextUse, given: Given | None) -> Text | Tensor:
    """Read a text, or the data in its place."""
    if split == "calibration" and given and "calibration" in given:
        return read_in_memory(given["calibration"], recipe.text_field, samples=recipe.samples, seed=recipe.seed)
    if split == "test" and given and "evaluate" in given:
        data, limit = given["evaluate"][text], recipe.evaluate_limit
        if not isinstance(data, (str, Path)):
            return read_in_memory(data, recipe.text_field, samples=limit, seed=None, what="The test text", source=text)
        text = str(data)
    return read_text(text, split, recipe.text_field, memory=recipe.memory_bytes or available(torch.device("cpu")))


def _given_sequences(tokens: Tensor, source: Checkpoint | InMemoryModel, kind: str) -> Sequences:
    """Token ids that are given in memory, (samples, longest), as sequences. kind: what they are, for the message."""
    shortest, longest = int(sequence_lengths(tokens).min()), tokens.shape[1]
    if longest > source.length:
        raise BadText(f"{kind} sequences have {longest} tokens, but {source.name} takes at most {source.length}.")
    lengths = f"{shortest} to {longest}" if shortest < longest else f"{shortest}"
    description = f"{plural(len(tokens), 'sequence')} of {lengths} tokens, given in memory"
    config = (source.model.config if isinstance(source, InMemoryModel) else source.config).get_text_config()
    notes = tuple(twice_notes(getattr(config, "bos_token_id", None), tokens, SOURCE))
    return Sequences(tokens, description, notes)


def _form(recipe: RunRecipe, source: Checkpoint | InMemoryModel) -> dict[str, Any]:
    """How the documents of a text become sequences, as arguments of `calibration_windows` and `test_windows`."""
    config = source.model.config if isinstance(source, InMemoryModel) else source.config
    return {"documents": recipe.documents, "bos": recipe.bos, "family": config.model_type}


def check_tokens(opened: OpenedModel, *windows: Tensor) -> None:
    """Raise BadText for token ids that the model has no embedding for; the message names the first."""
    embeddings = opened.skeleton.get_input_embeddings().num_embeddings
    for padded in windows:
        strange = padded[(padded != PADDING) & ((padded < 0) | (padded >= embeddings))]
        if not strange.numel():
            continue
        token, name = int(strange[0]), ""
        if not isinstance(opened.source, InMemoryModel) or opened.source.own_tokenizer is not None:
            name = f" ({opened.source.tokenizer().convert_ids_to_tokens(token)!r})" if token >= 0 else ""
        raise BadText(
            f"The text has token {token:,}{name}, but {opened.source.name} has embeddings for {embeddings:,} tokens. "
            "The tokenizer may belong to another model, or have tokens added to it that the model was not trained with."
        )


def tokens_note(windows: Tensor, different: int, inputs: int) -> str:
    """A note where the calibration tokens limit the quality of layers with so many inputs; empty where they do not.

    Args:
        windows: Calibration sequences, (samples, longest).
        different: Their `count_contexts`.
    """
    if different >= ENOUGH_TOKENS * inputs:
        return ""
    advice = f"use {-(-ENOUGH_TOKENS * inputs * len(windows) // different):,} samples of this length"
    if different < count_tokens(windows) / REPEATED:
        advice = "use another text, since this one repeats itself"
    return (
        f"{different:,} different calibration tokens are {different / inputs:.2g} for each of the {inputs:,} inputs of the "
        f"widest layer, and limit the quality: {advice}"
    )
