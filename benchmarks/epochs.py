"""Algorithm 1, epoch by epoch: does the loop help, and what makes it hurt?

    python benchmarks/epochs.py MODEL CALIBRATION_TEXT TEST_TEXT [--sparsity 70% 80% 90%] [--epochs 4] [--json FILE]

For every sparsity and variant: the perplexity and the mean true feed-forward error of each epoch's weights, the last epoch
returned as in the published algorithm. Epoch 1 is the inner solver by itself, so the later columns show the loop alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

from sparsellm.checkpoints.loading import compute_dtype, open_checkpoint
from sparsellm.data.samples import calibration_windows, test_windows
from sparsellm.data.texts import read_text
from sparsellm.evaluation.perplexity import perplexity
from sparsellm.methods import EpochResult
from sparsellm.methods.algorithm1 import PublishedSparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pruning.plan import uniform_plan
from sparsellm.pruning.sequential import prune_blocks
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.patterns import parse_pattern

PUBLISHED = PublishedSparseLLM()
VARIANTS = {
    "SparseGPT inside": PUBLISHED,
    "SparseGPT, ridge 1e-6": replace(PUBLISHED, ridge=1e-6),
    "SparseGPT, beta = 10 alpha": replace(PUBLISHED, beta=1.0),
    "SparseGPT, beta = alpha / 10": replace(PUBLISHED, beta=0.01),
    "ALPS inside": replace(PUBLISHED, solver=ALPS()),
    "ALPS, ridge 1e-6": replace(PUBLISHED, solver=ALPS(), ridge=1e-6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("test")
    parser.add_argument("--sparsity", nargs="+", default=["70%", "80%", "90%"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--limit", type=int, default=40, help="test windows")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()

    checkpoint = open_checkpoint(words.model)
    tokenizer = checkpoint.tokenizer()
    text = read_text(words.calibration, "calibration")
    windows = calibration_windows(text, tokenizer, samples=words.samples, sequence_length=words.length, seed=0).windows
    tests = test_windows(read_text(words.test, "test"), tokenizer, words.length, limit=words.limit)
    rows = []
    for sparsity in words.sparsity:
        for name in words.variants:
            for epochs in range(1, words.epochs + 1):
                model = checkpoint.load()
                plan = uniform_plan(blocks_of(model), parse_pattern(sparsity))
                method = replace(VARIANTS[name], epochs=epochs)
                steps = list(prune_blocks(LoadedModel.of(model, compute_dtype(model)), windows.split(16), method, plan))
                errors = [x.feed_forward_error for x in steps if isinstance(x, EpochResult) and x.epoch == epochs]
                with compute_dtype_context(model, compute_dtype(model)):
                    value = perplexity(model, tests).value
                rows.append(
                    {"sparsity": sparsity, "variant": name, "epochs": epochs, "perplexity": value, "error": mean(errors)}
                )
                print(f"{sparsity:4} {name:28} epoch {epochs}: {value:10.2f}  ff error {mean(errors):.4f}", file=sys.stderr)
    if words.json:
        words.json.write_text(json.dumps({"model": Path(words.model).name, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
