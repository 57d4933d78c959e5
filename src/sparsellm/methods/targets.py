"""What the layers of a block should write, and the regressions toward it: from passes of the pruned and the dense stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import linear

from sparsellm.activations.hooks import Capture, CaptureRequest
from sparsellm.activations.streams import Activations
from sparsellm.methods import Plan
from sparsellm.methods.feedforward_problem import weights_of
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime.offload import TensorList
from sparsellm.solvers.regression import LinearTargetRegression, PairedStatistics, Regression, TargetRegression
from sparsellm.solvers.statistics import Gram


class LayerTargets:
    """What one block's layers should write: what the dense ones write, and those that write to the stream also what the pruned
    one lacks of the dense one.

    Passes end where nothing more is needed, and attention runs once: in the dense stream from the start, in the pruned one from
    when its layers are `solved`.
    """

    def __init__(self, block: Block, inputs: Activations, plan: Plan) -> None:
        self._block, self._inputs = block, inputs
        adders = block.architecture.residual_writers
        self._adder, self._writer = adders or ("", "")  # what writes to the stream: attention, then feed-forward
        self._repairs = inputs.is_residual_sum(adders)
        around = inputs.cacheable_module(self._adder) if self._repairs else None
        self._attention = around.name if around else self._adder
        self._shared = around if block.full_name(self._adder) in plan else None
        if self._shared:
            inputs.cache_output(self._shared, dense=True)

    def mark_final(self, names: Sequence[str]) -> None:
        """These layers are pruned, and what they write is settled."""
        self._inputs.mark_final(self._block, names)

    def regressions(
        self, names: Sequence[str], last: bool, part: tuple[TensorList, TensorList] | None = None
    ) -> Mapping[str, Regression]:
        """The regressions of layers that share an input, from one pass of both streams.

        last: whether nothing of the block is looked at afterwards: the dense stream then travels on with the same pass.
        part: lists for the feed-forward part's inputs and targets, if these layers are its readers.
        """
        if self._shared and self._adder in names:
            self._inputs.schedule_cache(self._block, self._shared)
        first, dense = names[0], weights_of(self._block, tuple(names))
        gram = Gram(dense[first][0].shape[1], self._block.device, self._inputs.window)
        # Where nothing is added to what the layers write, and they write more than they read, their targets are never made.
        plain = not self._repairs or {self._adder, self._writer}.isdisjoint(names)
        twins = PairedStatistics(gram) if plain and gram.features <= sum(len(weight) for weight, _ in dense.values()) else None
        sums = (
            {}
            if twins
            else {name: TargetRegression(gram, len(weight), bias is not None) for name, (weight, bias) in dense.items()}
        )
        made = [self._shown(name) for name in (*sums, *([self._writer] if part else []))]
        lost = [self._attention] if self._repairs and self._writer in made else []
        own, aimed = CaptureRequest([first], lost), CaptureRequest([first] if twins else [], _once(lost, made), last)
        for pruned, teacher in self._inputs.paired_batches(self._block, own, aimed, first if last else ""):
            x = pruned.inputs[first].float()
            alike = (
                len(x) == len(pruned.block_input) or first in self._block.views
            )  # else the streams' tokens may not be the same
            gram.update(x)
            if twins:
                twins.update(x, teacher.inputs[first].float() if alike else x)
            for name, some in sums.items():
                aimed_at = self._target(name, pruned, teacher) if alike else linear(x, *dense[name])
                some.update(aimed_at, x)
            if part:
                part[0].append(x)
                part[1].append(self._target(self._writer, pruned, teacher))
        gram.reduce()
        for shared in (twins, *sums.values()):
            if shared:
                shared.reduce()
        return {name: LinearTargetRegression(twins, *dense[name]) for name in names} if twins else sums

    def _target(self, name: str, pruned: Capture, dense: Capture) -> Tensor:
        """What a layer should write, (tokens, out): what the dense one wrote, and for layers that write to the stream also what
        the pruned stream lacks there of the dense one."""
        target = dense.outputs[self._shown(name)].float()
        if not self._repairs or name not in (self._adder, self._writer):
            return target
        target = target + (dense.block_input.float() - pruned.block_input.float())
        if name == self._writer:
            target += dense.outputs[self._attention].float() - pruned.outputs[self._attention].float()
        return target

    def _shown(self, name: str) -> str:
        """Where it is seen what a layer writes: attention's writer by the whole of attention, which then need not run again."""
        return self._attention if name == self._adder else name


def expert_regressions(block: Block, part: FeedForward, inputs: TensorList, targets: TensorList) -> Mapping[str, Regression]:
    """The regressions of an expert's readers. targets: the dense stream's inputs, in whose place its outputs come."""
    dense = weights_of(block, (*part.in_proj, part.out_proj))
    twins = PairedStatistics(Gram(inputs[0].shape[1], inputs[0].device))
    for number, (x, aimed) in enumerate(zip(inputs, targets, strict=True)):
        twins.inputs.update(x)
        twins.update(x, aimed)
        hidden = [linear(aimed, *dense[name]) for name in part.in_proj]
        targets[number] = linear(part.activate(*hidden), *dense[part.out_proj])
    twins.inputs.reduce()
    twins.reduce()
    return {name: LinearTargetRegression(twins, *dense[name]) for name in part.in_proj}


def _once(*names: Sequence[str]) -> list[str]:
    """All names in order, none twice."""
    return list(dict.fromkeys(name for some in names for name in some))
