"""`pack` and `unpack`: wrong input, damage and interruptions end in one message, and an interrupted `pack` continues."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.headers import locate_all
from sparsellm.errors import BadCheckpoint, InvalidSetting, OutputExists, SparseLLMError, UnsupportedModel, VerificationFailed
from sparsellm.extensions.packed import conversion
from sparsellm.extensions.packed.formats import weight_converter
from sparsellm.extensions.packed.formats.packed_tensors import PackedWeight, packed_weights
from tests.conftest import long_unless
from tests.core.cli.test_bad_input import refused
from tests.fuzzing import Tally, attempt, damage

Command = Callable[..., Result]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("pack", "PACKED", "NEW"), ("packed already", "sparsellm unpack")),
        (("unpack", "MODEL", "NEW"), ("not packed", "config.json")),
        (("pack", "MODEL", "PACKED"), ("exists", "--overwrite")),
        (("unpack", "PACKED", "MODEL"), ("exists", "--overwrite")),
        (("pack", "MODEL", "MODEL", "--overwrite"), ("never overwritten",)),
        (("pack", "NOWHERE", "NEW"), ("no folder", "./nowhere")),
        (("prune", "PACKED", "NEW", "--method", "magnitude", "--sparsity", "60%"), ("is packed", "sparsellm unpack")),
        (("recover", "PACKED", "NEW", "--against", "DENSE", "--calibration", "demo"), ("is packed", "sparsellm unpack")),
        (("plan", "PACKED", "--method", "magnitude", "--sparsity", "60%"), ("is packed", "sparsellm unpack")),
    ],
)
def test_wrong_input_is_one_message(
    words: tuple[str, ...],
    named: tuple[str, ...],
    packed: Path,
    outputs: dict[str, Path],
    tiny: dict[str, Path],
    tmp_path: Path,
    command: Command,
) -> None:
    """Exit status 1 and one line that says what to do; nothing is written."""
    names = {"PACKED": packed, "MODEL": outputs["opt"], "NEW": tmp_path / "new", "NOWHERE": "./nowhere", "DENSE": tiny["opt"]}
    refused(command(*(names.get(word, word) for word in words)), *named)
    assert not (tmp_path / "new").exists()


def later_version(folder: Path) -> None:
    """Say that the model is packed in a version that does not exist yet."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(config))


