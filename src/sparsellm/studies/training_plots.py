"""The loss curves of a training: of the whole model, or of each block."""

from __future__ import annotations

import math

from sparsellm.errors import plural
from sparsellm.methods import TrainingResult
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.training_outcome import WHOLE_MODEL
from sparsellm.studies.figures import SCALES, WIDTH, Plot, new_figure, plain_numbers


def training_curves(report: Report) -> Plot | None:
    """The held-out and the training loss at each validation; None if nothing was trained."""
    from matplotlib import colormaps

    trainings: dict[str, TrainingResult] = {WHOLE_MODEL: report.recovered} if report.recovered else {}
    trainings |= {f"block {block.index}": block.refined for block in report.blocks if block.refined}
    if report.gradual:
        trainings = {
            f"{stage.sparsity}, {name}": training
            for stage in report.gradual.stages
            for name, training in stage.training.items()
        }
    trainings = {name: training for name, training in trainings.items() if len(training.curve) > 1}
    if not trainings:
        return None
    rows = [
        [name, str(point.step), "" if point.training is None else f"{point.training:.4g}", f"{point.held_out:.4g}"]
        for name, training in trainings.items()
        for point in training.curve
    ]
    unchanged = [name for name, x in trainings.items() if not x.steps]
    ratios = [x.after / x.before for x in trainings.values() if x.before]
    of = "the whole model" if report.recovered else plural(len(report.blocks), "block")
    of += f" in {plural(len(report.gradual.stages), 'stage')}" if report.gradual else ""
    text = (
        f"Training of {of}: the held-out loss of the state that was kept is{' on average' if len(ratios) > 1 else ''} "
        f"{sum(ratios) / max(len(ratios), 1):.3g} times the one before."
    )
    if unchanged:
        none = "No step lowered it" + (f" for {', '.join(unchanged)}" if len(unchanged) < len(trainings) else "")
        text += f" {none}: these weights are unchanged."
    figure = new_figure(WIDTH, 3.0)
    axes = figure.subplots()
    for number, (name, training) in enumerate(trainings.items()):
        colour = colormaps[SCALES["block"]](0.25 + 0.65 * number / max(len(trainings) - 1, 1))
        held_out = [(x.step, x.held_out) for x in training.curve if math.isfinite(x.held_out)]
        axes.plot(*zip(*held_out, strict=True), marker="o", color=colour, label=f"{name}, held-out")
        trained = [(x.step, x.training) for x in training.curve if x.training is not None and math.isfinite(x.training)]
        if trained and len(trainings) == 1:
            axes.plot(*zip(*trained, strict=True), linestyle="--", color=colour, label="training")
    axes.set_yscale("log")
    plain_numbers(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if len(trainings) <= 8:
        figure.legend(loc="outside lower left", ncols=2)
    return Plot("training", "Training", text, ["trained", "step", "training loss", "held-out loss"], rows, figure)
