"""Inspection of a model: zeros per layer, whether a pattern holds, and which tensors differ from another model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, computed_field

from sparsellm.checkpoints.comparison import CheckpointComparison, StoredTensors, compare, layers_by_parameter
from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.loading import open_source
from sparsellm.checkpoints.side_files import HoldsFormats, StoredFormat, formats_of
from sparsellm.errors import plural
from sparsellm.evaluation.results import Summarized
from sparsellm.methods import StoredPattern
from sparsellm.outputs.report import load_report
from sparsellm.solvers.linalg import all_finite, count_zeros
from sparsellm.solvers.patterns import Pattern, parse_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerZeros:
    """Zeros of one linear layer.

    Attributes:
        shape: (out, in).
        pattern: Expected pattern; None if none is expected.
        holds: Whether the layer has that pattern; None if none is expected of it alone.
        bits: Bits of the integers that the weights are multiples of; None if they are not.
        group_size: Columns that share a scale, 0 for whole rows; None without integers.
        bits_per_weight: Bits that a weight takes in the plain packed form, mask and scales included; None without integers.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    pattern: StoredPattern | None
    holds: bool | None
    bits: int | None = None
    group_size: int | None = None
    bits_per_weight: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def sparsity(self) -> float:
        """The fraction of weights that are zero."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True, kw_only=True, repr=False)
class Inspection(Summarized, CheckpointComparison):
    """Zeros of a model, and its differences from another one.

    Attributes:
        layers: Zeros of each linear layer in the blocks.
        parameters: Number of parameters, tied ones counted once.
        zeros: Number of parameters that are zero.
        not_finite: Number of parameters that are NaN or infinite.
        not_finite_in: The tensors that these are in.
        expected: The expected pattern, if any.
        against: Name of the other model, if any.
        missing: Layers that the model should have and does not.
        checked: Number of layers that are checked, alone or together.
        total: Fraction of zeros in all checked layers together.
        total_holds: Whether `total` reaches the expected sparsity; True if none is expected.
        packed: The sizes of a packed or quantized model in one sentence; empty for any other.
    """

    model: str
    layers: tuple[LayerZeros, ...]
    parameters: int
    zeros: int
    expected: StoredPattern | None = None
    against: str | None = None
    missing: tuple[str, ...] = ()
    checked: int = 0
    total: float = 0.0
    total_holds: bool = True
    packed: str = ""
    not_finite: int = 0
    not_finite_in: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def as_expected(self) -> bool:
        """Whether all checked layers, at least one, are present and have their pattern, and the total sparsity holds."""
        failed = any(layer.holds is False for layer in self.layers)
        return self.expected is None or (self.checked > 0 and not failed and not self.missing and self.total_holds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits_per_weight(self) -> float | None:
        """The stored bits a weight of the layers with integers together; None without any."""
        layers = [(x.bits_per_weight, x.shape[0] * x.shape[1]) for x in self.layers if x.bits_per_weight is not None]
        return sum(bits * size for bits, size in layers) / sum(size for _, size in layers) if layers else None

    def failures(self) -> str:
        """The differences from the expected pattern in a few words; empty if there are none."""
        failed = [layer.name for layer in self.layers if layer.holds is False]
        if self.as_expected:
            return ""
        if self.missing:
            return f"{plural(len(self.missing), 'layer')} missing, {self.missing[0]} first"
        if failed:
            verb = "does" if len(failed) == 1 else "do"
            return f"{plural(len(failed), 'layer')} {verb} not match {self.expected}, {failed[0]} first"
        return "no such layer was found" if self.total_holds else f"all layers together have fewer zeros than {self.expected}"

    def summary(self) -> dict[str, str]:
        """The zeros, whether the pattern holds, and the differences, each in one line."""
        weights, zeros = sum(x.shape[0] * x.shape[1] for x in self.layers), sum(x.zeros for x in self.layers)
        percent = 100 * zeros / max(weights, 1)
        model = f"{PurePath(self.model).name}: {percent:.2f} % zeros in {plural(len(self.layers), 'layer')}"
        if self.bits_per_weight is not None:
            model += f", {self.bits_per_weight:.3f} bits a weight of layers with integers"
        model += f", {plural(self.not_finite, 'number')} NaN or infinite" if self.not_finite else ""
        equal = self.alike + len(self.converted)
        differences = f"{len(self.changed)} tensors differ from {PurePath(self.against or '').name}, {equal} are equal"
        if self.converted:
            differences += f", {len(self.converted)} of them after conversion to their dtype"
        if only := len(self.only_here) + len(self.only_there):
            differences += f", {only} are only in one of the two"
        return {
            "model": f"{model}, {100 * self.zeros / max(self.parameters, 1):.2f} % in the model",
            "pattern": "none was expected" if self.expected is None else self.failures() or f"{self.expected} holds",
            "against": differences if self.against else "compared with no other model",
        }

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        data: dict[str, Any] = TypeAdapter(Inspection).dump_python(self, mode="json")
        return data


def inspect(
    model: str | Path | PreTrainedModel,
    against: str | Path | PreTrainedModel | None = None,
    expect: str | float | Pattern | None = None,
    *,
    trust_remote_code: bool = False,
) -> Inspection:
    """Count the zeros of a model tensor by tensor, check a pattern, and compare with another model.

    Layers that `values` or `bits` rounded, packed or not, are shown with their integers and stored bits.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory.
        against: Another model to compare with, given in the same way.
        expect: Pattern that every pruned layer must have: each layer that the folder's sparsellm.json lists, or every linear
            layer of the blocks if there is no such file. If the run allocated different sparsities to the layers, each layer
            must have its own, and all together the expected one. Without the file, which sparsities were allocated is not
            known: all layers together must have the expected one.
        trust_remote_code: Run Python code that comes with the checkpoints.

    Returns:
        The zeros of each layer and of the model, whether the pattern holds, and the tensors that differ.

    Raises:
        InvalidSetting: The pattern is invalid.
        BadCheckpoint: A checkpoint or its report cannot be read.
    """
    pattern = expect if expect is None or isinstance(expect, Pattern) else parse_pattern(str(expect))
    source = open_source(model, trusted=trust_remote_code, packed=True)
    other = None if against is None else open_source(against, trusted=trust_remote_code, packed=True)
    report = load_report(source.folder) if source.folder and (source.folder / REPORT).is_file() else None
    planned = None if report is None else {layer.name: layer.pattern for layer in report.layers}
    skeleton = source.skeleton()
    tensors, layers_of = StoredTensors(source.folder, skeleton, source.model), layers_by_parameter(skeleton, planned or ())
    all_layers = [block.full_name(name) for pairs in layers_of.values() for block, name in pairs]
    allocated = pattern is not None and pattern.is_shareable and len(set((planned or {}).values())) > 1
    names = all_layers if planned is None else list(planned)
    together = pattern is not None and pattern.is_shareable and planned is None
    required = {} if pattern is None or together else planned if allocated and planned else dict.fromkeys(names, pattern)
    layers: list[LayerZeros] = []
    formats = {**formats_of(tensors.files), **_formats_in_memory(source.model)}
    parameters = zeros = 0
    not_finite: dict[str, int] = {}
    counted: set[str] = set()
    for key, tensor in tensors:
        if tensors.one_name(key) in counted:
            continue  # the same tensor under another name
        counted.add(tensors.one_name(key))
        parameters += tensor.numel()
        zeros += count_zeros(tensor)
        if not all_finite(tensor):
            not_finite[key] = tensor.numel() - int(tensor.isfinite().sum())
        for block, name in layers_of.get(key, ()):
            full_name, weight = block.full_name(name), block.linear_view(name, tensor)
            required_of, format = required.get(full_name), formats.get(key)
            holds = None if required_of is None else required_of.holds(weight)
            of_format = format.fields_of(weight) if format else {}
            shape = weight.shape[0], weight.shape[1]
            layers.append(LayerZeros(full_name, shape, count_zeros(weight), required_of, holds, **of_format))
    checked = [layer for layer in layers if together or layer.holds is not None]
    weights, removed = sum(x.shape[0] * x.shape[1] for x in checked), sum(x.zeros for x in checked)
    changes = CheckpointComparison()
    if other is not None:
        changes = compare(tensors, StoredTensors(other.folder, other.skeleton(), other.model))
    sections = [section.describe() for section in report.sections.values()] if report else []
    return Inspection(
        model=source.name,
        layers=tuple(layers),
        parameters=parameters,
        zeros=zeros,
        expected=pattern,
        against=other.name if other else None,
        missing=tuple(sorted(set(names) - {layer.name for layer in layers})),
        checked=len(checked),
        total=removed / max(weights, 1),
        # Each layer rounds its number of zeros separately.
        total_holds=pattern is None
        or not (allocated or together)
        or removed >= round(pattern.sparsity * weights) - len(checked),
        packed=source.quantization or " ".join(filter(None, sections)),
        not_finite=sum(not_finite.values()),
        not_finite_in=tuple(not_finite),
        **vars(changes),
    )


def _formats_in_memory(model: PreTrainedModel | None) -> dict[str, StoredFormat]:
    """The formats of weights that modules hold in another form, by the tensor."""
    formats: dict[str, StoredFormat] = {}
    for path, module in model.named_modules() if model else ():
        if isinstance(module, HoldsFormats):
            formats |= {f"{path}.{name}": format for name, format in module.weight_formats().items()}
    return formats
