r"""ELSA: masks and weights of the whole model by ADMM on its own loss.

Lee, Jang, Lee, Alistarh and Lee, *The Unseen Frontier: Pushing the Limits of LLM Sparsity with Surrogate-Free ADMM*, ICLR 2026.

No layer has a target. With the loss f of the model's predictions on text, and weights x that are to have a pattern,

    minimize f(x) subject to x = z, z in the pattern

is solved by ADMM with a scaled multiplier u: x takes `interval` steps of Adam on f(x) + penalty / 2 |x - z + u|²; then z is the
projection of x + u onto the pattern that keeps the largest (x + u)² v, where v is Adam's second moment, an estimate of the
diagonal of the Fisher information; then u grows by x - z. Masks change as long as the training lasts, and in the end x is
projected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsellm import Activations, Block, BlockResult, LayerSolver, LayerWise, Magnitude, Plan
from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.methods import BlockShapes, CurvePoint, Memory, TrainingResult, planned_layers
from sparsellm.models.contexts import compute_dtype_context, eval_mode, product_dtype_context, require_grad_only
from sparsellm.models.output_head import blocks_and_head, outside_parameters
from sparsellm.observers.events import run_stage
from sparsellm.runtime.memory import check_fits, human_bytes

COPIES = 6
"""float32 copies of the weights beside the model: the dense ones, z, u, the gradient and Adam's two moments."""


