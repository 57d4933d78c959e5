"""What a person sees: one progress display for a whole run, on stderr; tables of results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sparsellm.evaluation.measurements import Accuracy, Perplexity
from sparsellm.methods import BlockResult, EpochResult, LayerResult, TrainingResult
from sparsellm.runs.events import Event, Measured, Note, Stage
from sparsellm.runs.inspection import Inspection
from sparsellm.runs.planning import RunPlan
from sparsellm.runs.report import Report, When
from sparsellm.runtime.memory import human_bytes, peak_memory

GIB = 1024**3


class Progress:
    """Shows a run's events: one live line on a terminal, plain lines elsewhere. A context manager and an observer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._stage = ""
        self._blocks = self._done = 0
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        plain, detail = not self._console.is_terminal, ""
        if isinstance(event, Stage):
            self._stage, self._blocks, self._done, self._started = event.name, event.blocks, 0, time.monotonic()
            if plain:
                _say(self._console, event.name)
        elif isinstance(event, Note):
            self._console.print(Text(f"note: {event.text}", style="yellow"), soft_wrap=True)
        elif isinstance(event, LayerResult):
            detail = f"{event.name}  error {event.error:.3g}"
        elif isinstance(event, EpochResult):
            detail = f"{event.block} {event.step} {event.epoch}  feed-forward error {event.feed_forward_error:.3g}"
        elif isinstance(event, TrainingResult):
            detail = f"refined, held-back error {event.before:.3g} to {event.after:.3g}"
        elif isinstance(event, Measured):
            shown = (plus_minus if event.kind == "perplexity" else percent)(event.value, event.standard_error)
            _say(self._console, f"{event.kind} on {event.on}, {event.when}: {shown}{' %' if event.kind == 'accuracy' else ''}")
        elif isinstance(event, BlockResult):
            self._done += 1
            errors = [layer.error for layer in event.layers]
            detail = f"mean error {statistics.fmean(errors):.3g}" if errors else ""
            if plain:
                _say(self._console, self._line(detail))
        self._status.update(Text(self._line(detail)))

    def _line(self, detail: str) -> str:
        """The state of the run in one line."""
        if not self._blocks:
            return self._stage
        elapsed = time.monotonic() - self._started
        left = f", {_duration(elapsed / self._done * (self._blocks - self._done))} left" if self._done else ""
        memory = f"{peak_memory() / GIB:.1f} GiB at most"
        return f"{self._stage}: block {self._done}/{self._blocks}  {_duration(elapsed)}{left}  {memory}  {detail}".rstrip()


def _say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, soft_wrap=True)


