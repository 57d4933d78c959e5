"""The rules that results of solvers and methods obey, checked for every layer and block before anything is made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsellm.errors import BrokenContract, dtype_name
from sparsellm.methods import BlockMethod, LayerResult, Plan
from sparsellm.models.blocks import Block
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.linalg import count_zeros, inner_float64
from sparsellm.solvers.patterns import Pattern, count_kept
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import InputRMS

SPARE = 0.01
"""Fraction of a layer's weights that a solver may remove beyond the pattern: a compensated weight can be zero by rounding."""

ONE_RESULT = "Yield one LayerResult for each planned layer."

Versions = dict[str, list[int]]
"""By attribute of a problem, the number of changes in place of each of its tensors."""


def versions(problem: LayerProblem) -> Versions:
    """Count the changes in place of a problem's tensors so far, which torch counts itself; reads no data."""
    tensors = {
        "weight": [problem.weight],
        "inputs": problem.inputs.tensors,
        "curvature": [problem.curvature],
        "pruned_mask": [problem.pruned_mask],
    }
    return {
        name: [tensor._version for tensor in found if tensor is not None and not tensor.is_inference()]
        for name, found in tensors.items()
    }


def check_form(weight: Tensor, problem: LayerProblem, solver: LayerSolver, *, name: str, before: Versions) -> None:
    """Check what a solver returned without reading its data, and that the solver left the problem as it was.

    Args:
        weight: What the solver returned.
        name: Full name of the layer.
        before: `versions` of the problem before the solve.

    Raises:
        BrokenContract: It is no tensor of the target's shape, dtype and device, or the problem was changed.
    """
    target, kind = problem.weight, type(solver).__name__
    if not isinstance(weight, Tensor):
        raise BrokenContract(f"{kind} returns no tensor for {name}, but {type(weight).__name__}. Return the pruned weight.")
    if (weight.shape, weight.dtype, weight.device) != (target.shape, target.dtype, target.device):
        form, wanted = (f"{tuple(x.shape)} {dtype_name(x.dtype)} on {x.device}" for x in (weight, target))
        raise BrokenContract(
            f"{kind} returns a weight of another form for {name}: got {form}, needs {wanted}, as problem.weight is. "
            "Return the whole weight, (out, in), in that dtype."
        )
    if changed := next((part for part, counts in versions(problem).items() if counts != before[part]), None):
        raise BrokenContract(
            f"{kind} changes problem.{changed} of {name} in place. Change a copy, as problem.weight.clone(): others read the "
            "problem too."
        )


def check_zeros(weight: Tensor, problem: LayerProblem, pattern: Pattern, solver: LayerSolver, *, name: str) -> None:
    """Check which weights a solver removed: those of the pattern, no more, and all that stay zero.

    Raises:
        BrokenContract: The zeros break the pattern, are clearly more, or `problem.pruned_mask` has a value.
    """
    kind, count = type(solver).__name__, pattern.count_removed(weight.shape)
    facts = [*pattern.holds_async(weight)]
    if problem.pruned_mask is not None:
        facts.append((weight.bool() & problem.pruned_mask).any())
    holds, kept, *revived = torch.stack([fact.to(torch.int64) for fact in facts]).tolist()  # the device is waited for once
    if not holds:
        raise BrokenContract(
            f"{kind} breaks the pattern {pattern} in {name}: {_zeros_found(weight, pattern)}. Multiply the weight by "
            "problem.keep(pattern, score) as the last step."
        )
    zeros = weight.numel() - kept
    if zeros > count and (removed := int(count_removed(weight, problem))) > count + SPARE * weight.numel():
        raise BrokenContract(
            f"{kind} removes more of {name} than {pattern}: {removed:,} of {weight.numel():,} weights that were not zero and "
            f"whose inputs are not, needs {count:,}. Multiply the weight by problem.keep(pattern, score) alone."
        )
    if any(revived):
        raise BrokenContract(
            f"{kind} gives values to weights of {name} that `keep_zeros` keeps at zero. Take the masks of its solve from "
            "problem.keep, or leave out `keep_zeros`."
        )


def count_removed(weight: Tensor, problem: LayerProblem) -> Tensor:
    """The number of weights that a solver made zero though the target is not and the input is not always zero, as (), int64."""
    removed = problem.weight.bool() & ~weight.bool()  # faster on a CPU than comparisons
    if isinstance(problem.inputs, InputRMS):
        removed &= problem.rms.bool()
    return count_kept(removed)


class BlockRules:
    """The rules of a method for one block: each planned layer has one result and its pattern, and no other layer is changed.

    Args:
        method: The method, for messages.
    """

    def __init__(self, method: BlockMethod, block: Block, plan: Plan) -> None:
        self._kind, self._block = type(method).__name__, block
        self._names = {block.full_name(name): name for name in block.layers}
        self._planned = {full_name: plan[full_name] for full_name in self._names if full_name in plan}
        self._waiting = set(self._planned)
        self._others = {x: _square(block.layer(name).weight) for x, name in self._names.items() if x not in plan}

    def check_reported(self, result: LayerResult) -> None:
        """Raise BrokenContract if a result is of a layer that is not planned, or that had one before."""
        if result.name not in self._waiting:
            fault = "twice" if result.name in self._planned else "which is no planned layer of the block"
            raise BrokenContract(f"{self._kind} reports {result.name} in {self._block.name}, {fault}. {ONE_RESULT}")
        self._waiting.remove(result.name)

    def readings(self) -> list[Tensor]:
        """Facts of the weights that `check` takes, as tensors, which are read together with others."""
        weights = {name: self._block.layer(own).weight.detach() for name, own in self._names.items()}
        unchanged = [_square(weights[name]) == square for name, square in self._others.items()]
        return [pattern.holds_async(weights[name])[0] for name, pattern in self._planned.items()] + unchanged

    def check(self, readings: Sequence[float]) -> None:
        """Raise BrokenContract if a planned layer has no result or breaks its pattern, or if another layer was changed."""
        if self._waiting:
            raise BrokenContract(f"{self._kind} reports no {', '.join(sorted(self._waiting))}. {ONE_RESULT}")
        for name, is_right in zip([*self._planned, *self._others], readings, strict=True):
            if is_right:
                continue
            if name in self._others:
                raise BrokenContract(f"{self._kind} changes {name}, which the plan leaves dense. Write planned layers only.")
            found = _zeros_found(self._block.layer(self._names[name]).weight.detach(), self._planned[name])
            raise BrokenContract(f"{self._kind} breaks the pattern {self._planned[name]} in {name}: {found}. Write the mask.")


def _zeros_found(weight: Tensor, pattern: Pattern) -> str:
    """The zeros of a weight that breaks its pattern, in words."""
    zeros, count = count_zeros(weight), pattern.count_removed(weight.shape)
    others = ", which are not where the pattern needs them" if zeros >= count else ""
    return f"{zeros:,} of {weight.numel():,} weights are zero, needs {count:,}{others}"


def _square(weight: Tensor) -> Tensor:
    """The squared norm of a weight in float64, (): one that is changed has another."""
    return inner_float64(weight.detach(), weight.detach())
