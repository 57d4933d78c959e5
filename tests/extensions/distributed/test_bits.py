"""Runs with a budget of bits that are killed, and that two processes share, end with the bytes of one unbroken run."""

from __future__ import annotations

import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from sparsellm.outputs.folder import SCALES_FILE
from tests import processes
from tests.conftest import report_of
from tests.extensions.distributed.test_distributed import free_port, started
from tests.extensions.distributed.test_kills import contents

QUICK = ("--bits", "3.0", "--samples", "16", "--sequence-length", "32", "--batch-size", "2", "--device", "cpu")
BEST = ("sparsellm", "--effort", "best", "--batch-size", "1")  # sums of gradients are the same for any division then
MOMENTS = {
    "measured": b'"fact": "errors-',
    "first block": b'"block": 0',
    "second block": b'"block": 1',
    "training": b'"fact": "training"',
}
"""Entries of the journal at which a run is killed: errors of formats, a block, or the state of the training is stored."""


def words(model: Path, text: Path, out: Path, *method: str) -> list[str]:
    """A pruning run with a budget of bits."""
    return ["prune", str(model), str(out), "--calibration", str(text), *QUICK, "--method", *method]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs processes that are forked from a server, and SIGKILL")
@pytest.mark.parametrize(
    ("family", "method", "moments"),
    [
        ("llama", ("sparsegpt",), ("measured", "second block")),
        ("opt", ("sparsellm",), ("first block",)),
        ("llama", BEST, ("second block", "training")),
    ],
)
def test_killed_and_resumed(
    family: str,
    method: tuple[str, ...],
    moments: tuple[str, ...],
    server: ForkServerContext,
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
) -> None:
    """SIGKILL after the errors are measured and after blocks; what is left of the budget is shared as in an unbroken run."""
    said, whole = tmp_path / "said.txt", tmp_path / "whole" / "out"
    whole.parent.mkdir()
    processes.finished(server, words(tiny[family], text_file, whole, *method), said)
    wanted = contents(whole)
    assert SCALES_FILE in wanted
    for moment in moments:
        out = tmp_path / moment / "out"
        out.parent.mkdir()
        processes.kill_at(server, words(tiny[family], text_file, out, *method), out, MOMENTS[moment])
        assert not (out / "sparsellm.json").exists(), moment
        processes.finished(server, [*words(tiny[family], text_file, out, *method), "--resume"], said)
        assert contents(out) == wanted, moment
    assert "Traceback" not in said.read_text()


@pytest.mark.long
@pytest.mark.parametrize("method", [("sparsegpt",), BEST])
def test_two_processes(
    method: tuple[str, ...], server: ForkServerContext, tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """They write the weights and scales of one."""
    one, two, port = tmp_path / "one", tmp_path / "two", free_port()
    run = words(tiny["llama"], text_file, two, *method)
    both = [started(rank, port, *run, module="tests.short_training") for rank in (0, 1)]
    processes.finished(server, words(tiny["llama"], text_file, one, *method), tmp_path / "said.txt")
    told = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    for file in ("model.safetensors", SCALES_FILE):
        assert (two / file).read_bytes() == (one / file).read_bytes(), file
    layers = [[layer | {"seconds": 0} for block in report_of(x)["blocks"] for layer in block["layers"]] for x in (one, two)]
    assert layers[0] == layers[1]
    assert len({layer["bits"] for layer in layers[0]}) > 1
