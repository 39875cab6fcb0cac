"""Linear algebra of symmetric matrices: LAPACK as it is alike on every processor, and what is built on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_precision
from natgrad.ground.typed_torch import list_numbers, torch_linalg

MATRIX, CONVERT = "the matrix of a linear system", "convert the tensors that were given with .double()"


def invert_or_nan(matrix: Tensor) -> Tensor:
    """A^-1 for (..., n, n); NaN throughout for each matrix of the batch that has none, or is not finite.

    With gradients, and within torch.func. `torch.linalg.inv` raises for a singular matrix on one processor and returns
    inf on another; so do `solve` and `cholesky`.
    """
    check_precision(MATRIX, matrix.dtype, CONVERT)
    inverse, info = torch_linalg.inv_ex(matrix)
    sound = (info == 0) & _finite(matrix) & _finite(inverse)
    return torch.where(sound[..., None, None], inverse, torch.nan)


def solve_or_nan(matrix: Tensor, rhs: Tensor, *, left: bool = True) -> Tensor:
    """A^-1 B for (..., n, n) and B (..., n, k) or (n,), or B A^-1; NaN where A is singular or not finite.

    A solution that overflows is NaN, that vector alone. With gradients, and within torch.func by the inverse: vmap of
    the forward derivative of torch.linalg.solve is wrong (torch 2.13).
    """
    if rhs.dim() == 1:
        return solve_or_nan(matrix, rhs.unsqueeze(-1)).squeeze(-1)
    rhs = rhs[(None,) * (matrix.dim() - rhs.dim())]  # torch reads (b, n) beside (b, n, n) as one vector per matrix
    check_precision(MATRIX, matrix.dtype, CONVERT)
    if is_concrete(matrix) and is_concrete(rhs):
        solution, info = torch_linalg.solve_ex(matrix, rhs, left=left)
        solution = torch.where(((info == 0) & _finite(matrix))[..., None, None], solution, torch.nan)
    else:
        inverse = invert_or_nan(matrix)
        solution = inverse @ rhs if left else rhs @ inverse
    finite = torch.isfinite(solution.detach()).all(-2 if left else -1, keepdim=True)
    return torch.where(finite, solution, torch.nan)


def factor_or_nan(matrix: Tensor) -> Tensor:
    """L (..., n, n) with L L^T = A, read from A's lower triangle; NaN throughout where A is not positive definite.

    A pivot L_ii^2 that the rounding of A's entries accounts for is none: that of torch.ones(2, 2), which is singular,
    comes out as 0 or as eps, depending on the processor. With gradients, and within torch.func. No jitter: see
    `cholesky` for the ladder.
    """
    factor, _, sound = _factor(matrix)
    return torch.where(sound[..., None, None], factor, torch.nan)


def invert_factor_or_nan(matrix: Tensor) -> Tensor:
    """L^-1 (..., n, n) for A = L L^T, so that A^-1 = L^-T L^-1, without derivatives; NaN as in `factor_or_nan`."""
    _, inverse, sound = _factor(matrix)
    return torch.where(sound[..., None, None], inverse, torch.nan)


def invert_lower(lower: Tensor) -> Tensor:
    """L^-1 of triangular L (..., n, n)."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch_linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)


def invert_shifted(matrix: Tensor, shift: float) -> Tensor:
    """(A + shift I)^-1 for positive semi-definite A (..., n, n), which is written over; nothing is checked."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift)
    lower, _ = cholesky_over(matrix)
    return torch.cholesky_inverse(lower, out=lower if lower.is_cpu else None)


def is_positive_definite(matrix: Tensor) -> Tensor:
    """Which symmetric matrices have the factor of `factor_or_nan`, (..., n, n) -> (...)."""
    return _factor(matrix.detach())[2]


def _factor(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L, L^-1 without derivatives, and which are sound, for matrices of any kind."""
    check_precision(MATRIX, matrix.dtype, CONVERT)
    factor, info = torch_linalg.cholesky_ex(matrix)
    # a pivot is w^T A w with w = L_ii times row i of L^-1; the entries A_jk <= sqrt(A_jj A_kk) are rounded
    inverse, roots = invert_lower(factor.detach()), factor.detach().diagonal(dim1=-2, dim2=-1)
    weights = roots.unsqueeze(-1) * inverse
    sizes = (weights.abs() @ matrix.detach().diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)).squeeze(-1)
    large = roots > (2 * torch.finfo(matrix.dtype).eps) ** 0.5 * sizes
    return factor, inverse, (info == 0) & (large & (roots < torch.inf)).all(-1)


