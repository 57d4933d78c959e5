"""What of a finished run was not done as asked."""

from __future__ import annotations

from sparsellm.methods import BlockMethod
from sparsellm.runs.events import Observer, note
from sparsellm.runs.recovery import BlockRecovery
from sparsellm.runs.report import Report
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.statistics import NoInputs


def remark(method: BlockMethod, report: Report, say: Observer) -> None:
    """Tell what was not done as asked: blocks pruned otherwise, damping raised, zeros that were not asked for."""
    told: dict[str, list[str]] = {}
    for block in report.blocks:
        for text in (block.note, block.refined.note if block.refined else ""):
            if text:
                told.setdefault(text, []).append(block.name)
    for text, names in told.items():
        alike = len(names) == len(report.blocks) > 2
        for where in [f"{names[0]} to {names[-1]}"] if alike else names:
            note(f"{where}: {text}", report, say)
    if isinstance(method, BlockRecovery):
        return  # it chose no zeros
    asked = getattr(getattr(method, "solver", None), "damping", None)
    raised = [layer for layer in report.layers if layer.damping is not None and layer.damping != asked]
    if raised:
        most = max(raised, key=lambda layer: layer.damping or 0)
        note(
            f"damping was raised from {asked:g} on {len(raised)} layers to rescue a factorisation, "
            f"most to {most.damping:g} on {most.name}: use more calibration tokens",
            report,
            say,
        )
    _remark_on_experts(report, say)
    more = [x for x in report.layers if x.zeros != parse_pattern(x.pattern).removed(x.shape[0] * x.shape[1])]
    if more:
        note(
            f"{len(more)} layers have more zeros than asked for, {more[0].name} first ({100 * more[0].sparsity:.2f} %): their "
            "inputs are always zero, their dense weights had zeros already, or small weights vanish in the model's dtype",
            report,
            say,
        )


def _remark_on_experts(report: Report, say: Observer) -> None:
    """Tell of experts that few tokens are sent to, and of layers that none reach."""
    few = [x for x in report.layers if x.routed is not None and x.routed < x.tokens]
    if few:
        least = min(few, key=lambda layer: layer.routed or 0)
        experts = {x.name.rpartition(".")[0] for x in few}
        note(
            f"{len(experts)} experts were sent fewer tokens than their layers have inputs, {least.name.rpartition('.')[0]} "
            f"only {least.routed:,}: each was also shown evenly spaced tokens of its layer, {least.tokens:,} in all",
            report,
            say,
        )
    blind = [x.name for x in report.layers if x.tokens == 0 and x.known != NoInputs.__name__]
    if blind:
        first = f"{len(blind)} layers saw no token, {blind[0]} first, and lost their smallest weights"
        note(f"{first}: use more calibration tokens", report, say)
