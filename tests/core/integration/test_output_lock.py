"""Outputs put in their place: by one process at a time, and mended where one was killed at any step."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from filelock import FileLock

from sparsellm import prune
from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.errors import CannotResume
from sparsellm.outputs.folder import EXPORT, LOCK, REPLACED, locked, recover_output, replacing

Command = Callable[..., Result]
QUICK = ("--sparsity", "60%", "--samples", 6, "--sequence-length", 32, "--batch-size", 2, "--method", "wanda")


def killed(do: Callable[[], object], step: str) -> None:
    """Run something in a process of its own that is killed by SIGKILL right before a step: the n-th rename or removal."""
    name, _, number = step.partition(" ")

    def run() -> None:
        owner = shutil if name == "rmtree" else Path
        plain, calls = getattr(owner, name), iter(range(100))

        def count(*arguments: object, **settings: object) -> object:
            # Only folders beside or in the output count, and not what was cleared before.
            if next(calls) == int(number or 0):
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments, **settings)

        setattr(owner, name, count)
        do()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def export(path: Path, content: str) -> None:
    with replacing(path) as folder:
        (folder / REPORT).write_text(content)


def content(path: Path) -> str:
    return (path / REPORT).read_text()


STEPS = {
    "rename": "the export has no name yet",
    "rename 1": "between the renames",
    "unlink": "the export has its name",
    "rmtree": "the lock of the replaced output is removed",
    "rmtree 1": "the replaced output holds nothing",
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("replaced", [False, True], ids=["new", "over another"])
def test_killed_while_an_output_is_put_in_its_place(step: str, replaced: bool, tmp_path: Path) -> None:
    """The output is the old one or the new one, never half of each, and the next process leaves nothing beside it."""
    path = tmp_path / "out"
    if replaced:
        export(path, "old")
    killed(lambda: export(path, "new"), step)
    recover_output(path)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    is_in_place = not step.startswith("rename")
    assert (path / WORK).exists() != is_in_place
    expected = "new" if is_in_place else "old" if replaced else None
    assert (content(path) if (path / REPORT).exists() else None) == expected
    with locked(path):
        assert not (path / WORK / EXPORT).exists()
        export(path, "third")
    assert [file.name for file in path.iterdir()] == [REPORT]
    assert content(path) == "third"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def moved_aside(folder: Path) -> Path:
    """A folder like one that an output was moved to while it was replaced."""
    (folder / WORK).mkdir(parents=True)
    (folder / WORK / REPLACED).write_bytes(folder.name.encode())
    return folder


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    """Between the two renames of another process its folder has another name, with the lock in it."""
    path, old = tmp_path / "out", moved_aside(tmp_path / ".out.0123abcd.old")
    with FileLock(old / WORK / LOCK):
        with pytest.raises(CannotResume, match="Another process"):
            recover_output(path)
        with pytest.raises(CannotResume, match="Another process"), locked(path):
            pass
        assert old.exists()
        path.mkdir()
        (path / REPORT).write_text("new")
        recover_output(path)
        assert old.exists()
    recover_output(path)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_folders_of_other_outputs_are_left_alone(tmp_path: Path) -> None:
    """`out` has no say in what belongs to `out.1` or `other`, or in what was not written by this program."""
    names = [".out.1.0123abcd.old", ".other.0123abcd.old", ".out.old", "out.0123abcd.old", ".out.abc.partial"]
    for name in names:
        moved_aside(tmp_path / name)
    export(tmp_path / "out", "new")
    recover_output(tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*names, "out"])


@pytest.mark.parametrize("exists", [False, True])
def test_folders_that_only_have_such_a_name_are_left_alone(exists: bool, tmp_path: Path) -> None:
    """A user's own folder, a copy of one that was moved aside, a link to one, and one that a link leads out of."""
    mine, copy = tmp_path / ".out.0123abcd.old", tmp_path / ".out.4567cdef.old"
    mine.mkdir()
    (mine / "diary").write_text("x")
    moved_aside(tmp_path / ".out.76543210.old").rename(copy)
    linked = moved_aside(tmp_path / "away" / ".out.abcdef01.old")
    (tmp_path / linked.name).symlink_to(linked)
    leading = moved_aside(tmp_path / ".out.00000000.old")
    (leading / "link").symlink_to(mine)
    if exists:
        export(tmp_path / "out", "new")
    before = sorted(tmp_path.rglob("*"))
    recover_output(tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unfinished_replacement_is_not_removed_for_something_else(tmp_path: Path) -> None:
    """Killed between the renames; then another folder takes the output's name. Nothing of either is lost."""
    path = tmp_path / "out"
    export(path, "old")
    killed(lambda: export(path, "new"), "rename 1")
    path.mkdir()
    (path / "diary").write_text("x")
    recover_output(path)
    (old,) = (folder for folder in tmp_path.iterdir() if folder != path)
    assert content(old) == "old"
    assert content(old / WORK / EXPORT) == "new"
    shutil.rmtree(path)
    recover_output(path)
    assert content(path) == "old"
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]


def test_a_name_with_special_characters(tmp_path: Path) -> None:
    path = tmp_path / "o[u]t*.1"
    killed(lambda: export(path, "new"), "rename 1")
    recover_output(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_thread_may_enter_twice_and_another_may_not(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with locked(path):
        (path / WORK / "activations-x").mkdir()
        with locked(path):
            assert (path / WORK / "activations-x").exists()
        with pytest.raises(Exception, match="acquired"):
            FileLock(path / WORK / LOCK, timeout=0).acquire()
    with locked(path):
        assert not (path / WORK / "activations-x").exists()


@pytest.mark.parametrize("there", [False, True])
def test_an_error_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if there:
        path.mkdir()

    def fail() -> None:
        with replacing(path) as folder:
            (folder / "half").write_text("x")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert [file.name for file in tmp_path.rglob("*")] == (["out"] if there else [])


def test_saved_from_python_while_another_process_works(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    result = prune(tiny["llama"], "magnitude", "60%")
    (tmp_path / "out" / WORK).mkdir(parents=True)
    with FileLock(tmp_path / "out" / WORK / LOCK), pytest.raises(CannotResume, match="Another process is working on"):
        result.save_pretrained(tmp_path / "out")
    result.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / WORK).exists()


def test_resume_of_a_finished_output_clears_what_it_replaced(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """Killed while the unfinished output is removed, when the finished one has its name already."""
    line = ("prune", tiny["llama"], tmp_path / "out", "--calibration", text_file, *QUICK)
    assert command(*line).exit_code == 0
    moved_aside(tmp_path / ".out.0123abcd.old")
    ran = command(*line, "--resume")
    assert ran.exit_code == 0
    assert "is finished" in ran.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
