"""The rows of all terms together: U (n, r) of G = U U^T, layer by layer or written out.

For a layer z_t = W a_t the row of residual j at point x is sum_t delta_jtx a_tx^T, so that the layer's part of the
Gram matrix is sum_ts (A_t A_s^T) o (D_t D_s^T): the Jacobian need not be in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import Any, ClassVar, cast

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
        for rows in self.layers:
            add_block(space, out, rows.layer.weight, outer_rows(rows))
            add_block(space, out, rows.layer.bias, rows.deltas[:, 0])
        for name, rows in self.explicit.items():
            add_block(space, out, name, rows)

    def add_squares(self, space: Space, total: Tensor) -> None:
        """The sums over the rows of the squares of their entries, added to `total` (n,)."""
        for rows in self.layers:
            add_block(space, total, rows.layer.weight, sum_of_outer_squares(rows))
            add_block(space, total, rows.layer.bias, rows.deltas[:, 0].square().sum((0, 1)))
        for name, rows in self.explicit.items():
            add_block(space, total, name, rows.square().sum((0, 1)))

    def add_combination(self, space: Space, weights: Tensor, total: Tensor) -> None:
        """The sum over the rows of w (m b,) times the row, added to `total` (n,)."""
        each = weights.view(self.factor.shape)
        for rows in self.layers:
            weighted = (rows.deltas * each[:, None, :, None]).sum(0)  # (T, b, o)
            add_block(space, total, rows.layer.weight, weighted.flatten(0, 1).mT @ rows.inputs.flatten(0, 1))
            add_block(space, total, rows.layer.bias, weighted[0].sum(0))
        for name, rows in self.explicit.items():
            add_block(space, total, name, torch.einsum("kb,kbn->n", each, rows))

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
        parts = [(rows.deltas, (0, 1, 3)) for rows in self.layers] + [(rows.inputs, (0, 2)) for rows in self.layers]
        parts += [(rows, (0, 2)) for rows in self.explicit.values()]
        broken = sum(~part.isfinite().all(dim) for part, dim in parts)  # how often, (b,)
        places = broken.nonzero().tolist() if isinstance(broken, Tensor) else []
        return places[0][0] if places else None


def add_block(space: Space, vectors: Tensor, name: str | None, part: Tensor) -> None:
    """Add to a parameter's entries of vectors (..., n), where it is trained."""
    if name in space.blocks:
        block = space.blocks[name]
        vectors[..., block.start : block.stop].add_(part.reshape(*vectors.shape[:-1], -1))


def outer_rows(rows: LayerRows) -> Tensor:
    """sum_t delta_jtx a_tx^T for every residual, (k, b, o, i)."""
    times, o, i = len(rows.inputs), rows.deltas.shape[3], rows.inputs.shape[2]
    if min(o, i) >= NARROW and times > 1:
        return rows.deltas.permute(0, 2, 3, 1) @ rows.inputs.transpose(0, 1)
    total = rows.deltas[:, 0].unsqueeze(-1) * rows.inputs[0].unsqueeze(-2)
    for t in range(1, times):
        total.addcmul_(rows.deltas[:, t].unsqueeze(-1), rows.inputs[t].unsqueeze(-2))
    return total


class StackedRows(SampleRows):
    """diag(scale) U (n, r): one column per residual, term after term, in each component by component.

    Where U is not written out, `scale` (n,) is the same for all entries of a parameter. `columns`: how many those of
    all processes are.
    """

    # numbers of U up to which it is written out: then every product is one of matrices
    WRITTEN: ClassVar[int] = 2**22

    def __init__(
        self, space: Space, terms: Sequence[TermRows], scale: Tensor | None = None, columns: int | None = None
    ) -> None:
        self.space, self.terms, self.scale = space, list(terms), scale
        self.rank = sum(term.count for term in self.terms)
        self.columns = self.rank if columns is None else columns

    def rescale(self, scale: Tensor) -> StackedRows:
        """diag(scale) U, scale (n,)."""
        scaled = StackedRows(self.space, self.terms, scale, self.columns)
        if self.is_written:
            scaled.matrix = self.matrix * scale
        return scaled

    @property
    def is_written(self) -> bool:
        """Whether U is held as a matrix, on each process its columns."""
        return self.columns * self.space.size <= self.WRITTEN

    @cached_property
    def matrix(self) -> Tensor:
        """U^T written out, shape (r, n)."""
        out = torch.zeros(self.rank, self.space.size, dtype=self.space.dtype, device=self.space.device)
        for term, part in zip(self.terms, out.split([term.count for term in self.terms]), strict=True):
            term.write(self.space, part)
        return out if self.scale is None else out.mul_(self.scale)

    def mv(self, weights: Tensor) -> Tensor:
        if self.is_written:
            return self.matrix.mT @ weights
        total = self.space.zeros()
        for term, part in zip(self.terms, weights.split([term.count for term in self.terms]), strict=True):
            term.add_combination(self.space, part, total)
        return total if self.scale is None else total * self.scale

    def rmv(self, vector: Tensor) -> Tensor:
        if self.is_written:
            return self.matrix @ vector
        tangents = self.space.unflatten(vector if self.scale is None else vector * self.scale)
        return torch.cat([term.along(tangents) for term in self.terms])

    def dense(self) -> Tensor:
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
        """U U^T, shape (n, n)."""
        if self.is_written:
            return gram(self.matrix)
        total = torch.zeros(self.space.size, self.space.size, dtype=self.space.dtype, device=self.space.device)
        for term in self.terms:  # U is too large to be written out
            part = StackedRows(self.space, [term], self.scale).matrix
            total.addmm_(part.mT, part)
        return total

    def lower_gram(self) -> Tensor:
        if self.is_written:
            return gram(self.matrix.mT)
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.space.device)
        add_gram(self, self, total)
        return total


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


