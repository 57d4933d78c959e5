"""The measured values in a run's report, with the dense model's and published ones, how they are written, and the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from sparsellm.evaluation.differences import (
    NOT_MEASURABLE,
    Deviations,
    Difference,
    difference,
    joined_deviations,
    mean_deviations,
)
from sparsellm.evaluation.results import Accuracy, Perplexity, is_fraction, mean, measure_of
from sparsellm.outputs.report import PrunedReport, Report, When
from sparsellm.recipes.recipe import Recipe
from sparsellm.runtime.memory import human_bytes

SIZE, PACKED_SIZE, BITS_A_WEIGHT = OF_SIZE = "size", "packed size", "bits a weight"
"""The measures of bytes: of the weights as written and packed, and of what a weight of rounded layers takes packed."""

Table = tuple[list[str], list[list[str]]]
"""Head and lines of a table."""

OF_RUN = ("sparsity", *OF_SIZE, "seconds", "seconds per block")
"""Measures that no text or task belongs to."""


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        value: The value, or its mean over seeds.
        standard_error: Over seeds if there are several, else over sequences or questions; None if unknown.
        dense: The dense model's value; None if it was not measured.
        deviations: What each sequence or question contributes to its error, for differences; None if unknown.
        seeds: Number of seeds that it is the mean over.
        share: Whether the value is a share, which is shown in per cent.
        size: Whether it is a number of bytes, which is shown in a unit of these.
        published: The value that a paper reports.
        source: Where the paper reports it.
    """

    value: float
    standard_error: float | None = None
    dense: Figure | None = None
    deviations: Deviations | None = field(default=None, repr=False)
    seeds: int = 1
    share: bool = False
    size: bool = False
    published: float | None = None
    source: str = ""

    @property
    def ratio(self) -> float | None:
        """The measured value divided by the published one."""
        return self.value / self.published if self.published else None

    def against(self, other: Figure) -> Difference | None:
        """The difference from another figure, with its error over the sequences or questions that both were measured on.

        For means over several seeds, the error over seeds is added to that.
        """
        paired = self.deviations.paired_error(other.deviations) if self.deviations else None
        more = math.hypot(*(x.standard_error or 0.0 for x in (self, other) if x.seeds > 1))
        return difference(self.value, other.value, paired, share=self.share, more=more)

    @property
    def difference(self) -> Difference | None:
        """The difference from the dense model; None if it is unknown."""
        return None if self.dense is None else self.against(self.dense)

    @property
    def bar(self) -> float | None:
        """The length of an error bar: the error of the change from the dense model, in the unit of the value, if known."""
        if self.dense is None or not self.difference or self.difference.standard_error is None:
            return self.standard_error
        return self.difference.standard_error * (1.0 if self.share else self.dense.value)

    @property
    def change(self) -> float | None:
        """The change from the dense model: the difference of two shares, otherwise relative to the dense value."""
        return self.difference.change if self.difference else None

    @property
    def change_text(self) -> str:
        """The change in per cent, or in percentage points for a share, with its error; empty if it is unknown."""
        return self.difference.in_table if self.difference else ""

    @property
    def short(self) -> str:
        """The value to three digits, a share in per cent."""
        if self.size:
            return human_bytes(self.value)
        value = 100 * self.value if self.share else self.value
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")) + (" %" if self.share else "")

    @property
    def measured(self) -> str:
        """The value with its standard error, a share in per cent."""
        if self.size:
            return human_bytes(self.value)
        scale = 100 if self.share else 1
        error = None if self.standard_error is None else scale * self.standard_error
        return value_with_error(scale * self.value, error) + (" %" if self.share else "")

    def __str__(self) -> str:
        """The value with its standard error, then the change from the dense model, the published value and the ratio."""
        remarks = [self.change_text] if self.change_text else []
        if self.published is not None:
            published = replace(self, value=self.published, standard_error=None).measured
            remarks.append(f"paper {published}" + (f", ×{self.ratio:.2f}" if self.ratio is not None else ""))
        return self.measured + (f" ({'; '.join(remarks)})" if remarks else "")

    def to_dict(self) -> dict[str, Any]:
        """The figure as plain data."""
        return {
            "value": self.value,
            "standard_error": self.standard_error,
            "dense": self.dense.value if self.dense else None,
            "change": self.change,
            "change_error": self.difference.standard_error if self.difference else None,
            "published": self.published,
            "ratio": self.ratio,
            "source": self.source,
        }


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """By text, the last part of its path, or the full path if several texts have the same last part."""
    texts = list(texts)
    names = [PurePath(text).name for text in texts]
    return {text: name if names.count(name) == 1 else text for text, name in zip(texts, names, strict=True)}


