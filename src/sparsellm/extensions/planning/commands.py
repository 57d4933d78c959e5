"""`plan`: the command that says what `prune` or `recover` would take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparsellm.cli import options
from sparsellm.cli.console import (
    collection_paused,
    in_process_group,
    print_json,
    print_line,
    print_note,
    show,
    stderr,
    stdout,
    text_table,
)
from sparsellm.cli.run_options import observing
from sparsellm.errors import plural
from sparsellm.extensions.recover.recipe_fields import RecoveryFields
from sparsellm.solvers.patterns import Pattern, parse_pattern

if TYPE_CHECKING:
    from sparsellm.extensions.planning.run_plan import RunPlan

Measure = Annotated[
    bool, typer.Option("--measure", help="Also measure the time, by pruning the first block; nothing is written.")
]
Layers = Annotated[bool, typer.Option("--layers", help="Also list each layer with its pattern, or why it stays dense.")]
_RECOVERED = "Plan the recovery of this folder toward MODEL, with the options of `recover`."
PlannedRecovery = Annotated[str | None, typer.Option("--recover", metavar="PRUNED", help=_RECOVERED)]


@options.recipe_options(without=("model", "pruned"), others=RecoveryFields)
def plan(
    context: typer.Context,
    model: options.ModelOrConfig = None,
    output: options.Out = None,
    *,
    recovered: PlannedRecovery = None,
    config: options.Config = None,
    measure: Measure = False,
    layers: Layers = False,
    as_json: options.JsonOption = False,
    **settings: Any,
) -> None:
    """Estimate memory and disk of a `prune` or `recover` command.

    Reads no weights, unless the time of `prune` is measured.

    Example: sparsellm plan demo:opt --sparsity 70% --calibration demo --samples 16
    """
    with in_process_group(context) as is_main, nullcontext() if measure else collection_paused():
        if recovered is not None and (config is not None or measure):
            raise typer.BadParameter("--config and --measure are for pruning runs: leave them out with --recover")
        if recovered and model is None:
            raise typer.BadParameter("name the dense model: sparsellm plan MODEL --recover PRUNED")
        if model is not None:
            settings["model"] = model

        from sparsellm.errors import TooLarge
        from sparsellm.extensions.planning.measured_plan import plan_pruning, plan_recovery
        from sparsellm.extensions.recover.block_recovery import read_recovery
        from sparsellm.recipes.file import read_recipe

        shown = nullcontext() if measure else stderr.status("planning")
        with observing(context, displays=measure and is_main) as observe, shown:
            if recovered:
                run_plan = plan_recovery(read_recovery({**settings, "pruned": recovered}), output)
            else:
                recipe = read_recipe(settings, config)
                run_plan = plan_pruning(recipe, output, measure=measure, observe=observe if measure else None)
        for note in run_plan.notes:
            print_note(note, context)
        if as_json and is_main:
            print_json(run_plan.to_dict())
        elif is_main:
            print_plan(stdout, run_plan, layers=layers)
        if run_plan.refusal:
            raise TooLarge(run_plan.refusal)


def print_plan(console: Console, plan: RunPlan, *, layers: bool = False) -> None:
    """Print the estimates of a planned run, before them each layer if `layers` is set."""
    from sparsellm.runtime.memory import human_bytes

    if layers:
        each = [
            [x.name, f"{x.shape[0]} x {x.shape[1]}", f"{x.pattern}" if x.pattern else f"dense: {x.reason}"]
            for x in plan.each_layer
        ]
        show(console, text_table(["layer", "shape", "pattern"], each))
        rule = plan.recipe.allocation_rule
        if plan.recipe.sets_patterns_later:
            print_line(console, f"The allocation rule {rule} chooses each layer's pattern once the layers are measured.")
        elif plan.recipe.allocates:
            print_line(console, f"The allocation rule {rule} changes each layer's sparsity and keeps the total.")
    placement, peak = plan.placement, plan.peak
    print_line(console, f"{plan.recipe.model}: {plan.recipe.describe()}")
    count = plural(sum(plan.layers.values()), "layer")
    print_line(console, f"{plural(plan.blocks, 'block')}, {count} to {plan.recipe.command}: {_layers(plan)}.")
    if plan.coverage and (coverage := plan.coverage.describe()):
        print_line(console, coverage)
    print_line(console, f"The model, {human_bytes(placement.model)}, is {placement.note or 'in memory as a whole'}.")
    if plan.samples:
        print_line(console, f"{plural(plan.samples, 'sequence')} of {plan.length:,} tokens, {plan.batch} per batch.")
    rows = [[x.name, human_bytes(x.memory[plan.device]), human_bytes(x.files)] for x in plan.stages]
    show(console, text_table(["stage", f"memory ({plan.device})", "files"], rows))
    print_line(
        console,
        f"Peak memory on {plan.device}: {human_bytes(peak.data_bytes)} of {human_bytes(placement.memory)}, while {peak.stage}. "
        f"The whole process, with Python and its libraries: {human_bytes(peak.resident_bytes)}.",
    )
    print_line(console, f"Disk space: {human_bytes(peak.disk_bytes)} of {human_bytes(plan.disk_free_bytes)} free.")
    if plan.time:
        print_line(console, f"Time: {plan.time.describe()}.")
    if plan.most_samples is not None:
        print_line(console, f"Memory and disk suffice for up to --samples {plan.most_samples:,}.")


def _layers(plan: RunPlan) -> str:
    """The number of layers of each shape, and their pattern or the range of their sparsities."""
    groups: dict[tuple[str, tuple[int, int]], Counter[Pattern]] = defaultdict(Counter)
    for (text, shape), count in plan.layers.items():
        pattern = parse_pattern(text)
        groups["%" if pattern.is_shareable else text, shape][pattern] += count
    return ", ".join(
        f"{found.total()} of {out} x {into}"
        + (f" at {_pattern_range(list(found))}" if not plan.recipe.sets_patterns_later else "")
        for (_, (out, into)), found in groups.items()
    )


def _pattern_range(patterns: Sequence[Pattern]) -> str:
    """A pattern, or the range of several fractions."""
    if len(patterns) == 1:
        return f"{patterns[0]}"
    percentages = [100 * pattern.sparsity for pattern in patterns]
    return f"{min(percentages):.1f} to {max(percentages):.1f}%"
