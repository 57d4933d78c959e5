"""The memory that `sparsellm plan` estimates for well-known models, and hours from timed blocks: docs/popular-models.md.

    python benchmarks/popular_models.py measure    # two minutes; needs neither the models nor a network
    python benchmarks/popular_models.py table

`plan` reads a model's configuration and the headers of its weight files. Both are written here from the sizes in each model's
published config.json. The weight files have holes in place of the values, so that they take no disk space. Blocks are timed by
`width.py`, `gpu.py` and `speed.py`.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu import DEFAULT_RUN
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
from speed_tables import wide_race
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from width import FILE as BLOCKS_FILE
from width import LENGTH as BLOCKS_LENGTH
from width import SAMPLES as BLOCKS_SAMPLES

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.observers.progress import human_seconds

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
    "meta-llama/Llama-2-70b-hf": LlamaConfig(
        vocab_size=32_000,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "openai/gpt-oss-20b": GptOssConfig(
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
"""By their names on the hub, the sizes in their config.json. All are stored in bfloat16, the experts of GPT-OSS in MXFP4."""

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}

RUNS = (("sparsegpt", {"method": "sparsegpt"}), ("fast", {"effort": "fast"}), ("standard", {}))
"""A layer-wise method and the default's two efforts, with the options that choose them."""

SAMPLES, LENGTH = 128, 2048
"""The calibration of the SparseGPT and SparseLLM papers."""

RACE = {"SparseGPT": "sparsegpt", "default, scope none, fast-admm inside": "fast", "default": "standard"}
"""The runs by the names under which `width.py` and `speed.py` timed them."""

RACE_WIDTH = 2048
"""Width of the block that `speed.py` timed on two cores."""

ON_GPU = {"SparseGPT": "sparsegpt", "default, closed form": "standard, `--set rounds=0`"}
LLAMA_2_7B_BLOCKS = 32
"""The runs by the names under which `gpu.py` timed them, on a block of Llama-2-7B, and its number of blocks."""

TIMED = {"meta-llama/Llama-3.1-8B": (4096, 32), "TinyLlama/TinyLlama_v1.1": (2048, 22)}
"""Width and number of blocks of the models whose blocks have a shape of `width.py`."""

TIED = ("Qwen/Qwen3-0.6B", "google/gemma-3-1b-it", "meta-llama/Llama-3.2-1B")
"""Models whose head is their embedding."""


def write_without_values(folder: Path, config: PreTrainedConfig) -> int:
    """Write a model's configuration, a tokenizer, and a weight file with a header and a hole; the bytes of the weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    header, offset = dict[str, object](), 0
    for key, tensor in model.state_dict().items():
        for name_in_file, dtype, shape in _stored(key, tensor.shape) if key not in tied else ():
            end = offset + (2 if dtype == "BF16" else 1) * math.prod(shape)
            header[name_in_file] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
    if isinstance(config, GptOssConfig):
        config.quantization_config = MXFP4
    config.dtype, config.architectures = torch.bfloat16, [type(model).__name__]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(open_checkpoint(TOKENIZER_OF).folder).save_pretrained(folder)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


def _stored(key: str, shape: torch.Size) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each stored tensor of a parameter: experts of GPT-OSS are blocks of 16 bytes and scales."""
    if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(key, "BF16", list(shape))]
    groups = [shape[0], shape[2], shape[1] // 32]
    return [(f"{key}_blocks", "U8", [*groups, 16]), (f"{key}_scales", "U8", groups)]


def measure() -> None:
    """Plan each model by each method: memory and disk space."""
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config.tie_word_embeddings = name in TIED
            size = write_without_values(Path(folder), config)
            plans = {}
            for run, options in RUNS:
                words = arguments("plan", folder, sparsity="50%", calibration="demo", samples=SAMPLES, **options)
                words += ["--sequence-length", str(LENGTH), "--json"]
                plans[run] = _planned(words)
            record(FILE, name, {"bytes": size, "plans": plans})


def _planned(words: Sequence[str]) -> dict[str, float]:
    """The largest memory and disk space of a plan."""
    done = subprocess.run([*program(), *words], capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):  # a plan that this machine cannot carry out is printed all the same
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    stages = json.loads(done.stdout)["stages"]
    return {
        "memory": max(stage["memory"]["cpu"] for stage in stages),
        "files": max(stage["files"] for stage in stages),
    }


def table() -> list[str]:
    """By model and method: the size of the weights, and the memory and disk space of pruning."""
    head = ("model", "weights", "run", "memory", "disk")
    rows = []
    measured = read_figures(FILE)
    for name in MODELS:
        figures = measured[name]
        for run, plan in figures["plans"].items():
            sizes = (f"{plan[part] / 2**30:.1f} GiB" for part in ("memory", "files"))
            rows.append([f"`{name}`", f"{figures['bytes'] / 1e9:.1f} GB", run, *sizes])
    return markdown_table(head, rows, left=(0, 2))


def hours() -> list[str]:
    """By model and method: the seconds of a timed block times the number of blocks, on two cores and on a GPU."""
    on_gpu, on_cores, rows = read_figures(BLOCKS_FILE), wide_race(), []
    for name, (width, blocks) in TIMED.items():
        for timed, run in RACE.items():
            cores = human_seconds(blocks * on_cores[timed][0]) if width == RACE_WIDTH else "not measured"
            gpu = human_seconds(blocks * on_gpu[f"{timed} | {width}"]["seconds"])
            rows.append([f"`{name}`", run, f"{BLOCKS_SAMPLES} x {BLOCKS_LENGTH}", cores, gpu])
    methods, samples = read_figures(MEASURED / "gpu.json")[DEFAULT_RUN]["methods"], DEFAULT_RUN.partition(", ")[2]
    for timed, run in ON_GPU.items():
        gpu = human_seconds(LLAMA_2_7B_BLOCKS * methods[timed]["seconds"])
        rows.append(["`meta-llama/Llama-2-7b-hf`", run, samples, "not measured", gpu])
    rows += [[f"`{name}`", "all", "", "not measured", "not measured"] for name in MODELS if name not in TIMED]
    return markdown_table(("model", "run", "sequences", "2 cores", "H100"), rows, left=(0, 1))


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
