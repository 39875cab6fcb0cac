"""G = A (x) B on a weight matrix: (A (x) B) vec(X) = vec(A X B), vec row-major."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.constants import SOLVED_RATIO, SOLVED_ROWS
from natgrad.ground.linalg import (
    KroneckerEigen,
    inverse_psd,
    positive_inverse,
    psd_root,
    root_psd,
    safe_cutoff,
    solve_by_root,
    widen_dtype,
)
from natgrad.ground.pure import compute_exactly
from natgrad.ground.typed_torch import join_diagonally
from natgrad.operators.base import Operator


@compute_exactly
class KroneckerOperator(Operator, packed_as="kronecker"):
    """A (x) B, acting on a (p, q) matrix flattened row-major: n = p q.

    For a linear layer y = W x, A is the output factor E[d d^T] and B the input factor E[x x^T]. A leading dimension
    stands for independent blocks (the groups of a convolution): A (k, p, p), B (k, q, q), n = k p q. A factor (p,)
    stands for its diagonal matrix (the token frequencies of an embedding). Two leading dimensions broadcast: A
    (k, 1, p, p) with B (1, m, q, q) or B (q, q) are the products of `Tiled`.

    Args:
        left: A, shape (p, p), symmetric positive semi-definite; or one of the shapes above.
        right: B, shape (q, q), likewise.
        factored: True if `inverse` is K-FAC's (A + pi sqrt(damping) I)^-1 (x) (B + sqrt(damping) / pi I)^-1. That is
            another matrix than the exact inverse, and cheaper: it needs no eigendecomposition.

    Raises:
        ValueError: If a factor is not square, or if the factors differ in dtype, device or number of blocks.
    """

    has_closed_form = True

    def __init__(self, left: Tensor, right: Tensor, *, factored: bool = False) -> None:
        for name, factor in (("left", left), ("right", right)):
            if factor.dim() == 0 or (factor.dim() > 1 and factor.shape[-1] != factor.shape[-2]):
                raise ValueError(f"{name} has shape {tuple(factor.shape)}, expected a square matrix")
        if (left.dtype, left.device) != (right.dtype, right.device):
            raise ValueError(
                f"left is {left.dtype} on {left.device}, right {right.dtype} on {right.device}; convert one with .to()"
            )
        lead = left.shape[:-2]
        if lead != right.shape[:-2]:
            if 4 not in (left.dim(), right.dim()):
                raise ValueError(
                    f"left has shape {tuple(left.shape)}, right {tuple(right.shape)}, expected as many blocks of one "
                    "as of the other"
                )
            lead = cast("torch.Size", cast("Any", torch).broadcast_shapes(lead, right.shape[:-2]))
        self.left, self.right, self.factored = left, right, factored
        self.matrix_shape: tuple[int, ...] = (*lead, left.shape[-1], right.shape[-1])
        self.size = torch.Size(self.matrix_shape).numel()
        self.dtype, self.device = left.dtype, left.device

    def mv(self, vector: Tensor) -> Tensor:
        block = vector.reshape(self.matrix_shape)
        block = self.left.unsqueeze(-1) * block if self.left.dim() == 1 else self.left @ block
        return (block * self.right if self.right.dim() == 1 else block @ self.right).reshape(-1)

    def root(self) -> Tensor:
        left, right = (torch.diag(f.sqrt()) if f.dim() == 1 else psd_root(f) for f in (self.left, self.right))
        return block_kron(left, right)

    def inverse(self, damping: float = 0.0) -> Operator:
        """Exact damping in the joint eigenbasis, unless `factored`."""
        if self.factored:
            return self.factored_inverse(damping)
        return Spectral(KroneckerEigen.of(self.left, self.right)).inverse(damping)

    def factored_inverse(self, damping: float | Tensor) -> KroneckerOperator | KroneckerSolve:
        """(A + pi sqrt(l) I)^-1 (x) (B + sqrt(l) / pi I)^-1, pi^2 = (tr A / p) / (tr B / q).

        pi makes the two cross terms equally large. It is 1 where a factor is zero, which then does no harm.

        Args:
            damping: l, in G's units, >= 0; one per block (k,) of factors with a leading dimension.

        Reference:
            Martens & Grosse 2015, section 6.3.
        """
        means = [diagonal_of(factor).mean(-1) for factor in (self.left, self.right)]
        return invert_factors(self.left, self.right, means, damping)

    def invert_each(self, damping: Tensor) -> Operator | None:
        # a block may have several products, of its groups
        each = damping.repeat_interleave(len(self.left) // len(damping))
        return self.factored_inverse(each) if self.factored else None

    def pack(self) -> dict[str, Any]:
        return {"left": self.left, "right": self.right} | ({"factored": True} if self.factored else {})

    def diagonal(self) -> Tensor:
        left, right = diagonal_of(self.left), diagonal_of(self.right)
        return (left.unsqueeze(-1) * right.unsqueeze(-2)).reshape(-1)

    def trace(self) -> Tensor:
        return (diagonal_of(self.left).sum(-1) * diagonal_of(self.right).sum(-1)).sum()

    def dense(self) -> Tensor:
        left, right = (torch.diag(f) if f.dim() == 1 else f for f in (self.left, self.right))
        return block_kron(left, right)


@compute_exactly
class KroneckerSolve(Operator, packed_as="kronecker_solve"):
    """A^-1 (x) B^-1 with the larger factor as its Cholesky root: a solve in the place of an inverse and a product.

    Args:
        left: A^-1, shape (p, p), or (k, p, p) for independent blocks; if p > q lower L with A = L L^T.
        right: B^-1, shape (q, q) or (k, q, q); if p <= q lower L with B = L L^T.
    """

    has_closed_form = True
    state = ("left", "right")
    factored = False

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.matrix_shape = (*left.shape[:-1], right.shape[-1])
        self.size = torch.Size(self.matrix_shape).numel()
        self.dtype, self.device = left.dtype, left.device

    def mv(self, vector: Tensor) -> Tensor:
        block = vector.reshape(self.matrix_shape)
        if self.left.shape[-1] > self.right.shape[-1]:
            return solve_by_root(self.left, block @ self.right, left=True).reshape(-1)
        return solve_by_root(self.right, self.left @ block, left=False).reshape(-1)

    def product(self) -> KroneckerOperator:
        """The same as two matrices."""
        if self.left.shape[-1] > self.right.shape[-1]:
            return KroneckerOperator(torch.cholesky_inverse(self.left), self.right)
        return KroneckerOperator(self.left, torch.cholesky_inverse(self.right))

    def root(self) -> Tensor:
        return self.product().root()

    def inverse(self, damping: float = 0.0) -> Operator:
        """Exact, in the joint eigenbasis."""
        return self.product().inverse(damping)

    def diagonal(self) -> Tensor:
        return self.product().diagonal()

    def trace(self) -> Tensor:
        return self.product().trace()

    def dense(self) -> Tensor:
        return self.product().dense()


@compute_exactly
class Spectral(Operator, packed_as="spectral"):
    """V diag(spectrum) V^T in the eigenbasis V of a Kronecker product.

    Args:
        eigen: The eigenvectors and eigenvalues of both factors.
        spectrum: Shape (..., p, q), >= 0. Default: the product's own eigenvalues; any other corrects them, as in EKFAC.

    Reference:
        George et al. 2018.
    """

    has_closed_form = True

    def __init__(self, eigen: KroneckerEigen, spectrum: Tensor | None = None) -> None:
        self.eigen, self.spectrum = eigen, eigen.values() if spectrum is None else spectrum
        self.size, self.dtype, self.device = self.spectrum.numel(), self.spectrum.dtype, self.spectrum.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.eigen.apply(self.spectrum, vector.reshape(self.spectrum.shape)).reshape(-1)

    def root(self) -> Tensor:
        return block_kron(*self.eigen.vectors()) * self.spectrum.sqrt().reshape(-1)

    def inverse(self, damping: float = 0.0) -> Spectral:
        # products of two factors' round-off eigenvalues were seen just above n eps
        cutoff = 10 * safe_cutoff(max(self.spectrum.shape), self.dtype) * self.spectrum.max() if damping == 0 else 0.0
        return Spectral(self.eigen, positive_inverse(self.spectrum + damping, cutoff))

    def pack(self) -> dict[str, Any]:
        return {"spectrum": self.spectrum, "left": self.eigen.left_vectors, "right": self.eigen.right_vectors}

    @classmethod
    def unpack(cls, parts: dict[str, Any]) -> Spectral:
        spectrum = parts["spectrum"]
        # eigenvalues are in the spectrum already: only their shapes count
        eigen = KroneckerEigen(spectrum[..., 0], parts["left"], spectrum[..., 0, :], parts["right"])
        return cls(eigen, spectrum)

    def diagonal(self) -> Tensor:
        left, right = self.eigen.vectors()
        return (left.square() @ self.spectrum @ right.square().mT).reshape(-1)

    def trace(self) -> Tensor:
        return self.spectrum.sum()


def diagonal_of(factor: Tensor) -> Tensor:
    """(..., n): the diagonals of (..., n, n), or the (n,) that stands for one."""
    return factor if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1)


def invert_factors(
    left: Tensor, right: Tensor, means: Sequence[Tensor], damping: float | Tensor
) -> KroneckerOperator | KroneckerSolve:
    """(A + pi sqrt(l) I)^-1 (x) (B + sqrt(l) / pi I)^-1, pi^2 the ratio of the factors' mean eigenvalues."""
    pi = torch.where((means[0] > 0) & (means[1] > 0), (means[0] / means[1]).sqrt(), 1.0)
    sides, shifts = (left, right), (damping**0.5 * pi, damping**0.5 / pi)
    large = int(left.shape[-1] <= right.shape[-1])
    root = root_psd(sides[large], shifts[large]) if is_lopsided(sides[large], sides[1 - large]) else None
    if root is None:
        return KroneckerOperator(*map(inverse_factor, sides, shifts))
    small = inverse_factor(sides[1 - large], shifts[1 - large])
    return KroneckerSolve(small, root) if large else KroneckerSolve(root, small)