def measures(report: Report) -> dict[str, Figure]:
    """The values in a run's report, by the name of the measure."""
    figures = evaluations(report)
    figures["sparsity"] = Figure(report.totals.sparsity_of_pruned_layers, share=True)
    if sizes := report.sizes:
        figures |= {SIZE: Figure(sizes.written, size=True), PACKED_SIZE: Figure(sizes.packed, size=True)}
    if report.totals.bits_of_pruned_layers is not None:
        figures[BITS_A_WEIGHT] = Figure(report.totals.bits_of_pruned_layers)
    seconds = sum(block.seconds for block in report.blocks)  # includes blocks that an earlier process finished
    figures["seconds"] = Figure(seconds)
    if report.blocks:
        figures["seconds per block"] = Figure(seconds / len(report.blocks))
    return figures


def evaluations(report: Report | PrunedReport) -> dict[str, Figure]:
    """The perplexities and accuracies in a report, by the name of the measure."""
    names = short_names(report.perplexity)
    figures = {f"perplexity {names[text]}": figure_of(pair) for text, pair in report.perplexity.items() if "pruned" in pair}
    for task, scores in report.tasks.items():
        if "pruned" in scores:
            figures[f"{measure_of(scores['pruned'].metric)} {task}"] = figure_of(scores)
    accuracies = [figure for name, figure in figures.items() if name.startswith("accuracy ")]
    if len(accuracies) > 1:
        dense = [x.dense for x in accuracies if x.dense]
        mean_of_dense = _mean_accuracy(dense) if len(dense) == len(accuracies) else None
        figures["accuracy mean"] = replace(_mean_accuracy(accuracies), dense=mean_of_dense)
    return figures


def figure_of(pair: Mapping[When, Perplexity] | Mapping[When, Accuracy]) -> Figure:
    """The pruned model's measurement, which must exist, with the dense model's."""
    return replace(_figure(pair["pruned"]), dense=_figure(pair["dense"]) if "dense" in pair else None)


def _figure(result: Perplexity | Accuracy) -> Figure:
    """A result in a report."""
    deviations = result.parts.deviations if result.parts else None
    share = isinstance(result, Accuracy) and is_fraction(result.metric)
    return Figure(result.value, result.standard_error, share=share, deviations=deviations)


def _mean_accuracy(accuracies: Sequence[Figure]) -> Figure:
    """The mean over tasks, with its standard error."""
    value, error = mean([(x.value, x.standard_error) for x in accuracies])
    return Figure(value, error, share=True, deviations=joined_deviations([x.deviations for x in accuracies]))


def one_target(reports: Iterable[Report]) -> bool:
    """Whether the errors of pruning runs are relative to the same kind of target: the default's is the dense stream."""
    recipes = [report.recipe for report in reports]
    return len({recipe.method == "sparsellm" for recipe in recipes if isinstance(recipe, Recipe)}) < 2


def headlines(names: Iterable[str]) -> list[str]:
    """The measures that sum up a run: those of texts and tasks, with the mean accuracy in place of several accuracies."""
    names = [name for name in names if name not in OF_RUN]
    several = "accuracy mean" in names
    return [name for name in names if name == "accuracy mean" or not (several and name.startswith("accuracy "))]


def spoken(measure: str) -> str:
    """The name of a measure for a sentence: "perplexity on demo"."""
    kind, _, subject = measure.partition(" ")
    if measure in OF_RUN or not subject:
        return measure
    return f"mean {kind}" if subject == "mean" else f"{kind} on {subject}"


