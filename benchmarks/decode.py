"""Decoding with packed weights, beside dense ones, the speed of memory, and llama.cpp: docs/deploying.md.

    python benchmarks/decode.py measure    # fifteen minutes, on a machine that does nothing else
    python benchmarks/decode.py measure --shape TinyLlama-1.1B
    python benchmarks/decode.py table

The models have random weights, and the shapes of TinyLlama-1.1B, OPT-1.3B, and Llama-2-7B with 8 of its 32 blocks. One block
is made and pruned by magnitude, and the others are copies of it in memory of their own. The head is dense, as `sparsellm prune`
leaves it unless told. llama.cpp takes part in the first shape if `llama-cpp-python` and `gguf` are installed.
Each instruction set of the kernels has a file of figures.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp_race
import torch
from measuring import MEASURED, markdown_table, read_figures, write_figures
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig, PreTrainedModel

from sparsellm.extensions.integers.formats import BITS_OF, IntegerFormat
from sparsellm.extensions.integers.quantization import round_to_nearest
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.record import CEILING, KERNEL, TORCH
from sparsellm.extensions.packed.speed import measure_speeds, sharing_copy, step_weights, weight_bytes, with_own_kernel

FILES = sorted(MEASURED.glob("decode-*.json"), reverse=True)
"""A file for each instruction set."""
SPARSITIES = (0.5, 0.7, 0.9)
BATCHES, THREADS = (1, 4), (1, 2)
PROMPT, TOKENS, ROUNDS = 8, 12, 3
"""Prefill is not measured here: a prompt of 8 tokens is read by the kernels, without decoding the weights."""

SHAPES: dict[str, PreTrainedConfig] = {
    "TinyLlama-1.1B": LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    "OPT-1.3B": OPTConfig(
        vocab_size=50272,
        hidden_size=2048,
        word_embed_proj_dim=2048,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
    "Llama-2-7B, 8 of 32 blocks": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
}

RACED = "TinyLlama-1.1B"
"""The shape in which llama.cpp takes part."""

INTEGERS = {"70% int8": (0.7, "int8"), "70% int4": (0.7, "int4"), "as --bits 2.3": (0.56, "int3")}
"""Forms of integers: sparsity and type. `--bits 2.3` gives wt2-llama's layers 3 bits and removes 56 %."""


def packed_name(sparsity: float) -> str:
    """Name of a packed form."""
    return f"packed {sparsity:.0%}, dense head"


def measure(shapes: Sequence[str]) -> None:
    """Measure some shapes."""
    kernel = kernels.instruction_set() or "none"
    file = MEASURED / f"decode-{kernel}.json"
    for name in shapes:
        config = SHAPES[name]
        started = time.perf_counter()
        forms = make_forms(config)
        if name == RACED:
            forms |= integer_forms(config, forms[TORCH])
        print(f"{name}: made in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        speeds, bandwidth = measure_speeds(
            forms,
            batches=BATCHES,
            threads=THREADS,
            prompt=PROMPT,
            tokens=TOKENS,
            rounds=ROUNDS,
            observe=lambda text, name=name: print(f"{name}: {text}", file=sys.stderr),
        )
        figures: dict[str, Any] = {
            "step_bytes": sum(weight.nbytes for weight in step_weights(forms[TORCH])),
            "bandwidth": {str(threads): value for threads, value in bandwidth.items()},
            "memory_bytes": {form: weight_bytes(model) for form, model in forms.items()},
            "speeds": [asdict(speed) for speed in speeds],
            "profile": {f"{form}, {threads}": profile(model, threads) for form, model in forms.items() for threads in THREADS},
        }
        if name == RACED:
            dense = forms[TORCH]
            forms.clear()
            with tempfile.TemporaryDirectory() as folder:
                figures |= {"race": llama_cpp_race.measure(dense, Path(folder), THREADS, batches=BATCHES, tokens=TOKENS)}
        write_figures(file, read_figures(file) | {name: figures, "kernel": kernel})
        print(f"{name}: {time.perf_counter() - started:.0f} s in all", file=sys.stderr)
        print("\n".join(profile_table(figures["profile"])), file=sys.stderr)
    print("\n".join(table()))


