"""Warnings about a finished run."""

from __future__ import annotations

from sparsellm.methods import BlockMethod
from sparsellm.runs.events import Observer, add_note
from sparsellm.runs.recovery import BlockRecovery
from sparsellm.runs.report import Report
from sparsellm.solvers.statistics import TokenCount


def add_warnings(method: BlockMethod, report: Report, observer: Observer) -> None:
    """Add notes on what differs from the recipe: fallbacks in blocks, raised damping, surplus zeros."""
    blocks_by_note: dict[str, list[str]] = {}
    for block in report.blocks:
        for text in (block.note, block.refined.note if block.refined else ""):
            if text:
                blocks_by_note.setdefault(text, []).append(block.name)
    for text, names in blocks_by_note.items():
        in_all = len(names) == len(report.blocks) > 2
        for name in [f"{names[0]} to {names[-1]}"] if in_all else names:
            add_note(f"{name}: {text}", report, observer)
    if isinstance(method, BlockRecovery):
        return  # recovery chooses no zeros
    damping = getattr(getattr(method, "solver", None), "damping", None)
    raised = [layer for layer in report.layers if layer.damping is not None and layer.damping != damping]
    if raised:
        highest = max(raised, key=lambda layer: layer.damping or 0)
        add_note(
            f"damping was raised from {damping:g} on {len(raised)} layers because a factorisation failed, "
            f"to at most {highest.damping:g} on {highest.name}: use more calibration tokens",
            report,
            observer,
        )
    _warn_about_experts(report, observer)
    surplus = [x for x in report.layers if x.zeros != x.pattern.count_removed(x.shape[0] * x.shape[1])]
    if surplus:
        add_note(
            f"{len(surplus)} layers have more zeros than requested, {surplus[0].name} first "
            f"({100 * surplus[0].sparsity:.2f} %): inputs are always zero, "
            "dense weights were zero already, or small weights round to zero in the model's dtype",
            report,
            observer,
        )


def _warn_about_experts(report: Report, observer: Observer) -> None:
    """Add notes on experts with few routed tokens, and on layers without any tokens."""
    few = [x for x in report.layers if x.routed_tokens is not None and x.routed_tokens < x.tokens]
    if few:
        least = min(few, key=lambda layer: layer.routed_tokens or 0)
        experts = {x.name.rpartition(".")[0] for x in few}
        add_note(
            f"{len(experts)} experts received fewer tokens than their layers have inputs, {least.name.rpartition('.')[0]} "
            f"only {least.routed_tokens:,}: evenly spaced tokens of the layer were added, {least.tokens:,} in all",
            report,
            observer,
        )
    unused = [x.name for x in report.layers if x.tokens == 0 and x.known != TokenCount.__name__]
    if unused:
        text = f"{len(unused)} layers received no tokens, {unused[0]} first, and were pruned by magnitude"
        add_note(f"{text}: use more calibration tokens", report, observer)
