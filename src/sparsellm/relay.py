"""A run's journal where several processes work together: one keeps it, and the others read it through that one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm import distributed
from sparsellm.blocks import Block
from sparsellm.journal import Journal, block_result
from sparsellm.methods import BlockResult


class Relay(Journal):
    """The leader's journal for all: every call is made by all processes, and what it gives is the same in all of them.

    Only the leader's machine needs the files. own: the journal, in the process that leads.
    """

    def __init__(self, folder: Path, own: Journal | None) -> None:
        super().__init__(folder)
        self._own = own
        self.lost = own.lost if own else ""

    def fact(self, name: str) -> Any:
        return distributed.agreed(self._own.fact(name) if self._own else None)

    def note(self, name: str, value: Any) -> None:
        if self._own:
            self._own.note(name, value)

    def keep_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        if self._own:
            self._own.keep_tensors(name, tensors)

    def tensors(self, name: str) -> dict[str, Tensor] | None:
        found = self._own.tensors(name) if self._own else None
        forms = None if found is None else {key: (tensor.shape, _kind(tensor)) for key, tensor in found.items()}
        if (forms := distributed.agreed(forms)) is None:
            return None
        if found is None:
            found = {key: torch.empty(shape, dtype=getattr(torch, kind)) for key, (shape, kind) in forms.items()}
        return {key: distributed.given(0, found[key]) for key in forms}

    def finished(self, index: int) -> BlockResult | None:
        done = self._own.finished(index) if self._own else None
        told = distributed.agreed(None if done is None else asdict(done))
        return None if told is None else block_result(told)

    def keep(self, block: Block, result: BlockResult) -> Path:
        return Path(distributed.agreed(str(self._own.keep(block, result)) if self._own else None))

    def restore(self, block: Block) -> Path:
        file = str(self._own.restore(block)) if self._own else None
        with torch.no_grad():
            distributed.handed(0, *block.module.state_dict().values())
        return Path(distributed.agreed(file))

    def block_files(self) -> dict[int, Path]:
        return self._own.block_files() if self._own else {}


def _kind(tensor: Tensor) -> str:
    """A tensor's dtype by its name in torch."""
    return str(tensor.dtype).removeprefix("torch.")
