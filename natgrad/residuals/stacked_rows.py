"""The rows of all terms together: U (n, r) of G = U U^T, layer by layer or written out.

For a layer z_t = W a_t the row of residual j at point x is sum_t delta_jtx a_tx^T, so that the layer's part of the
Gram matrix is sum_ts (A_t A_s^T) o (D_t D_s^T): the Jacobian need not be in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from natgrad.ground.chains import Affine, LayerRows
from natgrad.ground.exchanges import share_count
from natgrad.ground.linalg import gram
from natgrad.ground.spaces import Space
from natgrad.operators import JoinedRows, Operator, SampleRows, computes_block
from natgrad.optim import Processes

CACHED = 2**17
"""Numbers that a processor's cache holds: a sum over more of them is taken in parts of this size."""
NARROW = 8
"""Sides of a matrix below which many small products cost more than a few elementwise ones."""


@dataclass(frozen=True, eq=False)
class TermRows:
    """Residuals of a term with the rows of their Jacobian in the parameters, each times its factor."""

    values: Tensor  # (b, m), without the factors
    factor: Tensor  # of each row, (m, b): the root of twice its weight
    layers: list[LayerRows] = field(default_factory=list)  # of affine layers: row (j, x), component first
    explicit: dict[str, Tensor] = field(default_factory=dict)  # rows (m, b, size) of other parameters, by name

    @property
    def count(self) -> int:
        """Number of rows, m b."""
        return self.factor.numel()

    def write(self, space: Space, out: Tensor) -> None:
        """The rows as a matrix, added to `out` (m b, n)."""
        for layer_rows in self.layers:
            weight, bias = layer_rows.layer.weight, layer_rows.layer.bias
            if weight in space.blocks:
                view_block(space, out, weight).add_(outer_rows(layer_rows).reshape(self.count, -1))
            if bias in space.blocks:
                view_block(space, out, bias).add_(layer_rows.deltas[:, 0].reshape(self.count, -1))
        for name, rows in self.explicit.items():
            view_block(space, out, name).add_(rows.reshape(self.count, -1))

    def add_squares(self, space: Space, total: Tensor) -> None:
        """The sums over the rows of the squares of their entries, added to `total` (n,)."""
        for layer_rows in self.layers:
            weight, bias = layer_rows.layer.weight, layer_rows.layer.bias
            if weight in space.blocks:
                view_block(space, total, weight).add_(sum_of_outer_squares(layer_rows).reshape(-1))
            if bias in space.blocks:
                view_block(space, total, bias).add_(layer_rows.deltas[:, 0].square().sum((0, 1)))
        for name, rows in self.explicit.items():
            view_block(space, total, name).add_(rows.square().sum((0, 1)))

    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        """sum over rows of w times the row, by name."""
        sums: dict[str, Tensor] = {}

        def add(name: str, part: Tensor) -> None:
            sums[name] = sums[name] + part if name in sums else part

        each = weights.view(self.factor.shape)
        for layer_rows in self.layers:
            weighted = (layer_rows.deltas * each[:, None, :, None]).sum(0)  # (T, b, o)
            add(layer_rows.layer.weight, weighted.flatten(0, 1).mT @ layer_rows.inputs.flatten(0, 1))
            if layer_rows.layer.bias is not None:
                add(layer_rows.layer.bias, weighted[0].sum(0))
        for name, rows in self.explicit.items():
            add(name, torch.einsum("kb,kbn->n", each, rows))
        return sums

    def along(self, tangents: dict[str, Tensor]) -> Tensor:
        """Every row's inner product with a tangent, shape (m b,)."""
        total = torch.zeros_like(self.factor)
        for layer_rows in self.layers:
            if layer_rows.layer.weight in tangents:
                image = layer_rows.inputs @ tangents[layer_rows.layer.weight].mT  # (T, b, o)
                total += (layer_rows.deltas * image).sum((1, 3))
            if layer_rows.layer.bias in tangents:
                total += layer_rows.deltas[:, 0] @ tangents[layer_rows.layer.bias]
        for name, rows in self.explicit.items():
            total += rows @ tangents[name].reshape(-1)
        return total.reshape(-1)

    def find_broken_point(self) -> int | None:
        """The first point whose rows are not finite; None where all are."""
        bad = [~layer_rows.deltas.isfinite().all(3).all(1).all(0) for layer_rows in self.layers]
        bad += [~layer_rows.inputs.isfinite().all(2).all(0) for layer_rows in self.layers]
        bad += [~rows.isfinite().all(2).all(0) for rows in self.explicit.values()]
        if not bad or not bool((places := torch.stack(bad).any(0)).any()):
            return None
        return int(places.nonzero()[0])


