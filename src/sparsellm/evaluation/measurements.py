"""Results of an evaluation: perplexity on texts and accuracy on zero-shot tasks."""

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
"""Split that lm-eval evaluates, by task. The SparseLLM paper uses the first seven tasks."""


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and the sequences it was measured on.

    Attributes:
        value: At least 1; infinite if the exponential of the loss overflows.
        standard_error: Standard error of `value` over sequences; None for a single sequence or an infinite value.
        windows: Number of sequences.
        length: Tokens per sequence.
        source: Name of the text.
        seconds: Duration of the measurement.
    """

    value: float
    standard_error: float | None
    windows: int
    length: int
    source: str
    seconds: float


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on a zero-shot task.

    Attributes:
        value: Fraction of questions whose most likely choice is correct.
        standard_error: Standard error of `value` over questions; None for a single question.
        normalised: Accuracy by log-likelihood per byte of the choice; None if lm-eval does not compute it.
        questions: Number of questions.
    """

    value: float
    standard_error: float | None
    normalised: float | None
    questions: int


@dataclass(frozen=True)
class Evaluation:
    """What was measured of a model.

    Attributes:
        perplexity: Perplexity by text.
        accuracy: Accuracy by zero-shot task.
    """

    perplexity: dict[str, Perplexity]
    accuracy: dict[str, Accuracy]
