"""A whole run: open, plan, calibrate, prune, measure. The command line and `sparsellm.prune` are thin skins over `run`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sparsellm.checkpoints.block_loader import OnDisk
from sparsellm.checkpoints.loaded_model import Residence
from sparsellm.checkpoints.loading import Checkpoint, Loaded, device_of
from sparsellm.errors import NonFinite
from sparsellm.evaluation.generation import continuation
from sparsellm.evaluation.measurements import Accuracy, Perplexity
from sparsellm.evaluation.perplexity import measure as measure_perplexity
from sparsellm.evaluation.zeroshot import accuracies
from sparsellm.methods import BlockMethod
from sparsellm.recovery.distillation import written
from sparsellm.recovery.masked_training import cut
from sparsellm.runs.event_log import LOG, Log
from sparsellm.runs.events import (
    LOADING,
    MEASURING,
    WRITING_SAMPLES,
    WRITING_WINDOWS,
    Begun,
    Ended,
    Measured,
    Note,
    Observer,
    each,
    note,
    phase,
)
from sparsellm.runs.export import save
from sparsellm.runs.fingerprint import environment
from sparsellm.runs.first_pass import check_runs
from sparsellm.runs.placement import Place, settle
from sparsellm.runs.preparation import GivenText, Prepared, prepare
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.recovery import read_recovery
from sparsellm.runs.remarks import remark
from sparsellm.runs.report import Report, When
from sparsellm.runs.sharing import Shared, dense_circumstances
from sparsellm.runs.stages import prune_model
from sparsellm.runs.startup import begin
from sparsellm.runs.workspace import Work
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import give_back, out_of_memory, peak_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Result:
    """A pruned model with its report. dense: the folder it came from, None for a model that was in memory.

    weights: what fills the model, block by block, where it was too large for memory: then it has none of its own.
    along: files of the dense model that come along: its licence, and code that it needs. log: what happened, line by line.
    """

    model: PreTrainedModel
    report: Report
    tokenizer: PreTrainedTokenizerBase | None = None
    dense: Path | None = None
    weights: OnDisk | None = None
    along: tuple[Path, ...] = ()
    log: Log | None = None

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write model, tokenizer, model card, report and log to a folder, and read them back to verify; the folder.

        Raises OutputExists for a folder that is there, VerificationFailed when what was written is not what was meant.
        """
        texts = {LOG: self.log.text} if self.log else {}
        model = self.model, self.tokenizer, self.report
        path = collectives.once(lambda: save(*model, folder, self.dense, overwrite, self.weights, self.along, texts))
        return path or Path(folder)


def prune(
    model: str | Path | PreTrainedModel,
    method: str = "sparsellm",
    sparsity: str | float = "50%",
    calibration: str | Path | Sequence[str] | Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    observe: Observer | None = None,
    **settings: Any,
) -> Result:
    """Prune a model and say what was done.

    model: a folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory, which is pruned IN PLACE.
    method: sparsellm, alps-accurate, alps, fast-admm, sparsegpt, wanda or magnitude.
    sparsity: "70%", 0.7, "2:4" (2 of every 4 removed).
    calibration: a file of text, the name of a text (c4, wikitext2, ptb, demo), a list of texts, or token numbers of (samples,
    length), without padding; needed by every method but magnitude. tokenizer: for a model in memory and a text.
    settings: any other field of `Recipe`. observe: told of every stage, layer, epoch and block.

    Raises SparseLLMError (see `sparsellm.errors`), before any heavy work where that is possible.
    """
    given: GivenText = None
    if calibration is not None:
        if isinstance(calibration, (str, Path)):
            settings["calibration"] = str(calibration)
        else:
            settings["calibration"], given = "given in memory", calibration
    settings |= {"method": method, "sparsity": sparsity}
    if isinstance(model, (str, Path)):
        return run(read_recipe({"model": str(model), **settings}), observe, given)
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    settings.setdefault("device", str(model.device))
    return run(read_recipe({"model": name, **settings}), observe, given, Loaded(name, model, tokenizer))


