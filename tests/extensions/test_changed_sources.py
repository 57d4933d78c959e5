"""Checkpoints that are changed while something is made from them, and files that cannot be copied."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparsellm
from sparsellm import prune
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.checkpoints.stamps import SourceChanged
from sparsellm.errors import BadCheckpoint, SparseLLMError
from sparsellm.extensions.packed import conversion, packing
from sparsellm.outputs import saving
from sparsellm.pipeline import prune as pruning
from tests.pairwise import pairwise

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]


@pytest.fixture
def dense(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama with a document."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "dense"))
    (folder / "notes.txt").write_text("notes")
    return folder


def refused(result: Result, *parts: str) -> None:
    """Check that a command was refused with one message that has all the parts."""
    message = " ".join(result.stderr.split())
    assert result.exit_code == 1, (message, result.exception)
    assert message.count("error:") == 1, message
    for part in parts:
        assert part in message, message


def rewrite(file: Path) -> None:
    """Write a file again, of the same size."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def before(owner: Any, name: str, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a change whenever a function is called, before it runs."""
    run = getattr(owner, name)

    def changed(*args: Any, **keywords: Any) -> Any:
        change()
        return run(*args, **keywords)

    monkeypatch.setattr(owner, name, changed)


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": lambda folder: rewrite(folder / "model.safetensors"),
    "weights cut off": lambda folder: (folder / "model.safetensors").write_bytes(b"cut off"),
    "config": lambda folder: rewrite(folder / "config.json"),
    "a document": lambda folder: rewrite(folder / "notes.txt"),
    "a document removed": lambda folder: (folder / "notes.txt").unlink(missing_ok=True),
}


