"""What a run settles before it reads any weights: method, plan, windows. Whatever can be refused is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.allocation import select_blocks, uniform
from sparsellm.blocks import Block
from sparsellm.calibration import calibration_windows, test_windows
from sparsellm.checkpoint import Checkpoint, Loaded
from sparsellm.errors import BadText, InvalidSetting, UnsupportedModel
from sparsellm.methods import BlockMethod, Plan
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.moments import NoInputs
from sparsellm.recipe import Recipe
from sparsellm.texts import Text, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USUAL_LENGTH = 2048
"""Tokens a window where the model allows it; the papers' choice."""

GivenText = Sequence[str] | Tensor | None
"""Texts, or token numbers (samples, length), in place of the recipe's calibration text."""


def make_plan(recipe: Recipe, blocks: list[Block]) -> tuple[BlockMethod, Plan]:
    """The recipe's method, and its plan checked against every layer's shape."""
    method = recipe.to_method(len(blocks))
    coupled = isinstance(method, SparseLLM) and method.couple != frozenset()
    if coupled and blocks[0].architecture.feed_forward is None:
        raise UnsupportedModel(
            f"The feed-forward part of {recipe.model} has an activation that SparseLLM does not solve. "
            "Pass --couple none, or a layer-wise method such as --method alps."
        )
    chosen = select_blocks(recipe.blocks, len(blocks))
    return method, uniform(blocks, recipe.pattern, chosen, recipe.only, recipe.skip)


def window_length(recipe: Recipe, longest: int) -> int:
    """Tokens a window. Raises InvalidSetting when the model was not made for as many."""
    if recipe.length is not None and recipe.length > longest:
        raise InvalidSetting(f"`length` is {recipe.length}, but {recipe.model} was made for {longest} tokens at most.")
    return recipe.length or min(USUAL_LENGTH, longest)


def draw_windows(
    recipe: Recipe, method: BlockMethod, given: GivenText, source: Checkpoint | Loaded, length: int
) -> tuple[Tensor, str]:
    """The calibration windows, (samples, length), and how they were drawn; none for a method that needs no inputs."""
    if method.needs is NoInputs:
        return torch.empty(0, dtype=torch.long), ""
    if isinstance(given, Tensor):
        if given.ndim != 2 or given.dtype not in (torch.int32, torch.int64) or given.shape[1] < 2 or len(given) == 0:
            raise BadText(
                f"Calibration tokens must be whole numbers of (samples, length), got {tuple(given.shape)} {given.dtype}."
            )
        if given.shape[1] > source.length:
            raise BadText(f"Calibration windows have {given.shape[1]} tokens, but {source.name} was made for {source.length}.")
        return given.long(), f"{given.shape[0]} windows of {given.shape[1]} tokens, given in memory"
    if given is not None:
        if not all(isinstance(item, str) for item in given):
            raise BadText(
                f"`calibration` must be texts or a tensor of token numbers, got a {type(given).__name__} of other things."
            )
        text = Text(tuple(given), "\n\n", "given in memory")
    else:
        text = read_text(str(recipe.calibration), "calibration", recipe.text_field)
    drawn = calibration_windows(text, source.tokenizer(), recipe.samples, length, recipe.seed)
    return drawn.windows, drawn.description


def check_tokens(skeleton: PreTrainedModel, *windows: Tensor) -> None:
    """Raise BadText for token numbers that the model has no embedding for."""
    words = skeleton.get_input_embeddings().num_embeddings
    for some in windows:
        if some.numel() and not (int(some.min()) >= 0 and int(some.max()) < words):
            raise BadText(
                f"Token numbers must lie in [0, {words}), got {int(some.min())} to {int(some.max())}. "
                "The tokenizer may belong to another model."
            )


def read_test(recipe: Recipe, source: Checkpoint | Loaded, text: str, length: int) -> Tensor:
    """The windows to measure on, (windows, length)."""
    return test_windows(read_text(text, "test", recipe.text_field), source.tokenizer(), length)
