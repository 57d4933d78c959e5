"""The results of commands in text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TypeVar

from rich.console import Console

from sparsellm.cli.console import print_line, show, text_table
from sparsellm.errors import capitalized, plural
from sparsellm.evaluation.results import Accuracy, Evaluation, Perplexity, change_of, is_fraction, mean, measure_of
from sparsellm.observers.display import percent, with_standard_error
from sparsellm.outputs.inspection import Inspection, LayerZeros
from sparsellm.outputs.report import Report, When
from sparsellm.outputs.sizes import WeightSizes

AnyMeasurement = TypeVar("AnyMeasurement", Perplexity, Accuracy)


def task_metric(metric: str) -> str:
    """Name a task's metric, with its unit."""
    return f"{metric}, %" if is_fraction(metric) else metric


def task_value(result: Accuracy) -> str:
    """Format a task's result in the unit of `task_metric`, with its standard error."""
    return (percent if is_fraction(result.metric) else with_standard_error)(result.value, result.standard_error)


def print_summary(console: Console, report: Report, folder: str) -> None:
    """Print the results of a finished run."""
    share = 100 * report.zeros / max(report.parameters, 1)
    described = report.describe()
    described = capitalized(described) if report.recovered_nothing else described
    print_line(console, f"{report.recipe.model}: {described}")
    layers = f"{plural(len(report.layers), 'layer')} hold{'s' * (len(report.layers) == 1)}"
    print_line(console, f"{layers} {100 * report.sparsity:.2f} % zeros; {share:.2f} % of all parameters are zero.")
    if report.sizes:
        print_line(console, f"Weights: {report.sizes}.")
    if report.coverage and (coverage := report.coverage.describe()):
        print_line(console, coverage)
    if report.recovered and (losses := report.recovered.describe()):
        print_line(console, losses)
    if report.perplexity:
        head = ["text", *(f"{when} perplexity" for when in dict.fromkeys((report.start, "pruned", report.result))), "change"]
        head += ["by the recovery"] if report.pruned else []
        rows = []
        for name, pair in report.perplexity.items():
            before = [report.before(name)] if report.pruned else []
            changes = [report.change(name), *([report.change_by_recovery(name)] if report.pruned else [])]
            figures = [_figure(x) for x in (pair.get("dense"), *before, pair.get("pruned"))]
            rows.append([name, *figures, *(str(change) if change else "-" for change in changes)])
        show(console, text_table(head, rows))
    if report.tasks:
        rows = []
        for name, results in report.tasks.items():
            values = [task_value(x) if (x := results.get(when)) else "-" for when in ("dense", "pruned")]
            rows.append([name, task_metric(next(iter(results.values())).metric), *values])
        show(console, text_table(["task", "metric", report.start, report.result], rows))
    print_line(console, f"Wrote {folder}, read back and verified.")


def _figure(perplexity: Perplexity | None) -> str:
    """A perplexity with its standard error; a dash where it was not measured."""
    return with_standard_error(perplexity.value, perplexity.standard_error) if perplexity else "-"


def print_evaluation(console: Console, result: Evaluation, against: str | None) -> None:
    """Print what was measured of a model, and of the model `against` that it is compared with, with the differences."""
    other = result.against
    columns = ["value", *([PurePath(against or "").name, "difference"] if other else [])]

    def compared(name: str, found: Mapping[str, AnyMeasurement], form: Callable[[AnyMeasurement], str]) -> list[str]:
        return [form(found[name]) if name in found else "-", str(result.differences.get(name) or "-")] if other else []

    if result.perplexity:
        head = ["text", "perplexity", *columns[1:], "sequences", "seconds"]
        rows = []
        for name, x in result.perplexity.items():
            row = [name, _figure(x), *compared(name, other.perplexity if other else {}, _figure)]
            rows.append([*row, f"{x.windows} x {x.lengths} tokens", f"{x.seconds:.1f}"])
        show(console, text_table(head, rows))
    if result.accuracy:
        rows = []
        for name, score in result.accuracy.items():
            row = [name, task_metric(score.metric), task_value(score)]
            rows.append([*row, *compared(name, other.accuracy if other else {}, task_value), f"{score.questions}"])
        accuracies = [x for x in result.accuracy.values() if measure_of(x.metric) == "accuracy"]
        if len(accuracies) > 1:
            average = mean([(x.value, x.standard_error) for x in accuracies])
            rows.append(["mean", "accuracy, %", percent(*average), *[""] * len(columns)])
        show(console, text_table(["task", "metric", *columns, "questions"], rows))


