"""G = sum_i w_i J_i^T M_i J_i: a form on the outputs pulled back to the parameters, matrix-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from natgrad.operators.base import Operator
from natgrad.operators.facts import Facts
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


class Pullback(Operator):
    """J^T M J, averaged over rows: the shape of every metric in this library.

    Args:
        linearization: The outputs (R, m) near a point, with J.
        form: M.
        weights: Of the rows, shape (R,), with sum one for a mean. Default: 1 / R each.
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
        if weights.shape != (count,):
            raise ValueError(f"weights has shape {tuple(weights.shape)}, expected ({count},), one per row of outputs")
        self.weights = weights.to(self.outputs.dtype)
        space = linearization.space
        self.size, self.dtype, self.device = space.size, space.dtype, space.device

    def mv(self, vector: Tensor) -> Tensor:
        tangents = self.form.mv(self.outputs, self.linearization.jvp(vector))
        return self.linearization.vjp(self.weights.unsqueeze(1) * tangents)

    @property
    def rank(self) -> int | None:
        """Columns r of the root U, without computing it; None if the form has no root."""
        one = self.form.root(self.outputs[:1])
        return None if one is None else len(self.outputs) * one.shape[2]

    @property
    def sample_rank(self) -> int | None:
        return self.rank

    @property
    def sample_rows(self) -> Rows | None:
        return self.rows

    def output_root(self) -> Tensor | None:
        """F (R, m, q) with w_i M_i = F_i F_i^T, or None."""
        root = self.form.root(self.outputs)
        return None if root is None else root * self.weights.sqrt().view(-1, 1, 1)

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
        """Whether U U^T, summed over the examples, costs less than n products with G.

        In gradients: one per column of an example's root, and n / 40 for each column's outer products (2 n^2 operations
        per example, which run 13 times as fast as a gradient's 6 n; measured); 5/4 for each product.
        """
        n, rank, columns = self.size, rows.rank, rows.columns
        if rank > 4 * n and (columns * (1 + n / 40) > 1.25 * n or rank * n > self.LARGEST):
            return False
        return rank <= n or rows.separable


def random_signs(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same `count` vectors of random signs (count, size) every time."""
    generator = torch.Generator(device).manual_seed(0)
    bits = torch.randint(0, 2, (count, size), generator=generator, device=device)
    return (2 * bits - 1).to(dtype)


class Chunked(Operator):
    """A sum of operators that are rebuilt for every product, so that only one graph is in memory at a time.

    A product costs a forward pass more than with a kept graph, and the memory of all graphs but one is saved.

    Args:
        builders: Each returns its term of the sum. At least one.
    """

    def __init__(self, builders: Sequence[Callable[[], Operator]]) -> None:
        self.builders = tuple(builders)
        first = self.builders[0]()
        self.size, self.dtype, self.device = first.size, first.dtype, first.device
        self.facts = first.facts

    def mv(self, vector: Tensor) -> Tensor:
        return self._sum(lambda term: term.mv(vector))

    def mm(self, block: Tensor) -> Tensor:
        return self._sum(lambda term: term.mm(block))  # one graph serves all columns of its chunk

    def root(self) -> Tensor | None:
        roots = [build().root() for build in self.builders]
        known = [root for root in roots if root is not None]
        return torch.cat(known, dim=1) if len(known) == len(roots) else None

    def diagonal(self) -> Tensor:
        return self._sum(lambda term: term.diagonal())

    def mean_eigenvalue(self) -> Tensor:
        return self._sum(lambda term: term.mean_eigenvalue())

    def dense(self) -> Tensor:
        return self._sum(lambda term: term.dense())

    def _sum(self, part: Callable[[Operator], Tensor]) -> Tensor:
        total = part(self.builders[0]())
        for build in self.builders[1:]:
            total = total + part(build())
        return total