def require_inverse(matrix: Tensor, message: str) -> Tensor:
    """`invert_or_nan`. ValueError(message) where that is not finite; within torch.func it stays NaN."""
    return _require(invert_or_nan(matrix), message)


def require_solution(matrix: Tensor, rhs: Tensor, message: str) -> Tensor:
    """`solve_or_nan`. ValueError(message) where that is not finite and rhs is; within torch.func it stays NaN."""
    solution = solve_or_nan(matrix, rhs)
    return solution if is_concrete(rhs) and not all_finite(rhs.detach()) else _require(solution, message)


def require_factor(matrix: Tensor, message: str) -> Tensor:
    """`factor_or_nan`. ValueError(message) where that is not finite; within torch.func it stays NaN."""
    return _require(factor_or_nan(matrix), message)


def _require(result: Tensor, message: str) -> Tensor:
    if is_concrete(result) and not all_finite(result.detach()):
        raise ValueError(message)
    return result


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), ascending, and eigenvectors (..., n, n) of symmetric matrices; in float64 if LAPACK fails.

    It may fail without a word: eigenvectors of a finite matrix (785, 785) of rank 16 came out as NaN in float32.
    NaN throughout for a matrix that is not finite, for that one of a batch. Half precision is computed in float32.
    """
    if matrix.dtype != widen_dtype(matrix.dtype):
        values, vectors = eigh(matrix.float())
        return values.to(matrix.dtype), vectors.to(matrix.dtype)
    if is_concrete(matrix) and all_finite(matrix.detach()):
        return _decompose(matrix)
    fine = _finite(matrix)[..., None]
    values, vectors = _decompose(torch.where(fine.unsqueeze(-1), matrix, 0.0))
    return torch.where(fine, values, torch.nan), torch.where(fine.unsqueeze(-1), vectors, torch.nan)


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh` of finite matrices: in float64 where LAPACK gives up or gives NaN, and then one by one."""
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch_linalg.eigh(matrix.to(dtype))
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if not is_concrete(vectors) or all_finite(vectors.detach()):
            return values.to(matrix.dtype), vectors.to(matrix.dtype)
    if matrix.dim() == 2:  # LAPACK decomposes it in no dtype
        return torch.full_like(matrix[0], torch.nan), torch.full_like(matrix, torch.nan)
    pairs = [_decompose(block) for block in matrix.flatten(0, -3)]
    values, vectors = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return values.view(matrix.shape[:-1]), vectors.view(matrix.shape)


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (n, r), sizes (r,) and V^T (r, k) with A = U diag(sizes) V^T, r = min(n, k).

    In float64 if LAPACK fails, NaN if it fails there too or A (n, k) is not finite.
    """
    for dtype in (matrix.dtype, torch.float64) if all_finite(matrix) else ():
        try:
            left, sizes, right = torch_linalg.svd(matrix.to(dtype), full_matrices=False)
        except RuntimeError:
            continue
        if all_finite(left):
            return left.to(matrix.dtype), sizes.to(matrix.dtype), right.to(matrix.dtype)
    (n, k), r = matrix.shape, min(matrix.shape)
    lost = matrix.new_full((n + k + 1, r), torch.nan)
    return lost[:n], lost[n], lost[n + 1 :].mT


def fit_or_nan(matrix: Tensor, rhs: Tensor) -> Tensor:
    """argmin |A X - B| of least norm, for A (..., n, k) and B (..., n, m); NaN where either is not finite."""
    fine = (_finite(matrix) & _finite(rhs))[..., None, None]
    solution = torch_linalg.lstsq(torch.where(fine, matrix, 0.0), torch.where(fine, rhs, 0.0)).solution
    return torch.where(fine, solution, torch.nan)


def is_concrete(value: Tensor) -> bool:
    """Whether the numbers are there to look at: not within a transform of torch.func."""
    return torch.func.debug_unwrap(value) is value


def refuse_mapped(value: Tensor, name: str) -> None:
    """ValueError within torch.func.vmap, for functions that take a batch and look at its numbers."""
    if torch.func.debug_unwrap(value).dim() > value.dim():
        raise ValueError(
            f"{name} comes through torch.func.vmap, which cannot follow steps that depend on the numbers; call the "
            "function on the whole batch instead: leading dimensions are batches"
        )


def has_derivatives(value: Tensor) -> bool:
    """Whether derivatives are taken through the tensor, backward or forward."""
    return value.requires_grad or torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite.

    A sum shows that in one pass; `isfinite` takes four and costs 25 times as much (14.7 ms against .6 for 2.8 million
    entries). Only where the sum itself overflows are the entries looked at.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _finite(matrix: Tensor) -> Tensor:
    """Which matrices have finite entries only, (..., n, k) -> (...)."""
    return (matrix.detach() * 0).sum((-2, -1)) == 0  # inf and NaN times 0 are NaN; isfinite takes twice as long


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to factorise in: float32 for half precision, which LAPACK does not have."""
    return torch.promote_types(dtype, torch.float32)


