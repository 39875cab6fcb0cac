"""U of G = U U^T by its products, for solving in the space of the examples; and that of weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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

    def dense(self) -> Tensor:
        """U written out, (n, r)."""
        ...

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle."""
        root = self.dense()
        return root.mT @ root


def mirror_gram(lower: Tensor) -> Tensor:
    """The symmetric matrix (r, r) whose lower triangle is given."""
    return lower.tril() + lower.tril(-1).mT


class WrittenColumns(SampleRows):
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
        return self.matrix @ weights

    def rmv(self, vector: Tensor) -> Tensor:
        return self.matrix.mT @ vector

    def dense(self) -> Tensor:
        return self.matrix


class StackedColumns(SampleRows):
    """U = [c_1 U_1, c_2 U_2, ...], the root of a weighted sum of operators; a U_i of this kind is taken apart."""

    def __init__(self, parts: Sequence[SampleRows], factors: Sequence[float] | None = None) -> None:
        given = zip(parts, [1.0] * len(parts) if factors is None else factors, strict=True)
        self.parts = [(each, c * own) for part, c in given for each, own in take_apart(part)]
        self.starts = [0, *accumulate(part.rank for part, _ in self.parts)]
        self.rank = self.starts[-1]

    def mv(self, weights: Tensor) -> Tensor:
        pieces = split_tensor(weights, [part.rank for part, _ in self.parts])
        return torch.stack([c * part.mv(w) for (part, c), w in zip(self.parts, pieces, strict=True)]).sum(0)

    def rmv(self, vector: Tensor) -> Tensor:
        return torch.cat([c * part.rmv(vector) for part, c in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([c * part.dense() for part, c in self.parts], dim=1)

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle: by layers where two parts have rows of the same layers."""
        corners = [c**2 * part.lower_gram() for part, c in self.parts]
        total = corners[0].new_zeros(self.rank, self.rank)

        @cache
        def write(k: int) -> Tensor:
            return self.parts[k][0].dense()

        for i, (rows, c) in enumerate(self.parts):
            here = slice(self.starts[i], self.starts[i + 1])
            total[here, here] = corners[i]
            for j, (other, d) in enumerate(self.parts[:i]):
                way = getattr(rows, "cross_gram", None)
                block: Tensor | None = None if way is None else way(other)
                block = write(i).mT @ write(j) if block is None else block
                total[here, self.starts[j] : self.starts[j + 1]] = c * d * block
        return total


def take_apart(rows: SampleRows) -> list[tuple[SampleRows, float]]:
    """The U_i of a stack with their factors; one alone for any other U."""
    return rows.parts if isinstance(rows, StackedColumns) else [(rows, 1.0)]
