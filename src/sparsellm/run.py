"""A whole run: open, plan, calibrate, prune, measure. The command line and `sparsellm.prune` are thin skins over `run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.blocks import Block, blocks_of
from sparsellm.checkpoint import Checkpoint, Loaded, device_of, open_checkpoint
from sparsellm.distillation import written
from sparsellm.errors import NonFinite
from sparsellm.events import Observer, Stage, note, phase
from sparsellm.export import save
from sparsellm.memory import peak_memory
from sparsellm.methods import BlockMethod, Plan
from sparsellm.moments import Gram
from sparsellm.patterns import parse_pattern
from sparsellm.preparation import (
    GivenText,
    check_memory,
    check_tokens,
    draw_windows,
    make_plan,
    read_test,
    window_length,
)
from sparsellm.pruning import prune_model
from sparsellm.recipe import Recipe
from sparsellm.recipe_file import read_recipe
from sparsellm.report import Report, environment
from sparsellm.residence import settle
from sparsellm.weights import OnDisk
from sparsellm.work import Work, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS_A_BATCH = 4096
"""Windows travel in batches of about this many tokens: enough to keep matrix products busy, few enough to stay small."""


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
    with phase("opening", report, say):
        source = source or open_checkpoint(recipe.model)
        skeleton = source.skeleton()
        blocks = blocks_of(skeleton)
        method, plan = make_plan(recipe, blocks)
        length = window_length(recipe, source.length)
    with phase("reading texts", report, say):
        windows, report.calibration = draw_windows(recipe, method, given, source, length)
        tests = {text: read_test(recipe, source, text, length) for text in recipe.evaluate}
        check_tokens(skeleton, windows, *tests.values())
        if recipe.calibration in recipe.evaluate and "." in str(recipe.calibration):
            note(f"{recipe.calibration} is both calibrated and measured on: the perplexity is too good", report, say)
        _note_few_tokens(method, plan, blocks, windows, report, say)
        every = windows.new_empty(len(windows) + recipe.written, windows.shape[-1], device="meta") if len(windows) else windows
        batch = recipe.batch or _usual_batch(every, length)
        vocabulary = skeleton.get_input_embeddings().num_embeddings
        if told := check_memory(recipe, method, blocks, every, vocabulary, device):
            say(Stage(told))
    journal = work.begin(fingerprint(recipe, source, windows, report.environment)) if work else None
    with phase("loading", report, say):
        home = settle(recipe, source, device, work.folder if work else None)
        model, compute = home.model, home.compute
    if home.note:
        note(home.note, report, say)

    def measure_all(when: str) -> None:
        for text, test in tests.items():
            with phase(f"measuring {when}", report, say):
                report.perplexity.setdefault(text, {})[when] = asdict(home.measured(test, text))

    measure_all("dense")
    if recipe.written and len(windows):
        with phase("letting the dense model write", report, say):
            # Before the given windows: the last of all are those that judge, and they should be real text.
            windows = torch.cat([written(model, windows, recipe.written, recipe.seed, compute), windows])
            report.calibration += f", and {recipe.written} windows that the dense model wrote"
    report.resolved = _resolved(method, windows, batch, model, compute)
    prune_model(recipe, home, method, plan, windows.split(batch) if windows.numel() else (), report, say, journal)
    _note_blocks(method, report, say)
    try:
        measure_all("pruned")
    except NonFinite as error:  # hours of work are worth keeping, whatever they are worth
        note(f"the pruned model was not measured: {error}", report, say)
    report.parameters, report.zeros = home.size()
    report.peak_memory = peak_memory()
    report.seconds["total"] = time.perf_counter() - started
    tokenizer = source.tokenizer() if not isinstance(source, Loaded) else source.given
    read = home.weights if isinstance(home.weights, OnDisk) else None
    return Result(model, report, tokenizer, source.folder if recipe.dtype == "auto" else None, read)


def _usual_batch(windows: Tensor, length: int) -> int:
    """Windows that travel together: about 4,096 tokens, and an eighth of all windows at most, to have some to hold back."""
    most = max(1, TOKENS_A_BATCH // (windows.shape[1] if windows.numel() else length))
    return min(most, max(1, len(windows) // 8)) if windows.numel() else most


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
        note(
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
                note(f"{block.name}: {text}", report, say)
    asked = getattr(getattr(method, "solver", None), "damping", None)
    raised = [layer for layer in report.layers if layer.damping is not None and layer.damping != asked]
    if raised:
        most = max(raised, key=lambda layer: layer.damping or 0)
        note(
            f"damping was raised from {asked:g} on {len(raised)} layers to rescue a factorisation, "
            f"most to {most.damping:g} on {most.name}: use more calibration tokens",
            report,
            say,
        )

    more = [x for x in report.layers if x.zeros != parse_pattern(x.pattern).removed(x.shape[0] * x.shape[1])]
    if more:
        note(
            f"{len(more)} layers have more zeros than asked for, {more[0].name} first ({100 * more[0].sparsity:.2f} %): their "
            "inputs are always zero, their dense weights had zeros already, or small weights vanish in the model's dtype",
            report,
            say,
        )
