"""One block per unit: its own, quasi-diagonal, or all from the same rows that units weigh differently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import (
    eigh,
    inverse_psd,
    inverse_symmetric,
    positive_inverse,
    psd_root,
    pseudo_inverse,
    safe_cutoff,
)
from natgrad.ground.pure import compute_exactly
from natgrad.ground.typed_torch import join_diagonally, split_tensor
from natgrad.operators.base import Facts, Operator

CHUNK = 2**24
"""Numbers in a temporary at most: units are taken as many at a time."""


@compute_exactly
class SharedRows(Operator):
    """diag(G_1, ..., G_k), G_j = A_j^T diag(w_j) A_j, A_j = A diag(m_j): rows A that all units share.

    Products and the diagonal cost O(k s d), and no block is formed. The inverse is by Woodbury, through k matrices
    (s, s), where there are fewer rows than columns, and through the blocks (k, d, d) otherwise.

    Args:
        rows: A, shape (s, d).
        weights: w, shape (k, s), >= 0.
        mask: m, shape (k, d), of zeros and ones: 1 for the columns that a unit sees. Default: all.

    Raises:
        ValueError: For shapes that do not fit.
    """

    has_closed_form = True
    state = ("rows", "weights", "mask")

    def __init__(self, rows: Tensor, weights: Tensor, mask: Tensor | None = None) -> None:
        if rows.dim() != 2 or weights.dim() != 2 or weights.shape[1] != len(rows):
            raise ValueError(
                f"rows has shape {tuple(rows.shape)}, weights {tuple(weights.shape)}, expected (s, d) and (k, s)"
            )
        if mask is not None and mask.shape != (len(weights), rows.shape[1]):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected (k, d): {(len(weights), rows.shape[1])}")
        self.rows, self.weights = rows, weights
        self.mask = None if mask is None else mask.to(rows.dtype)
        self.size, self.dtype, self.device = len(weights) * rows.shape[1], rows.dtype, rows.device

    def mv(self, vector: Tensor) -> Tensor:
        along = self.mask_unseen(vector.reshape(len(self.weights), -1)) @ self.rows.mT  # (k, s)
        return self.mask_unseen((along * self.weights) @ self.rows).reshape(-1)

    def mask_unseen(self, block: Tensor) -> Tensor:
        """The columns that the units see, zeros elsewhere.

        Args:
            block: Shape (k, d).
        """
        return block if self.mask is None else block * self.mask

    def blocks(self) -> Tensor:
        """The blocks themselves, (k, d, d)."""
        blocks = weigh_rows(self.rows, self.weights)
        return blocks if self.mask is None else blocks * self.mask.unsqueeze(2) * self.mask.unsqueeze(1)

    def spectral(self, rank: int) -> SharedBasis:
        """The nearest blocks, in Frobenius norm, that are diagonal in a basis Q for all units.

        Q has the leading eigenvectors of the blocks' mean; a unit's eigenvalues are diag(Q^T G_j Q), as in EKFAC, and
        the mean of what is left.

        Args:
            rank: The number of directions in Q.

        Raises:
            ValueError: Under a mask: units that see different columns share no basis.

        Reference:
            George et al. 2018.
        """
        if self.mask is not None:
            raise ValueError("mask is given: units that see different columns share no basis, use inverse()")
        mean = (self.rows.mT * self.weights.mean(0)) @ self.rows
        basis = eigh(mean)[1].flip(1)[:, :rank].contiguous()
        spectrum = self.weights @ (self.rows @ basis).square()
        left = self.weights @ self.rows.square().sum(1) - spectrum.sum(1)
        rest = left.clamp(min=0) / max(1, basis.shape[0] - basis.shape[1])
        return SharedBasis(basis, spectrum, rest)

    def grams(self) -> Tensor:
        """B_j B_j^T for B_j = diag(sqrt w_j) A_j, (k, s, s)."""
        scales = self.weights.sqrt()
        inner = self.rows @ self.rows.mT if self.mask is None else weigh_rows(self.rows.mT, self.mask)
        return inner * scales.unsqueeze(2) * scales.unsqueeze(1)

    def root(self) -> Tensor:
        seen = self.rows.mT.expand(len(self.weights), -1, -1)
        seen = seen if self.mask is None else seen * self.mask.unsqueeze(2)
        return join_diagonally(seen * self.weights.sqrt().unsqueeze(1))

    def inverse(self, damping: float = 0.0) -> Operator:
        if damping > 0 and self.rows.shape[0] < self.rows.shape[1]:
            return SharedRowsInverse(self, damping)
        return Units(self.blocks()).inverse(damping)

    def diagonal(self) -> Tensor:
        return self.mask_unseen(self.weights @ self.rows.square()).reshape(-1)

    def dense(self) -> Tensor:
        return join_diagonally(self.blocks())


def weigh_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """A^T diag(w_j) A for A (s, d) and w (k, s), (k, d, d)."""
    step = max(1, CHUNK // max(1, rows.numel()))
    return torch.cat([(rows.mT * w.unsqueeze(1)) @ rows for w in split_tensor(weights, step)])


class SharedRowsInverse(Operator):
    """(G + damping I)^-1 of `SharedRows` by Woodbury, damping > 0, with k inner inverses (s, s)."""

    state = ("operator", "damping")

    def __init__(self, operator: SharedRows, damping: float) -> None:
        # with B_j = diag(sqrt w_j) A_j: (B^T B + damping I)^-1 = (I - B^T (damping I + B B^T)^-1 B) / damping
        self.operator, self.damping = operator, damping
        self.scales = operator.weights.sqrt()
        self.inner = inverse_psd(operator.grams(), damping)
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device

    def mv(self, vector: Tensor) -> Tensor:
        value = self._once(vector)
        rest = vector - self.operator.mv(value) - self.damping * value
        return value + self._once(rest)  # the subtraction cancels digits at small damping

    def _once(self, vector: Tensor) -> Tensor:
        block = vector.reshape(len(self.scales), -1)
        along = (self.operator.mask_unseen(block) @ self.operator.rows.mT) * self.scales  # (k, s)
        inside = torch.bmm(self.inner, along.unsqueeze(2)).squeeze(2)
        image = self.operator.mask_unseen((inside * self.scales) @ self.operator.rows)
        return ((block - image) / self.damping).reshape(-1)


@compute_exactly
class SharedBasis(Operator):
    """diag(G_1, ..., G_k), G_j = Q diag(s_j) Q^T + r_j (1 - Q Q^T): a unit's own eigenvalues in a common basis.

    There are n = k d parameters.

    Args:
        basis: Q, shape (d, m), with orthonormal columns, m <= d.
        spectrum: s, shape (k, m), >= 0.
        rest: r, shape (k,), >= 0: the one eigenvalue of all directions outside of Q.

    Raises:
        ValueError: For shapes that do not fit.
    """

    has_closed_form = True
    state = ("basis", "spectrum", "rest")

    def __init__(self, basis: Tensor, spectrum: Tensor, rest: Tensor) -> None:
        fits = basis.dim() == 2 and spectrum.dim() == 2 and basis.shape[1] == spectrum.shape[1] <= basis.shape[0]
        if not fits or rest.shape != spectrum.shape[:1]:
            raise ValueError(
                f"basis has shape {tuple(basis.shape)}, spectrum {tuple(spectrum.shape)}, rest {tuple(rest.shape)}, "
                "expected (d, m), (k, m) and (k,) with m <= d"
            )
        self.basis, self.spectrum, self.rest = basis, spectrum, rest
        self.is_complete = basis.shape[0] == basis.shape[1]
        self.size = len(spectrum) * len(basis)
        self.dtype, self.device = basis.dtype, basis.device

    def mv(self, vector: Tensor) -> Tensor:
        block = vector.reshape(len(self.spectrum), -1)
        if self.is_complete:
            return ((block @ self.basis * self.spectrum) @ self.basis.mT).reshape(-1)
        rest = self.rest.unsqueeze(1)
        return (block * rest + (block @ self.basis * (self.spectrum - rest)) @ self.basis.mT).reshape(-1)

    def root(self) -> Tensor:
        """The symmetric one."""
        roots = (self.basis * self.spectrum.sqrt().unsqueeze(1)) @ self.basis.mT
        outside = torch.eye(len(self.basis), dtype=self.dtype, device=self.device) - self.basis @ self.basis.mT
        return join_diagonally(roots + self.rest.sqrt()[:, None, None] * outside)

    def inverse(self, damping: float = 0.0) -> SharedBasis:
        largest = torch.cat([self.spectrum.flatten(), self.rest]).max()
        cutoff = safe_cutoff(len(self.basis), self.dtype) * float(largest) if damping == 0 else 0.0
        spectrum, rest = (positive_inverse(part + damping, cutoff) for part in (self.spectrum, self.rest))
        return SharedBasis(self.basis, spectrum, rest)

    def diagonal(self) -> Tensor:
        squares = self.basis.square()
        outside = torch.zeros_like(squares[:, 0]) if self.is_complete else 1 - squares.sum(1)
        return (self.spectrum @ squares.mT + self.rest.outer(outside)).reshape(-1)


# One block per unit, exact or quasi-diagonal


@compute_exactly
class Units(Operator, packed_as="units"):
    """diag(G_1, ..., G_k) of k symmetric matrices of one size, n = k d.

    Args:
        matrices: Shape (k, d, d), positive semi-definite unless `indefinite`.
        indefinite: True if they may have negative eigenvalues. The inverse is then by eigenvalues, and there is no
            root.

    Raises:
        ValueError: For another shape.
    """

    has_closed_form = True
    state = ("matrices",)

    def __init__(self, matrices: Tensor, *, indefinite: bool = False) -> None:
        if matrices.dim() != 3 or matrices.shape[1] != matrices.shape[2]:
            raise ValueError(f"matrices has shape {tuple(matrices.shape)}, expected (k, d, d)")
        self.matrices, self.facts = matrices, Facts(indefinite=indefinite)
        self.size = matrices.shape[0] * matrices.shape[1]
        self.dtype, self.device = matrices.dtype, matrices.device

    def mv(self, vector: Tensor) -> Tensor:
        # a row times each symmetric matrix: on a CPU 1.7 times faster than a matrix times a column, four times where
        # a factorisation left the columns contiguous
        rows = self.matrices if self.matrices.is_contiguous() else self.matrices.mT
        return torch.bmm(vector.reshape(len(self.matrices), 1, -1), rows).reshape(-1)

    def root(self) -> Tensor | None:
        return None if self.indefinite else join_diagonally(psd_root(self.matrices))

    def inverse(self, damping: float = 0.0) -> Units:
        if self.indefinite:
            return Units(inverse_symmetric(self.matrices, damping), indefinite=True)
        return Units(inverse_psd(self.matrices, damping) if damping > 0 else pseudo_inverse(self.matrices))

    def invert_each(self, damping: Tensor) -> Units | None:
        each = damping.repeat_interleave(len(self.matrices) // len(damping))
        return None if self.indefinite else Units(inverse_psd(self.matrices, each))

    def diagonal(self) -> Tensor:
        return self.matrices.diagonal(dim1=1, dim2=2).reshape(-1)

    def dense(self) -> Tensor:
        return join_diagonally(self.matrices)


@compute_exactly
class QuasiDiagonal(Operator):
    """k units, each [[diag(s) + c c^T / b, c], [c^T, b]] over its d weights and its bias: n = k (d + 1).

    Agrees with the unit's Fisher block on the diagonal and on the bias's row, and is the positive semi-definite matrix
    behind Ollivier's quasi-diagonal reduction, which inverts it in O(d) per unit. s = squares - c^2 / b >= 0 by
    Cauchy-Schwarz.

    Args:
        squares: E[delta^2 a^2], shape (k, d + 1), with the bias's E[delta^2] = b last.
        cross: c = E[delta^2 a], shape (k, d).

    Raises:
        ValueError: For shapes that do not fit.

    Reference:
        Ollivier 2015, section 2.3.
    """

    has_closed_form = True
    state = ("squares", "cross")

    def __init__(self, squares: Tensor, cross: Tensor) -> None:
        if squares.dim() != 2 or cross.shape != (squares.shape[0], squares.shape[1] - 1):
            raise ValueError(
                f"squares has shape {tuple(squares.shape)}, cross {tuple(cross.shape)}, expected (k, d + 1) and (k, d)"
            )
        self.squares, self.cross = squares, cross
        self.bias = squares[:, -1:]  # b, (k, 1)
        self.size, self.dtype, self.device = squares.numel(), squares.dtype, squares.device
        self.slope = cross / torch.where(self.bias > 0, self.bias, 1)  # c / b; c is 0 where b is
        rest = squares[:, :-1] - self.slope * cross  # s, of which round-off is left where a unit's block has rank one
        self.rest = torch.where(rest > 10 * torch.finfo(rest.dtype).eps * squares[:, :-1], rest, rest * 0)

    def mv(self, vector: Tensor) -> Tensor:
        weights, bias = split_bias(vector, self.squares)
        pull = (self.slope * weights).sum(1, keepdim=True) + bias  # (c . w + b beta) / b
        return torch.cat([self.rest * weights + self.cross * pull, self.bias * pull], dim=1).reshape(-1)

    def root(self) -> Tensor:
        ends = torch.cat([self.slope, torch.ones_like(self.bias)], dim=1) * self.bias.sqrt()  # (c, b) / sqrt(b)
        diagonals = torch.diag_embed(torch.cat([self.rest.sqrt(), torch.zeros_like(self.bias)], dim=1))
        return join_diagonally(torch.cat([diagonals[..., :-1], ends.unsqueeze(-1)], dim=2))

    def inverse(self, damping: float = 0.0) -> QuasiDiagonalInverse:
        """Exact; at damping 0 a generalised inverse X with G X G = G, not the one of least norm."""
        return QuasiDiagonalInverse(self, damping)

    def diagonal(self) -> Tensor:
        return torch.cat([self.rest + self.slope * self.cross, self.bias], dim=1).reshape(-1)


class QuasiDiagonalInverse(Operator, packed_as="quasi"):
    """(G + damping I)^-1 of a `QuasiDiagonal`: the bias eliminated, then Sherman-Morrison on the weights."""

    def __init__(self, operator: QuasiDiagonal, damping: float) -> None:
        self.operator, self.damping = operator, damping
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device
        self.bias, self.rest = safe(operator.bias + damping), safe(operator.rest + damping)
        # what is left of c c^T / b after elimination: c c^T (1 / b - 1 / (b + damping))
        self.left = damping * operator.slope * operator.bias / self.bias  # damping c / (b + damping)
        self.scale = 1 + (self.left * operator.slope / self.rest).sum(1, keepdim=True)

    def mv(self, vector: Tensor) -> Tensor:
        weights, bias = split_bias(vector, self.operator.squares)
        reduced = (weights - self.operator.cross * bias / self.bias) / self.rest
        along = (self.operator.slope * reduced).sum(1, keepdim=True) / self.scale
        solved = reduced - self.left * along / self.rest
        last = (bias - (self.operator.cross * solved).sum(1, keepdim=True)) / self.bias
        return torch.cat([solved, last], dim=1).reshape(-1)

    def pack(self) -> dict[str, Any]:
        return {"squares": self.operator.squares, "cross": self.operator.cross, "damping": self.damping}

    @classmethod
    def unpack(cls, parts: dict[str, Any]) -> QuasiDiagonalInverse:
        return QuasiDiagonal(parts["squares"], parts["cross"]).inverse(parts["damping"])


def split_bias(vector: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) -> weights (k, d) and biases (k, 1)."""
    block = vector.reshape(like.shape)
    return block[:, :-1], block[:, -1:]


def safe(values: Tensor) -> Tensor:
    """Infinity in place of 0, so that dividing by it gives 0: directions without curvature are left out."""
    return torch.where(values == 0, torch.inf, values)