# Positive semi-definite linear algebra: Cholesky with a ladder, pseudo-inverse, Woodbury, Kronecker eigenbases

JITTERS = (0.0, 1e-7, 1e-5, 1e-3)


@dataclass(frozen=True)
class Factor:
    """L (n, n) lower with L L^T = A + jitter I, and the rung of the ladder that it took.

    Args:
        lower: L, shape (n, n).
        jitter: What was added to the diagonal, absolute.
        rung: The rung of the ladder. 0 is the plain factorisation in A's dtype.
        failed: True when even the last rung did not give a finite factor, and then L is meaningless.
    """

    lower: Tensor
    jitter: float
    rung: int
    failed: bool = False

    def solve(self, rhs: Tensor) -> Tensor:
        """(A + jitter I)^-1 rhs, in rhs's dtype.

        Args:
            rhs: Shape (n,) or (n, k).
        """
        block = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        value = solve_by_root(self.lower, block.to(self.lower.dtype), left=True).to(rhs.dtype)
        return value.squeeze(-1) if rhs.dim() == 1 else value


def stays_finite(old: Tensor, new: Tensor) -> bool:
    """Whether no entry becomes NaN or infinite; one that is infinite already, and stays, does no harm."""
    return bool(torch.isfinite(new.sum())) or bool((torch.isfinite(new) | (new == old)).all())


BLOCK = 256
"""Columns from which `gram` splits its product on a CPU."""


def gram(rows: Tensor, scale: float = 1.0) -> Tensor:
    """scale X^T X, (d, d), for X (n, d).

    On a CPU blocks under the diagonal are copied: 6.8 ms against 10.2 for (512, 1000), 59 against 83 for (50176, 288).
    """
    if rows.requires_grad and torch.is_grad_enabled():
        return scale * (rows.mT @ rows)  # what is written into blocks has no derivative
    product = rows.new_empty(rows.shape[1], rows.shape[1])
    _gram(rows, scale, product, BLOCK if rows.device.type == "cpu" else len(product))
    return product


