"""`--max-memory` holds: what a process takes above its imports stays within a tenth of the budget."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from pydantic import ByteSize, TypeAdapter

from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.mark.long
@pytest.mark.parametrize(
    ("blocks", "budget", "streamed"),
    [
        (8, "440MB", False),  # the model takes 206 MB, less than half: it is in memory as a whole
        (12, "300MB", True),
    ],
)
def test_a_run_keeps_within_its_budget(
    blocks: int, budget: str, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and read block by block, on a model whose blocks are large beside what else a process holds."""
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("memory_budget")
    memory = benchmark.prune(tmp_path, benchmark.llama_config(blocks, 1024), budget, "sparsegpt")
    assert memory["streamed"] is streamed
    assert memory["peak"] - memory["imports"] <= 1.1 * TypeAdapter(ByteSize).validate_python(budget)
