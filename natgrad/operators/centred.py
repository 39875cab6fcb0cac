"""The covariance of the columns of a root: second moments about the mean, in sample space."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.operators.base import Operator
from natgrad.operators.pullback import Pullback
from natgrad.operators.rows import Rows


class CentredRows:
    """U (I - m m^T / sum m).

    Args:
        rows: U, shape (n, r).
        counted: m, shape (r,): 1 for the columns that count, 0 for the others.
    """

    def __init__(self, rows: Rows, counted: Tensor) -> None:
        self.rows, self.counted, self.rank = rows, counted, rows.rank

    def centre(self, weights: Tensor) -> Tensor:
        """w - m (m . w) / sum m, shape (r,): the projection, which is its own transpose.

        Args:
            weights: w, shape (r,).
        """
        return weights - self.counted * (self.counted @ weights / self.counted.sum())

    def mv(self, weights: Tensor) -> Tensor:
        """(r,) -> (n,)."""
        return self.rows.mv(self.centre(weights))

    def rmv(self, vector: Tensor) -> Tensor:
        """(n,) -> (r,)."""
        return self.centre(self.rows.rmv(vector))

    def lower_gram(self) -> Tensor:
        """P U^T U P (r, r) with the projection P."""
        gram = self.rows.gram()
        gram = gram - torch.outer(self.counted, self.counted @ gram) / self.counted.sum()
        return gram - torch.outer(gram @ self.counted, self.counted) / self.counted.sum()

    def dense(self) -> Tensor:
        """(n, r)."""
        root = self.rows.dense()
        return root - torch.outer(root @ self.counted, self.counted) / self.counted.sum()


class Centred(Operator):
    """C = U U^T - gbar gbar^T for an uncentred second moment U U^T whose columns are g_i / sqrt(N).

    The gradients are those of single examples, and products and solves stay in sample space.

    Args:
        moment: U U^T, a pulled-back metric with one column per example.
        counted: Shape (r,): 1 where the example counts, 0 where it was ignored.

    Raises:
        ValueError: If `counted` has not one entry per column of U, or if the moment has no root.

    Reference:
        Pascanu & Bengio 2013, eq. 13 (TONGA).
    """

    def __init__(self, moment: Pullback, counted: Tensor) -> None:
        if moment.rows is None or moment.rows.rank != len(counted):
            raise ValueError(f"counted has {len(counted)} entries, expected one per column of the moment's root")
        self.moment, self.rows = moment, CentredRows(moment.rows, counted)
        self.size, self.dtype, self.device = moment.size, moment.dtype, moment.device
        self.facts = moment.facts

    @property
    def rank(self) -> int:
        """Columns of the root."""
        return self.rows.rank

    @property
    def sample_rank(self) -> int:
        return self.rank

    @property
    def sample_rows(self) -> CentredRows:
        return self.rows

    def mv(self, vector: Tensor) -> Tensor:
        return self.rows.mv(self.rows.rmv(vector))

    def root(self) -> Tensor:
        return self.rows.dense()

    def dense(self) -> Tensor:
        root = self.root()
        return root @ root.mT
