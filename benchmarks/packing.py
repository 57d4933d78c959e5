"""Bits a weight of the packed forms, beside a compressor of files and the entropy bound, and the speed of both directions.

    python benchmarks/packing.py measure [MODEL ...]    # minutes; models besides demo:opt and demo:llama; needs zstd
    python benchmarks/packing.py values [MODEL ...]     # integers in place of values, with the pruned layers of SparseGPT
    python benchmarks/packing.py table

Pruned layers of each model, by each method in bfloat16 and by the default one in the other dtypes; and one Gaussian matrix. The
bound is the entropy of the mask and of the byte of each kept weight that the format encodes (of bfloat16 and float32 the
exponent), both taken as independent within a layer, and all other bits. zstd compresses the same layers as dense tensors in one
file.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
from measuring import MEASURED, arguments, markdown_table, program, read_figures, record
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsellm.extensions.integers.formats import BITS_OF
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.encoding import decode_parts, encode
from sparsellm.extensions.packed.packing import NearestIntegers
from sparsellm.outputs.report import load_report

FILE = MEASURED / "packing.json"
MODELS = ("demo:opt", "demo:llama")
METHODS = ("magnitude", "sparsegpt", "sparsellm")
DEFAULT = "sparsellm"
SPARSITIES = (50, 70, 80, 90)
INTEGERS = {"bfloat16": (torch.int16, 7), "float16": (torch.int16, 7), "float32": (torch.int32, 23)}
"""Of each dtype, integers with the same bits, and the position of the encoded byte's lowest bit."""
OTHERS = ("float16", "float32")
SIZE = 2048
"""Rows and columns of the Gaussian matrix."""

FIGURES = ("plain", "archive", "bound", "zstd")


def entropy(counts: Tensor) -> float:
    """Bits that each of many things takes at least, from how often each of them occurs."""
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def as_integers(weight: Tensor) -> tuple[Tensor, int]:
    """The bits of a weight as integers, and the position of the encoded byte."""
    dtype, position = INTEGERS[str(weight.dtype).removeprefix("torch.")]
    return weight.view(dtype), position


def bound(weight: Tensor) -> float:
    """Bits that a weight takes at least."""
    bits, position = as_integers(weight)
    kept = bits[bits != 0].int()
    mask = entropy(torch.tensor([len(kept), bits.numel() - len(kept)]))
    rest = 8 * weight.element_size() - 8
    return bits.numel() * mask + len(kept) * (rest + entropy(torch.bincount(kept >> position & 0xFF)))


def zstd_bits(weights: Mapping[str, Tensor]) -> float:
    """Bits of a file with these tensors, compressed by `zstd -19`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "dense.safetensors")
        save_file(dict(weights), file)
        subprocess.run(["zstd", "-19", "-q", str(file)], check=True)
        return 8 * file.with_suffix(".safetensors.zst").stat().st_size


def bits(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Bits a weight of each form; every weight is decoded and compared."""
    total = dict.fromkeys(FIGURES, 0.0)
    for weight in weights.values():
        for form in ("plain", "archive"):
            parts = encode(weight, form == "archive")
            decoded = decode_parts(parts, (weight.shape[0], weight.shape[1]), weight.dtype).to_dense()
            assert torch.equal(as_integers(decoded)[0], as_integers(weight)[0])
            total[form] += 8 * sum(part.numel() for part in parts.values())
        total["bound"] += bound(weight)
    total["zstd"] = zstd_bits(weights)
    return {name: value / sum(weight.numel() for weight in weights.values()) for name, value in total.items()}


def pruned_layers(model: str, method: str, dtype: str, *, folder: str) -> dict[int, dict[str, Tensor]]:
    """The pruned layers of a model at each sparsity."""
    sparsities = ",".join(f"{sparsity}%" for sparsity in SPARSITIES)
    run = arguments("prune", model, f"{folder}/out", method=method, sparsity=sparsities, dtype=dtype)
    if method != "magnitude":
        run += ["--calibration", "demo", "--samples", "16", "--sequence-length", "128"]
    subprocess.run([*program(), *run], check=True, capture_output=True)
    layers = {}
    for sparsity in SPARSITIES:
        output = Path(folder, "out", str(sparsity))
        tensors = {name: x for file in output.glob("*.safetensors") for name, x in load_file(file).items()}
        layers[sparsity] = {layer.name: tensors[f"{layer.name}.weight"] for layer in load_report(output).layers}
    return layers


