"""What a run settles before it reads any weights: method, plan, windows. Whatever can be refused is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.headers import read_all_headers
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint, resolve_device
from sparsellm.checkpoints.tensor_index import NotStreamable, index_tensors
from sparsellm.data.samples import calibration_windows, test_windows
from sparsellm.data.texts import Text, read_text
from sparsellm.errors import BadCheckpoint, BadText, InvalidSetting, UnsupportedModel
from sparsellm.evaluation.zeroshot import prepare_tasks
from sparsellm.methods import BlockMethod, Plan
from sparsellm.methods.algorithm1 import PublishedSparseLLM
from sparsellm.models.architecture_file import read_architecture
from sparsellm.models.blocks import Block, blocks_of, describe
from sparsellm.models.coverage import check_coverage, coverage_of
from sparsellm.pruning.plan import plan_from_file, select_blocks, uniform_plan
from sparsellm.recovery.masked_training import windows_a_step
from sparsellm.recovery.training_memory import predictions_bytes, trained_bytes
from sparsellm.runs.events import OPENING, READING_TEXTS, Note, Observer, Stage, add_note, phase
from sparsellm.runs.recipe import Recipe, RecoveryRecipe, RunRecipe
from sparsellm.runs.recovery import BlockRecovery, recovery_plan
from sparsellm.runs.registry import ALLOCATIONS
from sparsellm.runs.report import Report
from sparsellm.runtime.memory import check_fits, human_bytes
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.statistics import Gram

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USUAL_LENGTH = 2048
"""Tokens a window where the model allows it; the papers' choice."""

TOKENS_A_BATCH = 2048
"""Enough to keep matrix products busy; the hidden signals of twice as many no longer come from memory that is at hand."""

MODEL_TOKENS = 2048
"""Tokens in a gradient step over the whole model: more steps beat larger ones, and the logits are large."""

GivenText = Sequence[str] | Tensor | None
"""Texts, or token numbers (samples, length), in place of the recipe's calibration text."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A run before its weights are read.

    blocks: of a skeleton without weights. plan: a pattern for every layer to prune. length: tokens a window. windows: to
    calibrate on, (samples, length). tests: by text, the windows to measure on. batch: windows at a time.
    """

    source: Checkpoint | InMemoryModel
    device: torch.device
    blocks: Sequence[Block]
    method: BlockMethod
    plan: Plan
    length: int
    windows: Tensor
    tests: Mapping[str, Tensor]
    batch: int


def prepare(
    recipe: RunRecipe, given: GivenText, source: Checkpoint | InMemoryModel | None, report: Report, observer: Observer
) -> Prepared:
    """Open the model and read the texts, and refuse what can be refused so far. Arguments as for `sparsellm.runs.run.run`."""
    device = resolve_device(recipe.device)
    with phase(OPENING, report, observer):
        described = None if recipe.architecture is None else read_architecture(recipe.architecture)
        source = source or open_checkpoint(recipe.model, recipe.revision, recipe.trust_remote_code, described)
        if isinstance(source, InMemoryModel):
            describe(source.model, described)
        skeleton = source.skeleton()
        check_vocabulary(skeleton, source)
        blocks = blocks_of(skeleton)
        covered = coverage_of(skeleton, blocks)
        check_coverage(skeleton, covered)
        method: BlockMethod
        if isinstance(recipe, RecoveryRecipe):
            method, plan, report.pruned = recovery_plan(recipe, source, blocks)
        else:
            assert isinstance(recipe, Recipe)
            method, plan = make_plan(recipe, blocks)
        report.coverage = covered.of_plan(blocks, plan)
        if isinstance(source, Checkpoint):
            check_names(source, skeleton, blocks, plan)
        length = window_length(recipe, source.length)
    with phase(READING_TEXTS, report, observer):
        windows, report.calibration = draw_windows(recipe, given, source, length)
        tests = {text: read_test(recipe, source, text, length) for text in recipe.evaluate}
        check_tokens(skeleton, windows, *tests.values())
        prepare_tasks(recipe.task, recipe.task_data)
        if recipe.calibration in recipe.evaluate and "." in str(recipe.calibration):
            add_note(f"{recipe.calibration} is both calibrated and measured on: the perplexity is too good", report, observer)
        if (few := recipe.evaluate_limit) and tests:
            add_note(
                f"the perplexity is of the first {few} windows of {length} tokens of each text, for a try", report, observer
            )
        _note_few_tokens(method, plan, blocks, windows, report, observer)
        every = (
            windows.new_empty(len(windows) + recipe.calibration_written, windows.shape[-1], device="meta")
            if len(windows)
            else windows
        )
        batch = recipe.batch_size or _usual_batch(every, length)
        if isinstance(method, BlockRecovery) and method.training.steps:
            most = windows_a_step(*every.shape)
            if batch > most:
                observer(Note(f"{most} windows at a time, not {batch}: as many as a gradient step reads"))
                batch = most
        vocabulary = skeleton.get_input_embeddings().num_embeddings
        if message := check_memory(recipe, method, blocks, every, vocabulary, device):
            observer(Stage(message))
    return Prepared(source, device, blocks, method, plan, length, windows, tests, batch)


