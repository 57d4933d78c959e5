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

from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, resolve_device
from sparsellm.errors import NonFinite
from sparsellm.evaluation.generation import generate_text
from sparsellm.evaluation.measurements import Accuracy, Perplexity
from sparsellm.evaluation.perplexity import measure as measure_perplexity
from sparsellm.evaluation.zeroshot import evaluate_tasks
from sparsellm.methods import BlockMethod
from sparsellm.recovery.distillation import generate_samples
from sparsellm.recovery.masked_training import split_batches
from sparsellm.runs.event_log import LOG, EventLog
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
    add_note,
    combine_observers,
    phase,
)
from sparsellm.runs.export import save
from sparsellm.runs.fingerprint import environment
from sparsellm.runs.first_pass import check_runs
from sparsellm.runs.placement import Placement, load
from sparsellm.runs.preparation import GivenText, Prepared, prepare
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.recovery import read_recovery
from sparsellm.runs.remarks import add_warnings
from sparsellm.runs.report import Report, When
from sparsellm.runs.sharing import DenseCache, cache_key
from sparsellm.runs.stages import prune_model
from sparsellm.runs.startup import start_run
from sparsellm.runs.workspace import WorkDirectory
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import is_out_of_memory, peak_memory, release_free_memory

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
    weights: DiskWeights | None = None
    along: tuple[Path, ...] = ()
    log: EventLog | None = None

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write model, tokenizer, model card, report and log to a folder, and read them back to verify; the folder.

        Raises OutputExists for a folder that is there, VerificationFailed when what was written is not what was meant.
        """
        texts = {LOG: self.log.text} if self.log else {}
        model = self.model, self.tokenizer, self.report
        path = collectives.on_main(lambda: save(*model, folder, self.dense, overwrite, self.weights, self.along, texts))
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
    return run(read_recipe({"model": name, **settings}), observe, given, InMemoryModel(name, model, tokenizer))


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
    source: Checkpoint | InMemoryModel | None = None,
    work: WorkDirectory | None = None,
    shared: DenseCache | None = None,
    name: str | None = None,
) -> Result:
    """Do what a recipe says, as far as the pruned model and its report; `Result.save_pretrained` writes them.

    given: in place of the recipe's calibration text. source: in place of the recipe's model. work: where finished blocks are
    kept, from `sparsellm.runs.workspace.working`; without it a run that is killed starts over, and the model must fit the
    memory. shared: what was measured of dense models, kept for other runs or known from them. name: what observers call the
    run; by default the name of its output, or of its model.
    All that can be refused is refused before the weights are read.
    """
    log = EventLog()
    observer = combine_observers(log, observe)
    started = time.perf_counter()
    report = Report(recipe, environment(resolve_device(recipe.device)))
    ready = prepare(recipe, given, source, report, observer)
    source, windows = ready.source, ready.windows
    report.origin = source.origin()
    place, batch, journal = start_run(recipe, ready, report, observer, work)
    release_free_memory()  # what tokenising took
    if work and collectives.is_main():
        log.keep(work.folder / LOG)
    called = name or (work.output.name if work else PurePath(recipe.model).name)
    observer(Begun(called, recipe, report.environment, place.tight))
    loaded = _load(ready, work, place, report, observer)
    measure = partial(_measure, ready, report, observer)
    measure(loaded, "dense", shared)
    if recipe.calibration_written and len(windows):
        with phase(WRITING_WINDOWS, report, observer):
            # Before the given windows: the last of all are those that judge, and they should be real text.
            windows = torch.cat(
                [generate_samples(loaded.model, windows, recipe.calibration_written, recipe.seed, loaded.compute), windows]
            )
            report.calibration += f", and {recipe.calibration_written} windows that the dense model wrote"
    while True:
        if journal:
            journal.note("batch", batch)
        report.resolved = _resolved(ready.method, windows, batch, ready.device, loaded)
        batches = split_batches(windows, batch) if windows.numel() else ()
        try:
            known = _cache_key(source, loaded, windows, batch, report)
            facts = shared.open(known) if shared and known and len(windows) else None
            prune_model(recipe, loaded, ready.method, ready.plan, batches, report, observer, journal, facts)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or batch == 1 or isinstance(source, InMemoryModel) or collectives.world() > 1:
                raise
        batch //= 2
        observer(Note(f"{ready.device} is out of memory: from here on {batch} windows at a time"))
        report.blocks.clear()
        loaded = _again(loaded, lambda: load(recipe, source, ready.device, work.folder if work else None, place))
    add_warnings(ready.method, report, observer)
    try:
        measure(loaded, "pruned")
    except NonFinite as error:  # hours of work are worth keeping, whatever they are worth
        add_note(f"the pruned model was not measured: {error}", report, observer)
    report.seconds["total"] = time.perf_counter() - started
    return _result(loaded, source, report, log, observer)


def _load(ready: Prepared, work: WorkDirectory | None, place: Placement, report: Report, observer: Observer) -> LoadedModel:
    """The model where it is pruned; it was run on a few tokens if anything is to be computed with it."""
    recipe = report.recipe
    with phase(LOADING, report, observer):
        loaded = load(recipe, ready.source, ready.device, work.folder if work else None, place)
        if len(ready.windows) or ready.tests or recipe.task or recipe.prompt:
            check_runs(loaded, by_block=loaded.offloaded or len(ready.windows) > 0)
    if loaded.note:
        observer(
            Note(loaded.note)
        )  # what follows is about this machine and not about the result: none of it goes to the model card
    return loaded


def _result(
    loaded: LoadedModel, source: Checkpoint | InMemoryModel, report: Report, log: EventLog, observer: Observer
) -> Result:
    """The pruned model with all that is to be written with it; the report is complete."""
    report.parameters, report.zeros = loaded.size()
    report.peak_memory = peak_memory()
    observer(Ended(report.totals(), report.seconds["total"]))
    tokenizer = source.tokenizer() if not isinstance(source, InMemoryModel) else source.given
    read = loaded.weights if isinstance(loaded.weights, DiskWeights) else None
    dense = source.folder if report.recipe.dtype == "auto" else None
    return Result(loaded.model, report, tokenizer, dense, read, source.extra_files(), log)


def _measure(
    ready: Prepared,
    report: Report,
    observer: Observer,
    loaded: LoadedModel,
    when: When,
    shared: DenseCache | None = None,
) -> None:
    """Measure the model on the recipe's texts, or take the dense model's figures from runs that have shared them."""
    for text, test in ready.tests.items():
        with phase(f"{MEASURING} {when}", report, observer):

            def find(text: str = text, test: Tensor = test) -> dict[str, Any]:
                return asdict(measure_perplexity(loaded, test, text))

            known = _cache_key(ready.source, loaded, test, None, report)
            values = shared.value(known, f"perplexity of {text}", find) if shared and known else find()
            perplexity = report.perplexity.setdefault(text, {})[when] = Perplexity(**values)
            observer(Measured("perplexity", text, when, perplexity.value, perplexity.standard_error))
    recipe = report.recipe
    if recipe.task:
        with phase(f"{MEASURING} {when}", report, observer):

            def ask() -> dict[str, Any]:
                found = evaluate_tasks(loaded, ready.source.tokenizer(), recipe.task, recipe.task_data, recipe.task_limit)
                return {task: asdict(accuracy) for task, accuracy in found.items()}

            known = _cache_key(ready.source, loaded, torch.empty(0, dtype=torch.long), None, report)
            named = f"accuracies on {recipe.task} of {recipe.task_data}, {recipe.task_limit} questions"
            for task, values in (shared.value(known, named, ask) if shared and known else ask()).items():
                accuracy = report.tasks.setdefault(task, {})[when] = Accuracy(**values)
                observer(Measured("accuracy", task, when, accuracy.value, accuracy.standard_error))
    for prompt in recipe.prompt:
        with phase(WRITING_SAMPLES, report, observer):
            report.samples.setdefault(prompt, {})[when] = generate_text(loaded, ready.source.tokenizer(), prompt)


def _cache_key(
    source: Checkpoint | InMemoryModel, loaded: LoadedModel, windows: Tensor, batch: int | None, report: Report
) -> dict[str, Any] | None:
    """What a figure of the dense model on these windows depends on; None for a model in memory, which no one else has."""
    if isinstance(source, InMemoryModel):
        return None
    return cache_key(source, windows, loaded.compute or loaded.model.dtype, batch, report.environment)


def _again(loaded: LoadedModel, settled: Callable[[], LoadedModel]) -> LoadedModel:
    """The model anew, once the memory of the first is given back: what was pruned of it in part is of no use."""
    device = loaded.model.device
    loaded.model.to("meta")
    gc.collect()
    devices.empty_cache(device)
    return settled()


def _resolved(method: BlockMethod, windows: Tensor, batch: int, device: torch.device, loaded: LoadedModel) -> dict[str, Any]:
    """What is really run, where the recipe leaves it open: every constant of the method, windows, device, dtypes."""
    return {
        "method": repr(method),
        "samples": len(windows),
        "sequence_length": windows.shape[1] if windows.numel() else None,
        "batch_size": batch,
        "device": str(device),
        "dtype": str(loaded.model.dtype),
        "computed_in": str(loaded.compute or loaded.model.dtype),
    }
