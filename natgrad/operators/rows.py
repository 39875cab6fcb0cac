"""The columns of U in G = U U^T, one per row of outputs, and their Gram matrix without the Jacobian.

For a linear layer y = W a + b the gradient of one row is the outer product of what went in and of what came back,
so the Gram matrix of all rows is (A A^T + 1) o (D D^T), summed over layers: no Jacobian is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, product
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from natgrad.ground.exchanges import SumExchange
from natgrad.ground.messages import write_choices
from natgrad.ground.pure import INSTEAD, Ancestors, Call, PureModel, mixes_examples
from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import measure_norm, split_tensor
from natgrad.layers import Seen, hear_rows, record_pass
from natgrad.operators.base import SampleRows
from natgrad.operators.linearization import Linearization, OutputMap, PlainKernels, say_once

ONE_BY_ONE = (
    "natgrad: the metric's root takes one backward pass per output, since the outputs of one example cannot be told "
    "from those of the others. Row i of a function f(params, x) should depend on x[i] alone: give each set of points a "
    "metric of its own and add them, ng.fisher(inside, ...).at(params, x) + ng.fisher(edge, ...).at(params, y); put "
    "batch norms and dropout in evaluation mode; or solve by products alone, with ng.CG()"
)
THROUGH_ITS_OWN = (
    "natgrad: the metric's root takes one backward pass per output, since the model computes its outputs through "
    "{names}, autograd.Functions of its own, and torch.func cannot take the examples in there apart: "
    + INSTEAD
    + ", or a function with setup_context and generate_vmap_rule = True, which torch.func knows"
)
BLOCK = 256  # rows of a Gram matrix at a time
ALL = slice(None)
Each = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]


class Rows(SampleRows):
    """U (n, r) = J^T F, r = R q, for a factor F of the form on the outputs.

    Columns are ordered by row of outputs, then by column of F. There are these ways to the same numbers, fastest first:
    layer by layer from taps (and per-example gradients for parameters that taps do not know), per-example functional
    gradients for everything, all at once or one after the other, of examples along the inputs' first dimension or (in
    sequence-first models) the second; and one backward pass per column. All but the last assume that a row of outputs
    depends on its own example alone. A random combination U w is compared with a plain backward pass, and the next way
    is taken where they disagree (dropout, parameters that the model also uses outside of their layer).

    Args:
        linearization: The outputs (R, m) near a point, with J.
        factor: F, shape (R, m, q).
    """

    # one backward pass per column is said to be slow from this many columns
    MANY = 64
    # columns of one batched backward pass: a quarter to three quarters of the time of as many passes
    AT_ONCE = 32
    # numbers of U that are written out at a time
    CHUNK = 2**22

    def __init__(self, linearization: Linearization, factor: Tensor) -> None:
        self.linearization, self.factor, self.space = linearization, factor, linearization.space
        self.rank = factor.shape[0] * factor.shape[2]
        self.batch = linearization.examples
        self.columns = self.rank // self.batch  # cotangents per example: backward passes of the layer-wise way

    def __repr__(self) -> str:
        return write_choices(self, size=self.space.size, rank=self.rank, examples=self.batch)

    def combine(self, weights: Tensor) -> Tensor:
        """F w, a cotangent on the outputs, shape (R, m).

        Args:
            weights: w, shape (r,).
        """
        columns = weights.to(self.factor.dtype).view(self.factor.shape[0], -1)
        return torch.einsum("imq,iq->im", self.factor, columns)

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,): a third of a gradient from the layers' rows."""
        return self._flatten(part.mv(weights) for part in self.parts)

    def rmv(self, vector: Tensor) -> Tensor:
        tangents = {name: part.to(self.space.dtype) for name, part in self.space.unflatten(vector).items()}
        return torch.stack([part.rmv(tangents) for part in self.parts]).sum(0)

    def backward(self, weights: Tensor) -> Tensor:
        """U w by one backward pass, shape (n,): it needs no rows, and they are checked against it.

        Args:
            weights: w, shape (r,).
        """
        return self.linearization.vjp(self.combine(weights))

    def lower_gram(self) -> Tensor:
        """U^T U in the lower triangle (r, r), anything above: what Cholesky and eigh read. Half the work of `gram`."""
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.factor.device)
        for part in self.parts:
            part.add_gram(total)
        return total

    def cross_gram(self, other: object) -> Tensor | None:
        """U^T V, shape (r, s), layer by layer; None for a V of another kind or of other parameters.

        Args:
            other: V, (n, s).
        """
        if not isinstance(other, Rows) or list(other.space.blocks.items()) != list(self.space.blocks.items()):
            return None
        total = torch.zeros(self.rank, other.rank, dtype=self.space.dtype, device=self.factor.device)
        for left, right in product(self.parts, other.parts):
            add_cross_gram(left, right, total)
        return total

    def dense(self) -> Tensor:
        return self._write().mT

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        return self._flatten(part.squares() for part in self.parts)

    def moment(self) -> Tensor:
        """U U^T, shape (n, n), from some examples' columns at a time."""
        total = torch.zeros(self.space.size, self.space.size, dtype=self.space.dtype, device=self.factor.device)
        step = max(1, self.CHUNK // max(1, self.space.size * self.columns)) * self.columns
        for start in range(0, self.rank, step):
            rows = self._write(slice(start, min(start + step, self.rank)))
            total.addmm_(rows.mT, rows)
        return total

    @cached_property
    def parts(self) -> list[Part]:
        """The row gradients, parameter by parameter, by the fastest way that proves right."""
        return [self._by_column()] if self._separate_rows is None else self._separate_rows

    @property
    def separable(self) -> bool:
        """Whether the examples' rows are told apart: then there are `columns` backward passes, and `rank` otherwise."""
        return self._separate_rows is not None

    @cached_property
    def _separate_rows(self) -> list[Part] | None:
        """The row gradients by a way that tells the examples apart; None where none proves right."""
        for way in (self._layerwise, self._per_example, partial(self._per_example, axis=1)):
            try:
                parts = way()
                if parts is not None and self._agrees(parts):
                    return parts
            except Exception:  # noqa: BLE001 - taps and vmap fail on models in many ways; columns always work
                continue
        if self.rank > self.MANY:
            own = sorted(Ancestors.of(self.linearization.graph).opaque)
            say_once(THROUGH_ITS_OWN.replace("{names}", str(own)) if own else ONE_BY_ONE)
        return None

    def _agrees(self, parts: list[Part]) -> bool:
        generator = torch.Generator(self.factor.device).manual_seed(0)
        dtype, device = self.space.dtype, self.factor.device
        probe = torch.randn(self.rank, generator=generator, dtype=dtype, device=device)
        combined, expected = self._flatten(part.mv(probe) for part in parts), self.backward(probe)
        kind = torch.finfo(expected.dtype)
        return bool(measure_norm(combined - expected) <= 1e3 * kind.eps * measure_norm(expected).clamp(min=kind.tiny))

    def _layerwise(self) -> list[Part] | None:
        origin = self.linearization.origin
        pure = None if origin is None else origin.pure
        if pure is None or not isinstance(pure.model, nn.Module) or mixes_examples(pure.model):
            return None
        point = {name: leaf.detach().requires_grad_() for name, leaf in self.linearization.leaves.items()}
        cotangents = position_cotangents(self.factor, self.batch).unbind()
        recording = self.linearization.recording
        if recording is None:
            recording = record_pass(pure.model, self.space, lambda: self.linearization.function(point))
        heard = hear_rows(recording, self.space.dtype, cotangents, self.batch)
        if not heard or any(len(seen.activations) != self.batch for seen in heard):
            return None
        parts = [read_part(seen) for seen in heard]
        known = {name for seen in heard for name in seen.layer.layout.names}
        rest = [name for name in self.space if name not in known]
        if not rest:
            return parts
        extra = self._per_example(rest)
        return None if extra is None else parts + extra

    def _per_example(self, names: list[str] | None = None, axis: int = 0) -> list[Part] | None:
        """Row gradients of the named parameters (default: all), one functional backward pass per example and column."""
        function = self.linearization.origin
        if function is None or mixes_examples(function.pure.model):
            return None
        factor = factor_by_example(self.factor, function.pure.call, axis)
        if factor is None or len(factor) == 1:
            return None
        point = {name: leaf.detach() for name, leaf in self.linearization.leaves.items()}
        names = list(point) if names is None else names
        rows = example_rows(function, point, names, factor, axis)
        if axis == 1:  # (b, positions, q) -> by row of outputs: positions first
            rows = rows.view(*factor.shape[:2], factor.shape[3], -1).transpose(0, 1)
        rows = rows.reshape(self.rank, -1).to(self.space.dtype)
        return [Explicit(rows, {name: point[name].numel() for name in names})]

    def _by_column(self) -> Part:
        """A backward pass per column: some columns at once where that proves right, else one after the other."""
        eye = torch.eye(self.rank, dtype=self.factor.dtype, device=self.factor.device)
        sizes = {name: block.size for name, block in self.space.blocks.items()}
        chunks: list[Tensor] = []
        for units in split_tensor(eye, self.AT_ONCE):
            cotangents = torch.stack([self.combine(unit) for unit in units.unbind()])
            rows = self.linearization.vjp_batch(cotangents)
            if rows is None:
                break
            chunks.append(rows)
        else:
            part = Explicit(torch.cat(chunks), sizes)
            if self._agrees([part]):
                return part
        return Explicit(torch.stack([self.backward(unit) for unit in eye]), sizes)

    def _flatten(self, dicts: Iterable[dict[str, Tensor]]) -> Tensor:
        """What the parts have of their parameters as one vector (n,)."""
        merged = {name: tensor for named in dicts for name, tensor in named.items()}
        return self.space.flatten({name: t.reshape(self.space.blocks[name].shape) for name, t in merged.items()})

    def _write(self, which: slice = ALL) -> Tensor:
        """Some columns of U as rows, (some, n)."""
        rows = {name: tensor for part in self.parts for name, tensor in part.rows(which).items()}
        return torch.cat([rows[name] for name in self.space], dim=1)


def factor_by_example(factor: Tensor, call: Call, axis: int) -> Tensor | None:
    """F (R, m, q) as (b, positions, m, q), examples along the inputs' dimension `axis`; None where they do not fit."""
    sizes = next((t.shape[: axis + 1] for t in call.tensors() if t.dim() > 0), torch.Size())
    if len(sizes) <= axis or not sizes.numel() or len(factor) % sizes.numel():
        return None
    split = factor.view(*sizes, -1, *factor.shape[1:])  # (b, positions, ...), or (t, b, positions, ...)
    if axis == 0:
        return split
    return split.transpose(0, 1).flatten(1, 2) if split.shape[2] == 1 else None


def example_rows(
    function: OutputMap, point: dict[str, Tensor], names: list[str], factor: Tensor, axis: int = 0
) -> Tensor:
    """Row gradients (r, size of the named parameters), factor (b, positions, m, q), one example's after the other's."""
    call, rest = function.pure.call, {name: tensor for name, tensor in point.items() if name not in names}
    batched = [t.dim() > axis and t.shape[axis] == len(factor) for t in call.tensors()]

    def single(chosen: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        queue = iter(t.unsqueeze(axis) if cut else t for t, cut in zip(tensors, batched, strict=True))
        pure = PureModel(function.pure.model, call.map(lambda _: next(queue)), function.pure.random)
        return PlainKernels(function.of(pure))(chosen | rest)

    def gradients(tensors: tuple[Tensor, ...], root: Tensor, each: Each = torch.func.vmap) -> Tensor:
        pull = torch.func.vjp(partial(single, tensors=tensors), {name: point[name] for name in names})[1]

        def row(cotangent: Tensor) -> Tensor:
            (gradient,) = pull(cotangent)
            return torch.cat([gradient[name].reshape(-1) for name in names])

        return each(row)(position_cotangents(root, 1))

    count = len(factor) * factor.shape[1] * factor.shape[3], sum(point[name].numel() for name in names)
    dims = tuple(axis if cut else None for cut in batched)
    try:
        every = torch.func.vmap(gradients, in_dims=(dims, 0), randomness="same")
        return every(tuple(call.tensors()), factor).reshape(count).detach()
    except Exception:  # noqa: BLE001 - vmap fails in many ways; nn.PReLU's gradient of one slope has a wrong shape
        rows: list[Tensor] = []
        for i, root in enumerate(factor):
            tensors = tuple(t.select(axis, i) if cut else t for t, cut in zip(call.tensors(), batched, strict=True))
            rows.append(gradients(tensors, root, lambda row: lambda cotangents: torch.stack([*map(row, cotangents)])))
        return torch.cat(rows).reshape(count).detach()


def position_cotangents(factor: Tensor, batch: int) -> Tensor:
    """(positions q, R, m): a position and a column of F (R, m, q), of all examples at once, zero elsewhere."""
    count, m, q = factor.shape
    split = factor.view(batch, count // batch, m, q).permute(3, 0, 2, 1)
    return torch.diag_embed(split).permute(3, 0, 1, 4, 2).reshape(-1, count, m)


# Row gradients of layers, read from one forward pass and its output derivatives


@dataclass(frozen=True)
class Outer:
    """A linear layer seen once per example: row (x, c) of the weight is delta_xc (x) a_x, of the bias delta_xc."""

    inputs: Tensor  # a, (b, d)
    deltas: Tensor  # (b, k, o), for r = b k rows
    weight: str | None  # its name, None where it is not in the space
    bias: str | None  # likewise

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it is of."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def add_gram(self, total: Tensor) -> None:
        """total (r, r) += U^T U of these parameters, in the lower triangle only."""
        b, k, o = self.deltas.shape
        if o == 1:  # delta is a number per row: one product of width d instead of two
            Explicit.of(self.rows()).add_gram(total)
            return
        flat = self.deltas.reshape(b * k, o)
        # a column of ones is the bias's input
        inputs = self.inputs if self.weight else self.inputs[:, :0]
        inputs = torch.cat([inputs, inputs.new_ones(b, 1)], dim=1) if self.bias else inputs
        for start, stop in blocks(b, max(1, BLOCK // k)):
            like = inputs[start:stop] @ inputs[:stop].mT
            pairs = flat[start * k : stop * k] @ flat[: stop * k].mT
            corner = total[start * k : stop * k, : stop * k].view(stop - start, k, stop, k)
            corner.addcmul_(pairs.view(stop - start, k, stop, k), like.view(stop - start, 1, stop, 1))

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        """The row gradients of some examples written out, (r, size) by name."""
        b, k, _ = self.deltas.shape
        start, stop, _ = which.indices(b * k)
        inputs, deltas = (tensor[start // k : stop // k] for tensor in (self.inputs, self.deltas))
        outer = torch.einsum("xko,xd->xkod", deltas, inputs) if self.weight else None
        return {name: rows.reshape(stop - start, -1) for name, rows in self._name_parts(outer, deltas).items()}

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares over the rows, (size,) by name."""
        squared = self.deltas.square().sum(1)  # (b, o)
        return self._name_parts(squared.mT @ self.inputs.square() if self.weight else None, squared.sum(0))

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        """The combination of the rows with weights (r,), (size,) by name."""
        b, k, _ = self.deltas.shape
        combined = (weights.view(b, k, 1) * self.deltas).sum(1)  # not einsum: its batched product is slower for k = 1
        return self._name_parts(combined.mT @ self.inputs if self.weight else None, combined.sum(0))

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        """Every row's inner product with a tangent, (r,)."""
        image = torch.zeros(1, 1, dtype=self.deltas.dtype, device=self.deltas.device)
        if self.weight:
            image = self.inputs @ tangents[self.weight].mT
        if self.bias:
            image = image + tangents[self.bias]
        return (self.deltas * image.unsqueeze(1)).sum(2).reshape(-1)

    def _name_parts(self, weight: Tensor | None, bias: Tensor) -> dict[str, Tensor]:
        named = {self.weight: weight, self.bias: bias}
        return {name: value for name, value in named.items() if name is not None and value is not None}


@dataclass(frozen=True)
class Explicit:
    """Row gradients written out, with the methods of `Outer`."""

    matrix: Tensor  # (r, total size of the named parameters)
    sizes: dict[str, int]  # entries by name, in the order of the columns

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @staticmethod
    def of(rows: dict[str, Tensor]) -> Explicit:
        """The parts (r, size) by name, side by side."""
        return Explicit(torch.cat(list(rows.values()), dim=1), {name: part.shape[1] for name, part in rows.items()})

    def add_gram(self, total: Tensor) -> None:
        for start, stop in blocks(len(self.matrix), BLOCK):
            total[start:stop, :stop].addmm_(self.matrix[start:stop], self.matrix[:stop].mT)

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        return self._name_parts(self.matrix[which])

    def squares(self) -> dict[str, Tensor]:
        return self._name_parts(self.matrix.square().sum(0))

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        return self._name_parts(weights @ self.matrix)

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        return self.matrix @ torch.cat([tangents[name].reshape(-1) for name in self.sizes])

    def _name_parts(self, columns: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.sizes, split_tensor(columns, list(self.sizes.values()), dim=-1), strict=True))


Part = Outer | Explicit
"""Some parameters' part of U (n, r): r row gradients, in whatever form is cheapest."""


def cross_gram(left: Outer, right: Outer) -> Tensor:
    """Inner products of row gradients with others of the same linear layer: (r, r')."""
    (b, k, o), (c, m, _) = left.deltas.shape, right.deltas.shape  # k and m rows per example
    like = left.inputs @ right.inputs.mT if left.weight else left.inputs.new_zeros(b, c)
    like = like + 1 if left.bias else like  # a column of ones is the bias's input
    pairs = left.deltas.reshape(b * k, o) @ right.deltas.reshape(c * m, o).mT
    return (pairs.view(b, k, c, m) * like.view(b, 1, c, 1)).view(b * k, c * m)


def add_cross_gram(left: Part, right: Part, total: Tensor) -> None:
    """total (r, s) += inner products of row gradients with others, over the parameters that both have."""
    if isinstance(left, Outer) and isinstance(right, Outer):
        alike = (left.weight, left.bias, left.inputs.shape[1]) == (right.weight, right.bias, right.inputs.shape[1])
        if alike and left.deltas.shape[2] == right.deltas.shape[2] > 1:
            total += cross_gram(left, right)
            return
    shared = [name for name in left.names if name in right.names]
    if shared:
        rows, others = left.rows(), right.rows()
        total.addmm_(torch.cat([rows[n] for n in shared], 1), torch.cat([others[n] for n in shared], 1).mT)


def read_part(seen: Seen) -> Part:
    """A layer's rows from its pass, whose deltas are one per cotangent of an example."""
    layout, a = seen.layer.layout, seen.activations
    deltas = torch.stack(seen.deltas, dim=1)  # (b, k, t, G, o)
    if layout.is_stored and a.shape[1] == 1:
        return Outer(a[:, 0, 0, : layout.inputs], deltas[:, :, 0, 0], layout.weight, layout.bias)
    rows = torch.einsum("xktgo,xtgd->xkgod", deltas, a).flatten(0, 1)
    return Explicit.of({name: part.flatten(1) for name, part in torch.vmap(layout.split)(rows).items()})


def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over `count` rows; blocks of a symmetric product stay in the cache and skip its upper half."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


# The columns over the examples of all processes, and their Gram matrix without anyone's Jacobian


class RowExchange(SumExchange, Protocol):
    """What processes send one another. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's number."""
        ...

    def share_objects(self, thing: Any) -> list[Any]:
        """Every process's object, in the order of their ranks."""
        ...

    def receive_from(self, source: int, tensor: Tensor) -> Tensor:
        """The tensor of the process `source`; elsewhere `tensor` is of its shape, and is written over."""
        ...

    def share_columns(self, matrix: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """All processes' rows (sum of counts, some columns): over all slabs and processes, every column once."""
        ...


class JoinedRows(SampleRows):
    """U = [s_0 U_0, s_1 U_1, ...], with U_i (n, r_i) of process i and s_i^2 its share of the examples.

    A process keeps its own columns. Vectors (n,) and (r,) are the same on all processes; their images are added up. For
    the Gram matrix a linear layer sends what went into it and what came back, in place of their products; what is
    written out as a matrix is exchanged in slabs, so that each process sees its share of the parameters for all
    examples. Then the blocks are added up.

    Args:
        local: U_i; None where this process has no examples.
        space: Of the parameters.
        counts: Every r_i.
        shares: Every s_i^2; they add up to 1.
        exchange: Between the processes.
    """

    def __init__(
        self, local: Rows | None, space: Space, counts: Sequence[int], shares: Sequence[float], exchange: RowExchange
    ) -> None:
        self.local, self.space, self.exchange = local, space, exchange
        self.counts, self.shares, self.starts = list(counts), list(shares), [0, *accumulate(counts)]
        self.rank, self.own = self.starts[-1], self._slice(exchange.rank)
        self.scale = shares[exchange.rank] ** 0.5

    def __repr__(self) -> str:
        return write_choices(self, size=self.space.size, rank=self.rank, counts=self.counts)

    def _slice(self, rank: int) -> slice:
        return slice(self.starts[rank], self.starts[rank + 1])

    def mv(self, weights: Tensor) -> Tensor:
        local = self.local
        return self.exchange.sum(self.space.zeros() if local is None else local.mv(self.scale * weights[self.own]))

    def rmv(self, vector: Tensor) -> Tensor:
        products = torch.zeros(self.rank, dtype=self.space.dtype, device=self.space.device)
        if self.local is not None:
            products[self.own] = self.scale * self.local.rmv(vector)
        return self.exchange.sum(products)

    def dense(self) -> Tensor:
        root = torch.zeros(self.space.size, self.rank, dtype=self.space.dtype, device=self.space.device)
        if self.local is not None:
            root[:, self.own] = self.scale * self.local.dense()
        return self.exchange.sum(root)

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        local, share = self.local, self.shares[self.exchange.rank]
        return self.exchange.sum(self.space.zeros() if local is None else share * local.squares())

    def lower_gram(self) -> Tensor:
        own = None if self.local is None else self.local.parts
        tables = self.exchange.share_objects(None if own is None else [describe_part(part) for part in own])
        known = [table for table in tables if table is not None]
        if any(table != known[0] for table in known):  # a model that some process's examples were taken apart otherwise
            sizes = {name: block.size for name, block in self.space.blocks.items()}
            own = None if self.local is None else [Explicit(self.local.dense().mT.contiguous(), sizes)]
            known = [[("Explicit", list(sizes.items()))]]
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.space.device)
        for i, table in enumerate(known[0]):
            part = None if own is None else own[i]
            if table[0] == "Outer":
                self._add_outer(total, part, table)
            else:
                assert part is None or isinstance(part, Explicit)
                matrix = total.new_empty(0, sum(size for _, size in table[1])) if part is None else part.matrix
                for slab in self.exchange.share_columns(matrix, self.counts):
                    Explicit(slab, {}).add_gram(total)
        total = self.exchange.sum(total)
        roots = torch.tensor(self.shares, dtype=total.dtype, device=total.device).sqrt()
        scale = roots.repeat_interleave(torch.tensor(self.counts, device=total.device))
        return total.mul_(scale).mul_(scale.unsqueeze(1))

    def _add_outer(self, total: Tensor, part: Part | None, table: Any) -> None:
        """Add the blocks of a linear layer that fall to this process: half of its row and column of blocks."""
        _, weight, bias, columns, d, o = table
        for source, count in enumerate(self.counts):
            if not count:
                continue
            mine = part if source == self.exchange.rank else None
            shapes = (count // columns, d), (count // columns, columns, o)
            empty = [torch.empty(shape, dtype=total.dtype, device=total.device) for shape in shapes]
            inputs, deltas = (mine.inputs, mine.deltas) if isinstance(mine, Outer) else empty
            inputs, deltas = (self.exchange.receive_from(source, each) for each in (inputs, deltas))
            other = Outer(inputs, deltas, weight, bias)
            if isinstance(part, Outer) and computes_block(self.exchange.rank, source, self.exchange.size):
                block, there = cross_gram(part, other), self._slice(source)
                if source <= self.exchange.rank:
                    total[self.own, there] += block
                else:
                    total[there, self.own] += block.mT


def describe_part(part: Part) -> Any:
    """What must be alike in the parts of all processes, as plain values."""
    if isinstance(part, Outer):
        columns, outputs = part.deltas.shape[1:]
        return ("Outer", part.weight, part.bias, columns, part.inputs.shape[1], outputs)
    return ("Explicit", list(part.sizes.items()))


def computes_block(rank: int, other: int, size: int) -> bool:
    """Whether the block of the Gram matrix between two processes falls to `rank`: one of them computes it.

    Args:
        rank: One of the two.
        other: The other, or the same.
        size: How many processes there are.

    Example:
        >>> ng.operators.computes_block(0, 1, 2), ng.operators.computes_block(1, 0, 2)
        (True, False)
    """
    ahead = (other - rank) % size
    return 2 * ahead < size or (2 * ahead == size and rank < other)
