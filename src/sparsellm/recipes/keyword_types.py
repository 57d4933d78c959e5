"""Types of keywords of Python functions, for editors and type checkers. Written by docs/make_keyword_types.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from sparsellm.texts.in_memory import CalibrationData


class MeasurementKeywords(TypedDict, total=False):
    """Keywords of all functions that measure a model."""

    revision: str | None
    trust_remote_code: bool
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


class EvaluationKeywords(MeasurementKeywords, total=False):
    """Keywords of `evaluate`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]


class RunKeywords(MeasurementKeywords, total=False):
    """Keywords that `prune` and `recover` share."""

    samples: int
    seed: int
    evaluate: str | Path | Sequence[str | Path] | CalibrationData
    compute_dtype: Literal["auto", "float32", "bfloat16"]
    batch_size: int | None
    plugin: str | Sequence[str]


class PruneKeywords(RunKeywords, total=False):
    """Keywords of `prune`, `plan` and `search`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    settings: dict[str, Any]
    then: str | dict[str, Any] | Sequence[str | dict[str, Any]]
    effort: Literal["fast", "standard", "best"]
    allocation: str | None
    blocks: str
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    keep_zeros: bool
    bits: float | None
    values: Literal["int8", "int4", "int3"] | None
    group_size: int | None
