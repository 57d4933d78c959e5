"""Targets of the layers of a block, from passes of the pruned and the dense stream, and the regressions toward them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sparsellm.activations.output_cache import OutputCache, trace_dataflow
from sparsellm.activations.streams import Capture, CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.methods import Plan
from sparsellm.methods.feedforward_problem import weights_of
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime.offload import TensorList
from sparsellm.runtime.products import linear
from sparsellm.solvers.regression import LinearTargetRegression, PairedStatistics, Regression, TargetRegression
from sparsellm.solvers.statistics import Gram


class LayerTargets:
    """Targets of the layers of one block.

    The target of a layer is the dense layer's output in the dense stream. For the two layers that write to the residual stream,
    the output projections of attention and of the feed-forward part, it also includes the difference of the two streams there,
    if the block's output is the sum of its input and their outputs.

    A pass ends after the last layer that it needs. Attention runs once: in the dense stream in the first pass, in the pruned
    stream once its layers are final.
    """

    def __init__(self, block: Block, inputs: Activations, plan: Plan) -> None:
        self._block, self._inputs = block, inputs
        self._attention_out, self._feed_forward_out = block.architecture.residual_writers or ("", "")
        stream, dense_block = inputs.dense_pair()
        dataflow = trace_dataflow(dense_block, stream[0], inputs.calls(block)[0])
        self._corrects, self._cacheable = dataflow.residual_sum, dataflow.cacheable
        attention = self._cacheable.get(self._attention_out) if self._corrects else None
        self._attention = attention.name if attention else self._attention_out
        self._cache = inputs.pruned.cache = OutputCache(inputs.storage, inputs.local_shapes, inputs.pruned[0])
        if attention and block.full_name(self._attention_out) in plan:
            stream.cache = OutputCache(inputs.storage, inputs.local_shapes, stream[0])
            stream.cache.record(attention)

    def mark_final(self, names: Sequence[str]) -> None:
        """Mark layers as pruned, so that their outputs can be cached."""
        self._cache.mark_final(self._block, names)

    def regressions(
        self, names: Sequence[str], last: bool, part: tuple[TensorList, TensorList] | None = None
    ) -> Mapping[str, Regression]:
        """The regressions of layers that share an input, from one pass of both streams.

        Args:
            names: The layers, by name within the block.
            last: Whether this is the last pass of the block. The dense stream then advances to the next block in the same pass.
            part: Lists that the inputs and targets of the feed-forward part are appended to, (tokens, model) for each batch,
                those of the targets in float32, if the layers are its input projections.
        """
        first, dense_weights = names[0], weights_of(self._block, tuple(names))
        if first in self._cacheable and self._is_reused(first, last):
            self._cache.schedule(self._block, self._cacheable[first], is_last=self._inputs.is_last(self._block))
        gram = Gram(dense_weights[first][0].shape[1], self._block.device, self._inputs.window)
        # Targets that are linear in the dense inputs are not computed if the layers have more outputs than inputs.
        is_linear = not self._corrects or {self._attention_out, self._feed_forward_out}.isdisjoint(names)
        outputs = sum(len(weight) for weight, _ in dense_weights.values())
        paired = PairedStatistics(gram) if is_linear and gram.features <= outputs else None
        regressions = (
            {}
            if paired
            else {name: TargetRegression(gram, len(weight), bias is not None) for name, (weight, bias) in dense_weights.items()}
        )
        captured = [self._captured_module(name) for name in (*regressions, *([self._feed_forward_out] if part else []))]
        attention = [self._attention] if self._corrects and self._feed_forward_out in captured else []
        pruned_request = CaptureRequest([first], attention)
        dense_request = CaptureRequest([first] if paired else [], list(dict.fromkeys([*attention, *captured])))
        for pruned, dense in self._inputs.run_paired(self._block, pruned_request, dense_request, advance_dense=last):
            x = pruned.inputs[first]  # (tokens, in)
            # Else the layer reads routed tokens, which may differ between the streams.
            same_tokens = len(x) == len(pruned.block_input) or first in self._block.views
            gram.update(x)
            if paired:
                paired.update(x, dense.inputs[first] if same_tokens else x)
            for name, regression in regressions.items():
                target = self._target(name, pruned, dense) if same_tokens else linear(x.float(), *dense_weights[name])
                regression.update(target, x)
            if part:
                part[0].append(x)
                part[1].append(self._target(self._feed_forward_out, pruned, dense))
        gram.reduce()
        for statistics in (paired, *regressions.values()):
            if statistics:
                statistics.reduce()
        if all(bias is None for _, bias in dense_weights.values()):  # else matrices about the means are computed from the sums
            for inputs in (gram, paired.others) if paired else (gram,):
                inputs.finalize()
        return {name: LinearTargetRegression(paired, *dense_weights[name]) for name in names} if paired else regressions

    def _target(self, name: str, pruned: Capture, dense: Capture) -> Tensor:
        """The target of a layer, (tokens, out), with the difference of the streams if it writes to the residual stream."""
        target = dense.outputs[self._captured_module(name)].float()
        if not self._corrects or name not in (self._attention_out, self._feed_forward_out):
            return target
        target = target + (dense.block_input.float() - pruned.block_input.float())
        if name == self._feed_forward_out:
            target += dense.outputs[self._attention].float() - pruned.outputs[self._attention].float()
        return target

    def _is_reused(self, name: str, last: bool) -> bool:
        """Whether later passes read the outputs of this layer's module: attention, or the feed-forward part if it is last."""
        is_attention = self._corrects and name == self._attention_out
        return is_attention or (last and bool(self._cacheable[name].skippable))

    def _captured_module(self, name: str) -> str:
        """The module whose output is captured for a layer: attention as a whole, where possible, for its output projection."""
        return self._attention if name == self._attention_out else name


def expert_regressions(block: Block, part: FeedForward, inputs: TensorList, targets: TensorList) -> Mapping[str, Regression]:
    """The regressions of an expert's input projections.

    Args:
        block: The block, with dense weights in this expert.
        inputs: Its inputs in the pruned stream, (tokens, model) for each batch.
        targets: Its inputs in the dense stream for the same tokens; replaced in place by its outputs, the expert's targets.
    """
    dense_weights = weights_of(block, (*part.in_proj, part.out_proj))
    paired = PairedStatistics(Gram(inputs[0].shape[1], inputs[0].device))
    for number, (x, dense_x) in enumerate(zip(inputs, targets, strict=True)):
        paired.inputs.update(x)
        paired.update(x, dense_x)
        hidden = [linear(dense_x, *dense_weights[name]) for name in part.in_proj]
        targets[number] = linear(part.activate(*hidden), *dense_weights[part.out_proj])
    paired.inputs.reduce()
    paired.reduce()
    return {name: LinearTargetRegression(paired, *dense_weights[name]) for name in part.in_proj}
