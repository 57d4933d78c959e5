"""`pack` with integers in place of values: of rounded and of dense models, and what is refused."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.extensions.integers.scales_file import read_scales
from sparsellm.extensions.packed import conversion, packing
from sparsellm.extensions.packed.formats.packed_tensors import packed_weights
from tests.conftest import long_unless
from tests.core.cli.test_bad_input import refused
from tests.fuzzing import Tally, attempt, damage
from tests.outputs import OUTPUTS, same_bits, tensors_of

Command = Callable[..., Result]


QUANTIZED = {"int8": 8, "int4": 4, "int3": 3}


@pytest.mark.parametrize("values", QUANTIZED)
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", [long_unless(name in ("opt", "experts"), name) for name in OUTPUTS])
def test_rounded_models_are_packed_and_come_back(
    name: str, archive: bool, values: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    """The layers are multiples of their scales, zeros stay, and packing what was unpacked gives the same files."""
    result = sparsellm.pack(outputs[name], tmp_path / "packed", values=values, archive=archive)
    assert {matrix.value_bits for matrix in result.packed if "embed" not in matrix.name} >= {QUANTIZED[values]}
    verified = sparsellm.verify(tmp_path / "packed")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    assert sparsellm.verify(tmp_path / "back").tensors == verified.tensors
    before, after = tensors_of(outputs[name]), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    scales = read_scales(tmp_path / "back")
    assert scales
    for key, tensor in before.items():
        if key not in scales:
            assert same_bits({key: tensor}, {key: after[key]})
            continue
        assert bool((after[key][tensor == 0] == 0).all())
        assert not bool((after[key] == 0).logical_and(after[key].signbit()).any())
        matrix = after[key].transpose(-1, -2) if scales[key].transposed else after[key]
        matrix = matrix.reshape(len(scales[key].scales), -1).double()
        size = scales[key].format.group_size or matrix.shape[1]
        expanded = scales[key].scales.double().repeat_interleave(size, 1)[:, : matrix.shape[1]]
        integers = torch.where(expanded != 0, matrix / expanded, 0)
        assert float((integers - integers.round()).abs().max()) < 2**-8 * 2 ** (QUANTIZED[values] - 1)
        least, largest = scales[key].format.limits(0)
        assert least - 0.5 < float(integers.min()) <= float(integers.max()) < largest + 0.5
    again = sparsellm.pack(tmp_path / "back", tmp_path / "again", archive=archive)
    assert not again.rounded
    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert filecmp.cmp(file, tmp_path / "again" / file.name, shallow=False)


def test_dense_models_are_rounded(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Without an option: a dense model is small too. Its embeddings stay as they are."""
    result = command("pack", tiny["llama"], tmp_path / "packed", "--values", "int4", "--group-size", "64")
    assert result.exit_code == 0, result.stderr
    assert "(plain form, int4 values)" in result.stdout
    assert "read back. Weights are rounded" in result.stdout
    with safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        entries = json.loads(file.metadata()["sparsellm"])
    assert all((entry["bits"], entry["group_size"]) == (4, 64) for entry in entries.values())
    assert all("layers" in name for name in entries)
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    dense, back = tensors_of(tiny["llama"]), tensors_of(tmp_path / "back")
    for name, tensor in dense.items():
        error = float((back[name].float() - tensor.float()).norm() / tensor.float().norm())
        assert (0.01 < error < 0.2) if name in entries else error == 0


def test_a_model_that_is_not_its_scales_times_integers_is_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    """One message that says what to do; nothing is written."""
    sparsellm.pack(outputs["opt"], tmp_path / "packed", values="int4")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    (tmp_path / "back" / "sparsellm.json").unlink()
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] = 0.77
    save_file(tensors, tmp_path / "back" / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"fc1\.weight .*quantization\.scales") as caught:
        sparsellm.pack(tmp_path / "back", tmp_path / "again")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "again").exists()
    (tmp_path / "back" / "quantization.scales").unlink()
    sparsellm.pack(tmp_path / "back", tmp_path / "again")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--values", "int5"), ("--values", "'int5'")),
        (("--values", "int4", "--group-size", "100"), ("--group-size", "100")),
        (("--group-size", "64"), ("--group-size", "--values")),
    ],
)
def test_impossible_values_are_one_message(
    words: tuple[str, ...], named: tuple[str, ...], outputs: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    refused(command("pack", outputs["opt"], tmp_path / "new", *words), *named)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_models_quantized_by_other_software_are_refused(method: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    for values in (None, "int4"):
        with pytest.raises(InvalidSetting, match=rf"quantized.*{method}"):
            sparsellm.pack(folder, tmp_path / "new", values=values)
    assert not (tmp_path / "new").exists()


def test_models_quantized_already_are_not_rounded_again(outputs: dict[str, Path], tmp_path: Path) -> None:
    sparsellm.pack(outputs["opt"], tmp_path / "packed", values="int8")
    with pytest.raises(InvalidSetting, match="packed already"):
        sparsellm.pack(tmp_path / "packed", tmp_path / "new", values="int4")
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    with pytest.raises(InvalidSetting, match=r"int8.*`values`"):
        sparsellm.pack(tmp_path / "back", tmp_path / "new", values="int4")


def test_interrupted_packing_with_other_scales_starts_again(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished files are kept for the same values only."""
    converted: list[str] = []
    convert = packing._Form.convert

    def interrupted(self: Any, file: Path, writer: Any) -> None:
        converted.append(file.name)
        if len(converted) in (2, 4):
            raise KeyboardInterrupt
        convert(self, file, writer)

    monkeypatch.setattr(packing._Form, "convert", interrupted)
    for values in ("int4", "int3"):
        with pytest.raises(KeyboardInterrupt):
            sparsellm.pack(outputs["streamed"], tmp_path / "packed", values=values)
    sparsellm.pack(outputs["streamed"], tmp_path / "packed", values="int3")
    assert converted[0] == converted[2] != converted[4], "int3 began anew, and went on"
    monkeypatch.undo()
    sparsellm.pack(outputs["streamed"], tmp_path / "whole", values="int3")
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert filecmp.cmp(file, tmp_path / "packed" / file.name, shallow=False)


@pytest.mark.long
def test_random_damage_to_quantized_files_is_one_message(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Files are read as before, or refused in one message."""
    folder = tmp_path / "packed"
    sparsellm.pack(outputs["opt"], folder, values="int4")
    expected, random, tally = conversion.read_digests(packing.Source.open(folder)), Random(0), Tally()
    file = folder / "model.safetensors"
    valid, entries = file.read_bytes(), packed_weights(file)
    for _ in range(300):
        file.write_bytes(damage(valid, random))
        os.utime(file, ns=(tally.tried, tally.tried))

        def read() -> None:
            digests = conversion.read_digests(packing.Source.open(folder))
            assert all(digests[name] == expected[name] for name in entries if name in digests)

        attempt(tally, read)
    assert tally.message > 100
