"""Programs of Python in processes forked from one that has torch and transformers loaded, and of sparsellm nothing.

For tests of packages that a process finds when it starts: loading the libraries takes longer than what most of them do.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Start(Protocol):
    """Runs a module with its arguments to its end, as `python -m`, in a folder and an environment."""

    def __call__(self, *words: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]: ...


@contextmanager
def warm_programs(outputs: Path) -> Iterator[Start]:
    """A process that forks programs one after the other; what they print is kept in files of the folder `outputs`."""
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert server.stdin is not None
    assert server.stdout is not None
    requests, replies = server.stdin, server.stdout

    def start(*words: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        files = [outputs / "stdout.txt", outputs / "stderr.txt"]
        request = {"words": words, "folder": str(folder), "environment": {**environment}, "files": [*map(str, files)]}
        print(json.dumps(request), file=requests, flush=True)
        status = int(replies.readline())
        return subprocess.CompletedProcess(words, status, *(file.read_text(encoding="utf-8") for file in files))

    with server:
        yield start
        requests.close()


def serve(requests: Iterator[str]) -> None:
    """Run each request in a process of its own and print how it ended."""
    import torch
    import transformers.models.opt.modeling_opt
    import transformers.trainer_utils  # noqa: F401

    torch.set_num_threads(1)  # a process with more could not be forked
    for line in requests:
        if (child := os.fork()) == 0:
            run(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(words: Sequence[str], folder: str, environment: Mapping[str, str], files: Sequence[str]) -> None:
    """Run a module in this process as if it had just been started."""
    for descriptor, file in enumerate([os.devnull, *files]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(iter(sys.stdin))
