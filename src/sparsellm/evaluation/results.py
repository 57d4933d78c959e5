"""Results of an evaluation, perplexity on texts and accuracy on tasks, and how they print."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import PurePath
from typing import Any

from sparsellm.errors import printable
from sparsellm.evaluation.differences import Difference, Parts, difference, paired_error
from sparsellm.texts.in_memory import SOURCE


class Summarized(ABC):
    """A result that prints in a few lines, and as a table in notebooks, since everything in it would fill pages."""

    @abstractmethod
    def summary(self) -> dict[str, str]:
        """The lines, by their names."""

    def __repr__(self) -> str:
        return printable("\n".join(f"{name}: {value}" for name, value in self.summary().items()))

    def _repr_html_(self) -> str:
        """The summary as a table, which notebooks show."""
        cells = ((escape(name), escape(printable(value))) for name, value in self.summary().items())
        return f"<table>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in cells)}</table>"


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and the sequences it was measured on.

    Attributes:
        value: At least 1; infinite if the exponential of the loss overflows.
        standard_error: Standard error of `value` over sequences; None for a single sequence or an infinite value.
        length: Tokens of the longest sequence.
        tokens: Tokens of all sequences.
        parts: The loss of each sequence; None in a report of an earlier version.
    """

    value: float
    standard_error: float | None
    windows: int
    length: int
    tokens: int
    source: str
    seconds: float
    parts: Parts | None = field(default=None, repr=False)

    def against(self, other: Perplexity) -> Difference | None:
        """The relative change from another model's perplexity, with the paired error if both are of the same sequences."""
        return difference(self.value, other.value, paired_error(self.parts, other.parts))

    @property
    def lengths(self) -> str:
        """The length of the sequences, "256" or, where they differ, "up to 256"."""
        return f"{'up to ' if self.tokens < self.windows * self.length else ''}{self.length}"


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on a task of lm-eval, or the task's own metric where it has no accuracy.

    Attributes:
        value: For `acc`, the fraction of questions whose most likely choice is correct.
        standard_error: Standard error of `value` over questions; None for a single question, or where lm-eval computes none.
        normalised: Accuracy by log-likelihood per byte of the choice; None if lm-eval does not compute it.
        questions: Number of questions.
        metric: Name of the metric, as lm-eval has it; the name of a filter of the answers follows a comma.
        parts: The score of each question; None where the value is not their mean, as of a group of tasks.
    """

    value: float
    standard_error: float | None
    normalised: float | None
    questions: int
    metric: str = "acc"
    parts: Parts | None = field(default=None, repr=False)

    def against(self, other: Accuracy) -> Difference | None:
        """The difference from another model's, with the paired error if both are of the same questions."""
        error = paired_error(self.parts, other.parts)
        return difference(self.value, other.value, error, share=is_fraction(self.metric))


def change_of(pair: Mapping[Any, Perplexity] | Mapping[Any, Accuracy]) -> Difference | None:
    """The change of the entry "pruned" from the entry "dense"; None if either was not measured."""
    pruned: Any = pair.get("pruned")
    dense = pair.get("dense")
    return pruned.against(dense) if pruned and dense else None


def measure_of(metric: str) -> str:
    """Name of what a metric of lm-eval measures: "accuracy", or the metric's own name."""
    return "accuracy" if metric in ("acc", "acc_norm") else metric


def is_fraction(metric: str) -> bool:
    """Whether a metric is a fraction of the questions, to be shown in percent."""
    return metric.startswith(("acc", "exact_match"))


def mean(accuracies: Collection[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Mean accuracy over tasks and its standard error, None if that of any task is None.

    Args:
        accuracies: Accuracy and standard error of each task.
    """
    squares = [error**2 for _, error in accuracies if error is not None]
    error = math.sqrt(sum(squares)) / len(squares) if len(squares) == len(accuracies) else None
    return sum(value for value, _ in accuracies) / len(accuracies), error


def plus_minus(result: Perplexity | Accuracy | None) -> str:
    """Format a result with its standard error."""
    if result is None:
        return "not measured"
    return f"{result.value:.3f}" + (f" ± {result.standard_error:.3f}" if result.standard_error is not None else "")


@dataclass(frozen=True, repr=False)
class Evaluation(Summarized):
    """The perplexities and accuracies of a model.

    Attributes:
        perplexity: By text.
        accuracy: By task.
        against: The same of another model, from which the differences are; None without one.
    """

    perplexity: dict[str, Perplexity]
    accuracy: dict[str, Accuracy]
    against: Evaluation | None = None

    @property
    def differences(self) -> dict[str, Difference | None]:
        """By text and task, the difference from the other model; None where one is not finite. Empty without another model."""
        other = self.against
        if other is None:
            return {}
        texts = {name: x.against(other.perplexity[name]) for name, x in self.perplexity.items()}
        return texts | {name: x.against(other.accuracy[name]) for name, x in self.accuracy.items() if name in other.accuracy}

    def summary(self) -> dict[str, str]:
        """Each perplexity and accuracy, with what it was measured on, and the differences from the other model."""
        texts = (
            f"{plus_minus(x)} on {x.windows} sequences of {x.lengths} tokens"
            + (f", {SOURCE}" if name == SOURCE else f" of {PurePath(name).name}")
            for name, x in self.perplexity.items()
        )
        tasks = (f"{plus_minus(x)} on {x.questions} questions of {name}" for name, x in self.accuracy.items())
        measured = {"perplexity": "; ".join(texts) or "not measured", "accuracy": "; ".join(tasks) or "not measured"}
        differences = (f"{PurePath(name).name}: {x or 'not finite'}" for name, x in self.differences.items())
        return measured | ({"differences": "; ".join(differences)} if self.against else {})
