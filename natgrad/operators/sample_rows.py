"""U of G = U U^T by its products, for solving in the space of the examples; and that of factors and sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from natgrad.ground.messages import write_choices
from natgrad.ground.typed_torch import split_tensor


class SampleRows(Protocol):
    """U (n, r) of G = U U^T by its products, for solving in the space of the examples."""

    rank: int

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,).

        Args:
            weights: w, shape (r,).
        """
        ...

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v, shape (r,).

        Args:
            vector: v, shape (n,).
        """
        ...

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle."""
        ...

    def dense(self) -> Tensor:
        """U written out, (n, r)."""
        ...


class WrittenColumns:
    """U as a matrix.

    Args:
        matrix: Shape (n, r).
    """

    is_written = True

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.rank = matrix, matrix.shape[1]

    def __repr__(self) -> str:
        return write_choices(self, size=len(self.matrix), rank=self.rank)

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,).

        Args:
            weights: w, shape (r,).
        """
        return self.matrix @ weights

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v, shape (r,).

        Args:
            vector: v, shape (n,).
        """
        return self.matrix.mT @ vector

    def lower_gram(self) -> Tensor:
        """U^T U, shape (r, r)."""
        return self.matrix.mT @ self.matrix

    def dense(self) -> Tensor:
        """U itself, shape (n, r)."""
        return self.matrix


class ScaledRows:
    """c U.

    Args:
        rows: U.
        factor: c.
    """

    def __init__(self, rows: SampleRows, factor: float) -> None:
        self.rows, self.factor, self.rank = rows, factor, rows.rank

    def mv(self, weights: Tensor) -> Tensor:
        """c U w, shape (n,).

        weights: w, (r,).
        """
        return self.factor * self.rows.mv(weights)

    def rmv(self, vector: Tensor) -> Tensor:
        """c U^T v, shape (r,).

        vector: v, (n,).
        """
        return self.factor * self.rows.rmv(vector)

    def lower_gram(self) -> Tensor:
        """c^2 U^T U (r, r), valid in its lower triangle."""
        return self.factor**2 * self.rows.lower_gram()

    def dense(self) -> Tensor:
        """c U written out, (n, r)."""
        return self.factor * self.rows.dense()


class StackedColumns:
    """U = [U_1, U_2, ...], the root of a sum of operators.

    Args:
        parts: Every U_i, (n, r_i).
    """

    def __init__(self, parts: Sequence[SampleRows]) -> None:
        self.parts = list(parts)
        self.starts = [0, *accumulate(part.rank for part in self.parts)]
        self.rank = self.starts[-1]

    def mv(self, weights: Tensor) -> Tensor:
        """sum_i U_i w_i, shape (n,).

        weights: w, (r,).
        """
        pieces = split_tensor(weights, [part.rank for part in self.parts])
        return torch.stack([part.mv(piece) for part, piece in zip(self.parts, pieces, strict=True)]).sum(0)

    def rmv(self, vector: Tensor) -> Tensor:
        """Every U_i^T v, one after the other, shape (r,).

        vector: v, (n,).
        """
        return torch.cat([part.rmv(vector) for part in self.parts])

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle: by layers where two parts have rows of the same layers."""
        corners = [part.lower_gram() for part in self.parts]
        total = corners[0].new_zeros(self.rank, self.rank)
        written = dict[int, Tensor]()
        for i, corner in enumerate(corners):
            here = slice(self.starts[i], self.starts[i + 1])
            total[here, here] = corner
            for j in range(i):
                total[here, self.starts[j] : self.starts[j + 1]] = self._cross(i, j, written)
        return total

    def dense(self) -> Tensor:
        """U written out, (n, r)."""
        return torch.cat([part.dense() for part in self.parts], dim=1)

    def _cross(self, i: int, j: int, written: dict[int, Tensor]) -> Tensor:
        """U_i^T U_j; written out, once each, where the two do not know a shorter way."""
        found = multiply_rows(self.parts[i], self.parts[j])
        if found is None:
            for k in (i, j):
                if k not in written:
                    written[k] = self.parts[k].dense()
            found = written[i].mT @ written[j]
        return found


def multiply_rows(one: SampleRows, other: SampleRows) -> Tensor | None:
    """U^T V (r, s) without writing out U and V; None where no such way is known.

    one: U, (n, r). other: V, (n, s).
    """
    if isinstance(one, ScaledRows):
        found = multiply_rows(one.rows, other)
        return None if found is None else one.factor * found
    if isinstance(other, ScaledRows):
        found = multiply_rows(one, other.rows)
        return None if found is None else other.factor * found
    way = getattr(one, "cross_gram", None)
    return None if way is None else way(other)
