"""The dtype of matrix products in passes through the blocks, chosen by measuring the device; the choice is kept by machine."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

import torch
from torch.nn.functional import linear

from sparsellm.data.paths import home
from sparsellm.models.contexts import product_dtype_context
from sparsellm.runs.preparation import Prepared
from sparsellm.runs.recipe import Recipe, RunRecipe
from sparsellm.runtime import devices

SPEEDUP = 1.5
"""Least gain in a layer's product for which `auto` takes bfloat16: all else in a block, a third of its time, gains nothing."""

NARROW = 512
"""Least width of a model that is pruned for which `auto` takes bfloat16. With `effort="fast"`, models 192 wide gain 3 % of the
time. Trainings of models of that width take half of the time."""

TOKENS, WIDTH = 1024, 1024
"""Tokens and inputs of the layer that is timed; the gain is the same from 512 inputs on (2.1 with AVX-512 BF16)."""

SECONDS = 0.5
"""Time of a measurement, after its first three rounds."""


def choose_products(recipe: RunRecipe, ready: Prepared) -> torch.dtype | None:
    """Choose the dtype of the matrix products of passes; None for the dtype that a model is computed in anyway.

    `auto` never rounds a float32 or float16 model: only a bfloat16 model on a CPU, which would be computed in float32, is
    computed with products in bfloat16, if the device is faster with them. On a GPU a model is computed in its own dtype, but
    trained in float32, so that recovery chooses there as on a CPU.
    """
    if not recipe.reads_text or recipe.in_float32:
        return None
    is_bf16, is_recovery = ready.source.dtype(recipe.dtype) is torch.bfloat16, not isinstance(recipe, Recipe)
    if is_bf16 and not is_recovery and ready.device.type != "cpu":
        return None
    if recipe.compute_dtype == "bfloat16":
        return torch.bfloat16
    wide = is_recovery or int(ready.skeleton.config.get_text_config().hidden_size) >= NARROW
    return torch.bfloat16 if is_bf16 and wide and bf16_speedup(ready.device) >= SPEEDUP else None


@cache
def bf16_speedup(device: torch.device) -> float:
    """Return how many times as fast a linear layer is with a product in bfloat16, casts included, as in float32.

    The first call on a machine measures it. Later ones, also of other processes, read the result from the user's cache.
    """
    if (folder := _cache_folder()) is None:
        return measure_speedup(device)
    file = folder / "bf16_speedup.json"
    key = f"{_processor(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    known = _read(file)
    if key not in known:
        known = _read(file) | {key: measure_speedup(device)}
        _write(file, known)
    return known[key]


@torch.no_grad()
def measure_speedup(device: torch.device) -> float:
    """Measure `bf16_speedup`: the shortest times of alternating products, since other programs only ever add to them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, WIDTH, generator=generator).to(device)
    weight = torch.randn(WIDTH, WIDTH, generator=generator).to(device)
    shortest: dict[torch.dtype | None, float] = {}
    begin = time.perf_counter()
    for number in count():
        for dtype in (None, torch.bfloat16):
            started = time.perf_counter()
            with product_dtype_context(device, dtype):
                linear(inputs, weight)
            devices.synchronize(device)
            if number:  # the first product of a process is slow
                shortest[dtype] = min(shortest.get(dtype, float("inf")), time.perf_counter() - started)
        if number > 1 and time.perf_counter() - begin > SECONDS:
            break
    return shortest[None] / shortest[torch.bfloat16]


def _processor(device: torch.device) -> str:
    """The name of a device that tells apart machines of different speed."""
    if device.type != "cpu":
        return devices.name_of(device)
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _cache_folder() -> Path | None:
    """The user's cache folder of this package; None for a user without a home folder."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "sparsellm"
    return None if (own := home()) is None else own / ".cache" / "sparsellm"


def _read(file: Path) -> dict[str, float]:
    """The measured gains by machine; empty where the file is missing or damaged."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return {str(key): float(value) for key, value in data.items() if float(value) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, gains: dict[str, float]) -> None:
    """Write gains as a whole; without effect where the folder cannot be written."""
    partial = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(gains, indent=1), encoding="utf-8")
        partial.replace(file)
