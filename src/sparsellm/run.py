"""A whole run: open, plan, calibrate, prune, measure. The command line and `sparsellm.prune` are thin skins over `run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.blocks import Block, blocks_of
from sparsellm.budgets import share_out
from sparsellm.checkpoint import Checkpoint, Loaded, device_of, open_checkpoint
from sparsellm.distillation import batched, coupling, distil, held_back, last_states, written
from sparsellm.errors import NonFinite
from sparsellm.export import save
from sparsellm.journal import Journal
from sparsellm.memory import peak_memory
from sparsellm.methods import BlockMethod, BlockResult, Plan
from sparsellm.moments import Gram
from sparsellm.patterns import Unstructured, parse_pattern
from sparsellm.preparation import (
    GivenText,
    check_memory,
    check_tokens,
    coupling_batch,
    coupling_written,
    draw_windows,
    make_plan,
    read_test,
    window_length,
)
from sparsellm.recipe import ALLOCATIONS, Recipe, read_recipe
from sparsellm.report import Report, environment
from sparsellm.residence import Residence, settle
from sparsellm.sensitivity import output_sensitivities
from sparsellm.sequential import Step, prune_blocks
from sparsellm.weights import OnDisk
from sparsellm.work import Work, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS_A_BATCH = 4096
"""Windows travel in batches of about this many tokens: enough to keep matrix products busy, few enough to stay small."""


@dataclass(frozen=True)
class Stage:
    """A phase of the run begins. blocks: how many will be visited, in the phase that prunes."""

    name: str
    blocks: int = 0


@dataclass(frozen=True)
class Note:
    """Something that a reader should know; it also stands in the report."""

    text: str


Event = Stage | Note | Step
Observer = Callable[[Event], None]
"""Told what happens while it happens; the library itself prints nothing."""


@dataclass
class Result:
    """A pruned model with its report. dense: the folder it came from, None for a model that was in memory.

    weights: what fills the model, block by block, where it was too large for memory: then it has none of its own.
    """

    model: PreTrainedModel
    report: Report
    tokenizer: PreTrainedTokenizerBase | None = None
    dense: Path | None = None
    weights: OnDisk | None = None

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write model, tokenizer, model card and report to a folder, and read them back to verify; the folder.

        Raises OutputExists for a folder that is there, VerificationFailed when what was written is not what was meant.
        """
        return save(self.model, self.tokenizer, self.report, folder, self.dense, overwrite, self.weights)


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
    method: sparsellm, alps, sparsegpt, wanda or magnitude. sparsity: "70%", 0.7, "2:4" (2 of every 4 removed).
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


