"""Bytes, perplexity and speed of the forms that a model can take: docs/smaller-faster.md.

    python benchmarks/smaller_faster.py measure demo:llama
    python benchmarks/smaller_faster.py measure PATH/wt2-llama --calibrate train.txt --test test.txt
    python benchmarks/smaller_faster.py speed               # five minutes, on a machine that does nothing else
    python benchmarks/smaller_faster.py table

Each form of a trained model is written, packed, and measured on 100 test sequences of 256 tokens. Speeds are
those of a Llama of 1.1 billion random weights. Llamas whose widths are a multiple of 256 take part as files of llama.cpp too,
if `llama-cpp-python` and `gguf` are installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import decode
import gguf_models
import llama_cpp_race
import torch
from measuring import CUT, MEASURED, add_measure, markdown_table, read_figures, record
from torch import Tensor, nn

import sparsellm
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.differences import Difference, Parts, difference, paired_error
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.evaluation.results import Perplexity
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import round_to_nearest
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.encoding import encode
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.record import TORCH
from sparsellm.extensions.packed.speed import measure_speeds, with_own_kernel
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text

FILE = MEASURED / "smaller-faster.json"
SAMPLES, LENGTH, WINDOWS = 64, 256, 100
SHAPE = "TinyLlama-1.1B"

FORMS: dict[str, dict[str, Any]] = {
    "--sparsity 50%": {"sparsity": "50%"},
    "--sparsity 70%": {"sparsity": "70%"},
    "--sparsity 70% --effort fast": {"sparsity": "70%", "effort": "fast"},
    "--sparsity 2:4": {"sparsity": "2:4"},
    "--sparsity 2:4@75%": {"sparsity": "2:4@75%"},
    "--bits 4": {"bits": 4},
    "--bits 3": {"bits": 3},
    "--bits 2.3": {"bits": 2.3},
}
"""Settings of `prune` by their words."""

ROUNDED = ", embeddings int8"
"""Ends the name of a form that `pack --embeddings int8` packed; those of `--bits` are packed both ways."""

INT8, KERNEL = "int8", "dense, by sparsellm's kernel"
"""The dense model in integers of 8 bits, which nothing is pruned for; and in bfloat16, timed alone."""

FORMS_PACKED = [INT8] + [
    x for form, settings in FORMS.items() for x in ([form, f"{form}{ROUNDED}"] if "bits" in settings else [form])
]
"""The forms of the tables."""

RANDOM: dict[str, tuple[str, int | None]] = {
    INT8: ("1%", 8),
    "--sparsity 50%": ("50%", None),
    "--sparsity 70%": ("70%", None),
    "--sparsity 2:4": ("2:4", None),
    "--sparsity 2:4@75%": ("2:4@75%", None),
    "--bits 4": ("1%", 4),
    f"--bits 4{ROUNDED}": ("1%", 4),
    "--bits 3": ("20%", 3),
    f"--bits 3{ROUNDED}": ("20%", 3),
    "--bits 2.3": ("56%", 3),
    f"--bits 2.3{ROUNDED}": ("56%", 3),
}
"""Pattern and bits of the random weights. `--bits 2.3` gives most of wt2-llama's layers 3 bits and removes 56 %."""

SAME_AS = {"--sparsity 70% --effort fast": "--sparsity 70%"}
"""Forms whose bytes and speed are those of another."""

GGUF = ("Q8_0", "Q4_K_M", "Q2_K")
DENSE, OURS = "dense", "sparsellm"
LOADERS = {"dense": "any software", "llama.cpp": "llama.cpp"}
TRAINED = "wt2-llama"
"""The trained model of the first table: the one that loses most."""


