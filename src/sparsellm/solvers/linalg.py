"""What solvers share: damping, factorisations, conjugate gradients on a support."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.errors import SingularGram
from sparsellm.runtime import devices

QUADRATIC_PANEL = 384
"""Columns of a quadratic form's matrix that are read at once."""

LEAF = 96
"""Triangular matrices up to this size are inverted at once."""


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is infinite or NaN. One pass without a copy, unless there is one or the sum itself overflows."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def squares_finite(hidden: Tensor) -> Tensor:
    """Whether the sum of squares of every row of (..., features) is finite in float32, as a tensor of one bool.

    A norm layer divides by the root of that sum: where it overflows, the norm of a finite row is zero.
    """
    return hidden.float().square().sum(-1).isfinite().all()


def count_zeros(weight: Tensor) -> int:
    """How many entries are exactly zero. Without a copy: the sum of a comparison would take eight bytes for each entry."""
    return weight.numel() - int(weight.count_nonzero())


def dead_inputs(gram: Tensor) -> Tensor:
    """(in,) bool: True for inputs that were zero on every token. Their weights do nothing."""
    return gram.diagonal() == 0


def add_diagonal(gram: Tensor, damping: float) -> Tensor:
    """The Gram matrix with `damping` times the mean of its diagonal added to the diagonal.

    Dead inputs get that mean as their diagonal (1 where all are dead): they couple to nothing, and nothing is divided by zero.
    """
    return add_diagonal_(gram.clone(), damping)


def add_diagonal_(gram: Tensor, damping: float) -> Tensor:
    """As `damped`, in place: of a Gram matrix that nobody else reads."""
    diagonal = gram.diagonal()
    dead = dead_inputs(gram)
    mean = diagonal.mean()
    diagonal += damping * mean
    diagonal.copy_(torch.where(dead, torch.where(mean > 0, mean, torch.ones_like(mean)), diagonal))
    return gram


def add_curvature_diagonal(curvature: Tensor, share: float) -> Tensor:
    """A curvature with `share` times its diagonal's mean added to the diagonal: positive definite, dead rows nearly free."""
    result = curvature.clone()
    mean = result.diagonal().mean()
    result.diagonal().add_(torch.where(mean > 0, share * mean, torch.ones_like(mean)))
    return result


def cholesky(matrix: Tensor, damping: float, setting: str = "damping", failures: list[Tensor] | None = None) -> Tensor:
    """The lower Cholesky factor of a symmetric matrix; SingularGram when it is not positive definite.

    damping: what was added to the matrix already, and setting: what it is called; for the message only. failures: where given,
    whether it failed is put there, (), and nothing is raised nor waited for.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    failed = (info != 0) | ~lower.diagonal().isfinite().all()
    if failures is not None:
        failures.append(failed)
    elif bool(failed):
        raise SingularGram(
            f"Cholesky failed at pivot {int(info)} of {len(matrix)} with {setting}={damping:g}. "
            f"Use more calibration tokens than the layer has inputs, or raise `{setting}`."
        )
    return lower  # type: ignore[no-any-return]


def upper_factor(matrix: Tensor, damping: float, failures: list[Tensor] | None = None) -> Tensor:
    r"""The upper triangular $R$ with $M = R R^\top$: with $P$ the reversal, $PMP = LL^\top$ makes $R = PLP$.

    failures: as for `cholesky`.
    """
    turned = matrix.flip(0, 1)
    del matrix  # each of these is as large as a layer's largest: what is no longer read is given back, if the caller lets it
    lower = cholesky(turned, damping, failures=failures)
    del turned
    return lower.flip(0, 1)


def inverse_factor(matrix: Tensor, damping: float, failures: list[Tensor] | None = None) -> Tensor:
    r"""The upper triangular $U$ with $M^{-1} = U^\top U$: the inverse of the `reversed_factor`.

    A third of the operations of "factor, invert, factor again", and $M^{-1}$ itself, whose rounding would enter twice, is never
    formed. failures: as for `cholesky`.
    """
    return invert_triangular(upper_factor(matrix, damping, failures))


def invert_triangular(upper: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix."""
    inverse = torch.zeros(upper.shape, dtype=upper.dtype, device=upper.device)
    _invert_triangular_into(upper, inverse)
    return inverse