@pytest.mark.parametrize(
    ("change", "when", "offload"),
    pairwise([*CHANGES], ["write_checkpoint", "check_written", "set_default_permissions"], [False, True]),
)
def test_a_model_changed_during_a_run(
    change: str, when: str, offload: bool, dense: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pruning and the writing, the reading back, or the end: one message, and nothing is left."""
    before(saving, when, lambda: CHANGES[change](dense), monkeypatch)
    ran = command("prune", dense, tmp_path / "out", "--method", "magnitude", *(("--offload",) if offload else ()))
    name = {"weights": "model.safetensors", "weights cut off": "model.safetensors", "config": "config.json"}
    refused(ran, f"changed during the run: {name.get(change, 'notes.txt')}")
    assert "--resume" not in ran.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offload", [False, True])
def test_weights_changed_while_they_are_read(
    offload: bool, dense: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails as a consequence is reported as the change."""
    before(pruning, "prune_blocks", lambda: (dense / "model.safetensors").write_bytes(b"cut off"), monkeypatch)
    ran = command("prune", dense, tmp_path / "out", "--method", "magnitude", *(("--offload",) if offload else ()))
    refused(ran, "changed during the run: model.safetensors")
    assert not (tmp_path / "out").exists()


def test_what_does_not_matter(dense: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card, of which the output has another, hidden files, and what is left out."""
    (dense / "README.md").write_text("the card")
    (dense / "optimizer.pt").write_text("state")

    def change() -> None:
        for name in ("README.md", "optimizer.pt", ".gitattributes"):
            (dense / name).write_text("another")

    before(saving, "write_checkpoint", change, monkeypatch)
    ran = command("prune", dense, tmp_path / "out", "--method", "magnitude")
    assert ran.exit_code == 0, ran.stderr


@pytest.mark.parametrize("changed", ["dense", "pruned"])
def test_either_model_of_a_recovery(
    changed: str, dense: Path, text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    prune(dense, "magnitude", "50%").save_pretrained(tmp_path / "pruned")
    before(saving, "write_checkpoint", lambda: rewrite(tmp_path / changed / "model.safetensors"), monkeypatch)
    words = ("--against", dense, "--calibration", text_file, "--steps", 2, "--sequence-length", 16)
    refused(command("recover", tmp_path / "pruned", tmp_path / "out", *words), f"{changed} was changed during the run")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", [(packing, "copy_files"), (conversion, "write_index")], ids=["documents", "weights"])
def test_a_model_changed_while_it_is_packed(
    when: tuple[Any, str], dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of it, and a later call begins anew."""
    before(*when, lambda: rewrite(dense / "notes.txt"), monkeypatch)
    with pytest.raises(SourceChanged, match=r"notes\.txt"):
        sparsellm.pack(dense, tmp_path / "packed", allow_dense=True)
    assert not (tmp_path / "packed").exists()


def dangling(file: Path) -> None:
    file.symlink_to(file.with_name("missing.bin"))


def circle(file: Path) -> None:
    file.symlink_to(file)


def bound(file: Path) -> None:
    """Make a socket; its path may be short only."""
    folder = os.getcwd()
    os.chdir(file.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(file.name)
    finally:
        os.chdir(folder)


def locked_away(file: Path) -> None:
    file.write_text("text")
    file.chmod(0)


@pytest.mark.parametrize("name", ["notes.md", "extra/notes.md"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (dangling, "No such file"),
        (circle, "symbolic links"),
        (os.mkfifo, "a pipe"),
        (bound, "a socket"),
        (locked_away, "Permission denied"),
    ],
)
def test_documents_that_cannot_be_copied(
    make: Callable[[Path], None],
    said: str,
    name: str,
    dense: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before the weights are read, by each command that copies them."""
    (dense / "extra").mkdir()
    if make is locked_away and os.geteuid() == 0:
        _deny(dense / name, monkeypatch)
    make(dense / name)
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("the weights were read"))
    refused(command("prune", dense, tmp_path / "out", "--method", "magnitude"), "dense: ", "notes.md", said)
    refused(command("pack", dense, tmp_path / "out", "--allow-dense"), "notes.md", said)
    assert not (tmp_path / "out").exists()


def _realpath(path: Path, strict: bool = False) -> Path:
    """`Path.resolve` of Python 3.13 and later."""
    return Path(os.path.realpath(path, strict=strict))


def _refused(path: Path, strict: bool = False) -> Path:
    """`Path.resolve` of Python 3.12 and earlier."""
    if not path.exists() and path.is_symlink() and os.readlink(path) == str(path):
        raise RuntimeError(f"Symlink loop from {str(path)!r}")
    return _realpath(path, strict)


@pytest.mark.parametrize("resolve", [_realpath, _refused])
def test_a_link_to_itself_is_told_in_each_version_of_python(
    resolve: Callable[..., Path], dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the documents, and in a finished output, where it is a file that was changed."""
    out = sparsellm.prune(dense, "magnitude", "2:4").save_pretrained(tmp_path / "out")
    monkeypatch.setattr(Path, "resolve", resolve)
    circle(dense / "notes.md")
    with pytest.raises(BadCheckpoint, match=r"notes\.md"):
        sparsellm.prune(dense, "magnitude")
    (out / "config.json").unlink()
    circle(out / "config.json")
    with pytest.raises(SparseLLMError, match=r"config\.json"):
        sparsellm.verify(out)


def _deny(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to open a file for reading, as the system does for users but root."""
    opened = Path.open

    def denied(self: Path, *args: Any, **keywords: Any) -> Any:
        if self == file and (args[0] if args else keywords.get("mode", "r")) in ("r", "rb"):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(self, *args, **keywords)

    monkeypatch.setattr(Path, "open", denied)


def test_what_is_left_out_need_not_be_readable(dense: Path, tmp_path: Path, command: Command) -> None:
    """Weights in other formats and states of a training, and a link to a folder, which a note names."""
    for name in ("model.onnx", "pytorch_model.bin", "optimizer.pt"):
        dangling(dense / name)
    (dense / "here").symlink_to(dense)
    ran = command("prune", dense, tmp_path / "out", "--method", "magnitude")
    assert ran.exit_code == 0, ran.stderr
    assert "here (a link to a folder)" in " ".join(ran.stderr.split())


def test_a_full_disk(dense: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """When documents are copied: one message, and the run continues where there is room."""

    def full(source: Path, target: Path) -> None:
        Path(target).write_text("the first bytes")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    words = ("prune", dense, tmp_path / "out", "--method", "magnitude")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        refused(command(*words), "The disk is full", "3 blocks are finished and kept: pass --resume to continue")
        refused(command("pack", dense, tmp_path / "packed", "--allow-dense"), "The disk is full")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {".sparsellm"}
    assert not (tmp_path / "packed").exists()
    assert command(*words, "--resume").exit_code == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "notes"


def test_documents_count_for_the_disk(dense: Path, tmp_path: Path) -> None:
    """A plan has their bytes too."""
    small = sparsellm.plan(dense, "magnitude").peak.disk_bytes
    (dense / "figures.zip").write_bytes(bytes(3_000_000))
    assert sparsellm.plan(dense, "magnitude").peak.disk_bytes == small + 3_000_000
