"""`recover` in Python: the fields of its recipe as keywords, and models and texts in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from sparsellm.checkpoints.loading import named_model
from sparsellm.extensions.recover.block_recovery import read_recovery
from sparsellm.extensions.recover.recipe_fields import RecoveryFields
from sparsellm.extensions.recover.run import recover_run
from sparsellm.observers.display import Display
from sparsellm.observers.events import Observer, combine_observers
from sparsellm.outputs.folder import folder_path
from sparsellm.outputs.saving import Result
from sparsellm.pipeline.interface import texts_in_memory
from sparsellm.recipes.keyword_types import RunKeywords
from sparsellm.recipes.keywords import recipe_keywords
from sparsellm.texts.in_memory import CalibrationData

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RecoveryKeywords(RunKeywords, total=False):
    """Keywords of `recover`; the pruned run sets the dtype."""

    train: Literal["full", "lora"]
    patience: int | None
    lora_rank: int
    lora_targets: str | Sequence[str]


@recipe_keywords(RecoveryKeywords, RecoveryFields)
def recover(
    pruned: str | Path,
    against: str | Path | PreTrainedModel,
    calibration: str | Path | CalibrationData | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    scope: Literal["block", "model"] = "model",
    steps: int | None = None,
    progress: bool = False,
    observe: Observer | None = None,
    **settings: Unpack[RecoveryKeywords],
) -> Result:
    """Train the remaining weights of a pruned checkpoint toward the dense model; every zero stays zero.

    Args:
        pruned: Folder that `prune` or `recover` wrote. It is not changed.
        against: The dense model that it was made from: a folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory,
            which becomes the recovered model.
        calibration: As for `prune`; required.
        tokenizer: Tokenizer of a model in memory, for calibration on text.
        scope: Weights that are trained together. "model" lowers the KL divergence of the predictions from the dense model's;
            "block" lowers the error of each block's outputs in turn, and takes the memory of one block.
        steps: Maximum number of gradient steps; held-out sequences select the best state. Default: 1200 for the whole model,
            100 for each block.
        progress: Whether to display progress and the time left on stderr, or as a bar in a notebook.
        observe: Callback that receives every stage and block (see `sparsellm.observers.events`).
        **settings: Any other field of `RecoveryRecipe` but `dtype`, which is that of the pruned run.

    Returns:
        The recovered model with its report, whose `pruned` is the report of the pruned checkpoint.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
    """
    folder_path(pruned)  # refuses anything but a path
    fields, source = named_model(against, tokenizer)
    texts, given = texts_in_memory(calibration, settings)
    own = {"pruned": str(pruned), "scope": scope, "steps": steps, **texts}
    recipe = read_recovery({**fields, **settings, **own})
    with Display("auto" if progress else "off") as display:
        return recover_run(recipe, combine_observers(display, observe), given=given, source=source)
