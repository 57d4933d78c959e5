"""What a run depends on: every byte of a model's files, none of their times."""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.observers.events import Event, Note
from sparsellm.outputs import fingerprint
from sparsellm.outputs.fingerprint import contents, environment, model_fingerprint
from sparsellm.outputs.journal import JOURNAL
from sparsellm.pipeline.dense_results import DenseCache


@pytest.fixture
def model(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A model of more than one MiB, in a folder of its own."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"zzz": torch.zeros(400_000)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def differing(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


@pytest.mark.parametrize("place", [-1, -1_000_000])
def test_every_byte_of_the_weights_counts(place: int, model: Path) -> None:
    """One bit far behind the first MiB, with the size and the time of before."""
    before = model_fingerprint(open_checkpoint(str(model)))
    file = model / "model.safetensors"
    data, stat = bytearray(file.read_bytes()), file.stat()
    data[place] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert differing(before, model_fingerprint(open_checkpoint(str(model)))) == ["file model.safetensors"]


@pytest.mark.parametrize(
    "name", ["vocab.txt", "merges.txt", "spiece.model", "qwen.tiktoken", "additional/x.jinja", "COPYING", "train.log"]
)
def test_a_file_that_appears_counts(name: str, model: Path) -> None:
    before = model_fingerprint(open_checkpoint(str(model)))
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("x")
    assert differing(before, model_fingerprint(open_checkpoint(str(model)))) == [f"file {name}"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.onnx", "code.py"])
def test_a_file_that_decides_nothing_does_not_count(name: str, model: Path) -> None:
    """Code only where it is trusted, weights only in the form that is read."""
    before = model_fingerprint(open_checkpoint(str(model)))
    (model / name).write_text("x")
    for file in model.iterdir():
        os.utime(file)
    assert differing(before, model_fingerprint(open_checkpoint(str(model)))) == []
    trusted = model_fingerprint(open_checkpoint(str(model), trusted=True))
    assert differing(before, trusted) == (["file code.py"] if name == "code.py" else [])


def test_a_file_is_read_once_in_a_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of many cells asks for the same model again and again; a file that was written since is read again."""
    read = []
    plain = hashlib.file_digest

    def count(stream: object, name: str) -> object:
        read.append(Path(stream.name).name)  # type: ignore[attr-defined]
        return plain(stream, name)  # type: ignore[arg-type]

    monkeypatch.setattr(fingerprint.hashlib, "file_digest", count)
    first = model_fingerprint(open_checkpoint(str(model)))
    assert sorted(read) == sorted(name.removeprefix("file ") for name in first if name.startswith("file "))
    read.clear()
    assert model_fingerprint(open_checkpoint(str(model))) == first
    assert read == []
    (model / "config.json").write_text((model / "config.json").read_text())
    assert model_fingerprint(open_checkpoint(str(model))) == first
    assert read == ["config.json"]


def test_contents_are_those_of_sha256(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc" * 1000)
    assert contents(file) == f"3,000 bytes, SHA-256 {hashlib.sha256(b'abc' * 1000).hexdigest()[:32]}"


def test_a_damaged_journal_of_a_dense_model_is_reported(tmp_path: Path) -> None:
    """What runs of a sweep share: found again, with a note, where its line was edited."""
    said: list[Event] = []
    shared = DenseCache(tmp_path, said.append)
    assert shared.value({"model": "m"}, "perplexity", lambda: 3.0) == 3.0
    (file,) = tmp_path.glob(f"*/{JOURNAL}")
    file.write_text(file.read_text().replace("3.0", "2.0"))
    assert shared.value({"model": "m"}, "perplexity", lambda: 3.0) == 3.0
    assert [event.text[:23] for event in said if isinstance(event, Note)] == ["line 2 of the journal i"]
    assert shared.value({"model": "m"}, "perplexity", lambda: 4.0) == 3.0


def test_the_versions_are_of_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that was broken off leaves the metadata of two versions of torch."""
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version("torch") == "9.9"
    assert environment(torch.device("cpu"))["torch"] == torch.__version__
