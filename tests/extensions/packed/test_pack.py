"""`pack` and `unpack`: every tensor and file comes back, and other commands know packed models."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting
from tests.conftest import long_unless, report_of
from tests.outputs import OUTPUTS, same_bits, tensors_of

Command = Callable[..., Result]


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", [long_unless(name in ("opt", "streamed", "experts"), name) for name in OUTPUTS])
def test_every_file_comes_back(name: str, archive: bool, outputs: dict[str, Path], tmp_path: Path) -> None:
    """Biases, tied heads, several files, experts and fused layers: packed, verified, and unpacked to the same bytes."""
    model = outputs[name]
    result = sparsellm.pack(model, tmp_path / "packed", archive=archive)
    assert result.packed_bytes < result.dense_bytes
    assert len(result.packed) > 3
    assert all(matrix.packed_bytes < matrix.dense_bytes for matrix in result.packed)
    files = [file for folder in (model, tmp_path / "packed") for file in sorted(folder.glob("*.safetensors"))]
    assert (result.dense_bytes, result.packed_bytes) == tuple(
        sum(file.stat().st_size for file in files if file.parent == folder) for folder in (model, tmp_path / "packed")
    )
    verified = sparsellm.verify(tmp_path / "packed")
    assert verified.tensors == len(tensors_of(model))
    assert not list(tmp_path.glob("packed/*.partial"))
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    assert same_bits(tensors_of(model), tensors_of(tmp_path / "back"))
    names = {file.name for file in model.iterdir()}
    assert names == {file.name for file in (tmp_path / "back").iterdir()}
    weights = {file.name for file in model.glob("*.safetensors*")} | {"sparsellm.json"}
    assert [x for x in names - weights if not filecmp.cmp(model / x, tmp_path / "back" / x, shallow=False)] == []
    assert sparsellm.verify(tmp_path / "back").tensors == verified.tensors
    assert report_of(tmp_path / "back")["blocks"] == report_of(model)["blocks"]


def test_packed_files_are_what_the_documentation_says(packed: Path, outputs: dict[str, Path]) -> None:
    """Configuration, metadata and names; the embeddings, which are dense, stay tensors as they were."""
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "sparsellm", "version": 1, "form": "plain"}
    dense = tensors_of(outputs["opt"])
    with safe_open(packed / "model.safetensors", "pt") as file:
        entries = json.loads(file.metadata()["sparsellm"])
        names = set(file.keys())
        weight = "model.decoder.layers.0.fc1.weight"
        assert entries[weight] == {"shape": [64, 32], "dtype": "bfloat16", "sha256": entries[weight]["sha256"]}
        assert file.get_tensor(weight).shape == (int((dense[weight] != 0).sum()),)
        assert {f"{weight}_mask", f"{weight}_codes", f"{weight}_dictionary"} <= names
        table = "model.decoder.embed_tokens.weight"
        assert table not in entries
        assert torch.equal(file.get_tensor(table), dense[table])
    assert set(entries) == {name for name, x in dense.items() if (x == 0).float().mean() > 0.1 and x.ndim == 2}


def test_report_and_card_say_the_sizes(packed: Path, outputs: dict[str, Path]) -> None:
    """The report has the size of every matrix, and the card says that the zeros are not stored and how to load the model."""
    packing = report_of(packed)["packing"]
    assert packing["packed_bytes"] == (packed / "model.safetensors").stat().st_size
    assert packing["form"] == "plain"
    matrices = {matrix["name"]: matrix for matrix in packing["matrices"]}
    fc1 = matrices["model.decoder.layers.0.fc1.weight"]
    assert (fc1["zeros"], fc1["dense_bytes"], fc1["packed"]) == (1024, 64 * 32 * 2, True)
    assert not matrices["model.decoder.embed_tokens.weight"]["packed"]
    card = (packed / "README.md").read_text()
    assert "The zeros are not stored" in card
    assert "call `sparsellm.register()` first" in card
    assert "stored as ordinary numbers" not in card
    assert "```python\nimport sparsellm\n\nsparsellm.register()\n\nfrom transformers import" in card
    assert "stored as ordinary numbers" in (outputs["opt"] / "README.md").read_text()


def test_inspect_counts_the_zeros_of_a_packed_model(packed: Path, outputs: dict[str, Path], tiny: dict[str, Path]) -> None:
    """The same zeros as in the model that was packed, and the same differences from the dense one."""
    here, there = sparsellm.inspect(packed, tiny["opt"], "50%"), sparsellm.inspect(outputs["opt"], tiny["opt"], "50%")
    assert here.as_expected
    assert here.packed.startswith("Packed (plain form): ")
    assert there.packed == ""
    assert (here.layers, here.zeros, here.changed, here.alike) == (there.layers, there.zeros, there.changed, there.alike)
    assert not sparsellm.inspect(packed, outputs["opt"]).changed
    assert sparsellm.verify(packed, tiny["opt"]).against == str(tiny["opt"])


def test_models_of_other_software_are_packed(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A folder without a report, weights in a .bin file, -0.0 where weights were removed, and files of other formats."""
    folder = tmp_path / "foreign"
    shutil.copytree(tiny["llama"], folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "layers" in name:
            tensors[name] = tensor * (tensor.abs() > tensor.abs().median())
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"x")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    with pytest.raises(InvalidSetting, match="`positive_zeros=True`"):
        sparsellm.pack(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    kept = sparsellm.pack(folder, tmp_path / "kept", allow_dense=True)
    assert sum(matrix.negative_zeros for matrix in kept.packed) > 1000
    sparsellm.unpack(tmp_path / "kept", tmp_path / "same")
    assert same_bits(tensors_of(tmp_path / "same"), tensors)
    result = sparsellm.pack(folder, tmp_path / "packed", positive_zeros=True)
    assert result.skipped == ("model.gguf",)
    assert result.bits < kept.bits - 5
    card = (tmp_path / "packed" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n<!-- packed -->\nsparsellm packed this model and did not prune it.\n")
    assert sparsellm.verify(tmp_path / "packed").tensors == len(tensors)
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert not any(bool((x[x == 0].signbit()).any()) for x in back.values())
    assert (tmp_path / "back" / "README.md").read_text() == (folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "back")) == 259
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, tensors["model.layers.0.mlp.up_proj.weight"])