def measure(words: argparse.Namespace) -> None:
    """Fill the cells of a model: bytes, the relative change of the perplexity, and its standard error."""
    name, source = Path(words.model.replace("demo:", "demo-")).name, open_checkpoint(words.model)
    tests = test_windows(read_text(words.test, "test"), source.tokenizer(), LENGTH, limit=WINDOWS, **CUT).windows
    model = source.load()
    dense = measure_perplexity(model, tests)
    record(FILE, f"{name} | {DENSE}", {"bytes": weight_bytes(Path(source.folder)), "perplexity": round(dense.value, 3)})
    with tempfile.TemporaryDirectory() as folder:
        record_packed(words.model, Path(folder), f"{name} | {INT8} | 0", dense, tests, values="int8", embeddings="int8")
    data = {"model": words.model, "calibration": words.calibrate, "samples": SAMPLES, "sequence_length": LENGTH} | CUT
    for seed, (form, settings) in product(words.seeds, FORMS.items()):
        packings = {f"{name} | {form} | {seed}": {}} | (
            {f"{name} | {form}{ROUNDED} | {seed}": {"embeddings": "int8"}} if "bits" in settings else {}
        )
        if packings.keys() <= read_figures(FILE).keys():
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "pruned")
            prune_run(read_recipe(data | settings | {"seed": seed})).save_pretrained(output)
            for key, packing in packings.items():
                record_packed(output, Path(folder, key), key, dense, tests, **packing)
    if gguf_models.missing or model.config.model_type != "llama" or model.config.hidden_size % gguf_models.GROUP:
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole.gguf")
        gguf_models.write(model, whole)
        for kind in GGUF:
            gguf_models.quantize(whole, file := Path(folder, f"{kind}.gguf"), kind)
            losses = gguf_models.losses(file, tests)
            value = float(torch.tensor(losses, dtype=torch.float64).mean().exp())
            parts = Parts.of(dense.parts.digest if dense.parts else "", losses)
            change = difference(value, dense.value, paired_error(parts, dense.parts))
            record(FILE, f"{name} | llama.cpp {kind} | 0", cell(file.stat().st_size, change))


def record_packed(model: str | Path, folder: Path, key: str, dense: Perplexity, tests: Tensor, **packing: str) -> None:
    """Pack a model, and record its bytes and the change of its perplexity."""
    folder.mkdir(exist_ok=True)
    sparsellm.pack(model, folder / "packed", **packing)
    sparsellm.unpack(folder / "packed", folder / "unpacked")
    perplexity = measure_perplexity(open_checkpoint(str(folder / "unpacked")).load(), tests)
    record(FILE, key, cell(weight_bytes(folder / "packed"), perplexity.against(dense)))


def cell(size: int, change: Difference | None) -> dict[str, Any]:
    """The figures of a form."""
    error = change and change.standard_error
    return {"bytes": size, "change": change and round(change.change, 5), "error": error and round(error, 5)}


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure_speed() -> None:
    """Tokens a second, bytes and the speed of memory, of the shape with random weights, one sequence at a time."""
    threads, config = os.cpu_count() or 1, decode.SHAPES[SHAPE]
    one = decode.one_block(config)
    dense: Any = decode.deepen(one, config)
    forms: dict[str, nn.Module] = {TORCH: dense}
    sizes = {DENSE: sum(tensor.nbytes for tensor in dense.state_dict().values())}
    if own := with_own_kernel(dense):
        forms[KERNEL], sizes[KERNEL] = own, sizes[DENSE]
    for form, (pattern, bits) in RANDOM.items():
        stored: list[int] = []

        def pack(weight: Tensor, pattern: str = pattern, bits: int | None = bits, stored: list[int] = stored) -> Bitmask:
            matrix, size = packed(weight, pattern, bits)
            stored.append(weight.nbytes - size)
            return matrix

        whole: Any = decode.deepen(decode.packed(one, pack), config)
        sizes[form] = sizes[DENSE] - config.num_hidden_layers * sum(stored[:-1])  # the last matrix is the head
        if form.endswith(ROUNDED) or form == INT8:
            head = integers(dense.get_output_embeddings().weight, 8)
            whole.set_output_embeddings(PackedLinear.from_bitmask(head, dtype=torch.bfloat16))
            sizes[form] -= 2 * (dense.get_output_embeddings().weight.nbytes - stored_bytes(head))
            forms[form] = whole
        else:
            forms[form] = decode.with_dense_head(whole, dense)
    speeds, bandwidth = measure_speeds(
        forms,
        batches=(1,),
        threads=(threads,),
        prompt=decode.PROMPT,
        tokens=decode.TOKENS,
        rounds=decode.ROUNDS,
        observe=lambda text: print(text, file=sys.stderr),
    )
    found = {DENSE if speed.form == TORCH else speed.form: speed.decode for speed in speeds}
    forms.clear()
    with tempfile.TemporaryDirectory() as folder:
        for speed in llama_cpp_race.measure(dense, Path(folder), (threads,), batches=(1,), tokens=decode.TOKENS):
            found[speed["form"]], sizes[speed["form"]] = speed["decode"], speed["bytes"]
    figures = {form: {"tokens": round(value, 2), "bytes": sizes.get(form)} for form, value in found.items()}
    record(FILE, "speed", figures | {"threads": threads, "bandwidth": round(bandwidth[threads])})


