"""What of a finished run was not done as asked."""

from __future__ import annotations

from sparsellm.methods import BlockMethod
from sparsellm.runs.events import Observer, add_note
from sparsellm.runs.recovery import BlockRecovery
from sparsellm.runs.report import Report
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.statistics import TokenCount


def add_warnings(method: BlockMethod, report: Report, observer: Observer) -> None:
    """Tell what was not done as asked: blocks pruned otherwise, damping raised, zeros that were not asked for."""
    message: dict[str, list[str]] = {}
    for block in report.blocks:
        for text in (block.note, block.refined.note if block.refined else ""):
            if text:
                message.setdefault(text, []).append(block.name)
    for text, names in message.items():
        alike = len(names) == len(report.blocks) > 2
        for where in [f"{names[0]} to {names[-1]}"] if alike else names:
            add_note(f"{where}: {text}", report, observer)
    if isinstance(method, BlockRecovery):
        return  # it chose no zeros
    asked = getattr(getattr(method, "solver", None), "damping", None)
    raised = [layer for layer in report.layers if layer.damping is not None and layer.damping != asked]
    if raised:
        most = max(raised, key=lambda layer: layer.damping or 0)
        add_note(
            f"damping was raised from {asked:g} on {len(raised)} layers to rescue a factorisation, "
            f"most to {most.damping:g} on {most.name}: use more calibration tokens",
            report,
            observer,
        )
    _remark_on_experts(report, observer)
    more = [x for x in report.layers if x.zeros != parse_pattern(x.pattern).count_removed(x.shape[0] * x.shape[1])]
    if more:
        add_note(
            f"{len(more)} layers have more zeros than asked for, {more[0].name} first ({100 * more[0].sparsity:.2f} %): their "
            "inputs are always zero, their dense weights had zeros already, or small weights vanish in the model's dtype",
            report,
            observer,
        )


def _remark_on_experts(report: Report, observer: Observer) -> None:
    """Tell of experts that few tokens are sent to, and of layers that none reach."""
    few = [x for x in report.layers if x.routed_tokens is not None and x.routed_tokens < x.tokens]
    if few:
        least = min(few, key=lambda layer: layer.routed_tokens or 0)
        experts = {x.name.rpartition(".")[0] for x in few}
        add_note(
            f"{len(experts)} experts were sent fewer tokens than their layers have inputs, {least.name.rpartition('.')[0]} "
            f"only {least.routed_tokens:,}: each was also shown evenly spaced tokens of its layer, {least.tokens:,} in all",
            report,
            observer,
        )
    blind = [x.name for x in report.layers if x.tokens == 0 and x.known != TokenCount.__name__]
    if blind:
        first = f"{len(blind)} layers saw no token, {blind[0]} first, and lost their smallest weights"
        add_note(f"{first}: use more calibration tokens", report, observer)