class JoinedStackedRows(SampleRows):
    """U = [U_0, U_1, ...] with the columns U_i of process i, which keeps them."""

    def __init__(self, local: StackedRows, processes: Processes, counts: list[int] | None = None) -> None:
        counts = share_count(processes, local.rank, local.space.device) if counts is None else counts
        self.local = StackedRows(local.space, local.terms, local.scale, sum(counts))
        self.processes, self.counts, self.space = processes, counts, local.space
        self.rank = sum(counts)
        # the factors of the rows know the number of all points
        self.joined = JoinedRows(cast("Any", self.local), self.space, counts, [1.0] * len(counts), processes)

    def rescale(self, scale: Tensor) -> JoinedStackedRows:
        return JoinedStackedRows(self.local.rescale(scale), self.processes, self.counts)

    @property
    def is_written(self) -> bool:
        return self.local.is_written

    def mv(self, weights: Tensor) -> Tensor:
        return self.joined.mv(weights)

    def rmv(self, vector: Tensor) -> Tensor:
        return self.joined.rmv(vector)

    def dense(self) -> Tensor:
        return self.joined.dense()

    def squares(self) -> Tensor:
        return self.joined.squares()

    def moment(self) -> Tensor:
        return self.processes.sum(self.local.moment())

    def lower_gram(self) -> Tensor:
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.space.device)
        tensors = (part for term in self.local.terms for rows in term.layers for part in (rows.inputs, rows.deltas))
        explicit = (rows for term in self.local.terms for rows in term.explicit.values())
        own = sum(part.numel() for part in chain(tensors, explicit))
        pieces = sum(share_count(self.processes, own, self.space.device))  # numbers that rows are made of
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
        rank, starts = self.processes.rank, self.joined.starts
        tree = self.processes.send_tree(write_pieces(self.local.terms) if source == rank else None, source, "rows")
        if not (self.local.rank and computes_block(rank, source, self.processes.size)):
            return
        other = StackedRows(self.space, read_pieces(tree), self.local.scale)
        here, there = (slice(starts[i], starts[i + 1]) for i in (rank, source))
        if source <= rank:
            add_gram(self.local, other, total[here, there])
        else:
            add_gram(other, self.local, total[there, here])


def add_gram(left: StackedRows, right: StackedRows, total: Tensor) -> None:
    """total += U_left^T U_right, pair of terms by pair of terms; of rows with themselves, the lower triangle."""
    scale, row = left.scale, 0
    # of each parameter: where U is not written out its entries have one factor
    squares = {n: 1.0 if scale is None else float(scale[b.start]) ** 2 for n, b in left.space.blocks.items()}
    for term in left.terms:
        column = 0
        for other in right.terms:
            if left is not right or column <= row:
                add_products(term, other, squares, total[row : row + term.count, column : column + other.count])
            column += other.count
        row += term.count


def write_pieces(terms: list[TermRows]) -> list[dict[str, Any]]:
    """What rows are made of, as nested dicts and lists of tensors and plain values."""
    return [
        {
            "shape": list(term.factor.shape),
            "layers": [[rows.layer.weight, rows.layer.bias, rows.inputs, rows.deltas] for rows in term.layers],
            "explicit": dict(term.explicit),
        }
        for term in terms
    ]


def read_pieces(tree: list[dict[str, Any]]) -> list[TermRows]:
    """Rows from what `write_pieces` gave. Their products need no residuals."""
    terms = list[TermRows]()
    for part in tree:
        factor = torch.empty(tuple(part["shape"]))
        layers = [LayerRows(Affine(weight, bias), a, d) for weight, bias, a, d in part["layers"]]
        terms.append(TermRows(factor.mT, factor, layers, part["explicit"]))
    return terms


class RowsOperator(Operator):
    """G = U U^T from rows that are known by their products."""

    def __init__(self, rows: StackedRows | JoinedStackedRows) -> None:
        self.rows, space = rows, rows.space
        self.size, self.dtype, self.device = space.size, space.dtype, space.device

    @property
    def sample_rows(self) -> StackedRows | JoinedStackedRows:
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