def table(columns: list[str], rows: list[list[str]], title: str | None = None, words: bool = False) -> Table:
    """A plain table; the first column left, the others right and uncut, unless they hold words."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(
            column, justify="right" if number and not words else "left", overflow="fold", no_wrap=number > 0 and not words
        )
    for row in rows:
        made.add_row(*row)
    return made


def show(console: Console, made: Table) -> None:
    """Print a table as wide as it is: a narrow console would drop its first column, or cut its figures."""
    before = console.width
    console.width = max(before, Measurement.get(console, console.options.update(width=1000), made).maximum)
    console.print(made)
    console.width = before


def plus_minus(value: float, error: float | None) -> str:
    """A measured figure with its standard error, the error to two digits."""
    if error is None or not error > 0:
        return f"{value:,.2f}"
    digits = 1 if error >= 1 else 2
    return f"{value:,.{digits}f} ± {error:,.{digits}f}"


def percent(value: float, error: float | None) -> str:
    """A share in percent, with its standard error."""
    return f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error else "")


def print_summary(console: Console, report: Report, folder: str) -> None:
    """What a person wants to know of a finished run."""
    share = 100 * report.zeros / max(report.parameters, 1)
    _say(console, f"{report.recipe.model}: {report.recipe.describe()}")
    sparsity = f"{len(report.layers)} layers hold {100 * report.sparsity:.2f} % zeros"
    _say(console, f"{sparsity}; {share:.2f} % of all parameters are zero.")
    if report.coverage and (coverage := report.coverage.describe()):
        _say(console, coverage)
    _show_results(console, "text", "perplexity", report.perplexity, plus_minus)
    _show_results(console, "task", "accuracy, %", report.tasks, percent)
    _say(console, f"Wrote {folder}, read back and verified.")


def _show_results(
    console: Console,
    name: str,
    measure: str,
    results: Mapping[str, Mapping[When, Perplexity | Accuracy]],
    shown: Callable[[float, float | None], str],
) -> None:
    """Print what was measured before and after, if anything was."""
    rows = [[on, *(shown(x.value, x.standard_error) for x in both.values())] for on, both in results.items()]
    if rows:
        show(console, table([name, f"dense {measure}", f"pruned {measure}"], rows))


def print_inspection(console: Console, found: Inspection) -> None:
    """The zeros of a checkpoint: a line for each layer, one for all together, and what differs from another checkpoint."""
    marks = {True: "yes", False: "NO", None: "-"}
    columns, rows = ["layer", "shape", "zeros"], []
    for x in found.layers:
        rows.append([x.name, f"{x.shape[0]} x {x.shape[1]}", f"{100 * x.sparsity:.2f} %"])
        if found.expected:
            rows[-1] += [x.pattern or "-", marks[x.holds]]
    show(console, table([*columns, *(["expected", "holds"] if found.expected else [])], rows))
    checked = [x for x in found.layers if x.holds is not None]
    if checked:
        held = f"; {found.expected} holds: {marks[found.as_expected]}"
        _say(console, f"The {len(checked)} layers that should be pruned hold {100 * found.total:.2f} % zeros together{held}.")
    if found.expected and found.missing:
        _say(console, f"not there: {', '.join(found.missing)}")
    share = 100 * found.zeros / max(found.parameters, 1)
    _say(console, f"{found.zeros:,} of {found.parameters:,} stored parameters are zero ({share:.2f} %).")
    if found.against:
        _say(console, f"{found.alike} tensors equal those of {found.against}; {len(found.changed)} differ.")
        for word, names in (("only here", found.only_here), ("only there", found.only_there)):
            if names:
                _say(console, f"{word}: {', '.join(names)}")


def print_plan(console: Console, plan: RunPlan) -> None:
    """What a person wants to know of a run before it starts."""
    place, ready = plan.place, plan.ready

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"{plan.recipe.model}: {plan.recipe.describe()}")
    shapes = ", ".join(f"{n} of {out} x {into} at {pattern}" for (pattern, (out, into)), n in plan.layers.items())
    say(f"{len(ready.blocks)} blocks; {sum(plan.layers.values())} layers to prune: {shapes}.")
    if plan.coverage and (told := plan.coverage.describe()):
        say(told)
    where = place.note or "in memory as a whole"
    say(f"The model, {human_bytes(place.model)}, is {where}.")
    if len(ready.windows):
        say(f"{len(ready.windows)} windows of {ready.length:,} tokens, {plan.batch} at a time.")
    rows = [
        [
            x.name,
            human_bytes(x.memory[plan.device]),
            human_bytes(x.files),
            _operations(x.operations),
            _duration(x.seconds),
        ]
        for x in plan.stages
    ]
    show(console, table(["stage", f"memory ({plan.device})", "files", "operations", "time"], rows))
    say(
        f"Peak: {human_bytes(plan.data)} of memory on {plan.device} while {plan.peak.name}, of {human_bytes(place.memory)} "
        f"that may be taken; the process {human_bytes(plan.resident)}, Python and its libraries included."
    )
    say(f"Disk: {human_bytes(plan.disk)}, of {human_bytes(plan.disk_free)} free. Time: about {_duration(plan.seconds)}.")
    if plan.most_samples is not None:
        say(f"Up to --samples {plan.most_samples:,} would fit.")


def _operations(count: float) -> str:
    """Floating-point operations as people say them."""
    units = ["", "k", "M", "G", "T", "P", "E"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
