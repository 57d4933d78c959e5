"""The fields of the recipe of a recovery, each with its type, default and description."""

from __future__ import annotations

from typing import Literal

from sparsellm.recipes.fields import Names, RunFields, method_option, option


class RecoveryFields(RunFields):
    """The fields of `sparsellm.extensions.recover.recipe.RecoveryRecipe`. `model` is the dense model."""

    pruned: str = option(..., "Folder that `prune` or `recover` wrote.", traits=("path",))
    scope: Literal["block", "model"] = option("model", "Weights that are trained together: each block's, or the whole model's.")
    train: Literal["full", "lora"] = option(
        "full", "Parameters to train: full (all), or lora (low-rank changes of the pruned layers)."
    )
    steps: int | None = option(
        None, "Maximum number of gradient steps.", "100 for each block, 1200 for the whole model", least=1
    )
    patience: int | None = method_option(
        None, "Stop after this many validations in a row, of 10, without a new lowest loss.", "no early stop", gt=0, lt=10
    )
    lora_rank: int = method_option(16, "Rank of the changes that lora trains.", least=1)
    lora_targets: Names = method_option((), "Layers that lora changes, by name, glob, re:REGEX or type.", "all pruned ones")
