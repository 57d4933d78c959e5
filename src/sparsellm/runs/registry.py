"""What can be chosen by name: methods, solvers, couplings, rules of allocation."""

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
"""Every layer solver by its name on the command line; each is also a layer-wise method of that name."""

METHODS = {
    "sparsellm": "every layer toward what the dense model wrote, for what that is worth further down; any solver inside",
    "alps-accurate": "ALPS with more patience: a penalty that rises half as fast, over-relaxed, and a longer fit",
    "alps": "searches mask and weights together by ADMM, then fits the weights on the mask (NeurIPS 2024)",
    "fast-admm": "the first steps of ALPS's search, for one factorisation, and a short fit",
    "sparsegpt": "removes what costs least, column by column, and lets later columns make good (ICML 2023)",
    "wanda": "keeps the largest weight times input size in each row; values unchanged (ICLR 2024)",
    "magnitude": "keeps the largest weights; needs no text",
}
"""Every method by its name on the command line, in words."""

SCOPES = ("none", "feedforward")
"""The set Omega: whose layers form one problem."""

ALLOCATIONS = ("uniform", "owl", "fisher")
"""How the total is shared among the layers; a file of YAML is the other way."""