def error_legend(figures: Iterable[Figure]) -> list[str]:
    """The meaning of ± in a table of figures and their changes from the dense model, in sentences."""
    figures, over_items = list(figures), "over sequences or questions"
    seeds = sorted({figure.seeds for figure in figures if figure.seeds > 1})
    if seeds:
        count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
        alone = any(x.seeds == 1 and x.standard_error is not None for x in figures)
        dense = any(x.dense and x.dense.standard_error is not None for x in figures)
        others = " and ".join(["of a single run"] * alone + ["of the dense model"] * dense)
        lines = [f"± is the standard error over {count} seeds{f', {others} {over_items}' if others else ''}."]
    else:
        lines = [f"± is the standard error {over_items}."]
    if any(x.difference and x.difference.standard_error is not None for x in figures):
        more = ", and over seeds" if seeds else ""
        lines.append(f"± of a change is that of the difference on the same sequences or questions{more}.")
    if any(x.difference and x.difference.standard_error is None for x in figures):
        reasons = "other sequences, a single one, or a report of an earlier version"
        lines.append(f"The error of a change without ± is unknown: {reasons}.")
    return lines


def mean_over_seeds(figures: Sequence[Figure]) -> Figure:
    """The mean over seeds with its standard error; a single figure unchanged."""
    if len(figures) == 1:
        return figures[0]
    values = [figure.value for figure in figures]
    value = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if math.isfinite(value) else None
    deviations = mean_deviations([figure.deviations for figure in figures])
    return replace(figures[0], value=value, standard_error=error, deviations=deviations, seeds=len(figures))


def value_with_error(value: float, error: float | None = None) -> str:
    """A value to about four digits, with its standard error to the same number of decimal places."""
    size = abs(value)
    decimals = 0 if size >= 1000 else 1 if size >= 100 or (error or 0) >= 1 else 2 if size >= 1 else 3
    text = f"{value:.3g}" if size < 1 else f"{value:,.{decimals}f}"
    return f"{text} ± {error:,.{decimals}f}" if error is not None else text


REFERENCE = "reference"
"""The word beside differences where nothing is said to be best."""


@dataclass(frozen=True)
class Ranking:
    """Figures of one measure beside the best of them.

    Attributes:
        best: The name of the figure with the highest share, or the lowest value of another measure.
        differences: Those of the other finite figures from it, by their names.
    """

    best: str
    figure: Figure
    differences: Mapping[str, Difference | None]

    @property
    def extreme(self) -> str:
        """The kind of the best value: "highest" or "lowest"."""
        return "highest" if self.figure.share else "lowest"

    @property
    def mark(self) -> str:
        """The word for the best beside the differences from it: the extreme if it differs measurably from every other."""
        return self.extreme if len(self.those(measurable=True)) == len(self.differences) else REFERENCE

    def those(self, *, measurable: bool | None) -> list[str]:
        """The others whose difference from the best is measurable, is not, or has an unknown error (None)."""
        return [name for name, x in self.differences.items() if (x.is_measurable if x else None) is measurable]


def rank_figures(figures: Mapping[str, Figure]) -> Ranking | None:
    """Compare figures of one measure; None if none is finite. Of equal ones the first is the best."""
    finite = {name: figure for name, figure in figures.items() if math.isfinite(figure.value)}
    if not finite:
        return None
    best = min(finite, key=lambda name: -finite[name].value if finite[name].share else finite[name].value)
    others = {name: figure.against(finite[best]) for name, figure in finite.items() if name != best}
    return Ranking(best, finite[best], others)


def claim(ranking: Ranking) -> str:
    """The claim about the best of several combinations, as the begin of a clause: "alps is best "."""
    if not ranking.differences:
        return f"{ranking.best} " if ranking.best else ""
    if unsure := ranking.those(measurable=False):
        return f"{ranking.best} is {ranking.extreme}, with {NOT_MEASURABLE} from {', '.join(unsure)}, "
    if ranking.those(measurable=None):
        return f"{ranking.best} is {ranking.extreme}, by a difference of unknown error, "
    return f"{ranking.best} is best "