def is_lopsided(large: Tensor, small: Tensor) -> bool:
    """Whether the larger factor's inverse costs more than the solves that it saves: ten, and full matrices."""
    full = min(large.dim(), small.dim()) > 1 and max(large.dim(), small.dim()) < 4
    size = large.shape[-1]
    return full and size >= max(SOLVED_ROWS, SOLVED_RATIO * small.shape[-1]) and large.dtype == widen_dtype(large.dtype)


def inverse_factor(factor: Tensor, shift: Tensor) -> Tensor:
    """(factor + shift I)^-1, one shift per block."""
    return positive_inverse(factor + shift, 0.0) if factor.dim() == 1 else inverse_psd(factor, shift)


def block_kron(left: Tensor, right: Tensor) -> Tensor:
    """diag(A_1 (x) B_1, ..., A_k (x) B_k) for A (..., p, r), B (..., q, s)."""
    pairs = zip(left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:]), strict=True)
    return join_diagonally((torch.kron(a.contiguous(), b.contiguous()) for a, b in pairs))


# Dimensions too large for one factor, cut into equal pieces: diag(A_1, ..., A_k) (x) diag(B_1, ..., B_m)


class Tiled(Operator, packed_as="tiled"):
    """An operator on the tiles (k, m, s, t) of a matrix (p, q), flattened row-major.

    Where the pieces hold more than the dimension, the last ones end in zeros.

    Args:
        tiles: Of size k m s t, such as a `Kronecker` with factors (k, 1, s, s) and (1, m, t, t). A factor that is not
            cut has shape (q, q), or (q,) for a diagonal one.
        grid: (k, m, s, t), with k s >= p and m t >= q.
        shape: (p, q).

    Raises:
        ValueError: If the tiles do not cover the matrix.
    """

    def __init__(
        self, tiles: KroneckerOperator | Operator, grid: tuple[int, int, int, int], shape: tuple[int, int]
    ) -> None:
        (k, m, s, t), (p, q) = grid, shape
        if not (k * s >= p and m * t >= q and k * m * s * t == tiles.size):
            raise ValueError(f"tiles {grid} of an operator of size {tiles.size} do not cover a matrix {shape}")
        self.tiles, self.grid, self.matrix_shape = tiles, grid, shape
        self.size, self.dtype, self.device = p * q, tiles.dtype, tiles.device
        self.facts = tiles.facts

    @staticmethod
    def kronecker(left: Tensor, right: Tensor, shape: tuple[int, int], *, factored: bool = False) -> Tiled:
        """A (x) B on the tiles of a matrix (p, q), from factors of which at least one is cut.

        Args:
            left: A, shape (k, 1, s, s) if it is cut, else (p, p) or (p,).
            right: B, shape (1, m, t, t) if it is cut, else (q, q) or (q,).
            shape: (p, q).
            factored: As in `Kronecker`.
        """
        tiles = KroneckerOperator(left, right, factored=factored)
        return Tiled(tiles, grid_of(tiles.matrix_shape), shape)

    @staticmethod
    def spectral(tiles: Spectral, shape: tuple[int, int]) -> Tiled:
        """V diag(s) V^T on the tiles of a matrix (p, q), V the eigenvectors of factors of which at least one is cut.

        Args:
            tiles: The operator on the tiles.
            shape: (p, q).
        """
        return Tiled(tiles, grid_of(tuple(tiles.spectrum.shape)), shape)

    @staticmethod
    def cut_matrix(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A matrix in tiles, zeros where the pieces hold more.

        Args:
            matrix: Shape (p, q).
            shape: (k, m, s, t).
        """
        return cut_tiles(matrix, grid_of(shape))

    def mv(self, vector: Tensor) -> Tensor:
        cut = cut_tiles(vector.reshape(self.matrix_shape), self.grid)
        return join_tiles(self.tiles.mv(cut.reshape(-1)).view(self.grid), self.matrix_shape).reshape(-1)

    @property
    def closed_form(self) -> bool:
        return self.tiles.closed_form

    def inverse(self, damping: float = 0.0) -> Tiled | None:
        """For `factored` tiles K-FAC's, with the pi of the whole factors, so that cutting changes no damping."""
        if isinstance(self.tiles, KroneckerOperator) and self.tiles.factored:
            sides = self.tiles.left, self.tiles.right
            means = [diagonal_of(side).sum() / size for side, size in zip(sides, self.matrix_shape, strict=True)]
            return Tiled(invert_factors(*sides, means, damping), self.grid, self.matrix_shape)
        inverse = self.tiles.inverse(damping)
        return None if inverse is None else Tiled(inverse, self.grid, self.matrix_shape)

    def pack(self) -> dict[str, Any]:
        return {"grid": list(self.grid), "shape": list(self.matrix_shape), "tiles": self.tiles}

    @classmethod
    def unpack(cls, parts: dict[str, Any]) -> Tiled:
        return cls(parts["tiles"], tuple(parts["grid"]), tuple(parts["shape"]))

    def diagonal(self) -> Tensor:
        return join_tiles(self.tiles.diagonal().view(self.grid), self.matrix_shape).reshape(-1)


def grid_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(k, m, s, t) of factors that broadcast to (..., s, t)."""
    *lead, s, t = shape
    k, m = [1] * (2 - len(lead)) + lead
    return k, m, s, t


def cut_tiles(matrix: Tensor, grid: tuple[int, int, int, int]) -> Tensor:
    """(p, q) -> (k, m, s, t), zeros where the pieces hold more."""
    k, m, s, t = grid
    padded = functional.pad(matrix, (0, m * t - matrix.shape[1], 0, k * s - matrix.shape[0]))
    return padded.view(k, s, m, t).transpose(1, 2)


def join_tiles(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    """(k, m, s, t) -> (p, q)."""
    k, m, s, t = tiles.shape
    return tiles.transpose(1, 2).reshape(k * s, m * t)[: shape[0], : shape[1]]


# Low rank plus scaled identity, on one side of a weight matrix or on both: products by thin matrices alone


@dataclass(frozen=True)
class Spikes:
    """F = V diag(d) V^T + rho (I - V V^T): a few eigenvalues of their own, one for all other directions.

    Args:
        vectors: V, shape (..., D, r), with orthonormal columns.
        values: (d_1, ..., d_r, rho), shape (..., r + 1).
    """

    vectors: Tensor
    values: Tensor

    def trace(self) -> Tensor:
        """Sum of all D eigenvalues, (...,)."""
        size, rank = self.vectors.shape[-2:]
        return self.values[..., :-1].sum(-1) + (size - rank) * self.values[..., -1]

    def mean(self) -> Tensor:
        """The mean eigenvalue, (...,)."""
        return self.trace() / self.vectors.shape[-2]

    def dense(self) -> Tensor:
        """F as a matrix (..., D, D)."""
        own, rest = self.values[..., :-1], self.values[..., -1:]
        eye = torch.eye(self.vectors.shape[-2], dtype=self.vectors.dtype, device=self.vectors.device)
        return (self.vectors * (own - rest).unsqueeze(-2)) @ self.vectors.mT + rest.unsqueeze(-1) * eye


@compute_exactly
class Spiked(Operator, packed_as="spiked"):
    """sum_ij spectrum_ij (v_i v_i^T) (x) (w_j w_j^T), where the last i and j stand for all that V and W leave out.

    Acts on a (p, q) matrix flattened row-major. A leading dimension stands for independent blocks. A zero column
    has the last one's eigenvalue. Products cost 4 p q (r + s) operations.

    Args:
        left: V, shape (..., p, r), with orthonormal columns; r may be 0.
        right: W, shape (..., q, s), with orthonormal columns; s may be 0.
        spectrum: Shape (..., r + 1, s + 1), >= 0.
        unit: What relative damping refers to, a scalar tensor. Default: the mean eigenvalue.

    Raises:
        ValueError: For shapes that do not fit.
    """

    has_closed_form = True
    state = ("spectrum", "left", "right")

    def __init__(self, left: Tensor, right: Tensor, spectrum: Tensor, unit: Tensor | None = None) -> None:
        expected = (*left.shape[:-2], left.shape[-1] + 1, right.shape[-1] + 1)
        if spectrum.shape != expected or left.shape[:-2] != right.shape[:-2]:
            raise ValueError(
                f"spectrum has shape {tuple(spectrum.shape)}, expected {expected} for left {tuple(left.shape)} and "
                f"right {tuple(right.shape)}: a row and a column more than there are vectors"
            )
        self.left, self.right, self.spectrum, self.unit = left, right, spectrum, unit
        self.matrix_shape = (*left.shape[:-1], right.shape[-2])
        self.size = torch.Size(self.matrix_shape).numel()
        self.dtype, self.device = left.dtype, left.device

    def mv(self, vector: Tensor) -> Tensor:
        block = vector.reshape(self.matrix_shape)
        rest, left, right, both = self._excess()
        turned = self.left.mT @ block  # (r, q)
        narrow = block @ self.right  # (p, s)
        corner = both * (turned @ self.right)
        image = rest * block
        if self.left.shape[-1]:
            image = image + self.left @ (left * turned + corner @ self.right.mT)
        if self.right.shape[-1]:
            image = image + (right * narrow) @ self.right.mT
        return image.reshape(-1)

    def inverse(self, damping: float = 0.0) -> Spiked:
        """Exact: 1 / (spectrum + damping); at damping 0 the pseudo-inverse."""
        cutoff = 10 * safe_cutoff(max(self.matrix_shape[-2:]), self.dtype) * self.spectrum.max() if damping == 0 else 0
        return Spiked(self.left, self.right, positive_inverse(self.spectrum + damping, cutoff))

    def diagonal(self) -> Tensor:
        rest, left, right, both = self._excess()
        v, w = self.left.square(), self.right.square()
        return (rest + v @ left + right @ w.mT + v @ both @ w.mT).reshape(-1)

    def trace(self) -> Tensor:
        (p, r), (q, s) = self.left.shape[-2:], self.right.shape[-2:]
        rows, columns = self.spectrum.new_ones(r + 1), self.spectrum.new_ones(s + 1)
        rows[-1], columns[-1] = p - r, q - s
        return (rows @ self.spectrum @ columns).sum()

    def mean_eigenvalue(self) -> Tensor:
        return super().mean_eigenvalue() if self.unit is None else self.unit

    def _excess(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """f = rest + left_i + right_j + both_ij, without the last index: (1, 1), (r, 1), (1, s), (r, s)."""
        rest = self.spectrum[..., -1:, -1:]
        left, right = self.spectrum[..., :-1, -1:] - rest, self.spectrum[..., -1:, :-1] - rest
        return rest, left, right, self.spectrum[..., :-1, :-1] - left - right - rest


@compute_exactly
class SpikedKronecker(Operator):
    """A (x) B with both factors low rank plus scaled identity, on a (p, q) matrix flattened row-major.

    Args:
        left: A, of size p.
        right: B, of size q.
        factored: True if `inverse` damps both factors, (A + a mean(A) I)^-1 (x) (B + a mean(B) I)^-1, where a^2 is the
            damping over the product of the means. This is K-FAC's factored damping, and Kaldi's smoothing by a (its
            alpha). False: exact.
    """

    has_closed_form = True

    def __init__(self, left: Spikes, right: Spikes, *, factored: bool = False) -> None:
        self.left, self.right, self.factored = left, right, factored
        self.spiked = Spiked(left.vectors, right.vectors, left.values.unsqueeze(-1) * right.values.unsqueeze(-2))
        self.size, self.dtype, self.device = self.spiked.size, self.spiked.dtype, self.spiked.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.spiked.mv(vector)

    def inverse(self, damping: float = 0.0) -> Spiked:
        if not self.factored or damping == 0:
            return self.spiked.inverse(damping)
        sides: list[Tensor] = []
        left, right = self.left.mean(), self.right.mean()
        for side, own, other in ((self.left, left, right), (self.right, right, left)):
            shift = torch.where((own > 0) & (other > 0), (damping * own / other).sqrt(), damping**0.5)
            sides.append(1 / (side.values + shift.unsqueeze(-1)))
        return Spiked(self.left.vectors, self.right.vectors, sides[0].unsqueeze(-1) * sides[1].unsqueeze(-2))

    def diagonal(self) -> Tensor:
        return self.spiked.diagonal()

    def trace(self) -> Tensor:
        return self.spiked.trace()
