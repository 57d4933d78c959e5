"""Inspection of a checkpoint: zeros per layer, whether a pattern holds, and which tensors differ from another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, computed_field
from torch import Tensor

from sparsellm.checkpoints.comparison import Comparison, Tensors, compare
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.methods import StoredPattern
from sparsellm.models.architecture_file import read_architecture
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.runs.records import REPORT, load_report
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.patterns import NM, Pattern, Unstructured, parse_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerZeros:
    """Zeros of one linear layer.

    Attributes:
        name: Full name of the layer.
        shape: (out, in).
        zeros: Number of zero weights.
        pattern: Expected pattern; None if none is expected.
        holds: Whether the layer has that pattern; None if none is expected.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    pattern: StoredPattern | None
    holds: bool | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def sparsity(self) -> float:
        """The fraction of weights that are zero."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True, kw_only=True)
class Inspection(Comparison):
    """Zeros of a checkpoint, and its differences from another one.

    Attributes:
        model: Name of the checkpoint.
        layers: Zeros of each linear layer in the blocks.
        parameters: Number of parameters, tied ones counted once.
        zeros: Number of parameters that are zero.
        expected: The expected pattern, if any.
        against: Name of the other checkpoint, if any.
        missing: Layers that the checkpoint should have and does not.
        total: Fraction of zeros in all checked layers together.
        total_holds: Whether `total` reaches the expected sparsity; True if none is expected.
    """

    model: str
    layers: tuple[LayerZeros, ...]
    parameters: int
    zeros: int
    expected: StoredPattern | None = None
    against: str | None = None
    missing: tuple[str, ...] = ()
    total: float = 0.0
    total_holds: bool = True

    @computed_field  # type: ignore[prop-decorator]
    @property
    def as_expected(self) -> bool:
        """Whether all checked layers, at least one, are present and have their pattern, and the total sparsity holds."""
        checked = [layer.holds for layer in self.layers if layer.holds is not None]
        return self.expected is None or (bool(checked) and all(checked) and not self.missing and self.total_holds)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        data: dict[str, Any] = TypeAdapter(Inspection).dump_python(self, mode="json")
        return data


def inspect(
    model: str | Path,
    against: str | Path | None = None,
    expect: str | Pattern | None = None,
    *,
    trust_remote_code: bool = False,
    architecture: str | Path | None = None,
) -> Inspection:
    """Count the zeros of a checkpoint tensor by tensor, check a pattern, and compare with another checkpoint.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama".
        against: Another checkpoint to compare with, named in the same way.
        expect: Pattern that every pruned layer must have: each layer that the folder's sparsellm.json lists, or every linear
            layer of the blocks if there is no such file. If the run allocated different sparsities to the layers, each layer
            must have its own, and all together the expected one.
        trust_remote_code: Run Python code that comes with the checkpoints.
        architecture: YAML file that describes the model's architecture.

    Returns:
        The zeros of each layer and of the checkpoint, whether the pattern holds, and the tensors that differ.

    Raises:
        InvalidSetting: The pattern or the architecture is invalid.
        BadCheckpoint: A checkpoint or its report cannot be read.
    """
    described = None if architecture is None else read_architecture(architecture)
    checkpoint = open_checkpoint(str(model), trusted=trust_remote_code, architecture=described)
    pattern = parse_pattern(expect) if isinstance(expect, str) else expect
    skeleton = checkpoint.skeleton()
    tensors = Tensors(checkpoint.folder, skeleton)
    layers_of = layers_by_parameter(skeleton)
    all_layers = [block.full_name(name) for pairs in layers_of.values() for block, name in pairs]
    planned = planned_patterns(checkpoint.folder)
    allocated = isinstance(pattern, Unstructured) and len(set((planned or {}).values())) > 1
    names = all_layers if planned is None else list(planned)
    required = {} if pattern is None else planned if allocated and planned else dict.fromkeys(names, pattern)
    layers: list[LayerZeros] = []
    parameters = zeros = 0
    counted: set[str] = set()
    for key, tensor in tensors:
        if tensors.one_name(key) in counted:
            continue  # the same tensor under another name
        counted.add(tensors.one_name(key))
        parameters += tensor.numel()
        zeros += count_zeros(tensor)
        layers += [_layer_zeros(block, name, tensor, required=required) for block, name in layers_of.get(key, ())]
    checked = [layer for layer in layers if layer.holds is not None]
    weights, removed = sum(x.shape[0] * x.shape[1] for x in checked), sum(x.zeros for x in checked)
    changes = Comparison()
    if against:
        other = open_checkpoint(str(against), trusted=trust_remote_code)
        changes = compare(tensors, Tensors(other.folder, other.skeleton()))
    return Inspection(
        model=str(model),
        layers=tuple(layers),
        parameters=parameters,
        zeros=zeros,
        expected=pattern,
        against=None if against is None else str(against),
        missing=tuple(sorted(set(names) - {layer.name for layer in layers})),
        total=removed / max(weights, 1),
        # Each layer rounds its number of zeros separately.
        total_holds=pattern is None or not allocated or removed >= pattern.count_removed(weights) - len(checked),
        **vars(changes),
    )


def layers_by_parameter(model: PreTrainedModel) -> dict[str, list[tuple[Block, str]]]:
    """The linear layers of the blocks, by the full name of the parameter that holds them."""
    layers: dict[str, list[tuple[Block, str]]] = {}
    for block in blocks_of(model):
        for name in block.layers:
            layers.setdefault(block.full_name(block.parameter(name)), []).append((block, name))
    return layers


def _layer_zeros(block: Block, name: str, parameter: Tensor, *, required: Mapping[str, Pattern]) -> LayerZeros:
    """Count the zeros of a layer, and check the pattern that is required of it, if any."""
    weight, pattern = block.linear_view(name, parameter), required.get(block.full_name(name))
    holds = None if pattern is None else follows(weight, pattern)
    return LayerZeros(block.full_name(name), (weight.shape[0], weight.shape[1]), count_zeros(weight), pattern, holds)


def follows(weight: Tensor, pattern: Pattern) -> bool:
    """Whether a weight, (out, in), has at least the zeros that a pattern requires: per group for N:M, otherwise in total."""
    zero = weight == 0
    if isinstance(pattern, NM):
        if weight.shape[1] % pattern.group:
            return False
        return bool((zero.unflatten(1, (-1, pattern.group)).sum(-1) >= pattern.zeros).all())
    return int(zero.sum()) >= pattern.count_removed(weight.numel())


def planned_patterns(folder: Path) -> dict[str, Pattern] | None:
    """Pattern of each pruned layer by its full name, from the report in the folder; None without a report."""
    file = folder / REPORT
    return {layer.name: layer.pattern for layer in load_report(file).layers} if file.is_file() else None
