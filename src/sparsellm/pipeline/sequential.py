"""The main path: prune block by block, each on the hidden states that the pruned blocks before it produce."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sparsellm.activations.walk import Activations, walk
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod, BlockResult, EpochResult, LayerResult, Plan, Step, TrainingResult
from sparsellm.methods.contract import BlockRules
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.runtime import devices
from sparsellm.solvers.patterns import count_kept
from sparsellm.solvers.statistics import TokenCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparsellm.outputs.journal import Journal


class InputsReader(Protocol):
    """A method or a recovery, as a reader of the activations at each block."""

    @property
    def needs(self) -> type[TokenCount]: ...

    @property
    def needs_dense_stream(self) -> bool: ...

    @property
    def needs_fisher(self) -> bool: ...


def prune_blocks(
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    method: BlockMethod,
    plan: Plan,
    *,
    fisher: Sequence[Tensor] = (),
    journal: Journal | None = None,
    progress: Callable[[float, int], None] = lambda *_: None,
) -> Iterator[Step]:
    """Prune the planned layers of a model in place, and yield the result of each layer, epoch and block as soon as it is known.

    A caller that stops early leaves a model whose first blocks are pruned.

    Args:
        model: The dense model.
        batches: Calibration batches of token ids, each (batch, seq); may be empty for a method that needs no inputs.
        method: Prunes one block.
        plan: The pattern of each layer to prune, by full name.
        fisher: F of each block's output, from `output_fisher`, for a method whose `needs_fisher` is True.
        journal: Stores each finished block before its result is yielded; blocks that it already holds are restored instead of
            pruned. Required for weights on disk, which are dropped when the next block is loaded.
        progress: Called in each pass through a block with the batches that are done, and their number.

    Raises:
        InvalidSetting: The weights are on disk and there is no journal, or the method needs `fisher` and it is empty.
        BrokenContract: The method, or its solver, breaks a rule of `methods.contract`; its block is not stored.
    """

    def steps(block: Block, inputs: Activations) -> Iterator[Step]:
        layers = _layer_steps(block, inputs, method, plan=plan)
        note = partial(method.note, block, plan)
        return block_steps(block, layers, plan, note=note, rules=BlockRules(method, block, plan))

    return visit_blocks(
        LoadedModel.of(model), batches, method, plan, steps=steps, fisher=fisher, journal=journal, progress=progress
    )


@torch.no_grad()
def visit_blocks(
    loaded: LoadedModel,
    batches: Sequence[Tensor],
    reader: InputsReader,
    plan: Plan,
    *,
    steps: Callable[[Block, Activations], Iterator[Step]],
    fisher: Sequence[Tensor] = (),
    journal: Journal | None = None,
    progress: Callable[[float, int], None] = lambda *_: None,
) -> Iterator[Step]:
    """Change the blocks that have planned layers one after the other, each on what the changed blocks before it produce.

    Args:
        batches: As for `prune_blocks`, like `fisher`, `journal` and `progress`.
        reader: Says what of the activations is read.
        plan: The pattern of each layer, by full name.
        steps: Changes one block in place, and yields its results; the block's own comes last.

    Raises:
        InvalidSetting: As `prune_blocks`.
    """
    if journal is None and loaded.weights.on_disk:
        raise InvalidSetting("A model that is read block by block needs a journal, to keep the pruned blocks in.")
    blocks = blocks_and_head(loaded.model, plan)
    planned = {block.index for block in blocks if any(block.full_name(name) in plan for name in block.layers)}
    if not planned:
        return
    if reader.needs_fisher and not fisher:
        raise InvalidSetting(f"{type(reader).__name__} needs `fisher`: pass output_fisher(model, batches).")
    if reader.needs is TokenCount:
        visits = _blocks_without_inputs(loaded, blocks)
    else:
        stop, dense = max(planned) + 1, reader.needs_dense_stream
        visits = walk(loaded, batches, stop=stop, layers=plan, needs_dense_stream=dense, fisher=fisher)
    with closing(visits):  # an error must close the walk, which restores the model
        for block, inputs in visits:
            if block.index not in planned:
                continue
            inputs.pruned.progress = progress
            finished = journal.finished(block.index) if journal else None
            for step in [finished] if finished else steps(block, inputs):
                if journal and isinstance(step, BlockResult):
                    file = journal.restore_block(block) if finished else journal.store_block(block, step)
                    parameters = block.module.named_parameters(remove_duplicate=False)  # no run changes a buffer
                    loaded.weights.relocate([block.full_name(name) for name, _ in parameters], file)
                    if finished:
                        step = replace(step, scales={block.full_name(name): x for name, x in block.scales.items()})  # noqa: PLW2901
                yield step


def _blocks_without_inputs(loaded: LoadedModel, blocks: Sequence[Block]) -> Generator[tuple[Block, Activations], None, None]:
    """Load block by block without computing hidden states, for a method that needs no inputs."""
    no_inputs = Activations([], [[] for _ in blocks])
    for block, next_block in zip(blocks, [*blocks[1:], None], strict=True):
        with loaded.weights.block(block, next_block):
            yield block, no_inputs


def block_steps(
    block: Block,
    steps: Iterator[LayerResult | EpochResult | TrainingResult],
    plan: Plan,
    *,
    note: Callable[[], str] = str,
    rules: BlockRules | None = None,
) -> Iterator[Step]:
    """Pass on the results of the steps that change a block, with the zeros before them; the block's own result comes last.

    Args:
        note: Gives the remark on the block when all steps are done.
        rules: Checked when all steps are done, before the block's own result is given.

    Raises:
        BrokenContract: A rule is broken.
    """
    started = time.perf_counter()
    layers: list[LayerResult] = []
    epochs: list[EpochResult] = []
    training: TrainingResult | None = None
    before = {name: tensor.clone() for name, tensor in block.unpruned_parameters().items()}
    zeros_before = _zeros(block, plan)
    for result in steps:
        step = result
        if isinstance(step, LayerResult):
            if rules:
                rules.check_reported(step)
            step = replace(step, zeros_before=zeros_before[step.name])
            layers.append(step)
        elif isinstance(step, EpochResult):
            epochs.append(step)
        else:
            training = step
        yield step
    block.round_to_storage_dtype()  # a resumed run reads what is stored, which may have fewer digits than the method left
    parameters = dict(block.module.named_parameters())
    changes = [(tensor != parameters[name]).any() for name, tensor in before.items()]
    read = devices.to_python(changes + (rules.readings() if rules else []))
    if rules:
        rules.check(read[len(before) :])
    changed = tuple(block.full_name(name) for name, is_changed in zip(before, read, strict=False) if is_changed)
    seconds = time.perf_counter() - started
    scales = {block.full_name(name): tensor for name, tensor in block.scales.items()}
    yield BlockResult(block.index, block.name, tuple(layers), tuple(epochs), seconds, note(), training, changed, scales)


def _layer_steps(
    block: Block, inputs: Activations, method: BlockMethod, *, plan: Plan
) -> Iterator[LayerResult | EpochResult | TrainingResult]:
    """Prune one block: the results of its method, with what describes projected weights."""
    after_solve = getattr(method, "after_solve", None)
    weights = {block.full_name(name): layer.weight for name, layer in block.layers.items()}
    for step in method.prune(block, inputs, plan):
        if isinstance(step, LayerResult) and after_solve is not None:
            yield replace(step, **after_solve.fields_of(step.name, weights[step.name]))
        else:
            yield step


def _zeros(block: Block, plan: Plan) -> dict[str, int]:
    """The number of zeros in each planned layer, by its full name."""
    weights = {block.full_name(name): layer.weight for name, layer in block.layers.items() if block.full_name(name) in plan}
    kept = devices.to_python([count_kept(weight) for weight in weights.values()])
    return {name: weight.numel() - int(count) for (name, weight), count in zip(weights.items(), kept, strict=True)}
