"""What one block takes on a GPU, at widths that no model here has: a table of docs/results.md.

    python benchmarks/width.py measure          # on a machine with a GPU
    python benchmarks/width.py table

The shapes are those of Llama models with one block of random weights. The samples and the runs are those of the race of
TinyLlama's shape (`speed.py`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import speed
import torch
from clock import now
from measuring import (
    MEASURED,
    markdown_table,
    measure_or_show,
    read_figures,
    record,
    require_gpu,
    write_random_model,
)
from speed_tables import wide_race
from transformers import LlamaConfig

import sparsellm
from sparsellm.observers.events import LOADING, Stage
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe

FILE = MEASURED / "width-gpu.json"

SHAPES = {2048: (5632, 256), 4096: (14336, 1024), 8192: (28672, 1024)}
"""By width, the hidden signals of the feed-forward part and the outputs of keys and values: TinyLlama, Llama 3 8B and 70B."""

METHODS = ("SparseGPT", "default, scope none, fast-admm inside", "default")
"""By the names of the race."""

SAMPLES, LENGTH = 16, 512


def measure() -> None:
    """Measure the seconds of pruning a block by each method, without opening and loading, and the GPU's peak memory.

    Widths of which every figure is known are left out.
    """
    device, machine = require_gpu()
    known = read_figures(FILE)
    for width, (hidden, keys) in reversed(SHAPES.items()):
        if all("planned" in known.get(f"{name} | {width}", ()) for name in METHODS):
            continue
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=1,
            num_attention_heads=width // 128,
            num_key_value_heads=keys // 128,
            max_position_embeddings=2048,
        )
        with tempfile.TemporaryDirectory() as folder:
            write_random_model(Path(folder, "model"), config)
            for number, name in enumerate(("SparseGPT", *METHODS)):  # the first run warms up
                recipe = {"model": f"{folder}/model", **speed.settings_of(speed.METHODS[name], SAMPLES, LENGTH)}
                figures = seconds_on(device, recipe)
                if number:
                    planned = sparsellm.plan(**recipe, device=str(device)).peak.data_bytes
                    figures["planned"] = float(planned)
                    record(FILE, f"{name} | {width}", figures, machine=machine)


def seconds_on(device: torch.device, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds from the loaded model to the pruned one, and the peak of the GPU's memory."""
    stage, started = "", now(device)

    def observe(event: Any) -> None:
        nonlocal stage, started
        if isinstance(event, Stage):
            if stage == LOADING:
                started = now(device)
            stage = event.name

    torch.cuda.reset_peak_memory_stats(device)
    prune_run(read_recipe(settings | {"device": str(device)}), observe)
    return {"seconds": now(device) - started, "memory": float(torch.cuda.max_memory_allocated(device))}


def table() -> list[str]:
    """Seconds and memory by method and width, where they were measured."""
    race, known, rows = wide_race(), read_figures(FILE), []
    for name in METHODS:
        for width in SHAPES:
            if measured := known.get(f"{name} | {width}"):
                rows.append([race[name][1], str(width), f"{measured['seconds']:.1f}", memory_of(measured)])
    return markdown_table(["", "width", "seconds", "peak memory"], rows)


def memory_of(measured: dict[str, float]) -> str:
    """The peak of the GPU's memory, and where it is known, the peak that was planned."""
    planned = f" ({measured['planned'] / 1e9:.1f} planned)" if "planned" in measured else ""
    return f"{measured['memory'] / 1e9:.1f} GB{planned}"


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
