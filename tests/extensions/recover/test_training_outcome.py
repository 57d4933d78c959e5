"""What is said of trainings: no more than they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsellm.extensions.recover.model_training import ModelTraining
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.recover.run import recovery_warnings
from sparsellm.extensions.studies.compare import ComparedRun
from sparsellm.methods import BlockResult, CurvePoint, TrainingResult
from sparsellm.outputs.report import Report
from sparsellm.recipes.recipe import Recipe

UNTRAINED = TrainingResult(0.0, 0.0, 0, "not refined: there is only one group of sequences, and none can be held out")


def trained(*losses: float, steps: int = 30) -> TrainingResult:
    """A training with these held-out losses, evenly spaced."""
    curve = [CurvePoint(number * steps // (len(losses) - 1), None, loss) for number, loss in enumerate(losses)]
    best = min(curve, key=lambda point: point.held_out)
    return TrainingResult(losses[0], best.held_out, best.step, curve=tuple(curve))


RISEN, FALLEN, TURNED = trained(0.029, 0.06, 0.054), trained(0.029, 0.03, 0.02), trained(0.029, 0.02, 0.03)


def recovery(tmp_path: Path, **settings: Any) -> RecoveryRecipe:
    """The recipe of a recovery of 30 steps."""
    return RecoveryRecipe(model="m", pruned=str(tmp_path / "p50"), calibration="demo", **{"steps": 30} | settings)


def report_of(recipe: Recipe | RecoveryRecipe, *refined: TrainingResult, recovered: TrainingResult | None = None) -> Report:
    """A report with these trainings of the blocks and of the whole model."""
    blocks = [BlockResult(number, f"b.{number}", (), (), 0.0, refined=x) for number, x in enumerate(refined or [None])]
    return Report(recipe, blocks=blocks, recovered=recovered)


def test_a_recovery_is_described_by_what_it_did(tmp_path: Path) -> None:
    """0.029 before 30 steps and 0.054 at best after them is no recovery, of the whole model and of blocks."""
    recipe = recovery(tmp_path)
    steps = "30 gradient steps over the whole model"
    report = report_of(recipe, recovered=FALLEN)
    assert report.describe() == f"recovered from p50 by {steps}"
    assert report.summary()["model"].startswith("m, pruned and recovered from p50 by")
    assert ComparedRun("out", report).method == "recovered"
    none = f"nothing was recovered from p50: none of {steps} lowered the held-out loss"
    for result in (RISEN, UNTRAINED):
        report = report_of(recipe, recovered=result)
        assert report.describe() == none
        assert report.summary()["model"] == f"m, pruned; {none}"
        assert ComparedRun("out", report).method == "nothing recovered"
    blocks = recovery(tmp_path, scope="block")
    said = report_of(blocks, RISEN, RISEN).describe()
    assert said == "nothing was recovered from p50: none of 30 gradient steps over each block lowered the held-out loss"
    said = report_of(blocks, RISEN, FALLEN, FALLEN).describe()
    assert said.endswith("over each block, 1 of 3 blocks unchanged, since no step lowered the loss")
    (warning,) = recovery_warnings(report_of(blocks, RISEN, FALLEN))
    assert warning.startswith("no step lowered the held-out loss of 1 of 2 blocks, b.0 first: the weights there are unchanged.")


def test_the_losses_say_which_step_is_kept() -> None:
    """The weights of 30 steps are not those of the best of them; without a training there are no losses."""
    assert FALLEN.describe() == "Held-out loss: 0.029 before training, 0.02 after step 30, which is kept."
    assert TURNED.describe() == "Held-out loss: 0.029 before training, 0.02 after step 15 of 30, which is kept."
    assert RISEN.describe() == "No step lowered the held-out loss, 0.029: training changed nothing."
    assert UNTRAINED.describe() == ""


def test_the_reason_comes_with_the_option_to_change() -> None:
    """More steps where these are few; more text where they are not, and for a pruning that trains (`effort` best)."""
    said = ModelTraining(30, has_steps=True).why_unchanged(RISEN)
    assert said.startswith(
        "no step lowered the held-out loss, 0.029 before and at best 0.054 after: the weights are unchanged."
    )
    assert "at its height after 15 of 30 steps, the loss 0.06, and too few steps with a low rate followed." in said
    assert said.endswith("Pass more `steps`, by default 1200")
    risen = trained(0.02, 0.03, steps=1200)
    assert "more `samples`, or more `steps`" in ModelTraining(1200, has_steps=True).why_unchanged(risen)
    assert ModelTraining(1200).why_unchanged(RISEN).endswith("unchanged. Use more text, with more `samples`")