def recover(
    pruned: str | Path,
    against: str | Path,
    calibration: str | Path | Sequence[str] | Tensor,
    scope: Literal["block", "model"] = "model",
    steps: int | None = None,
    observe: Observer | None = None,
    **settings: Any,
) -> Result:
    """Train the weights that a pruned checkpoint has left, toward the dense model; every zero stays zero.

    Args:
        pruned: The folder that a run of `prune` or `recover` wrote. It is not changed.
        against: The dense model that it was made from: a folder, a hub name, "demo:opt" or "demo:llama".
        calibration: A file of text, the name of a text (c4, wikitext2, ptb, demo), a list of texts, or token numbers of
            (samples, length), without padding.
        scope: What is trained as one. "model" lowers the KL divergence of the predictions from the dense model's; "block"
            lowers the error of one block's outputs after the other, which takes the memory of a block.
        steps: Gradient steps, at most: held-back windows choose the best state. Default: 300, or 100 over each block.
        observe: Told of every stage and block.
        **settings: Any other field of `RecoveryRecipe`.

    Returns:
        The recovered model with its report, whose `pruned` repeats what the report of the pruned checkpoint says.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where that is possible.
    """
    given: GivenText = None
    if isinstance(calibration, (str, Path)):
        calibration = str(calibration)
    else:
        given, calibration = calibration, "given in memory"
    settings |= {"pruned": str(pruned), "model": str(against), "calibration": calibration, "scope": scope, "steps": steps}
    return run(read_recovery(settings), observe, given)


def run(
    recipe: RunRecipe,
    observe: Observer | None = None,
    given: GivenText = None,
    source: Checkpoint | Loaded | None = None,
    work: Work | None = None,
    shared: Shared | None = None,
    name: str | None = None,
) -> Result:
    """Do what a recipe says, as far as the pruned model and its report; `Result.save_pretrained` writes them.

    given: in place of the recipe's calibration text. source: in place of the recipe's model. work: where finished blocks are
    kept, from `sparsellm.runs.workspace.working`; without it a run that is killed starts over, and the model must fit the
    memory. shared: what was measured of dense models, kept for other runs or known from them. name: what observers call the
    run; by default the name of its output, or of its model.
    All that can be refused is refused before the weights are read.
    """
    log = Log()
    say = each(log, observe)
    started = time.perf_counter()
    report = Report(recipe, environment(device_of(recipe.device)))
    ready = prepare(recipe, given, source, report, say)
    source, windows = ready.source, ready.windows
    report.origin = source.origin()
    place, batch, journal = begin(recipe, ready, report, say, work)
    give_back()  # what tokenising took
    if work and collectives.leads():
        log.keep(work.folder / LOG)
    called = name or (work.output.name if work else PurePath(recipe.model).name)
    say(Begun(called, recipe, report.environment, place.tight))
    home = _load(ready, work, place, report, say)
    measure = partial(_measure, ready, report, say)
    measure(home, "dense", shared)
    if recipe.calibration_written and len(windows):
        with phase(WRITING_WINDOWS, report, say):
            # Before the given windows: the last of all are those that judge, and they should be real text.
            windows = torch.cat([written(home.model, windows, recipe.calibration_written, recipe.seed, home.compute), windows])
            report.calibration += f", and {recipe.calibration_written} windows that the dense model wrote"
    while True:
        if journal:
            journal.note("batch", batch)
        report.resolved = _resolved(ready.method, windows, batch, ready.device, home)
        batches = cut(windows, batch) if windows.numel() else ()
        try:
            known = _circumstances(source, home, windows, batch, report)
            facts = shared.facts(known) if shared and known and len(windows) else None
            prune_model(recipe, home, ready.method, ready.plan, batches, report, say, journal, facts)
            break
        except RuntimeError as error:
            if not out_of_memory(error) or batch == 1 or isinstance(source, Loaded) or collectives.world() > 1:
                raise
        batch //= 2
        say(Note(f"{ready.device} is out of memory: from here on {batch} windows at a time"))
        report.blocks.clear()
        home = _again(home, lambda: settle(recipe, source, ready.device, work.folder if work else None, place))
    remark(ready.method, report, say)
    try:
        measure(home, "pruned")
    except NonFinite as error:  # hours of work are worth keeping, whatever they are worth
        note(f"the pruned model was not measured: {error}", report, say)
    report.seconds["total"] = time.perf_counter() - started
    return _result(home, source, report, log, say)