def view_block(space: Space, matrix: Tensor, name: str) -> Tensor:
    """A parameter's entries of vectors (..., n)."""
    block = space.blocks[name]
    return matrix[..., block.start : block.stop]


def outer_rows(rows: LayerRows) -> Tensor:
    """sum_t delta_jtx a_tx^T for every residual, (k, b, o, i)."""
    times, o, i = len(rows.inputs), rows.deltas.shape[3], rows.inputs.shape[2]
    if min(o, i) >= NARROW and times > 1:
        return rows.deltas.permute(0, 2, 3, 1) @ rows.inputs.transpose(0, 1)
    total = rows.deltas[:, 0].unsqueeze(-1) * rows.inputs[0].unsqueeze(-2)
    for t in range(1, times):
        total.addcmul_(rows.deltas[:, t].unsqueeze(-1), rows.inputs[t].unsqueeze(-2))
    return total


class ScalableRows(SampleRows, Protocol):
    """U of named residuals, on one process or on several."""

    space: Space

    @property
    def is_written(self) -> bool:
        """Whether U is held as a matrix."""
        ...

    def rescale(self, scale: Tensor) -> ScalableRows:
        """diag(scale) U. scale: (n,)."""
        ...

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        ...

    def moment(self) -> Tensor:
        """U U^T, shape (n, n)."""
        ...


