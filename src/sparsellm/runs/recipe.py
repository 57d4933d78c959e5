"""A whole run as validated data, to and from YAML."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import PurePath

import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError, field_validator, model_validator

from sparsellm.errors import InvalidSetting, nearest
from sparsellm.methods import BlockMethod
from sparsellm.methods.algorithm1 import PublishedSparseLLM
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.pruning.plan import select_blocks
from sparsellm.runs.recipe_fields import RecipeFields, RecoveryFields, RunFields, SolverName
from sparsellm.runs.registry import ALLOCATIONS, SCOPES, SOLVERS
from sparsellm.solvers.patterns import Pattern, Unstructured, parse_pattern

_ONLY_DEFAULT = ("effort", "gauss_newton_steps")
_ONLY_PUBLISHED = ("epochs", "alpha", "beta")
_ONLY_SPARSELLM = ("as_published", "solver", "scope", *_ONLY_PUBLISHED, *_ONLY_DEFAULT)

EFFORTS: dict[str, tuple[SolverName, str]] = {
    "fast": ("fast-admm", "none"),
    "standard": ("alps-accurate", "feedforward"),
    "best": ("alps-accurate", "feedforward"),
}
"""By the name of an effort, the solver and the coupling where the recipe names none."""

_SIZE = TypeAdapter(ByteSize)

SCOPE_STEPS = {"block": 100, "model": 300}
"""The usual gradient steps of a recovery: over each block, or over the whole model."""

_NEEDS_TEXT = (
    "needs a calibration text: pass --calibration with a .txt, .json, .jsonl or .parquet "
    "file, or one of c4, wikitext2, ptb, demo."
)


class RunRecipe(RunFields):
    """What pruning and recovery have in common: the dense model, the calibration text, the machine, what is measured."""

    @field_validator("evaluate", "prompt", "task", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("max_memory")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is None:
            return value
        with suppress(ValidationError):
            # ByteSize ignores what follows a unit, so that it reads "1,5GiB" as one byte.
            if re.fullmatch(r"\s*\d*\.?\d+\s*[a-zA-Z]+\s*", value) and 0 < _SIZE.validate_python(value) < 2**63:
                return value
        raise InvalidSetting(f"`max_memory` must be a size such as 16GiB or 500MB, got {value!r}.")

    @property
    def memory_bytes(self) -> int | None:
        """What `max_memory` means, in bytes."""
        return None if self.max_memory is None else _SIZE.validate_python(self.max_memory)

    @property
    def sharing(self) -> str:
        """The rule by which the sparsity is shared out, or the path of a file."""
        return "uniform"

    @property
    def reads_text(self) -> bool:
        """Whether the run needs calibration windows."""
        return True

    @property
    def calibration_written(self) -> int:
        """How many calibration windows the dense model writes, besides those of the text."""
        return 0

    @property
    def model_steps(self) -> int:
        """Gradient steps over the whole model, after the blocks; 0 for none."""
        return 0

    @property
    def model_written(self) -> int | None:
        """Windows that the dense model writes for those steps; None for as many as let them read each about twice."""
        return None

    def describe(self) -> str:
        """What is done, in one line."""
        raise NotImplementedError

    def to_yaml(self) -> str:
        """The recipe as YAML, every field written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class Recipe(RunRecipe, RecipeFields):
    """Everything that decides a run's result, as on the command line and in YAML. See docs/cli.md for each field."""

    @field_validator("sparsity", "blocks", "scope", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, (int, float, Pattern)) and not isinstance(value, bool) else value

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _names_as_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("sparsity")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        return str(parse_pattern(value))

    @model_validator(mode="after")
    def _agrees(self) -> Recipe:
        if self.method != "sparsellm":
            foreign = [name for name in _ONLY_SPARSELLM if name in self.model_fields_set and self._differs(name)]
            if foreign:
                raise InvalidSetting(f"`{foreign[0]}` belongs to the method sparsellm, got the method {self.method}.")
        elif self.as_published:
            foreign = [name for name in _ONLY_DEFAULT if name in self.model_fields_set and self._differs(name)]
            if foreign:
                name = foreign[0]
                raise InvalidSetting(
                    f"`{name}` is {getattr(self, name)}, which Algorithm 1 as published lacks. Leave it out, or --as-published."
                )
        elif foreign := [name for name in _ONLY_PUBLISHED if self._differs(name)]:
            raise InvalidSetting(
                f"`{foreign[0]}` is {getattr(self, foreign[0])}, which only Algorithm 1 has. "
                "Pass --as-published with it, or leave it out."
            )
        elif self.scope not in (None, *SCOPES):
            raise InvalidSetting(
                f"`scope` is unknown: got {self.scope!r}. {nearest(str(self.scope), SCOPES)} "
                "A list of blocks goes with --as-published."
            )
        if self.true_sequential and self.method in ("sparsellm", "magnitude"):
            why = "looks at no inputs" if self.method == "magnitude" else "has an order of its own"
            raise InvalidSetting(
                f"`true_sequential` is for alps, fast-admm, sparsegpt and wanda, got the method {self.method}, which {why}. "
                "Leave it out."
            )
        if self.resolved_scope == "none" and self.gauss_newton_steps and self._differs("gauss_newton_steps"):
            raise InvalidSetting(
                "With `scope` none, or `effort` fast, every layer is a problem of its own: leave out `gauss_newton_steps`."
            )
        if self.sharing in ALLOCATIONS[1:] and not isinstance(self.pattern, Unstructured):
            raise InvalidSetting(
                f"`allocation` {self.sharing} shares out an unstructured sparsity, got {self.sparsity}. "
                "Use --allocation uniform, or a YAML file that names each layer's pattern."
            )
        least, most = self.bounds
        if self.allocation_bounds is not None and self.sharing not in ALLOCATIONS[1:]:
            raise InvalidSetting("`allocation_bounds` go with `allocation` owl or fisher. A file names each layer's own.")
        if isinstance(self.pattern, Unstructured) and not least <= self.pattern.sparsity <= most:
            raise InvalidSetting(f"`allocation_bounds` are {self.allocation_bounds}, which leaves out {self.sparsity} itself.")
        if self.reads_text and self.calibration is None:
            needing = f"The method {self.method}" if self.method != "magnitude" else f"`allocation` {self.sharing}"
            raise InvalidSetting(f"{needing} {_NEEDS_TEXT}")
        return self

    def _differs(self, name: str) -> bool:
        """Whether a field was set to something else than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @field_validator("allocation")
    @classmethod
    def _is_rule(cls, value: str | None) -> str | None:
        if value is not None and value not in ALLOCATIONS and not value.endswith((".yaml", ".yml")):
            raise InvalidSetting(f"`allocation` is unknown: got {value!r}. {nearest(value, ALLOCATIONS)} Or name a .yaml file.")
        return value

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest sparsity of a layer whose share is chosen."""
        if self.allocation_bounds is None:
            return 0.0, 1.0
        words = self.allocation_bounds.split(":")
        found = [parse_pattern(word) for word in words] if len(words) == 2 else []
        if len(found) != 2 or not isinstance(found[0], Unstructured) or not isinstance(found[1], Unstructured):
            raise InvalidSetting(f"`allocation_bounds` must be two sparsities, as 60%:95%, got {self.allocation_bounds!r}.")
        return found[0].sparsity, found[1].sparsity

    @property
    def pattern(self) -> Pattern:
        """What `sparsity` means."""
        return parse_pattern(self.sparsity)

    @property
    def sharing(self) -> str:
        """The rule by which the sparsity is shared out, or the path of a file."""
        shares = self.method == "sparsellm" and not self.as_published and isinstance(self.pattern, Unstructured)
        return self.allocation or ("fisher" if shares else "uniform")

    @property
    def inner(self) -> SolverName:
        """The name of the solver inside SparseLLM."""
        return self.solver or ("sparsegpt" if self.as_published else EFFORTS[self.effort][0])

    @property
    def resolved_scope(self) -> str:
        """Whose layers form one problem, also where the recipe leaves it to `effort`."""
        return self.scope or EFFORTS[self.effort][1]

    def to_method(self, blocks: int) -> BlockMethod:
        """The method that the recipe names. blocks: how many the model has."""
        if self.method != "sparsellm":
            return LayerWise(SOLVERS[self.method](), self.keep_zeros, self.true_sequential)
        solver = SOLVERS[self.inner]()
        if self.as_published:
            scope = None if self.scope in (None, "feedforward") else select_blocks(self.scope, blocks)
            return PublishedSparseLLM(solver, self.epochs, self.alpha, self.beta, scope=scope, keep_zeros=self.keep_zeros)
        return SparseLLM(
            solver=solver,
            gauss_newton_steps=self.gauss_newton_steps,
            scope="none" if self.resolved_scope == "none" else "feedforward",
            keep_zeros=self.keep_zeros,
        )

    @property
    def reads_text(self) -> bool:
        """Whether the run needs calibration windows."""
        return self.method != "magnitude" or self.sharing in ALLOCATIONS[1:]

    @property
    def calibration_written(self) -> int:
        """How many calibration windows the dense model writes, besides those of the text."""
        return self.written

    @property
    def model_steps(self) -> int:
        """Gradient steps over the whole model, after the blocks; 0 for none."""
        return SCOPE_STEPS["model"] if self.effort == "best" else 0

    def describe(self) -> str:
        """The method and pattern in one line."""
        detail = f" ({'as published, ' if self.as_published else ''}{self.inner} inside, {self.epochs} epochs)"
        if not self.as_published:
            detail = f" ({self.inner} inside, coupled: {self.resolved_scope})"
        if self.method != "sparsellm":
            detail = " (true-sequential)" if self.true_sequential else ""
        return f"{self.method}{detail}, {self.pattern.describe()}"


