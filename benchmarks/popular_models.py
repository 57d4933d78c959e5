"""Memory and operations of pruning well-known models, as `sparsellm plan` estimates them: docs/popular-models.md.

    python benchmarks/popular_models.py measure    # two minutes; needs neither the models nor a network
    python benchmarks/popular_models.py table

`plan` reads a model's configuration and the headers of its weight files. Both are written here from the sizes in each model's
published config.json. The weight files have holes in place of the values, so that they take no disk space.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import tempfile
from pathlib import Path

import torch
from measuring import (
    MEASURED,
    TOKENIZER_OF,
    arguments,
    markdown_table,
    measure_or_show,
    program,
    read_figures,
    record,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from sparsellm.checkpoints.loading import open_checkpoint

FILE = MEASURED / "popular-models.json"

QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
LLAMA3 = {"vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8}

MODELS: dict[str, PreTrainedConfig] = {
    "Qwen/Qwen3-0.6B": Qwen3Config(
        **QWEN3,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        **QWEN3,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
    ),
    "google/gemma-3-1b-it": Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
    "meta-llama/Llama-3.2-1B": LlamaConfig(**LLAMA3, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16),
    "meta-llama/Llama-3.1-8B": LlamaConfig(**LLAMA3, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32),
    "unsloth/gpt-oss-20b-BF16": GptOssConfig(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
}
"""By their names on the hub, the sizes in their config.json. All are stored in bfloat16."""

RUNS = (("sparsegpt", {"method": "sparsegpt"}), ("fast", {"effort": "fast"}), ("standard", {}))
"""A layer-wise method and the default's two efforts, with the options that choose them."""

SAMPLES, LENGTH = 128, 2048
"""The calibration of the SparseGPT and SparseLLM papers."""


TIED = ("Qwen/Qwen3-0.6B", "google/gemma-3-1b-it", "meta-llama/Llama-3.2-1B")
"""Models whose head is their embedding."""


def write_without_values(folder: Path, name: str) -> int:
    """Write a model's configuration, a tokenizer, and a weight file with a header and a hole; the bytes of the weights."""
    config = MODELS[name]
    config.tie_word_embeddings = name in TIED
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if name in TIED else set()
    header, offset = dict[str, object](), 0
    for key, tensor in model.state_dict().items():
        if key not in tied:
            end = offset + 2 * math.prod(tensor.shape)
            header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
    config.dtype, config.architectures = torch.bfloat16, [type(model).__name__]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(open_checkpoint(TOKENIZER_OF).folder).save_pretrained(folder)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


def measure() -> None:
    """Plan each model by each method: memory, disk space and seconds."""
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            size = write_without_values(Path(folder), name)
            plans = {}
            for run, options in RUNS:
                words = arguments("plan", folder, sparsity="50%", calibration="demo", samples=SAMPLES, **options)
                words += ["--sequence-length", str(LENGTH), "--json"]
                done = subprocess.run([*program(), *words], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{name}, {run}: {done.stderr}")
                stages = json.loads(done.stdout)["stages"]
                plans[run] = {
                    "memory": max(stage["memory"]["cpu"] for stage in stages),
                    "files": max(stage["files"] for stage in stages),
                    "operations": sum(stage["operations"] for stage in stages),
                }
            record(FILE, name, {"bytes": size, "plans": plans})


def table() -> list[str]:
    """By model and method: the size of the weights, and the memory, disk space and operations of pruning."""
    head = ("model", "weights", "run", "memory", "disk", "operations")
    rows = []
    measured = read_figures(FILE)
    for name in MODELS:
        figures = measured[name]
        for run, plan in figures["plans"].items():
            sizes = (f"{plan[part] / 2**30:.1f} GiB" for part in ("memory", "files"))
            work = f"{plan['operations'] / 1e15:.2f} PFLOP"
            rows.append([f"`{name}`", f"{figures['bytes'] / 1e9:.1f} GB", run, *sizes, work])
    return markdown_table(head, rows, left=(0, 2))


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
