"""Weights of whole models in memory of their own, not in mapped files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def read_unmapped() -> Iterator[None]:
    """Have transformers read weights into memory within the context, as this package does, instead of mapping their files.

    A mapped file that another program writes to changes the loaded model, and one that is cut off ends the process. Versions
    of transformers and safetensors without that choice map files all the same.
    """
    from transformers import modeling_utils

    opened = modeling_utils.safe_open

    def read(*arguments: Any, **keywords: Any) -> Any:
        return opened(*arguments, **keywords | ({"backend": "pread"} if "backend" in keywords else {}))

    modeling_utils.safe_open = read
    try:
        yield
    finally:
        modeling_utils.safe_open = opened
