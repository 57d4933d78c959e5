"""Linear algebra of the solvers: damping, factorizations, conjugate gradients on a support."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from sparsellm.errors import SingularGram
from sparsellm.runtime import devices
from sparsellm.runtime.products import matmul
from sparsellm.solvers.patterns import count_kept

QUADRATIC_PANEL = 384
"""Columns of the matrix of a quadratic form that are multiplied at once."""

PRODUCT_ENTRIES = 1 << 21
"""Entries of a weight that are multiplied at a time on a CPU, if its rows are separate: enough rows for fast products, and
8 MiB, so that temporaries come from the heap."""

LEAF = 96
"""Largest triangular matrix that is inverted without splitting."""

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes in whose place others of the same bits are counted, since torch does not count in them."""


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is infinite or NaN. One pass without a copy, and a second pass only if the sum is not finite."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def allclose_bf16(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree to 2 % in norm; the rounding error of bfloat16 is 0.4 %."""
    return float((computed - expected).float().norm()) <= 0.02 * float(computed.float().norm())


def squares_finite(hidden: Tensor) -> Tensor:
    """Whether the sum of squares of every row of (..., features) is finite in float32, as a bool tensor, ().

    A normalization layer divides by the root of this sum: if it overflows, the output for a finite row is zero.
    """
    return hidden.float().square().sum(-1).isfinite().all()


def count_zeros(weight: Tensor) -> int:
    """Number of entries that are exactly zero. Makes no copy."""
    if weight.dtype in SIGNED:
        weight = weight.view(SIGNED[weight.dtype])
    return weight.numel() - int(count_kept(weight))


def count_negative_zeros(weight: Tensor) -> int:
    """Number of entries that are -0.0."""
    if not weight.is_floating_point() or weight.element_size() not in (2, 4):
        return 0
    bits = weight.contiguous().view(torch.int32 if weight.element_size() == 4 else torch.int16)
    return count_zeros(weight) - count_zeros(bits)


def dead_inputs(gram: Tensor) -> Tensor:
    """(in,) bool: True for inputs that were zero on every token. Their weights have no effect."""
    return gram.diagonal() == 0


def add_diagonal(gram: Tensor, damping: float) -> Tensor:
    """Add `damping` times the mean of the diagonal to the diagonal of a Gram matrix, (in, in).

    Dead inputs get the mean as their diagonal entry (1 if all inputs are dead), which avoids divisions by zero; their other
    entries are zero.
    """
    return add_diagonal_(gram.clone(), damping)


def add_diagonal_(gram: Tensor, damping: float) -> Tensor:
    """`add_diagonal` in place."""
    diagonal = gram.diagonal()
    dead = dead_inputs(gram)
    mean = diagonal.mean()
    diagonal += damping * mean
    diagonal.copy_(torch.where(dead, torch.where(mean > 0, mean, torch.ones_like(mean)), diagonal))
    return gram


def add_curvature_diagonal(curvature: Tensor, share: float) -> Tensor:
    """Add `share` times the mean of the diagonal to the diagonal of a curvature, (out, out); 1 if the mean is zero."""
    result = curvature.clone()
    mean = result.diagonal().mean()
    result.diagonal().add_(torch.where(mean > 0, share * mean, torch.ones_like(mean)))
    return result


def cholesky_(matrix: Tensor, damping: float, setting: str = "damping") -> Tensor:
    """The lower Cholesky factor of a symmetric matrix, in its memory.

    Args:
        matrix: (n, n), symmetric; overwritten.
        damping: The value already added to the diagonal; for the error message only.
        setting: The name of the setting that holds `damping`; for the error message only.

    Raises:
        SingularGram: If the matrix is not positive definite.
    """
    lower, pivot = cholesky_ex_(matrix)
    check_pivot(pivot, len(matrix), damping, setting=setting)
    return lower


