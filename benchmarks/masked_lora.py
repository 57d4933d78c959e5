"""What LoRA under masks costs beside ordinary LoRA and full fine-tuning: time and memory of a training step.

    python benchmarks/masked_lora.py measure    # about two minutes, on a CPU
    python benchmarks/masked_lora.py table

A Llama of random weights, half of them zeros, in float32; all linear layers are adapted with rank 16. Each way is measured in a
process of its own: seconds are processor time, the median of the steps after the first, and memory is the rise of the peak from
before the optimizer was made. Optimizer: AdamW.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from measuring import MEASURED, markdown_table, read_figures, record
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

FILE = MEASURED / "masked-lora.json"
STEPS = 6
SIZES = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
TOKENS = {"sequences": 2, "length": 256}
RANK = 16


def full(model: PreTrainedModel) -> PreTrainedModel:
    """All weights."""
    return model


def ordinary(model: PreTrainedModel) -> PreTrainedModel:
    """PEFT's adapter, whose update is dense."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))


def masked(model: PreTrainedModel) -> PreTrainedModel:
    """The adapter under the masks."""
    from peft import LoraConfig

    from sparsellm.extensions.recover.peft import sparse_lora

    return sparse_lora(model, LoraConfig(r=RANK, target_modules="all-linear"))


WAYS: dict[str, tuple[str, Callable[[PreTrainedModel], PreTrainedModel]]] = {
    "full": ("all weights, without masks", full),
    "held": ("all weights, with `fixed_masks`", full),
    "ordinary": ("LoRA of PEFT: fills the zeros when merged", ordinary),
    "masked": ("`sparse_lora`", masked),
}


def train(way: str) -> dict[str, float]:
    """Train one way in this process."""
    from contextlib import nullcontext

    from sparsellm import fixed_masks

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.5, 0)
    model = WAYS[way][1](model).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(SIZES["vocab_size"], (TOKENS["sequences"], TOKENS["length"]))
    seconds = []
    with fixed_masks(model, optimizer) if way == "held" else nullcontext():
        for _ in range(STEPS):
            start = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - start)
    rise = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    count = sum(parameter.numel() for parameter in trained)
    return {"seconds": statistics.median(seconds[1:]), "bytes": rise, "trained": count}


def table() -> list[str]:
    """The figures as a Markdown table."""
    figures = read_figures(FILE)
    rows = []
    for way, (name, _) in WAYS.items():
        row = figures[way]
        rows.append([name, f"{row['trained'] / 1e6:.1f} M", f"{row['seconds']:.1f} s", f"{row['bytes'] / 2**20:.0f} MiB"])
    model = f"{figures['full']['trained'] / 1e6:.0f} M weights, {TOKENS['sequences']} x {TOKENS['length']} tokens"
    return markdown_table([model, "trained", "a step", "memory besides the weights"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table", *WAYS))
    command = parser.parse_args().command
    if command in WAYS:
        print(json.dumps(train(command)))
    elif command == "measure":
        for way in WAYS:
            done = subprocess.run([sys.executable, __file__, way], check=True, capture_output=True, text=True)
            record(FILE, way, json.loads(done.stdout.splitlines()[-1]))
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
