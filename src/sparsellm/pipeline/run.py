"""The steps of every run around its own work: it records what happens, starts, loads the model and measures it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Generic, TypedDict, TypeVar

from torch import Tensor

from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.checkpoints.stamps import unchanged
from sparsellm.errors import NonFinite
from sparsellm.extension import find, names_of
from sparsellm.methods import NOTABLE
from sparsellm.models.blocks import blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.observers.events import (
    ANSWERING,
    LOADING,
    MEASURING,
    SENSITIVITIES,
    Begun,
    Ended,
    EventLog,
    Note,
    Observer,
    Schedule,
    add_note,
    combine_observers,
    run_stage,
)
from sparsellm.outputs.fingerprint import Inputs, environment
from sparsellm.outputs.folder import ANEW, LOG
from sparsellm.outputs.journal import Journal, WorkDirectory
from sparsellm.outputs.report import Report, When
from sparsellm.outputs.saving import Result
from sparsellm.outputs.verification import check_unpruned
from sparsellm.pipeline.dense_results import DenseCache, cache_key
from sparsellm.pipeline.loading import Placement, check_runs, load_model
from sparsellm.pipeline.measuring import measure_into
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.startup import PlacementChoice, start_run
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import peak_memory, release_free_memory
from sparsellm.solvers.linalg import count_zeros
from sparsellm.texts.padding import split_batches

P = TypeVar("P", bound=Prepared)


class RunArguments(TypedDict, total=False):
    """Arguments of a run besides its recipe, its observer and what it reads.

    Attributes:
        work: Directory for finished blocks, from `work_directory` of `sparsellm.outputs.journal`. Without it a killed
            run cannot be resumed, and the model must fit in memory.
        shared: Cache of results on dense models, shared with other runs.
        name: Name of the run for observers. Default: the name of its output, or of its model.
        check: Called with the digests of what the run reads, before any heavy work.
    """

    work: WorkDirectory | None
    shared: DenseCache | None
    name: str | None
    check: Callable[[Inputs], object]


@dataclass(frozen=True, eq=False)
class Records:
    """The records that a run writes as it goes.

    Attributes:
        observer: Receives every event; the log is one of those that it passes them on to.
        started: Time of `time.perf_counter` at the start.
    """

    report: Report
    observer: Observer
    log: EventLog
    started: float = field(default_factory=time.perf_counter)


@contextmanager
def recorded(recipe: RunRecipe, observe: Observer | None, source: Checkpoint | InMemoryModel | None) -> Iterator[Records]:
    """Context of a run, whose report has the remarks on the checkpoints that are opened in it.

    An error or an interrupt that leaves a model in memory changed has a note that says so.
    """
    log, report = EventLog(), Report(recipe)
    observer = combine_observers(log, observe, *(find("observers", name)(recipe) for name in names_of("observers")))
    try:
        with remarks_to(lambda text, is_new: add_note(text, report, observer if is_new else log)):
            yield Records(report, observer, log)
    except BaseException as error:
        if isinstance(source, InMemoryModel) and recipe.stage in report.seconds:
            count = len(blocks_of(source.model))
            done = min(report.blocks[-1].index + 1, count) if report.blocks else 0  # the head has the index after theirs
            state = f"up to block {done} of {count}" if done else "in part"
            state += ", and perhaps a part of another one" * (0 < done < count)
            error.add_note(f"The model in memory was changed: it is {report.result} {state}. Load it again before you use it.")
        raise


@dataclass(frozen=True, eq=False)
class Run(Generic[P]):
    """A run that has started: what it reads, where its model is, and what it writes down.

    Attributes:
        batch: Sequences per batch.
        journal: Stores finished blocks; None for a run that cannot be resumed.
        shared: Cache of results on dense models; None for none.
    """

    ready: P
    placement: Placement
    batch: int
    journal: Journal | None
    records: Records
    work: WorkDirectory | None
    shared: DenseCache | None

    @classmethod
    def start(
        cls,
        ready: P,
        records: Records,
        fit: PlacementChoice,
        *,
        work: WorkDirectory | None = None,
        shared: DenseCache | None = None,
        name: str | None = None,
        check: Callable[[Inputs], object] = lambda _: None,
    ) -> Run[P]:
        """Choose where the model is, open the journal, and tell the observers that the run begins; as `RunArguments`."""
        report, observer = records.report, records.observer
        report.environment = environment(ready.device)
        placement, batch, journal = start_run(ready, report, observer, fit, work=work)
        check(report.inputs)
        release_free_memory()  # used by tokenization
        if work and collectives.is_main():
            records.log.keep(work.folder / LOG)
        name = name or (work.output.name if work else PurePath(ready.recipe.model).name)
        observer(Begun(name, PathNames(report.recipe).recipe(report.recipe), report.environment, placement.tight))
        return cls(ready, placement, batch, journal, records, work, shared)

    @property
    def report(self) -> Report:
        """The report of the run."""
        return self.records.report

    @property
    def observer(self) -> Observer:
        """Receives every event."""
        return self.records.observer

    @property
    def folder(self) -> Path | None:
        """The folder of the run's files; None without one."""
        return self.work.folder if self.work else None

    def schedule(self, changes: Sequence[str], *, before: Sequence[str] = ()) -> None:
        """Tell the observers the stages from now to the last measurement.

        Args:
            changes: Those that change the model, without those of `Prepared.steps`.
            before: Those before the model is loaded.
        """
        recipe, ready = self.ready.recipe, self.ready
        measured = [MEASURING] * len(ready.tests) + [ANSWERING] * bool(recipe.task)
        stages = [*before, LOADING, *(f"{name} dense" for name in measured)]
        stages += [SENSITIVITIES] * ready.method.needs_fisher + [*changes]
        stages += [name for step in ready.steps for name in step.on_dense]
        stages += [recipe.stage, *(step.stage for step in ready.steps)]
        self.observer(Schedule((*stages, *(f"{name} pruned" for name in measured))))

    def unchanged(self) -> AbstractContextManager[None]:
        """Context that raises SourceChanged if a file that the run reads is changed in it."""
        return unchanged(*self.ready.stamps(), ignored=(*ANEW, LOG))

    def load(self) -> LoadedModel:
        """Load the model."""
        return load_model(self.ready.recipe, self.ready, folder=self.folder, placement=self.placement)

    def load_and_check(self) -> LoadedModel:
        """Load the model in a stage, check that it runs if anything is computed with it, and that it is what is stored."""
        recipe, ready = self.ready.recipe, self.ready
        with run_stage(LOADING, self.report, self.observer):
            loaded = self.load()
            if not loaded.weights.on_disk:
                weights = [layer.weight for block in blocks_of(loaded.model) for layer in block.layers.values()]
                share = sum(map(count_zeros, weights)) / max(sum(weight.numel() for weight in weights), 1)
                self.report.initial_sparsity = share if share >= NOTABLE else 0.0
            if len(ready.windows) or ready.tests or recipe.task:
                predicts = bool(ready.tests or recipe.task or ready.steps)
                check_runs(loaded, by_block=loaded.weights.on_disk or len(ready.windows) > 0, predicts=predicts)
            if isinstance(ready.source, Checkpoint):
                check_unpruned(ready.source, loaded, ready.plan)
        if loaded.note:
            self.observer(Note(loaded.note))  # about this machine, so not a note of the report and its model card
        return loaded

    def measure(self, when: When, loaded: LoadedModel) -> None:
        """Measure the model, which is still dense or is pruned, on the recipe's texts and tasks."""
        shared = self.shared if when == "dense" else None
        measure_into(self.report, when, loaded, ready=self.ready, observer=self.observer, shared=shared)

    @contextmanager
    def noting_not_measured(self) -> Iterator[None]:
        """Context in which a pruned model is measured: one whose outputs are not finite gives a note, and is still written."""
        try:
            yield
        except NonFinite as error:
            add_note(f"the pruned model was not measured: {error}", self.report, self.observer)

    def in_batches(self, loaded: LoadedModel, change: Callable[[LoadedModel, Sequence[Tensor]], None]) -> LoadedModel:
        """Change the model with the run's sequences per batch, or half as many wherever the device's memory is short.

        Args:
            change: Takes the model, and batches of token ids, each (batch, length) without padding.

        Returns:
            The changed model, which is another one where it was loaded again.
        """
        source, windows, report, batch = self.ready.source, self.ready.windows, self.report, self.batch
        while True:
            if self.journal:
                self.journal.store_fact("batch", batch)
            report.resolved = {  # the values used where the recipe leaves them open
                "method": repr(self.ready.method),
                "samples": len(windows),
                "sequence_length": windows.shape[1] if windows.numel() else None,
                "batch_size": batch,
                "device": str(self.ready.device),
                "dtype": str(loaded.model.dtype),
                "computed_in": str(loaded.computed_in),
            }
            loaded.model.name_or_path = ""  # the folder no longer says where its zeros are
            try:
                change(loaded, split_batches(windows, batch) if windows.numel() else ())
                return loaded
            except RuntimeError as error:
                can_retry = batch > 1 and isinstance(source, Checkpoint) and collectives.world() == 1
                if not can_retry or not devices.is_out_of_memory(error):
                    raise
            batch //= 2
            self.observer(Note(f"{self.ready.device} is out of memory: continuing with {batch} sequences per batch"))
            report.blocks.clear()
            loaded.model.to("meta")  # frees the partly changed model
            gc.collect()
            devices.empty_cache(self.ready.device)
            loaded = self.load()

    def dense_cache(self, loaded: LoadedModel) -> AbstractContextManager[Journal | None]:
        """The journal with what is known of the dense model on the calibration sequences: shared by runs, or its own."""
        ready, environment = self.ready, self.report.environment
        if self.shared is None or not isinstance(ready.source, Checkpoint) or not len(ready.windows):
            return nullcontext(self.journal)
        known = {"environment": environment, "batch": self.report.resolved["batch_size"]}
        return self.shared.open(cache_key(ready.source, ready.windows, dtype=loaded.computed_in, **known))

    def finish(self, loaded: LoadedModel) -> Result:
        """Complete the report, tell the observers, and collect everything that `Result.save_pretrained` writes."""
        report, source = self.report, self.ready.source
        report.seconds["total"] = time.perf_counter() - self.records.started
        report.parameters, report.zeros, report.weight_bytes = loaded.weights.size()
        report.peak_memory_bytes = peak_memory()
        self.observer(Ended(report.totals.to_dict(), report.seconds["total"]))
        return Result(
            loaded.model,
            report,
            tokenizer=source.own_tokenizer if isinstance(source, InMemoryModel) else None,
            source=source if isinstance(source, Checkpoint) else None,
            weights=loaded.weights if isinstance(loaded.weights, DiskWeights) else None,
            log=lambda: self.records.log.text,
            read=self.ready.stamps(),
        )
