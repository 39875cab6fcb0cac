"""Low rank, alone or plus scaled identity: products by thin matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import pseudo_square, safe_cutoff, woodbury_solve
from natgrad.operators.base import Operator


class LowRankOperator(Operator, packed_as="LowRank"):
    """G = U U^T.

    Args:
        factor: U, shape (n, r).

    Raises:
        ValueError: If U has not two dimensions.
    """

    state = ("factor",)

    def __init__(self, factor: Tensor) -> None:
        if factor.dim() != 2:
            raise ValueError(f"factor has shape {tuple(factor.shape)}, expected (n, r)")
        self.factor = factor
        self.size, self.dtype, self.device = factor.shape[0], factor.dtype, factor.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.factor @ (self.factor.mT @ vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.mv(block)

    def root(self) -> Tensor:
        return self.factor

    @property
    def closed_form(self) -> bool:
        return self.factor.shape[1] <= self.size  # a wide factor's (r, r) is the larger system

    def inverse(self, damping: float = 0.0) -> LowRankInverse:
        return LowRankInverse(self.factor, damping)

    def diagonal(self) -> Tensor:
        return self.factor.square().sum(1)

    def dense(self) -> Tensor:
        return self.factor @ self.factor.mT


class LowRankInverse(Operator):
    """(U U^T + damping I)^-1 by Woodbury, in O(n r^2 + r^3); at damping 0 the pseudo-inverse U (U^T U)^+2 U^T."""

    state = (
        "factor",
        "damping",
    )

    def __init__(self, factor: Tensor, damping: float) -> None:
        self.factor, self.damping = factor, damping
        self.size, self.dtype, self.device = factor.shape[0], factor.dtype, factor.device

    def mv(self, vector: Tensor) -> Tensor:
        if self.damping > 0:
            return woodbury_solve(self.factor, vector, self.damping)
        vectors, weights = pseudo_square(self.factor.mT @ self.factor)

        def once(right: Tensor) -> Tensor:
            coordinates = vectors.mT @ (self.factor.mT @ right)
            return self.factor @ (vectors @ (weights.view(-1, *[1] * (right.dim() - 1)) * coordinates))

        value = once(vector)
        return value + once(vector - self.factor @ (self.factor.mT @ value))  # squared eigenvalues cost half the digits

    def mm(self, block: Tensor) -> Tensor:
        return self.mv(block)

    def inverse(self, damping: float = 0.0) -> Operator | None:
        return LowRankOperator(self.factor) if damping == 0 and self.damping == 0 else None


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
    state = (
        "spectrum",
        "left",
        "right",
    )

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
        """Exact: 1 / (spectrum + damping); at damping 0 the pseudo-inverse.

        Args:
            damping: In G's units, >= 0.
        """
        cutoff = 10 * safe_cutoff(max(self.matrix_shape[-2:]), self.dtype) * self.spectrum.max() if damping == 0 else 0
        damped = self.spectrum + damping
        drop = damped <= cutoff
        return Spiked(self.left, self.right, torch.where(drop, 0, 1 / torch.where(drop, 1, damped)))

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