@dataclass(frozen=True)
class ELSA:
    """ADMM over the whole model with the loss of its predictions (Lee et al., ICLR 2026).

    Attributes:
        solver: Prunes each layer for the first z.
        steps: Steps of Adam; the rate falls linearly to 0.
        rate: The first learning rate.
        penalty: Weight of the distance from the pattern.
        interval: Steps of Adam between projections.
        sequences: Sequences that a step reads.
    """

    solver: LayerSolver = field(default_factory=Magnitude)
    steps: int = 4096
    rate: float = 2e-4
    penalty: float = 0.01
    interval: int = 32
    sequences: int = 8

    needs_dense_stream: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False
    on_dense: ClassVar[tuple[str, ...]] = ()
    stage: ClassVar[str] = "ADMM over the whole model"

    def __post_init__(self) -> None:
        if min(self.steps, self.interval, self.sequences) < 1 or min(self.rate, self.penalty) <= 0:
            raise InvalidSetting(f"ELSA needs numbers above 0, got {self}.")

    # the method of each block

    @property
    def needs(self) -> type:
        return self.solver.needs

    def note(self, block: Block, plan: Plan) -> str:
        return ""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[Any]:
        yield from LayerWise(self.solver).prune(block, inputs, plan)

    def block_memory(self, shapes: BlockShapes) -> Memory:
        return LayerWise(self.solver).block_memory(shapes)

    # the step over the whole model

    def check_memory(self, opened: Any, windows: Tensor) -> str:
        numbers = sum(x.numel() for x in opened.skeleton.parameters())
        vocabulary = opened.skeleton.get_input_embeddings().num_embeddings
        needed = 4 * (COPIES * numbers + 3 * self.sequences * windows.shape[1] * vocabulary)
        check_fits(needed, opened.device, stage="ELSA", advice="Pass fewer `sequences`.")
        return f"ELSA takes {human_bytes(needed)}"

    def memory(self, ready: Any, placement: Any, shapes: BlockShapes) -> Iterator[tuple[str, Memory]]:
        numbers, tokens = placement.model // shapes.stored, self.sequences * shapes.length
        activations = 2 * tokens * shapes.depth * shapes.forward_bytes
        yield self.stage, Memory(4 * ((COPIES + 1) * numbers + 3 * tokens * shapes.vocabulary) + activations, [])

    def begin(self, run: Any, loaded: Any, batches: Sequence[Tensor], cache: Any) -> Callable[[], None]:
        dense = {name: parameter.detach().float().clone() for name, parameter in loaded.model.named_parameters()}
        return partial(self._train, run, loaded, [row for batch in batches for row in batch], dense)

    def _train(self, run: Any, loaded: Any, rows: Sequence[Tensor], dense: Mapping[str, Tensor]) -> None:
        """Train the dense model from its pruned blocks, which are the first z, and put the result into the report."""
        model, report = loaded.model, run.report
        plan = {layer.name: layer.pattern for layer in report.layers}
        blocks = [block for block in blocks_and_head(model, plan) if planned_layers(block, plan)]
        held_out = rows[-min(32, max(1, len(rows) // 8)) :]
        read = rows[: -len(held_out)] or rows
        order = torch.Generator().manual_seed(run.ready.recipe.seed)
        passes = math.ceil(self.steps * self.sequences / len(read))
        chosen = torch.cat([torch.randperm(len(read), generator=order) for _ in range(passes)]).split(self.sequences)
        admm, losses = ADMM(blocks, plan, outside_parameters(model, plan)), []

        def loss_of(some: Sequence[Tensor]) -> Tensor:
            return mean_loss(model, some, loaded.products)

        with (
            run_stage(self.stage, report, run.observer, unit="step") as advance,
            eval_mode(model),
            compute_dtype_context(model, torch.float32),
            require_grad_only(model, admm.trained.values()),
        ):
            before = measure(loss_of, held_out)
            admm.start(dense, self.rate)
            for step, numbers in enumerate(chosen[: self.steps], 1):
                loss, done = loss_of([read[number] for number in numbers]), (step - 1) / self.steps
                admm.step(loss, self.rate * (1 - done), self.penalty)
                if step % self.interval == 0:
                    admm.project()
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    raise NonFinite(f"The loss of ELSA is not finite at step {step}. Pass a lower `rate`.")
                advance(step, self.steps)
            admm.finish()
            after = measure(loss_of, held_out)
        points = CurvePoint(0, None, before), CurvePoint(self.steps, sum(losses) / len(losses), after)
        report.recovered = TrainingResult(before, after, self.steps, curve=points)
        run.observer(report.recovered)
        of_index = {block.index: block for block in blocks}
        report.blocks = [updated(result, of_index[result.index], dense) for result in report.blocks]
        report.add_changes(admm.trained.keys() - admm.z.keys())


class ADMM:
    """x, the model's parameters in place, with z and u of those that hold pruned layers, in the shapes of the parameters.

    Attributes:
        trained: x by full name: what holds pruned layers, the biases and norms of their blocks, and what is outside.
        z: The part of x that has the pattern.
    """

    def __init__(self, blocks: Sequence[Block], plan: Plan, outside: Mapping[str, nn.Parameter]) -> None:
        self._blocks, self._plan, self.trained, self.z = blocks, plan, dict(outside), dict[str, Tensor]()
        for block in blocks:
            weights = {block.parameter(name) for name in planned_layers(block, plan)}
            for name, x in block.module.named_parameters():
                if name in weights or name in block.unpruned_parameters():
                    self.trained[block.full_name(name)] = x
            self.z |= {block.full_name(name): block.module.get_parameter(name).detach() for name in weights}

    def start(self, dense: Mapping[str, Tensor], rate: float) -> None:
        """Take what the model has as z, and the dense weights as x."""
        self._adam = torch.optim.Adam(self.trained.values(), lr=rate, betas=(0.9, 0.95))
        self.z = {name: self.trained[name].detach().clone() for name in self.z}
        self._u = {name: torch.zeros_like(z) for name, z in self.z.items()}
        for name in self.z:
            self.trained[name].data.copy_(dense[name])

    def step(self, loss: Tensor, rate: float, penalty: float) -> None:
        """A step of Adam on the loss and the distance from z - u."""
        self._adam.zero_grad()
        loss.backward()
        for name, z in self.z.items():
            x = self.trained[name]
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad  # of an expert that got no token
            x.grad.add_(x.detach() - z + self._u[name], alpha=penalty)
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()

    def project(self) -> None:
        """Set z to the projection of x + u, and add x - z to u."""
        moved = {name: self.trained[name].detach() + u for name, u in self._u.items()}
        for name, keep in self._masks(moved).items():
            self.z[name] = moved[name].masked_fill(~keep, 0)
            self._u[name] = moved[name] - self.z[name]

    def finish(self) -> None:
        """Set x to its projection."""
        for name, keep in self._masks(self.trained).items():
            self.trained[name].data.masked_fill_(~keep, 0)

    def _masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By parameter, True for the weights that stay: those of the largest squares times Adam's second moment."""
        masks: dict[str, Tensor] = {}
        for block in self._blocks:
            keep = {}
            for layer in planned_layers(block, self._plan):
                name = block.full_name(block.parameter(layer))
                score = weights[name].detach().square() * self._adam.state[self.trained[name]]["exp_avg_sq"]
                keep[layer] = self._plan[block.full_name(layer)].keep(block.linear_view(layer, score).contiguous())
            masks |= {block.full_name(name): mask for name, mask in block.masks(keep).items()}
        return masks


def mean_loss(model: nn.Module, rows: Sequence[Tensor], products: torch.dtype | None) -> Tensor:
    """The mean cross entropy of sequences, in nats per token; in one pass if they have one length."""
    device, total = next(model.parameters()).device, 0
    alike = len({len(row) for row in rows}) == 1
    for tokens in [torch.stack(list(rows))] if alike else [row.unsqueeze(0) for row in rows]:
        with product_dtype_context(device, products):
            logits = model(input_ids=tokens.to(device), use_cache=False).logits[:, :-1]
        total = total + cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten().to(device), reduction="sum")
    return total / sum(len(row) - 1 for row in rows)


@torch.no_grad()
def measure(loss_of: Callable[[Sequence[Tensor]], Tensor], rows: Sequence[Tensor]) -> float:
    """The mean loss of sequences."""
    return sum(float(loss_of([row])) for row in rows) / len(rows)


def updated(result: BlockResult, block: Block, dense: Mapping[str, Tensor]) -> BlockResult:
    """A block's result with the zeros that its layers have in the end, and the relative change of their weights as errors."""
    names, layers = {block.full_name(name): name for name in block.layers}, []
    for layer in result.layers:
        weight = block.layer(names[layer.name]).weight.detach().float()
        before = block.linear_view(names[layer.name], dense[block.full_name(block.parameter(names[layer.name]))])
        error = float((weight - before).square().sum() / before.square().sum())
        layers.append(replace(layer, zeros=int((weight == 0).sum()), error=error, known="TokenCount"))
    return replace(result, layers=tuple(layers))
