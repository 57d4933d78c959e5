"""Chunks of rows for a processor's cache."""

from __future__ import annotations

import pytest
import torch

from sparsellm.runtime import devices


@pytest.mark.parametrize("shape", [(10, 4), (1, 1000), (0, 5), (7, 0)], ids=str)
def test_row_chunks_are_views_of_all_rows(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of a matrix at a time, at least one; where work is queued, all at once."""
    monkeypatch.setattr(devices, "CACHED_ENTRIES", 12)
    one, other = torch.zeros(shape), torch.zeros(shape)
    chunks = list(devices.row_chunks(one, other))
    for first, second in chunks:
        assert len(first) == len(second) <= max(1, 12 // max(shape[1], 1))
        first.add_(1)
        second.sub_(1)
    assert bool((one == 1).all() and (other == -1).all())
    monkeypatch.setattr(devices, "queued", lambda device: True)
    assert len(list(devices.row_chunks(one, other))) == 1