def _gram(rows: Tensor, scale: float, out: Tensor, block: int) -> None:
    n = len(out)
    if n <= block:
        torch.addmm(out, rows.mT, rows, beta=0, alpha=scale, out=out)
        return
    half = (n // 2 + 15) // 16 * 16  # whole cache lines
    first, second = rows[:, :half], rows[:, half:]
    _gram(first, scale, out[:half, :half], block)
    _gram(second, scale, out[half:, half:], block)
    torch.addmm(out[:half, half:], first.mT, second, beta=0, alpha=scale, out=out[:half, half:])
    out[half:, :half].copy_(out[:half, half:].mT)


def symmetrise(matrix: Tensor) -> Tensor:
    """(A + A^T) / 2.

    Args:
        matrix: A, shape (..., n, n).
    """
    return (matrix + matrix.mT) / 2


def cholesky(matrix: Tensor) -> Factor:
    """Cholesky factor of a PSD matrix, read from its lower triangle, climbing a ladder where it fails.

    Jitter grows relative to the mean diagonal entry, first in the matrix's dtype, then in float64, so that a numerical
    failure never kills a run. It never raises, whatever the input: look at `failed`.

    Args:
        matrix: A, shape (n, n).

    Example:
        >>> from natgrad.ground.linalg import cholesky
        >>> factor = cholesky(torch.tensor([[1, 1.000001], [1.000001, 1]]))  # by round-off not definite
        >>> factor.failed, factor.rung > 0
        (False, True)
    """
    scale = float(matrix.diagonal().abs().mean())
    ladder = [
        (dtype, jitter) for dtype in dict.fromkeys((widen_dtype(matrix.dtype), torch.float64)) for jitter in JITTERS
    ]
    for rung, (dtype, jitter) in enumerate(ladder):
        shift = jitter * scale
        lower, info = torch_linalg.cholesky_ex(shift_diagonal(matrix.to(dtype), shift) if shift else matrix.to(dtype))
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            return Factor(lower, shift, rung)
        if not math.isfinite(scale) or not bool(torch.isfinite(matrix.tril()).all()):
            break
    return Factor(torch.full_like(matrix, torch.nan), 0.0, len(ladder), failed=True)


def shift_diagonal(matrix: Tensor, shift: float | Tensor) -> Tensor:
    """A + shift I as a new matrix.

    Args:
        matrix: A, shape (n, n).
        shift: A number, or a scalar tensor.
    """
    result = matrix.clone()
    result.diagonal().add_(shift)
    return result


def positive_inverse(values: Tensor, cutoff: float | Tensor) -> Tensor:
    """1 / values where they exceed the cutoff, else 0; a NaN stays one."""
    drop = values <= cutoff
    return torch.where(drop, 0, 1 / torch.where(drop, 1, values))


def safe_cutoff(size: int, dtype: torch.dtype) -> float:
    """Relative size below which an eigenvalue of an (n, n) PSD matrix is round-off: n * eps."""
    return size * torch.finfo(dtype).eps


def pseudo_solve(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Minimum-norm least-squares solution A^+ rhs for PSD A, by eigendecomposition.

    Eigenvalues below n * eps * lambda_max count as zero.

    Args:
        matrix: A, shape (n, n).
        rhs: Shape (n,) or (n, k).
    """
    if not len(matrix):
        return torch.zeros_like(rhs)
    values, vectors = eigh(matrix)
    inverse = positive_inverse(values, safe_cutoff(len(values), values.dtype) * values[-1].abs())
    coordinates = vectors.mT @ rhs
    return vectors @ (inverse.unsqueeze(-1) * coordinates if rhs.dim() == 2 else inverse * coordinates)


def solve_symmetric(matrix: Tensor, rhs: Tensor, damping: float = 0.0) -> Tensor:
    """(A + damping I)^+ rhs for symmetric A with eigenvalues of both signs, by eigendecomposition.

    Sums lambda + damping below n * eps of the largest count as zero.
    """
    if not len(matrix):
        return torch.zeros_like(rhs)
    weights, vectors = _invert_spectrum(matrix, damping)
    return vectors @ (weights * (vectors.mT @ rhs))


def inverse_symmetric(matrix: Tensor, damping: float = 0.0) -> Tensor:
    """(A + damping I)^+, (..., n, n), as in `solve_symmetric`."""
    weights, vectors = _invert_spectrum(matrix, damping)
    return symmetrise((vectors * weights.unsqueeze(-2)) @ vectors.mT)


def _invert_spectrum(matrix: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """1 / (lambda + damping), 0 where that is round-off, and the eigenvectors."""
    values, vectors = eigh(matrix)
    values = values + damping
    keep = values.abs() > safe_cutoff(matrix.shape[-1], values.dtype) * values.abs().amax(-1, keepdim=True)
    return torch.where(keep, 1 / torch.where(keep, values, 1), 0), vectors


def take_absolute(matrix: Tensor) -> Tensor:
    """|A| for symmetric A (n, n), as A + 2 |A_-| of its negative part, so that a PSD A comes back without round-off."""
    values, vectors = eigh(matrix)
    cut = safe_cutoff(len(values), values.dtype) * values.square().sum().sqrt()
    return symmetrise(matrix + (vectors * torch.where(values < -cut, -2 * values, 0)) @ vectors.mT)


def pseudo_square(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A^+2 = V diag(w) V^T / s^2 of PSD A (n, n): eigenvectors (n, n), w (n,), 0 where lambda <= n eps lambda_max; s.

    s is a power of two near lambda_max: 1 / lambda^2 itself overflows float32 where lambda is below 1e-19.
    """
    values, vectors = eigh(matrix)
    largest = values[-1:].abs().sum()
    scale = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent), 1)
    values = values / scale
    keep = values > safe_cutoff(len(values), values.dtype) * values[-1:].abs()
    return vectors, torch.where(keep, 1 / torch.where(keep, values, 1).square(), 0), scale