def run(
    recipe: Recipe,
    observe: Observer | None = None,
    given: GivenText = None,
    source: Checkpoint | Loaded | None = None,
    work: Work | None = None,
) -> Result:
    """Do what a recipe says, as far as the pruned model and its report; `Result.save_pretrained` writes them.

    given: in place of the recipe's calibration text. source: in place of the recipe's model. work: where finished blocks are
    kept, from `sparsellm.work.working`; without it a run that is killed starts over, and the model must fit the memory.
    All that can be refused is refused before the weights are read.
    """
    say: Observer = observe or (lambda _: None)
    started = time.perf_counter()
    device = device_of(recipe.device)
    report = Report(recipe, environment(device))
    with _phase("opening", report, say):
        source = source or open_checkpoint(recipe.model)
        skeleton = source.skeleton()
        blocks = blocks_of(skeleton)
        method, plan = make_plan(recipe, blocks)
        length = window_length(recipe, source.length)
    with _phase("reading texts", report, say):
        windows, report.calibration = draw_windows(recipe, method, given, source, length)
        tests = {text: read_test(recipe, source, text, length) for text in recipe.evaluate}
        check_tokens(skeleton, windows, *tests.values())
        if recipe.calibration in recipe.evaluate and "." in str(recipe.calibration):
            _note(f"{recipe.calibration} is both calibrated and measured on: the perplexity is too good", report, say)
        _note_few_tokens(method, plan, blocks, windows, report, say)
        every = windows.new_empty(len(windows) + recipe.written, windows.shape[-1], device="meta") if len(windows) else windows
        batch = recipe.batch or _usual_batch(every, length)
        vocabulary = skeleton.get_input_embeddings().num_embeddings
        if told := check_memory(recipe, method, blocks, every, vocabulary, device):
            say(Stage(told))
    journal = work.begin(fingerprint(recipe, source, windows, report.environment)) if work else None
    with _phase("loading", report, say):
        home = settle(recipe, source, device, work.folder if work else None)
        model, compute = home.model, home.compute
    if home.note:
        _note(home.note, report, say)

    def measure_all(when: str) -> None:
        for text, test in tests.items():
            with _phase(f"measuring {when}", report, say):
                report.perplexity.setdefault(text, {})[when] = asdict(home.measured(test, text))

    measure_all("dense")
    if recipe.written and len(windows):
        with _phase("letting the dense model write", report, say):
            # Before the given windows: the last of all are those that judge, and they should be real text.
            windows = torch.cat([written(model, windows, recipe.written, recipe.seed, compute), windows])
            report.calibration += f", and {recipe.written} windows that the dense model wrote"
    report.resolved = _resolved(method, windows, batch, model, compute)
    _prune_model(recipe, home, method, plan, windows.split(batch) if windows.numel() else (), report, say, journal)
    _note_blocks(method, report, say)
    try:
        measure_all("pruned")
    except NonFinite as error:  # hours of work are worth keeping, whatever they are worth
        _note(f"the pruned model was not measured: {error}", report, say)
    report.parameters, report.zeros = home.size()
    report.peak_memory = peak_memory()
    report.seconds["total"] = time.perf_counter() - started
    tokenizer = source.tokenizer() if not isinstance(source, Loaded) else source.given
    read = home.weights if isinstance(home.weights, OnDisk) else None
    return Result(model, report, tokenizer, source.folder if recipe.dtype == "auto" else None, read)


def _prune_model(
    recipe: Recipe,
    home: Residence,
    method: BlockMethod,
    plan: Plan,
    batches: Sequence[Tensor],
    report: Report,
    say: Observer,
    journal: Journal | None,
) -> None:
    """Share the sparsity out, prune block by block, and couple the whole model, as far as the recipe asks for each."""
    model, compute, weights, storage = home.model, home.compute, home.weights, home.storage
    metrics: list[Tensor] = []
    if method.sensitive or recipe.sharing == "error":
        with _phase("finding what errors cost", report, say):
            metrics = _remembered(journal, lambda: output_sensitivities(model, batches, compute, weights, storage))
    if recipe.sharing in ALLOCATIONS[1:]:
        with _phase(f"sharing out the sparsity by {recipe.sharing}", report, say):
            shares = journal.fact("shares") if journal else None
            if shares is None:
                plan = share_out(recipe.sharing, model, batches, plan, compute, metrics, recipe.bounds, weights, storage)
                if journal:
                    journal.note("shares", {name: pattern.sparsity for name, pattern in plan.items()})
            else:
                plan = {name: Unstructured(share) for name, share in shares.items()}
    pieces: list[Tensor] = []
    states: list[Tensor] = []
    back = 0
    if recipe.couple == "model":
        windows = torch.cat(list(batches))
        with _phase("letting the dense model write", report, say):
            ours = windows[: -held_back(windows)] if len(windows) > 1 else windows
            more = written(model, ours, coupling_written(recipe, *windows.shape), recipe.seed, compute)
        with _phase("reading the dense model's predictions", report, say):
            pieces, back = batched(windows, more, coupling_batch(recipe, *windows.shape))
            states = last_states(model, pieces, compute)
    blocks = blocks_of(model)
    visited = sum(any(block.full_name(name) in plan for name in block.layers) for block in blocks)
    with _phase("pruning", report, say, visited):
        for step in prune_blocks(model, batches, method, plan, compute, metrics, weights, storage, journal):
            say(step)
            if isinstance(step, BlockResult):
                report.blocks.append(step)
    if recipe.couple == "model":
        with _phase("coupling the model", report, say):
            report.coupled, moved = distil(model, pieces, states, plan, coupling(model, recipe.couple_steps), back)
            report.blocks = [_with_moved(block, model, moved) for block in report.blocks]
        say(report.coupled)
        if report.coupled.note:
            _note(f"the model's stage: {report.coupled.note}", report, say)