def _load(ready: Prepared, work: Work | None, place: Place, report: Report, say: Observer) -> Residence:
    """The model where it is pruned; it was run on a few tokens if anything is to be computed with it."""
    recipe = report.recipe
    with phase(LOADING, report, say):
        home = settle(recipe, ready.source, ready.device, work.folder if work else None, place)
        if len(ready.windows) or ready.tests or recipe.task or recipe.prompt:
            check_runs(home, by_block=home.streamed or len(ready.windows) > 0)
    if home.note:
        say(Note(home.note))  # what follows is about this machine and not about the result: none of it goes to the model card
    return home


def _result(home: Residence, source: Checkpoint | Loaded, report: Report, log: Log, say: Observer) -> Result:
    """The pruned model with all that is to be written with it; the report is complete."""
    report.parameters, report.zeros = home.size()
    report.peak_memory = peak_memory()
    say(Ended(report.totals(), report.seconds["total"]))
    tokenizer = source.tokenizer() if not isinstance(source, Loaded) else source.given
    read = home.weights if isinstance(home.weights, OnDisk) else None
    dense = source.folder if report.recipe.dtype == "auto" else None
    return Result(home.model, report, tokenizer, dense, read, source.along(), log)


def _measure(
    ready: Prepared,
    report: Report,
    say: Observer,
    home: Residence,
    when: When,
    shared: Shared | None = None,
) -> None:
    """Measure the model on the recipe's texts, or take the dense model's figures from runs that have shared them."""
    for text, test in ready.tests.items():
        with phase(f"{MEASURING} {when}", report, say):

            def find(text: str = text, test: Tensor = test) -> dict[str, Any]:
                return asdict(measure_perplexity(home, test, text))

            known = _circumstances(ready.source, home, test, None, report)
            values = shared.value(known, f"perplexity of {text}", find) if shared and known else find()
            perplexity = report.perplexity.setdefault(text, {})[when] = Perplexity(**values)
            say(Measured("perplexity", text, when, perplexity.value, perplexity.standard_error))
    recipe = report.recipe
    if recipe.task:
        with phase(f"{MEASURING} {when}", report, say):

            def ask() -> dict[str, Any]:
                found = accuracies(home, ready.source.tokenizer(), recipe.task, recipe.task_data, recipe.task_limit)
                return {task: asdict(accuracy) for task, accuracy in found.items()}

            known = _circumstances(ready.source, home, torch.empty(0, dtype=torch.long), None, report)
            named = f"accuracies on {recipe.task} of {recipe.task_data}, {recipe.task_limit} questions"
            for task, values in (shared.value(known, named, ask) if shared and known else ask()).items():
                accuracy = report.tasks.setdefault(task, {})[when] = Accuracy(**values)
                say(Measured("accuracy", task, when, accuracy.value, accuracy.standard_error))
    for prompt in recipe.prompt:
        with phase(WRITING_SAMPLES, report, say):
            report.samples.setdefault(prompt, {})[when] = continuation(home, ready.source.tokenizer(), prompt)


def _circumstances(
    source: Checkpoint | Loaded, home: Residence, windows: Tensor, batch: int | None, report: Report
) -> dict[str, Any] | None:
    """What a figure of the dense model on these windows depends on; None for a model in memory, which no one else has."""
    if isinstance(source, Loaded):
        return None
    return dense_circumstances(source, windows, home.compute or home.model.dtype, batch, report.environment)


def _again(home: Residence, settled: Callable[[], Residence]) -> Residence:
    """The model anew, once the memory of the first is given back: what was pruned of it in part is of no use."""
    device = home.model.device
    home.model.to("meta")
    gc.collect()
    devices.empty_cache(device)
    return settled()


def _resolved(method: BlockMethod, windows: Tensor, batch: int, device: torch.device, home: Residence) -> dict[str, Any]:
    """What is really run, where the recipe leaves it open: every constant of the method, windows, device, dtypes."""
    return {
        "method": repr(method),
        "samples": len(windows),
        "sequence_length": windows.shape[1] if windows.numel() else None,
        "batch_size": batch,
        "device": str(device),
        "dtype": str(home.model.dtype),
        "computed_in": str(home.compute or home.model.dtype),
    }
