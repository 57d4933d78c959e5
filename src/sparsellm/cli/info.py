"""`info`: what this machine has, what was measured and chosen on it, what is missing, the methods and the extensions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import print_json, print_line, print_note, report_errors, stderr, stdout, text_table
from sparsellm.errors import InvalidSetting, plural
from sparsellm.extension import PROBLEMS, installed, named

EXTRAS = {
    "plots": "matplotlib",
    "eval": "lm-eval",
    "frame": "pandas",
    "train": "peft",
    "compressed": "compressed-tensors",
    "sentencepiece": "sentencepiece",
}
"""The extras of pyproject.toml for users, each with the package that it brings."""


Method = Annotated[str | None, typer.Argument(metavar="METHOD", help="Show a method and its settings instead.")]


def info(context: typer.Context, method: Method = None, as_json: options.JsonOption = False) -> None:
    """Show this machine, its measured choices, methods and extensions.

    Measures which implementations are faster on it.

    Example: sparsellm info
    """
    with report_errors(context):
        if method is not None:
            _print_method(options.with_plugins({"context": context, "method": method})["method"], as_json=as_json)
            return
        with nullcontext() if as_json else stderr.status("measuring the processor"):
            found = _examine()
            facts = _brought_facts(found, context)
            found |= {name: module.examine() for name, module in facts.items()}
        if as_json:
            print_json(found)
            return
        parts = _parts(found, facts)
        width = max(len(name) for title, rows in parts.items() for name in (title, *(name for name, _ in rows)))
        for number, (title, rows) in enumerate(parts.items()):
            if number:
                print_line(stdout, "")
            stdout.print(text_table([title.ljust(width), ""], rows, words=True))


def _print_method(name: str, *, as_json: bool) -> None:
    """Print a method with its settings: their defaults, and what its docstring says of them."""
    from sparsellm.recipes.registry import check_method_name, described_settings, description_of

    check_method_name(name)
    found, description = described_settings(name), description_of(name)
    if as_json:
        print_json({"method": name, "description": description, "settings": {x.name: asdict(x) for x in found}})
        return
    print_line(stdout, f"{name}: {description}.")
    print_line(stdout, "")
    rows = [[x.name, x.type, x.default, x.description] for x in found]
    stdout.print(text_table(["setting", "type", "default", ""], rows, words=True))


def _examine() -> dict[str, Any]:
    """The values that `info --json` prints: counts, bytes, bytes per second, versions; None for those that are missing."""
    import psutil
    import torch

    from sparsellm.checkpoints.machine_cache import use_cache
    from sparsellm.models.sparse_matmul import max_density
    from sparsellm.pipeline.startup import LEAST_GAIN, bf16_pass_speedup
    from sparsellm.recipes.registry import description_of, method_names
    from sparsellm.runtime import autotuning, devices
    from sparsellm.runtime.products import bf16_solver_speedup, onednn_speedup, uses_onednn

    use_cache()
    speedup = bf16_pass_speedup(torch.device("cpu"))
    memory = psutil.virtual_memory()
    accelerator = devices.accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    accelerators = [torch.device(str(accelerator), index) for index in range(count)]
    return {
        "sparsellm": _version("sparsellm"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "triton")},
        "extras": {extra: {package: _version(package)} for extra, package in EXTRAS.items()},
        "processor": platform.machine(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16": {"speedup": speedup, "used": speedup >= LEAST_GAIN},
        "float32": {"onednn_speedup": onednn_speedup(), "onednn_used": uses_onednn()},
        "solvers": {
            "bfloat16_speedup": bf16_solver_speedup(),
            "bfloat16_used": devices.multiplies_bfloat16(torch.device("cpu")),
        },
        "skipped_zeros": {"max_density": max_density()},
        "unsteady": autotuning.unsteady(),
        "memory": {"total": memory.total, "available": memory.available},
        "accelerators": [
            {"device": str(device), "name": devices.name_of(device), "available": devices.free_bytes(device)}
            for device in accelerators
        ],
        "methods": {name: description_of(name) for name in method_names()},
        "extensions": {
            x.name: {"package": x.package, "version": x.version, "brings": x.brings, "error": x.error} for x in installed()
        },
    }


def _brought_facts(own: Collection[str], context: typer.Context) -> dict[str, Any]:
    """The facts that extensions bring, by name, beside `own`; a note says what is left out."""
    before = len(PROBLEMS)
    facts = named("facts", own)
    clashes = [str(x).removesuffix(".") for x in facts.values() if isinstance(x, InvalidSetting)]
    for line in [*PROBLEMS[before:], *clashes]:
        print_note(line, context)
    return {name: module for name, module in facts.items() if not isinstance(module, InvalidSetting)}


def _parts(found: dict[str, Any], facts: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The parts of the page by title, each with its lines."""
    methods = [[name, text] for name, text in found["methods"].items()]
    parts = {"machine": _packages(found) + _machine(found), "measured choices": _choices(found), "methods": methods}
    for name, module in facts.items():
        for part, rows in module.rows(found[name]).items():
            parts[part] = parts.get(part, []) + rows
    return parts | {"extensions": [[name, _brought(entry)] for name, entry in found["extensions"].items()]}


