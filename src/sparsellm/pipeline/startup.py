"""The start of a run: model placement, batch size and journal, agreed on by all processes of a distributed run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.errors import InvalidSetting, dtype_name
from sparsellm.models.sparse_matmul import SKIPPING_ZEROS, max_density
from sparsellm.pipeline.compute_dtype import BFLOAT16_IN_PASSES, choose_products
from sparsellm.pipeline.events import DIGESTING, Note, Observer, Stage, add_note
from sparsellm.pipeline.fingerprint import fingerprint
from sparsellm.pipeline.input_digests import run_inputs
from sparsellm.pipeline.journal import OF_RECIPE, Journal, entry_in_words
from sparsellm.pipeline.loading import Placement, choose_placement
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.work_directory import WorkDirectory
from sparsellm.runtime import autotuning, collectives
from sparsellm.runtime.devices import multiplies_bfloat16
from sparsellm.runtime.products import BFLOAT16_IN_SOLVERS, ONEDNN_PRODUCTS, bf16_solver_speedup, uses_onednn

PlacementChoice = Callable[..., tuple[Placement, int]]
"""Chooses where the model of a prepared run is held, and its sequences per batch: `fit_to_memory` or `fit_to_disk`."""

OF_ONE = ("environment.device", f"{OF_RECIPE}device")
"""Settings that may differ between the processes of a run."""


def start_run(
    ready: Prepared, report: Report, observer: Observer, fit: PlacementChoice, *, work: WorkDirectory | None = None
) -> tuple[Placement, int, Journal | None]:
    """Choose placement and batch size, and open the journal.

    Args:
        report: The run's report, with its recipe and environment; receives the digests of what the run reads.
        fit: Chooses where the model is held, and the sequences per batch.
        work: Work directory of the output; None for a run that cannot be resumed.

    Returns:
        The placement, the sequences per batch, and the journal (None without `work`).

    Raises:
        TooLarge: The run does not fit in memory or on disk.
        CannotResume: The journal belongs to another run.
        InvalidSetting: The processes of the run differ in a setting.
    """
    recipe, journal = ready.recipe, None
    placement = choose_placement(recipe, ready, files=work is not None)
    is_identified = work is not None or collectives.world() > 1
    if is_identified or isinstance(ready.source, Checkpoint):
        observer(Stage(DIGESTING))
    report.inputs = run_inputs(recipe, ready.source)
    if is_identified:
        identity = fingerprint(recipe, ready.source, windows=ready.windows, environment=report.environment)
        if report.pruned:
            identity["pruned checkpoint"] = report.pruned.digest
        check_alike(identity)
        journal = work.begin(identity) if work else None
    if journal and journal.damage:
        observer(Note(journal.damage))
    placement, batch = fit(ready, placement, observer=observer, output=work.output if work else None)
    if journal:
        batch = journal.fact("batch") or batch  # a resumed run keeps its batch size
        _note_machine(journal, observer)
    if collectives.world() > 1:
        placement, batch = _agree(ready, placement, batch=batch, journal=journal)
    autotuning.adopt({})  # another run of this process may have been resumed from another machine
    placement = replace(placement, products=_agree_on_products(ready, journal))
    if ready.device.type == "cpu" and recipe.reads_text:
        report.environment |= _agree_on_speedups(placement.products, journal)
        for name in filter(_is_of_runs, autotuning.unsteady()):
            add_note(
                f"other programs were at work while {name} were measured: the result holds for this run only", report, observer
            )
    return placement, batch, journal


def check_alike(message: Mapping[str, Any]) -> None:
    """Raise InvalidSetting unless all processes of the run have the same fingerprint, `message` in this process."""
    local = json.loads(json.dumps({name: value for name, value in message.items() if name not in OF_ONE}))
    first, *others = collectives.all_gather_object(local)
    for number, other in enumerate(others, 1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise InvalidSetting(
                    f"Process {number} differs from process 0: {entry_in_words(name)} is {other.get(name)!r} instead of "
                    f"{first.get(name)!r}. Start all processes with the same command, versions and files."
                )


def _note_machine(journal: Journal, observer: Observer) -> None:
    """Add a note if a run is resumed with another number of processes or threads."""
    current = {"processes": collectives.world(), "threads": torch.get_num_threads()}
    recorded = journal.fact("machine")
    if recorded is None:
        journal.store_fact("machine", current)
    elif recorded != current:
        before, now = (f"{x['processes']} processes of {x['threads']} threads" for x in (recorded, current))
        observer(Note(f"started with {before}, resumed with {now}: rounding differs, and so may the masks"))


def _agree_on_products(ready: Prepared, journal: Journal | None) -> torch.dtype | None:
    """The dtype of products, measured by the main process of a new run; a resumed run keeps it, also on another machine."""
    name: str | None = journal.fact("products") if journal else None
    if name is None:
        products = choose_products(ready) if collectives.is_main() else None
        name = collectives.broadcast_object("" if products is None else dtype_name(products))
        if journal:
            journal.store_fact("products", name)
    return getattr(torch, name) if name else None


def _agree_on_speedups(products: torch.dtype | None, journal: Journal | None) -> dict[str, str]:
    """Take the speedups that the main process of a new run measured, or those of a resumed run, which decide the last bits.

    Returns:
        What they decide, for the report.
    """
    speedups: dict[str, float] | None = journal.fact("speedups") if journal else None
    if speedups is None:
        speedups = collectives.broadcast_object(_measure_speedups(products) if collectives.is_main() else None)
        if journal:
            journal.store_fact("speedups", speedups)
    autotuning.adopt(speedups)
    limit = max_density(products)
    return {
        "float32 products": "oneDNN" if uses_onednn() else "torch",
        "zeros are skipped": f"from {100 * (1 - limit):.0f} % zeros on" if limit else "never",
        "products in solvers": "bfloat16" if multiplies_bfloat16(torch.device("cpu")) else "float32",
    }


def _is_of_runs(name: str) -> bool:
    """Whether a comparison of this name decides something in a run, as one of packed products does not."""
    return name.startswith((ONEDNN_PRODUCTS, BFLOAT16_IN_SOLVERS, SKIPPING_ZEROS, BFLOAT16_IN_PASSES))


def _measure_speedups(products: torch.dtype | None) -> dict[str, float]:
    """Measure what a run on a CPU chooses from, if this machine is not known yet."""
    uses_onednn()
    max_density(products)
    bf16_solver_speedup()
    return {name: value for name, value in autotuning.known().items() if _is_of_runs(name)}


def _agree(ready: Prepared, placement: Placement, *, batch: int, journal: Journal | None) -> tuple[Placement, int]:
    """Choose the placement and batch size that suit every process.

    Raises InvalidSetting for fewer sequences than processes, and for a model that is read block by block where not every
    process can read the output folder.
    """
    count, windows = collectives.world(), len(ready.windows)
    if 0 < windows < count:
        raise InvalidSetting(f"There are {windows} calibration sequences for {count} processes. Pass more `samples`.")
    choices = collectives.all_gather_object([placement.streamed, batch, journal is None or journal.file.exists()])
    batch = max(1, min([size for _, size, _ in choices] + ([windows // count] if windows else [])))
    if any(streamed for streamed, _, _ in choices):
        if not all(visible for _, _, visible in choices):
            raise InvalidSetting(
                "The model is read block by block, and not every process can read the folder to write. Name one that all "
                "machines share, or pass `offload=False`."
            )
        if not placement.streamed:
            placement = choose_placement(ready.recipe.model_copy(update={"offload": True}), ready, files=True)
    return placement, batch
