"""The durable state of a training: whose it is, and how much of the time storing it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsellm.extensions.recover.training import masked_training
from sparsellm.extensions.recover.training.masked_training import STORING_SHARE, TrainingStore
from sparsellm.outputs.journal import Journal

TENSORS = {"x": torch.arange(3.0)}


def test_a_state_is_that_of_its_training(tmp_path: Path) -> None:
    """A resumed run finds the last state of the training that it continues, and none of another one."""
    store = TrainingStore(Journal.begin(tmp_path, {})).begin("block 0")
    assert store.load() is None
    store.save(TENSORS, {"order": [1, 2]})
    assert store.begin("block 1").load() is None
    resumed = TrainingStore(Journal.resume(tmp_path, {}))
    assert resumed.begin("block 1").load() is None
    tensors, values = resumed.begin("block 0").load() or ({}, {})
    assert torch.equal(tensors["x"], TENSORS["x"])
    assert values == {"order": [1, 2]}


def test_storing_takes_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing takes 2 seconds and training 1 second between states: the first state is stored, then each one that is due."""
    clock, stored, journal = [0.0], [0], Journal.begin(tmp_path, {})
    monkeypatch.setattr(masked_training.time, "monotonic", lambda: clock[0])

    def replace(*_: Any) -> None:
        clock[0] += 2
        stored[0] += 1

    monkeypatch.setattr(journal, "store_latest", replace)
    store = TrainingStore(journal)
    for number in range(10):  # the trainings of ten blocks
        store.begin(f"block {number}")
        for _ in range(50):
            clock[0] += 1
            store.save(TENSORS, {})
    assert stored[0] == 1 + 10 * 2  # 20 seconds pass between two states of a block
    assert 2 * (stored[0] - 1) <= STORING_SHARE * clock[0]
