"""The forms of a run that `python benchmarks/excess.py` measures: methods, and the default with an ingredient out or in."""

from __future__ import annotations

OURS = {"method": "sparsellm"}
BY_ERROR = OURS | {"allocation": "error"}
BARE = OURS | {
    "solver": "alps",
    "targets": "own",
    "residual": False,
    "curvature": "none",
    "newton": 0,
    "allocation": "uniform",
}
"""The default with every ingredient off: ALPS, layer by layer in running order."""

MAIN = {
    "SparseGPT": {"method": "sparsegpt"},
    "SparseGPT, true-sequential": {"method": "sparsegpt", "true_sequential": True},
    "Swift": {"method": "swift"},
    "Swift, true-sequential": {"method": "swift", "true_sequential": True},
    "ALPS": {"method": "alps"},
    "ALPS, true-sequential": {"method": "alps", "true_sequential": True},
    "as published": {"method": "sparsellm", "as_published": True},
    "sparsellm, uniform": OURS | {"allocation": "uniform"},
    "sparsellm, shared out by error": BY_ERROR,
    "sparsellm": OURS,
}
WITHOUT = {
    "without teacher targets": {"targets": "own"},
    "without residual correction": {"residual": False},
    "ALPS inside": {"solver": "alps"},
    "swift inside": {"solver": "swift"},
    "SparseGPT inside": {"solver": "sparsegpt"},
    "without curvature": {"curvature": "none"},
    "diagonal curvature": {"curvature": "diagonal"},
    "feed-forward horizon": {"horizon": "feedforward"},
    "without Gauss-Newton": {"newton": 0},
    "uniform allocation": {"allocation": "uniform"},
}
MORE = {
    "3 epochs": {"epochs": 3},
    "1 Gauss-Newton round": {"newton": 1},
    "8 Gauss-Newton rounds": {"newton": 8},
    "128 windows written": {"written": 128},
    "couple none, SparseGPT inside": {"couple": "none", "solver": "sparsegpt"},
    "couple none, SparseGPT inside, DLP": {"couple": "none", "solver": "sparsegpt", "allocation": "dlp"},
    "couple none, swift inside, DLP": {"couple": "none", "solver": "swift", "allocation": "dlp"},
    "couple none, swift inside": {"couple": "none", "solver": "swift"},
    "couple none, swift inside, uniform": {"couple": "none", "solver": "swift", "allocation": "uniform"},
    "couple none, ALPS inside, DLP": {"couple": "none", "solver": "alps", "allocation": "dlp"},
    "without Gauss-Newton, swift inside": {"newton": 0, "solver": "swift"},
    "without Gauss-Newton, ALPS inside": {"newton": 0, "solver": "alps"},
    "OWL": {"allocation": "owl"},
    "DLP": {"allocation": "dlp"},
}
WITH = {
    "thorough solver": {"solver": "thorough"},
    "teacher targets": {"targets": "teacher"},
    "teacher targets, residual": {"targets": "teacher", "residual": True},
    "feed-forward curvature": {"curvature": "kronecker", "horizon": "feedforward"},
    "curvature": {"curvature": "kronecker"},
    "Gauss-Newton": {"newton": 1},
    "allocation by error": {"allocation": "error"},
    "allocation": {"allocation": "fisher"},
}
INGREDIENTS = (
    {"default": OURS}
    | {f"default, {name}": OURS | change for name, change in (WITHOUT | MORE).items()}
    | {"default, by error": BY_ERROR}
    | {
        f"default, by error, {name}": BY_ERROR | change
        for name, change in (WITHOUT | MORE).items()
        if "allocation" not in change
    }
    | {
        f"{name}, true-sequential, DLP": {"method": method, "true_sequential": True, "allocation": "dlp"}
        for name, method in (("SparseGPT", "sparsegpt"), ("Swift", "swift"))
    }
    | {"bare": BARE}
    | {f"bare + {name}": BARE | change for name, change in WITH.items()}
)
SUITES: dict[str, dict[str, dict]] = {
    "main": MAIN,
    "ingredients": INGREDIENTS,
    "windows": {label: MAIN[label] for label in ("SparseGPT", "sparsellm, shared out by error", "sparsellm")},
}
