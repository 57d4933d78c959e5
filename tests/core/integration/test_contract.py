"""Solvers and methods that break a rule end the run at the layer or block, with one message and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import sparsellm
from sparsellm.errors import BrokenContract, NonFinite
from sparsellm.models.blocks import Block
from tests import wrong_solvers
from tests.conftest import ROOT

SIZE: dict[str, Any] = {"samples": 4, "sequence_length": 32}
BROKEN: list[tuple[type[wrong_solvers.Right], str, str, type[Exception]]] = [
    (wrong_solvers.RemovesNothing, "60%", "pattern 60% in", BrokenContract),
    (wrong_solvers.RemovesTooMuch, "60%", "removes more of", BrokenContract),
    (wrong_solvers.BreaksGroups, "2:4", "pattern 2:4 in", BrokenContract),
    (wrong_solvers.ChangesProblem, "60%", r"problem\.weight", BrokenContract),
    (wrong_solvers.WrongShape, "60%", "form", BrokenContract),
    (wrong_solvers.WrongDtype, "60%", "float64", BrokenContract),
]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in the default"])
@pytest.mark.parametrize(("kind", "sparsity", "rule", "error"), BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_a_solver_that_breaks_a_rule_is_named(
    kind: type[Any], sparsity: str, rule: str, error: type[Exception], inside: bool, tiny: dict[str, Path], text_file: Path
) -> None:
    """With its layer, the first one, in layer-wise pruning and inside the default method."""
    method = sparsellm.SparseLLM(solver=kind()) if inside else kind()
    with pytest.raises(error, match=rf"{kind.__name__} .*{rule}") as caught:
        sparsellm.prune(str(tiny["llama"]), method, sparsity, calibration=str(text_file), **SIZE)
    assert "model.layers.0.self_attn." in str(caught.value)


def test_a_change_of_the_statistics_is_a_change_of_the_problem(tiny: dict[str, Path], text_file: Path) -> None:
    @dataclass(frozen=True)
    class Rescales(wrong_solvers.Right):
        needs: ClassVar[type[sparsellm.TokenCount]] = sparsellm.Gram

        def solve(self, problem: Any, pattern: Any) -> Any:
            problem.inputs.view.mul_(2)
            return super().solve(problem, pattern)

    with pytest.raises(BrokenContract, match=r"problem\.inputs"):
        sparsellm.prune(str(tiny["opt"]), Rescales(), calibration=str(text_file), **SIZE)


@dataclass(frozen=True)
class Overflows(wrong_solvers.Right):
    def solve(self, problem: Any, pattern: Any) -> Any:
        return super().solve(problem, pattern) / 0


def test_a_weight_that_is_not_finite_is_named(tiny: dict[str, Path], text_file: Path) -> None:
    with pytest.raises(NonFinite, match=r"q_proj .*Overflows"):
        sparsellm.prune(str(tiny["llama"]), Overflows(), calibration=str(text_file), **SIZE)


def test_more_zeros_than_the_pattern_s_are_right_where_they_were_there(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Zeros of the dense weight, which magnitude pruning keeps, are not counted as removed."""
    most = sparsellm.prune(str(tiny["llama"]), "magnitude", "80%").save_pretrained(tmp_path / "most")
    assert sparsellm.prune(str(most), "magnitude", "30%").report.sparsity == pytest.approx(0.8, abs=1e-3)


@dataclass(frozen=True)
class Careless(sparsellm.LayerWise):
    """A method that does something else after it has pruned a block."""

    fault: str = ""

    def prune(self, block: Block, inputs: Any, plan: Any) -> Iterator[Any]:
        results = list(super().prune(block, inputs, plan))
        if self.fault == "unreported":
            results.pop()
        if self.fault == "twice":
            results.append(results[0])
        name = results[0].name.removeprefix(f"{block.name}.")
        if self.fault == "dense":
            block.write(name, torch.ones_like(block.layer(name).weight))
        if self.fault == "other":
            block.write("mlp.down_proj", 2 * block.layer("mlp.down_proj").weight)
        yield from results


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("unreported", r"reports no model\.layers\.0\.mlp\.up_proj"),
        ("twice", r"reports model\.layers\.0\.self_attn\.\w+ .*twice"),
        ("dense", r"pattern 50% in model\.layers\.0\.self_attn"),
        ("other", r"changes model\.layers\.0\.mlp\.down_proj"),
    ],
)
def test_a_method_that_breaks_a_rule_is_named(fault: str, rule: str, tiny: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"exclude": ["*.down_proj"], "include": ["*"]}
    with pytest.raises(BrokenContract, match=rf"Careless .*{rule}"):
        sparsellm.prune(str(tiny["llama"]), Careless(sparsellm.Magnitude(), fault=fault), **settings)
    assert sparsellm.prune(str(tiny["llama"]), Careless(sparsellm.Magnitude()), **settings).report.sparsity == 0.5


def test_the_command_ends_with_one_message_and_writes_nothing(tiny: dict[str, Path], tmp_path: Path) -> None:
    source = (ROOT / "tests" / "wrong_solvers.py").read_text(encoding="utf-8")
    extension = 'EXTENSION = sparsellm.Extension(methods={"nothing": "wrong:RemovesNothing"})\n'
    (tmp_path / "wrong.py").write_text(f"{source}\n\n{extension}", encoding="utf-8")
    metadata = tmp_path / "wrong-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[sparsellm.extensions]\nwrong = wrong:EXTENSION\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["prune", "demo:opt", tmp_path / "out", "--method", "nothing", "--calibration", "demo", "--samples", "2", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "sparsellm", *map(str, words)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "RemovesNothing breaks the pattern 50% in model.decoder.layers.0." in message
    assert "Traceback" not in done.stderr
    assert not [*(tmp_path / "out").rglob("*.safetensors"), *(tmp_path / "out").rglob("sparsellm.json")]
