"""The covariance of the columns of a root: second moments about the mean, in sample space."""

from __future__ import annotations

from torch import Tensor

from natgrad.ground.typed_torch import measure_norm
from natgrad.operators.base import Operator
from natgrad.operators.pullback import Pullback
from natgrad.operators.rows import Rows


class CentredRows:
    """U (I - Q Q^T), with Q^T Q = I.

    Args:
        rows: U, shape (n, r).
        counted: The columns of Q up to their lengths, shape (r, q) or (r,), orthogonal to one another.
    """

    def __init__(self, rows: Rows, counted: Tensor) -> None:
        columns = counted.reshape(len(counted), -1)
        self.rows, self.rank = rows, rows.rank
        self.means = columns / measure_norm(columns, dim=0)

    def centre(self, weights: Tensor) -> Tensor:
        """w - Q Q^T w, shape (r,): the projection, which is its own transpose.

        weights: w, (r,).
        """
        return weights - self.means @ (self.means.mT @ weights)

    def mv(self, weights: Tensor) -> Tensor:
        """(r,) -> (n,)."""
        return self.rows.mv(self.centre(weights))

    def rmv(self, vector: Tensor) -> Tensor:
        """(n,) -> (r,)."""
        return self.centre(self.rows.rmv(vector))

    def lower_gram(self) -> Tensor:
        """P U^T U P (r, r) with the projection P."""
        gram = self.rows.gram()
        gram = gram - self.means @ (self.means.mT @ gram)
        return gram - (gram @ self.means) @ self.means.mT

    def dense(self) -> Tensor:
        """(n, r)."""
        root = self.rows.dense()
        return root - (root @ self.means) @ self.means.mT

    def squares(self) -> Tensor:
        """Diagonal of U P U^T, shape (n,), without U written out where the rows can do without."""
        left_out = sum(self.rows.mv(mean).square() for mean in self.means.unbind(1))
        return (self.rows.squares() - left_out).clamp(min=0)


class Centred(Operator):
    """C = U U^T - sum_j m_j m_j^T for a second moment U U^T, m_j = U q_j its means.

    With columns g_i / sqrt(N) of U and one q_j of equal entries it is the covariance of the g_i. Rows of several
    outputs have one q_j per output, since each has a mean of its own. Products and solves stay in sample space.

    Args:
        moment: U U^T, a pulled-back metric with a root.
        counted: The q_j up to their lengths, as columns (r, q), orthogonal to one another; one alone as (r,), for
            example 1 where an example counts and 0 where it was ignored.

    Raises:
        ValueError: If `counted` has not one row per column of U, or if the moment has no root.

    Reference:
        Pascanu & Bengio 2013, eq. 12 (TONGA).
    """

    def __init__(self, moment: Pullback, counted: Tensor) -> None:
        if moment.rows is None or moment.rows.rank != len(counted):
            raise ValueError(f"counted has {len(counted)} entries, expected one per column of the moment's root")
        self.moment, self.counted, self.rows = moment, counted, CentredRows(moment.rows, counted)
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

    def diagonal(self) -> Tensor:
        return self.rows.squares()

    def dense(self) -> Tensor:
        root = self.root()
        return root @ root.mT
