"""The promises of a solver, on small layers with the statistics that it needs and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from os import environ
from unittest.mock import patch

import torch
from torch import Tensor

from sparsellm.errors import dtype_name
from sparsellm.methods.contract import versions
from sparsellm.methods.layerwise import LayerWise, solve_damped
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.patterns import NM, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount
from sparsellm.testing.checks import Check, check_settings, fail, seed_everything
from sparsellm.testing.tiny_models import bytes_differ, prune_tiny, pruned_in_two_runs

SHAPE = (24, 64)
DEAD = (0, 8, 9, 10, 39)
"""Inputs that are always zero, in the checks of them; 2:4 keeps one weight of three."""

USE_KEEP = "Multiply the weight by problem.keep(pattern, score) as the last step."


def layer_inputs(features: int, seed: int = 0, dead: Sequence[int] = ()) -> Tensor:
    """Correlated inputs of different sizes, (tokens, features); those of `dead` are zero."""
    generator = torch.Generator().manual_seed(seed)
    x: Tensor = torch.randn(4 * features, features, generator=generator)
    x = x + x @ torch.randn(features, features, generator=generator) / features**0.5
    x = x * torch.exp(0.3 * torch.randn(features, generator=generator))
    x[:, list(dead)] = 0
    return x


def layer_problem(
    solver: LayerSolver, shape: tuple[int, int] = SHAPE, *, seed: int = 0, dead: Sequence[int] = (), share_pruned: float = 0.0
) -> LayerProblem:
    """A problem with exactly the statistics that a solver needs.

    Args:
        dead: Inputs that are always zero.
        share_pruned: Fraction of the weights that are zero and stay zero.
    """
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
    inputs = solver.needs(shape[1])
    inputs.update(layer_inputs(shape[1], seed, dead))
    inputs.finalize()
    if not share_pruned:
        return LayerProblem(weight, inputs)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 2)) < share_pruned
    return LayerProblem(weight.masked_fill(mask, 0), inputs, pruned_mask=mask)


def answer(solver: LayerSolver, problem: LayerProblem, text: str = "50%") -> Tensor:
    """A solver's weight for a pattern, with more damping if a factorization fails, as in a run."""
    weight, _ = solve_damped(solver, problem, parse_pattern(text))
    return weight


def check_needs(solver: LayerSolver) -> None:
    """`needs` is TokenCount, InputRMS or Gram, and `solve` reads no more than that."""
    needs: object = solver.needs
    if not (isinstance(needs, type) and issubclass(needs, TokenCount)):
        fail(f"needs is {needs!r}.", "Set it to one of these classes, as a ClassVar.")
    answer(solver, layer_problem(solver))


def check_shape(solver: LayerSolver) -> None:
    """The answer is a tensor of the shape of problem.weight, (out, in)."""
    for shape in (SHAPE, (1, 40), (40, 8)):
        weight: object = answer(solver, layer_problem(solver, shape))
        if not isinstance(weight, Tensor):
            fail(f"solve returns {type(weight).__name__}.", "Return the pruned weight.")
        if weight.shape != shape:
            fail(f"A layer of {shape} gets a weight of {tuple(weight.shape)}.", "Return the whole weight, not transposed.")


def check_dtype(solver: LayerSolver) -> None:
    """The answer has the dtype of problem.weight, float32."""
    weight = answer(solver, layer_problem(solver))
    if weight.dtype != torch.float32:
        fail(f"The answer is {dtype_name(weight.dtype)}.", "Compute in any dtype, and end with .to(problem.weight.dtype).")


def check_finite(solver: LayerSolver) -> None:
    """The answer has no NaN and no infinity, also where inputs are always zero."""
    for dead in ((), DEAD, tuple(range(SHAPE[1]))):
        weight = answer(solver, layer_problem(solver, dead=dead))
        if count := int((~weight.isfinite()).sum()):
            some = f"{len(dead)} of {SHAPE[1]} inputs are always zero" if dead else "all inputs vary"
            fail(f"{count} of {weight.numel()} weights are not finite where {some}.", "Look for a division by zero.")


def check_unchanged_problem(solver: LayerSolver) -> None:
    """`solve` changes nothing of its problem: other layers and later steps read it too."""
    problem = layer_problem(solver, share_pruned=0.1)
    before, counted = [problem.weight.clone(), *(x.clone() for x in problem.inputs.tensors)], versions(problem)
    answer(solver, problem)
    after = [problem.weight, *problem.inputs.tensors]
    changed = [name for name, counts in versions(problem).items() if counts != counted[name]]
    if not changed and not all(map(torch.equal, before, after)):
        changed = ["weight or inputs"]
    if changed:
        fail(f"problem.{changed[0]} is changed in place.", "Change a copy, as problem.weight.clone().")


def check_count(solver: LayerSolver) -> None:
    """Exactly as many weights are zero as the pattern removes."""
    for shape, text in product((SHAPE, (1, 40), (7, 12)), ("1%", "10%", "50%", "83%", "2:4", "3:4")):
        weight = answer(solver, layer_problem(solver, shape), text)
        zeros, count = int((weight == 0).sum()), parse_pattern(text).count_removed(weight.shape)
        if zeros != count:
            fail(f"{zeros} of {weight.numel()} weights are zero, and {text} removes {count}.", USE_KEEP)


