"""Kronecker products of block-diagonal factors: dimensions too large for one factor, cut into equal pieces.

diag(A_1, ..., A_k) (x) diag(B_1, ..., B_m)      on X (p, q):      tile X_ij becomes A_i X_ij B_j
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.operators.base import Operator
from natgrad.operators.kronecker import KroneckerOperator, Spectral, diagonal_of, inverse_factor


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
        """For `factored` tiles K-FAC's, with the pi of the whole factors, so that cutting changes no damping.

        Args:
            damping: In G's units, >= 0.
        """
        if isinstance(self.tiles, KroneckerOperator) and self.tiles.factored:
            found: Operator | None = self._factor_tiles(self.tiles, damping)
        else:
            found = self.tiles.inverse(damping)
        return None if found is None else Tiled(found, self.grid, self.matrix_shape)

    def pack(self) -> dict[str, Any]:
        return {"grid": list(self.grid), "shape": list(self.matrix_shape), "tiles": self.tiles}

    @classmethod
    def unpack(cls, parts: dict[str, Any]) -> Tiled:
        return cls(parts["tiles"], tuple(parts["grid"]), tuple(parts["shape"]))

    def _factor_tiles(self, tiles: KroneckerOperator, damping: float) -> KroneckerOperator:
        p, q = self.matrix_shape
        left, right = diagonal_of(tiles.left).sum() / p, diagonal_of(tiles.right).sum() / q
        pi = torch.where((left > 0) & (right > 0), (left / right).sqrt(), 1.0)
        shift = damping**0.5
        return KroneckerOperator(inverse_factor(tiles.left, shift * pi), inverse_factor(tiles.right, shift / pi))

    def diagonal(self) -> Tensor:
        return join_tiles(self.tiles.diagonal().view(self.grid), self.matrix_shape).reshape(-1)

    def trace(self) -> Tensor:
        return self.tiles.trace()


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