def solve_psd(matrix: Tensor, rhs: Tensor, damping: float | Tensor = 0.0) -> Tensor:
    """(A + damping I)^-1 rhs for PSD A; where A + damping I is numerically singular, the minimum-norm solution.

    Cholesky if its factor shows no loss of rank, eigenvalues otherwise. Non-finite input gives non-finite output; it
    does not raise.

    Args:
        matrix: A, shape (n, n).
        rhs: Shape (n,) or (n, k).
        damping: Added to the diagonal.
    """
    if not len(matrix):
        return torch.zeros_like(rhs)
    if matrix.dtype != widen_dtype(matrix.dtype):  # judged by bfloat16's eps, a quarter of the spectrum is round-off
        return solve_psd(matrix.float(), rhs.float(), damping).to(rhs.dtype)
    damped = shift_diagonal(matrix, damping)
    factor = cholesky(damped)
    if factor.failed and not bool(damped.any()):
        return 0 * rhs
    if factor.failed:  # negative eigenvalues, unless it is not finite
        indefinite = rhs.dim() == 1 and all_finite(damped)
        return solve_symmetric(damped, rhs) if indefinite else torch.full_like(rhs, torch.nan)
    return pseudo_solve(damped, rhs) if loses_rank(factor, damped) else factor.solve(rhs)


def loses_rank(factor: Factor, matrix: Tensor) -> bool:
    """Whether a PSD A with this Cholesky factor is numerically singular.

    Args:
        factor: Of A, not failed.
        matrix: A, shape (n, n), of which the diagonal is read.
    """
    if factor.rung > 0 or not len(matrix):
        return factor.rung > 0
    # a lost rank shows as a pivot at the round-off level of its own diagonal entry, from which the others were
    # subtracted (100: up to 30 n eps were seen); beside the largest pivot it shows the units of the entries
    cutoff, entries = safe_cutoff(len(matrix), matrix.dtype), matrix.diagonal()
    share = factor.lower.diagonal().square() / entries
    least, eps = float(share.min()), torch.finfo(matrix.dtype).eps
    if least <= 100 * cutoff or least > 100 * eps**0.5:
        return least <= 100 * cutoff
    # behind a pivot p that is small itself, round-off leaves eps / p: then two steps of inverse iteration from the
    # least pivot show the least eigenvalue of A with ones on its diagonal
    lower, start = factor.lower / entries.sqrt().unsqueeze(1), torch.zeros_like(matrix[:, :1])
    start[share.argmin()] = 1
    once = solve_by_root(lower, start, left=True)
    twice = solve_by_root(lower, once / once.norm(), left=True)
    return not float(twice.norm()) * cutoff < 1


