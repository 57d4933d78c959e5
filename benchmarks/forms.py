"""The forms of a run that `python benchmarks/excess.py` measures: methods, and the default with an ingredient out or in.

None stands for a form whose settings the package no longer has: its figures stay in the tables, and it is not measured again.
"""

from __future__ import annotations

OURS = {"method": "sparsellm"}
MAIN = {
    "SparseGPT": {"method": "sparsegpt"},
    "SparseGPT, true-sequential": {"method": "sparsegpt", "true_sequential": True},
    "Swift": {"method": "swift"},
    "Swift, true-sequential": {"method": "swift", "true_sequential": True},
    "ALPS": {"method": "alps"},
    "ALPS, true-sequential": {"method": "alps", "true_sequential": True},
    "as published": {"method": "sparsellm", "as_published": True},
    "sparsellm, uniform": OURS | {"allocation": "uniform"},
    "sparsellm, shared out by error": None,
    "sparsellm": OURS,
    "sparsellm, couple model, shared out by error": None,
    "sparsellm, couple model": OURS | {"effort": "best"},
}
WITHOUT = {
    "without teacher targets": None,
    "without residual correction": None,
    "ALPS inside": {"solver": "alps"},
    "swift inside": {"solver": "swift"},
    "SparseGPT inside": {"solver": "sparsegpt"},
    "without curvature": None,
    "diagonal curvature": None,
    "feed-forward horizon": None,
    "without Gauss-Newton": {"newton": 0},
    "uniform allocation": {"allocation": "uniform"},
}
MORE = {
    "3 epochs": None,
    "1 Gauss-Newton round": {"newton": 1},
    "8 Gauss-Newton rounds": {"newton": 8},
    "couple block": None,
    "couple block, 100 steps for Gauss-Newton": None,
    "128 windows written": {"written": 128},
    "couple none, SparseGPT inside": {"couple": "none", "solver": "sparsegpt"},
    "couple none, SparseGPT inside, DLP": None,
    "couple none, swift inside, DLP": None,
    "couple none, swift inside": {"couple": "none", "solver": "swift"},
    "couple none, swift inside, uniform": {"couple": "none", "solver": "swift", "allocation": "uniform"},
    "couple none, ALPS inside, DLP": None,
    "without Gauss-Newton, swift inside": {"newton": 0, "solver": "swift"},
    "without Gauss-Newton, ALPS inside": {"newton": 0, "solver": "alps"},
    "OWL": {"allocation": "owl"},
    "DLP": None,
}
SHARED_OTHERWISE = ("DLP", "OWL", "uniform", "uniform allocation")
"""How names of forms end that share the sparsity out in a way of their own."""

WITH = (
    "thorough solver",
    "teacher targets",
    "teacher targets, residual",
    "feed-forward curvature",
    "curvature",
    "Gauss-Newton",
    "couple block",
    "allocation by error",
    "allocation",
)
INGREDIENTS = (
    {"default": OURS}
    | {f"default, {name}": None if change is None else OURS | change for name, change in (WITHOUT | MORE).items()}
    | {"default, by error": None}
    | {f"default, by error, {name}": None for name in WITHOUT | MORE if not name.endswith(SHARED_OTHERWISE)}
    | {f"{name}, true-sequential, DLP": None for name in ("SparseGPT", "Swift")}
    | {"bare": None}
    | {f"bare + {name}": None for name in WITH}
)
SUITES: dict[str, dict[str, dict | None]] = {
    "main": MAIN,
    "ingredients": INGREDIENTS,
    "windows": {label: MAIN[label] for label in ("SparseGPT", "sparsellm, shared out by error", "sparsellm")},
}
