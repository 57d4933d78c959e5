"""Training of the whole model after its blocks: what is trained, the sequences that are read, the memory, and the steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.recover.recipe import SCOPE_STEPS, RecoveryRecipe
from sparsellm.extensions.recover.training.distillation import Group, adam_for, distill, group_batches, last_states
from sparsellm.extensions.recover.training.generation import AT_A_TIME, generate_samples
from sparsellm.extensions.recover.training.masked_training import TrainingStore
from sparsellm.extensions.recover.training.trained_weights import COPIES, Train, pruned_blocks, trained_bytes, trained_numbers
from sparsellm.methods import WHOLE_MODEL, BlockResult, BlockShapes, Memory, TrainingResult
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head, outside_parameters
from sparsellm.observers.events import add_note, run_stage
from sparsellm.outputs.journal import Journal
from sparsellm.pipeline.loading import OpenedModel, Placement
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.run import Run
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.runtime.memory import check_fits, human_bytes
from sparsellm.solvers.linalg import count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparsellm.extensions.recover.block_recovery import BlockRecovery

GENERATING, PREDICTING, TRAINING = (
    "generating text with the dense model",
    "computing the dense model's predictions",
    "training the whole model",
)
"""Names of the stages, in running order."""

MODEL_TOKENS = 1024
"""Tokens per gradient step over the whole model, at least one sequence: with as many tokens, more and smaller steps recover
more."""

READS = 2
"""How often training the whole model reads a sequence, about: the dense model generates as many as the text lacks for it. With
few sequences alone, training overfits (LLM-QAT, Liu et al., 2023, generates all of its data)."""

STORED_COPIES = 4
"""float32 copies of the trained numbers that a durable state has: the present ones, the best ones, and Adam's two moments."""


