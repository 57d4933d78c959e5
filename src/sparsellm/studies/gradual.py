"""Gradual pruning: stages that each prune the output of the one before, with its zeros kept, and recover it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsellm.errors import CannotResume, InvalidSetting
from sparsellm.pipeline.block_recovery import recovery_plan
from sparsellm.pipeline.fingerprint import NOT_DECISIVE
from sparsellm.pipeline.input_digests import changed_input, current_inputs
from sparsellm.pipeline.loading import open_model
from sparsellm.pipeline.output_folder import is_finished
from sparsellm.pipeline.output_lock import recover_output, refuse_links, remove_output
from sparsellm.pipeline.outputs import Output, read_finished, read_output
from sparsellm.pipeline.publication import Paths
from sparsellm.pipeline.quantization_file import read_scales
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.recipe_fields import RecipeFields, RunFields, fields_with
from sparsellm.pipeline.recipe_file import validated
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import PrunedReport, Report
from sparsellm.pipeline.results import STAGE_STATES, GradualResult, StageResult
from sparsellm.pipeline.saving import check_output
from sparsellm.solvers.patterns import Unstructured, parse_pattern
from sparsellm.texts.paths import local_path

STAGES, MOST_STAGES = 4, 999
"""Default and largest number of stages: their sparsities are multiples of 0.1 %."""

SURPLUS = 1e-3
"""Fraction of weights by which a checkpoint may be sparser than `from`: some weights are zero in the dense model already."""

OF_RECOVERY = ("model", "revision", *fields_with("measured"))
"""Recipe fields that the pruning runs do not take from the recovery: each stage is measured when it is recovered."""

OF_STAGE = ("sparsity", "keep_zeros", "values", "group_size")
"""Recipe fields that the pruning runs do not take from the run that wrote the first checkpoint."""


@dataclass(frozen=True)
class GradualPruning:
    r"""The runs of a gradual pruning: for each stage a pruning run, whose zeros include those before, and a recovery.

    Pruning and training take turns as in Zhu & Gupta, To prune, or not to prune (2017). Departs from it: every stage removes
    the same fraction of the remaining weights, as in Frankle & Carbin, The Lottery Ticket Hypothesis (ICLR 2019). With the
    density $d_0$ before the first of n stages and $d_n$ after the last, $d_k = d_0 (d_n / d_0)^{k/n}$, rounded to 0.1 %.

    Attributes:
        recipe: The recovery of the checkpoint that the first stage prunes.
        digest: Digest of that checkpoint's report.
        start: Sparsity before the first stage.
        sparsities: Sparsity of each stage.
        output: Folder of the last stage.
        prunings: The pruning run of each stage, by the folder that it is written to.
        recoveries: The recovery of each stage, by the folder that it is written to.
    """

    recipe: RecoveryRecipe
    digest: str
    start: Unstructured
    sparsities: tuple[Unstructured, ...]
    output: Path
    prunings: Mapping[Path, Recipe]
    recoveries: Mapping[Path, RecoveryRecipe]

    @property
    def runs(self) -> dict[Path, Recipe | RecoveryRecipe]:
        """The recipe of each run, in order, by the folder that it is written to."""
        pairs = zip(self.prunings.items(), self.recoveries.items(), strict=True)
        return dict(run for pair in pairs for run in pair)

    @property
    def folder(self) -> Path:
        """Folder beside the output that holds the outputs of the stages before the last."""
        return stages_folder(self.output)

    @property
    def stages(self) -> list[Path]:
        """Folder of each stage's recovery."""
        return list(self.recoveries)

    def finished(self) -> list[bool]:
        """Whether each run need not be repeated: it is finished, or a later one is."""
        present = [is_finished(folder) for folder in self.runs]
        return [any(present[number:]) for number in range(len(present))]

    def check(self, *, resume: bool, restart: bool, overwrite: bool) -> None:
        """Check before any heavy work that the outputs can be written, and the checkpoint be recovered.

        Raises:
            OutputExists: An output exists.
            CannotResume: Stages of an unfinished run exist and neither `resume` nor `restart` is set, or of another run.
            InvalidSetting: As `check_output` and `recovery_plan`.
            VerificationFailed: As `recovery_plan`.
        """
        unfinished = self.folder.is_dir() and any(self.folder.iterdir()) and not is_finished(self.output)
        if unfinished and not resume and not restart:
            raise CannotResume(
                f"{self.output} is unfinished: {self.folder} holds its stages. "
                "Pass `resume=True` to continue it, or `restart=True` to start over."
            )
        refuse_links(self.folder.parent, self.folder)
        others = {path.name for path in self.folder.glob("[!.]*")} - {folder.name for folder in self.runs}
        if resume and unfinished and others:
            raise CannotResume(
                f"{self.folder} holds {min(others)}, which is no stage of this run. "
                "Pass the original settings, or `restart=True`."
            )
        for folder, recipe in self.runs.items():
            recover_output(folder)
            if not (resume and is_finished(folder)):
                for source in (recipe.model, self.recipe.pruned):
                    check_output(folder, overwrite or resume or (restart and unfinished), source)
            elif folder in self.recoveries:
                self._check_same(folder, self.recoveries[folder])
        for folder, done in zip(self.runs, self.finished(), strict=True):
            if resume and done and folder in self.recoveries:
                check_output(self.recoveries[folder].pruned, overwrite=True, dense=self.recipe.pruned)
                self.remove_input(folder)  # the run may have been killed just before
        if not any(resume and is_finished(folder) for folder in self.runs):
            recovery_plan(self.recipe, open_model(self.recipe).source)

    def _check_same(self, folder: Path, recipe: RecoveryRecipe) -> None:
        """Raise CannotResume unless a finished stage was written by this run."""
        report = read_output(folder).report
        # `pruned` is this folder's own, which is removed.
        expected = Paths(recipe).without(recipe).model_dump(mode="json", exclude={*NOT_DECISIVE, "pruned"})
        number = self.stages.index(folder)
        expected |= {"pruned checkpoint": self.digest, "from": str(self.start), "to": str(self.sparsities[-1])}
        expected |= {"stages": [str(sparsity) for sparsity in self.sparsities[: number + 1]]}
        stored = report.recipe.model_dump(mode="json")
        if gradual := report.gradual:
            stored |= {"pruned checkpoint": gradual.digest, "from": gradual.start, "to": gradual.to}
            stored |= {"stages": [stage.sparsity for stage in gradual.stages]}
        for name, value in expected.items():
            if stored.get(name) != value:
                entry = name if name == "pruned checkpoint" else f"`{name}`"
                raise CannotResume(
                    f"{folder} is a stage of another run: {entry} was {stored.get(name)!r}, now {value!r}. "
                    "Pass the original settings, or `restart=True`."
                )
        if difference := changed_input(report.inputs, Paths(recipe).without(current_inputs(recipe))):
            raise CannotResume(f"{folder} is a stage of another run: {difference}. Put the files back, or pass `restart=True`.")

    def record(self, folder: Path, report: Report) -> None:
        """Add the results of the stages so far to the report of a recovery, before it is written."""
        if folder not in self.stages:
            return
        number = self.stages.index(folder)
        gradual = read_output(self.stages[number - 1]).report.gradual if number else None
        pairs = {text: (report.before(text), x.get("pruned")) for text, x in report.perplexity.items()}
        measured = {
            text: {state: x for state, x in zip(STAGE_STATES, pair, strict=True) if x is not None}
            for text, pair in pairs.items()
        }
        stage = StageResult(
            sparsity=str(self.sparsities[number]),
            perplexity=measured,
            training=report.trainings,
            seconds=report.seconds["total"] + (report.pruned.seconds["total"] if report.pruned else 0.0),
        )
        report.gradual = GradualResult(
            self.recipe.pruned,
            self.digest,
            start=str(self.start),
            to=str(self.sparsities[-1]),
            stages=(*(gradual.stages if gradual else ()), stage),
        )

    def remove_input(self, folder: Path) -> None:
        """Remove the pruned checkpoint of a stage, once it is recovered."""
        if folder in self.recoveries:
            remove_output(Path(self.recoveries[folder].pruned))