def make_plan(recipe: Recipe, blocks: list[Block]) -> tuple[BlockMethod, Plan]:
    """The recipe's method, and its plan checked against every layer's shape."""
    method = recipe.to_method(len(blocks))
    coupled = isinstance(method, PublishedSparseLLM) and method.scope != frozenset()
    if coupled and blocks[0].architecture.known and not any(block.architecture.feed_forward_parts for block in blocks):
        raise UnsupportedModel(
            f"The feed-forward part of {recipe.model} has an activation that SparseLLM does not solve. "
            "Pass --scope none, or a layer-wise method such as --method alps."
        )
    chosen = select_blocks(recipe.blocks, len(blocks))
    # A file may give another pattern to a layer that could not have the recipe's: its own shapes are checked there.
    by_file = recipe.sharing not in ALLOCATIONS
    plan = uniform_plan(blocks, Unstructured(0) if by_file else recipe.pattern, chosen, recipe.include, recipe.exclude)
    if by_file:
        every = {block.full_name(name): layer for block in blocks for name, layer in block.layers.items()}
        shapes = {name: (every[name].out_features, every[name].in_features) for name in plan}
        plan = plan_from_file(recipe.sharing, plan, shapes, recipe.pattern)
    return method, plan


def model_step(samples: int, length: int) -> int:
    """Windows in one gradient step over the whole model: about 2,048 tokens, and an eighth of all windows at most."""
    return max(1, min(MODEL_TOKENS // length, samples // 8))


def model_written(recipe: RunRecipe, samples: int, length: int) -> int:
    """Windows that the dense model writes for the steps over the whole model: as asked, or so that each is read about twice."""
    read = recipe.model_steps * model_step(samples, length)
    return max(0, read // 2 - samples) if recipe.model_written is None else recipe.model_written


def check_memory(
    recipe: RunRecipe, method: BlockMethod, blocks: Sequence[Block], windows: Tensor, vocabulary: int, device: torch.device
) -> str:
    """What the gradient stages will take, in words; raises TooLarge where it cannot be had. Empty without such stages."""
    message = []
    if isinstance(method, BlockRecovery) and method.training.steps:
        width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
        needed = trained_bytes(blocks, together=False) + 2 * 4 * windows.numel() * width  # two streams
        message.append(f"training a block takes {human_bytes(needed)}")
        check_fits(needed, device, "Training a block", "Pass fewer --samples.")
    if recipe.model_steps:
        needed = model_bytes(recipe, blocks, windows, vocabulary)
        message.append(f"training the whole model takes {human_bytes(needed)}")
        check_fits(needed, device, "Training the whole model", "Pass --scope block to recover, or a smaller --batch-size.")
    return ", ".join(message)


def model_bytes(recipe: RunRecipe, blocks: Sequence[Block], windows: Tensor, vocabulary: int) -> int:
    """Bytes that gradient steps over the whole model take besides the model."""
    width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
    batch = min(model_step(*windows.shape), recipe.batch_size or len(windows)) * windows.shape[1]
    every = windows.numel() + model_written(recipe, *windows.shape) * windows.shape[1]
    return trained_bytes(blocks, together=True) + predictions_bytes(every, width, batch, vocabulary, len(blocks))


def window_length(recipe: RunRecipe, longest: int) -> int:
    """Tokens a window. Raises InvalidSetting when the model was not made for as many."""
    if recipe.sequence_length is not None and recipe.sequence_length > longest:
        raise InvalidSetting(
            f"`sequence_length` is {recipe.sequence_length}, but {recipe.model} was made for {longest} tokens at most."
        )
    return recipe.sequence_length or min(USUAL_LENGTH, longest)


def draw_windows(recipe: RunRecipe, given: GivenText, source: Checkpoint | InMemoryModel, length: int) -> tuple[Tensor, str]:
    """The calibration windows, (samples, length), and how they were drawn; none for a run that needs no inputs."""
    if not recipe.reads_text:
        return torch.empty(0, dtype=torch.long), ""
    if isinstance(given, Tensor):
        if given.ndim != 2 or given.dtype not in (torch.int32, torch.int64) or given.shape[1] < 2 or len(given) == 0:
            raise BadText(
                f"Calibration tokens must be whole numbers of (samples, length), got {tuple(given.shape)} {given.dtype}."
            )
        if given.shape[1] > source.length:
            raise BadText(f"Calibration windows have {given.shape[1]} tokens, but {source.name} was made for {source.length}.")
        return given.long(), f"{given.shape[0]} windows of {given.shape[1]} tokens, given in memory"
    if given is not None:
        if not all(isinstance(item, str) for item in given):
            raise BadText(
                f"`calibration` must be texts or a tensor of token numbers, got a {type(given).__name__} of other things."
            )
        text = Text(tuple(given), "\n\n", "given in memory")
    else:
        text = read_text(str(recipe.calibration), "calibration", recipe.text_field)
    drawn = calibration_windows(text, source.tokenizer(), recipe.samples, length, recipe.seed)
    return drawn.windows, drawn.description


def check_names(source: Checkpoint, skeleton: PreTrainedModel, blocks: Sequence[Block], plan: Plan) -> None:
    """Raise BadCheckpoint unless the files hold every parameter to prune by the name by which the output is verified."""
    files, one = source.files(), tied_names(skeleton)
    try:
        names = {one[name] for name in index_tensors(files, skeleton)[0]}
    except NotStreamable:
        names = {one.get(name, name) for name in read_all_headers(files)}
    planned = {
        block.full_name(block.parameter(name)) for block in blocks for name in block.layers if block.full_name(name) in plan
    }
    missing = sorted(name for name in planned if one[name] not in names)
    if missing:
        raise BadCheckpoint(
            f"{source.name} lacks {len(missing)} weights that its configuration calls for, {missing[0]} among them: no tensor "
            "in its files gets that name. The download may be incomplete, or config.json belongs to another model."
        )


def check_vocabulary(skeleton: PreTrainedModel, source: Checkpoint | InMemoryModel) -> None:
    """Raise BadCheckpoint for a tokenizer that does not load, or that has more tokens than the model has embeddings.

    Every output gets the tokenizer's files, so that it is loaded for methods without a text too. Tokens that were added to a
    vocabulary may lie beyond the embeddings, as in published models; a text that holds one is refused by `check_tokens`.
    """
    if isinstance(source, InMemoryModel) and source.given is None:
        return
    words, tokens = skeleton.get_input_embeddings().num_embeddings, source.tokenizer().vocab_size
    if tokens > words:
        raise BadCheckpoint(
            f"The tokenizer of {source.name} has {tokens:,} tokens, but the model has embeddings for {words:,}. "
            "Copy the model's own tokenizer files into the folder."
        )


def check_tokens(skeleton: PreTrainedModel, *windows: Tensor) -> None:
    """Raise BadText for token numbers that the model has no embedding for."""
    words = skeleton.get_input_embeddings().num_embeddings
    for some in windows:
        if some.numel() and not (int(some.min()) >= 0 and int(some.max()) < words):
            raise BadText(
                f"Token numbers must lie in [0, {words}), got {int(some.min())} to {int(some.max())}. "
                "The tokenizer may belong to another model."
            )


def read_test(recipe: RunRecipe, source: Checkpoint | InMemoryModel, text: str, length: int) -> Tensor:
    """The windows to measure on, (windows, length)."""
    return test_windows(read_text(text, "test", recipe.text_field), source.tokenizer(), length, recipe.evaluate_limit)


def _usual_batch(windows: Tensor, length: int) -> int:
    """Windows that travel together: about TOKENS_A_BATCH, and no more than a step over one block reads."""
    usual = max(1, TOKENS_A_BATCH // (windows.shape[1] if windows.numel() else length))
    return min(usual, windows_a_step(*windows.shape)) if windows.numel() else usual


def _note_few_tokens(
    method: BlockMethod, plan: Plan, blocks: Sequence[Block], windows: Tensor, report: Report, observer: Observer
) -> None:
    """Warn of Gram matrices that cannot have full rank: fewer tokens than a planned layer has inputs."""
    widest = max(block.layer(name).in_features for block in blocks for name in block.layers if block.full_name(name) in plan)
    if issubclass(method.needs, Gram) and windows.numel() < widest:
        add_note(
            f"{windows.numel():,} calibration tokens are fewer than the {widest:,} inputs of the widest layer: its Gram matrix "
            f"is singular but for the damping. Use at least {-(-widest // windows.shape[1])} samples of this length.",
            report,
            observer,
        )
