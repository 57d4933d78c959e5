"""The layers that cost most: each put back dense in the pruned model, and those that `--exclude` should keep dense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from sparsellm.activations.backward import first_windows
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.evaluation.measurements import LayerCosts
from sparsellm.evaluation.perplexity import kl_divergence, last_block_outputs
from sparsellm.methods import LayerResult
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.events import LAYERS, Note, Observer, run_stage
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.recipe import Recipe, RunRecipe
from sparsellm.pipeline.report import Report
from sparsellm.runtime import collectives
from sparsellm.texts.padding import unpadded_batches

WORST = 5
"""The number of layers that reports list as those that cost most; the same layers are measured."""

KL_TOKENS, SEQUENCES = 2048, 4
"""Least number of tokens, and of sequences, on which they are measured."""

WITHOUT_COMPENSATION = ("magnitude", "wanda")
"""Methods that change no weight besides those that they remove, as the predicted costs assume. On demo:opt at 50 % their five
largest predictions are 0.6 to 1.6 times what is measured, those of the default method up to 19 times."""

OUTSTANDING, LEAST_SHARE = 3.0, 0.05
"""A layer is suggested for `--exclude` if with it dense the KL divergence is lower by at least three times its share of the
pruned weights, and by at least 5 %."""


@dataclass(frozen=True, eq=False)
class DenseOutputs:
    """What `measure_layers` needs of the dense model.

    Attributes:
        batches: Token ids of its first sequences, (1, seq) each.
        outputs: Outputs of the dense model's last block for those of this process.
    """

    text: str
    batches: Sequence[Tensor]
    outputs: Sequence[Tensor]


def worst_layers(layers: Sequence[LayerResult]) -> list[LayerResult]:
    """The layers with the largest `predicted_kl`, in that order; none if it was not computed."""
    return sorted((x for x in layers if x.predicted_kl is not None), key=lambda x: -(x.predicted_kl or 0))[:WORST]


def worst_layers_table(layers: Sequence[LayerResult], recipe: RunRecipe) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of the layers that cost most, in nats per token; no lines if they are not known.

    They are those that were measured, the costliest first. Predictions take their place only where they hold: for methods that
    remove weights and change no others. A recovery has changed what both say.
    """
    worst = worst_layers(layers)
    if not isinstance(recipe, Recipe):
        return [], []
    if measured := [(x.name, x.measured_kl) for x in worst if x.measured_kl is not None]:
        measured.sort(key=lambda pair: -pair[1])
        return [f"costliest of {len(measured)} layers", "measured KL"], [[name, f"{kl:.3g}"] for name, kl in measured]
    if recipe.method not in WITHOUT_COMPENSATION or recipe.rounds:
        return [], []
    return ["costliest layers", "predicted KL"], [[x.name, f"{x.predicted_kl:.3g}"] for x in worst]


def dense_outputs(loaded: LoadedModel, ready: Prepared, report: Report, observer: Observer) -> DenseOutputs | None:
    """Run the dense model on the first sequences of the first test text.

    Returns:
        None without a test text or without a `predicted_kl`; and, with a note, if dense layers cannot be put back later.
    """
    blocks_pruned = report.coverage is not None and report.coverage.pruned > 0  # else only the output head is
    if ready.recipe.allocation_rule != "fisher" or not ready.tests or not blocks_pruned:
        return None
    text, windows = next(iter(ready.tests.items()))
    batches = first_windows(unpadded_batches(windows, 1), max(KL_TOKENS, SEQUENCES * windows.shape[1]))
    reason = ""
    if loaded.weights.on_disk:
        reason = "the model is read block by block"
    elif not isinstance(ready.source, Checkpoint):
        reason = "the dense model is not in files"
    elif blocks_and_head(ready.skeleton, ready.plan)[-1].is_head:  # the dense outputs would be read with the pruned head
        reason = "the output head is pruned too"
    elif len(batches) < collectives.world():
        reason = f"{text} has fewer sequences than there are processes"
    if reason:
        observer(Note(f"the layers that cost most are predicted but not measured: {reason}"))
        return None
    with run_stage(LAYERS, report, observer):
        return DenseOutputs(text, batches, last_block_outputs(loaded, batches))