def stages_folder(output: Path) -> Path:
    """The folder beside an output that holds the outputs of the stages before the last."""
    return output.with_name(f"{output.name}-stages")


def read_stages(
    recipe: RecoveryRecipe, output: str | Path, *, start: str | None, to: str | None, stages: int | None
) -> GradualPruning | None:
    """Read the settings of a gradual pruning.

    Args:
        recipe: The recovery of each stage; its `pruned` is the checkpoint that the first stage prunes.
        output: Folder of the last stage.
        start: Sparsity before the first stage, which the pruned checkpoint does not exceed.
        to: Sparsity of the last stage.
        stages: Number of stages; None for `STAGES`.

    Returns:
        The runs; None if neither `start`, `to` nor `stages` is given.

    Raises:
        InvalidSetting: A setting is missing or invalid, or the checkpoint is sparser than `start` or quantized.
    """
    if start is None and to is None and stages is None:
        return None
    if start is None or to is None:
        given = ", ".join(f"`{name}`" for name, value in (("from", start), ("to", to), ("stages", stages)) if value is not None)
        raise InvalidSetting(f"Gradual pruning needs both `from` and `to`, got only {given}. Pass both, or none of these.")
    lowest, highest = _unstructured("from", start), _unstructured("to", to)
    if not lowest.sparsity < highest.sparsity:
        raise InvalidSetting(f"`from` must be below `to`, got {lowest} and {highest}.")
    sparsities = _sparsities(lowest, highest, STAGES if stages is None else stages)
    finished = read_finished(recipe.pruned)
    if (zeros := finished.report.totals.sparsity_of_pruned_layers) > lowest.sparsity + SURPLUS:
        raise InvalidSetting(
            f"{recipe.pruned} is sparser than `from`: its pruned layers have {100 * zeros:.2f} % zeros, got {lowest}. "
            "Pass a higher `from`, or a checkpoint with fewer zeros."
        )
    if read_scales(finished.folder):
        raise InvalidSetting(
            f"{recipe.pruned} is quantized, and gradual pruning would not keep its integers. "
            "Pass a checkpoint that was pruned without `values` and `bits`, or recover this one without `from` and `to`."
        )
    path = local_path(output)
    prunings, recoveries = _runs(recipe, finished, sparsities, path)
    return GradualPruning(recipe, finished.digests.report, lowest, sparsities, path, prunings, recoveries)


