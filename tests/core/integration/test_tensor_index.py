"""Models whose tensors are stored fused with others and split as they are loaded: by the model's names everywhere."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sparsellm.checkpoints.comparison import StoredTensors
from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.loading import Checkpoint, open_checkpoint
from sparsellm.checkpoints.stored_form import StoredForm
from sparsellm.checkpoints.tensor_index import NotStreamable, TensorLocation, _read_elements, stored_row_chunks
from sparsellm.errors import BadCheckpoint
from sparsellm.models.blocks import blocks_of
from sparsellm.outputs.inspection import inspect
from sparsellm.outputs.verification import verify
from sparsellm.pipeline.loading import check_names
from tests.conftest import ROOT
from tests.core.integration.test_families import tensors_of, written

SPLIT = ("kimi_k25", "molmo2", "qianfan_ocr", "unlimited_ocr")
"""Types with queries, keys and values in one stored tensor, and in three of the model."""


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What makes a tiny model of a type."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("tiny_models")


def saved(kind: str, tiny_models: ModuleType, folder: Path) -> Path:
    """A tiny model of a type, written as transformers writes it."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    tiny_models.save(tiny_models.tiny_model(kind), folder)
    return folder


@pytest.mark.parametrize("kind", SPLIT)
def test_split_tensors_have_the_names_and_numbers_of_the_model(kind: str, tiny_models: ModuleType, tmp_path: Path) -> None:
    folder = saved(kind, tiny_models, tmp_path / "dense")
    checkpoint = open_checkpoint(str(folder))
    wanted, read = checkpoint.load().state_dict(), StoredTensors(folder, checkpoint.skeleton())
    assert set(read.files) <= set(wanted)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read)
    assert {read.one_name(name) for name in wanted} == {read.one_name(name) for name in read.files}


@pytest.mark.parametrize("kind", [SPLIT[1], *(pytest.param(kind, marks=pytest.mark.long) for kind in SPLIT[2:])])
def test_a_model_with_split_tensors_is_streamed_as_in_memory(kind: str, tiny_models: ModuleType, tmp_path: Path) -> None:
    source = saved(kind, tiny_models, tmp_path / "dense")
    folders = [written(source, tmp_path / str(stream), "sparsegpt", offload=stream, sparsity="2:4") for stream in (False, True)]
    whole, streamed = (tensors_of(folder) for folder in folders)
    assert whole.keys() == streamed.keys()
    assert all(torch.equal(whole[key], streamed[key]) for key in whole)
    inspected = inspect(str(folders[1]), str(source), "2:4")
    assert inspected.as_expected
    assert not inspected.only_here + inspected.only_there
    assert verify(folders[1], str(source)).layers


def test_a_model_whose_names_depend_on_each_other_is_loaded_whole(tiny_models: ModuleType, tmp_path: Path) -> None:
    """Kimi K2.5's tower has fc0 and fc1 in its files where the model has fc1 and fc2."""
    source = saved("kimi_k25", tiny_models, tmp_path / "dense")
    with pytest.raises(NotStreamable, match="names of some of its tensors depend"):
        open_checkpoint(str(source)).stream()
    folder = written(source, tmp_path / "out", "sparsegpt", sparsity="2:4")
    assert inspect(str(folder), str(source), "2:4").as_expected
    assert verify(folder, str(source)).layers


def test_an_output_that_could_not_be_verified_is_refused_before_work(
    tiny_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose parameter no stored tensor becomes."""
    source = saved("llama", tiny_models, tmp_path / "dense")
    monkeypatch.setattr("sparsellm.checkpoints.stored_form.index_tensors", lambda files, model: ({}, {}, []))
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(BadCheckpoint, match=r"14 weights .*model\.layers\.0\.mlp\.down_proj\.weight"):
        written(source, tmp_path / "out", "magnitude")


def test_names_of_files_that_are_read_whole(tiny_models: ModuleType, tmp_path: Path) -> None:
    """A `.bin` file of the format before torch 1.6 has its own names; those of the model do."""
    source = saved("llama", tiny_models, tmp_path / "dense")
    tensors = tensors_of(source)
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(str(source))
    blocks = blocks_of(skeleton := checkpoint.skeleton())
    plan = dict.fromkeys((block.full_name(name) for block in blocks for name in block.layers), None)
    check_names(StoredForm.of(checkpoint.files(), skeleton), checkpoint, blocks=blocks, plan=plan)  # type: ignore[arg-type]


def test_a_weight_file_larger_than_memory_is_read(tmp_path: Path) -> None:
    """A file of 4 TB, all but its last rows a hole: torch's own mapping of it is refused, since no memory could hold it."""
    rows = 2**39
    header = json.dumps({"weight": {"dtype": "F32", "shape": [rows, 2], "data_offsets": [0, 8 * rows]}}).encode()
    file = tmp_path / "model.safetensors"
    last = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.seek(8 * (rows - 2), os.SEEK_CUR)
        stream.write(last.numpy().tobytes())
    assert read_headers(file)["weight"].shape == (rows, 2)
    assert torch.equal(_read_elements(TensorLocation(file, "weight"), rows - 2, rows), last)
    assert torch.equal(next(stored_row_chunks(TensorLocation(file, "weight"))), torch.zeros(2**21, 2))
