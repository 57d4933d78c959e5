"""The promises of a method, on a tiny OPT and a tiny Llama."""

from __future__ import annotations

import math

import torch

from sparsellm.methods import BlockMethod
from sparsellm.models.blocks import blocks_of
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.statistics import TokenCount
from sparsellm.testing.checks import Check, check_settings, fail, seed_everything
from sparsellm.testing.tiny_models import TINY_FAMILIES, bytes_differ, dense, prune_tiny, pruned_by_two, pruned_in_two_runs

SOME = {"opt": ("*.0.*k_proj", "*.0.fc1"), "llama": ("*.0.*k_proj", "*.0.*up_proj")}
"""By family, patterns of the names of a few layers of the first block."""

USE_PRUNE_LAYER = "Let prune_layer write and measure the weight."


def check_members(method: object) -> None:
    """It has `needs`, `needs_dense_stream`, `needs_fisher`, `note` and `prune`."""
    if not isinstance(method, BlockMethod):
        names = ("needs", "needs_dense_stream", "needs_fisher", "note", "prune")
        fail(f"{', '.join(x for x in names if not hasattr(method, x))} is missing.", "Add it (docs/build-on-sparsellm.md).")
    needs: object = method.needs
    if not (isinstance(needs, type) and issubclass(needs, TokenCount)):
        fail(f"needs is {needs!r}.", "It is the class TokenCount, InputRMS or Gram.")


def check_planned_layers(method: BlockMethod) -> None:
    """Every planned layer is pruned by its pattern and reported once, with its own shape, zeros and a finite error."""
    for family, text in (("opt", "50%"), ("llama", "2:4"), ("llama", "70%")):
        pruned = prune_tiny(family, method, text)
        reported = sorted(layer.name for layer in pruned.layers)
        if reported != sorted(pruned.plan):  # also checked in every run
            fail(f"Of {len(pruned.plan)} planned layers {len(reported)} are reported.", "Yield a LayerResult for each.")
        for layer in pruned.layers:
            weight, pattern = pruned.tensors[f"{layer.name}.weight"], pruned.plan[layer.name]
            if not bool(weight.isfinite().all()) or not pattern.holds(weight):
                fail(f"{layer.name} of {family} is not finite, or {pattern} does not hold in it.", USE_PRUNE_LAYER)
            found = layer.pattern, layer.shape, layer.zeros
            if found != (wanted := (pattern, tuple(weight.shape), count_zeros(weight))):
                fail(f"{layer.name} of {family} is reported with {found}, and has {wanted}.", USE_PRUNE_LAYER)
            if not (math.isfinite(layer.error) and layer.error >= 0):
                fail(f"The error of {layer.name} of {family} is {layer.error}.", USE_PRUNE_LAYER)


def check_other_layers(method: BlockMethod) -> None:
    """Layers that the plan leaves dense, blocks without planned layers, embeddings and the head stay as they are."""
    for family in TINY_FAMILIES:
        before, after = (dense(family, include=SOME[family]), prune_tiny(family, method, include=SOME[family]))
        allowed = {f"{name}.weight" for name in after.plan}
        block = blocks_of(after.model)[0]
        allowed |= {block.full_name(name) for name in block.unpruned_parameters()}  # biases and norms, which reports list
        for name, tensor in before.tensors.items():
            if name not in allowed and not torch.equal(tensor, after.tensors[name]):
                fail(f"{name} of {family} is changed.", "Write the layers in the plan only.")


def check_same_each_run(method: BlockMethod) -> None:
    """The same run writes the same bytes, whatever the state of random generators."""
    for family in TINY_FAMILIES:
        models = []
        for seed in (0, 1):
            seed_everything(seed)
            models.append(prune_tiny(family, method).model)
        if name := bytes_differ(*models):
            mend = "Draw from a torch.Generator with a seed that is a field of the class, and keep nothing between runs."
            fail(f"{name} of {family} differs in two runs.", mend)


def check_resumed_run(method: BlockMethod) -> None:
    """A run that is stopped after a block and resumed ends with the same bytes."""
    for family in TINY_FAMILIES:
        if name := bytes_differ(prune_tiny(family, method).model, pruned_in_two_runs(family, method)):
            mend = "Keep nothing from one block for the next: all that it needs is in its inputs."
            fail(f"{name} of {family} differs.", mend)


def check_two_processes(method: BlockMethod) -> None:
    """Two processes that share the sequences end with the bytes of one."""
    alone = {family: prune_tiny(family, method).model for family in TINY_FAMILIES}
    together = pruned_by_two(method)
    for family, model in alone.items():
        if name := bytes_differ(model, together[family]):
            mend = "Sum statistics over processes (collect_statistics does), and broadcast what one process computes."
            fail(f"{name} of {family} differs.", mend)


METHOD_CHECKS = tuple(
    map(
        Check,
        (
            check_settings,
            check_members,
            check_planned_layers,
            check_other_layers,
            check_same_each_run,
            check_resumed_run,
            check_two_processes,
        ),
    )
)
"""In the order in which a failure is likely the cause of those after it."""
