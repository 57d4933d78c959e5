"""`prune_blocks` and `walk` on a model in memory with settings of its `LoadedModel`, as tests call them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsellm.activations import walk as activations_walk
from sparsellm.activations.sensitivity import output_fisher
from sparsellm.activations.walk import Activations
from sparsellm.methods import BlockMethod, Plan, Step
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel, ResidentWeights
from sparsellm.pipeline import sequential

if TYPE_CHECKING:
    from sparsellm.extensions.recover.block_recovery import BlockRecovery


def loaded(model: PreTrainedModel, compute: torch.dtype | None = None, **settings: Any) -> LoadedModel:
    """A model that computes in a dtype, by default its own, with other fields of `LoadedModel`."""
    weights = settings.pop("weights", None) or ResidentWeights(model)
    return LoadedModel(model, weights, compute=compute, **settings)


def walk(
    model: PreTrainedModel, batches: Sequence[Tensor], compute: torch.dtype | None = None, **settings: Any
) -> Generator[tuple[Block, Activations], None, None]:
    """`sparsellm.activations.walk.walk`; `storage` and `weights` are fields of the `LoadedModel`."""
    fields = {name: settings.pop(name) for name in ("storage", "weights") if name in settings}
    return activations_walk.walk(loaded(model, compute, **fields), batches, **settings)


def prune_blocks(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    method: BlockMethod | BlockRecovery,
    plan: Plan,
    compute: torch.dtype | None = None,
    **settings: Any,
) -> Iterator[Step]:
    """`sparsellm.pipeline.sequential.prune_blocks`, or the same for a recovery, with F if the method needs it."""
    fields = {name: settings.pop(name) for name in ("storage", "weights") if name in settings}
    one = loaded(model, compute, **fields)
    if method.needs_fisher and plan and "fisher" not in settings:
        settings["fisher"] = output_fisher(one, batches)
    if isinstance(method, BlockMethod):
        yield from sequential.prune_blocks(one, batches, method, plan, **settings)
    else:
        yield from sequential.visit_blocks(one, batches, method, plan, steps=partial(method.steps, plan), **settings)
