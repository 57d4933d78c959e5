"""Recipes: all settings of a run as validated data. Imports no torch, so that a wrong value is refused within half a second."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from pydantic import ValidationInfo, field_validator, model_validator

from sparsellm.errors import InvalidSetting, capitalized, nearest
from sparsellm.extension import names_of
from sparsellm.recipes.fields import (
    ALLOCATIONS,
    BROUGHT_BY,
    SAVED,
    RecipeFields,
    RunFields,
    label_with,
    parse_size,
    split_name,
    written,
)
from sparsellm.recipes.registry import (
    build,
    check_method_name,
    completed,
    completed_steps,
    is_step,
    names_in,
    package_of,
    package_of_pattern,
    reads_inputs,
)
from sparsellm.solvers.patterns import Pattern, Unstructured, parse_pattern, stored_pattern
from sparsellm.texts.paths import TEXT_FILES, TEXT_NAMES

if TYPE_CHECKING:
    from sparsellm.methods import Totals, TrainingResult

EFFORTS: dict[str, dict[str, Any]] = {"fast": {"solver": "fast-admm", "scope": "none"}, "standard": {}, "best": {}}
"""Settings of the method sparsellm that an effort sets, unless the recipe does."""

NEEDS_TEXT = f"needs a calibration text: pass a {TEXT_FILES} file as `calibration`, or one of {', '.join(TEXT_NAMES)}."


class RunRecipe(RunFields):
    """Settings that pruning and recovery share: dense model, calibration text, evaluation and hardware."""

    command: ClassVar[str]
    """Name of the command that runs the recipe."""

    argument: ClassVar[str]
    """Field that is the first argument of the command."""

    stage: ClassVar[str]
    """Name of the stage that goes from block to block."""

    result: ClassVar[str]
    """The word for a model after the run."""

    trains: ClassVar[bool] = False
    """Whether the run trains a model that is pruned already."""

    renamed: ClassVar[dict[str, str]] = {}
    """Fields whose options have other names, with these names; they are given in every command."""

    inherited: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no options, since the command takes them from what it reads."""

    @property
    def also_read(self) -> tuple[str, ...]:
        """Folders that the run reads besides the dense model's."""
        return ()

    @field_validator("max_memory")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size("max_memory", value)
        return value

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` in bytes; None if it is not set."""
        return None if self.max_memory is None else parse_size("max_memory", self.max_memory)

    @property
    def allocation_rule(self) -> str:
        """The allocation rule, or the path of an allocation file."""
        return "uniform"

    @property
    def allocation_file(self) -> str | None:
        """The path of the allocation file; None for a rule."""
        rule = self.allocation_rule
        return None if rule in ALLOCATIONS or rule in names_of("allocations") else rule

    @property
    def allocates(self) -> bool:
        """Whether a rule sets each layer's pattern by what the dense model computes."""
        return self.allocation_rule != ALLOCATIONS[0] and self.allocation_file is None

    @property
    def sets_patterns_later(self) -> bool:
        """Whether each layer's pattern is chosen once the layers are measured, so that the plan has none."""
        return False

    @property
    def reads_text(self) -> bool:
        """Whether the run needs calibration sequences."""
        return True

    @property
    def in_float32(self) -> bool:
        """Whether 16-bit models are computed in float32 on every device, not only on a CPU."""
        return self.compute_dtype == "float32"

    @property
    def steps_after(self) -> tuple[str, ...]:
        """Names of the steps that the whole model takes after its blocks, as `Extension.steps` has them."""
        return ()

    @property
    def changing_whole_model(self) -> str:
        """The step or method, in words, that changes the whole model, which must fit in memory; empty without one."""
        return next(iter(self.steps_after), "")

    @abstractmethod
    def describe(self) -> str:
        """Summarize the run in one line."""

    @abstractmethod
    def describe_run(self, totals: Totals, trainings: Mapping[str, TrainingResult]) -> str:
        """Summarize the finished run in one line, given its totals and its trainings by name."""

    @property
    def packages(self) -> dict[str, str]:
        """The packages, with their versions, that bring fields of the recipe or the methods that these name, by field."""
        return {name: package for name, package in BROUGHT_BY.items() if name in type(self).model_fields}

    def to_dict(self) -> dict[str, Any]:
        """Convert the recipe to plain data for JSON: its command, its fields, and the packages that bring some of them."""
        packages = {"packages": self.packages} if self.packages else {}
        return {"command": self.command, **self.model_dump(mode="json"), **packages}

    def to_yaml(self) -> str:
        """Convert the recipe to YAML: its method, and every field that differs from its default."""
        return yaml.safe_dump(self.changed(), sort_keys=False, allow_unicode=True)


class Recipe(RunRecipe, RecipeFields):
    """All settings of a pruning run, as on the command line and in YAML; docs/cli.md describes each field."""

    command: ClassVar[str] = "prune"
    argument: ClassVar[str] = "model"
    stage: ClassVar[str] = "pruning"
    result: ClassVar[str] = "pruned"

    @field_validator("sparsity", "blocks", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return value if value is None else str(value)

    @field_validator("sparsity")
    @classmethod
    def _is_pattern(cls, value: str | None, info: ValidationInfo) -> str | None:
        return value if value is None else str(stored_pattern(value) if info.context is SAVED else parse_pattern(value))

    @field_validator("method")
    @classmethod
    def _is_method(cls, value: str, info: ValidationInfo) -> str:
        if info.context is not SAVED:
            check_method_name(value)
        return value

    @field_validator("settings")
    @classmethod
    def _complete_settings(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Add the defaults of a method of others: reports have all of its settings, whatever its next version does."""
        return value if info.context is SAVED or "method" not in info.data else completed(info.data["method"], value)

    @field_validator("then")
    @classmethod
    def _complete_steps(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        return value if info.context is SAVED else completed_steps(value)

    @model_validator(mode="after")
    def _check_settings(self, info: ValidationInfo) -> Recipe:
        if self.effort != type(self).model_fields["effort"].default and not self._is_default_method:
            raise InvalidSetting(f"`effort` is for sparsellm, got the method {self.method}. Leave it out.")
        if info.context is not SAVED:
            self._check_method_settings()
        return self

    @model_validator(mode="after")
    def _check_inputs(self, info: ValidationInfo) -> Recipe:
        if self.allocates and not self.pattern.is_shareable:
            raise InvalidSetting(
                f"`allocation` {self.allocation_rule} needs an unstructured sparsity, got {self.sparsity}. "
                "Use `allocation='uniform'`, or a YAML file with each layer's pattern."
            )
        if self.reads_text and self.calibration is None and info.context is not SAVED:
            subject = f"`allocation` {self.allocation_rule}" if self.allocates else capitalized(self.changing_whole_model)
            subject = f"The method {self.method}" if self._reads_inputs else subject
            subject = subject if self.sparsity is not None else f"A run with `{self.allocation_rule}`"
            raise InvalidSetting(f"{subject} {NEEDS_TEXT}")
        return self

    def _check_method_settings(self) -> None:
        """Raise InvalidSetting unless the method can be built with its settings."""
        if self.settings or package_of(self.method):
            build(self.method, self.resolved_settings, keep_zeros=self.keep_zeros)

    def _first_changed(self, *names: str) -> str:
        """Name the first of these fields that differs from its default; empty if all have theirs."""
        return next((name for name in names if getattr(self, name) != type(self).model_fields[name].default), "")

    @field_validator("allocation")
    @classmethod
    def _is_rule(cls, value: str | None, info: ValidationInfo) -> str | None:
        known = [*ALLOCATIONS, *(name for name in names_of("allocations") if name not in cls.in_place_of_sparsity)]
        if value is not None and value not in known and not value.endswith((".yaml", ".yml")) and info.context is not SAVED:
            raise InvalidSetting(f"`allocation` is unknown: got {value!r}. {nearest(value, known)} Or pass a .yaml file.")
        return value

    @property
    def pattern(self) -> Pattern:
        """`sparsity` as a pattern; without one, where each layer's is set later, one that removes nothing."""
        return Unstructured(0) if self.sparsity is None else stored_pattern(self.sparsity)

    @property
    def label(self) -> str:
        """`sparsity`, or what is asked for in its place, as "3 bits a weight"."""
        return self.size_label() if self.sparsity is None else self.sparsity

    @property
    def allocation_rule(self) -> str:
        if (setting := next((name for name in self.in_place_of_sparsity if getattr(self, name) is not None), None)) is not None:
            return setting
        is_removing = self.pattern.is_shareable and self.pattern.sparsity > 0
        nonuniform = self._is_default_method and is_removing
        return self.allocation or ("fisher" if nonuniform else "uniform")

    @property
    def sets_patterns_later(self) -> bool:
        return self.sparsity is None

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """The settings of the method, with those that `effort` sets."""
        return EFFORTS[self.effort] | self.settings

    @property
    def method_label(self) -> str:
        """The method with its settings, as "algorithm1(epochs=2)"; those of sparsellm without defaults that are not given."""
        effort = "" if self.effort == type(self).model_fields["effort"].default else f", {self.effort}"
        return ", then ".join([label_with(f"{self.method}{effort}", self.settings), *map(written, self.then)])

    @property
    def packages(self) -> dict[str, str]:
        named = names_in(self.model_dump(include={"method", "settings", "then"}))
        brought = {"sparsity": package_of_pattern(self.pattern)} | {field: package_of(name) for field, name in named.items()}
        return super().packages | {field: package for field, package in brought.items() if package}

    @property
    def _is_default_method(self) -> bool:
        """Whether the method is the default one, which has efforts and an allocation of its own."""
        return self.method == "sparsellm"

    @property
    def _reads_inputs(self) -> bool:
        """Whether the method reads the inputs of layers."""
        return reads_inputs(self.method)

    @property
    def reads_text(self) -> bool:
        return self._reads_inputs or self.allocates or self._method_is_step

    @property
    def _method_is_step(self) -> bool:
        """Whether the method changes the whole model after its blocks."""
        return is_step(self.method)

    @property
    def changing_whole_model(self) -> str:
        return f"the method {self.method}" if self._method_is_step else super().changing_whole_model

    @property
    def steps_after(self) -> tuple[str, ...]:
        named = (str(split_name(value, "then")[0]) for value in self.then)
        return (*(("training",) if self.effort == "best" else ()), *self.further_steps(), *named)

    def describe(self, predicate: str = "removed") -> str:
        """Summarize the run in one line. predicate: what the weights are that the sparsity counts."""
        size = self.size_label() if self.sparsity is None else self.pattern.describe(predicate)
        return f"{self.method_label}, {size}{self.describe_more()}"

    def to_yaml(self) -> str:
        changed = self.changed()
        if settings := changed.pop("settings", None):
            changed["method"] = {"name": self.method, **settings}
        return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)

    def describe_run(self, totals: Totals, trainings: Mapping[str, TrainingResult]) -> str:
        zeros = totals.before_and_after
        return f"{self.describe('to be zero')}; {zeros}" if zeros else self.describe()
