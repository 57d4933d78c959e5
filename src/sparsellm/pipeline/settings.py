"""The fields of a recipe as keywords of Python functions: typed for editors, with defaults and descriptions from the fields."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from sparsellm.pipeline.recipe_fields import RecipeFields, RunFields, SolverName
from sparsellm.solvers.integers import IntegerName
from sparsellm.texts.in_memory import CalibrationData

Function = TypeVar("Function", bound=Callable[..., Any])


class MeasurementSettings(TypedDict, total=False):
    """The fields that all functions share which load a model and can measure it."""

    revision: str | None
    trust_remote_code: bool
    architecture: str | None
    text_field: str | None
    documents: Literal["auto", "whole", "joined"]
    bos: Literal["auto", "yes", "no"]
    sequence_length: int | None
    evaluate_limit: int | None
    task: str | Sequence[str]
    task_data: str | None
    task_limit: int | None
    max_memory: str | None
    offload: bool | None
    device: str


class EvaluationSettings(MeasurementSettings, total=False):
    """The fields that `evaluate` takes."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]


class RunSettings(MeasurementSettings, total=False):
    """The fields that `prune`, `plan` and `recover` share; the functions name the model and the calibration text themselves."""

    samples: int
    seed: int
    evaluate: str | Path | Sequence[str | Path] | CalibrationData
    prompt: str | Sequence[str]
    compute_dtype: Literal["auto", "float32", "bfloat16"]
    batch_size: int | None


class PruneSettings(RunSettings, total=False):
    """The fields that `prune` and `plan` take besides their named arguments."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    bits: float | None
    as_published: bool
    effort: Literal["fast", "standard", "best"]
    solver: SolverName | None
    gauss_newton_steps: int
    epochs: int
    alpha: float
    beta: float
    scope: str | None
    allocation: str | None
    blocks: str
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    values: IntegerName | None
    group_size: int | None
    keep_zeros: bool
    true_sequential: bool


class RecoverySettings(RunSettings, total=False):
    """The fields that `recover` takes besides its named arguments; the pruned run sets the dtype."""

    train: Literal["full", "lora"]
    patience: int | None
    lora_rank: int
    lora_targets: str | Sequence[str]


def recipe_keywords(settings: type, fields: type[RunFields] = RecipeFields) -> Callable[[Function], Function]:
    """Show fields of a recipe in place of `**settings` in a function's signature and docstring.

    Args:
        settings: The typed dictionary that names the fields.
        fields: The class that declares them.

    Returns:
        A decorator for a function with `**settings`, which is called unchanged.
    """
    types = get_type_hints(settings)
    chosen = {name: field for name, field in fields.model_fields.items() if name in types}

    def show_fields(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            for name, field in chosen.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        lines = [f"{name}: {_describe(field)}" for name, field in chosen.items()]

        def wrapped(match: re.Match[str]) -> str:
            indent = match[1]
            fill = partial(textwrap.fill, width=127, initial_indent=indent, subsequent_indent=indent + 4 * " ")
            return "\n".join(map(fill, lines))

        function.__doc__ = re.sub(r"^( *)\*\*settings: .*$", wrapped, function.__doc__ or "", flags=re.MULTILINE)
        return function

    return show_fields


def _describe(field: Any) -> str:
    """The description of a field, with what is used when it is None."""
    default = field.json_schema_extra["default_text"]
    return f"{field.description} Default: {default}." if default else field.description
