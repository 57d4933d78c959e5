"""Lists that are kept in memory while a budget lasts and in files after that: the same tensors either way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsellm.runtime.offload import DEVICE, DISK, HOST, DiskList, HostList, OffloadManager, RowSubset, TensorList, lengths

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def some(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three tensors of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [(8 * torch.randn(length, 4, generator=generator)).to(dtype) for length in (5, 1, 7)]


def list_of(kind: str, folder: Path) -> TensorList:
    return DiskList(folder / "one") if kind == "files" else HostList()


every_kind = pytest.mark.parametrize("kind", ["files", "host"])


@every_kind
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_lists_give_back_what_was_put(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, also parts of larger tensors and transposed ones; a tensor read is its reader's own."""
    kept = list_of(kind, tmp_path)
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
    with pytest.raises(IndexError):
        kept[3]


@every_kind
def test_what_is_on_its_way_is_not_what_was_there_before(kind: str, tmp_path: Path) -> None:
    """Written while the next is fetched already, read in any order, written with another shape: always what was put last."""
    kept = list_of(kind, tmp_path)
    for number in range(4):
        kept.append(torch.full((3,), float(number)))
    for number in range(4):
        assert float(kept[number][0]) == number
        kept[(number + 1) % 4] = torch.full((3,), float(number) + 1)
    assert [float(tensor[0]) for tensor in kept] == [4, 1, 2, 3]
    kept[1] = torch.ones(5, 2)
    assert kept[0].shape == (3,)
    assert kept[1].shape == (5, 2)
    assert lengths(kept) == [3, 5, 3, 3]
    assert [float(kept[number].flatten()[0]) for number in (3, 0, 2, 2, 1)] == [3, 4, 2, 2, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
def test_a_gpu_copies_while_it_works() -> None:
    """Pinned memory; what is read, worked on and written back many times over is what it would be on the GPU alone."""
    kept, plain = HostList(), []
    for number in range(6):
        tensor = torch.randn(1000, 1000, device="cuda", generator=torch.Generator("cuda").manual_seed(number)) / 30
        kept.append(tensor)
        plain.append(tensor)
    for _ in range(5):
        for number in range(6):
            kept[number] = (kept[number] @ kept[number]).tanh()
            plain[number] = (plain[number] @ plain[number]).tanh()
    assert all(some.is_pinned() for some in kept._kept)
    assert all(torch.equal(a, b) and a.is_cuda for a, b in zip(kept, plain, strict=True))


def test_a_gpu_has_the_processors_memory_too(tmp_path: Path) -> None:
    """What its own has no room for goes there, and to files only after that; what was given back can be used again."""
    storage = OffloadManager(100, tmp_path, host=150)

    def kinds(count: int) -> list[str]:
        with storage.new_lists(count, 50) as kept:
            return [type(some).__name__ for some in kept]

    assert kinds(2) == ["list"] * 2
    assert kinds(3) == ["HostList"] * 3
    assert kinds(4) == ["DiskList"] * 4
    with storage.new_lists(1, 60), storage.new_lists(1, 60) as (kept,):
        assert isinstance(kept, HostList)
        assert kinds(2) == ["DiskList"] * 2
        assert storage.reserved == {DEVICE: 60, HOST: 60, DISK: 0}
    assert kinds(2) == ["list"] * 2


@pytest.mark.parametrize(("budget", "files"), [(None, [0, 0, 0]), (0, [2, 3, 2]), (250, [0, 1, 0]), (100, [2, 2, 2])])
def test_the_budget_decides(budget: int | None, files: list[int], tmp_path: Path) -> None:
    """What fits is in memory, what does not in files, and what was given back can be used again; no file is left."""
    storage = OffloadManager(budget, tmp_path / "work")
    counted = []
    with storage.new_lists(2, 100) as one:
        counted.append(sum(isinstance(kept, DiskList) for kept in one))
        with storage.new_lists(1, 100) as two:
            counted.append(counted[0] + sum(isinstance(kept, DiskList) for kept in two))
            for kept in (*one, *two):
                for tensor in some():
                    kept.append(tensor)
                assert all(torch.equal(a, b) for a, b in zip(kept, some(), strict=True))
        counted.append(sum(isinstance(kept, DiskList) for kept in one))
    with storage.new_lists(2, 100) as again:
        assert sum(isinstance(kept, DiskList) for kept in again) == files[0]
    assert counted == files
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_still_fits_on_the_device_is_told() -> None:
    """To the byte, beside what lists have reserved there; without a budget everything fits."""
    manager = OffloadManager(250)
    assert manager.fits_on_device(250)
    assert not manager.fits_on_device(251)
    with manager.new_lists(2, 100):
        assert manager.fits_on_device(50)
        assert not manager.fits_on_device(51)
    assert manager.fits_on_device(250)
    assert OffloadManager().fits_on_device(2**60)


def test_files_go_when_something_fails(tmp_path: Path) -> None:
    storage = OffloadManager(0, tmp_path)
    with suppress(RuntimeError), storage.new_lists(1, 100) as (kept,):
        kept.append(some()[0])
        assert list(tmp_path.rglob("*.safetensors"))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["memory", "files", "host"])
def test_rows(kind: str, tmp_path: Path) -> None:
    """Rows are counted over the whole list; tensors without any are left out; cuts of cuts too."""
    source = [] if kind == "memory" else list_of(kind, tmp_path)
    for tensor in some():
        source.append(tensor)
    for wanted in (slice(0, 13), slice(0, 11), slice(11, 13), slice(5, 6), slice(0, 13, 4), slice(2, 12, 3)):
        found = RowSubset(source, wanted)
        assert torch.equal(torch.cat(list(found)), torch.cat(some())[wanted])
        assert lengths(found) == [len(tensor) for tensor in found]
        assert all(lengths(found))
        again = RowSubset(found, slice(0, sum(lengths(found)), 2))
        assert torch.equal(torch.cat(list(again)), torch.cat(some())[wanted][::2])
