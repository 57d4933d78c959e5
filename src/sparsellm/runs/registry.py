"""Names of methods, solvers, scopes and allocation rules."""

from __future__ import annotations

from collections.abc import Callable

from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.criteria import Magnitude, Wanda
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.sparsegpt import SparseGPT

SOLVERS: dict[str, Callable[[], LayerSolver]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "sparsegpt": SparseGPT,
    "fast-admm": FastADMM,
    "alps": ALPS,
    "alps-accurate": ALPS.accurate,
}
"""Layer solvers by name; each is also a layer-wise method of that name."""

METHODS = {
    "sparsellm": "matches layers to the dense model's outputs, weighted by their effect on the predictions; any solver inside",
    "alps-accurate": "ALPS with over-relaxation, a penalty that grows half as fast, and a longer final fit",
    "alps": "finds mask and weights together by ADMM, then refits the weights on the mask (NeurIPS 2024)",
    "fast-admm": "the first ADMM steps of ALPS with a single factorization, and a short refit",
    "sparsegpt": "removes the cheapest weights column by column and updates later columns to compensate (ICML 2023)",
    "wanda": "keeps the largest |weight| times input norm in each row, values unchanged (ICLR 2024)",
    "magnitude": "keeps the largest weights, without calibration text",
}
"""Description of each method by name, as `sparsellm methods` prints it."""

SCOPES = ("none", "feedforward")
"""Layers that are pruned as one problem: each separately, or those of a feed-forward part (the set Omega)."""

ALLOCATIONS = ("uniform", "owl", "fisher")
"""Rules that set each layer's sparsity; a YAML file may be used instead."""
