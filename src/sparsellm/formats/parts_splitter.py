"""Divides the joined parts of packed tensors while transformers saves a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Chunk, WeightConverter

from sparsellm.formats.weight_converter import PATTERN


class PartsSplitter(WeightConverter):  # type: ignore[misc]
    """A converter that divides the joined parts of packed tensors when transformers saves a model.

    The parts share memory, and transformers writes tensors that do to one file.

    Args:
        lengths: The sizes of the parts of each tensor, by their names.
    """

    __slots__ = ("joined", "lengths")

    def __init__(self, lengths: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(PATTERN, PATTERN, [Chunk()])
        self.lengths = lengths
        self.joined = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartsSplitter:
        """Return a converter without a tensor. transformers makes one for every packed tensor."""
        return PartsSplitter(self.lengths)

    def reverse_transform(self) -> PartsSplitter:
        """Return itself: transformers reverses the converters of loading."""
        return self

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name, and the pattern of this converter if it is the name of joined parts."""
        return source_key, PATTERN if source_key in self.lengths else None

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Take the joined parts."""
        self.joined = future

    def convert(self, layer_name: str, **keywords: Any) -> dict[str, Tensor]:
        """Return the parts by name."""
        lengths = self.lengths[layer_name]
        return dict(zip(lengths, self.joined.split(list(lengths.values())), strict=True))
