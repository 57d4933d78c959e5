"""The forms of a run that `python benchmarks/excess.py` measures: methods, and the default with an ingredient out or in.

None stands for a form whose settings the package no longer has: its figures stay in the tables, and it is not measured again.
"""

from __future__ import annotations

OURS = {"method": "sparsellm"}
MAIN = {
    "SparseGPT": {"method": "sparsegpt"},
    "SparseGPT, true-sequential": {"method": "sparsegpt", "settings": {"true_sequential": True}},
    "fast-admm": {"method": "fast-admm"},
    "fast-admm, true-sequential": {"method": "fast-admm", "settings": {"true_sequential": True}},
    "ALPS": {"method": "alps"},
    "ALPS, true-sequential": {"method": "alps", "settings": {"true_sequential": True}},
    "Algorithm 1": {"method": "algorithm1"},
    "sparsellm, uniform": OURS | {"allocation": "uniform"},
    "sparsellm, shared out by error": None,
    "sparsellm": OURS,
    "sparsellm, scope model, shared out by error": None,
    "sparsellm, scope model": OURS | {"effort": "best"},
}
WITHOUT = {
    "without teacher targets": None,
    "without residual correction": None,
    "ALPS inside": {"settings": {"solver": "alps"}},
    "fast-admm inside": {"settings": {"solver": "fast-admm"}},
    "SparseGPT inside": {"settings": {"solver": "sparsegpt"}},
    "without curvature": None,
    "diagonal curvature": None,
    "feed-forward horizon": None,
    "without Gauss-Newton": {"settings": {"rounds": 0}},
    "uniform allocation": {"allocation": "uniform"},
}
MORE = {
    "3 epochs": None,
    "1 Gauss-Newton round": {"settings": {"rounds": 1}},
    "8 Gauss-Newton rounds": {"settings": {"rounds": 8}},
    "scope block": None,
    "scope block, 100 steps for Gauss-Newton": None,
    "128 windows written": None,
    "scope none, SparseGPT inside": {"settings": {"scope": "none", "solver": "sparsegpt"}},
    "scope none, SparseGPT inside, DLP": None,
    "scope none, fast-admm inside, DLP": None,
    "scope none, fast-admm inside": {"settings": {"scope": "none", "solver": "fast-admm"}},
    "scope none, fast-admm inside, uniform": {"settings": {"scope": "none", "solver": "fast-admm"}, "allocation": "uniform"},
    "scope none, ALPS inside, DLP": None,
    "without Gauss-Newton, fast-admm inside": {"settings": {"rounds": 0, "solver": "fast-admm"}},
    "without Gauss-Newton, ALPS inside": {"settings": {"rounds": 0, "solver": "alps"}},
    "OWL": {"allocation": "owl"},
    "DLP": None,
}
SHARED_OTHERWISE = ("DLP", "OWL", "uniform", "uniform allocation")
"""How names of forms end that share the sparsity out in a way of their own."""

WITH = (
    "alps-accurate solver",
    "teacher targets",
    "teacher targets, residual",
    "feed-forward curvature",
    "curvature",
    "Gauss-Newton",
    "scope block",
    "allocation by error",
    "allocation",
)
INGREDIENTS = (
    {"default": OURS}
    | {f"default, {name}": None if change is None else OURS | change for name, change in (WITHOUT | MORE).items()}
    | {"default, by error": None}
    | {f"default, by error, {name}": None for name in WITHOUT | MORE if not name.endswith(SHARED_OTHERWISE)}
    | {f"{name}, true-sequential, DLP": None for name in ("SparseGPT", "fast-admm")}
    | {"bare": None}
    | {f"bare + {name}": None for name in WITH}
)
EFFORTS = {"SparseGPT, with the efforts": {"method": "sparsegpt"}} | {
    f"effort {effort}": OURS | {"effort": effort} for effort in ("fast", "standard", "best")
}
"""Three efforts, and SparseGPT measured in the same session, so that the times compare."""

SUITES: dict[str, dict[str, dict | None]] = {
    "main": MAIN,
    "efforts": EFFORTS,
    "ingredients": INGREDIENTS,
}
