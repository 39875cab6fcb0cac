"""G = sum_i w_i J_i^T M_i J_i: a form on the outputs pulled back to the parameters, matrix-free."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from natgrad.ground.linalg import as_columns
from natgrad.ground.pure import compute_exactly
from natgrad.ground.typed_torch import measure_norm
from natgrad.operators.base import Facts, Operator, SampleRows
from natgrad.operators.linearization import Linearization
from natgrad.operators.rows import Rows


class Form(Protocol):
    """A symmetric positive semi-definite form M on every row of the outputs (R, m)."""

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """M v for every row, shape (R, m).

        Args:
            outputs: The outputs at which M is taken, shape (R, m).
            tangents: v, shape (R, m).
        """
        ...

    def root(self, outputs: Tensor) -> Tensor | None:
        """F (R, m, q) with M = F F^T for every row, or None where no factor is known.

        Args:
            outputs: The outputs at which M is taken, shape (R, m).
        """
        ...


@compute_exactly
class Pullback(Operator):
    """J^T M J, averaged over rows: the shape of every metric in this library.

    Args:
        linearization: The outputs (R, m) near a point, with J.
        form: M.
        weights: Of the rows, shape (R,), with sum one for a mean. Default: 1 / R each. Or (R, 1), or (R, m) of their
            entries, equal where M couples these: M counts as w^1/2 M w^1/2.
        facts: What else is known of the operator, such as its unit.

    Raises:
        ValueError: If `weights` has not one entry per row.
    """

    # exact traces up to this many backward passes; beyond, an unbiased estimate serves relative damping
    EXACT_TRACE_COLUMNS = 16
    PROBES = 4
    # numbers of U in memory while G is written out
    LARGEST = 2**27

    def __init__(
        self, linearization: Linearization, form: Form, weights: Tensor | None = None, facts: Facts | None = None
    ) -> None:
        self.linearization, self.form = linearization, form
        self.facts = Facts() if facts is None else facts
        self.outputs = linearization.outputs
        count = len(self.outputs)
        if weights is None:
            weights = torch.full((count,), 1 / count, dtype=self.outputs.dtype, device=self.outputs.device)
        if weights.shape not in ((count,), (count, 1), self.outputs.shape):
            raise ValueError(f"weights has shape {tuple(weights.shape)}, expected ({count},), one per row of outputs")
        self.weights = weights.to(self.outputs.dtype)
        self.scales = as_columns(self.weights.sqrt())
        space = linearization.space
        self.size, self.dtype, self.device = space.size, space.dtype, space.device

    def mv(self, vector: Tensor) -> Tensor:
        tangents = self.form.mv(self.outputs, self.scales * self.linearization.jvp(vector))
        return self.linearization.vjp(self.scales * tangents)

    @property
    def rank(self) -> int | None:
        """Columns r of the root U, without computing it; None if the form has no root."""
        root = self.form.root(self.outputs[:1])
        return None if root is None else len(self.outputs) * root.shape[2]

    @property
    def sample_rank(self) -> int | None:
        return self.rank

    @property
    def sample_rows(self) -> Rows | None:
        return self.rows

    def output_root(self) -> Tensor | None:
        """F (R, m, q) with w_i M_i = F_i F_i^T, or None."""
        root = self.form.root(self.outputs)
        return None if root is None else root * self.scales.unsqueeze(2)

    @cached_property
    def rows(self) -> Rows | None:
        """The columns of U, one per row of outputs and column of the form's root; None if the form has no root."""
        root = self.output_root()
        return None if root is None else Rows(self.linearization, root)

    def root(self) -> Tensor | None:
        return None if self.rows is None else self.rows.dense()

    def diagonal(self) -> Tensor:
        return super().diagonal() if self.rows is None else self.rows.squares()

    def mean_eigenvalue(self) -> Tensor:
        batch = self.linearization.examples
        if self.rank is not None and self.rank // batch <= self.EXACT_TRACE_COLUMNS:
            return self.trace() / self.size
        probes = random_signs(self.PROBES, self.size, self.dtype, self.device)
        return torch.stack([probe @ self.mv(probe) for probe in probes]).mean() / self.size  # E s^T G s = tr G

    def dense(self) -> Tensor:
        return self.rows.moment() if self.rows is not None and self._rows_pay(self.rows) else super().dense()

    def _rows_pay(self, rows: Rows) -> bool:
        """Whether U U^T, summed over the examples, costs less than n products with G."""
        # in gradients: one per column of an example's root and n / 40 for its outer products (2 n^2 operations, 13
        # times as fast as a gradient's 6 n; measured), 5/4 for each product with G
        n, rank, columns = self.size, rows.rank, rows.columns
        if rank > 4 * n and (columns * (1 + n / 40) > 1.25 * n or rank * n > self.LARGEST):
            return False
        return rank <= n or rows.separable


def random_signs(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same `count` vectors of random signs (count, size) every time."""
    generator = torch.Generator(device).manual_seed(0)
    bits = torch.randint(0, 2, (count, size), generator=generator, device=device)
    return (2 * bits - 1).to(dtype)


# The covariance of the columns of a root: second moments about the mean, in sample space


class CentredRows(SampleRows):
    """U (I - Q Q^T), U (n, r), with Q^T Q = I: orthogonal columns (r, q) or (r,), given up to their lengths."""

    def __init__(self, rows: Rows, counted: Tensor) -> None:
        columns = counted.reshape(len(counted), -1)
        self.rows, self.rank = rows, rows.rank
        self.means = columns / measure_norm(columns, dim=0)

    def centre(self, weights: Tensor) -> Tensor:
        """w - Q Q^T w, shape (r,): the projection, which is its own transpose."""
        return weights - self.means @ (self.means.mT @ weights)

    def mv(self, weights: Tensor) -> Tensor:
        return self.rows.mv(self.centre(weights))

    def rmv(self, vector: Tensor) -> Tensor:
        return self.centre(self.rows.rmv(vector))

    def lower_gram(self) -> Tensor:
        gram = self.rows.gram()
        gram = gram - self.means @ (self.means.mT @ gram)
        return gram - (gram @ self.means) @ self.means.mT

    def dense(self) -> Tensor:
        root = self.rows.dense()
        return root - (root @ self.means) @ self.means.mT

    def squares(self) -> Tensor:
        """Diagonal of U P U^T, shape (n,), without U written out where the rows can do without."""
        left_out = sum(self.rows.mv(mean).square() for mean in self.means.unbind(1))
        return (self.rows.squares() - left_out).clamp(min=0)


@compute_exactly
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
