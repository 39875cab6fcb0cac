"""Terms whose points lie on several processes: the loss, its linear model and its Gram matrix are those of all points.

Each process keeps the rows of its own points. Vectors are added up. For the Gram matrix the processes send one another
what their rows are made of, layer by layer, or columns of the rows where these are fewer numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.applications.residuals.jets import LayerRows
from natgrad.applications.residuals.stacked_rows import RowsOperator, StackedRows, TermRows, add_products
from natgrad.applications.residuals.system import LinearisedTerms, Points, System, check_points
from natgrad.applications.residuals.term_jacobian import TermJacobian
from natgrad.layered_energies import Affine
from natgrad.linalg import gram
from natgrad.operators import JoinedRows, computes_block
from natgrad.optim import RankExchange
from natgrad.spaces import Params, Space


class JoinedTerms:
    """A `System` over the points of all processes. They all call its methods alike.

    Args:
        system: The terms, with this process's points.
        processes: What exchanges.
    """

    def __init__(self, system: System, processes: RankExchange) -> None:
        self.system, self.processes = system, processes

    @torch.no_grad()
    def linearise(self, params: Params, points: Mapping[str, Any]) -> LinearisedTerms:
        """`System.linearise` over all points; a process may have none of a term.

        Args:
            params: The parameters that are trained, by name.
            points: This process's, by term.
        """
        device = next(iter(params.values())).device
        with self.processes.failing_together(device):
            own = check_points(self.system, points, params, may_lack=True)
            squares = {name: self.system.squares(name, params, own[name]) for name in self.system.point_weights}
        totals = [sum(column) for column in zip(*self._share([len(p[0]) for p in own.values()], device), strict=True)]
        counts = dict(zip(own, map(int, totals), strict=True))
        lacking = [name for name, count in counts.items() if not count]
        if lacking:
            raise ValueError(f"step got no points for {lacking} on any process; give at least one of them a point")
        weights = {name: self._weigh(name, values, own[name][0]) for name, values in squares.items()}
        with self.processes.failing_together(device):
            found = self.system.linearise(params, own, counts, weights)
        rows = found.operator.rows
        assert isinstance(rows, StackedRows)
        sums = [float(found.losses[name]) for name in own]
        losses = [sum(column) for column in zip(*self._share(sums, device), strict=True)]
        joined = JoinedStackedRows.over(rows, self.processes)
        return replace(
            found,
            residuals=joined.place(found.residuals),
            operator=RowsOperator(joined),
            losses={name: rows.space.zeros().new_tensor(value) for name, value in zip(own, losses, strict=True)},
        )

    @torch.no_grad()
    def residuals(self, params: Params, points: Points, now: LinearisedTerms) -> Tensor:
        """`System.residuals` at all points, shape (r,).

        Args:
            params: The parameters that are trained, by name.
            points: This process's, by term.
            now: The linearisation.
        """
        rows = now.operator.rows
        assert isinstance(rows, JoinedStackedRows)
        with self.processes.failing_together(rows.space.device):
            own = check_points(self.system, points, params, may_lack=True)
            found = self.system.residuals(params, own, now)
        return rows.place(found)

    def _share(self, numbers: list[float] | list[int], device: torch.device) -> list[list[float]]:
        return self.processes.share_numbers(numbers, device)

    def _weigh(self, name: str, squares: Tensor, points: Tensor) -> Tensor:
        """The weights of this process's points, which follow the residuals at all of them."""
        everyone = self.processes.gather_rows(torch.cat([squares.unsqueeze(1), points.to(squares)], 1))
        found = self.system.point_weights[name].weigh(everyone[:, 0].contiguous(), everyone[:, 1:].to(points))
        counts = [int(count) for (count,) in self._share([len(squares)], squares.device)]
        return found[sum(counts[: self.processes.rank]) :][: len(squares)]


