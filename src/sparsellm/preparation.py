"""What a run settles before it reads any weights: method, plan, windows. Whatever can be refused is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.allocation import from_file, select_blocks, uniform
from sparsellm.blocks import Block
from sparsellm.calibration import calibration_windows, test_windows
from sparsellm.checkpoint import Checkpoint, Loaded
from sparsellm.errors import BadText, InvalidSetting, UnsupportedModel
from sparsellm.memory import check_fits, human_bytes, predictions_bytes, trained_bytes
from sparsellm.methods import BlockMethod, Plan
from sparsellm.methods.published import PublishedSparseLLM
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.moments import NoInputs
from sparsellm.patterns import Unstructured
from sparsellm.recipe import ALLOCATIONS, Recipe
from sparsellm.texts import Text, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USUAL_LENGTH = 2048
"""Tokens a window where the model allows it; the papers' choice."""

COUPLING_TOKENS = 2048
"""Tokens in a gradient step over the whole model: more steps beat larger ones, and the logits are large."""

GivenText = Sequence[str] | Tensor | None
"""Texts, or token numbers (samples, length), in place of the recipe's calibration text."""


def make_plan(recipe: Recipe, blocks: list[Block]) -> tuple[BlockMethod, Plan]:
    """The recipe's method, and its plan checked against every layer's shape."""
    method = recipe.to_method(len(blocks))
    coupled = isinstance(method, PublishedSparseLLM) and method.couple != frozenset()
    if coupled and blocks[0].architecture.feed_forward is None:
        raise UnsupportedModel(
            f"The feed-forward part of {recipe.model} has an activation that SparseLLM does not solve. "
            "Pass --couple none, or a layer-wise method such as --method alps."
        )
    chosen = select_blocks(recipe.blocks, len(blocks))
    # A file may give another pattern to a layer that could not have the recipe's: its own shapes are checked there.
    by_file = recipe.sharing not in ALLOCATIONS
    plan = uniform(blocks, Unstructured(0) if by_file else recipe.pattern, chosen, recipe.only, recipe.skip)
    if by_file:
        every = {block.full_name(name): layer for block in blocks for name, layer in block.layers.items()}
        shapes = {name: (every[name].out_features, every[name].in_features) for name in plan}
        plan = from_file(recipe.sharing, plan, shapes, recipe.pattern)
    return method, plan


def coupling_batch(recipe: Recipe, samples: int, length: int) -> int:
    """Windows in one gradient step of the whole model's stage: about 2,048 tokens, and an eighth of all windows at most."""
    usual = max(1, min(COUPLING_TOKENS // length, samples // 8))
    return min(recipe.batch, usual) if recipe.batch else usual


def coupling_written(recipe: Recipe, samples: int, length: int) -> int:
    """Windows that the dense model writes for the whole model's stage: as asked, or so that it reads each about twice."""
    read = recipe.couple_steps * coupling_batch(recipe, samples, length)
    return max(0, read // 2 - samples) if recipe.couple_written is None else recipe.couple_written


def check_memory(
    recipe: Recipe, method: BlockMethod, blocks: list[Block], windows: Tensor, vocabulary: int, device: torch.device
) -> str:
    """What the gradient stages will take, in words; raises TooLarge where it cannot be had. Empty without such stages."""
    if not isinstance(method, SparseLLM) or not (method.refine.steps or recipe.couple == "model"):
        return ""
    told = []
    width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
    if method.refine.steps:
        # Two streams, and what the feed-forward part reads and should write.
        needed = trained_bytes(blocks, together=False) + 4 * 4 * windows.numel() * width
        told.append(f"refining a block takes {human_bytes(needed)}")
        check_fits(needed, device, "Refining a block", "Pass --refine 0, or fewer --samples.")
    if recipe.couple == "model":
        tokens = coupling_batch(recipe, *windows.shape) * windows.shape[1]
        needed = trained_bytes(blocks, together=True)
        every = windows.numel() + coupling_written(recipe, *windows.shape) * windows.shape[1]
        needed += predictions_bytes(every, width, tokens, vocabulary, len(blocks))
        told.append(f"coupling the model takes {human_bytes(needed)}")
        check_fits(needed, device, "Coupling the model", "Pass --couple block, or a smaller --batch.")
    return ", ".join(told)


def window_length(recipe: Recipe, longest: int) -> int:
    """Tokens a window. Raises InvalidSetting when the model was not made for as many."""
    if recipe.length is not None and recipe.length > longest:
        raise InvalidSetting(f"`length` is {recipe.length}, but {recipe.model} was made for {longest} tokens at most.")
    return recipe.length or min(USUAL_LENGTH, longest)


def draw_windows(
    recipe: Recipe, method: BlockMethod, given: GivenText, source: Checkpoint | Loaded, length: int
) -> tuple[Tensor, str]:
    """The calibration windows, (samples, length), and how they were drawn; none for a method that needs no inputs."""
    if method.needs is NoInputs and recipe.sharing not in ALLOCATIONS[1:]:
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
