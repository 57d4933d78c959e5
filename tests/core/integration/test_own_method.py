"""Solvers and methods as objects: of one's own, from imports of `sparsellm` alone, and the package's with other settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor
from typer.testing import Result

import sparsellm
from sparsellm.errors import BrokenContract, InvalidSetting
from tests.conftest import ROOT, extensions

SIZE = {"samples": 4, "sequence_length": 32}


@dataclass(frozen=True)
class PowerWanda:
    """Wanda with the norm to a power."""

    power: float = 1.0
    needs: ClassVar[type] = sparsellm.InputRMS

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        score = problem.weight.abs() * problem.rms**self.power
        return problem.weight * pattern.keep(score, per_row=True)


class LargestFirst:
    """A solver without statistics, and no dataclass."""

    needs = sparsellm.TokenCount

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.weight * pattern.keep(problem.weight.abs())


@dataclass(frozen=True)
class EachLayer:
    """A method that prunes like `LayerWise`."""

    solver: sparsellm.LayerSolver
    needs_dense_stream: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False

    @property
    def needs(self) -> type:
        return self.solver.needs

    def note(self, block: sparsellm.Block, plan: sparsellm.Plan) -> str:
        return ""

    def prune(
        self, block: sparsellm.Block, inputs: sparsellm.Activations, plan: sparsellm.Plan
    ) -> Iterator[sparsellm.LayerResult]:
        names = [name for name in block.layers if block.full_name(name) in plan]
        known = sparsellm.collect_statistics(block, inputs, dict.fromkeys(names, self.needs))
        for name in names:
            problem = sparsellm.problem_of(block, name, known[name])
            yield sparsellm.prune_layer(block, name, problem, solver=self.solver, plan=plan)


def weights(result: sparsellm.Result) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in result.model.state_dict().items()}


@extensions
@pytest.mark.parametrize(
    ("method", "name", "title"),
    [
        (PowerWanda(), "wanda", "powerwanda(power=1.0)"),
        (EachLayer(PowerWanda()), "wanda", "eachlayer(solver=powerwanda(power=1.0))"),
        (sparsellm.Wanda(), "wanda", "wanda"),
        (LargestFirst(), "magnitude", "largestfirst"),
        (sparsellm.SparseGPT(), "sparsegpt", "sparsegpt"),
        (sparsellm.LayerWise(sparsellm.SparseGPT()), "sparsegpt", "layerwise(solver=sparsegpt)"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_object_prunes_as_the_method_that_it_equals(
    method: Any, name: str, title: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    settings: dict[str, Any] = {"sparsity": "50%", "calibration": str(text_file), "evaluate": str(text_file), **SIZE}
    named = sparsellm.prune(str(tiny["llama"]), name, **settings)
    own = sparsellm.prune(str(tiny["llama"]), method=method, **settings)
    assert weights(own) == weights(named)
    kind = type(method)
    assert own.report.recipe.to_dict()["source"].partition(" ")[0] == f"{kind.__module__}:{kind.__name__}"
    assert f"pruned by {title}, 50 % removed" in str(own.report)
    assert sparsellm.plan(str(tiny["llama"]), method=method, **settings).fits
    out = own.save_pretrained(tmp_path / "out")
    assert title in (out / "README.md").read_text(encoding="utf-8")
    sparsellm.verify(out)
    page = sparsellm.report(out, tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"# in Python; method is {title}, of {kind.__module__}:{kind.__name__}" in page
    done = command("prune", tmp_path / "model", tmp_path / "again", "--config", out)
    assert f"an object of {kind.__module__}:{kind.__name__}" in done.stderr


def test_an_object_has_its_settings(tiny: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match=r"`settings` .*LargestFirst"):
        sparsellm.prune(str(tiny["llama"]), LargestFirst(), settings={"rounds": 0})


def test_a_solver_without_statistics_needs_no_text(tiny: dict[str, Path]) -> None:
    assert sparsellm.prune(str(tiny["llama"]), LargestFirst(), "2:4").report.sparsity == 0.5
    with pytest.raises(InvalidSetting, match=r"powerwanda .*calibration"):
        sparsellm.prune(str(tiny["llama"]), PowerWanda())


@extensions
@pytest.mark.parametrize(
    "settings",
    [
        {"keep_zeros": True},
        {"values": "int8"},
        pytest.param({"bits": 3.0}, marks=pytest.mark.long),
        {"allocation": "fisher"},
        {"allocation": "owl"},
        {"compute_dtype": "float32"},
    ],
    ids=str,
)
def test_settings_of_layers_go_with_a_solver(settings: dict[str, Any], tiny: dict[str, Path], text_file: Path) -> None:
    common: dict[str, Any] = {"calibration": str(text_file), **SIZE, **settings}
    results = [sparsellm.prune(str(tiny["llama"]), method, **common) for method in (PowerWanda(), "wanda")]
    assert weights(results[0]) == weights(results[1])


@dataclass(frozen=True)
class Refilling(LargestFirst):
    """A solver that gives values to weights that were zero."""

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return (problem.weight + 1) * pattern.keep(-problem.weight.abs())


def test_a_solver_that_does_not_keep_zeros_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    half = sparsellm.prune(str(tiny["llama"]), "magnitude", "50%").save_pretrained(tmp_path / "half")
    assert sparsellm.prune(str(half), Refilling(), "60%").report.sparsity == pytest.approx(0.6, abs=1e-3)
    with pytest.raises(BrokenContract, match=r"Refilling .*q_proj .*`keep_zeros`"):
        sparsellm.prune(str(half), Refilling(), "60%", keep_zeros=True)


def test_the_package_s_methods_are_objects_too(tiny: dict[str, Path], text_file: Path) -> None:
    settings: dict[str, Any] = {"calibration": str(text_file), "sparsity": ["50%", "60%"], "allocation": "fisher", **SIZE}
    method = sparsellm.SparseLLM(solver=PowerWanda())
    results = sparsellm.prune(str(tiny["llama"]), method, **settings)
    assert [round(x.report.sparsity, 2) for x in results] == [0.5, 0.6]


@dataclass(frozen=True)
class NeedsNothing(LargestFirst):
    needs: ClassVar[Any] = None


@extensions
@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (PowerWanda, {}, "`method`.*the class PowerWanda"),
        (3, {}, "`method`.*sparsellm, .*int"),
        (None, {}, "`method`.*NoneType"),
        (NeedsNothing(), {}, r"NeedsNothing\.needs.*None"),
        (PowerWanda(), {"effort": "fast"}, "`effort`.*sparsellm.*powerwanda"),
        (EachLayer(PowerWanda()), {"keep_zeros": True}, "`keep_zeros`.*eachlayer"),
        (EachLayer(PowerWanda()), {"bits": 3.0}, "`bits`.*eachlayer"),
        ("wnada", {}, "`method`.*'wnada'"),
    ],
)
def test_what_is_no_method_is_told(method: Any, settings: dict[str, Any], message: str, tiny: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match=message):
        sparsellm.prune(str(tiny["llama"]), method=method, calibration="demo", **settings)


def test_the_page_on_own_methods_imports_from_the_package_alone() -> None:
    page = (ROOT / "docs" / "build-on-sparsellm.md").read_text(encoding="utf-8")
    modules = set()
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            modules |= {x.name for x in node.names} if isinstance(node, ast.Import) else set()
            modules |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    ours = {"sparsellm", "sparsellm.methods", "sparsellm.testing"}
    assert modules == ours | {"torch", "dataclasses", "typing", "collections.abc", "re"}