class JoinedStackedRows:
    """U = [U_0, U_1, ...] with the columns U_i of process i, which keeps them.

    Args:
        local: This process's columns.
        processes: What exchanges.
        counts: Columns of every process.
    """

    def __init__(self, local: StackedRows, processes: RankExchange, counts: list[int]) -> None:
        self.local, self.processes, self.counts = local, processes, counts
        self.space: Space = local.space
        self.starts = [0, *accumulate(counts)]
        self.rank = self.starts[-1]
        # the factors of the rows know the number of all points
        self.joined = JoinedRows(cast("Any", local), self.space, counts, [1.0] * len(counts), processes)

    @staticmethod
    def over(local: StackedRows, processes: RankExchange) -> JoinedStackedRows:
        """The rows of all processes.

        Args:
            local: This process's.
            processes: What exchanges.
        """
        counts = [int(count) for (count,) in processes.share_numbers([local.rank], local.space.device)]
        return JoinedStackedRows(local.settle(sum(counts)), processes, counts)

    def rescale(self, scale: Tensor) -> JoinedStackedRows:
        """diag(scale) U.

        Args:
            scale: Shape (n,).
        """
        return JoinedStackedRows(self.local.rescale(scale), self.processes, self.counts)

    @property
    def is_written(self) -> bool:
        """Whether every process holds its columns as a matrix."""
        return self.local.is_written

    def place(self, own: Tensor) -> Tensor:
        """A vector (r,) from every process's part.

        Args:
            own: This process's.
        """
        return self.processes.gather_rows(own)

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,).

        Args:
            weights: w, shape (r,), the same on all processes.
        """
        return self.joined.mv(weights)

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v, shape (r,).

        Args:
            vector: v, shape (n,), the same on all processes.
        """
        return self.joined.rmv(vector)

    def dense(self) -> Tensor:
        """U written out on every process, (n, r)."""
        return self.joined.dense()

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        return self.joined.squares()

    def moment(self) -> Tensor:
        """U U^T, shape (n, n)."""
        return self.processes.sum(self.local.moment())

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle."""
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.space.device)
        pieces = sum(int(one) for (one,) in self._share([count_pieces(self.local.terms)]))
        if self.is_written and self.space.size * self.rank <= self.processes.size * pieces:
            for slab in self.processes.share_columns(self.local.matrix, self.counts):
                total += gram(slab.mT)
        else:
            for source, count in enumerate(self.counts):
                if count:
                    self._add_blocks(total, source)
        return self.processes.sum(total)

    def _share(self, numbers: list[int]) -> list[list[float]]:
        return self.processes.share_numbers(numbers, self.space.device)

    def _add_blocks(self, total: Tensor, source: int) -> None:
        """Add the block between this process's rows and another's, if it falls to this one."""
        mine = source == self.processes.rank
        tree = self.processes.send_tree(write_pieces(self.local.terms) if mine else None, source, "rows")
        if not (self.local.rank and computes_block(self.processes.rank, source, self.processes.size)):
            return
        other = StackedRows(self.space, read_pieces(tree), self.local.scale)
        rank = self.processes.rank
        here, there = (slice(self.starts[i], self.starts[i + 1]) for i in (rank, source))
        if source <= rank:
            add_gram(self.local, other, total[here, there])
        else:
            add_gram(other, self.local, total[there, here])


def add_gram(left: StackedRows, right: StackedRows, total: Tensor) -> None:
    """total += U_left^T U_right, pair of terms by pair of terms."""
    squares, row = left.find_squares(), 0
    for term in left.terms:
        column = 0
        for other in right.terms:
            add_products(term, other, squares, total[row : row + term.count, column : column + other.count])
            column += other.count
        row += term.count


def count_pieces(terms: list[TermRows]) -> int:
    """The numbers that rows are made of."""
    layers = [one for term in terms for one in term.layers]
    own = sum(one.inputs.numel() + one.deltas.numel() for one in layers)
    return own + sum(rows.numel() for term in terms for rows in term.rows.explicit.values())


def write_pieces(terms: list[TermRows]) -> list[dict[str, Any]]:
    """What rows are made of, as nested dicts and lists of tensors and plain values."""
    return [
        {
            "shape": list(term.rows.factor.shape),
            "layers": [[one.layer.weight, one.layer.bias, one.inputs, one.deltas] for one in term.layers],
            "explicit": dict(term.rows.explicit),
        }
        for term in terms
    ]


def read_pieces(tree: list[dict[str, Any]]) -> list[TermRows]:
    """Rows from what `write_pieces` gave. Their products need no residuals."""
    found: list[TermRows] = []
    for one in tree:
        layers = [LayerRows(Affine(weight, bias), a, d) for weight, bias, a, d in one["layers"]]
        factor = torch.empty(tuple(one["shape"]))
        found.append(TermRows(TermJacobian(factor.mT, factor, layers, one["explicit"])))
    return found
