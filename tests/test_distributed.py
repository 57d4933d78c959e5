"""Several processes that work together: the same weights in all of them, and as from one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import OPTConfig

from sparsellm import distributed
from tests.several import CASES, CONFIGS

HERE = Path(__file__).parent


def launched(processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A program run by so many processes, one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, words)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def found(folder: Path, count: int, case: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and figures that one of `count` processes left."""
    file = folder / str(count) / f"{case}-{rank}"
    return load_file(f"{file}.safetensors"), json.loads(Path(f"{file}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("count", "chosen"), [(2, ""), (4, "llama")])
def test_as_one_process(count: int, chosen: str, tmp_path: Path) -> None:
    """Every method, with every stage that goes over windows: all processes have the same weights, and one alone has them too.

    To the bit, since each batch's products are the same wherever they are made, and sums of float64 round to the same float32;
    so masks, errors and perplexities are the same too.
    """
    for processes in (1, count):
        (tmp_path / str(processes)).mkdir()
        ran = launched(processes, HERE / "several.py", tmp_path / str(processes), chosen)
        assert ran.returncode == 0, ran.stderr[-2000:]
    for case in [name for name in CASES if chosen in name]:
        alone, said = found(tmp_path, 1, case, 0)
        for rank in range(count):
            weights, told = found(tmp_path, count, case, rank)
            assert [name for name, tensor in alone.items() if not torch.equal(weights[name], tensor)] == [], (case, rank)
            assert told["perplexity"] == said["perplexity"]
            layers = [[layer | {"seconds": 0} for layer in data["layers"]] for data in (told, said)]
            assert layers[0] == layers[1], (case, rank)
            assert told["coupled"] is ("coupled" in case)
    if chosen == "":
        assert 0 < found(tmp_path, count, "opt sparsegpt", 0)[1]["sent"] - exchanged(CONFIGS["opt"]) < SMALL


SMALL = 60_000
"""Bytes of plain data in such a run, at most: results, losses, counts of tokens."""


def exchanged(config: OPTConfig) -> int:
    """Bytes that SparseGPT exchanges, by the formula of docs/distributed.md: Grams and means in float64, weights as stored."""
    width, hidden = config.hidden_size, config.ffn_dim
    grams = 3 * (upper(width) + width) + upper(hidden) + hidden
    weights = 4 * width * width + 2 * width * hidden
    return config.num_hidden_layers * (8 * grams + 4 * weights)


def upper(width: int) -> int:
    """How many numbers of a symmetric matrix are exchanged: panels of 256 rows, from the diagonal on."""
    return sum(min(256, width - start) * (width - start) for start in range(0, width, 256))


def test_alone() -> None:
    """Without other processes nothing is exchanged and nothing changes."""
    tensor = torch.ones(3)
    before = distributed.sent()
    distributed.sum_(tensor)
    distributed.handed(0, tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert distributed.given(0, tensor) is tensor
    assert (distributed.world(), distributed.rank(), distributed.leads()) == (1, 0, True)
    assert distributed.dealt([1, 2, 3]) == distributed.collected([1, 2, 3]) == [1, 2, 3]
    assert distributed.told((1, 2)) == [(1, 2)]
    assert distributed.owners([3.0, 1.0]) == [0, 0]
    assert distributed.sent() == before
    with distributed.joined({}) as leads:
        assert leads


def test_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest tasks first, each to whoever has the least to do: no load is above the mean by more than a task."""
    monkeypatch.setattr(distributed, "world", lambda: 3)
    costs = [5.0, 1.0, 9.0, 2.0, 2.0, 7.0, 1.0]
    whose = distributed.owners(costs)
    loads = [sum(cost for cost, owner in zip(costs, whose, strict=True) if owner == process) for process in range(3)]
    assert sorted(loads) == [9.0, 9.0, 9.0]