def check_groups(solver: LayerSolver) -> None:
    """With N:M, N of every M consecutive weights of a row are zero."""
    for text in ("2:4", "3:4", "4:8"):
        weight, pattern = answer(solver, layer_problem(solver), text), parse_pattern(text)
        assert isinstance(pattern, NM)
        zeros = (weight == 0).unflatten(1, (-1, pattern.group)).sum(-1)
        if wrong := int((zeros != pattern.zeros).sum()):
            fail(f"{wrong} of {zeros.numel()} groups of {text} have another number of zeros.", USE_KEEP)


def check_kept_zeros(solver: LayerSolver) -> None:
    """Weights of `problem.pruned_mask` stay zero, and the pattern holds with them, which `keep_zeros` asks for."""
    for share, text in ((0.3, "50%"), (0.3, "2:4"), (0.7, "50%")):
        problem = layer_problem(solver, share_pruned=share)
        weight = answer(solver, problem, text)
        if filled := int(weight[problem.pruned_mask].count_nonzero()):
            mend = "Take the mask from problem.keep, not from pattern.keep."
            fail(f"{filled} of {int(problem.pruned_mask.sum())} such weights have values.", mend)  # type: ignore[union-attr]
        if not parse_pattern(text).holds(weight):
            fail(f"With {share:.0%} of the weights zero before, {text} does not hold.", USE_KEEP)


def check_dead_inputs(solver: LayerSolver) -> None:
    """Weights of inputs that are always zero are zero or stay as they are: nothing is known that could change them."""
    for text in ("10%", "50%", "2:4"):
        problem = layer_problem(solver, dead=DEAD)
        weight = answer(solver, problem, text)[:, list(DEAD)]
        if filled := int(((weight != 0) & (weight != problem.weight[:, list(DEAD)])).sum()):
            mend = "Set what is computed for inputs whose problem.rms is 0 back to zero."
            fail(f"{filled} of {weight.numel()} such weights have other values ({text}).", mend)


def check_error(solver: LayerSolver) -> None:
    """The error of the answer in float64 from the inputs themselves is as reported, and less than that of an empty layer."""
    problem, x = layer_problem(solver), layer_inputs(SHAPE[1]).double()
    weight, target = answer(solver, problem), problem.weight.double()
    gram = x.T @ x / len(x)
    if not isinstance(problem.inputs, Gram):  # reports take the inputs as uncorrelated, or as white
        gram = torch.diag(gram.diagonal() if isinstance(problem.inputs, InputRMS) else torch.ones(len(gram)).double())
    lost, total = (float(torch.einsum("ij,jk,ik->", w, gram, w)) for w in (weight.double() - target, target))
    if abs(problem.error(weight) - lost / total) > 1e-3 * lost / total:
        fail(f"It is {lost / total:.6g}, and {problem.error(weight):.6g} is reported.", "Change nothing of the problem.")
    if lost >= total:
        fail(f"At 50% it is {lost / total:.3g} of the layer's output.", "Check the scores and the update of kept weights.")


def check_layer_order(solver: LayerSolver) -> None:
    """An answer does not depend on the layers that were solved before."""
    problems = [layer_problem(solver, shape, seed=seed) for seed, shape in enumerate((SHAPE, (8, 40), SHAPE))]
    first, last = ({}, {})  # type: tuple[dict[int, Tensor], dict[int, Tensor]]
    for answers, order in ((first, (0, 1, 2)), (last, (2, 1, 0))):
        for number in order:
            seed_everything(0)
            answers[number] = answer(solver, problems[number])
    if not all(torch.equal(first[number], last[number]) for number in first):
        fail("A weight depends on the order of the layers.", "Keep nothing from one solve for the next.")


def check_determinism(solver: LayerSolver) -> None:
    """The same problem has the same answer to the bit, whatever the state of random generators."""
    answers = []
    for seed in (0, 1):
        seed_everything(seed)
        answers.append(answer(solver, layer_problem(solver)))
    if not torch.equal(*answers):
        mend = "Draw from a torch.Generator with a seed that is a field of the class."
        fail("The answer depends on the states of torch's, Python's and NumPy's generators.", mend)


def check_processes(solver: LayerSolver) -> None:
    """An answer does not depend on the number of processes, each of which solves some of the layers, alone."""
    problem = layer_problem(solver)
    alone = answer(solver, problem)
    for rank in (0, 1):
        with among_processes(rank, 2):
            together = answer(solver, problem)
        if not torch.equal(alone, together):
            fail(f"As process {rank} of 2 the answer is another one.", "Do not read rank, world size or environment.")


def check_resume(solver: LayerSolver) -> None:
    """A run that is stopped after a block and resumed ends with the same bytes."""
    method = LayerWise(solver)
    if name := bytes_differ(prune_tiny("llama", method).model, pruned_in_two_runs("llama", method)):
        fail(f"{name} differs.", "Keep nothing from one solve for the next.")


@contextmanager
def among_processes(rank: int, world: int) -> Iterator[None]:
    """A context in which torch and the environment say that this is one of several processes. Communication fails there."""
    names = {"is_initialized": True, "get_world_size": world, "get_rank": rank}
    mocks = [patch(f"torch.distributed.{name}", lambda *_, value=value: value) for name, value in names.items()]
    with patch.dict(environ, {"RANK": str(rank), "WORLD_SIZE": str(world)}), mocks[0], mocks[1], mocks[2]:
        yield


SOLVER_CHECKS = tuple(
    map(
        Check,
        (
            check_settings,
            check_needs,
            check_shape,
            check_dtype,
            check_finite,
            check_unchanged_problem,
            check_count,
            check_groups,
            check_kept_zeros,
            check_dead_inputs,
            check_error,
            check_layer_order,
            check_determinism,
            check_processes,
            check_resume,
        ),
    )
)
"""In the order in which a failure is likely the cause of those after it."""
