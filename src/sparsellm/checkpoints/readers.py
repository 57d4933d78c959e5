"""Readers of weights that are stored in another form: which stored tensors form a weight, and its values.

Extensions bring them. A checkpoint whose config.json has a `quantization_config` is read by the reader of its `quant_method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sparsellm.checkpoints.documents import QUANTIZATION_KEYS
from sparsellm.errors import UnsupportedModel
from sparsellm.extension import find, names_of


@dataclass(frozen=True)
class TensorHeader:
    """Dtype (its name in torch, such as "float32") and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes; of dtypes with less than a byte for a number, that of whole bytes."""
        dtype: torch.dtype | None = getattr(torch, self.dtype, None)
        return self.numel * (1 if dtype is None else dtype.itemsize)


class StoredWeight(Protocol):
    """A weight that is stored as other tensors, its parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the model."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the dtype in which it is read unless another one is asked for."""
        ...

    @property
    def parts(self) -> Mapping[str, tuple[Path, str]]:
        """The file of each part and its name there, by the name of the part."""
        ...

    @property
    def integers(self) -> Any:
        """The format of its integers; None if it has none."""
        ...

    @property
    def adds_bias(self) -> bool:
        """Whether the programs that write this form add a bias of 0 to the layer."""
        ...

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
        """Compute the weight.

        Args:
            parts: Its parts.
            dtype: The dtype of the result, which a lossless reader does not heed; None for the weight's own.

        Raises:
            BadCheckpoint: A part is damaged. The message says how, without the names of file and tensor.
        """
        ...


@dataclass(frozen=True)
class FoundWeights:
    """The weights that a reader finds in the files of a checkpoint.

    Attributes:
        weights: By file and name. A weight whose parts lie in several files is in one of them.
        hidden: Names of the tensors that are no tensors of the model, such as parts.
        lossless: Whether the weights are the model's own, bit by bit.
        dtype: Name of the dtype in which all weights are read unless another one is asked for; None for their own.
        describe: Describes the checkpoint of a name, of so many bytes and parameters, in a sentence; empty if there is no need.
    """

    weights: Mapping[Path, Mapping[str, StoredWeight]]
    hidden: frozenset[str]
    lossless: bool = False
    dtype: str | None = None
    describe: Callable[[str, int, int], str] = lambda name, stored, parameters: ""


class Reader(Protocol):
    """Reads one form. It is called with the name of a checkpoint, for messages, and the fields of its config.json.

    Attributes:
        lossless: As `FoundWeights.lossless`. Models whose form is lossless are not pruned as they are, but unpacked first.
    """

    lossless: ClassVar[bool]

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        """Raises UnsupportedModel for a variant of the form that is not read."""

    def register(self) -> None:
        """Make transformers load models of a lossless form."""

    def find(
        self,
        headers: Mapping[Path, Mapping[str, TensorHeader]],
        metadata: Mapping[Path, Mapping[str, str]],
        read: Callable[[Path, str], bytes],
    ) -> FoundWeights:
        """Find the weights.

        Args:
            headers: The stored tensors of each file.
            metadata: The metadata of each file.
            read: Reads the bytes of a stored tensor.

        Raises:
            BadCheckpoint: The tensors contradict each other or the configuration.
        """
        ...


def quantization_settings(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of a configuration that describes how the weights are stored; None without one."""
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for key in QUANTIZATION_KEYS:
            if part.get(key) is not None:
                return part[key] if isinstance(part[key], dict) else {}
    return None


def reader_of(name: str, fields: Mapping[str, Any]) -> Reader | None:
    """Return the reader of a checkpoint's weights; None if they are stored as they are.

    Args:
        name: Its name, for messages.
        fields: The fields of config.json.

    Raises:
        UnsupportedModel: No reader reads them.
    """
    settings = quantization_settings(fields)
    if settings is None:
        return None
    method = str(settings.get("quant_method"))
    kind = find("readers", method)
    if kind is None:
        read = ", ".join(sorted(names_of("readers")))
        raise UnsupportedModel(
            f"{name} is quantized by {method[:40]}, which is not supported; {read} are. Prune the plain checkpoint that "
            "it was made from, or dequantize it with the program that wrote it."
        )
    reader: Reader = kind(name, fields)
    return reader


def is_lossless(method: Any) -> bool:
    """Whether a model in memory with this `quantization_method` of transformers has weights that are encoded without loss."""
    kind = find("readers", str(method)) if isinstance(method, str) else None
    return kind is not None and bool(kind.lossless)
