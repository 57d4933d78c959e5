"""What ridge regression finds of the errors that earlier layers left, by the way its ridge is chosen.

    python benchmarks/ridge.py demo:opt --counts 8 32 128
    python benchmarks/ridge.py PATH/wt2-llama --calibrate train.txt --test test.txt

The model is pruned by the default to 80 %, with 128 sequences of 256 tokens. Then every layer's dense weight is corrected by a
regression of the dense layer's outputs on the pruned model's inputs, from some of those sequences. Printed is E‖t - W x‖² on
test sequences as a share of that of the dense weight, the geometric mean over layers of one kind: without a ridge, with the
ridge by moments, with the one that `Regression.problem` uses, and with the best for each layer, known from the test sequences.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import torch
from measuring import CUT, markdown_table
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.models.blocks import blocks_of
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.solvers.regression import FLOOR, MAX_RIDGE, MIN_RIDGE, LinearTargetRegression, PairedStatistics, moment_ridge
from sparsellm.solvers.statistics import Gram
from sparsellm.texts.samples import calibration_windows, test_windows
from sparsellm.texts.texts import read_text

COUNTS, SAMPLES, LENGTH, WINDOWS, SPARSITY = (4, 8, 16, 32, 128), 128, 256, 96, "80%"
KINDS = {"o_proj": "attention output", "out_proj": "attention output", "down_proj": "output", "fc2": "output"}
RIDGES = [10 ** (step / 4) for step in range(round(4 * math.log10(MIN_RIDGE)), round(4 * math.log10(MAX_RIDGE)) + 1)]


def statistics(dense: PreTrainedModel, pruned: PreTrainedModel, windows: Tensor) -> dict[str, LinearTargetRegression]:
    """For every layer, the regression of its dense outputs on the inputs that it has in the pruned model."""
    found: dict[str, PairedStatistics] = {}
    taken: dict[str, Tensor] = {}

    def take(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, given: taken.update({name: given[0].detach().flatten(0, -2)})

    models = (dense, pruned)
    layers = [
        {block.full_name(name): layer for block in blocks_of(model) for name, layer in block.layers.items()} for model in models
    ]
    hooks = [
        layer.register_forward_pre_hook(take(f"{number} {name}"))
        for number, of_model in enumerate(layers)
        for name, layer in of_model.items()
    ]
    with torch.no_grad():
        for batch in windows.split(8):
            for model in models:
                model(batch)
            for name, layer in layers[0].items():
                z, x = (taken[f"{number} {name}"] for number in (0, 1))
                sums = found.setdefault(name, PairedStatistics(Gram(layer.in_features, unit=LENGTH)))
                sums.inputs.update(x)
                sums.update(x, z)
    for hook in hooks:
        hook.remove()
    return {
        name: LinearTargetRegression(sums, layers[0][name].weight.detach(), layers[0][name].bias)
        for name, sums in found.items()
    }


def shares(fitted: LinearTargetRegression, test: LinearTargetRegression, weight: Tensor) -> dict[str, float]:
    """The error on the test sequences by choice of the ridge, as a share of that of the dense weight."""
    gram = (fitted.inputs.centered() if fitted.affine else fitted.inputs).matrix.double()
    residual = fitted._products().double() - weight.double() @ gram
    diagonal, tokens, left = gram.diagonal(), fitted.inputs.tokens, fitted.error(weight)
    damped = gram + FLOOR * diagonal.mean() * torch.eye(len(gram))
    values, vectors = torch.linalg.eigh(damped / damped.diagonal().outer(damped.diagonal()).sqrt())
    turned = residual * damped.diagonal().rsqrt() @ vectors

    def share(ridge: float) -> float:
        change = (turned / (values + ridge)) @ vectors.T * damped.diagonal().rsqrt()
        return test.error(weight + change.float()) / test.error(weight)

    scale = torch.where(diagonal > 0, diagonal, torch.inf).rsqrt()
    moments, squares = (residual * scale).square().sum(), (gram * scale.outer(scale)).square().sum()
    by_moments = moment_ridge(float(moments), left, float(squares), features=int((diagonal > 0).sum()), tokens=tokens)
    return {
        "none": share(0.0),
        "by moments": share(by_moments),
        "as used": test.error(fitted.problem(weight).weight) / test.error(weight),
        "best": min(map(share, RIDGES)),
    }


def rows(words: argparse.Namespace) -> Iterator[list[str]]:
    """A row for each number of sequences and kind of layers."""
    source = open_checkpoint(words.model)
    tokenizer, dense = source.tokenizer(), source.load().float().eval()
    tests = test_windows(read_text(words.test, "test"), tokenizer, LENGTH, limit=WINDOWS, **CUT).windows
    drawn = {"samples": SAMPLES, "sequence_length": LENGTH, "seed": 0} | CUT
    windows = calibration_windows(read_text(words.calibrate, "calibration"), tokenizer, **drawn).windows
    settings = {"model": words.model, "calibration": words.calibrate, "sparsity": SPARSITY} | drawn
    pruned = prune_run(read_recipe(settings), lambda event: None).model.float().eval()
    held = statistics(dense, pruned, tests)
    weights = {name: regression._weight for name, regression in held.items()}
    for count in words.counts:
        found = defaultdict[str, list[dict[str, float]]](list)
        for name, fitted in statistics(dense, pruned, windows[:count]).items():
            if held[name].error(weights[name]) > 1e-6 * held[name].power:  # the first layers have the dense inputs
                kind = KINDS.get(name.rsplit(".", 1)[-1], "input")
                found[kind].append(shares(fitted, held[name], weights[name]))
        for kind, each in sorted(found.items()):
            means = [math.exp(mean(math.log(shares[choice]) for shares in each)) for choice in each[0]]
            yield [str(count), kind, *(f"{value:.3f}" for value in means)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", default="demo")
    parser.add_argument("--test", default="demo")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    words = parser.parse_args()
    print("\n".join(markdown_table(["sequences", "layers", "none", "by moments", "as used", "best"], rows(words), (1,))))


if __name__ == "__main__":
    main()
