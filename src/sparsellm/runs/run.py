"""A whole run: open, plan, calibrate, prune, measure. The command line and `sparsellm.prune` are thin wrappers of `run`."""

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
    CONTINUING,
    GENERATING,
    LOADING,
    MEASURING,
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
    """A pruned model with its report.

    Attributes:
        model: The pruned model; without weights if these are read block by block.
        report: The results of the run.
        tokenizer: The model's tokenizer, if it has one.
        dense: Folder of the dense model; None for a model in memory.
        weights: The weights of a model that is too large for memory, read block by block; None otherwise.
        along: Files of the dense model to copy: its licence, and the code that it needs.
        log: The events of the run.
    """

    model: PreTrainedModel
    report: Report
    tokenizer: PreTrainedTokenizerBase | None = None
    dense: Path | None = None
    weights: DiskWeights | None = None
    along: tuple[Path, ...] = ()
    log: EventLog | None = None

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write model, tokenizer, model card, report and log to a folder, and read the files back to verify them.

        Args:
            folder: The folder to write.
            overwrite: Replace an existing folder that sparsellm wrote.

        Returns:
            The folder.

        Raises:
            OutputExists: The folder exists.
            VerificationFailed: The files differ from the model or the report.
        """
        texts = {LOG: self.log.text} if self.log else {}
        contents = self.model, self.tokenizer, self.report
        path = collectives.on_main(lambda: save(*contents, folder, self.dense, overwrite, self.weights, self.along, texts))
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
    """Prune a model.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory, which is pruned in place.
        method: sparsellm, alps-accurate, alps, fast-admm, sparsegpt, wanda or magnitude.
        sparsity: "70%", 0.7, or "2:4" to remove 2 of every 4 weights.
        calibration: A text file, the name of a text (c4, wikitext2, ptb, demo), a list of texts, or token ids of shape
            (samples, length) without padding. Every method but magnitude needs it.
        tokenizer: Tokenizer of a model in memory, for calibration on text.
        observe: Callback that receives every stage, layer, epoch and block (see `sparsellm.runs.events`).
        **settings: Any other field of `Recipe`.

    Returns:
        The pruned model with its report.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
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
    """Train the remaining weights of a pruned checkpoint toward the dense model; every zero stays zero.

    Args:
        pruned: Folder that `prune` or `recover` wrote. It is not changed.
        against: The dense model that it was made from: a folder, a hub name, "demo:opt" or "demo:llama".
        calibration: A text file, the name of a text (c4, wikitext2, ptb, demo), a list of texts, or token ids of shape
            (samples, length) without padding.
        scope: Weights that are trained together. "model" lowers the KL divergence of the predictions from the dense model's;
            "block" lowers the error of each block's outputs in turn, and takes the memory of one block.
        steps: Maximum number of gradient steps; held-out sequences select the best state. Default: 300 for the whole model,
            100 for each block.
        observe: Callback that receives every stage and block (see `sparsellm.runs.events`).
        **settings: Any other field of `RecoveryRecipe`.

    Returns:
        The recovered model with its report, whose `pruned` is the report of the pruned checkpoint.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
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
    """Run a recipe up to the pruned model and its report; `Result.save_pretrained` writes them.

    Invalid input is rejected before the weights are read.

    Args:
        recipe: What to run.
        observe: Callback that receives every event.
        given: Texts, or token ids (samples, length), that replace the recipe's calibration text.
        source: Model that replaces the recipe's.
        work: Directory for finished blocks, from `sparsellm.runs.workspace.work_directory`. Without it a killed run cannot be
            resumed, and the model must fit in memory.
        shared: Cache of results on dense models, shared with other runs.
        name: Name of the run for observers. Default: the name of its output, or of its model.

    Returns:
        The pruned model with its report.

    Raises:
        SparseLLMError: See `sparsellm.errors`.
    """
    log = EventLog()
    observer = combine_observers(log, observe)
    started = time.perf_counter()
    report = Report(recipe, environment(resolve_device(recipe.device)))
    ready = prepare(recipe, given, source, report, observer)
    source, windows = ready.source, ready.windows
    report.origin = source.origin()
    placement, batch, journal = start_run(recipe, ready, report, observer, work)
    release_free_memory()  # used by tokenization
    if work and collectives.is_main():
        log.keep(work.folder / LOG)
    name = name or (work.output.name if work else PurePath(recipe.model).name)
    observer(Begun(name, recipe, report.environment, placement.tight))
    loaded = _load(ready, work, placement, report, observer)
    measure = partial(_measure, ready, report, observer)
    measure(loaded, "dense", shared)
    if recipe.calibration_written and len(windows):
        with phase(GENERATING, report, observer):
            # Generated sequences come first, because the last sequences are held out and should be real text.
            windows = torch.cat(
                [generate_samples(loaded.model, windows, recipe.calibration_written, recipe.seed, loaded.compute), windows]
            )
            report.calibration += f", and {recipe.calibration_written} sequences generated by the dense model"
    while True:
        if journal:
            journal.note("batch", batch)
        report.resolved = _resolved(ready.method, windows, batch, ready.device, loaded)
        batches = split_batches(windows, batch) if windows.numel() else ()
        try:
            key = _cache_key(source, loaded, windows, batch, report)
            facts = shared.open(key) if shared and key and len(windows) else None
            prune_model(recipe, loaded, ready.method, ready.plan, batches, report, observer, journal, facts)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or batch == 1 or isinstance(source, InMemoryModel) or collectives.world() > 1:
                raise
        batch //= 2
        observer(Note(f"{ready.device} is out of memory: continuing with {batch} sequences per batch"))
        report.blocks.clear()
        loaded = _reload(loaded, lambda: load(recipe, source, ready.device, work.folder if work else None, placement))
    add_warnings(ready.method, report, observer)
    try:
        measure(loaded, "pruned")
    except NonFinite as error:  # the pruned model is still written
        add_note(f"the pruned model was not measured: {error}", report, observer)
    report.seconds["total"] = time.perf_counter() - started
    return _result(loaded, source, report, log, observer)


def _load(ready: Prepared, work: WorkDirectory | None, placement: Placement, report: Report, observer: Observer) -> LoadedModel:
    """Load the model, and check on a few tokens that it runs if anything is computed with it."""
    recipe = report.recipe
    with phase(LOADING, report, observer):
        loaded = load(recipe, ready.source, ready.device, work.folder if work else None, placement)
        if len(ready.windows) or ready.tests or recipe.task or recipe.prompt:
            check_runs(loaded, by_block=loaded.offloaded or len(ready.windows) > 0)
    if loaded.note:
        observer(Note(loaded.note))  # about this machine, so not a note of the report and its model card
    return loaded


def _result(
    loaded: LoadedModel, source: Checkpoint | InMemoryModel, report: Report, log: EventLog, observer: Observer
) -> Result:
    """Complete the report, and collect everything that `Result.save_pretrained` writes."""
    report.parameters, report.zeros = loaded.size()
    report.peak_memory = peak_memory()
    observer(Ended(report.totals(), report.seconds["total"]))
    tokenizer = source.tokenizer() if not isinstance(source, InMemoryModel) else source.given
    weights = loaded.weights if isinstance(loaded.weights, DiskWeights) else None
    dense = source.folder if report.recipe.dtype == "auto" else None
    return Result(loaded.model, report, tokenizer, dense, weights, source.extra_files(), log)


def _measure(
    ready: Prepared,
    report: Report,
    observer: Observer,
    loaded: LoadedModel,
    when: When,
    shared: DenseCache | None = None,
) -> None:
    """Measure the model on the recipe's texts, tasks and prompts; results of the dense model may come from the cache."""
    for text, test in ready.tests.items():
        with phase(f"{MEASURING} {when}", report, observer):

            def measure_text(text: str = text, test: Tensor = test) -> dict[str, Any]:
                return asdict(measure_perplexity(loaded, test, text))

            key = _cache_key(ready.source, loaded, test, None, report)
            values = shared.value(key, f"perplexity of {text}", measure_text) if shared and key else measure_text()
            perplexity = report.perplexity.setdefault(text, {})[when] = Perplexity(**values)
            observer(Measured("perplexity", text, when, perplexity.value, perplexity.standard_error))
    recipe = report.recipe
    if recipe.task:
        with phase(f"{MEASURING} {when}", report, observer):

            def measure_tasks() -> dict[str, Any]:
                result = evaluate_tasks(
                    loaded, ready.source.tokenizer(), recipe.task, folder=recipe.task_data, limit=recipe.task_limit
                )
                return {task: asdict(accuracy) for task, accuracy in result.items()}

            key = _cache_key(ready.source, loaded, torch.empty(0, dtype=torch.long), None, report)
            fact = f"accuracies on {recipe.task} of {recipe.task_data}, {recipe.task_limit} questions"
            results = shared.value(key, fact, measure_tasks) if shared and key else measure_tasks()
            for task, values in results.items():
                accuracy = report.tasks.setdefault(task, {})[when] = Accuracy(**values)
                observer(Measured("accuracy", task, when, accuracy.value, accuracy.standard_error))
    for prompt in recipe.prompt:
        with phase(CONTINUING, report, observer):
            report.samples.setdefault(prompt, {})[when] = generate_text(loaded, ready.source.tokenizer(), prompt)


def _cache_key(
    source: Checkpoint | InMemoryModel, loaded: LoadedModel, windows: Tensor, batch: int | None, report: Report
) -> dict[str, Any] | None:
    """Cache key of a result of the dense model on these sequences; None for a model in memory, which is not cached."""
    if isinstance(source, InMemoryModel):
        return None
    return cache_key(source, windows, loaded.compute or loaded.model.dtype, batch, report.environment)


def _reload(loaded: LoadedModel, load_again: Callable[[], LoadedModel]) -> LoadedModel:
    """Free the memory of a partly pruned model, and load the model again."""
    device = loaded.model.device
    loaded.model.to("meta")
    gc.collect()
    devices.empty_cache(device)
    return load_again()


def _resolved(method: BlockMethod, windows: Tensor, batch: int, device: torch.device, loaded: LoadedModel) -> dict[str, Any]:
    """The values used where the recipe leaves them open: constants of the method, samples, batch size, device, dtypes."""
    return {
        "method": repr(method),
        "samples": len(windows),
        "sequence_length": windows.shape[1] if windows.numel() else None,
        "batch_size": batch,
        "device": str(device),
        "dtype": str(loaded.model.dtype),
        "computed_in": str(loaded.compute or loaded.model.dtype),
    }