def packed(weight: Tensor, text: str, bits: int | None) -> tuple[Bitmask, int]:
    """A weight without what a pattern removes of it by size, in bfloat16 or in integers, and the bytes of its file."""
    pattern = parse_pattern(text).for_costs(lambda: weight.float().square())
    keep = pattern.keep(weight.float().abs())
    pruned = weight.masked_fill(~keep, 0)  # a product would leave -0.0, which is stored like a value
    if bits is None:
        return Bitmask.from_dense(pruned), stored_bytes(pruned)
    matrix = integers(pruned, bits)
    return matrix, stored_bytes(matrix)


def integers(weight: Tensor, bits: int) -> Bitmask:
    """A weight in integers, without its zeros."""
    keep = weight != 0
    return Bitmask.from_quantized(
        round_to_nearest(weight, IntegerFormat.default(bits, keep.float().mean().item()), mask=keep), keep
    )


def stored_bytes(weight: Tensor | Bitmask) -> int:
    """Bytes of a packed weight in a file."""
    return sum(part.nbytes for part in encode(weight).values())


def models() -> list[str]:
    """The trained models that were measured."""
    return [key.removesuffix(f" | {DENSE}") for key in read_figures(FILE) if key.endswith(f" | {DENSE}")]


def shown(name: str, form: str) -> tuple[str, str]:
    """Bytes of a form beside the dense model's, and its change, of a trained model; empty if it was not measured."""
    figures = read_figures(FILE)
    cells = [x for key, x in figures.items() if key.startswith(f"{name} | {form} | ")]
    if not cells:
        return "", ""
    share = sum(x["bytes"] for x in cells) / len(cells) / figures[f"{name} | {DENSE}"]["bytes"]
    change, error = (sum(x[part] for x in cells) / len(cells) for part in ("change", "error"))
    return f"{share:.0%}", Difference(change, error).short


def words_of(form: str) -> str:
    """A form as the tables name it: the words of `prune`, and of `pack` where it rounds."""
    if form == INT8:
        return "`pack --values int8 --embeddings int8`"
    if form in (DENSE, KERNEL) or form.startswith("llama"):
        return form
    return f"`{form.removesuffix(ROUNDED)}`" + (", `--embeddings int8`" if form.endswith(ROUNDED) else "")


def table(name: str = TRAINED, forms: Sequence[str] = ()) -> list[str]:
    """Bytes and perplexity of a trained model, speed and bytes of 1.1 billion weights, by form."""
    speed, rows = read_figures(FILE)["speed"], []
    smallest = [form for form in FORMS_PACKED if f"{form}{ROUNDED}" not in FORMS_PACKED]
    for form in forms or (DENSE, KERNEL, *smallest, *(f"llama.cpp {kind}" for kind in GGUF)):
        timed = speed.get(SAME_AS.get(form, form), {})
        share, change = ("100%", "") if form in (DENSE, KERNEL) else shown(name, form)
        size = f"{timed['bytes'] / 1e9:.2f} ({timed['bytes'] / speed[DENSE]['bytes']:.0%})" if timed else ""
        loader = OURS if form == KERNEL else LOADERS.get(form.split()[0], OURS)
        rows.append([words_of(form), share, change, f"{timed['tokens']:.1f}" if timed else "", size, loader])
    head = ["form", f"bytes, {name}", "perplexity", f"tokens/s, {SHAPE}", "GB", "loaded by"]
    lines = markdown_table(head, rows, left=(0, 5))
    return [*lines, "", f"{read_figures(FILE)['machine']}; memory delivers {speed['bandwidth'] / 1e9:.0f} GB/s."]


def in_short() -> list[str]:
    """The forms between which most users choose."""
    return table(forms=(DENSE, "--sparsity 50%", "--sparsity 70%", *(f"--bits {bits}{ROUNDED}" for bits in ("4", "3", "2.3"))))


def quality() -> list[str]:
    """Bytes and perplexity of every form of every trained model, narrow enough for a page: the errors stand below."""
    names, rows = models(), []
    for form in FORMS_PACKED:
        found = [shown(name, form) for name in names]
        rows.append([words_of(form), *(f"{share}, {change.partition(' ±')[0]} %" if share else "" for share, change in found)])
    errors = [x["error"] for key, x in read_figures(FILE).items() if isinstance(x, dict) and "error" in x]
    lines = markdown_table(["bytes, perplexity", *names], rows)
    return [*lines, "", f"Standard errors of the changes are {100 * min(errors):.2f} to {100 * max(errors):.1f} %."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_measure(commands, (), (0,))
    commands.add_parser("speed")
    commands.add_parser("table")
    words = parser.parse_args()
    if words.command == "measure":
        measure(words)
    elif words.command == "speed":
        measure_speed()
    else:
        print("\n".join([*table(), "", *quality()]))


if __name__ == "__main__":
    main()
