"""How much of the weights of a model's blocks lies in layers that can be pruned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparsellm.errors import UnsupportedModel
from sparsellm.models.architectures import ROUTERS, is_linear
from sparsellm.models.blocks import ARCHITECTURE_ATTRIBUTE, Block

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_COVERAGE = 0.95
"""The smallest share of the matrix weights in layers that can be pruned, for a model whose layers its user does not name."""

SENSES = ("vision_config", "audio_config", "speech_config")
"""What configurations call those of the parts that read images or sound."""

TABLES = ("A_log",)
"""What parameters are called that hold a number for each channel and state and multiply elementwise: a state-space model's
decay rates. They are no matrices."""

SHOWN = 3
"""How many parameters that no layer covers are named in a sentence."""


@dataclass(frozen=True)
class Coverage:
    """The matrix weights of a model's blocks, counted: entries of all matrices but routers, convolutions, embeddings
    and the tables of state-space models.

    total: all of them. prunable: those in layers that can be pruned. pruned: those in layers that a run prunes. left: entries
    that are in no layer, by the parameter's full name, the most first.
    """

    total: int
    prunable: int
    pruned: int
    unpruned: Mapping[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the matrix weights in layers that can be pruned."""
        return self.prunable / self.total if self.total else 0.0

    @property
    def pruned_share(self) -> float:
        """The share of the matrix weights in layers that the run prunes."""
        return self.pruned / self.total if self.total else 0.0

    @property
    def uncovered(self) -> str:
        """The largest parameters that no layer covers, in words; those that differ only in numbers count as one."""
        kinds: Counter[str] = Counter()
        for name, entries in self.unpruned.items():
            kinds[".".join("*" if part.isdigit() else part for part in name.split("."))] += entries
        message = [f"{name} ({entries:,} weights)" for name, entries in kinds.most_common(SHOWN)]
        return ", ".join(message) + (f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else "")

    def describe(self) -> str:
        """What a model that is pruned in part is told with; empty where the run prunes every matrix weight."""
        if self.pruned == self.total:
            return ""
        message = f"The pruned layers hold {100 * self.pruned_share:.2f} % of the matrix weights in the blocks."
        return f"{message} No layer covers {self.uncovered}." if self.unpruned else message

    def of_plan(self, blocks: Sequence[Block], plan: Collection[str]) -> Coverage:
        """With what a plan prunes; plan: the full names of its layers."""
        planned = (layer for block in blocks for name, layer in block.layers.items() if block.full_name(name) in plan)
        entries = sum(layer.in_features * layer.out_features for layer in planned)
        return replace(self, pruned=min(entries, self.prunable))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "matrix_weights": self.total,
            "prunable": self.prunable,
            "pruned": self.pruned,
            "share": self.pruned_share,
            "not_covered": dict(self.unpruned),
        }


def coverage_of(model: PreTrainedModel, blocks: Sequence[Block]) -> Coverage:
    """What of a model's blocks can be pruned; a run that leaves out no layer prunes all of it.

    Counts every list of modules of the language model, also one that is not among `blocks`. A parameter that several blocks
    share counts once.

    Args:
        model: The model, with weights or without.
        blocks: Its decoder blocks, from `blocks_of`.
    """
    counted: dict[int, tuple[str, int]] = {}
    for path, module in (*((block.name, block.module) for block in blocks), *_lists(model)):
        for name, tensor in _matrices(path, module):
            counted.setdefault(id(tensor), (name, tensor.numel()))
    held: Counter[int] = Counter()
    for block in blocks:
        seen: Counter[int] = Counter()
        for name, layer in block.layers.items():
            view = block.views.get(name)
            parameter = layer.weight if view is None else getattr(view.owner, view.stored)
            seen[id(parameter)] += layer.in_features * layer.out_features
        held |= seen
    left = {name: size - held[key] for key, (name, size) in counted.items() if held[key] < size}
    prunable = sum(min(held[key], size) for key, (_, size) in counted.items())
    total = sum(size for _, size in counted.values())
    return Coverage(total, prunable, prunable, dict(sorted(left.items(), key=lambda item: -item[1])))


def check_coverage(model: PreTrainedModel, found: Coverage) -> None:
    """Raise UnsupportedModel where too little can be pruned of a model whose layers its user does not name."""
    if hasattr(model, ARCHITECTURE_ATTRIBUTE) or found.share >= MIN_COVERAGE:
        return
    raise UnsupportedModel(
        f"Only {100 * found.share:.1f} % of the matrix weights in the blocks of a {type(model).__name__} can be pruned: no "
        f"layer covers {found.uncovered}. Name the layers to prune with --architecture file.yaml (docs/families.md)."
    )


def _lists(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """By path, the lists of blocks of the language model, without those that read images or sound."""
    config = model.config
    tower = model if config.get_text_config() is config else model.get_decoder()
    senses = tuple(type(value) for name, value in vars(config).items() if name in SENSES and value is not None)
    apart = [module for module in tower.modules() if isinstance(getattr(module, "config", None), senses)]
    inside = {id(module) for module in tower.modules()} - {id(part) for module in apart for part in module.modules()}
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return [(path, some) for path, some in lists if id(some) in inside and not any(map(is_linear, some))]


def _matrices(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a module that count, by full name."""
    found: list[tuple[str, Tensor]] = []
    for inner, owner in module.named_modules():
        if isinstance(owner, (nn.Embedding, _ConvNd)) or any(part in ROUTERS for part in inner.split(".")):
            continue
        for name, tensor in owner.named_parameters(recurse=False):
            if "bias" not in name and name not in TABLES and sum(size > 1 for size in tensor.shape) > 1:
                found.append((".".join(part for part in (path, inner, name) if part), tensor))
    return found