def _brought(entry: dict[str, Any]) -> str:
    """The line of an extension: its package, unless that is sparsellm, and the names of what it brings."""
    package = "" if entry["package"] == "sparsellm" else f"{entry['package']} {entry['version']}: "
    brings = "; ".join(f"{door} {', '.join(names)}" for door, names in entry["brings"].items())
    return f"{package}{entry['error'] or brings}"


def _packages(found: dict[str, Any]) -> list[list[str]]:
    """The lines of what is installed, and of each package that is missing, with how to get it."""
    versions, commands = dict(found["packages"]), dict[str, str]()
    for extra, packages in found["extras"].items():
        versions |= packages
        commands |= dict.fromkeys(packages, f": pip install 'sparsellm[{extra}]'")
    return [
        ["sparsellm", f"{found['sparsellm']}, Python {found['python']}"],
        ["packages", ", ".join(f"{package} {number}" for package, number in versions.items() if number)],
        *(["not installed", package + commands.get(package, "")] for package, number in versions.items() if not number),
    ]


def _machine(found: dict[str, Any]) -> list[list[str]]:
    """The lines of processor, memory and devices."""
    from sparsellm.runtime.memory import human_bytes

    memory, threads = found["memory"], plural(found["threads"], "thread")
    free = f"{human_bytes(memory['total'])}, {human_bytes(memory['available'])} available"
    devices = [f"{x['device']}: {x['name']}, {human_bytes(x['available'])} available" for x in found["accelerators"]]
    return [
        ["processor", f"{found['processor']}, {plural(found['processors'], 'processor')}, {threads} in use"],
        ["memory", free],
        *(["device", line] for line in devices or ["the CPU only"]),
    ]


def _choices(found: dict[str, Any]) -> list[list[str]]:
    """The lines of what was measured, each with what was chosen."""
    passes, solvers, full = found["bfloat16"], found["solvers"], found["float32"]
    density = found["skipped_zeros"]["max_density"]
    return [
        ["bfloat16, passes", _chosen(passes["speedup"], "float32", used=passes["used"])],
        ["bfloat16, solvers", _chosen(solvers["bfloat16_speedup"], "float32", used=solvers["bfloat16_used"])],
        ["float32, oneDNN", _chosen(full["onednn_speedup"], "torch's own", used=full["onednn_used"])],
        ["zeros in products", f"skipped from {100 * (1 - density):.0f} % zeros on" if density else "not skipped"],
        *([["not kept", _under_load(found["unsteady"])]] if found["unsteady"] else []),
    ]


def _under_load(names: Sequence[str]) -> str:
    """The line of the measurements that other programs disturbed."""
    were = "was" if len(names) == 1 else "were"
    listed = " (--json lists them)" if len(names) > 2 else f": {'; '.join(names)}"
    return f"{plural(len(names), 'measurement')} {were} made under load and will be made again{listed}"


def _chosen(speedup: float, of: str, *, used: bool) -> str:
    return f"{speedup:.1f} times as fast as {of}, {'used' if used else 'not used'}"


def _version(package: str) -> str | None:
    """The version of a package: of the one that is imported, or that would be; None if it is not installed."""
    if (loaded := getattr(sys.modules.get(package), "__version__", None)) is not None:
        return str(loaded)
    try:
        return version(package)
    except PackageNotFoundError:
        return None
