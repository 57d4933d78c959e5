"""Lists that are kept in memory while a budget lasts and in files after that: the same tensors either way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsellm.storage import OnFile, Rows, Storage, lengths

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def some(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three tensors of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [(8 * torch.randn(length, 4, generator=generator)).to(dtype) for length in (5, 1, 7)]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_files_give_back_what_was_put(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, also parts of larger tensors and transposed ones; a tensor read is its reader's own."""
    kept = OnFile(tmp_path / "one")
    for tensor in some(dtype):
        kept.append(tensor)
    assert len(kept) == 3
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(kept, some(dtype), strict=True))
    kept[-1] = some(dtype)[0].T
    assert torch.equal(kept[2], some(dtype)[0].T)
    kept[2].zero_()
    assert torch.equal(kept[2], some(dtype)[0].T)
    kept[0] = some(dtype)[2][1:3]
    assert torch.equal(kept[0], some(dtype)[2][1:3])
    assert lengths(kept) == [2, 1, 4]


def test_files_do_no_more_than_that(tmp_path: Path) -> None:
    """What a list on files cannot do is refused, not done by halves."""
    kept = OnFile(tmp_path)
    kept.append(some()[0])
    with pytest.raises(IndexError):
        kept[1]
    for wrong in (lambda: kept.insert(0, some()[0]), lambda: kept[0:1], lambda: kept.__delitem__(0), kept.pop):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize(("budget", "files"), [(None, [0, 0, 0]), (0, [2, 3, 2]), (250, [0, 1, 0]), (100, [2, 2, 2])])
def test_the_budget_decides(budget: int | None, files: list[int], tmp_path: Path) -> None:
    """What fits is in memory, what does not in files, and what was given back can be used again; no file is left."""
    storage = Storage(budget, tmp_path / "work")
    counted = []
    with storage.lists(2, 100) as one:
        counted.append(sum(isinstance(kept, OnFile) for kept in one))
        with storage.lists(1, 100) as two:
            counted.append(counted[0] + sum(isinstance(kept, OnFile) for kept in two))
            for kept in (*one, *two):
                for tensor in some():
                    kept.append(tensor)
                assert all(torch.equal(a, b) for a, b in zip(kept, some(), strict=True))
        counted.append(sum(isinstance(kept, OnFile) for kept in one))
    with storage.lists(2, 100) as again:
        assert sum(isinstance(kept, OnFile) for kept in again) == files[0]
    assert counted == files
    assert not list(tmp_path.rglob("*.safetensors"))


def test_files_go_when_something_fails(tmp_path: Path) -> None:
    storage = Storage(0, tmp_path)
    with suppress(RuntimeError), storage.lists(1, 100) as (kept,):
        kept.append(some()[0])
        assert list(tmp_path.rglob("*.safetensors"))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on_file", [False, True])
@pytest.mark.parametrize(
    "wanted", [slice(0, 13), slice(0, 11), slice(11, 13), slice(5, 6), slice(0, 13, 4), slice(2, 12, 3)], ids=str
)
def test_rows(on_file: bool, wanted: slice, tmp_path: Path) -> None:
    """Rows are counted over the whole list; tensors without any are left out; cuts of cuts too."""
    source = OnFile(tmp_path) if on_file else []
    for tensor in some():
        source.append(tensor)
    found = Rows(source, wanted)
    assert torch.equal(torch.cat(list(found)), torch.cat(some())[wanted])
    assert lengths(found) == [len(tensor) for tensor in found]
    assert all(lengths(found))
    again = Rows(found, slice(0, sum(lengths(found)), 2))
    assert torch.equal(torch.cat(list(again)), torch.cat(some())[wanted][::2])