class RecoveryRecipe(RunRecipe, RecoveryFields):
    """Everything that decides the result of a recovery. model: the dense model that the pruned one is trained toward."""

    @model_validator(mode="after")
    def _has_text(self) -> RecoveryRecipe:
        if self.calibration is None:
            raise InvalidSetting(f"Recovery {_NEEDS_TEXT}")
        return self

    @property
    def resolved_steps(self) -> int:
        """Gradient steps, over each block or over the model."""
        return self.steps or SCOPE_STEPS[self.scope]

    @property
    def block_steps(self) -> int:
        """Gradient steps over each block; 0 for none."""
        return self.resolved_steps if self.scope == "block" else 0

    @property
    def calibration_written(self) -> int:
        """How many calibration windows the dense model writes, besides those of the text."""
        return (self.written or 0) if self.scope == "block" else 0

    @property
    def model_steps(self) -> int:
        """Gradient steps over the whole model; 0 for none."""
        return self.resolved_steps if self.scope == "model" else 0

    @property
    def model_written(self) -> int | None:
        """Windows that the dense model writes for those steps; None for as many as let them read each about twice."""
        return self.written if self.scope == "model" else None

    def describe(self) -> str:
        """What is trained, in one line."""
        trained = "each block" if self.scope == "block" else "the whole model"
        return f"recovered from {PurePath(self.pruned).name} by {self.resolved_steps} gradient steps over {trained}"
