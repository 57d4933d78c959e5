"""The command line in processes forked from one that has imported everything; see `server` in conftest.py."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest


def run(words: list[str], output: str) -> None:
    """The command line of `short_training` in a process of its own, what it prints in a file."""
    with Path(output).open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from tests.short_training import app

    app(words)


@contextmanager
def fork_server(output: Path) -> Iterator[ForkServerContext]:
    """A context whose processes start with torch and transformers loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sparsellm.cli.app", "tests.warm", __name__])
        finished(context, ["methods"], output)  # the server has started when this has ended
        yield context


def started(server: ForkServerContext, words: Sequence[object], output: Path) -> ForkServerProcess:
    """Start the command line; its output is appended to a file."""
    process = server.Process(target=run, args=([*map(str, words)], str(output)))
    process.start()
    return process


def kill_after_first_block(server: ForkServerContext, words: Sequence[object], output: Path) -> None:
    """Run the command line and send it SIGKILL as soon as the journal of its output names a block."""
    kill_at(server, words, output, b'"block"')


def kill_at(server: ForkServerContext, words: Sequence[object], output: Path, entry: bytes) -> None:
    """Run the command line and send it SIGKILL as soon as the journal of its output has an entry."""
    from sparsellm.pruning.journal import JOURNAL
    from sparsellm.runs.records import WORK

    process = started(server, words, Path(os.devnull))
    journal, deadline = output / WORK / JOURNAL, time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        if journal.exists() and entry in journal.read_bytes():
            break
    process.kill()
    process.join()


def finished(server: ForkServerContext, words: Sequence[object], output: Path) -> float:
    """Run the command line to its end; its seconds."""
    began = time.monotonic()
    process = started(server, words, output)
    process.join(120)
    assert process.exitcode == 0, output.read_text()
    return time.monotonic() - began