@dataclass(frozen=True)
class ModelTraining:
    """The gradient steps of a run over the whole model.

    Attributes:
        train: The parameters that are trained, as in `sparsellm.extensions.recover.training.trained_weights.trained_names`.
        rank: Rank of the changes for "lora".
        patience: As for `sparsellm.extensions.recover.training.masked_training.MaskedAdam`.
        rounded: Whether the trained weights are integers times scales.
        targets: Full names of the layers that "lora" trains; None for all pruned ones.
        batch_size: Largest number of sequences per batch; None for those of a step.
        changes_head: Whether the output head differs from the dense model's, as where an earlier recovery changed it.
        has_steps: Whether the recipe has a field for the number of steps.
    """

    steps: int
    train: Train = "full"
    rank: int = 0
    patience: int | None = None
    rounded: bool = False
    targets: frozenset[str] | None = None
    batch_size: int | None = None
    changes_head: bool = False
    has_steps: bool = field(default=False, repr=False)

    on_dense: ClassVar[tuple[str, ...]] = (GENERATING, PREDICTING)
    stage: ClassVar[str] = TRAINING

    @classmethod
    def of(cls, recipe: RunRecipe) -> ModelTraining:
        """The training of a pruning run."""
        rounded = isinstance(recipe, Recipe) and recipe.projecting != ""
        return cls(SCOPE_STEPS["model"], rounded=rounded, batch_size=recipe.batch_size)

    @classmethod
    def of_recovery(cls, recipe: RecoveryRecipe, method: BlockRecovery) -> ModelTraining:
        """The training of a recovery, whose blocks are changed by this method."""
        return cls(
            recipe.resolved_steps,
            recipe.train,
            recipe.lora_rank,
            patience=recipe.patience,
            rounded=bool(method.scales),
            targets=method.targets,
            batch_size=recipe.batch_size,
            changes_head=bool(method.outside),
            has_steps=True,
        )

    @property
    def trains_outside(self) -> bool:
        """Whether the last norm and the output head are trained too, as they are unless the layers hold integers."""
        return self.train == "full" and not self.rounded

    def count_generated(self, samples: int, length: int) -> int:
        """Number of sequences that the dense model generates."""
        return max(0, self.steps * model_step(samples, length) // READS - samples)

    def numbers_outside(self, model: PreTrainedModel) -> int:
        """Count the numbers outside of the blocks that are trained."""
        parameters = outside_parameters(model, ()) if self.trains_outside else {}
        return sum(parameter.numel() for parameter in parameters.values())

    def memory_bytes(self, opened: OpenedModel, windows: Tensor) -> int:
        """Bytes that the gradient steps take in addition to the model."""
        blocks, vocabulary = opened.blocks, opened.skeleton.get_input_embeddings().num_embeddings
        width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
        batch_tokens = min(model_step(*windows.shape), self.batch_size or len(windows)) * windows.shape[1]
        tokens = windows.numel() + self.count_generated(*windows.shape) * windows.shape[1]
        trained = sum(trained_bytes(x, train=self.train, rank=self.rank, rounded=self.rounded) for x in blocks)
        if outside := self.numbers_outside(opened.skeleton):  # with what they were, and a copy of the dense model's head
            trained += 4 * ((COPIES + 1) * outside + vocabulary * width)
        # The dense model's last states, three tensors of logits, and the blocks' inputs.
        predictions: int = 4 * (tokens * width + 3 * batch_tokens * vocabulary + batch_tokens * width * len(blocks))
        return trained + predictions

    def check_memory(self, opened: OpenedModel, windows: Tensor) -> str:
        """Describe the memory that the training takes. Raises TooLarge if the device has less."""
        needed = self.memory_bytes(opened, windows)
        advice = "Pass `scope='block'` to recover, or a smaller `batch_size`."
        check_fits(needed, opened.device, stage="Training the whole model", advice=advice)
        return f"training the whole model takes {human_bytes(needed)}"

    def memory(self, ready: Prepared, placement: Placement, shapes: BlockShapes) -> Iterator[tuple[str, Memory]]:
        """The memory of each stage of training the whole model, by its name."""
        samples, length = ready.windows.shape
        more = self.count_generated(samples, length)
        if more:
            yield GENERATING, _generation_memory(ready, placement, more)
        whole = 4 * (placement.model // shapes.stored)  # float32
        states = 4 * (samples + more) * length * shapes.width
        yield PREDICTING, Memory(whole + states + shapes.batch * shapes.forward_bytes, [])
        blocks = sum(sum(x.numel() for x in block.module.parameters()) for block in ready.blocks)
        batch = min(model_step(samples, length), self.batch_size or samples) * length
        outside = self.numbers_outside(ready.skeleton)
        copies = whole - 4 * (blocks + outside) + self.memory_bytes(ready, ready.windows)
        peak = copies + 2 * batch * shapes.forward_bytes  # of the block whose activations are computed again
        yield TRAINING, Memory(peak, [], state_bytes(sum(trained_by_block(ready, self.train, self.rank)) + outside))

    def why_unchanged(self, training: TrainingResult) -> str:
        """Why no step of the training lowered its loss, and what to change."""
        _, first, *_ = training.curve
        best, default = min(point.held_out for point in training.curve[1:]), SCOPE_STEPS["model"]
        losses = f"{training.before:.4g} before and at best {best:.4g} after"
        reason = f"no step lowered the held-out loss, {losses}: the weights are unchanged"
        if first.held_out > training.before and self.steps < default:
            return (
                f"{reason}. The learning rate was at its height after {first.step} of {self.steps} steps, the loss "
                f"{first.held_out:.4g}, and too few steps with a low rate followed. Pass more `steps`, by default {default}"
            )
        return f"{reason}. Use more text, with more `samples`{', or more `steps`' if self.has_steps else ''}"

    def begin(self, run: Run[Any], loaded: LoadedModel, batches: Sequence[Tensor], cache: Journal | None) -> Callable[[], None]:
        """Generate sequences with the dense model, and compute its last hidden states on these and on the calibration ones.

        Returns:
            A function that trains the model, of rounded layers the integers and scales, and sets the report's result.
        """
        windows, report, observer = run.ready.windows, run.report, run.observer
        copies_head = self.changes_head or self.trains_outside or blocks_and_head(loaded.model, run.ready.plan)[-1].is_head
        with run_stage(GENERATING, report, observer, unit="sequence") as advance:
            count = self.count_generated(*windows.shape)
            seed = run.ready.recipe.seed
            name = f"generated-{count}-{len(windows)}-{seed}"
            stored = cache.tensors(name) if cache else None
            if stored is None:
                new = generate_samples(loaded.model, windows, count, seed=seed, compute=loaded.compute, progress=advance)
                stored = {"x": new.contiguous()}
                if cache:
                    cache.store_tensors(name, stored)
            generated = stored["x"]
        per_step = model_step(*windows.shape)
        groups, held_out = group_batches(windows, generated, per_step, min(per_step, max(map(len, batches))))
        with run_stage(PREDICTING, report, observer) as advance:
            states = last_states(loaded.model, groups, loaded.compute)
            head = copy.deepcopy(loaded.model.get_output_embeddings()) if copies_head else None
            advance(1, 1)
        return partial(self._train, run, loaded, groups=groups, states=states, held_out=held_out, head=head)

    def _train(
        self,
        run: Run[Any],
        loaded: LoadedModel,
        *,
        groups: Sequence[Group],
        states: Sequence[Group],
        held_out: int,
        head: nn.Module | None,
    ) -> None:
        """Train the model toward the dense one, as `distill` with these arguments."""
        report, observer, plan = run.report, run.observer, run.ready.plan
        blocks = blocks_and_head(loaded.model, plan)
        scales = {
            layer.name: Scales(block.scales[layer.name], format)
            for block in report.blocks
            for layer in block.layers
            if layer.name in block.scales and (format := IntegerFormat.of(layer))
        }
        adam = adam_for(loaded.model, self.steps, train=self.train, rank=self.rank, patience=self.patience)
        with run_stage(TRAINING, report, observer, unit="step") as advance:
            result, changed = distill(
                loaded.model,
                groups,
                states,
                plan=plan,
                adam=adam,
                train=self.train,
                targets=self.targets,
                scales=scales,
                products=loaded.products,
                outside=self.trains_outside,
                progress=advance,
                store=TrainingStore(run.journal).begin(WHOLE_MODEL) if run.journal else None,
                head=head,
                held_out=held_out,
            )
            report.blocks = [_update_zeros(block, blocks[block.index]) for block in report.blocks]
            report.add_changes(changed)
        observer(result)
        if result.note:
            add_note(f"{TRAINING}: {result.note}", report, observer)
        elif result.steps == 0 and result.curve:
            add_note(f"{TRAINING}: {self.why_unchanged(result)}", report, observer)
        report.recovered = result


def model_step(samples: int, length: int) -> int:
    """Sequences per gradient step over the whole model: about 1,024 tokens, at most an eighth of all sequences."""
    return max(1, min(MODEL_TOKENS // length, samples // 8))


def state_bytes(numbers: int) -> int:
    """Bytes of the durable state of training so many numbers."""
    return 4 * STORED_COPIES * numbers


def trained_by_block(ready: Prepared, train: Train, rank: int) -> list[int]:
    """The trained numbers of each block that has pruned layers."""
    return [trained_numbers(block, train, rank) for block in pruned_blocks(ready.blocks, ready.plan)]


def _generation_memory(ready: Prepared, placement: Placement, count: int) -> Memory:
    """The memory of generating sequences with the dense model, token by token."""
    config = ready.skeleton.config.get_text_config()
    stored = ready.source.dtype("auto").itemsize
    cached = 2 * 4 * ready.length / 2 * config.hidden_size * len(ready.blocks)  # keys and values, on average
    peak = placement.model * max(4, stored) / stored + min(count, AT_A_TIME) * (2 * cached + 12 * config.vocab_size)
    return Memory(peak, [])


def _update_zeros(result: BlockResult, block: Block) -> BlockResult:
    """A block's result with the zeros after whole-model training."""
    zeros = {block.full_name(name): count_zeros(layer.weight) for name, layer in block.layers.items()}
    return replace(result, layers=tuple(replace(layer, zeros=zeros[layer.name]) for layer in result.layers))
