"""`inspect --expect`: every layer that should be pruned is there and has its share, and the total has a line of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import Result

from tests.conftest import extensions
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]


@pytest.fixture
def shared(tiny: dict[str, Path], tmp_path: Path, command: Command) -> Path:
    """A model of which one layer of each block loses more than the others, 70 % in all."""
    (tmp_path / "shares.yaml").write_text('"q_proj": 90%\n')
    out = tmp_path / "out"
    more = ("--sparsity", "70%", "--allocation", tmp_path / "shares.yaml")
    ran = command("prune", tiny["llama"], out, "--method", "magnitude", *more)
    assert ran.exit_code == 0, ran.stderr
    return out


def test_the_total_has_a_line_of_its_own(shared: Path, command: Command) -> None:
    """Beside a layer stands what is expected of that layer, and the share asked for beside that of all."""
    ran = command("inspect", shared, "--expect", "70%")
    assert ran.exit_code == 0, ran.stderr
    lines = ran.stdout.splitlines()
    layers = [line for line in lines if "_proj" in line]
    assert all("yes" in line and "70%" not in line for line in layers)
    assert sum("90%" in line for line in layers) == 3
    (total,) = [line for line in lines if "together" in line]
    assert total == "Layers that should be pruned: 21, with 70.00 % zeros together; 70% holds: yes."


def test_shares_and_numbers_that_are_not_finite_in_text(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """A share that a run allocated has a few digits; files keep all."""
    (tmp_path / "shares.yaml").write_text('"q_proj": 56.22897678%\n')
    words = ("--sparsity", "50%", "--allocation", tmp_path / "shares.yaml", "--quiet")
    assert command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude", *words).exit_code == 0
    ran = command("inspect", tmp_path / "out", "--expect", "50%")
    assert ran.exit_code == 0, ran.stderr
    assert "56.229%" in ran.stdout
    assert "56.22897" not in ran.stdout
    assert "56.22897678%" in (tmp_path / "out" / "sparsellm.json").read_text()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.norm.weight"][:2] = float("nan")
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert "2 numbers in 1 tensor, model.norm.weight first: NaN or infinity." in command("inspect", tmp_path / "out").stdout
    assert json.loads(command("inspect", tmp_path / "out", "--json").stdout)["not_finite"] == 2


def test_a_total_that_is_not_reached(shared: Path, command: Command) -> None:
    """Every layer has its share, and the sum is not what was asked for."""
    ran = command("inspect", shared, "--expect", "80%")
    refused(ran, "all layers together have fewer zeros than 80%")
    assert "80% holds: NO" in ran.stdout


def test_without_a_report_the_layers_have_the_sparsity_together(shared: Path, command: Command) -> None:
    """As a trainer writes a model: which sparsities were allocated to its layers is not known."""
    (shared / "sparsellm.json").unlink()
    ran = command("inspect", shared, "--expect", "70%")
    assert ran.exit_code == 0, ran.stderr
    assert "21, with 70.00 % zeros together; 70% holds: yes." in ran.stdout
    refused(command("inspect", shared, "--expect", "71%"), "all layers together have fewer zeros than 71%")


@pytest.mark.parametrize("reported", [True, False])
def test_a_missing_layer_fails(reported: bool, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Whether a report says which layers there are, or only the model's form does."""
    out = tmp_path / "out"
    assert command("prune", tiny["llama"], out, "--method", "magnitude", "--sparsity", "2:4").exit_code == 0
    if not reported:
        (out / "sparsellm.json").unlink()
    name = "model.layers.1.mlp.up_proj"
    tensors = load_file(out / "model.safetensors")
    del tensors[f"{name}.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    refused(command("inspect", out, "--expect", "2:4"), f"1 layer missing, {name} first")
    found = json.loads(command("inspect", out, "--expect", "2:4", "--json").stdout)
    assert found["missing"] == [name]
    assert found["as_expected"] is False


@extensions
@pytest.mark.parametrize(
    ("how", "integers"),
    [
        (("--sparsity", "2:4", "--values", "int4", "--method", "magnitude", "--group-size", "64"), {(4, 64)}),
        (("--sparsity", "60%", "--values", "int8", "--method", "magnitude", "--exclude", "q_proj"), {(8, 0)}),
        (("--bits", "3.0", "--method", "sparsegpt", "--samples", "8", "--sequence-length", "32"), None),
    ],
    ids=["int4", "int8", "bits"],
)
def test_integers_are_shown(
    how: tuple[str, ...], integers: set | None, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """Of a rounded folder and of its packed form, with the stored bits a weight of the report, which are those of the file."""
    out, packed = tmp_path / "out", tmp_path / "packed"
    text = ("--calibration", text_file) if "--samples" in how else ()
    ran = command("prune", tiny["llama"], out, *how, *text)
    assert ran.exit_code == 0, ran.stderr
    assert command("pack", out, packed).exit_code == 0
    report = json.loads((out / "sparsellm.json").read_text())
    wanted = {layer["name"]: layer for block in report["blocks"] for layer in block["layers"]}
    for folder in (out, packed):
        found = json.loads(command("inspect", folder, "--json").stdout)
        rounded = {layer["name"]: layer for layer in found["layers"] if layer["bits"] is not None}
        assert rounded.keys() == wanted.keys()
        for name, layer in rounded.items():
            for key in ("bits", "group_size", "bits_per_weight"):
                assert layer[key] == wanted[name][key], name
        assert integers is None or {(x["bits"], x["group_size"]) for x in rounded.values()} == integers
        assert found["bits_per_weight"] == pytest.approx(report["totals"]["bits_of_pruned_layers"])
        shown = command("inspect", folder).stdout
        assert f"layers with integers take {found['bits_per_weight']:.3f} bits a weight." in shown
        lines = [line.split() for line in shown.splitlines() if "_proj" in line]
        assert sum(f"int{x['bits']}" in line for x in rounded.values() for line in lines if x["name"] in line) == len(rounded)
        assert sum("-" in line for line in lines) == len(found["layers"]) - len(rounded)


def test_models_without_integers_have_no_such_columns(shared: Path, command: Command) -> None:
    assert "integers" not in command("inspect", shared).stdout
    assert json.loads(command("inspect", shared, "--json").stdout)["bits_per_weight"] is None