def make_forms(config: PreTrainedConfig, sparsities: Sequence[float] = SPARSITIES) -> dict[str, nn.Module]:
    """The dense model, the same with this package's kernel, and packed ones."""
    one = one_block(config)
    forms: dict[str, nn.Module] = {TORCH: deepen(one, config)}
    if own := with_own_kernel(forms[TORCH]):
        forms[KERNEL] = own
    for sparsity in sparsities:
        whole = deepen(packed(one, lambda weight, sparsity=sparsity: pack(weight, sparsity, "bfloat16")), config)
        forms[packed_name(sparsity)] = with_dense_head(whole, forms[TORCH])
    return forms


def integer_forms(config: PreTrainedConfig, dense: Any) -> dict[str, nn.Module]:
    """Packed models of integers with the head of the dense model."""
    one = one_block(config)
    wholes = {
        name: deepen(packed(one, lambda weight, form=form: pack(weight, *form)), config) for name, form in INTEGERS.items()
    }
    return {f"packed {name}, dense head": with_dense_head(whole, dense) for name, whole in wholes.items()}


def one_block(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a single block with random weights, always the same."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = 1
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shallow, dtype=torch.bfloat16).eval().requires_grad_(False)
    return model


def packed(one: nn.Module, make: Callable[[Tensor], Bitmask]) -> nn.Module:
    """The model with packed weights in place of all matrices of linear layers."""
    result = sharing_copy(one)
    for name, layer in list(result.named_modules()):
        if isinstance(layer, nn.Linear):
            result.set_submodule(name, PackedLinear.from_bitmask(make(layer.weight), layer.bias, dtype=torch.bfloat16))
    return result


def pack(weight: Tensor, sparsity: float, form: str) -> Bitmask:
    """The weight without its smallest numbers, in bfloat16 or integers in their default groups."""
    size = weight.abs().flatten()
    pruned = weight.masked_fill(weight.abs() <= size.kthvalue(int(sparsity * len(size))).values, 0)
    if form == "bfloat16":
        return Bitmask.from_dense(pruned)
    rounded = round_to_nearest(pruned, IntegerFormat.default(BITS_OF[form], 1 - sparsity), mask=pruned != 0)
    return Bitmask.from_quantized(rounded, pruned != 0)


def with_dense_head(whole: nn.Module, dense: Any) -> nn.Module:
    """A packed model with the dense one's output projection, by this package's kernel."""
    headed: Any = sharing_copy(whole)
    headed.set_output_embeddings(dense.get_output_embeddings())
    return with_own_kernel(headed) or headed


