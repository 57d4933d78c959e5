"""What one block takes at widths that no model here has, counted, and on a GPU: a table of docs/results.md.

    python benchmarks/width.py measure          # this machine's rates; on a machine with a GPU, the seconds there
    python benchmarks/width.py table

The shapes are those of Llama models with one block, and the samples those of the race of TinyLlama's shape (`speed.py`). The
operations are the ones that `sparsellm plan` counts. Seconds on this machine are those of the race, times the ratio of planned
times: a count divided by the rate of each kind of operation. On a GPU the runs are those of the race, of random weights.
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
    write_figures,
    write_random_model,
)
from speed_tables import wide_race
from transformers import LlamaConfig

import sparsellm
from sparsellm.pipeline.costs import BlockShapes, Cost, block_cost, rates
from sparsellm.pipeline.events import LOADING, Stage
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.recipe_file import read_recipe
from sparsellm.pipeline.recipe_methods import method_of
from sparsellm.solvers.patterns import parse_pattern

FILE, GPU_FILE = MEASURED / "width.json", MEASURED / "width-gpu.json"

SHAPES = {2048: (5632, 256), 4096: (14336, 1024), 8192: (28672, 1024)}
"""By width, the hidden signals of the feed-forward part and the outputs of keys and values: TinyLlama, Llama 3 8B and 70B."""

METHODS: dict[str, dict[str, Any]] = {
    "SparseGPT": {"method": "sparsegpt"},
    "default, scope none, fast-admm inside": {"effort": "fast"},
    "default": {},
}
"""Settings by the names of the race."""

SAMPLES, LENGTH = 16, 512

H100 = 67e12
"""Float32 operations a second in an H100's data sheet (SXM, without tensor cores)."""


def shapes_of(width: int) -> BlockShapes:
    """One block of a Llama with bfloat16 weights that is pruned on the CPU."""
    hidden, keys = SHAPES[width]
    layers = [(width, width), (keys, width), (keys, width), (width, width), (hidden, width), (hidden, width), (width, hidden)]
    parameters = sum(rows * columns for rows, columns in layers)
    return BlockShapes(
        depth=1,
        vocabulary=32_000,
        stored=2,
        itemsize=4,
        layers=layers,
        inputs=[width, width, width, hidden],
        parts=1,
        projections=2,
        width=width,
        hidden=hidden,
        share=1.0,
        parameters=parameters,
        active=parameters,
        tokens=SAMPLES * LENGTH,
        length=LENGTH,
        batch=8 * LENGTH,
        pattern=parse_pattern("70%"),
    )


def cost_of(name: str, width: int) -> Cost:
    """What pruning such a block by a method takes."""
    recipe = read_recipe({"model": "demo:llama", "sparsity": "70%", "calibration": "demo", **METHODS[name]})
    return block_cost(method_of(recipe, 1), shapes_of(width))


def measure() -> None:
    """Measure the rates of this processor, or if there is a GPU, the seconds of every run on it."""
    if torch.cuda.is_available():
        measure_on_gpu()
    else:
        write_figures(FILE, read_figures(FILE) | {"rates": rates(torch.device("cpu"), 5.0).tolist()})


def measure_on_gpu() -> None:
    """Measure the seconds of pruning a block by each method, without opening and loading, and the GPU's peak memory.

    Widths of which every figure is known are left out.
    """
    device, machine = require_gpu()
    known = read_figures(GPU_FILE)
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
                    record(GPU_FILE, f"{name} | {width}", figures, machine=machine)


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
    """Counts by method and width, and seconds where they were measured or follow from these."""
    speed, race, rows, on_gpu = torch.tensor(read_figures(FILE)["rates"]), wide_race(), [], read_figures(GPU_FILE)
    for name in METHODS:
        planned = {width: float((torch.from_numpy(cost_of(name, width).work) / speed).sum()) for width in SHAPES}
        for width in SHAPES:
            of_solves, of_layers, factors, spectra, _ = cost_of(name, width).work
            products = of_solves + of_layers
            seconds = race[name][0] * planned[width] / planned[min(SHAPES)]
            counts = [f"{count / 1e12:.1f}" for count in (products, factors, spectra)]
            measured = on_gpu.get(f"{name} | {width}")
            gpu = ["", ""] if measured is None else [f"{measured['seconds']:.1f}", memory_of(measured)]
            rows.append([race[name][1], str(width), *counts, f"{seconds:,.0f}", f"{(products + factors) / H100:.1f}", *gpu])
    head = ["", "width", "products, TFLOP", "factorizations", "eigendecompositions", "seconds here"]
    return markdown_table([*head, "seconds, H100's peak", "seconds, H100", "its memory"], rows)


def memory_of(measured: dict[str, float]) -> str:
    """The peak of the GPU's memory, and where it is known, the peak that was planned."""
    planned = f" ({measured['planned'] / 1e9:.1f} planned)" if "planned" in measured else ""
    return f"{measured['memory'] / 1e9:.1f} GB{planned}"


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
