"""The table of every causal model type: it is what was measured, it lacks no type, and an error is never called pruned."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsellm.errors import UnsupportedModel
from sparsellm.methods import BlockResult
from tests.conftest import ROOT
from tests.core.integration.test_families import tiny

MEASURED = json.loads((ROOT / "benchmarks" / "measured" / "families.json").read_text(encoding="utf-8"))
SAMPLE = (
    "llama",
    "gpt2",
    "bloom",
    "phi3",
    "mixtral",
    "gpt_oss",
    "mamba",
    "bart",
    "deepseek_v2",
    "gemma4_text",
    "qwen2_vl",
    "git",
)
"""A type of each form: plain, transposed, fused, experts, state-space, cross-attention, latent attention, images."""


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that makes the table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("families")


def test_the_page_shows_what_was_measured(families: ModuleType) -> None:
    text = families.PAGE.read_text(encoding="utf-8")
    assert families.page(text, MEASURED) == text


def test_every_type_of_transformers_is_in_the_table(families: ModuleType) -> None:
    if version("transformers") != MEASURED["transformers"]:
        pytest.skip(f"the table is of transformers {MEASURED['transformers']}")
    assert sorted(MEASURED["types"]) == families.types()


def test_every_type_is_pruned_to_its_coverage_or_refused_in_a_sentence(families: ModuleType) -> None:
    built = {kind: found for kind, found in MEASURED["types"].items() if "not_built" not in found}
    assert len(built) > 200
    for kind, found in built.items():
        outcomes = {found[method]["outcome"] for method in families.METHODS}
        assert families.PRUNED not in outcomes or found["coverage"] >= families.MIN_COVERAGE, kind
        for method in families.METHODS:
            said = found[method].get("said", "")
            assert (found[method]["outcome"] == families.PRUNED) == (not said), kind
            if found[method]["outcome"] == families.REFUSED:
                assert said.endswith("."), f"{kind}: {said}"
                assert "Error: " not in said.split("(")[0], f"{kind}: {said}"


def wrong_zeros(*_: Any, **__: Any) -> Any:
    """A run that leaves its model dense."""
    return type("Result", (), {"model": tiny("llama")})


def raised(error: Exception, blocks: int = 0) -> Any:
    """A run that ends in an error, after so many blocks."""

    def prune(*_: Any, observe: Any, **__: Any) -> Any:
        for number in range(blocks):
            observe(BlockResult(number, "", (), (), 0.0))
        raise error

    return prune


@pytest.mark.parametrize(
    ("prune", "outcome"),
    [
        (wrong_zeros, "error"),
        (raised(KeyError("mixer.dt_proj")), "error"),
        (raised(UnsupportedModel("It has no blocks.")), "refused"),
        (raised(UnsupportedModel("It has no blocks."), blocks=1), "error"),
    ],
)
def test_an_error_is_not_called_pruned(
    prune: Any, outcome: str, families: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsellm.prune", prune)
    found = families.attempt(tmp_path, "sparsegpt", torch.zeros(1, 4, dtype=torch.long))
    assert found["outcome"] == outcome
    assert found["said"]
    row = families.rows({"some": {"known": False, "coverage": 1.0, **dict.fromkeys(families.METHODS, found)}})[-1]
    assert f"| {outcome} | {outcome} |" in row


def test_blocks_that_are_entered_otherwise_are_seen(families: ModuleType) -> None:
    """A block that is called with what the one before it has left behind is not called so on the walk."""
    model = tiny("llama")
    tokens = torch.randint(3, 250, (7, 16), generator=torch.Generator().manual_seed(0))
    assert families.strays(model, tokens) == ""
    first, second = model.model.layers
    plain, left = second.forward, []
    first.register_forward_hook(lambda module, inputs, output: left.append(output))
    second.forward = lambda hidden, *args, **words: plain(hidden + left[-1].mean(), *args, **words)
    model.model.layers.append(tiny("llama").model.layers[0])
    model.config.num_hidden_layers = 3
    assert "model.layers.2" in families.strays(model, tokens)


@pytest.mark.long
@pytest.mark.parametrize("kind", SAMPLE)
def test_types_are_pruned_as_the_table_says(kind: str, families: ModuleType) -> None:
    if version("transformers") != MEASURED["transformers"]:
        pytest.skip(f"the table is of transformers {MEASURED['transformers']}")
    ((_, found),) = families.isolated([kind], 1)
    assert {method: found[method]["outcome"] for method in families.METHODS} == {
        method: MEASURED["types"][kind][method]["outcome"] for method in families.METHODS
    }
    assert found["coverage"] == MEASURED["types"][kind]["coverage"]