def _remembered(journal: Journal | None, find: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The sensitivities, from the journal where a run that is resumed had found them."""
    kept = journal.tensors("sensitivities") if journal else None
    if kept is not None:
        return [kept[str(number)] for number in range(len(kept))]
    found = find()
    if journal:
        journal.keep_tensors("sensitivities", {str(number): some for number, some in enumerate(found)})
    return found


@contextmanager
def _phase(name: str, report: Report, say: Observer, blocks: int = 0) -> Iterator[None]:
    """Say that a phase begins, and add its seconds to the report."""
    say(Stage(name, blocks))
    started = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - started


def _usual_batch(windows: Tensor, length: int) -> int:
    """Windows that travel together: about 4,096 tokens, and an eighth of all windows at most, to have some to hold back."""
    most = max(1, TOKENS_A_BATCH // (windows.shape[1] if windows.numel() else length))
    return min(most, max(1, len(windows) // 8)) if windows.numel() else most


def _with_moved(block: BlockResult, model: PreTrainedModel, moved: Sequence[str]) -> BlockResult:
    """A block's result after the whole model's stage: what else moved, and its zeros as they now are."""
    mine = {name for name in moved if name.startswith(f"{block.name}.")}
    layers = [replace(x, zeros=int((model.get_submodule(x.name).weight == 0).sum())) for x in block.layers]
    return replace(block, moved=tuple(sorted({*block.moved, *mine})), layers=tuple(layers))


def _resolved(
    method: BlockMethod, windows: Tensor, batch: int, model: PreTrainedModel, compute: torch.dtype | None
) -> dict[str, Any]:
    """What is really run, where the recipe leaves it open: every constant of the method, windows, device, dtypes."""
    return {
        "method": repr(method),
        "samples": len(windows),
        "length": windows.shape[1] if windows.numel() else None,
        "batch": batch,
        "device": str(model.device),
        "dtype": str(model.dtype),
        "computed_in": str(compute or model.dtype),
    }


def _note_few_tokens(
    method: BlockMethod, plan: Plan, blocks: list[Block], windows: Tensor, report: Report, say: Observer
) -> None:
    """Warn of Gram matrices that cannot have full rank: fewer tokens than a planned layer has inputs."""
    widest = max(block.layer(name).in_features for block in blocks for name in block.layers if block.full_name(name) in plan)
    if issubclass(method.needs, Gram) and windows.numel() < widest:
        _note(
            f"{windows.numel():,} calibration tokens are fewer than the {widest:,} inputs of the widest layer: its Gram matrix "
            f"is singular but for the damping. Use at least {-(-widest // windows.shape[1])} samples of this length.",
            report,
            say,
        )


def _note_blocks(method: BlockMethod, report: Report, say: Observer) -> None:
    """Tell what was not done as asked: blocks pruned otherwise, damping raised, zeros that were not asked for."""
    for block in report.blocks:
        for text in (block.note, block.refined.note if block.refined else ""):
            if text:
                _note(f"{block.name}: {text}", report, say)
    asked = getattr(getattr(method, "solver", None), "damping", None)
    raised = [layer for layer in report.layers if layer.damping is not None and layer.damping != asked]
    if raised:
        most = max(raised, key=lambda layer: layer.damping or 0)
        _note(
            f"damping was raised from {asked:g} on {len(raised)} layers to rescue a factorisation, "
            f"most to {most.damping:g} on {most.name}: use more calibration tokens",
            report,
            say,
        )

    more = [x for x in report.layers if x.zeros != parse_pattern(x.pattern).removed(x.shape[0] * x.shape[1])]
    if more:
        _note(
            f"{len(more)} layers have more zeros than asked for, {more[0].name} first ({100 * more[0].sparsity:.2f} %): their "
            "inputs are always zero, their dense weights had zeros already, or small weights vanish in the model's dtype",
            report,
            say,
        )


def _note(text: str, report: Report, say: Observer) -> None:
    """Put a note into the report, and say it."""
    report.notes.append(text)
    say(Note(text))
