"""Memory of the machine: the size of the processors' caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsellm.runtime.memory import cache_bytes


def described(folder: Path, caches: dict[int, list[tuple[int, str, str, str]]]) -> Path:
    """A folder as Linux describes processors in: of each, level, type, size and sharing processors of its caches."""
    for cpu, entries in caches.items():
        for number, values in enumerate(entries):
            index = folder / f"cpu{cpu}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
                (index / name).write_text(f"{value}\n", encoding="ascii")
    return folder


L1 = [(1, "Data", "32K", "0"), (1, "Instruction", "64K", "0")]


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ({0: [*L1, (2, "Unified", "1024K", "0"), (3, "Unified", "32768K", "0-1")]}, 2**25),
        ({cpu: [(2, "Unified", "4M", "0-1" if cpu < 2 else "2-3")] for cpu in range(4)}, 2**23),
        ({0: [(3, "Unified", "8M", "0")], 1: [(3, "Unified", "8M", "1")], 7: [(3, "Unified", "8M", "7")]}, 2**24),
        ({0: L1}, 2**15),
        ({0: [(3, "Unified", "", "0")]}, None),
        ({0: [(3, "Unified", "many", "0")]}, None),
        ({}, None),
    ],
)
def test_the_last_level_counts_once_for_those_that_share_it(
    caches: dict[int, list[tuple[int, str, str, str]]], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the processors that this process may use, here 0 to 3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert cache_bytes(described(tmp_path, caches)) == expected
