"""The columns of U in G = U U^T, one per row of outputs, and their Gram matrix without the Jacobian.

For a linear layer y = W a + b the gradient of one row is the outer product of what went in and of what came back,
so the Gram matrix of all rows is (A A^T + 1) o (D D^T), summed over layers: no Jacobian is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor, nn

from natgrad.ground.messages import write_choices
from natgrad.ground.pure import INSTEAD, Ancestors, Call, PureModel, mixes_examples
from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import measure_norm, split_tensor
from natgrad.layers import hear_rows, record_pass
from natgrad.operators.linearization import Linearization, OutputMap, PlainKernels, say_once
from natgrad.operators.row_parts import Explicit, Part, add_cross_gram, fresh_point, part_of
from natgrad.operators.sample_rows import SampleRows, mirror_gram

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
        self.linearization, self.factor = linearization, factor
        self.rank = factor.shape[0] * factor.shape[2]
        self.batch = linearization.examples
        self.columns = self.rank // self.batch  # cotangents per example: backward passes of the layer-wise way

    def __repr__(self) -> str:
        return write_choices(self, size=self.space.size, rank=self.rank, examples=self.batch)

    @property
    def space(self) -> Space:
        """The space of the parameters."""
        return self.linearization.space

    def combine(self, weights: Tensor) -> Tensor:
        """F w, a cotangent on the outputs, shape (R, m).

        Args:
            weights: w, shape (r,).
        """
        columns = weights.to(self.factor.dtype).view(self.factor.shape[0], -1)
        return torch.einsum("imq,iq->im", self.factor, columns)

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,): a third of a gradient from the layers' rows.

        Args:
            weights: w, shape (r,).
        """
        return self.space.flatten(self._shape_rows(merge_dicts(part.mv(weights) for part in self.parts)))

    def rmv(self, vector: Tensor) -> Tensor:
        tangents = {name: part.to(self.space.dtype) for name, part in self.space.unflatten(vector).items()}
        return torch.stack([part.rmv(tangents) for part in self.parts]).sum(0)

    def backward(self, weights: Tensor) -> Tensor:
        """U w by one backward pass, shape (n,): it needs no rows, and they are checked against it.

        Args:
            weights: w, shape (r,).
        """
        return self.linearization.vjp(self.combine(weights))

    def gram(self) -> Tensor:
        """U^T U, shape (r, r)."""
        return mirror_gram(self.lower_gram())

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
        for one, another in product(self.parts, other.parts):
            add_cross_gram(one, another, total)
        return total

    def dense(self) -> Tensor:
        rows = merge_dicts(part.rows() for part in self.parts)
        return torch.cat([rows[name] for name in self.space], dim=1).mT

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        return self.space.flatten(self._shape_rows(merge_dicts(part.squares() for part in self.parts)))

    def moment(self) -> Tensor:
        """U U^T, shape (n, n), from some examples' columns at a time."""
        total = torch.zeros(self.space.size, self.space.size, dtype=self.space.dtype, device=self.factor.device)
        step = max(1, self.CHUNK // max(1, self.space.size * self.columns)) * self.columns
        for start in range(0, self.rank, step):
            columns = slice(start, min(start + step, self.rank))
            rows = merge_dicts(part.rows(columns) for part in self.parts)
            some = torch.cat([rows[name] for name in self.space], dim=1)
            total.addmm_(some.mT, some)
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
        ways: tuple[Callable[[], list[Part] | None], ...] = (
            self._layerwise,
            self._per_example,
            lambda: self._per_example(axis=1),
        )
        for way in ways:
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
        found = self.space.flatten(self._shape_rows(merge_dicts(part.mv(probe) for part in parts)))
        expected = self.backward(probe)
        tolerance = 1e3 * torch.finfo(expected.dtype).eps
        return bool(
            measure_norm(found - expected)
            <= tolerance * measure_norm(expected).clamp(min=torch.finfo(expected.dtype).tiny)
        )

    def _layerwise(self) -> list[Part] | None:
        origin = self.linearization.origin
        pure = None if origin is None else origin.pure
        if pure is None or not isinstance(pure.model, nn.Module) or mixes_examples(pure.model):
            return None
        point = fresh_point(self.linearization.leaves)
        cotangents = position_cotangents(self.factor, self.batch)
        recording = self.linearization.recording
        if recording is None:
            recording = record_pass(pure.model, self.space, lambda: self.linearization.function(point))
        heard = hear_rows(recording, self.space.dtype, cotangents, self.batch)
        if not heard or any(len(seen.activations) != self.batch for seen in heard):
            return None
        parts = [part_of(seen) for seen in heard]
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
        found: list[Tensor] = []
        for units in split_tensor(eye, self.AT_ONCE):
            cotangents = torch.stack([self.combine(unit) for unit in units.unbind()])
            rows = self.linearization.vjp_batch(cotangents)
            if rows is None:
                break
            found.append(rows)
        else:
            part = Explicit(torch.cat(found), sizes)
            if self._agrees([part]):
                return part
        return Explicit(torch.stack([self.backward(unit) for unit in eye]), sizes)

    def _shape_rows(self, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.view(self.space.blocks[name].shape) for name, tensor in flat.items()}


def merge_dicts(dicts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One dict of disjoint dicts."""
    return {name: tensor for found in dicts for name, tensor in found.items()}


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
    """Row gradients (r, size of the named parameters), factor (b, positions, m, q), one example's after the other's.

    By vmap over single examples; by a loop over them where an operation has no rule for that, or a wrong one.
    """
    call, rest = function.pure.call, {name: tensor for name, tensor in point.items() if name not in names}
    batched = [t.dim() > axis and t.shape[axis] == len(factor) for t in call.tensors()]

    def single(chosen: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        queue = iter(t.unsqueeze(axis) if cut else t for t, cut in zip(tensors, batched, strict=True))
        pure = PureModel(function.pure.model, call.map(lambda _: next(queue)), function.pure.random)
        return PlainKernels(function.of(pure))(chosen | rest)

    def gradients(tensors: tuple[Tensor, ...], root: Tensor, each: Each = torch.func.vmap) -> Tensor:
        pull = torch.func.vjp(partial(single, tensors=tensors), {name: point[name] for name in names})[1]

        def row(cotangent: Tensor) -> Tensor:
            (found,) = pull(cotangent)
            return torch.cat([found[name].reshape(-1) for name in names])

        return each(row)(cotangents_of_one(root))

    count = len(factor) * factor.shape[1] * factor.shape[3], sum(point[name].numel() for name in names)
    dims = tuple(axis if cut else None for cut in batched)
    try:
        every = torch.func.vmap(gradients, in_dims=(dims, 0), randomness="same")
        return every(tuple(call.tensors()), factor).reshape(count).detach()
    except Exception:  # noqa: BLE001 - vmap fails in many ways; nn.PReLU's gradient of one slope has a wrong shape
        found: list[Tensor] = []
        for i, root in enumerate(factor):
            tensors = tuple(t.select(axis, i) if cut else t for t, cut in zip(call.tensors(), batched, strict=True))
            found.append(gradients(tensors, root, one_by_one))
        return torch.cat(found).reshape(count).detach()


def one_by_one(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function over the first dimension of its argument, as `vmap` has it, by a loop."""
    return lambda tensor: torch.stack([function(part) for part in tensor])


def position_cotangents(factor: Tensor, batch: int) -> list[Tensor]:
    """One (R, m) per position of an example and column of the factor (R, m, q), all examples of the batch at once."""
    count, m, q = factor.shape
    split = factor.view(batch, count // batch, m, q)
    found: list[Tensor] = []
    for p in range(split.shape[1]):
        for j in range(q):
            cotangent = torch.zeros_like(split[..., 0])
            cotangent[:, p] = split[:, p, :, j]
            found.append(cotangent.view(count, m))
    return found


def cotangents_of_one(root: Tensor) -> Tensor:
    """(positions, m, q) -> (positions * q, positions, m): each column of the root at each position, zero elsewhere."""
    positions, m, q = root.shape
    eye = torch.eye(positions, dtype=root.dtype, device=root.device)
    return torch.einsum("ps,pmq->pqsm", eye, root).reshape(positions * q, positions, m)
