"""What a person sees: one progress display for a whole run, on stderr; tables of results."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sparsellm.events import Event, Measured, Note, Stage
from sparsellm.inspection import Inspection
from sparsellm.memory import human_bytes, peak_memory
from sparsellm.methods import BlockResult, EpochResult, LayerResult
from sparsellm.planning import RunPlan
from sparsellm.refinement import Refined
from sparsellm.report import Report

GIB = 1024**3


class Progress:
    """Shows a run's events: one live line on a terminal, plain lines elsewhere. A context manager and an observer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._stage = ""
        self._blocks = self._done = 0
        self._detail = ""
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Stage):
            self._stage, self._blocks, self._done, self._detail = event.name, event.blocks, 0, ""
            self._started = time.monotonic()
            if not self._live:
                self._console.print(event.name, highlight=False)
        elif isinstance(event, Note):
            self._console.print(Text(f"note: {event.text}", style="yellow"), soft_wrap=True)
        elif isinstance(event, LayerResult):
            self._detail = f"{event.name}  error {event.error:.3g}"
        elif isinstance(event, EpochResult):
            self._detail = f"{event.block} {event.step} {event.epoch}  feed-forward error {event.feed_forward_error:.3g}"
        elif isinstance(event, Refined):
            self._detail = f"refined, held-back error {event.before:.3g} to {event.after:.3g}"
        elif isinstance(event, Measured):
            self._console.print(_measured(event), highlight=False, soft_wrap=True)
        elif isinstance(event, BlockResult):
            self._finish(event)
        if self._live:
            self._live.update(self._line())

    def _finish(self, block: BlockResult) -> None:
        """A block is done."""
        self._done += 1
        if not self._live:
            self._console.print(f"{self._line()}  {_errors(block)}", highlight=False, soft_wrap=True)

    def _line(self) -> Text:
        """The state of the run in one line."""
        if not self._blocks:
            return Text(self._stage)
        spent = time.monotonic() - self._started
        left = f", {_duration(spent / self._done * (self._blocks - self._done))} left" if self._done else ""
        memory = f"{peak_memory() / GIB:.1f} GiB at most"
        where = f"  {self._detail}" if self._live else ""
        return Text(f"{self._stage}: block {self._done}/{self._blocks}  {_duration(spent)}{left}  {memory}{where}")


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
    console.print(f"{report.recipe.model}: {report.recipe.describe()}", highlight=False, soft_wrap=True)
    console.print(
        f"{len(report.layers)} layers hold {100 * report.sparsity:.2f} % zeros; {share:.2f} % of all parameters are zero.",
        highlight=False,
        soft_wrap=True,
    )
    if report.coverage and (told := report.coverage.describe()):
        console.print(told, highlight=False, soft_wrap=True)
    if report.perplexity:
        rows = [
            [text, *(plus_minus(values[x]["value"], values[x]["standard_error"]) for x in ("dense", "pruned"))]
            for text, values in report.perplexity.items()
        ]
        show(console, table(["text", "dense perplexity", "pruned perplexity"], rows))
    if report.tasks:
        rows = [
            [task, *(percent(found[when]["value"], found[when]["standard_error"]) for when in ("dense", "pruned"))]
            for task, found in report.tasks.items()
        ]
        show(console, table(["task", "dense accuracy, %", "pruned accuracy, %"], rows))
    console.print(f"Wrote {folder}, read back and verified.", highlight=False, soft_wrap=True)


def print_inspection(console: Console, found: Inspection) -> None:
    """The zeros of a checkpoint: a line for each layer, one for all together, and what differs from another checkpoint."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

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
        say(f"The {len(checked)} layers that should be pruned hold {100 * found.total:.2f} % zeros together{held}.")
    if found.expected and found.missing:
        say(f"not there: {', '.join(found.missing)}")
    share = 100 * found.zeros / max(found.parameters, 1)
    say(f"{found.zeros:,} of {found.parameters:,} stored parameters are zero ({share:.2f} %).")
    if found.against:
        say(f"{found.alike} tensors equal those of {found.against}; {len(found.changed)} differ.")
        for word, names in (("only here", found.only_here), ("only there", found.only_there)):
            if names:
                say(f"{word}: {', '.join(names)}")


def _measured(found: Measured) -> str:
    """A figure in words."""
    shown = (plus_minus if found.kind == "perplexity" else percent)(found.value, found.standard_error)
    return f"{found.kind} on {found.on}, {found.when}: {shown}{' %' if found.kind == 'accuracy' else ''}"


def print_plan(console: Console, plan: RunPlan) -> None:
    """What a person wants to know of a run before it starts."""
    found, place = plan.found, plan.found.place

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"{plan.recipe.model}: {plan.recipe.describe()}")
    shapes = ", ".join(f"{n} of {out} x {into} at {pattern}" for (pattern, (out, into)), n in plan.layers.items())
    say(f"{plan.blocks} blocks; {sum(plan.layers.values())} layers to prune: {shapes}.")
    if told := plan.coverage.describe():
        say(told)
    where = place.note or "in memory as a whole"
    say(f"The model, {human_bytes(place.model)}, is {where}.")
    if plan.samples:
        say(f"{plan.samples} windows of {plan.length:,} tokens, {found.batch} at a time.")
    rows = [
        [
            x.name,
            human_bytes(x.memory.get(found.device, 0)),
            human_bytes(x.files),
            _operations(x.operations),
            _duration(x.seconds),
        ]
        for x in found.stages
    ]
    show(console, table(["stage", f"memory ({found.device})", "files", "operations", "time"], rows))
    say(
        f"Peak: {human_bytes(found.data)} of memory on {found.device} while {found.peak.name}, of {human_bytes(place.memory)} "
        f"that may be taken; the process {human_bytes(found.resident)}, Python and its libraries included."
    )
    say(f"Disk: {human_bytes(found.disk)}, of {human_bytes(plan.disk_free)} free. Time: about {_duration(found.seconds)}.")
    if plan.most_samples is not None:
        say(f"Up to --samples {plan.most_samples:,} would fit.")


def _operations(count: float) -> str:
    """Floating-point operations as people say them."""
    units = ["", "k", "M", "G", "T", "P", "E"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _errors(block: BlockResult) -> str:
    """The block's layers in few words: the mean of their output errors."""
    if not block.layers:
        return ""
    mean = sum(layer.error for layer in block.layers) / len(block.layers)
    return f"mean error {mean:.3g}"


def _duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
