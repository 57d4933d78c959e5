"""Settings, values, commands and functions that earlier revisions had, and what takes their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparsellm.errors import nearest

REMOVED: dict[str, str] = {
    "methods": "The command sparsellm info lists the methods.",
    "doctor": "The command sparsellm info shows what this machine has and which choices were measured on it.",
    "compare": "The command sparsellm report A B compares runs and sweeps, as sparsellm.report([A, B]) does in Python.",
    "allocation_bounds": "A rule of `allocation` has no bounds any more: a YAML file gives layers their sparsities one by one.",
    "train=norms": "`train='full'` trains norms and biases with the weights, and `train='lora'` only few numbers.",
    "loss": "`scope='model'` lowers the divergence of the predictions, `scope='block'` errors of each block's outputs; "
    "SparsityCallback trains on text, in a trainer of transformers.",
    "written": "Pruning reads more text with `samples`; training generates the sequences that it needs by itself.",
}
"""By name, or by name and value of a setting, a sentence on what replaces it. An entry stays for one release."""


def replacement(name: str, value: object = None) -> str | None:
    """Return what replaces something that was removed, written as an option or as in Python; None for any other name.

    Args:
        name: A setting, command or function.
        value: A value of the setting, which alone was removed.
    """
    key = name.lstrip("-").replace("-", "_")
    return REMOVED.get(key if value is None else f"{key}={value}")


def instead(name: str, known: Iterable[str]) -> str:
    """Return what to use for an unknown name: what replaces it if it was removed, else the nearest known name."""
    return replacement(name) or nearest(name, known)


def without_removed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved recipe without those that were removed, where they ask for what a run does without them."""
    whole = "pruned" in fields and fields.get("scope") != "block"
    without = {
        "allocation_bounds": (None,),
        "loss": (None, "kl" if whole else "hidden"),
        "written": (None,) if whole else (None, 0),
    }
    return {name: value for name, value in fields.items() if value not in without.get(name, ())}


def asks_for_removed(fields: Mapping[str, Any]) -> dict[str, str]:
    """By name, the fields of a saved recipe that no recipe can have any more, each with a sentence that says so."""
    left = without_removed(fields).items()
    found = {name: (value, replacement(name) or replacement(name, value)) for name, value in left}
    return {name: f"`{name}` was {value}, which was removed. {text}" for name, (value, text) in found.items() if text}