def cholesky_ex_(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.cholesky_ex`, which does not wait for the device, in place and with NaN and infinity as failures.

    Args:
        matrix: (n, n), symmetric; overwritten.

    Returns:
        The lower factor, (n, n), and the pivot that failed as an integer tensor, (): counted from 1, 0 if none did.
    """
    by_columns = matrix.mT if matrix.is_contiguous() else matrix  # LAPACK's order, so that nothing is copied
    pivot = torch.empty((), dtype=torch.int32, device=matrix.device)
    lower, pivot = torch.linalg.cholesky_ex(by_columns, out=(by_columns, pivot))
    overflowed = ~lower.diagonal().isfinite()
    first = torch.where(overflowed.any(), overflowed.int().argmax() + 1, 0)
    return lower, torch.where(pivot != 0, pivot, first)


def check_pivot(pivot: Tensor, size: int, damping: float, *, setting: str = "damping") -> None:
    """Raise SingularGram if a factorization of an (n, n) matrix failed at `pivot`; for the arguments see `cholesky_`."""
    if failed := int(pivot):
        raise SingularGram(
            f"Cholesky failed at pivot {failed} of {size} with {setting}={damping:g}. "
            f"Use more calibration tokens than the layer has inputs, or raise `{setting}`."
        )


def upper_factor_(matrix: Tensor) -> tuple[Tensor, Tensor]:
    r"""The upper triangular $R$ with $M = R R^\top$, in M's memory, and the pivot that failed, as `cholesky_ex_` gives it.

    $R = PLP$, where $P$ reverses the order and $PMP = LL^\top$.
    """
    entries = (matrix if matrix.is_contiguous() else matrix.mT).view(
        -1
    )  # P on both sides reverses the order of all entries, of rows as of columns
    _reverse_(entries)
    lower, pivot = cholesky_ex_(matrix)
    _reverse_(entries)
    return lower, pivot


def _reverse_(entries: Tensor, at_once: int = 1 << 20) -> None:
    """Reverse the order of a vector, in place, so many entries from each end at once."""
    half, size = len(entries) // 2, len(entries)
    for start in range(0, half, at_once):
        stop = min(start + at_once, half)
        first, last = entries[start:stop], entries[size - stop : size - start]
        kept = first.flip(0)
        first.copy_(last.flip(0))
        last.copy_(kept)


def inverse_factor_(matrix: Tensor) -> tuple[Tensor, Tensor]:
    r"""The upper triangular $U$ with $M^{-1} = U^\top U$, in M's memory: the inverse of the `upper_factor_`, and its pivot.

    Takes a third of the operations of factorizing, inverting and factorizing again, and avoids the rounding errors of an
    explicit $M^{-1}$.
    """
    factor, pivot = upper_factor_(matrix)
    return invert_triangular_(factor), pivot


def invert_triangular_(upper: Tensor) -> Tensor:
    """Invert an upper triangular matrix in place, by recursive halving: products do most of the n³/3 operations."""
    size = len(upper)
    if size <= LEAF:
        eye = torch.eye(size, dtype=upper.dtype, device=upper.device)
        return upper.copy_(torch.linalg.solve_triangular(upper, eye, upper=True))
    half = size // 2
    first, last, corner = upper[:half, :half], upper[half:, half:], upper[:half, half:]
    corner.copy_(matmul(matmul(invert_triangular_(first), corner).neg_(), invert_triangular_(last)))
    return upper


def dot_float64(one: Tensor, other: Tensor) -> float:
    """The inner product of two tensors, accumulated in float64, because errors are small differences of large sums."""
    return float(inner_float64(one, other))


def inner_float64(one: Tensor, other: Tensor) -> Tensor:
    """`dot_float64` as a float64 tensor, (), which does not wait for the device."""
    parts = devices.row_chunks(one.flatten(1), other.flatten(1))
    return reduce(torch.add, ((devices.full_precision(x) * devices.full_precision(y)).sum() for x, y in parts))


def eigh(matrix: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Eigenvalues, (n,), and eigenvectors as columns, (n, n), of a symmetric matrix; computed on the CPU for MPS devices.

    With `overwrite` the eigenvectors take the memory of the matrix.
    """
    device = matrix.device
    if device.type == "mps":
        values, vectors = torch.linalg.eigh(matrix.cpu())
        return values.to(device), vectors.to(device)
    if overwrite:
        vectors = matrix.mT if matrix.is_contiguous() else matrix  # LAPACK's order, so that nothing is copied
        values, vectors = torch.linalg.eigh(vectors, out=(matrix.new_empty(len(matrix)), vectors))
    else:
        values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def quadratic_form(left: Tensor, gram: Tensor, right: Tensor) -> Tensor:
    """tr L G Rᵀ for a symmetric G and L = S R with a symmetric S.

    Reads only the upper half of G, and accumulates in the widest float dtype of the device. Cost: half a product of (out, in)
    by (in, in), of a few rows at a time on a CPU.

    Args:
        left: L, (out, in).
        gram: G, (in, in).
        right: R, (out, in).
    """
    wide = devices.widest_float(gram.device)
    total = torch.zeros((), dtype=wide, device=gram.device)
    for left_rows, right_rows in devices.row_chunks(left, right, entries=PRODUCT_ENTRIES):
        for start in range(0, len(gram), QUADRATIC_PANEL):
            end = start + QUADRATIC_PANEL
            panel = right_rows[:, start:end]
            total += (matmul(panel, gram[start:end, start:end]) * left_rows[:, start:end]).sum(dtype=wide)
            if end < len(gram):
                total += 2 * (matmul(panel, gram[start:end, end:]) * left_rows[:, end:]).sum(dtype=wide)
    return total


def conjugate_gradient_refit(
    weight: Tensor,
    target: Tensor,
    gram: Tensor,
    *,
    keep: Tensor,
    steps: int,
    tolerance: float = 1e-4,
    curvature: Tensor | None = None,
    products: torch.dtype | None = None,
) -> Tensor:
    r"""Minimize $\mathrm{tr}\, S (W - W^\star) G (W - W^\star)^\top$ over W with support `keep` by conjugate gradients.

    Preconditioned by the diagonals of S and G. Without a curvature each row is a separate problem, and all rows are solved in
    parallel; with one, they form a single problem. Cost: `steps` + 1 products of (out, in) by (in, in), and, with a curvature,
    as many of (out, out) by (out, in).

    Args:
        weight: (out, in), the start, zero outside `keep`.
        target: W⋆, (out, in).
        gram: G, (in, in), positive definite.
        keep: (out, in) bool.
        steps: Maximum number of steps.
        tolerance: Relative residual at which a problem counts as solved.
        curvature: S, (out, out), positive definite; None for the identity.
        products: Dtype of the products of the steps; None for that of the matrices, in which the first residual is computed.

    Returns:
        A new tensor, (out, in), zero outside `keep`. The error of each problem is at most that of the start, up to
        the rounding of the products.
    """

    columns = gram.diagonal().reciprocal()
    rows = None if curvature is None else curvature.diagonal().reciprocal().unsqueeze(1)
    low_gram = gram.to(products or gram.dtype)
    low_curvature = None if curvature is None else curvature.to(low_gram.dtype)

    def gradient(change: Tensor, keep: Tensor, gram: Tensor, curvature: Tensor | None) -> Tensor:
        rounded = change.to(gram.dtype)
        product = matmul(rounded if curvature is None else matmul(curvature, rounded), gram)
        return product.to(change.dtype).mul_(keep)

    def precondition(residual: Tensor, out: Tensor | None = None) -> Tensor:
        result = torch.mul(residual, columns, out=out)
        return result if rows is None else result.mul_(rows)

    def total(product: Tensor) -> Tensor:
        return product.sum(1, keepdim=True) if curvature is None else product.sum().view(1, 1)

    def solve(weight: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        residual = gradient(target - weight, keep, gram, curvature)
        direction = precondition(residual)
        energy = total(residual * direction)
        threshold = energy * tolerance**2
        weight = weight.clone()
        for _ in range(steps):
            active = energy > threshold
            if not bool(active.any()):
                break
            product = gradient(direction, keep, low_gram, low_curvature)
            quadratic = total(direction * product)
            step_size = torch.where(active & (quadratic > 0), energy / quadratic, 0)
            weight.addcmul_(direction, step_size)
            residual.addcmul_(product, step_size, value=-1)
            preconditioned = precondition(residual, product)
            new_energy = total(residual * preconditioned)
            direction.mul_(torch.where(active, new_energy / energy, 0)).add_(preconditioned)
            energy = torch.where(active, new_energy, energy)
        return weight

    if curvature is not None:
        return solve(weight, target, keep)
    return torch.cat([solve(*rows) for rows in devices.row_chunks(weight, target, keep, entries=PRODUCT_ENTRIES)])