def print_several(console: Console, reports: Mapping[str, Report]) -> None:
    """Print the results of several runs on one model, by the folder of each, below those of the model before."""
    first, *_ = reports.values()
    texts, tasks = list(first.perplexity), list(first.tasks)

    def cells(report: Report, when: When) -> list[str]:
        values = [_figure(report.perplexity.get(name, {}).get(when)) for name in texts]
        values += [task_value(x) if (x := report.tasks.get(name, {}).get(when)) else "-" for name in tasks]
        if when == "dense":
            return values
        changes = [change_of(report.perplexity.get(x, {})) for x in texts] + [change_of(report.tasks.get(x, {})) for x in tasks]
        return [f"{value} ({change.in_table})" if change else value for value, change in zip(values, changes, strict=True)]

    sizes = WeightSizes.columns([report.sizes for report in reports.values()])
    head = ["output", "zeros, %", *(column[0] for column in sizes), *(f"perplexity on {name}" for name in texts)]
    head += [f"{name}, %" if is_fraction(next(iter(x.values())).metric) else name for name, x in first.tasks.items()]
    rows = [[first.start, "", *("" for _ in sizes), *cells(first, "dense")]] if texts or tasks else []
    for number, (folder, report) in enumerate(reports.items(), 1):
        taken = [column[number] for column in sizes]
        rows.append([folder, f"{100 * report.sparsity:.2f}", *taken, *cells(report, "pruned")])
    show(console, text_table(head, rows))
    print_line(console, f"Wrote {len(reports)} outputs, each read back and verified.")


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Print the zeros of each layer and of the checkpoint, and its differences from another checkpoint."""
    marks, expected = {True: "yes", False: "NO", None: "-"}, inspection.expected
    rows, rounded = [], inspection.bits_per_weight is not None
    for x in inspection.layers:
        row = [x.name, f"{x.shape[0]} x {x.shape[1]}", f"{100 * x.sparsity:.2f} %"]
        row += _integers(x) if rounded else []
        rows.append([*row, f"{x.pattern or '-'}", marks[x.holds]] if expected else row)
    columns = [*(["integers", "group", "bits"] if rounded else []), *(["expected", "holds"] if expected else [])]
    show(console, text_table(["layer", "shape", "zeros", *columns], rows))
    if rounded:
        print_line(console, f"Packed, layers with integers take {inspection.bits_per_weight:.3f} bits a weight.")
    if inspection.checked:
        total = f"{inspection.checked}, with {100 * inspection.total:.2f} % zeros together"
        print_line(console, f"Layers that should be pruned: {total}; {expected} holds: {marks[inspection.as_expected]}.")
    if expected and inspection.missing:
        print_line(console, f"Missing: {', '.join(inspection.missing)}.")
    share = 100 * inspection.zeros / max(inspection.parameters, 1)
    print_line(console, f"{inspection.zeros:,} of {inspection.parameters:,} stored parameters are zero ({share:.2f} %).")
    if wrong := inspection.not_finite_in:
        tensors = f"{plural(len(wrong), 'tensor')}, {wrong[0]} first"
        print_line(console, f"{plural(inspection.not_finite, 'number')} in {tensors}: NaN or infinity.")
    if inspection.packed:
        print_line(console, inspection.packed)
    if against := inspection.against:
        converted = f", {len(inspection.converted)} after conversion to their dtype" if inspection.converted else ""
        equal = inspection.alike + len(inspection.converted)
        print_line(console, f"{equal} tensors equal those of {against}{converted}; {len(inspection.changed)} differ.")
        for label, names in (("this model", inspection.only_here), (against, inspection.only_there)):
            if names:
                print_line(console, f"Only in {label}: {', '.join(names)}.")


def _integers(layer: LayerZeros) -> list[str]:
    """The cells of a layer's integers, of the columns that share a scale, and of the stored bits a weight."""
    if layer.bits is None:
        return ["-", "-", "-"]
    group = f"{layer.group_size} columns" if layer.group_size else "row"
    return [f"int{layer.bits}", group, f"{layer.bits_per_weight:.3f}"]
