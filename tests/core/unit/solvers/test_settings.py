"""Settings of solvers and methods that cannot be are refused as they are given, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sparsellm.errors import InvalidSetting
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.recipes.file import read_recipe
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.sparsegpt import SparseGPT

NAN, INFINITY = float("nan"), float("inf")
REFUSED: dict[type, dict[str, tuple[float, ...]]] = {
    SparseGPT: {"damping": (-0.1, NAN), "block": (0,)},
    ALPS: {
        "damping": (-0.1, NAN),
        "iterations": (0,),
        "refit_steps": (-1,),
        "penalty_growth": (0.0, -0.5, 1.01, NAN),
        "relaxation": (0.0, -0.5, 2.0, NAN),
    },
    FastADMM: {
        "damping": (-1.0, NAN),
        "steps": (0,),
        "refit_steps": (-1,),
        "penalty": (0.0, -1.0, NAN, INFINITY),
        "growth": (0.9, 0.0, NAN, INFINITY),
        "relaxation": (0.0, 2.0, NAN),
    },
    Algorithm1: {"epochs": (0,), "alpha": (0.0,), "beta": (-1.0, NAN), "ridge": (-1e-3,)},
    SparseLLM: {"rounds": (-1,)},
}


def cases() -> Iterator[tuple[type, str, float]]:
    """Every class with one setting that cannot be."""
    for kind, settings in REFUSED.items():
        yield from ((kind, name, value) for name, values in settings.items() for value in values)


@pytest.mark.parametrize(("kind", "name", "value"), [*cases()])
def test_impossible_settings_are_refused(kind: Any, name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=rf"{name}\b.*{value:g}"):
        kind(**{name: value})


@pytest.mark.parametrize("name", ["alps", "sparsellm"])
def test_a_setting_without_a_name_is_refused(name: str) -> None:
    """As a file may hold it: an empty name is false, and no name at all is none."""
    with pytest.raises(InvalidSetting, match=f"{name} has no setting ''"):
        read_recipe({"model": "demo:opt", "method": name, "settings": {"": {}}})
