"""Settings, commands and functions that earlier revisions had, and what takes their place."""

from __future__ import annotations

from typing import Any

REMOVED: dict[str, str] = {
    "methods": "The command sparsellm info lists the methods.",
    "doctor": "The command sparsellm info shows what this machine has and which choices were measured on it.",
    "compare": "The command sparsellm report A B compares runs and sweeps, as sparsellm.report([A, B]) does in Python.",
    "allocation_bounds": "A rule of `allocation` has no bounds any more: a YAML file gives layers their sparsities one by one.",
}
"""By name, a sentence on what replaces a setting, command or function. An entry stays for one release."""


def replacement(name: str) -> str | None:
    """Return what replaces something that was removed, written as an option or as in Python; None for any other name."""
    return REMOVED.get(name.lstrip("-").replace("-", "_"))


def without_removed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved recipe without those that were removed, where they are not set."""
    return {name: value for name, value in fields.items() if name not in REMOVED or value not in (None, False, 0)}
