"""What is measured of a model: perplexity on texts, accuracy on zero-shot tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TaskName = Literal["boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa", "piqa"]

SPLITS: dict[TaskName, str] = {
    "boolq": "validation",
    "rte": "validation",
    "hellaswag": "validation",
    "winogrande": "validation",
    "arc_easy": "test",
    "arc_challenge": "test",
    "openbookqa": "test",
    "piqa": "validation",
}
"""The split that lm-eval evaluates, by task. The first seven tasks are the SparseLLM paper's."""


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and what it was measured on.

    value: at least 1; infinite where the loss is beyond what an exponential can hold, as after ruinous pruning.
    standard_error: of `value`, over windows; None for a single window and for an infinite value.
    windows, length: how many windows, and tokens a window. source: where they are from. seconds: the measurement took.
    """

    value: float
    standard_error: float | None
    windows: int
    length: int
    source: str
    seconds: float


@dataclass(frozen=True)
class Accuracy:
    """A task's result. value: the share answered right by the likeliest choice; standard_error: over questions, None for one.
    normalised: by the choice likeliest for its length in bytes, where lm-eval has that. questions: how many."""

    value: float
    standard_error: float | None
    normalised: float | None
    questions: int
