"""One block per unit: exact, or quasi-diagonal, which keeps a unit's bias row and diagonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import inverse_psd, inverse_symmetric, psd_root, pseudo_inverse
from natgrad.ground.typed_torch import join_diagonally
from natgrad.operators.base import Operator
from natgrad.operators.facts import Facts


class Units(Operator, packed_as="units"):
    """diag(G_1, ..., G_k) of k symmetric matrices of one size, n = k d.

    Args:
        matrices: Shape (k, d, d), positive semi-definite unless `indefinite`.
        indefinite: True if they may have negative eigenvalues. The inverse is then by eigenvalues, and there is no
            root.

    Raises:
        ValueError: For another shape.
    """

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

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> Units:
        if self.indefinite:
            return Units(inverse_symmetric(self.matrices, damping), indefinite=True)
        return Units(inverse_psd(self.matrices, damping) if damping > 0 else pseudo_inverse(self.matrices))

    def diagonal(self) -> Tensor:
        return self.matrices.diagonal(dim1=1, dim2=2).reshape(-1)

    def dense(self) -> Tensor:
        return join_diagonally(self.matrices)


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

    state = (
        "squares",
        "cross",
    )

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

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> QuasiDiagonalInverse:
        """Exact; at damping 0 a generalised inverse X with G X G = G, not the one of least norm.

        Args:
            damping: In G's units, >= 0.
        """
        return QuasiDiagonalInverse(self, damping)

    def diagonal(self) -> Tensor:
        return torch.cat([self.rest + self.slope * self.cross, self.bias], dim=1).reshape(-1)


class QuasiDiagonalInverse(Operator, packed_as="quasi"):
    """(G + damping I)^-1 of a `QuasiDiagonal` G, by eliminating the bias and Sherman-Morrison on the weights.

    Args:
        operator: G.
        damping: In G's units, >= 0.
    """

    def __init__(self, operator: QuasiDiagonal, damping: float) -> None:
        self.operator, self.damping = operator, damping
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device
        self.bias, self.rest = safe(operator.bias + damping), safe(operator.rest + damping)
        # what is left of c c^T / b after elimination: c c^T (1 / b - 1 / (b + damping))
        self.kept = damping * operator.slope * operator.bias / self.bias  # damping c / (b + damping)
        self.scale = 1 + (self.kept * operator.slope / self.rest).sum(1, keepdim=True)

    def mv(self, vector: Tensor) -> Tensor:
        weights, bias = split_bias(vector, self.operator.squares)
        reduced = (weights - self.operator.cross * bias / self.bias) / self.rest
        along = (self.operator.slope * reduced).sum(1, keepdim=True) / self.scale
        found = reduced - self.kept * along / self.rest
        last = (bias - (self.operator.cross * found).sum(1, keepdim=True)) / self.bias
        return torch.cat([found, last], dim=1).reshape(-1)

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
