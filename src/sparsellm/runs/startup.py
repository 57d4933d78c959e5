"""How a run begins: where the model will be, how many windows travel together, what was done already. Several processes that
work together settle it for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from sparsellm.errors import InvalidSetting
from sparsellm.pruning.journal import Journal
from sparsellm.runs.events import DIGESTING, Note, Observer, Stage
from sparsellm.runs.fingerprint import fingerprint
from sparsellm.runs.placement import Placement, choose_placement
from sparsellm.runs.planning import fitted
from sparsellm.runs.preparation import Prepared
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runs.report import Report
from sparsellm.runs.workspace import WorkDirectory
from sparsellm.runtime import collectives

OF_ONE = ("environment.device", "recipe.device")
"""What may differ between processes that work together."""


def start_run(
    recipe: RunRecipe, ready: Prepared, report: Report, observer: Observer, work: WorkDirectory | None
) -> tuple[Placement, int, Journal | None]:
    """The model's place, the windows at a time, and the journal, if there is a folder to work in.

    Raises what `place_of`, `fitted`, `Work.begin` and `check_alike` raise.
    """
    place = choose_placement(recipe, ready.source, ready.device, files=work is not None)
    journal = None
    if work or collectives.world() > 1:
        observer(Stage(DIGESTING))
        message = fingerprint(recipe, ready.source, ready.windows, report.environment)
        if report.pruned:
            message["pruned checkpoint"] = report.pruned["digest"]
        check_alike(message)
        journal = work.begin(message) if work else None
    if journal and journal.lost:
        observer(Note(journal.lost))
    place, batch = fitted(recipe, ready, place, observer, work.output if work else None)
    batch = (journal.fact("batch") if journal else None) or batch  # a run that goes on goes on as it began
    if journal:
        _note_machine(journal, observer)
    return *_suiting(recipe, ready, place, batch, journal), journal


def check_alike(message: Mapping[str, Any]) -> None:
    """Raise InvalidSetting unless all processes that work together are about to do the same. told: this one's fingerprint."""
    local = json.loads(json.dumps({name: value for name, value in message.items() if name not in OF_ONE}))
    first, *others = collectives.all_gather_object(local)
    for number, other in enumerate(others, 1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise InvalidSetting(
                    f"Process {number} was started otherwise than process 0: {name} is {other.get(name)!r}, there "
                    f"{first.get(name)!r}. Start all with the same command, versions and files."
                )


def _note_machine(journal: Journal, observer: Observer) -> None:
    """Tell where a run goes on with other processes or threads than it was begun with."""
    now = {"processes": collectives.world(), "threads": torch.get_num_threads()}
    begun = journal.fact("machine")
    if begun is None:
        journal.note("machine", now)
    elif begun != now:
        was, here = (f"{x['processes']} processes of {x['threads']} threads" for x in (begun, now))
        observer(Note(f"begun by {was}, goes on with {here}: rounding differs, and masks may with it"))


def _suiting(
    recipe: RunRecipe, ready: Prepared, place: Placement, batch: int, journal: Journal | None
) -> tuple[Placement, int]:
    """The place and the windows at a time that suit every process; with one, as they are.

    Raises InvalidSetting where there are fewer windows than processes, and for a model that is read block by block into a
    folder that not all of them see.
    """
    count, windows = collectives.world(), len(ready.windows)
    if count == 1:
        return place, batch
    if 0 < windows < count:
        raise InvalidSetting(f"There are {windows} calibration windows for {count} processes. Pass more --samples.")
    every = collectives.all_gather_object([place.streamed, batch, journal is None or journal.file.exists()])
    batch = max(1, min([some for _, some, _ in every] + ([windows // count] if windows else [])))
    if any(streamed for streamed, _, _ in every):
        if not all(seen for _, _, seen in every):
            raise InvalidSetting(
                "The model is read block by block, and not every process sees the folder to write. Name one that all machines "
                "share, or pass --no-offload."
            )
        if not place.streamed:
            place = choose_placement(recipe.model_copy(update={"offload": True}), ready.source, ready.device, files=True)
    return place, batch
