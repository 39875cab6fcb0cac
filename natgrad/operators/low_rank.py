"""G = U U^T with a tall factor U: products in O(n r), inverse by Woodbury."""

from __future__ import annotations

from torch import Tensor

from natgrad.ground.linalg import pseudo_square, woodbury_solve
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
