"""Algorithm 1, epoch by epoch: does the loop help, and what makes it hurt?

    python benchmarks/epochs.py MODEL CALIBRATION_TEXT TEST_TEXT

For every sparsity and variant: the perplexity and the mean true feed-forward error of the weights of each epoch. Epoch 1 is the
inner solver alone, so that the later columns show what the loop adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from measuring import MEASURED

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.methods import EpochResult
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.models.blocks import blocks_of
from sparsellm.pipeline.sequential import prune_blocks
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.texts.samples import calibration_windows, test_windows
from sparsellm.texts.texts import read_text

PUBLISHED = Algorithm1()
VARIANTS = {
    "SparseGPT inside": PUBLISHED,
    "SparseGPT, ridge 1e-6": replace(PUBLISHED, ridge=1e-6),
    "SparseGPT, beta = 10 alpha": replace(PUBLISHED, beta=1.0),
    "SparseGPT, beta = alpha / 10": replace(PUBLISHED, beta=0.01),
    "ALPS inside": replace(PUBLISHED, solver=ALPS()),
    "ALPS, ridge 1e-6": replace(PUBLISHED, solver=ALPS(), ridge=1e-6),
}


SPARSITIES, EPOCHS = ("70%", "80%", "90%"), 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("test")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    tokenizer = checkpoint.tokenizer()
    windows = calibration_windows(
        read_text(options.calibration, "calibration"), tokenizer, samples=32, sequence_length=256, seed=0
    ).windows
    tests = test_windows(read_text(options.test, "test"), tokenizer, 256, limit=40).windows
    rows = []
    for sparsity, variant, epochs in product(SPARSITIES, VARIANTS, range(1, EPOCHS + 1)):
        model = checkpoint.load()
        plan = uniform_plan(blocks_of(model), parse_pattern(sparsity))
        method = replace(VARIANTS[variant], epochs=epochs)
        results = list(prune_blocks(model, windows.split(16), method, plan))
        error = mean(x.feed_forward_error for x in results if isinstance(x, EpochResult) and x.epoch == epochs)
        row = {"sparsity": sparsity, "variant": variant, "epochs": epochs, "perplexity": measure_perplexity(model, tests).value}
        rows.append(row | {"error": error})
        print(rows[-1], file=sys.stderr)
    name = Path(options.model).name
    (MEASURED / f"epochs-{name}.json").write_text(json.dumps({"model": name, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