def psd_root(matrix: Tensor) -> Tensor:
    """R with R R^T = A for PSD A; negative round-off eigenvalues count as zero.

    Args:
        matrix: A, shape (..., m, m).

    Returns:
        Shape (..., m, m).
    """
    values, vectors = eigh(matrix)
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def woodbury_solve(root: Tensor, rhs: Tensor, damping: float | Tensor) -> Tensor:
    """(U U^T + damping I)^-1 rhs = (rhs - U (damping I + U^T U)^-1 U^T rhs) / damping.

    Costs O(n r^2 + r^3). The subtraction cancels digits when damping is small against U^T U; one step of iterative
    refinement brings them back (relative error 4e-9 -> 3e-15 at damping 1e-8).

    Args:
        root: U, shape (n, r).
        rhs: Shape (n,) or (n, k).
        damping: A number > 0.
    """
    gram = shift_diagonal(root.mT @ root, damping)

    def solve(right: Tensor) -> Tensor:
        return (right - root @ solve_psd(gram, root.mT @ right)) / damping

    value = solve(rhs)
    return value + solve(rhs - root @ (root.mT @ value) - damping * value)


@dataclass(frozen=True)
class KroneckerEigen:
    """Eigenbasis of left (x) right: left = V diag(a) V^T, right = W diag(b) W^T.

    Args:
        left_values: a, shape (..., p).
        left_vectors: V, shape (..., p, p). None for a factor that is diagonal already.
        right_values: b, shape (..., q).
        right_vectors: W, shape (..., q, q). None for a factor that is diagonal already.
    """

    left_values: Tensor
    left_vectors: Tensor | None
    right_values: Tensor
    right_vectors: Tensor | None

    @staticmethod
    def of(left: Tensor, right: Tensor) -> KroneckerEigen:
        """Both eigendecompositions, eigenvalues clamped at zero.

        Args:
            left: Shape (..., p, p), or (p,) for a diagonal matrix.
            right: Shape (..., q, q), or (q,) for a diagonal matrix.
        """
        (a, v), (b, w) = ((factor, None) if factor.dim() == 1 else eigh(factor) for factor in (left, right))
        return KroneckerEigen(a.clamp(min=0), v, b.clamp(min=0), w)

    def values(self) -> Tensor:
        """Eigenvalues a_i b_j of the product, shape (..., p, q)."""
        return self.left_values.unsqueeze(-1) * self.right_values.unsqueeze(-2)

    def rotate(self, block: Tensor) -> Tensor:
        """V^T X W: X in the eigenbasis.

        Args:
            block: X, shape (..., p, q).
        """
        turned = block if self.left_vectors is None else self.left_vectors.mT @ block
        return turned if self.right_vectors is None else turned @ self.right_vectors

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """V C W^T, back from the eigenbasis.

        Args:
            coordinates: C, shape (..., p, q).
        """
        turned = coordinates if self.left_vectors is None else self.left_vectors @ coordinates
        return turned if self.right_vectors is None else turned @ self.right_vectors.mT

    def apply(self, spectrum: Tensor, block: Tensor) -> Tensor:
        """sum_ij spectrum_ij <X, v_i w_j^T> v_i w_j^T.

        Args:
            spectrum: Shape (..., p, q).
            block: X, shape (..., p, q).
        """
        return self.unrotate(spectrum * self.rotate(block))

    def vectors(self) -> tuple[Tensor, Tensor]:
        """V and W as matrices, identities written out."""
        pairs = ((self.left_values, self.left_vectors), (self.right_values, self.right_vectors))
        left, right = (
            torch.eye(len(values), dtype=values.dtype, device=values.device) if vectors is None else vectors
            for values, vectors in pairs
        )
        return left, right


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """A^+ for PSD A, by eigendecomposition; eigenvalues below 10 n eps lambda_max count as zero.

    Args:
        matrix: A, shape (..., n, n).
    """
    values, vectors = eigh(matrix)
    inverse = positive_inverse(values, 10 * safe_cutoff(matrix.shape[-1], values.dtype) * values[..., -1:].abs())
    return vectors @ (inverse.unsqueeze(-1) * vectors.mT)


