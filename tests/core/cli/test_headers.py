"""Damaged and hostile weight files: one message from every command, before any tensor is read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

from sparsellm.checkpoints.headers import read_headers
from sparsellm.errors import BadCheckpoint
from tests.conftest import extensions
from tests.core.cli.test_bad_input import refused
from tests.core.integration.test_block_loader import Code

Change = Callable[[dict[str, Any]], Any]


def rewritten(file: Path, change: Change) -> None:
    """Put another header before the tensors of a safetensors file: bytes as they are, anything else as JSON."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8 : 8 + length]))
    new = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])


def setting(**fields: Any) -> Change:
    """Change fields of one tensor's entry."""
    return lambda header: {**header, "model.norm.weight": {**header["model.norm.weight"], **fields}}


def shifted(header: dict[str, Any]) -> dict[str, Any]:
    """Two tensors that lie in the same bytes."""
    first, second = [key for key in header if key.endswith("self_attn.q_proj.weight")][:2]
    return {**header, first: {**header[first], "data_offsets": header[second]["data_offsets"]}}


HEADERS: dict[str, Change] = {
    "not JSON": lambda _: b"{",
    "nested": lambda _: b"[" * 100_000,
    "a list": lambda _: [],
    "null": lambda _: None,
    "half a character": lambda header: {**header, "\ud800": header["model.norm.weight"]},
    "an entry that is a list": lambda header: {**header, "model.norm.weight": [1]},
    "an entry without offsets": lambda header: {**header, "model.norm.weight": {"dtype": "F32", "shape": [32]}},
    "an unknown dtype": setting(dtype="F99"),
    "a dtype that is a list": setting(dtype=["F32"]),
    "another shape": setting(shape=[33]),
    "a negative shape": setting(shape=[-1, -32]),
    "a shape of floats": setting(shape=[32.0]),
    "a shape of text": setting(shape="32"),
    "an endless shape": setting(shape=[2**63 - 1] * 1000),
    "reversed offsets": setting(data_offsets=[128, 0]),
    "negative offsets": setting(data_offsets=[-128, 0]),
    "one offset": setting(data_offsets=[0]),
    "true for an offset": setting(data_offsets=[True, 129]),
    "offsets beyond the file": setting(data_offsets=[2**62, 2**62 + 128]),
    "5,000 digits": lambda header: json.dumps(header).encode().replace(b"[0,", b"[" + b"9" * 5000 + b",", 1),
    "overlapping": shifted,
    "a gap": lambda header: {key: value for key, value in header.items() if key != "model.norm.weight"},
    "metadata that is none": lambda header: {**header, "__metadata__": {"format": 5}},
}


def test_a_damaged_header_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Whatever is wrong with a header ends in BadCheckpoint with the file's name."""
    for name, change in HEADERS.items():
        file = Path(shutil.copy(tiny["llama"] / "model.safetensors", tmp_path))
        assert read_headers(file).keys() == load_file(file).keys()
        rewritten(file, change)
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors") as caught:
            pytest.fail(f"{name} is read as {read_headers(file)}")
        assert len(str(caught.value)) < 400, name


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_an_absurd_length_of_a_header_is_refused(length: int, tiny: dict[str, Path], tmp_path: Path) -> None:
    """A header that would be longer than the file, or empty, is refused without room being made for it."""
    file = Path(shutil.copy(tiny["llama"] / "model.safetensors", tmp_path))
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        read_headers(file)


INDICES: dict[str, Any] = {
    "empty": {"weight_map": {}},
    "no map": {"metadata": {}},
    "a list": [],
    "a map of numbers": {"weight_map": {"model.norm.weight": 5}},
    "a map of null": {"weight_map": {"model.norm.weight": None}},
    "a map that is a list": {"weight_map": ["model.safetensors"]},
    "another file": {"weight_map": {"model.norm.weight": "config.json"}},
    "NUL": {"weight_map": {"model.norm.weight": "a\0.safetensors"}},
    "above the folder": {"weight_map": {"model.norm.weight": "../model.safetensors"}},
    "from the root": {"weight_map": {"model.norm.weight": "/etc/model.safetensors"}},
    "above a folder within": {"weight_map": {"model.norm.weight": "x/../../model.safetensors"}},
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_damaged_index_is_refused(index: Any, tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]) -> None:
    """An index that names no files, or files outside its folder, is refused by every command that opens a model."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "inner" / "model"))
    shutil.move(folder / "model.safetensors", tmp_path / "inner" / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_by_all(command, folder, tmp_path, "model.safetensors.index.json")


BINS: dict[str, Callable[[Path], Any]] = {
    "code": lambda file: torch.save({"x": Code()}, file),
    "a raw pickle of code": lambda file: file.write_bytes(pickle.dumps(Code())),
    "a raw pickle": lambda file: file.write_bytes(pickle.dumps({"a": 1})),
    "the old format with code": lambda file: torch.save({"x": Code()}, file, _use_new_zipfile_serialization=False),
    "a list": lambda file: torch.save([torch.ones(2)], file),
    "a number for a tensor": lambda file: torch.save({"x": 5}, file),
    "a sparse tensor": lambda file: torch.save({"x": torch.eye(3).to_sparse()}, file),
    "a tensor far larger than the file": lambda file: torch.save({"x": torch.ones(1).expand(10**12)}, file),
    "cut off": lambda file: (torch.save({"x": torch.ones(1000)}, file), file.write_bytes(file.read_bytes()[:2000])),
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("<html>not found</html>"),
}


@pytest.mark.parametrize("write", BINS.values(), ids=BINS)
def test_a_bin_file_of_more_than_tensors_is_refused(
    write: Callable[[Path], Any], tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Code is not run, and what is no tensor, or damaged, is told in one message."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    write(folder / "pytorch_model.bin")
    refused_by_all(command, folder, tmp_path, "pytorch_model.bin")


@extensions
def test_plan_refuses_a_damaged_index(tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]) -> None:
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(INDICES["above the folder"]))
    told = refused_by_all(command, folder, tmp_path, "model.safetensors.index.json")
    assert told in refused(command("plan", folder, "--method", "magnitude"))


def refused_by_all(command: Callable[..., Result], folder: Path, tmp_path: Path, *parts: str) -> str:
    """Check that every command that opens a model refuses it with the same message, and that none writes; the message."""
    text = tmp_path / "text.txt"
    text.write_text("words " * 100)
    prune = ("prune", folder, tmp_path / "out", "--method", "magnitude")
    commands = (
        ("inspect", folder),
        ("evaluate", folder, "--text", text),
        prune,
        (*prune, "--offload"),
    )
    told = {refused(command(*words), *parts).partition("error: ")[2] for words in commands}
    assert len(told) == 1, told
    assert not any("never be printed" in message for message in told)
    assert not (tmp_path / "out").exists()
    return told.pop()


def test_the_format_before_torch_1_6_is_pruned_and_inspected(
    tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Old .bin files are sound; they are read whole."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    for words in ((), ("--offload",)):
        out = tmp_path / f"out{len(words)}"
        result = command("prune", folder, out, "--method", "magnitude", *words)
        assert result.exit_code == 0, result.stderr
        assert command("inspect", out, "--against", folder, "--expect", "50%").exit_code == 0
