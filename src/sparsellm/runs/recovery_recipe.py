"""The recipe of a recovery: all of its settings as validated data."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from pydantic import model_validator

from sparsellm.data.paths import local_path
from sparsellm.errors import InvalidSetting
from sparsellm.runs.recipe import NEEDS_TEXT, SCOPE_STEPS, RunRecipe
from sparsellm.runs.recipe_fields import RecoveryFields


class RecoveryRecipe(RunRecipe, RecoveryFields):
    """All settings of a recovery. `model` is the dense model whose outputs the pruned one is trained to match."""

    @model_validator(mode="after")
    def _check_training(self) -> RecoveryRecipe:
        if self.calibration is None:
            raise InvalidSetting(f"Recovery {NEEDS_TEXT}")
        if self.scope == "block" and self.loss not in (None, "hidden"):
            raise InvalidSetting(
                f"`loss` {self.loss} is a loss of the whole model, got `scope` block, which trains each block toward the dense "
                "block's hidden states. Pass `scope='model'` with it, or leave it out."
            )
        if self.train != "lora" and (self.lora_targets or self.lora_rank != type(self).model_fields["lora_rank"].default):
            raise InvalidSetting(
                f"`lora_rank` and `lora_targets` are for `train` lora, got {self.train}. "
                "Pass `train='lora'`, or leave them out."
            )
        if not self.has_teacher:
            needs = f"`loss` {self.resolved_loss}" if self.resolved_loss != "text" else f"`written={self.written}`"
            if self.resolved_loss != "text" or self.written:
                trained = "the whole model, `scope='model'`," if self.scope == "block" else "it"
                raise InvalidSetting(
                    f"{needs} needs the dense model, and none was given. Pass it as `against`, or train "
                    f"{trained} on the text alone with `loss='text'`."
                )
        return self

    @property
    def has_teacher(self) -> bool:
        """Whether a dense model was given. Without one, `model` is the pruned checkpoint itself."""
        return local_path(self.model).resolve() != local_path(self.pruned).resolve()

    @property
    def resolved_loss(self) -> Literal["kl", "hidden", "text"]:
        """`loss`, or the one of the scope."""
        return self.loss or ("hidden" if self.scope == "block" else "kl")

    @property
    def resolved_steps(self) -> int:
        """Number of gradient steps, for each block or for the whole model."""
        return self.steps or self.default_steps(self.scope)

    @staticmethod
    def default_steps(scope: str) -> int:
        """Number of gradient steps of a scope, if none is given."""
        return SCOPE_STEPS[scope]

    @property
    def calibration_written(self) -> int:
        return (self.written or 0) if self.scope == "block" else 0

    @property
    def model_steps(self) -> int:
        return self.resolved_steps if self.scope == "model" else 0

    @property
    def model_written(self) -> int | None:
        if self.scope == "model" and self.resolved_loss == "text":
            return self.written or 0
        return self.written if self.scope == "model" else None

    def describe(self) -> str:
        return f"recovered from {PurePath(self.pruned).name} by {self.describe_steps()}"

    def describe_steps(self) -> str:
        """Describe the training in part of a sentence."""
        trained = "each block" if self.scope == "block" else "the whole model"
        of = f" by LoRA of rank {self.lora_rank}" if self.train == "lora" else ""
        on = {"kl": "", "hidden": ", toward the hidden states", "text": ", on text"}[self.resolved_loss if self.loss else "kl"]
        return f"{self.resolved_steps} gradient steps over {trained}{of}{on}"
