"""The difference of two models that were measured on the same sequences or questions, with its paired standard error."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MEASURABLE = 2.0
"""Standard errors that a difference must exceed to count as measured: 95 % of a normal distribution lie within so many."""

NOT_MEASURABLE = "no difference measurable"

DIGITS = 6
"""Decimal places of the losses that reports keep: those of float32, in which they are computed."""


@dataclass(frozen=True)
class Deviations:
    r"""Contributions of each sequence or question to the error of a mean: the root of their sum of squares is that error.

    The error of the difference of two means over the same ones is that of the differences, which is smaller than the errors of
    both together: a sequence that is hard for one model is hard for the other.

    Attributes:
        digest: Digest of the sequences or questions.
        values: One for each. Of values $x_i$ with weights $n_i$: $n_i (x_i - m) / (\bar n \sqrt{k (k - 1)})$ for k of them.
    """

    digest: str
    values: tuple[float, ...]

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(math.fsum(x * x for x in self.values))

    def paired_error(self, other: Deviations | None) -> float | None:
        """The standard error of the difference of two means; None unless both are over the same sequences or questions."""
        if other is None or self.digest != other.digest or len(self.values) != len(other.values):
            return None
        return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(self.values, other.values, strict=True)))


@dataclass(frozen=True)
class Parts:
    """The numbers under a mean, by which two models can be compared: the losses of sequences, or the scores of questions.

    Attributes:
        digest: Digest of the sequences' token ids, or of the questions: two models are compared only on the same ones.
        values: Mean loss of each sequence, in nats per token; or the score of each question.
        weights: Predictions of each sequence; empty if all have the same weight.
    """

    digest: str
    values: tuple[float, ...]
    weights: tuple[int, ...] = ()

    @classmethod
    def of(cls, digest: str, values: Sequence[float], weights: Sequence[int] = ()) -> Parts:
        """The parts of a mean, with values to as many digits as they have."""
        return cls(digest, tuple(round(x, DIGITS) for x in values), tuple(weights) if len({*weights}) > 1 else ())

    @property
    def deviations(self) -> Deviations | None:
        """The contribution of each to the error of the mean; None for a single one, or where a value is not finite."""
        count, weights = len(self.values), self.weights or (1,) * len(self.values)
        if count < 2 or len(weights) != count or not all(map(math.isfinite, self.values)):
            return None
        total = sum(weights)
        mean = math.fsum(n * x for n, x in zip(weights, self.values, strict=True)) / total
        scale = math.sqrt(count / (count - 1)) / total
        return Deviations(self.digest, tuple(scale * n * (x - mean) for n, x in zip(weights, self.values, strict=True)))


def paired_error(parts: Parts | None, others: Parts | None) -> float | None:
    """The standard error of the difference of two means; None unless both are over the same sequences or questions."""
    one, another = (x.deviations if x else None for x in (parts, others))
    return one.paired_error(another) if one else None


def mean_deviations(deviations: Collection[Deviations | None]) -> Deviations | None:
    """The deviations of the mean of several means over the same sequences; None if they are not known or not over the same."""
    known = [x for x in deviations if x is not None]
    if not known or len(known) < len(deviations) or len({(x.digest, len(x.values)) for x in known}) > 1:
        return None
    columns = zip(*(x.values for x in known), strict=True)
    return Deviations(known[0].digest, tuple(math.fsum(column) / len(known) for column in columns))


def joined_deviations(deviations: Collection[Deviations | None]) -> Deviations | None:
    """The deviations of the mean of several means over different questions; None if one is not known."""
    known = [x for x in deviations if x is not None]
    if not known or len(known) < len(deviations):
        return None
    return Deviations(" ".join(x.digest for x in known), tuple(y / len(known) for x in known for y in x.values))


@dataclass(frozen=True)
class Difference:
    """The difference of two models in one measure.

    Attributes:
        change: The difference of two shares, otherwise relative to the other model's value.
        standard_error: Paired standard error of `change`; None if it is unknown.
        share: Whether the values are shares, whose difference is in percentage points.
    """

    change: float
    standard_error: float | None = None
    share: bool = False

    @property
    def is_measurable(self) -> bool | None:
        """Whether the difference is larger than its error allows; None if the error is unknown."""
        return None if self.standard_error is None else abs(self.change) > MEASURABLE * self.standard_error

    @property
    def short(self) -> str:
        """The change in per cent, or in percentage points, with its error if it is known."""
        error, unit = self.standard_error, "points" if self.share else "%"
        digits = 0 if abs(self.change) >= 1 else 2 if error and 5e-5 <= error < 5e-4 else 1
        change = round(100 * self.change, digits) + 0.0  # no -0.0
        return f"{change:+,.{digits}f}" + (f" ± {100 * error:,.{digits}f}" if error is not None else "") + f" {unit}"

    @property
    def in_table(self) -> str:
        """The change, with the words "no difference measurable" where its error covers zero."""
        return f"{NOT_MEASURABLE} ({self.short})" if self.is_measurable is False else self.short

    def __str__(self) -> str:
        """As `in_table`; it also says where the error is unknown."""
        return f"{self.short}, error unknown" if self.standard_error is None else self.in_table


def difference(
    value: float, other: float, paired_error: float | None = None, *, share: bool = False, more: float = 0.0
) -> Difference | None:
    """The difference of one model's value from another's; None if one is not finite, or the other is zero.

    Args:
        paired_error: Of shares, that of their difference; otherwise that of the difference of the logarithms.
        share: Whether the values are shares.
        more: Standard error of `value` minus `other` that has another cause, such as the seed.
    """
    if not (math.isfinite(value) and math.isfinite(other) and (share or other)):
        return None
    if share:
        return Difference(value - other, None if paired_error is None else math.hypot(paired_error, more), share=True)
    error = None if paired_error is None else math.hypot(paired_error * value / other, more / other)
    return Difference(value / other - 1, error)
