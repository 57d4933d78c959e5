"""`doctor`: what this machine has for pruning and for running packed models, and how to get what is missing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import print_json, report_errors, show, stderr, stdout, table
from sparsellm.errors import plural

NO_KERNELS = (
    "not compiled, so packed models run slower than dense ones.\n"
    "Install a C compiler (gcc or clang), then sparsellm or its clone again:\n"
    "pip install --force-reinstall --no-deps --no-cache-dir sparsellm"
)
"""pip would install a wheel that it built without a compiler again, if it kept one."""

EXTRAS = {
    "plots": "matplotlib",
    "eval": "lm-eval",
    "frame": "pandas",
    "train": "peft",
    "compressed": "compressed-tensors",
    "sentencepiece": "sentencepiece",
}
"""The extras of pyproject.toml for users, each with the package that it brings."""


def doctor(context: typer.Context, as_json: options.Json = False) -> None:
    """Show what this machine has, and what is missing.

    Kernels, processors, memory, devices and packages. Measures how fast memory is read,
    since a dense model reads every weight for each token.

    Example: sparsellm doctor
    """
    with report_errors(context):
        if as_json:
            print_json(_examine())
            return
        with stderr.status("measuring the processor and the memory bandwidth"):
            found = _examine()
        show(stdout, table(["this machine", ""], _rows(found), words=True))


def _examine() -> dict[str, Any]:
    """What `doctor --json` prints: counts, bytes, bytes per second, versions; None for what is missing."""
    import psutil
    import torch

    from sparsellm.models.sparse_matmul import max_density
    from sparsellm.runs.compute_dtype import SPEEDUP, bf16_speedup
    from sparsellm.runs.machine_cache import use_cache
    from sparsellm.runtime import alternatives, devices
    from sparsellm.runtime.products import bf16_matmul_speedup, onednn_speedup, uses_onednn
    from sparsellm.sparse import kernels, memory_reads

    use_cache()
    speedup = bf16_speedup(torch.device("cpu"))
    memory = psutil.virtual_memory()
    accelerator = devices.accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    accelerators = [torch.device(str(accelerator), index) for index in range(count)]
    return {
        "sparsellm": _version("sparsellm"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "triton")},
        "extras": {extra: {package: _version(package)} for extra, package in EXTRAS.items()},
        "kernels": {"in_use": kernels.available(), "instruction_sets": kernels.instruction_sets()},
        "processor": platform.machine(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16": {"speedup": speedup, "used": speedup >= SPEEDUP},
        "float32": {"onednn_speedup": onednn_speedup(), "onednn_used": uses_onednn()},
        "solvers": {
            "bfloat16_speedup": bf16_matmul_speedup(),
            "bfloat16_used": devices.multiplies_bfloat16(torch.device("cpu")),
        },
        "skipped_zeros": {"max_density": max_density()},
        "packed": {"tokens": kernels.most_tokens(torch.bfloat16) if kernels.available() else 0},
        "unsteady": alternatives.unsteady(),
        "memory": {"total": memory.total, "available": memory.available, "bandwidth": memory_reads.stream_bandwidth()},
        "accelerators": [
            {"device": str(device), "name": devices.name_of(device), "available": devices.free_bytes(device)}
            for device in accelerators
        ],
    }


def _used(used: bool) -> str:
    return "used" if used else "not used"


def _rows(found: dict[str, Any]) -> list[list[str]]:
    """The lines of the table."""
    from sparsellm.runtime.memory import human_bytes

    present, memory, half = found["kernels"], found["memory"], found["bfloat16"]
    others = ", ".join(name for name in present["instruction_sets"] if name != present["in_use"])
    threads = plural(found["threads"], "thread")
    full, solvers, density = found["float32"], found["solvers"], found["skipped_zeros"]["max_density"]
    faster = f"oneDNN is {full['onednn_speedup']:.1f} times as fast as torch's, "
    rows = [
        ["sparsellm", f"{found['sparsellm']}, Python {found['python']}"],
        ["kernels", f"{present['in_use']} in use; also here: {others or 'no other'}" if present["in_use"] else NO_KERNELS],
        ["processor", f"{found['processor']}, {plural(found['processors'], 'processor')}, {threads} in use"],
        ["bfloat16", f"products are {half['speedup']:.1f} times as fast as in float32, {_used(half['used'])}"],
        [
            "solvers",
            f"products in bfloat16 are {solvers['bfloat16_speedup']:.1f} times as fast, {_used(solvers['bfloat16_used'])}",
        ],
        ["float32", faster + _used(full["onednn_used"])],
        [
            "pruned weights",
            f"products skip zeros from {100 * (1 - density):.0f} % zeros on" if density else "no zeros are skipped",
        ],
        *([["packed weights", f"kernels multiply up to {found['packed']['tokens']} tokens"]] if present["in_use"] else []),
        *(["measured", f"{name}, under load: not kept"] for name in found["unsteady"]),
        ["memory", f"{human_bytes(memory['total'])}, {human_bytes(memory['available'])} available"],
        ["bandwidth", f"{memory['bandwidth'] / 1e9:.1f} GB/s, read by {threads}"],
    ]
    devices = [f"{x['device']}: {x['name']}, {human_bytes(x['available'])} available" for x in found["accelerators"]]
    rows += [["devices", line] for line in devices or ["the CPU only"]]
    rows += [[name, number or "not installed"] for name, number in found["packages"].items()]
    for extra, packages in found["extras"].items():
        [(package, number)] = packages.items()
        rows.append([package, number or f"not installed: pip install 'sparsellm[{extra}]'"])
    return rows


def _version(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
