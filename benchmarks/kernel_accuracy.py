"""Perplexity of quantized models by the kernels, beside that of the same weights written as dense ones.

    python benchmarks/kernel_accuracy.py measure    # five minutes; ../shared/models take part where they are
    python benchmarks/kernel_accuracy.py table

Half of the weights are removed by magnitude, the others rounded to the nearest integers. All tokens are multiplied by the
kernels, also those of long sequences, in passes of 8. Dense weights are products of scales and integers in the model's dtype.
"""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import torch
from measuring import MEASURED, ROOT, markdown_table, measure_or_show, read_figures, record
from torch import Tensor, nn

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import token_perplexity as perplexity
from sparsellm.formats import kernels
from sparsellm.formats.bitmask import Bitmask
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.quantization import round_to_nearest
from sparsellm.texts.texts import read_text
from sparsellm.texts.tokenized import added_tokens, tokenize

FILE = MEASURED / "kernel-accuracy.json"
MODELS = ("demo:opt", "demo:llama", "wt2-opt", "wt2-llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEQUENCES, LENGTH, CHARACTERS = 16, 256, 30_000


class KernelLinear(nn.Module):
    """A linear layer whose every token is multiplied by the kernels."""

    def __init__(self, weight: Bitmask, bias: Tensor | None) -> None:
        super().__init__()
        self.quantized, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        with mock.patch.object(kernels, "MAX_TOKENS", 2**30):
            return kernels.packed_matmul(x.reshape(-1, x.shape[-1]), self.quantized, self.bias).view(*x.shape[:-1], -1)


def measure() -> None:
    """Measure every model in both dtypes, with 8 and 4 bits."""
    for name in MODELS:
        folder = name if name.startswith("demo:") else str(ROOT.parent / "shared" / "models" / name)
        if folder != name and not Path(folder).exists():
            continue
        checkpoint = open_checkpoint(folder)
        text = "demo" if folder == name else str(ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt")
        words = checkpoint.tokenizer()
        tokens = tokenize(words, read_text(text, "test").stream[:CHARACTERS], added_tokens(words))
        windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)[:SEQUENCES]
        for dtype in DTYPES:
            model = checkpoint.load(dtype)
            for bits in (8, 4):
                values = {form: perplexity(quantized(model, bits, form), windows).value for form in ("dense", "kernels")}
                record(FILE, f"{name} | {dtype} | {bits}", values)


def quantized(model: nn.Module, bits: int, form: str) -> nn.Module:
    """A copy of a model whose layers within blocks have half of their weights, as integers of some bits."""
    result = copy.deepcopy(model)
    for name, layer in list(result.named_modules()):
        if not isinstance(layer, nn.Linear) or "layers." not in name:
            continue
        weight = layer.weight.detach().float()
        keep = weight.abs() > weight.abs().flatten().kthvalue(weight.numel() // 2).values
        rounded = round_to_nearest(weight, IntegerFormat.default(bits, 0.5), mask=keep)
        packed = Bitmask.from_quantized(rounded, keep)
        if form == "kernels":
            result.set_submodule(name, KernelLinear(packed, None if layer.bias is None else layer.bias.detach()))
        else:
            layer.weight = nn.Parameter(packed.to_dense(dtype=layer.weight.dtype))
    return result


def table() -> list[str]:
    """Perplexities, and their relative difference."""
    figures, rows = read_figures(FILE), []
    machine = figures.pop("machine")
    for key, values in figures.items():
        difference = values["kernels"] / values["dense"] - 1
        rows.append([*key.split(" | "), f"{values['dense']:.4f}", f"{values['kernels']:.4f}", f"{difference:+.1e}"])
    head = ["model", "dtype", "bits", "dense", "kernels", "difference"]
    return [*markdown_table(head, rows, left=(0, 1)), "", f"{machine}."]


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
