"""Perplexity against bits a weight: dense and sparse weights with values of 2 to 16 bits. docs/few-bits.md shows the figures.

    python benchmarks/bits.py measure demo:opt demo:llama
    python benchmarks/bits.py measure PATH/wt2-opt PATH/wt2-llama --calibration PATH/train.txt --evaluate PATH/test.txt
    python benchmarks/render.py                 # the page, from the figures

Bits count everything that a pruned layer stores: mask, values, scales, zero points, exponents outside of the dictionary. The
dense forms are rounding to nearest and GPTQ (`gptq.py`), symmetric and with zero points, and for Llama models whose layers
are a multiple of 256 wide llama.cpp's types, if `llama-cpp-python` and `gguf` are installed. A sparse model is pruned once for
each sparsity and seed, kept in `--work`, and rounded to each number of bits. A killed run continues with the next figure.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf_models
import torch
from gptq import GPTQ, Compensated, Grid, Rounded, RoundToNearest
from measuring import MEASURED, read_figures, record
from torch import Tensor, nn

import sparsellm
from sparsellm.checkpoints.loading import Checkpoint, open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.extensions.integers.formats import SCALE_BITS, IntegerFormat
from sparsellm.extensions.integers.quantization import round_to_nearest
from sparsellm.extensions.packed.formats.encoding import encode
from sparsellm.methods import BlockMethod
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.models.blocks import blocks_of
from sparsellm.outputs.saving import Result
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.sequential import prune_blocks
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.plan import uniform_plan
from sparsellm.texts.samples import calibration_windows, test_windows
from sparsellm.texts.texts import read_text

FILE = MEASURED / "bits.json"
SAMPLES, LENGTH, WINDOWS = 64, 256, 64
SEEDS = (0, 1, 2)
SPARSITIES = (70, 80, 50, 90, 60, 40)
"""Fractions removed in percent, those of the first tables first."""

RECOVERED = (70, 60)

IN_ONE_RUN = {4: (70, 80, 60, 50), 3: (60, 70, 50)}
"""Sparsities for `prune --values`, by bits."""

BUDGETS = (2.3, 3.0, 2.0, 2.5, 4.0, 4.25)
"""Bits a weight for `prune --bits`, those of the first tables first."""

TRAINED_BUDGETS = (2.3, 2.0, 2.2)
"""Bits a weight for `prune --bits` and `recover`."""

GRIDS = (Grid(2, 64, True), Grid(2, 128, True), Grid(2), Grid(3), Grid(3, 64, True), Grid(4), Grid(4, 128), Grid(8, 128))
"""What the dense forms round to."""


@dataclass(frozen=True)
class Task:
    """A model, its texts, and where its pruned forms are kept."""

    model: str
    calibration: str
    evaluate: str
    work: Path

    @property
    def name(self) -> str:
        """The model's name in the figures."""
        return Path(self.model.replace("demo:", "demo-")).name

    def source(self) -> Checkpoint:
        """The dense model."""
        return open_checkpoint(self.model)

    def tests(self) -> Tensor:
        """The sequences that are measured."""
        return test_windows(read_text(self.evaluate, "test"), self.source().tokenizer(), LENGTH, limit=WINDOWS).windows

    def samples(self, seed: int) -> tuple[Tensor, ...]:
        """The calibration sequences in batches."""
        text = read_text(self.calibration, "calibration")
        chosen = calibration_windows(text, self.source().tokenizer(), samples=SAMPLES, sequence_length=LENGTH, seed=seed)
        return chosen.windows.split(8)

    def settings(self, seed: int) -> dict[str, Any]:
        """Settings of `prune` and `recover`."""
        return {"calibration": self.calibration, "samples": SAMPLES, "sequence_length": LENGTH, "seed": seed}

    def pruned(self, sparsity: int, seed: int) -> Path:
        """The folder of the pruned model, which is written if it is not there."""
        folder = self.work / f"{self.name}-{sparsity}-{seed}"
        if not folder.is_dir():
            settings = self.settings(seed) | {"model": self.model, "sparsity": f"{sparsity}%"}
            prune_run(read_recipe(settings)).save_pretrained(folder)
        return folder

    def recovered(self, sparsity: int, seed: int) -> Path:
        """The folder of the pruned model whose kept weights were trained."""
        folder = self.work / f"{self.name}-{sparsity}-{seed}-recovered"
        if not folder.is_dir():
            pruned = self.pruned(sparsity, seed)
            self.recover(pruned, seed).save_pretrained(folder)
        return folder

    def recover(self, pruned: Path, seed: int) -> Result:
        """Train the kept weights of a pruned model, with products in bfloat16, which take half of the time."""
        return sparsellm.recover(pruned, self.model, compute_dtype="bfloat16", **self.settings(seed))


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers that are pruned, by full name."""
    return {block.full_name(name): layer for block in blocks_of(model) for name, layer in block.layers.items()}


def mask_bits(keep: Tensor) -> int:
    """Bits of a stored mask; none if everything is kept."""
    if bool(keep.all()):
        return 0
    parts = encode(keep.bfloat16())
    return 8 * sum(part.nbytes for name, part in parts.items() if name in ("weight_mask", "weight_groups"))


def sparse_bits(model: nn.Module, bits: int) -> float:
    """Bits a weight that the layers of a pruned model take with values of so many bits; 16 bits as `pack` stores them."""
    stored = weights = 0
    for layer in layers_of(model).values():
        weight, keep = layer.weight.detach(), layer.weight != 0
        weights += weight.numel()
        if bits == 16:
            stored += 8 * sum(part.nbytes for part in encode(weight.bfloat16()).values())
            continue
        kept = int(keep.sum())
        groups = len(weight) * IntegerFormat.default(bits, kept / weight.numel()).groups(weight.shape[1])
        stored += mask_bits(keep) + bits * kept + SCALE_BITS * groups
    return stored / weights


def round_layers(model: nn.Module, bits: int) -> None:
    """Round the kept weights to nearest, with clips that are searched."""
    with torch.no_grad():
        for layer in layers_of(model).values():
            keep = layer.weight != 0
            form = IntegerFormat.default(bits, float(keep.float().mean()))
            layer.weight.copy_(round_to_nearest(layer.weight, form, mask=keep).to_dense())


def apply(model: nn.Module, method: BlockMethod, samples: tuple[Tensor, ...]) -> None:
    """Change the layers of a model by a method whose solver rounds."""
    for _ in prune_blocks(model, samples, method, uniform_plan(blocks_of(model), Rounded())):
        pass


def dense_forms(task: Task, seed: int) -> Iterator[tuple[str, Any]]:
    """The dense forms: names, and functions that return a model and its bits a weight."""

    def rounded(method: BlockMethod, grid: Grid) -> tuple[Any, float]:
        model = task.source().load("float32")
        apply(model, method, task.samples(seed))
        shapes = [layer.weight.shape for layer in layers_of(model).values()]
        stored = sum(grid.bits_per_weight(shape[1]) * shape.numel() for shape in shapes)
        return model, stored / sum(shape.numel() for shape in shapes)

    for grid in GRIDS:
        label = f"int{grid.bits}, groups of {grid.group_size}" + (", zero points" if grid.zero_points else "")
        if seed == 0:  # which does not depend on the calibration text
            yield f"dense RTN, {label}", lambda grid=grid: rounded(LayerWise(RoundToNearest(grid)), grid)
        yield f"dense GPTQ, {label}", lambda grid=grid: rounded(TrueSequential(GPTQ(grid)), grid)
        if grid.bits > 2 and not grid.zero_points:
            ours = SparseLLM(Compensated(grid.bits, grid.group_size), scope="none")
            yield f"dense compensated, {label}", lambda grid=grid, ours=ours: rounded(ours, grid)


def sparse_forms(task: Task, seed: int) -> Iterator[tuple[str, Any]]:
    """The sparse forms: names, and functions that return a model and its bits a weight."""

    def rounded(folder: Path, bits: int, compensated: bool = False) -> tuple[Any, float]:
        model = open_checkpoint(str(folder)).load("float32")
        stored = sparse_bits(model, bits)
        if compensated:
            apply(model, SparseLLM(Compensated(bits), scope="none", keep_zeros=True), task.samples(seed))
        elif bits < 16:
            round_layers(model, bits)
        return model, stored

    def in_one_run(size: dict[str, Any], recovered: bool = False) -> tuple[Any, float]:
        settings = task.settings(seed) | {"model": task.model} | size
        with tempfile.TemporaryDirectory() as folder:
            output = prune_run(read_recipe(settings)).save_pretrained(f"{folder}/pruned")
            if recovered:  # the steps of `effort="best"`, which in bfloat16 would round the products of pruning too
                output = task.recover(output, seed).save_pretrained(f"{folder}/recovered")
            stored = sparsellm.pack(output, f"{folder}/packed").bits
            return open_checkpoint(str(output)).load("float32"), stored

    families = [("sparse", task.pruned, SPARSITIES), ("recovered", task.recovered, RECOVERED)]
    for family, folder, sparsities in families:
        for sparsity in sparsities:
            for bits in (16, 8, 4, 3):
                values = "bf16" if bits == 16 else f"int{bits}, nearest"
                yield f"{family} {values}, {sparsity} %", lambda f=folder, s=sparsity, b=bits: rounded(f(s, seed), b)
                if bits < 8:
                    name = f"{family} int{bits}, compensated, {sparsity} %"
                    yield name, lambda f=folder, s=sparsity, b=bits: rounded(f(s, seed), b, True)
    for bits, sparsities in IN_ONE_RUN.items():
        for sparsity in sparsities:
            size = {"sparsity": f"{sparsity}%", "values": f"int{bits}"}
            yield f"sparse int{bits}, one run, {sparsity} %", lambda size=size: in_one_run(size)
            if sparsity == sparsities[0]:
                yield f"recovered int{bits}, one run, {sparsity} %", lambda size=size: in_one_run(size, recovered=True)
    for budget in BUDGETS:
        yield f"sparse mixed, one run, {budget} bits", lambda b=budget: in_one_run({"bits": b})
    for budget in TRAINED_BUDGETS:
        yield f"recovered mixed, one run, {budget} bits", lambda b=budget: in_one_run({"bits": b}, recovered=True)


def llama_cpp_forms(task: Task, seed: int) -> Iterator[tuple[str, Any]]:
    """llama.cpp's types, without and with the importance of columns on the calibration text, in the form of `dense_forms`.

    The first result of a function is a perplexity, which llama.cpp computed. There are none for other models than Llama.
    """
    config = task.source().config
    if config.model_type != "llama" or config.hidden_size % 256:
        return
    if gguf_models.missing:
        print(gguf_models.missing, file=sys.stderr)
        return

    def converted(kind: str, weighted: bool) -> tuple[float, float]:
        model = task.source().load("float32")
        with tempfile.TemporaryDirectory() as folder:
            whole = file = Path(folder, "whole.gguf")
            gguf_models.write(model, whole)
            if kind != gguf_models.WHOLE:
                file = Path(folder, "rounded.gguf")
                weights = gguf_models.importance(model, task.samples(seed) if weighted else ())
                gguf_models.quantize(whole, file, kind, weights=weights)
            return gguf_models.perplexity(file, task.tests()), gguf_models.bits_of(file)

    for kind in gguf_models.TYPES:
        if seed == 0:
            yield f"llama.cpp {kind}", lambda kind=kind: converted(kind, weighted=False)
        if kind.startswith(("Q4", "Q2")):  # others take no notice of it
            yield f"llama.cpp {kind}, importance matrix", lambda kind=kind: converted(kind, weighted=True)


def measure(task: Task, seed: int, only: str) -> None:
    """Measure the forms of a model that were not measured before."""
    tests = task.tests()
    key = f"{task.name} | dense"
    if key not in read_figures(FILE):
        record(FILE, key, {"perplexity": measure_perplexity(task.source().load("float32"), tests).value})
    dense = read_figures(FILE)[key]["perplexity"]
    for form, build in (*dense_forms(task, seed), *sparse_forms(task, seed), *llama_cpp_forms(task, seed)):
        key = f"{task.name} | {form} | {seed}"
        if key in read_figures(FILE) or not re.search(only, form):
            continue
        started = time.process_time()
        model, bits = build()
        value = model if isinstance(model, float) else measure_perplexity(model, tests).value
        figures = {"bits": bits, "perplexity": value, "excess": math.log(value / dense)}
        record(FILE, key, figures | {"seconds": round(time.process_time() - started, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("models", nargs="+")
    measuring.add_argument("--calibration", default="demo")
    measuring.add_argument("--evaluate", default="demo")
    measuring.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "sparsellm-bits")
    measuring.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    measuring.add_argument("--only", default="", help="the forms whose names a regular expression is found in")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(exist_ok=True)
    for seed in options.seeds:
        for model in options.models:
            measure(Task(model, options.calibration, options.evaluate, options.work), seed, options.only)


if __name__ == "__main__":
    main()
