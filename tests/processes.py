"""The command line in processes forked from one that has imported everything; see `server` in conftest.py."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HAS_EXTENSIONS

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")
"""Audit events of changes of folders; an opened file is one if it is opened to be written."""


def run(
    words: list[str],
    output: str,
    killed_at: tuple[str, bytes] | None = None,
    counted: tuple[str, str] | None = None,
    last: int | None = None,
    at_last: signal.Signals = signal.SIGKILL,
) -> None:
    """The command line of `short_training` in a process of its own, what it prints in a file.

    Args:
        killed_at: A journal and a part of one of its lines: the process ends by SIGKILL as soon as that line is durable.
        counted: A folder, and a file that gets a byte for each change in the folder and its subfolders just before it.
        last: The number of a counted change.
        at_last: The signal that the process sends to itself just before that change: SIGKILL ends it, SIGSTOP stops it.
    """
    if counted is not None:
        _count_changes(*counted, last, at_last)
    with Path(output).open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from sparsellm.cli.app import app

    if HAS_EXTENSIONS:
        from sparsellm.extensions.recover.training import masked_training
        from tests.short_training import app

        masked_training.STORING_SHARE = (
            math.inf
        )  # the state of a training is stored at every validation, where files are slow too
    if killed_at is not None:
        die_once_written(*killed_at)
    app(words)


def die_once_written(journal: str, entry: bytes) -> None:
    """Have this process end by SIGKILL as soon as a journal has an entry, a part of one of its lines."""
    from sparsellm.outputs.journal import Journal

    append = Journal._append

    def append_and_die(self: Journal, line: Mapping[str, Any]) -> None:
        append(self, line)
        if self.file == Path(journal) and entry in self.file.read_bytes():
            os.kill(os.getpid(), signal.SIGKILL)

    Journal._append = append_and_die  # type: ignore[method-assign]


def _count_changes(folder: str, file: str, last: int | None, at_last: signal.Signals) -> None:
    """Append a byte to a file before each change below a folder, and send a signal to this process before the `last`."""
    stream = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    number = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if event == "open":
            changes = isinstance(arguments[0], str) and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        else:
            changes = event in CHANGES
        if not changes:
            return
        paths = [os.fsdecode(path) for path in arguments if isinstance(path, (str, bytes, os.PathLike))]
        removes_in_open_folder = event in ("os.remove", "os.rmdir") and arguments[-1] != -1  # by shutil.rmtree
        if removes_in_open_folder or any(path.startswith(folder) for path in paths):
            number += 1
            if number == last:
                os.kill(os.getpid(), at_last)
            os.write(stream, b".")

    sys.addaudithook(count)


@contextmanager
def fork_server(output: Path) -> Iterator[ForkServerContext]:
    """A context whose processes start with torch and transformers loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sparsellm.cli.app", "tests.warm", __name__])
        finished(context, ["--version"], output)  # the server has started when this has ended, with these variables
    yield context


def started(server: ForkServerContext, words: Sequence[object], output: Path) -> ForkServerProcess:
    """Start the command line; its output is appended to a file."""
    process = server.Process(target=run, args=([*map(str, words)], str(output)))
    process.start()
    return process


def stopped(server: ForkServerContext, words: Sequence[object], output: Path, folder: Path, last: int) -> ForkServerProcess:
    """Start the command line, and return when it has stopped just before its `last` change below a folder, or ended before."""
    file = folder.with_name(f"{folder.name}.changes")
    counted = (str(folder), str(file))
    process = server.Process(target=run, args=([*map(str, words)], str(output), None, counted, last, signal.SIGSTOP))
    process.start()
    stat = Path(f"/proc/{process.pid}/stat")
    while process.is_alive() and stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    return process


def changes(server: ForkServerContext, words: Sequence[object], output: Path, folder: Path, last: int | None = None) -> int:
    """Run the command line to its end, or until just before its `last` change below a folder; how many changes it made."""
    file = folder.with_name(f"{folder.name}.changes")
    file.unlink(missing_ok=True)
    process = server.Process(target=run, args=([*map(str, words)], str(output), None, (str(folder), str(file)), last))
    process.start()
    process.join(120)
    assert process.exitcode == (-signal.SIGKILL if last else 0), (process.exitcode, output.read_text())
    return file.stat().st_size


def kill_after_first_block(server: ForkServerContext, words: Sequence[object], output: Path) -> None:
    """Run the command line until the journal of its output names a block, where it ends by SIGKILL."""
    kill_at(server, words, output, b'"block"')


def kill_at(server: ForkServerContext, words: Sequence[object], output: Path, entry: bytes) -> None:
    """Run the command line until the journal of its output has an entry, where it ends by SIGKILL.

    The process sends the signal to itself: a signal from here may come when a short run has already ended.
    """
    from sparsellm.checkpoints.files import WORK
    from sparsellm.outputs.journal import JOURNAL

    killed_at = (str(output / WORK / JOURNAL), entry)
    process = server.Process(target=run, args=([*map(str, words)], os.devnull, killed_at))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def finished(server: ForkServerContext, words: Sequence[object], output: Path) -> float:
    """Run the command line to its end; its seconds."""
    began = time.monotonic()
    process = started(server, words, output)
    process.join(120)
    assert process.exitcode == 0, output.read_text()
    return time.monotonic() - began