def inverse_psd(matrix: Tensor, damping: float | Tensor = 0.0) -> Tensor:
    """(A + damping I)^-1 for PSD A, symmetric; where A + damping I is singular, about its pseudo-inverse.

    One batched Cholesky where it succeeds; matrices whose pivots show a lost rank climb the ladder of `solve_psd` one
    by one. It does not raise: the inverse of a matrix that is not finite is not finite.

    Args:
        matrix: A, shape (..., n, n).
        damping: A number > 0, or one per matrix (...).
    """
    n, shape = matrix.shape[-1], matrix.shape
    lower, sound = _factor_damped(matrix, damping)
    fine: list[bool] = list_numbers(sound.reshape(-1))
    if all(fine):
        # symmetric to the bit
        return torch.cholesky_inverse(lower, out=lower if lower.is_cpu else None).to(matrix.dtype)
    eye = torch.eye(n, dtype=lower.dtype, device=lower.device)
    blocks = zip(lower.reshape(-1, n, n), damp(matrix, damping).reshape(-1, n, n), fine, strict=True)
    each = [torch.cholesky_inverse(low) if is_fine else solve_psd(block, eye) for low, block, is_fine in blocks]
    return torch.stack(each).view(shape).to(matrix.dtype)


def root_psd(matrix: Tensor, damping: float | Tensor) -> Tensor | None:
    """L (..., n, n) with L L^T = A + damping I for PSD A; None where the pivots of one show a lost rank."""
    lower, sound = _factor_damped(matrix, damping)
    return lower if bool(sound.all()) else None


def solve_by_root(root: Tensor, block: Tensor, *, left: bool) -> Tensor:
    """(L L^T)^-1 X, or X (L L^T)^-1, for L (..., n, n) lower."""
    # two triangular solves: torch.cholesky_solve copies the factor first, 4 to 15 times slower for one vector
    first, second = (root, root.mT) if left else (root.mT, root)
    half = torch_linalg.solve_triangular(first, block, upper=not left, left=left)
    return torch_linalg.solve_triangular(second, half, upper=left, left=left)


def _factor_damped(matrix: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of A + damping I, at least in float32, and which of them show no lost rank."""
    lower, info = cholesky_over(damp(matrix, damping))
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    return lower, (info == 0) & (pivots.amin(-1) > 100 * safe_cutoff(matrix.shape[-1], lower.dtype) * pivots.amax(-1))


def cholesky_over(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of symmetric (..., n, n) and LAPACK's info; large ones on a CPU in the matrix's own storage.

    There its transpose, the same matrix, has the column order that LAPACK writes; two more matrices would be made. For
    50 rows the views cost more than those.
    """
    if not matrix.is_cpu or matrix.shape[-1] <= BLOCK:
        factor, info = torch_linalg.cholesky_ex(matrix)
        return factor, info
    info = torch.empty(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
    factor, info = torch_linalg.cholesky_ex(matrix.mT, out=(matrix.mT, info))
    return factor, info


def damp(matrix: Tensor, damping: float | Tensor) -> Tensor:
    """A + damping I as a new tensor, at least in float32."""
    damped = matrix.to(widen_dtype(matrix.dtype), copy=True)
    damped.diagonal(dim1=-2, dim2=-1).add_(torch.as_tensor(damping, dtype=damped.dtype).to(damped.device).unsqueeze(-1))
    return damped


def damped_inverse(inverse: Tensor, damping: float) -> Tensor:
    """(A + damping I)^-1 = (I + damping P)^-1 P from P = A^-1, symmetric, in O(n^3).

    Args:
        inverse: P, shape (n, n).
        damping: A number >= 0.
    """
    factor = cholesky(shift_diagonal(damping * inverse, 1.0))
    return symmetrise(factor.solve(inverse))


def as_columns(weights: Tensor) -> Tensor:
    """Weights of rows (R,) as (R, 1); those of their entries (R, m) as they are."""
    return weights.unsqueeze(1) if weights.dim() == 1 else weights