def deepen(one: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """A model of all blocks of a configuration from one of a single block; what is outside of blocks is shared."""
    model: Any = sharing_copy(one)
    blocks = model.get_decoder().layers
    first = blocks[0]
    blocks[0] = copy.deepcopy(first)
    for number in range(1, config.num_hidden_layers):
        block = copy.deepcopy(first)
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
        blocks.append(block)
    for each in (model, model.model, model.get_decoder()):
        each.config = copy.deepcopy(config)
        each.config._attn_implementation = one.config._attn_implementation
    return model


def profile(model: Any, threads: int) -> dict[str, float]:
    """Milliseconds of a decoding step by part; the rest is norms, activation functions, the cache and Python."""
    torch.set_num_threads(threads)
    times: dict[str, float] = defaultdict(float)
    head = model.get_output_embeddings()
    modules = [(part_of(name, module is head), module) for name, module in model.named_modules()]
    timed = [(part, module, module.forward) for part, module in modules if part]
    with torch.inference_mode():
        output = model(torch.zeros(1, PROMPT, dtype=torch.long), use_cache=True)
        for part, module, forward in timed:
            module.forward = timed_forward(forward, times, part)
        started = time.perf_counter()
        for _ in range(TOKENS):
            output = model(output.logits[:, -1:].argmax(-1), past_key_values=output.past_key_values, use_cache=True)
        whole = time.perf_counter() - started
    for _, module, forward in timed:
        module.forward = forward
    times["attention"] -= times["projections"]
    times["rest"] = whole - sum(times.values())
    return {part: round(1000 * seconds / TOKENS, 3) for part, seconds in times.items()}


def part_of(name: str, is_head: bool) -> str:
    """The part of a step that a module belongs to, by the names of Llama and OPT; empty for modules that are not timed."""
    last = name.rsplit(".", maxsplit=1)[-1]
    if is_head:
        return "head"
    if last == "self_attn":
        return "attention"
    if ".self_attn." in name and last.endswith("_proj"):
        return "projections"
    return "feed-forward" if last in ("gate_proj", "up_proj", "down_proj", "fc1", "fc2") else ""


def timed_forward(forward: Callable[..., Any], times: dict[str, float], part: str) -> Callable[..., Any]:
    """A function that adds the time of another to a part."""

    def timed(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = forward(*arguments, **keywords)
        times[part] += time.perf_counter() - started
        return result

    return timed


def table() -> list[str]:
    """Speeds and memory of every shape with every instruction set, as Markdown."""
    lines: list[str] = []
    for figures in filter(None, map(read_figures, FILES)):
        for name in (name for name in SHAPES if name in figures):
            bandwidth = " and ".join(f"{value / 1e9:.0f}" for value in figures[name]["bandwidth"].values())
            text = (
                f"**{name}**, {figures['kernel']}, {figures[name]['step_bytes'] / 1e9:.2f} GB read for a token; memory delivers"
            )
            lines += ["", f"{text} {bandwidth} GB/s to one and two threads.", "", *speed_rows(figures[name])]
        lines += ["", f"{figures['machine']}; kernel {figures['kernel']}."]
    return lines[1:]


def in_short() -> list[str]:
    """How many times as fast as others the usual packed form of the raced shape is, least and most over the threads."""
    own = packed_name(0.7)
    others = {
        "the faster dense form": (TORCH, KERNEL),
        "memory's speed": (CEILING,),
        **{form: (form,) for form in ("llama.cpp Q8_0", "llama.cpp Q4_0")},
    }
    head, rows = ["beside"], [[label] for label in others]
    for figures in filter(None, map(read_figures, FILES)):
        measured = [*figures[RACED]["speeds"], *figures[RACED]["race"]]
        speeds = {(x["threads"], x["form"], x["batch"]): x["decode"] for x in measured}
        for batch in BATCHES:
            head.append(f"{figures['kernel']}, {batch} sequence{'s' if batch > 1 else ''}")
            for row, forms in zip(rows, others.values(), strict=True):
                ratios = [speeds[count, own, batch] / max(speeds[count, form, batch] for form in forms) for count in THREADS]
                row.append(" to ".join(dict.fromkeys(f"{ratio:.1f}" for ratio in sorted(ratios))))
    return markdown_table(head, rows)


def speed_rows(figures: dict[str, Any]) -> list[str]:
    """A line for each number of threads and form, with a group of columns for each number of sequences."""
    measured = [*figures["speeds"], *figures.get("race", [])]
    speeds = {(x["threads"], x["form"], x["batch"]): x["decode"] for x in measured}
    sizes = {x["form"]: x.get("bytes") for x in figures.get("race", [])}
    ceilings = {(x["threads"], x["form"], x["batch"]): x["ceiling"] for x in figures.get("race", [])}
    rows = []
    shown = [x for x in dict.fromkeys((threads, form) for threads, form, _ in speeds) if not x[1].endswith("pruned head")]
    for threads, form in shown:  # figures of earlier runs have heads that are pruned too
        size = figures["memory_bytes"].get(form, sizes.get(form))
        row = [str(threads), form.removesuffix(", dense head")]
        for batch in BATCHES:
            speed = speeds[threads, form, batch]
            ceiling = ceilings.get((threads, form, batch), speeds[threads, CEILING, batch])
            row += [f"{speed:.1f}", f"{speed / speeds[threads, TORCH, batch]:.2f}", f"{speed / ceiling:.2f}"]
        rows.append([*row, "" if size is None else f"{size / 1e9:.2f}"])
    head = ["threads", "form"]
    for batch in BATCHES:
        head += [f"tokens/s, {batch} sequence{'s' if batch > 1 else ''}", "× torch", "× ceiling"]
    return markdown_table([*head, "GB in memory"], sorted(rows, key=lambda row: row[0]), left=(1,))


def profile_table(profiles: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Milliseconds of each part of a decoding step, as Markdown."""
    parts = list(dict.fromkeys(part for times in profiles.values() for part in times))
    rows = [[form, *(f"{times.get(part, 0):.2f}" for part in parts)] for form, times in profiles.items()]
    return markdown_table(["form, threads", *parts], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("--shape", action="append", choices=SHAPES)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.shape or tuple(SHAPES))
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