def test_a_dense_model_is_refused(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """With its zeros and the option; with the option the model is packed nevertheless."""
    result = command("pack", tiny["opt"], tmp_path / "packed")
    assert result.exit_code == 1
    assert "holds 0.0 % zeros in its matrices" in result.stderr
    assert result.stderr.rstrip().endswith("pass --allow-dense.")
    assert not (tmp_path / "packed").exists()
    assert command("pack", tiny["opt"], tmp_path / "packed", "--allow-dense").exit_code == 0
    pytest.importorskip("matplotlib")
    page = sparsellm.report(tmp_path / "packed").read_text(encoding="utf-8")
    assert " was not pruned by sparsellm. " in page
    assert "magnitude" not in page
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    assert same_bits(tensors_of(tiny["opt"]), tensors_of(tmp_path / "back"))


def test_commands_in_text_and_json(outputs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """What both commands print."""
    result = command("pack", outputs["opt"], tmp_path / "packed")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "18 matrices take" in lines[0]
    assert "bits a weight (plain form)" in lines[0]
    assert lines[1].startswith("2 matrices with few zeros stay dense: model.decoder.embed_positions.weight, ")
    assert lines[2].startswith("Wrote")
    report = json.loads(command("pack", outputs["opt"], tmp_path / "other", "--archive", "--json").stdout)
    assert report["form"] == "archive"
    assert report["packed_bytes"] < (tmp_path / "packed" / "model.safetensors").stat().st_size
    back = json.loads(command("unpack", tmp_path / "packed", tmp_path / "back", "--json").stdout)
    assert back["dense_bytes"] == (tmp_path / "back" / "model.safetensors").stat().st_size


def test_prune_packs_its_output_too(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """`--pack` writes OUT and OUT-packed, resumes either, and refuses before pruning what it would refuse after."""
    words = ("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--quiet", "--pack")
    for sparsity in ("20%", "1:4"):
        result = command(*words, "--sparsity", sparsity)
        assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
        assert f"--sparsity {sparsity} is too little to pack: packing is for 30 % and more. Leave out --pack." in result.stderr
    result = command(*words)
    assert result.exit_code == 0, result.stderr
    assert "18 matrices take" in result.stdout
    sparsellm.unpack(tmp_path / "out-packed", tmp_path / "back")
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "back"))
    shutil.rmtree(tmp_path / "out")
    assert "out-packed exists" in command(*words).stderr
    assert not (tmp_path / "out").exists()
    assert command(*words, "--overwrite", "--json").stdout.startswith("{")
    shutil.rmtree(tmp_path / "out-packed")
    result = command(*words, "--resume")
    assert "is finished: there is nothing to resume" in result.stderr
    assert "18 matrices take" in result.stdout
    assert sparsellm.verify(tmp_path / "out-packed").layers == 18
