"""The recipe of a recovery: all of its settings as validated data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from sparsellm.errors import InvalidSetting, plural
from sparsellm.extensions.recover.recipe_fields import RecoveryFields
from sparsellm.recipes.recipe import NEEDS_TEXT, RunRecipe

if TYPE_CHECKING:
    from sparsellm.methods import Totals, TrainingResult

SCOPE_STEPS = {"block": 100, "model": 1200}
"""Default number of gradient steps: for each block, or for the whole model."""


class RecoveryRecipe(RunRecipe, RecoveryFields):
    """All settings of a recovery. `model` is the dense model whose outputs the pruned one is trained to match."""

    command: ClassVar[str] = "recover"
    argument: ClassVar[str] = "pruned"
    renamed: ClassVar[dict[str, str]] = {"model": "against"}
    inherited: ClassVar[frozenset[str]] = frozenset({"dtype"})
    stage: ClassVar[str] = "recovering"
    result: ClassVar[str] = "recovered"
    trains: ClassVar[bool] = True

    @property
    def also_read(self) -> tuple[str, ...]:
        return (self.pruned,)

    @model_validator(mode="after")
    def _check_training(self) -> RecoveryRecipe:
        if self.calibration is None:
            raise InvalidSetting(f"Recovery {NEEDS_TEXT}")
        if self.train != "lora" and (self.lora_targets or self.lora_rank != type(self).model_fields["lora_rank"].default):
            raise InvalidSetting(
                f"`lora_rank` and `lora_targets` are for `train` lora, got {self.train}. "
                "Pass `train='lora'`, or leave them out."
            )
        return self

    @property
    def resolved_steps(self) -> int:
        """Number of gradient steps, for each block or for the whole model."""
        return self.steps or SCOPE_STEPS[self.scope]

    @property
    def steps_after(self) -> tuple[str, ...]:
        return ("training",) if self.scope == "model" else ()

    def describe(self) -> str:
        return f"recovered from {PurePath(self.pruned).name} by {self.describe_steps()}"

    def describe_run(self, totals: Totals, trainings: Mapping[str, TrainingResult]) -> str:
        unchanged = sum(not training.steps for training in trainings.values())
        if trainings and unchanged == len(trainings):
            none = f"none of {self.describe_steps()} lowered the held-out loss"
            return f"nothing was recovered from {PurePath(self.pruned).name}: {none}"
        if not unchanged:
            return self.describe()
        blocks = f"{unchanged} of {plural(len(trainings), 'block')}"
        return f"{self.describe()}, {blocks} unchanged, since no step lowered the loss"

    def describe_steps(self) -> str:
        """Describe the training in part of a sentence."""
        trained = "each block" if self.scope == "block" else "the whole model"
        of = f" by LoRA of rank {self.lora_rank}" if self.train == "lora" else ""
        return f"{self.resolved_steps} gradient steps over {trained}{of}"
