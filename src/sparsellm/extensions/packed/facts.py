"""Facts on this machine for `sparsellm info`: the kernels of packed models, and how fast memory is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsellm.errors import plural
from sparsellm.extensions.packed.formats import kernel_library, kernels

NO_KERNELS = (
    "not compiled, so packed models run slower than dense ones.\n"
    "Install a C compiler (gcc or clang), then sparsellm or its clone again:\n"
    "pip install --force-reinstall --no-deps --no-cache-dir sparsellm"
)
"""pip would install a wheel that it built without a compiler again, if it kept one."""


def examine() -> dict[str, Any]:
    """The entry of `sparsellm info --json`: instruction sets, numbers of tokens that kernels multiply, bytes per second."""
    return {
        "kernels": {"in_use": kernels.instruction_set(), "instruction_sets": kernels.instruction_sets()},
        "tokens": [count for count in kernels.PACKED_TOKENS if kernels.is_faster(count, torch.bfloat16)],
        "dense_tokens": [count for count in kernels.DENSE_TOKENS if kernels.is_faster_dense(count)],
        "least_for_threads": kernels.least_for_threads(),
        "bandwidth": kernel_library.stream_bandwidth(),
    }


def rows(found: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The lines of these entries by the title of their part."""
    used, threads = found["kernels"]["in_use"], torch.get_num_threads()
    others = ", ".join(name for name in found["kernels"]["instruction_sets"] if name != used)
    least = float(f"{max(found['least_for_threads'], 0):.2g}")  # two digits are more than it is known to
    machine = [
        ["memory is read", f"at {found['bandwidth'] / 1e9:.1f} GB/s; a dense model reads every weight for each token"],
        ["kernels", f"{used} in use; also here: {others or 'no other'}" if used else NO_KERNELS],
    ]
    if not used:
        return {"machine": machine}
    choices = [
        ["packed weights", f"multiplied by kernels for {_counted(found['tokens'])}"],
        ["dense heads", f"multiplied by kernels for {_counted(found['dense_tokens'])}"],
    ]
    if threads > 1:
        choices.append(["threads of kernels", f"{plural(threads, 'thread')} for matrices of {least:,.0f} weights or more"])
    return {"machine": machine, "measured choices": choices}


def _counted(counts: Sequence[int]) -> str:
    """Numbers of tokens in words."""
    return f"{', '.join(map(str, counts)) or 'no'} tokens"
