"""Bits a weight of the packed forms, beside a compressor of files and the entropy bound, and the speed of both directions.

    python benchmarks/packing.py measure [MODEL ...]    # minutes; models besides demo:opt and demo:llama; needs zstd
    python benchmarks/packing.py values [MODEL ...]     # integers in place of values, with the pruned layers of SparseGPT
    python benchmarks/packing.py table

Pruned layers of each model, in bfloat16, by each method; and one Gaussian matrix. The bound is the entropy of the mask and of
the exponents of the kept weights, both taken as independent within a layer, and 8 bits for sign and mantissa. zstd compresses
the same layers as dense tensors in one file.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from measuring import MEASURED, arguments, markdown_table, program, read_figures, record
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsellm.runs.packed_values import VALUES, Values
from sparsellm.runs.records import load_report
from sparsellm.solvers.quantization import bits_per_weight
from sparsellm.sparse.encoding import decode, encode
from sparsellm.sparse.quantization import QuantizedBitmask
from sparsellm.sparse.quantized_encoding import encode_quantized

FILE = MEASURED / "packing.json"
MODELS = ("demo:opt", "demo:llama")
METHODS = ("magnitude", "sparsegpt", "sparsellm")
SPARSITIES = (50, 70, 80, 90)
WANTED = {50: 7.0, 70: 4.6, 90: 2.2}
SIZE = 2048
"""Rows and columns of the Gaussian matrix."""

FIGURES = ("plain", "archive", "bound", "zstd")


def entropy(counts: Tensor) -> float:
    """Bits that each of many things takes at least, from how often each of them occurs."""
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def bound(weight: Tensor) -> float:
    """Bits that a bfloat16 weight takes at least."""
    bits = weight.view(torch.int16).int()
    kept = bits[bits != 0]
    mask = entropy(torch.tensor([len(kept), bits.numel() - len(kept)]))
    return bits.numel() * mask + len(kept) * (8 + entropy(torch.bincount(kept >> 7 & 0xFF)))


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
            decoded = decode(parts, (weight.shape[0], weight.shape[1]), weight.dtype).to_dense()
            assert torch.equal(decoded.view(torch.int16), weight.view(torch.int16))
            total[form] += 8 * sum(part.numel() for part in parts.values())
        total["bound"] += bound(weight)
    total["zstd"] = zstd_bits(weights)
    return {name: value / sum(weight.numel() for weight in weights.values()) for name, value in total.items()}


def pruned_layers(model: str, method: str, folder: str) -> dict[int, dict[str, Tensor]]:
    """The pruned layers of a model at each sparsity."""
    sparsities = ",".join(f"{sparsity}%" for sparsity in SPARSITIES)
    run = arguments("prune", model, f"{folder}/out", method=method, sparsity=sparsities, dtype="bfloat16")
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
    """A Gaussian matrix without its smallest weights."""
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02
    if sparsity == 0:
        return weight.bfloat16()
    smallest = weight.abs().flatten().kthvalue(weight.numel() * sparsity // 100).values
    return torch.where(weight.abs() > smallest, weight, 0).bfloat16()


def speeds(weight: Tensor) -> dict[str, float]:
    """Gigabytes of the dense weight that are encoded and decoded in a second of one processor."""
    found = {}
    for form in ("plain", "archive"):
        parts = encode(weight, form == "archive")
        for name, run in (
            (f"encode {form}", lambda form=form: encode(weight, form == "archive")),
            (f"decode {form}", lambda parts=parts: decode(parts, (SIZE, SIZE), weight.dtype)),
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
    for name, weight in weights.items():
        matrix, entry = Values(VALUES[values], None, transposed=False).quantize(name, weight)
        parts = {form: encode_quantized(matrix, form == "archive") for form in ("plain", "archive")}
        scales, size = matrix.scales, entry.group_size
        kept = {"bits": matrix.bits, "group_size": size, "keep": weight != 0}
        parts["with zeros"] = encode_quantized(QuantizedBitmask.from_integers(matrix.to_integers(), scales, **kept))
        for form, stored in parts.items():
            total[form] += 8 * sum(part.numel() for part in stored.values())
        density = matrix.kept / weight.numel()
        formula = [bits_per_weight(share, matrix.bits, size, weight.shape[1]) for share in (density, 1)]
        total["formula"] += weight.numel() * min(formula)
        count += weight.numel()
    return {name: value / count for name, value in total.items()}


def measure_values(models: list[str]) -> None:
    """Measure integers of every width on the Gaussian matrix and the layers of each model."""
    torch.set_num_threads(1)
    for values in VALUES:
        for sparsity in (0, *SPARSITIES):
            record(
                FILE, f"values, {values}, Gaussian matrix, {sparsity}", quantized_bits({"weight": gaussian(sparsity)}, values)
            )
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            for sparsity, layers in pruned_layers(model, "sparsegpt", folder).items():
                for values in VALUES:
                    record(FILE, f"values, {values}, {Path(model).name}, {sparsity}", quantized_bits(layers, values))


def values_table() -> list[str]:
    """Bits a weight with integers, as Markdown."""
    rows = []
    for key, figures in read_figures(FILE).items():
        if key.startswith("values, "):
            _, values, model, sparsity = key.split(", ")
            cells = [f"{figures[form]:.2f}" for form in ("plain", "formula", "archive", "with zeros")]
            rows.append([model, values, f"{sparsity} %", *cells])
    return markdown_table(["layers of", "values", "removed", "plain", "formula", "archive", "zeros kept"], rows, left=(0, 1))


def measure(models: list[str]) -> None:
    """Measure every model, without what was measured before."""
    torch.set_num_threads(1)
    for sparsity in SPARSITIES:
        if f"speed, {sparsity}" not in read_figures(FILE):
            weight = gaussian(sparsity)
            record(FILE, f"Gaussian matrix, magnitude, {sparsity}", bits({"weight": weight}))
            record(FILE, f"speed, {sparsity}", speeds(weight))
    for model in models:
        for method in METHODS:
            name = f"{Path(model).name}, {method}"
            if f"{name}, {SPARSITIES[-1]}" in read_figures(FILE):
                continue
            with tempfile.TemporaryDirectory() as folder:
                for sparsity, layers in pruned_layers(model, method, folder).items():
                    record(FILE, f"{name}, {sparsity}", bits(layers))


def table() -> list[str]:
    """Bits a weight, as Markdown."""
    known = read_figures(FILE)
    rows = []
    names = dict.fromkeys(key.rpartition(", ")[0] for key in known if key.count(", ") == 2 and key[:6] != "values")
    for name in names:
        model, _, method = name.rpartition(", ")
        for sparsity in (x for x in SPARSITIES if f"{name}, {x}" in known):
            figures = known[f"{name}, {sparsity}"]
            cells = [f"{figures[form]:.2f}" for form in FIGURES]
            rows.append([model, method, f"{sparsity} %", *cells, f"{figures['archive'] / figures['bound']:.3f}"])
    return markdown_table(
        ["layers of", "method", "removed", "plain", "archive", "bound", "zstd -19", "archive / bound"], rows, left=(0, 1)
    )


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
        print("\n".join([*table(), "", *values_table(), "", *speed_table()]))


if __name__ == "__main__":
    main()