class StackedRows(ScalableRows):
    """diag(scale) U (n, r): one column per residual, term after term, in each component by component.

    scale: Of the parameters' entries, (n,); the same for all entries of a parameter where U is not written out.
    columns: Of the U that these columns are a part of; None: these are all.
    """

    # numbers of U up to which it is written out: then every product is one of matrices
    WRITTEN: ClassVar[int] = 2**22

    def __init__(
        self, space: Space, terms: Sequence[TermRows], scale: Tensor | None = None, columns: int | None = None
    ) -> None:
        self.space, self.terms, self.scale = space, list(terms), scale
        self.rank = sum(term.count for term in self.terms)
        self.columns = self.rank if columns is None else columns

    def settle(self, columns: int) -> StackedRows:
        """The same rows, as a part of a larger U."""
        return StackedRows(self.space, self.terms, self.scale, columns)

    def rescale(self, scale: Tensor) -> StackedRows:
        """diag(scale) U. scale: (n,)."""
        scaled = StackedRows(self.space, self.terms, scale, self.columns)
        if self.is_written:
            scaled.matrix = self.matrix * scale
        return scaled

    @property
    def is_written(self) -> bool:
        """Whether U is held as a matrix."""
        return self.columns * self.space.size <= self.WRITTEN

    @cached_property
    def matrix(self) -> Tensor:
        """U^T written out, shape (r, n)."""
        out = torch.zeros(self.rank, self.space.size, dtype=self.space.dtype, device=self.space.device)
        for term, part in zip(self.terms, out.split([term.count for term in self.terms]), strict=True):
            term.write(self.space, part)
        return out if self.scale is None else out.mul_(self.scale)

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,). weights: w, (r,)."""
        if self.is_written:
            return self.matrix.mT @ weights
        total = self.space.zeros()
        for term, part in zip(self.terms, weights.split([term.count for term in self.terms]), strict=True):
            known = {name: t for name, t in term.combine(part).items() if name in self.space.blocks}
            total += self.space.flatten({n: t.view(self.space.blocks[n].shape) for n, t in known.items()})
        return total if self.scale is None else total * self.scale

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v, shape (r,). vector: v, (n,)."""
        if self.is_written:
            return self.matrix @ vector
        tangents = self.space.unflatten(vector if self.scale is None else vector * self.scale)
        return torch.cat([term.along(tangents) for term in self.terms])

    def dense(self) -> Tensor:
        """U written out, (n, r)."""
        return self.matrix.mT

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        if self.is_written:
            parts = self.matrix.split(max(1, CACHED // self.space.size))
            return torch.stack([part.square().sum(0) for part in parts]).sum(0)
        total = self.space.zeros()
        for term in self.terms:
            term.add_squares(self.space, total)
        return total if self.scale is None else total * self.scale.square()

    def moment(self) -> Tensor:
        """U U^T, shape (n, n): term by term where U is too large to be written out."""
        if self.is_written:
            return gram(self.matrix)
        total = torch.zeros(self.space.size, self.space.size, dtype=self.space.dtype, device=self.space.device)
        for term in self.terms:
            part = self._write(term)
            total.addmm_(part.mT, part)
        return total

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle."""
        if self.is_written:
            return gram(self.matrix.mT)
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.space.device)
        squares = self.find_squares()
        starts = list(accumulate((term.count for term in self.terms), initial=0))
        for i, term in enumerate(self.terms):
            for j, earlier in enumerate(self.terms[: i + 1]):
                corner = total[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]
                add_products(term, earlier, squares, corner)
        return total

    def find_squares(self) -> dict[str, float]:
        """The squared factor of each parameter, where it is one for all of its entries."""
        if self.scale is None:
            return dict.fromkeys(self.space, 1.0)
        return {name: float(self.scale[block.start]) ** 2 for name, block in self.space.blocks.items()}

    def _write(self, term: TermRows) -> Tensor:
        out = torch.zeros(term.count, self.space.size, dtype=self.space.dtype, device=self.space.device)
        term.write(self.space, out)
        return out if self.scale is None else out * self.scale


def sum_of_outer_squares(rows: LayerRows) -> Tensor:
    """sum over the rows of a weight of the squares of their entries, (o, i): some points at a time."""
    size = max(1, 2**22 // (rows.deltas.shape[0] * rows.deltas.shape[3] * rows.inputs.shape[2]))
    parts = zip(rows.inputs.split(size, 1), rows.deltas.split(size, 2), strict=True)
    return torch.stack([outer_rows(LayerRows(rows.layer, a, d)).square().sum((0, 1)) for a, d in parts]).sum(0)


def add_products(left: TermRows, right: TermRows, squares: dict[str, float], total: Tensor) -> None:
    """total += (rows of one term) (rows of the other)^T, layer by layer, (m b, m' b')."""
    known: dict[str, list[LayerRows]] = {}
    for layer_rows in right.layers:
        known.setdefault(layer_rows.layer.weight, []).append(layer_rows)
    for layer_rows in left.layers:
        for other in known.get(layer_rows.layer.weight, ()):
            add_layer_products(layer_rows, other, squares, total)
    for name, rows in left.explicit.items():
        if name in right.explicit:
            total.addmm_(rows.flatten(0, 1), right.explicit[name].flatten(0, 1).mT, alpha=squares[name])


def add_layer_products(rows: LayerRows, other: LayerRows, squares: dict[str, float], total: Tensor) -> None:
    """total += sum_ts (A_t A_s^T) o (D_t D_s^T), or by the rows written out where that costs less."""
    k, times, b, o = rows.deltas.shape
    m, others, c, _ = other.deltas.shape
    i, weight, bias = rows.inputs.shape[2], rows.layer.weight, rows.layer.bias
    if weight in squares and o * i <= 2 * times * others * (i + o):
        left, right = outer_rows(rows).reshape(k * b, o * i), outer_rows(other).reshape(m * c, o * i)
        total.addmm_(left, right.mT, alpha=squares[weight])
    elif weight in squares:
        for t, s in product(range(times), range(others)):
            like = (squares[weight] * rows.inputs[t]) @ other.inputs[s].mT
            pairs = rows.deltas[:, t].reshape(k * b, o) @ other.deltas[:, s].reshape(m * c, o).mT
            add_tiled_product(total, pairs, like)
    if bias in squares:
        left, right = rows.deltas[:, 0].reshape(k * b, o), other.deltas[:, 0].reshape(m * c, o)
        total.addmm_(left, right.mT, alpha=squares[bias])


def add_tiled_product(total: Tensor, pairs: Tensor, like: Tensor) -> None:
    """total += pairs * like for (k b, l c), like (b, c) repeated for every pair of components."""
    b, c = like.shape
    for row in range(0, len(total), b):
        for column in range(0, total.shape[1], c):
            corner = slice(row, row + b), slice(column, column + c)
            total[corner].addcmul_(pairs[corner], like)


# Points that lie on several processes: the Gram matrix is that of all of them


class JoinedStackedRows(ScalableRows):
    """U = [U_0, U_1, ...] with the columns U_i of process i, which keeps them."""

    def __init__(self, local: StackedRows, processes: Processes, counts: list[int]) -> None:
        self.local, self.processes, self.counts = local, processes, counts
        self.space: Space = local.space
        self.starts = [0, *accumulate(counts)]
        self.rank = self.starts[-1]
        # the factors of the rows know the number of all points
        self.joined = JoinedRows(cast("Any", local), self.space, counts, [1.0] * len(counts), processes)

    @staticmethod
    def over(local: StackedRows, processes: Processes) -> JoinedStackedRows:
        """The rows of all processes."""
        counts = share_count(processes, local.rank, local.space.device)
        return JoinedStackedRows(local.settle(sum(counts)), processes, counts)

    def rescale(self, scale: Tensor) -> JoinedStackedRows:
        """diag(scale) U.

        scale: (n,).
        """
        return JoinedStackedRows(self.local.rescale(scale), self.processes, self.counts)

    @property
    def is_written(self) -> bool:
        """Whether every process holds its columns as a matrix."""
        return self.local.is_written

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,).

        weights: w, (r,), the same on all processes.
        """
        return self.joined.mv(weights)

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v, shape (r,).

        vector: v, (n,), the same on all processes.
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
        pieces = sum(share_count(self.processes, count_pieces(self.local.terms), self.space.device))
        if self.is_written and self.space.size * self.rank <= self.processes.size * pieces:
            for slab in self.processes.share_columns(self.local.matrix, self.counts):
                total += gram(slab.mT)
        else:
            for source, count in enumerate(self.counts):
                if count:
                    self._add_blocks(total, source)
        return self.processes.sum(total)

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
    return own + sum(rows.numel() for term in terms for rows in term.explicit.values())


def write_pieces(terms: list[TermRows]) -> list[dict[str, Any]]:
    """What rows are made of, as nested dicts and lists of tensors and plain values."""
    return [
        {
            "shape": list(term.factor.shape),
            "layers": [[one.layer.weight, one.layer.bias, one.inputs, one.deltas] for one in term.layers],
            "explicit": dict(term.explicit),
        }
        for term in terms
    ]


def read_pieces(tree: list[dict[str, Any]]) -> list[TermRows]:
    """Rows from what `write_pieces` gave. Their products need no residuals."""
    found: list[TermRows] = []
    for one in tree:
        layers = [LayerRows(Affine(weight, bias), a, d) for weight, bias, a, d in one["layers"]]
        factor = torch.empty(tuple(one["shape"]))
        found.append(TermRows(factor.mT, factor, layers, one["explicit"]))
    return found


class RowsOperator(Operator):
    """G = U U^T from rows that are known by their products."""

    def __init__(self, rows: ScalableRows) -> None:
        self.rows, space = rows, rows.space
        self.size, self.dtype, self.device = space.size, space.dtype, space.device

    @property
    def sample_rows(self) -> ScalableRows:
        return self.rows

    @property
    def sample_rank(self) -> int:
        return self.rows.rank

    def mv(self, vector: Tensor) -> Tensor:
        return self.rows.mv(self.rows.rmv(vector))

    def root(self) -> Tensor:
        return self.rows.dense()

    def diagonal(self) -> Tensor:
        return self.rows.squares()

    def dense(self) -> Tensor:
        return self.rows.moment()
