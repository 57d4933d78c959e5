"""The reader of packed checkpoints: which parts form a tensor, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sparsellm.checkpoints.readers import FoundWeights, TensorHeader
from sparsellm.extensions.packed.formats.packed_tensors import find_packed
from sparsellm.extensions.packed.packed_files import check_version


class PackedReader:
    """Reads packed checkpoints.

    Args:
        name: Name of the checkpoint, for messages.
        fields: The fields of its config.json.

    Raises:
        UnsupportedModel: It is packed in a version of the format that this package does not read.
    """

    lossless: ClassVar[bool] = True

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        check_version(name, fields)

    def register(self) -> None:
        """Make transformers load packed models."""
        from sparsellm.extensions.packed.formats.transformers import register  # imports transformers

        register()

    def find(
        self,
        headers: Mapping[Path, Mapping[str, TensorHeader]],
        metadata: Mapping[Path, Mapping[str, str]],
        read: Callable[[Path, str], bytes],
    ) -> FoundWeights:
        """Find the packed tensors, as `sparsellm.checkpoints.readers.Reader.find`."""
        weights = {file: find_packed(file, stored, metadata[file]) for file, stored in headers.items()}
        parts = {name for found in weights.values() for weight in found.values() for _, name in weight.parts.values()}
        return FoundWeights(weights, frozenset(parts), lossless=True)