def gaussian(sparsity: int) -> Tensor:
    """A Gaussian matrix in float32 without its smallest weights."""
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02
    if sparsity == 0:
        return weight
    smallest = weight.abs().flatten().kthvalue(weight.numel() * sparsity // 100).values
    return torch.where(weight.abs() > smallest, weight, 0)


def speeds(weight: Tensor) -> dict[str, float]:
    """Gigabytes of the dense weight that are encoded and decoded in a second of one processor."""
    found = {}
    for form in ("plain", "archive"):
        parts = encode(weight, form == "archive")
        for name, run in (
            (f"encode {form}", lambda form=form: encode(weight, form == "archive")),
            (f"decode {form}", lambda parts=parts: decode_parts(parts, (SIZE, SIZE), weight.dtype)),
        ):
            best = math.inf
            for _ in range(5):
                started = time.process_time()
                run()
                best = min(best, time.process_time() - started)
            found[name] = weight.nbytes / best / 1e9
    return found


def quantized_bits(weights: Mapping[str, Tensor], values: str) -> dict[str, float]:
    """Bits a weight of both forms with integers of few bits, of the formula, and of integers for kept weights that became 0."""
    total, count = dict.fromkeys(("plain", "archive", "formula", "with zeros"), 0.0), 0
    for weight in weights.values():
        rounded = NearestIntegers(values, None).quantized(weight)
        matrix = Bitmask.from_quantized(rounded, rounded.integers != 0)
        parts = {form: encode(matrix, form == "archive") for form in ("plain", "archive")}
        parts["with zeros"] = encode(Bitmask.from_quantized(rounded, weight != 0))
        for form, stored in parts.items():
            total[form] += 8 * sum(part.numel() for part in stored.values())
        density = matrix.kept / weight.numel()
        formula = [matrix.format.bits_per_weight(share, weight.shape[1]) for share in (density, 1)]
        total["formula"] += weight.numel() * min(formula)
        count += weight.numel()
    return {name: value / count for name, value in total.items()}


def measure_values(models: list[str]) -> None:
    """Measure integers of every width on the Gaussian matrix and the layers of each model."""
    torch.set_num_threads(1)
    for values in BITS_OF:
        for sparsity in (0, *SPARSITIES):
            layers = {"weight": gaussian(sparsity).bfloat16()}
            record(FILE, f"values, {values}, Gaussian matrix, {sparsity}", quantized_bits(layers, values))
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            for sparsity, layers in pruned_layers(model, "sparsegpt", "bfloat16", folder=folder).items():
                for values in BITS_OF:
                    record(FILE, f"values, {values}, {Path(model).name}, {sparsity}", quantized_bits(layers, values))


def values_table() -> list[str]:
    """Bits a weight with integers, as Markdown."""
    rows = []
    for name, figures in read_figures(FILE).items():
        if name.startswith("values, "):
            _, values, model, sparsity = name.split(", ")
            cells = [f"{figures[form]:.2f}" for form in ("plain", "formula", "archive", "with zeros")]
            rows.append([model, values, f"{sparsity} %", *cells])
    return markdown_table(["layers of", "values", "removed", "plain", "formula", "archive", "zeros kept"], rows, left=(0, 1))


def measure(models: list[str]) -> None:
    """Measure every model, without what was measured before."""
    torch.set_num_threads(1)
    for dtype, sparsity in product(INTEGERS, SPARSITIES):
        name = key("Gaussian matrix", "magnitude", dtype, sparsity)
        if name not in read_figures(FILE):
            record(FILE, name, bits({"weight": gaussian(sparsity).to(getattr(torch, dtype))}))
    for sparsity in SPARSITIES:
        if f"speed, {sparsity}" not in read_figures(FILE):
            record(FILE, f"speed, {sparsity}", speeds(gaussian(sparsity).bfloat16()))
    for (method, dtype), model in product((*product(METHODS, ["bfloat16"]), *product([DEFAULT], OTHERS)), models):
        keys = {sparsity: key(Path(model).name, method, dtype, sparsity) for sparsity in SPARSITIES}
        if not set(keys.values()) <= read_figures(FILE).keys():
            with tempfile.TemporaryDirectory() as folder:
                for sparsity, layers in pruned_layers(model, method, dtype, folder=folder).items():
                    record(FILE, keys[sparsity], bits(layers))


def key(model: str, method: str, dtype: str, sparsity: int) -> str:
    """The name of a figure."""
    return f"{model}, {method}, {dtype}, {sparsity}"


def table(dtypes: tuple[str, ...] = ("bfloat16",)) -> list[str]:
    """Bits a weight, as Markdown."""
    rows = []
    for name, figures in read_figures(FILE).items():
        if name.count(", ") == 3 and (parts := name.split(", "))[2] in dtypes:
            rows.append([*parts[:3], f"{parts[3]} %", *(f"{figures[form]:.2f}" for form in FIGURES)])
            rows[-1].append(f"{figures['archive'] / figures['bound']:.3f}")
    names = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: names.index(row[0]))
    head = ["layers of", "method", "dtype", "removed", "plain", "archive", "bound", "zstd -19", "archive / bound"]
    return markdown_table(head, rows, left=(0, 1, 2))


def other_dtypes() -> list[str]:
    """Bits a weight in other dtypes than bfloat16, as Markdown."""
    return table(OTHERS)


def speed_table() -> list[str]:
    """Gigabytes a second, as Markdown."""
    known = read_figures(FILE)
    forms = ("encode plain", "decode plain", "encode archive", "decode archive")
    rows = [[f"{x} %", *(f"{known[f'speed, {x}'][form]:.2f}" for form in forms)] for x in SPARSITIES]
    return markdown_table(["removed", *forms], rows, left=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("models", nargs="*")
    commands.add_parser("values").add_argument("models", nargs="*")
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "measure":
        measure([*MODELS, *options.models])
    elif options.command == "values":
        measure_values([*MODELS, *options.models])
    else:
        print("\n".join([*table(), "", *other_dtypes(), "", *values_table(), "", *speed_table()]))


if __name__ == "__main__":
    main()