def flipped(folder: Path, position: int = -1) -> None:
    """Change a bit of the weight file."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[position] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def dense_flipped(folder: Path) -> None:
    """Change a bit of a tensor that is not packed."""
    stored, entries = locate_all(folder / "model.safetensors"), packed_weights(folder / "model.safetensors")
    flipped(folder, next(start for name, (header, start) in stored.items() if name not in entries and header.shape[1:]))


def listed(folder: Path, change: Callable[[dict[str, Any]], str]) -> None:
    """Change the list of packed tensors."""
    content = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"]["sparsellm"] = change(json.loads(header["__metadata__"]["sparsellm"]))
    changed = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])


def without_first(entries: dict[str, Any]) -> str:
    """A list without its first tensor, whose parts would be read as tensors of their own."""
    return json.dumps(dict(list(entries.items())[1:]))


def first_twice(entries: dict[str, Any]) -> str:
    """A list that names its first tensor twice, and has lost another one if it is read as a mapping."""
    first = next(iter(entries))
    return f'{{"{first}": {json.dumps(entries[first])}, {json.dumps(entries)[1:]}'


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (later_version, UnsupportedModel, "version 2"),
        (lambda folder: os.truncate(folder / "model.safetensors", 40_000), BadCheckpoint, r"model\.safetensors"),
        (flipped, BadCheckpoint, r"model\.safetensors: model\.\S+ .*checksum"),
        (dense_flipped, VerificationFailed, r"model\.\S+ .*packed"),
        (lambda folder: listed(folder, without_first), BadCheckpoint, r"model\.safetensors .*model\.\S+weight"),
        (lambda folder: listed(folder, first_twice), BadCheckpoint, r"model\.safetensors .*'model\.\S+weight' twice"),
    ],
)
def test_damaged_packed_models_are_refused(
    change: Callable[[Path], object], error: type[Exception], named: str, packed: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "packed"))
    change(folder)
    with pytest.raises(error, match=named):
        sparsellm.unpack(folder, tmp_path / "new")
    with pytest.raises(VerificationFailed):
        sparsellm.verify(folder)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("values", [None, "int8"])
def test_shapes_are_compared_before_tensors_are_decoded(values: str | None, outputs: dict[str, Path], tmp_path: Path) -> None:
    """With the bytes that hold them, with the report, and without one with config.json. Integers may have no mask."""
    folder, new = tmp_path / "packed", tmp_path / "new"
    sparsellm.pack(outputs["opt"], folder, values=values)
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors, entries = load_file(folder / "model.safetensors"), json.loads(metadata["sparsellm"])
    key = next(name for name in entries if name.endswith("fc1.weight"))
    right = entries[key]["shape"]

    def write(shape: list[int]) -> None:
        entries[key]["shape"] = shape
        listed = metadata | {"sparsellm": json.dumps(entries)}
        masks = (f"{key}_mask", f"{key}_groups") if values else ()
        save_file({name: part for name, part in tensors.items() if name not in masks}, folder / "model.safetensors", listed)

    for shape in ([2**40, 1], [1, 2**40], [2**62, 2**62]):
        write(shape)
        for read in (
            partial(sparsellm.unpack, folder, new),
            partial(sparsellm.inspect, folder),
            partial(sparsellm.load, folder),
        ):
            with pytest.raises(BadCheckpoint, match=rf"{key} .*bytes"):
                read()
        with pytest.raises(VerificationFailed, match=key):
            sparsellm.verify(folder)
    with mock.patch.object(PackedWeight, "decode", side_effect=AssertionError("it was decoded")):
        write([right[0] * 2, right[1]])
        with pytest.raises(VerificationFailed, match=rf"{key} .*shape"):
            sparsellm.verify(folder)
    with pytest.raises(VerificationFailed, match=key):
        sparsellm.unpack(folder, new)
    (folder / "sparsellm.json").unlink()
    with pytest.raises(BadCheckpoint, match=rf"{key} .*configuration"):
        sparsellm.unpack(folder, new)
    assert not new.exists()


@pytest.mark.parametrize("size", [65, -64, 2**31, 2**63, 2**64 + 64])
def test_group_sizes_that_no_kernel_counts_are_refused(size: int, outputs: dict[str, Path], tmp_path: Path) -> None:
    """One of 2^63 columns was negative in the kernels, which then took the scales of the first row for all."""
    folder = tmp_path / "packed"
    sparsellm.pack(outputs["opt"], folder, values="int4", group_size=64)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as stream:
        metadata = stream.metadata()
    entries = json.loads(metadata["sparsellm"])
    key = next(key for key, entry in entries.items() if "bits" in entry)
    entries[key]["group_size"] = size
    save_file(load_file(file), file, metadata | {"sparsellm": json.dumps(entries)})
    for read in (AutoModelForCausalLM.from_pretrained, sparsellm.load, sparsellm.inspect):
        with pytest.raises(BadCheckpoint, match=rf"{re.escape(key)} .*{size}"):
            read(folder)


@pytest.mark.parametrize("length", [2**40, 2**62, 2**64 - 1, 7])
def test_headers_are_checked_before_they_are_read(length: int, packed: Path, tmp_path: Path) -> None:
    """Also for transformers, which opens weight files later: one that is told to be longer than its file takes no memory."""
    folder = shutil.copytree(packed, tmp_path / "packed")
    content = (packed / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
    for read in (AutoModelForCausalLM.from_pretrained, sparsellm.load, sparsellm.inspect):
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
            read(folder)


@pytest.mark.parametrize("name", ["opt", "experts", "fused"])
def test_tensors_larger_than_the_model_are_not_decoded(name: str, outputs: dict[str, Path], tmp_path: Path) -> None:
    """Also by transformers, and those that are joined with others, of which no shape is known."""
    folder = tmp_path / "packed"
    sparsellm.pack(outputs[name], folder)
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as stream:
        metadata = stream.metadata()
    entries = json.loads(metadata["sparsellm"])
    for key, entry in entries.items():
        changed = {"sparsellm": json.dumps(entries | {key: entry | {"shape": [2**18, 1]}})}
        save_file(load_file(file), file, metadata | changed)
        with mock.patch.object(weight_converter, "decode_matrix", side_effect=AssertionError("it was decoded")):
            for load in (AutoModelForCausalLM.from_pretrained, sparsellm.load):
                with pytest.raises(BadCheckpoint, match=re.escape(key)):
                    load(folder)


def test_changed_models_are_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    """A model whose tensors are not those that its report lists is not packed."""
    folder = tmp_path / "model"
    shutil.copytree(outputs["opt"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationFailed, match=r"fc1\.weight"):
        sparsellm.pack(folder, tmp_path / "packed")
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"NaN.*model\.decoder\.layers\.0\.fc1\.weight"):
        sparsellm.pack(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_an_interrupted_pack_continues(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Finished files are kept, with a note, and not written again; another form starts anew; the result is the same."""
    model, folder = outputs["streamed"], tmp_path / "packed"
    written: list[str] = []
    add = conversion.FileWriter.add

    def counting(writer: conversion.FileWriter, name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        if limit and len(written) > limit:
            raise KeyboardInterrupt
        add(writer, name, tensor)

    monkeypatch.setattr(conversion.FileWriter, "add", counting)
    limit = 0
    sparsellm.pack(model, tmp_path / "whole")
    total = len(written)
    written, limit = [], 1  # within the first file
    result = command("pack", model, folder)
    assert (result.exit_code, folder.exists()) == (130, False)
    assert "nothing was written" in result.stderr
    written, limit = [], total * 2 // 3
    result = command("pack", model, folder)
    assert result.exit_code == 130
    assert "weight files are finished and kept: run it again to continue" in result.stderr
    with pytest.raises(InvalidSetting, match="unfinished"):
        sparsellm.verify(folder)
    written, limit = [], 0
    assert command("pack", model, folder).exit_code == 0
    assert 0 < len(written) < total * 2 // 3
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()}
    match, mismatch, errors = filecmp.cmpfiles(folder, tmp_path / "whole", [x.name for x in folder.iterdir()], shallow=False)
    assert (mismatch, errors) == ([], [])
    assert len(match) > 5


