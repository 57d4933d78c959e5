"""A full disk and places that cannot be written: the message names what the user named, and how many bytes are needed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

import sparsellm
from sparsellm.extensions.packed.card import record_speed
from sparsellm.extensions.packed.record import Bench
from sparsellm.runtime.offload import OffloadManager
from sparsellm.texts.json_files import durable
from tests.core.cli.test_bad_input import refused
from tests.outputs import tensors_of

Command = Callable[..., Result]

CONVERSIONS = {
    "pack": ("pack", "{run}"),
    "integers": ("pack", "{run}", "--values", "int4"),
    "unpack": ("unpack", "{packed}"),
    "export": ("export", "{run}", "--values", "int4"),
}
"""Lines that write a model file by file, but for their output."""


def full(*_: object, **__: object) -> Any:
    """What the system says of a full disk, which names no file."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_disk_that_is_too_small_is_refused_before_the_work(
    name: str, made: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [word.format(**made) for word in CONVERSIONS[name]]
    monkeypatch.setattr("sparsellm.extensions.packed.conversion.FileWriter", None)
    monkeypatch.setattr("sparsellm.extensions.packed.conversion.free_disk", lambda folder: 10_000)
    out = tmp_path / "out"
    refused(command(*line, out), f"{out}: ", " of disk are needed, and 9.8 KiB are free. Write to another disk.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_bytes_that_are_needed_are_those_that_are_written(
    name: str, made: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output, and its largest file once more, which is joined from parts."""
    told: list[int] = []
    monkeypatch.setattr("sparsellm.extensions.packed.conversion.check_disk", lambda output, needed, free: told.append(needed))
    line = [word.format(**made) for word in CONVERSIONS[name]]
    assert command(*line, tmp_path / "out").exit_code == 0
    written = 2 * sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert told == [pytest.approx(written, rel=0 if name == "unpack" else 0.15)]


@pytest.mark.parametrize("name", [*CONVERSIONS, "prune"])
def test_a_disk_that_fills_up(
    name: str, made: dict[str, Path], tiny: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsellm.extensions.packed.packed_files.FileWriter.add", full)
    monkeypatch.setattr("sparsellm.outputs.saving.write_shard", full)
    line = [word.format(**made) for word in CONVERSIONS.get(name, ("prune", str(tiny["opt"])))]
    out = tmp_path / "out"
    ran = command(*line, out, *(("--method", "magnitude") if name == "prune" else ()))
    refused(ran, f"The disk is full ({out}).", " are needed there, and ", " are free: make room, or write to another disk")
    assert not list(tmp_path.rglob("model*"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_file_is_named_and_not_its_temporary_one(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise OSError(code, os.strerror(code), *map(str, given))

    file = tmp_path / "page.html"
    for target in ("os.fsync", "pathlib.Path.replace", "pathlib.Path.open"):
        with monkeypatch.context() as patch:
            patch.setattr(target, (lambda *_: fail()) if target == "os.fsync" else (lambda path, *_: fail(path)))
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                durable(file, b"page")
        assert (caught.value.filename, caught.value.filename2) == (str(file), None)
    assert list(tmp_path.iterdir()) == []


def test_activations_in_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsellm.runtime import offload

    with OffloadManager(0, folder=tmp_path).new_lists(1, 1000) as (tensors,):
        monkeypatch.setattr(offload.Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left") as caught:
            tensors.append(torch.ones(4))
    assert str(caught.value.filename).startswith(str(tmp_path))


def test_a_card_is_written_whole(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are recorded in a card that was written with care."""
    sparsellm.pack(made["run"], packed := tmp_path / "packed")
    before = (packed / "README.md").read_bytes()
    bench = sparsellm.bench(packed, tokens=1, threads=1)
    assert isinstance(bench, Bench)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        record_speed(packed, bench)
    assert caught.value.filename == str(packed / "README.md")
    assert (packed / "README.md").read_bytes() == before