def _invert_triangular_into(upper: Tensor, inverse: Tensor) -> None:
    """Write the inverse of an upper triangular matrix; halves of halves, so that products do most of its n³/3 operations."""
    size = len(upper)
    if size <= LEAF:
        eye = torch.eye(size, dtype=upper.dtype, device=upper.device)
        inverse.copy_(torch.linalg.solve_triangular(upper, eye, upper=True))
        return
    half = size // 2
    _invert_triangular_into(upper[:half, :half], inverse[:half, :half])
    _invert_triangular_into(upper[half:, half:], inverse[half:, half:])
    inverse[:half, half:] = (inverse[:half, :half] @ upper[:half, half:]).neg_() @ inverse[half:, half:]


def dot_float64(one: Tensor, other: Tensor) -> float:
    """The sum of products of two matrices, added up in float64: errors are differences of large sums."""
    return float((devices.full_precision(one) * devices.full_precision(other)).sum())


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, (n,), and eigenvectors as columns, (n, n), of a symmetric matrix; on the processor for Apple's GPUs, which
    have no such routine."""
    there = matrix.device
    values, vectors = torch.linalg.eigh(matrix.cpu() if there.type == "mps" else matrix)
    return values.to(there), vectors.to(there)


def quadratic_form(left: Tensor, gram: Tensor, right: Tensor) -> Tensor:
    """tr L G Rᵀ for a symmetric G, and L = S R with a symmetric S: half of G is enough.

    left, right: (out, in). gram: (in, in). Added up as precisely as the device can: in float64, but on Apple's GPUs.
    Cost: one product of (out, in) by (in, in) over two.
    """
    wide = devices.widest_float(gram.device)
    total = torch.zeros((), dtype=wide, device=gram.device)
    for start in range(0, len(gram), QUADRATIC_PANEL):
        end = start + QUADRATIC_PANEL
        here = right[:, start:end]
        total += ((here @ gram[start:end, start:end]) * left[:, start:end]).sum(dtype=wide)
        if end < len(gram):
            total += 2 * ((here @ gram[start:end, end:]) * left[:, end:]).sum(dtype=wide)
    return total


def conjugate_gradient_refit(
    weight: Tensor,
    target: Tensor,
    gram: Tensor,
    keep: Tensor,
    steps: int,
    tolerance: float = 1e-4,
    curvature: Tensor | None = None,
) -> Tensor:
    r"""The weight after conjugate gradients on $\mathrm{tr}\, S (W - W^\star) G (W - W^\star)^\top$, W zero outside `keep`.

    Preconditioned by the diagonals. Without a curvature all rows are problems of their own, solved at once: a row stops moving
    once its residual has fallen by `tolerance` (relative). With one, they are a single problem.

    weight: (out, in), the start, zero outside `keep`. target: (out, in), W⋆. gram: (in, in), positive definite.
    curvature: S, (out, out), positive definite; None for the identity.
    Returns a new (out, in) tensor, zero outside `keep`, with every row's error at most that of the start (with a curvature: the
    sum's).
    Cost: `steps` + 1 products of (out, in) by (in, in), and as many of (out, out) by (out, in).
    """

    def gradient(change: Tensor) -> Tensor:
        return (change @ gram if curvature is None else curvature @ change @ gram) * keep

    def total(product: Tensor) -> Tensor:
        return product.sum(1, keepdim=True) if curvature is None else product.sum().view(1, 1)

    scale = gram.diagonal().reciprocal()
    if curvature is not None:
        scale = curvature.diagonal().reciprocal().unsqueeze(1) * scale
    residual = gradient(target - weight)
    direction = residual * scale
    energy = total(residual * direction)
    enough = energy * tolerance**2
    weight = weight.clone()
    for _ in range(steps):
        moving = energy > enough
        if not bool(moving.any()):
            break
        product = gradient(direction)
        bend = total(direction * product)
        length = torch.where(moving & (bend > 0), energy / bend, 0)
        weight += length * direction
        residual -= length * product
        preconditioned = residual * scale
        fresh = total(residual * preconditioned)
        direction = preconditioned + torch.where(moving, fresh / energy, 0) * direction
        energy = torch.where(moving, fresh, energy)
    return weight