def _unstructured(name: str, value: str) -> Unstructured:
    """Parse the sparsity that a setting gives; raise InvalidSetting for N:M."""
    pattern = parse_pattern(value, name)
    if not isinstance(pattern, Unstructured):
        raise InvalidSetting(
            f"`{name}` must be an unstructured sparsity such as 80%, got {value}: an N:M pattern does not contain the zeros "
            "of another pattern. Prune the dense model to N:M in one step, and recover it."
        )
    return pattern


def _sparsities(lowest: Unstructured, highest: Unstructured, stages: int) -> tuple[Unstructured, ...]:
    """The sparsity of each stage, increasing."""
    if not 1 <= stages <= MOST_STAGES:
        raise InvalidSetting(f"`stages` must be from 1 to {MOST_STAGES}, got {stages}.")
    first, last = 1 - lowest.sparsity, 1 - highest.sparsity
    values = [round(1 - first * (last / first) ** (number / stages), 3) for number in range(1, stages)]
    sparsities = [lowest.sparsity, *values, highest.sparsity]
    if sorted(set(sparsities)) != sparsities:
        raise InvalidSetting(f"`stages` {stages} are too many from {lowest} to {highest}: two would differ by less than 0.1 %.")
    return tuple(Unstructured(value) for value in sparsities[1:])


def _runs(
    recipe: RecoveryRecipe, finished: Output, sparsities: tuple[Unstructured, ...], output: Path
) -> tuple[dict[Path, Recipe], dict[Path, RecoveryRecipe]]:
    """The pruning run and the recovery of each stage, by the folder that they are written to."""
    prunings, recoveries = {}, {}
    settings = _pruning_settings(recipe, finished)
    model = recipe.pruned
    for number, sparsity in enumerate(sparsities, 1):
        name = str(sparsity).removesuffix("%")
        pruned = stages_folder(output) / f"{name}-pruned"
        folder = output if number == len(sparsities) else stages_folder(output) / name
        prunings[pruned] = validated(Recipe, {**settings, "model": model, "sparsity": str(sparsity)})
        recoveries[folder] = recipe.model_copy(update={"pruned": str(pruned)})
        model = str(folder)
    return prunings, recoveries


def _pruning_settings(recipe: RecoveryRecipe, finished: Output) -> dict[str, Any]:
    """Settings of the pruning runs: the method of the run that pruned the checkpoint, data and machine of the recovery."""
    report: Report | PrunedReport = finished.report
    while report.pruned:
        report = report.pruned
    left_out = {*RunFields.model_fields, *OF_STAGE}
    fields = report.recipe.model_dump(mode="json")
    settings = {name: x for name, x in fields.items() if name in RecipeFields.model_fields and name not in left_out}
    if str(settings.get("allocation")).endswith((".yaml", ".yml")):
        raise InvalidSetting(
            f"{recipe.pruned} was pruned with the sparsities of a file, `allocation` {settings['allocation']}, and gradual "
            "pruning needs a rule. Prune each stage yourself, with `keep_zeros`, and recover it."
        )
    if settings.get("effort") == "best":  # the effort standard, and then the training that the recovery does
        settings["effort"] = "standard"
    shared = {name: getattr(recipe, name) for name in RunFields.model_fields if name not in OF_RECOVERY}
    return {**settings, **shared, "keep_zeros": True}
