"""Coverage: the fraction of the matrix weights in a model's blocks that is in layers that can be pruned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparsellm.errors import UnsupportedModel
from sparsellm.models.architectures import ROUTERS, is_linear
from sparsellm.models.blocks import Block

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_COVERAGE = 0.95
"""Minimum share of prunable matrix weights."""

SENSES = ("vision_config", "audio_config", "speech_config")
"""Configuration keys of the image and audio towers of a multimodal model."""

TABLES = ("A_log",)
"""Names of two-dimensional parameters that multiply elementwise, such as the decay rates of a state-space model. They are not
counted as matrices."""

SHOWN_PARAMETERS = 3
"""Maximum number of uncovered parameters in a message."""


@dataclass(frozen=True)
class Coverage:
    """Numbers of matrix weights in a model's blocks, without routers, convolutions, embeddings and `TABLES`.

    Attributes:
        total: All matrix weights.
        prunable: Those in layers that can be pruned.
        pruned: Those in layers that a run prunes.
        unpruned: Those in no layer, by full parameter name, in decreasing order.
    """

    total: Annotated[int, Field(validation_alias="matrix_weights")]  # its name in files
    prunable: int
    pruned: int
    unpruned: Annotated[Mapping[str, int], Field(validation_alias="not_covered")] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The prunable share of the matrix weights."""
        return self.prunable / self.total if self.total else 0.0

    @property
    def pruned_share(self) -> float:
        """The share of the matrix weights in layers that a run prunes."""
        return self.pruned / self.total if self.total else 0.0

    @property
    def uncovered(self) -> str:
        """The largest parameters that no layer covers, as text; names that differ only in numbers are merged."""
        sizes: Counter[str] = Counter()
        for name, size in self.unpruned.items():
            sizes[".".join("*" if part.isdigit() else part for part in name.split("."))] += size
        largest = [f"{name} ({size:,} weights)" for name, size in sizes.most_common(SHOWN_PARAMETERS)]
        return ", ".join(largest) + (f" and {len(sizes) - SHOWN_PARAMETERS} more" if len(sizes) > SHOWN_PARAMETERS else "")

    def describe(self) -> str:
        """Message about the matrix weights that a run leaves dense; empty where it prunes all of them."""
        if self.pruned == self.total:
            return ""
        message = f"The pruned layers hold {100 * self.pruned_share:.2f} % of the matrix weights in the blocks."
        return f"{message} No layer covers {self.uncovered}." if self.unpruned else message

    def of_plan(self, blocks: Sequence[Block], plan: Collection[str]) -> Coverage:
        """Return the coverage of a plan, given by the full names of its layers."""
        layers = (layer for block in blocks for name, layer in block.layers.items() if block.full_name(name) in plan)
        size = sum(layer.in_features * layer.out_features for layer in layers)
        return replace(self, pruned=min(size, self.prunable))

    def to_dict(self) -> dict[str, Any]:
        """Return the coverage as JSON-serializable data."""
        return {
            "matrix_weights": self.total,
            "prunable": self.prunable,
            "pruned": self.pruned,
            "share": self.pruned_share,
            "not_covered": dict(self.unpruned),
        }


def coverage_of(model: PreTrainedModel, blocks: Sequence[Block]) -> Coverage:
    """Return the coverage of a run that prunes every layer.

    Counts every module list of the language model, whether or not it is among `blocks`. A parameter that several blocks share
    counts once.
    """
    matrices: dict[int, tuple[str, int]] = {}  # full name and size by the identity of the parameter
    for path, module in (*((block.name, block.module) for block in blocks), *_module_lists(model)):
        for name, tensor in _matrices(path, module):
            matrices.setdefault(id(tensor), (name, tensor.numel()))
    covered: Counter[int] = Counter()
    for block in blocks:
        in_block: Counter[int] = Counter()
        for name, layer in block.layers.items():
            view = block.views.get(name)
            parameter = layer.weight if view is None else getattr(view.owner, view.stored)
            in_block[id(parameter)] += layer.in_features * layer.out_features
        covered |= in_block
    unpruned = {name: size - covered[key] for key, (name, size) in matrices.items() if covered[key] < size}
    prunable = sum(min(covered[key], size) for key, (_, size) in matrices.items())
    total = sum(size for _, size in matrices.values())
    return Coverage(total, prunable, prunable, dict(sorted(unpruned.items(), key=lambda item: -item[1])))


def check_coverage(model: PreTrainedModel, coverage: Coverage) -> None:
    """Raise UnsupportedModel for coverage below `MIN_COVERAGE`."""
    if coverage.share >= MIN_COVERAGE:
        return
    raise UnsupportedModel(
        f"Only {100 * coverage.share:.1f} % of the matrix weights in the blocks of a {type(model).__name__} can be pruned: no "
        f"layer covers {coverage.uncovered}. At least {100 * MIN_COVERAGE:.0f} % is needed (docs/families.md)."
    )


def _module_lists(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the module lists of the language model with their paths, without those of image and audio towers."""
    config = model.config
    language_model = model if config.get_text_config() is config else model.get_decoder()
    config_classes = tuple(type(value) for name, value in vars(config).items() if name in SENSES and value is not None)
    modules = list(language_model.modules())
    towers = [module for module in modules if isinstance(getattr(module, "config", None), config_classes)]
    included = {id(module) for module in modules} - {id(part) for tower in towers for part in tower.modules()}
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return [(path, items) for path, items in lists if id(items) in included and not any(map(is_linear, items))]


def _matrices(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the matrices of a module that count, with their full names; `path` is the module's path in the model."""
    matrices: list[tuple[str, Tensor]] = []
    for owner_path, owner in module.named_modules():
        if isinstance(owner, (nn.Embedding, _ConvNd)) or any(part in ROUTERS for part in owner_path.split(".")):
            continue
        for name, tensor in owner.named_parameters(recurse=False):
            if "bias" not in name and name not in TABLES and sum(size > 1 for size in tensor.shape) > 1:
                matrices.append((".".join(part for part in (path, owner_path, name) if part), tensor))
    return matrices