def measure_layers(report: Report, loaded: LoadedModel, ready: Prepared, *, dense: DenseOutputs, observer: Observer) -> None:
    """Measure the KL divergence with each of the worst layers put back dense, and with all that stand out.

    Takes seven passes of about 2,048 tokens through the model, and memory for a copy of at most five layers.

    Args:
        report: The report of the run, which receives `measured_kl` and `layer_costs`.
        loaded: The pruned model; its weights are the same afterwards.
        dense: From `dense_outputs`.

    Raises:
        NonFinite: The predictions of the pruned model are not finite.
    """
    worst = worst_layers(report.layers)
    with run_stage(LAYERS, report, observer):
        try:
            layers = _read_dense(ready, worst, report.recipe.dtype)
        except NotStreamable as error:
            observer(Note(f"the layers that cost most are predicted but not measured: {error}"))
            return

        def divergence(names: Sequence[str]) -> float:
            with _put_back(loaded, {name: layers[name] for name in names}):
                return kl_divergence(loaded, dense.batches, dense.outputs)

        kl = divergence([])
        drops = {layer.name: kl - divergence([layer.name]) for layer in worst}
        weights = {layer.name: layer.shape[0] * layer.shape[1] for layer in report.layers}
        shares = {name: weights[name] / sum(weights.values()) for name in drops}
        names = [name for name in drops if drops[name] >= kl * max(LEAST_SHARE, OUTSTANDING * shares[name])] if kl > 0 else []
        names.sort(key=lambda name: -drops[name])
        gain, share = kl - divergence(names) if names else 0.0, sum(shares[name] for name in names)
    tokens = sum(batch.numel() for batch in dense.batches)
    report.layer_costs = LayerCosts(dense.text, tokens, kl, exclude=tuple(names), gain=gain, share=share)
    report.blocks = [
        replace(block, layers=tuple(replace(layer, measured_kl=drops.get(layer.name)) for layer in block.layers))
        for block in report.blocks
    ]


LayerWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""Weight, (out, in), and bias, (out,), of layers by full name; None for a layer without bias."""


def _read_dense(ready: Prepared, layers: Sequence[LayerResult], dtype: str) -> LayerWeights:
    """Read layers of the dense checkpoint, one block at a time. Raises NotStreamable if they cannot be read alone."""
    assert isinstance(ready.source, Checkpoint)
    model, weights = ready.source.stream(dtype, ready.device)
    names = {layer.name for layer in layers}
    tensors: dict[str, tuple[Tensor, Tensor | None]] = {}
    for block in blocks_of(model):
        wanted = [name for name in block.layers if block.full_name(name) in names]
        if wanted:
            with weights.block(block):
                tensors |= {block.full_name(name): _copy(block, name) for name in wanted}
    return tensors


def _copy(block: Block, name: str) -> tuple[Tensor, Tensor | None]:
    """Copies of a layer's weight and bias."""
    layer = block.layer(name)
    return layer.weight.detach().clone(), None if layer.bias is None else layer.bias.detach().clone()


@contextmanager
def _put_back(loaded: LoadedModel, layers: LayerWeights) -> Iterator[None]:
    """Replace layers of the model within the context."""
    places = {block.full_name(name): (block, name) for block in blocks_of(loaded.model) for name in block.layers}
    replaced = {full_name: _copy(places[full_name][0], places[full_name][1]) for full_name in layers}

    def write(weights: LayerWeights) -> None:
        for full_name, (weight, bias) in weights.items():
            block, name = places[full_name]
            block.assign(name, weight)
            if bias is not None:
                block.write_bias(name, bias)

    write(layers)
    try:
        yield
    finally:
        write(replaced)
