"""The start of a run: model placement, batch size and journal, agreed on by all processes of a distributed run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.errors import InvalidSetting, dtype_name, plural
from sparsellm.models.contexts import product_dtype_context
from sparsellm.models.sparse_matmul import SKIPPING_ZEROS, max_density
from sparsellm.observers.events import DIGESTING, Note, Observer, Stage, add_note
from sparsellm.outputs.fingerprint import NO_SOURCE, fingerprint, run_inputs
from sparsellm.outputs.journal import OF_RECIPE, Journal, WorkDirectory, entry_in_words
from sparsellm.outputs.report import Report
from sparsellm.pipeline.loading import Placement, choose_placement
from sparsellm.pipeline.preparation import Prepared
from sparsellm.runtime import autotuning, collectives, devices
from sparsellm.runtime.autotuning import Computation, speedup
from sparsellm.runtime.devices import multiplies_bfloat16
from sparsellm.runtime.products import BFLOAT16_IN_SOLVERS, ONEDNN_PRODUCTS, bf16_solver_speedup, uses_onednn

PlacementChoice = Callable[..., tuple[Placement, int]]
"""Chooses where the model of a prepared run is held, and its sequences per batch: `fit_to_memory` or `fit_to_disk`."""

OF_ONE = ("environment.device", f"{OF_RECIPE}device")
"""Settings that may differ between the processes of a run."""

LEAST_GAIN = 1.5
"""Least gain in a layer's product for which `auto` takes bfloat16: all else in a block, a third of its time, gains nothing."""

NARROW = 512
"""Least width of a model that is pruned for which `auto` takes bfloat16. With `effort="fast"`, models 192 wide gain 3 % of the
time. Trainings of models of that width take half of the time."""

LAYER_TOKENS, LAYER_WIDTH = 256, 1024
"""Tokens and inputs of the layer that is timed; the gain is the same from 512 inputs on (2.1 with AVX-512 BF16)."""

BFLOAT16_IN_PASSES = "products in bfloat16"
"""Name of the comparison with products in float32."""


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
    report.inputs = run_inputs(recipe, ready.source) | (ready.inputs_in_memory() if work else {})
    if work and (unknown := [name for name, entries in report.inputs.items() if NO_SOURCE in entries.values()]):
        text = "has no source that can be read: a resumed run compares its name and its settings"
        add_note(f"the class {unknown[0]} {text}", report, observer)
    if is_identified:
        identity = fingerprint(recipe, ready.source, windows=ready.windows, environment=report.environment)
        if isinstance(ready.source, InMemoryModel):
            identity["the model in memory"] = report.inputs.get(recipe.model)
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
        before, now = (f"{plural(x['processes'], 'process')} of {plural(x['threads'], 'thread')}" for x in (recorded, current))
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


def choose_products(ready: Prepared) -> torch.dtype | None:
    """Choose the dtype of the matrix products of passes; None for the dtype that a model is computed in anyway.

    `auto` never rounds a float32 or float16 model: only a bfloat16 model on a CPU, which would be computed in float32, is
    computed with products in bfloat16, if the device is faster with them. On a GPU a model is computed in its own dtype, but
    trained in float32, so that recovery chooses there as on a CPU.
    """
    recipe, is_recovery = ready.recipe, ready.recipe.trains
    if not recipe.reads_text or recipe.in_float32:
        return None
    is_bf16 = ready.source.dtype(recipe.dtype) is torch.bfloat16
    if is_bf16 and not is_recovery and ready.device.type != "cpu":
        return None
    if recipe.compute_dtype == "bfloat16":
        return torch.bfloat16
    wide = is_recovery or int(ready.skeleton.config.get_text_config().hidden_size) >= NARROW
    return torch.bfloat16 if is_bf16 and wide and bf16_pass_speedup(ready.device) >= LEAST_GAIN else None


def bf16_pass_speedup(device: torch.device) -> float:
    """Return how many times as fast a linear layer is with a product in bfloat16, casts included, as in float32.

    Measured once on a machine, as `sparsellm.runtime.autotuning` does.
    """

    def make() -> tuple[Computation, Computation]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(LAYER_TOKENS, LAYER_WIDTH, generator=generator).to(device)
        weight = torch.randn(LAYER_WIDTH, LAYER_WIDTH, generator=generator).to(device)

        def multiply(dtype: torch.dtype | None) -> None:
            with product_dtype_context(device, dtype):
                linear(inputs, weight)
            devices.synchronize(device)

        return lambda: multiply(None), lambda: multiply(torch.bfloat16)

    return speedup(BFLOAT16_IN_PASSES, make, None if device.type == "cpu" else devices.name_of(device))