def test_settings_that_change_start_anew(outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were finished in the plain form are not part of an archive."""
    model, folder = outputs["streamed"], tmp_path / "packed"

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "replacing", fail)
        with pytest.raises(OSError, match="No space left") as failure:
            sparsellm.pack(model, folder)
    assert "weight files are finished and kept: run it again to continue" in failure.value.__notes__[-1]
    assert len(list((folder / ".sparsellm" / "weights").glob("*.safetensors"))) == len(list(model.glob("*.safetensors")))
    sparsellm.pack(model, folder, archive=True)
    sparsellm.pack(model, tmp_path / "other", archive=True)
    for file in (tmp_path / "other").glob("*.safetensors"):
        assert filecmp.cmp(file, folder / file.name, shallow=False)
    with pytest.raises(OutputExists):
        sparsellm.pack(model, folder)
    sparsellm.pack(model, folder, overwrite=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"notes\.txt, which sparsellm did not write"):
        sparsellm.pack(model, folder, overwrite=True)


@pytest.mark.parametrize("inputs", [long_unless(inputs == 200, inputs) for inputs in (200, 3000)])
def test_mutated_files_are_refused_in_one_message(inputs: int, packed: Path, tmp_path: Path) -> None:
    """Reading any changed weight file raises one short message, or finds the tensors of the model; nothing is left behind."""
    folder = tmp_path / "packed"
    shutil.copytree(packed, folder)
    valid = (folder / "model.safetensors").read_bytes()
    random, tally = Random(0), Tally()
    source = conversion.Source.open(packed)
    expected = conversion.read_digests(source)
    entries = packed_weights(packed / "model.safetensors")
    for _ in range(inputs):
        file = folder / "model.safetensors"
        file.write_bytes(damage(valid, random))
        os.utime(file, ns=(tally.tried, tally.tried))

        def read() -> None:
            digests = conversion.read_digests(conversion.Source.open(folder))
            assert all(digests[name] == expected[name] for name in entries if name in digests)

        attempt(tally, read)
    assert tally.message > 0.4 * inputs
    assert sorted(x.name for x in tmp_path.iterdir()) == ["packed"]
    file.write_bytes(damage(valid, random)[:-1])
    with pytest.raises(SparseLLMError):
        sparsellm.verify(folder)
