"""The target of a search: a perplexity, an accuracy or a size; and the measurements at each sparsity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from sparsellm.errors import InvalidSetting
from sparsellm.evaluation.differences import MEASURABLE, Difference
from sparsellm.evaluation.results import Accuracy
from sparsellm.extensions.studies.search_result import Point
from sparsellm.extensions.studies.searched import SEARCHED
from sparsellm.outputs.report import Report
from sparsellm.recipes.fields import parse_size
from sparsellm.recipes.path_names import PathNames
from sparsellm.runtime.memory import human_bytes


@dataclass(frozen=True)
class Target:
    """The target that the pruned model must meet: exactly one of the three.

    Attributes:
        perplexity_increase: Largest relative increase of the perplexity on every text that the recipe evaluates.
        accuracy: Smallest accuracy by task.
        size: Largest number of bytes of the weights, as they are estimated once packed.
    """

    perplexity_increase: float | None = None
    accuracy: Mapping[str, float] | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if (given := sum(value not in (None, {}) for value in vars(self).values())) != 1:
            raise InvalidSetting(
                f"Name one target: `max_perplexity_increase`, `min_accuracy` or `max_size`; got {given or 'none'}."
            )

    @classmethod
    def read(
        cls,
        max_perplexity_increase: str | float | None = None,
        min_accuracy: Mapping[str, float] | Sequence[str] | str | None = None,
        max_size: str | int | None = None,
    ) -> Target:
        """Read a target from "5%" or 0.05, from "boolq:0.6" or {"boolq": 0.6}, or from "500MB" or a number of bytes.

        Raises:
            InvalidSetting: A value is invalid, or not exactly one is given.
        """
        increase = None if max_perplexity_increase is None else _fraction("max_perplexity_increase", max_perplexity_increase)
        items = min_accuracy.items() if isinstance(min_accuracy, Mapping) else _split(min_accuracy)
        accuracy: dict[str, float] = {}
        for task, value in items:
            if not task:
                raise InvalidSetting(f"`min_accuracy` needs a task and an accuracy, as boolq:0.60; got {value!r}.")
            accuracy[task] = _fraction("min_accuracy", value, largest=1.0)
        size = parse_size("max_size", max_size) if isinstance(max_size, str) else max_size
        return cls(increase, accuracy or None, size)

    def __str__(self) -> str:
        if self.size is not None:
            return f"weights of at most {human_bytes(self.size)} once packed"
        if self.accuracy:
            least = (f"{value:g} on {PurePath(task).name}" for task, value in self.accuracy.items())
            return f"an accuracy of at least {', '.join(least)}"
        return f"a perplexity increase of at most {100 * (self.perplexity_increase or 0.0):.10g} %"

    def decide(self, increases: Iterable[Difference | None], accuracy: Mapping[str, Accuracy]) -> Decision:
        """Whether measurements meet the target.

        A perplexity increase meets it if it is below it by `MEASURABLE` standard errors: what is not known to meet it does not.
        An accuracy is compared as it is, since a bound on it is one on the score in these questions.

        Args:
            increases: The relative change of the perplexity on each text; None where it is infinite.
            accuracy: By task.
        """
        if self.accuracy:
            gaps = [
                (least - accuracy[task].value, accuracy[task].standard_error or 0.0) for task, least in self.accuracy.items()
            ]
            limit, tolerance = 0.0, 0.0
        else:
            gaps = [(x.change, x.standard_error or 0.0) if x else (math.inf, 0.0) for x in increases]
            limit, tolerance = self.perplexity_increase or 0.0, MEASURABLE
        surely = all(value + MEASURABLE * error <= limit for value, error in gaps)
        missed = any(value - MEASURABLE * error > limit for value, error in gaps)
        return Decision(all(value + tolerance * error <= limit for value, error in gaps), not surely and not missed)


@dataclass(frozen=True)
class Decision:
    """Whether a target is met.

    Attributes:
        undecided: Whether the measurements are within `MEASURABLE` standard errors of the target.
    """

    met: bool
    undecided: bool


def point_of(over: str, value: float, effort: str, report: Report, *, size: int | None, target: Target) -> Point:
    """The measurements at a value of the setting that is searched over, and whether they meet the target."""
    perplexity = {text: x["pruned"].value if "pruned" in x else math.inf for text, x in report.perplexity.items()}
    accuracy = {task: x["pruned"] for task, x in report.tasks.items() if "pruned" in x}
    changes = {text: report.change(text) for text, x in report.perplexity.items() if "dense" in x}
    increases = {text: x.change if x else math.inf for text, x in changes.items()}
    largest = max(increases, key=lambda text: increases[text], default=None)
    change = None if largest is None else changes[largest]
    decision = Decision(met=True, undecided=False) if size is not None else target.decide(changes.values(), accuracy)
    names = PathNames(report.recipe)
    return Point(
        over,
        value,
        effort,
        met=decision.met,
        perplexity=names.keys(perplexity),
        increase=None if largest is None else increases[largest],
        accuracy={names[task]: x.value for task, x in accuracy.items()},
        size=size,
        seconds=report.seconds["total"],
        undecided=decision.undecided,
        increase_error=change.standard_error if change else None,
    )


def undecided_note(points: Sequence[Point], target: Target) -> str:
    """The values of which it is undecided whether they meet the target, and what decides it; empty if there are none."""
    if target.size is not None:
        return ""
    if any(x.increase is not None and math.isfinite(x.increase) and x.increase_error is None for x in points):
        return "the error of the perplexity increase is unknown, since it is of a single sequence: its value decides"
    unsure = [x for x in points if x.undecided]
    if not unsure:
        return ""
    names, they = " and ".join(x.label for x in unsure), "they" if len(unsure) > 1 else "it"
    counted = f"{they} count{'' if len(unsure) > 1 else 's'} as missing it. Measure on more text, `evaluate_limit`,"
    if target.accuracy:
        counted = "the values decide. Measure on more questions, `task_limit`,"
    measured = ", ".join(x.describe() for x in unsure)
    return (
        f"it is undecided whether the model at {names} has {target} ({measured}): within {MEASURABLE:.0f} standard errors of "
        f"that, {counted} to decide"
    )


def outcome(point: Point, target: Target) -> str:
    """What is known of the model of a point, in a sentence: it has the target, or why that is not certain."""
    model = f"the model at {point.label}"
    if point.undecided:
        return f"{model} was measured to have {target}, within the error of the measurement"
    if point.size is None and point.increase is not None and point.increase_error is None:
        return f"{model} was measured to have {target}, with an unknown error"
    return f"{model} has {target}"


def bound_note(point: Point, target: Target, grid: Sequence[float]) -> str:
    """That a search ended at a bound of the values that it tries, and what to change; empty if it did not.

    Args:
        point: The value that it found.
        grid: The values to choose from.
    """
    last = target.size is None
    if point.value != grid[-1 if last else 0]:
        return ""
    setting = SEARCHED[point.over]
    return f"{outcome(point, target)}, and has {setting.bounds[last]}. {setting.beyond(grid, last=last)}"


def _fraction(field: str, value: str | float, largest: float = math.inf) -> float:
    """A fraction from "5%" or 0.05. Raises InvalidSetting, which names the field."""
    text = str(value).strip()
    with suppress(ValueError):
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if math.isfinite(number) and 0 <= number <= largest and (text.endswith("%") or number <= 1):
            return number
    limit = ", at most 100%," if largest == 1 else ""
    raise InvalidSetting(f"`{field}` must be a percentage such as 5%{limit} or a fraction such as 0.05, got {text!r}.")


def _split(texts: Sequence[str] | str | None) -> Iterable[tuple[str, str]]:
    """Task and accuracy of each text "TASK:ACCURACY"."""
    for text in [texts] if isinstance(texts, str) else texts or ():
        task, _, value = text.rpartition(":")
        yield task, value
