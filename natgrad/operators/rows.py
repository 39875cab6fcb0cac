"""The columns of U in G = U U^T, one per row of outputs, and their Gram matrix without the Jacobian.

For a linear layer y = W a + b the gradient of one row is the outer product of what went in and of what came back,
so the Gram matrix of all rows is (A A^T + 1) o (D D^T), summed over layers: no Jacobian is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from natgrad.operators.linearization import Linearization, OutputMap, PlainAttention, output_map
from natgrad.operators.taps import Explicit, Part, backward_to_taps, frozen_point, record_taps
from natgrad.pure import PureModel, mixes_examples
from natgrad.spaces import Space


class Rows:
    """U (n, r) = J^T F, r = R q, for a factor F (R, m, q) of the form on the outputs.

    Columns are ordered by row of outputs, then by column of F. There are three ways to the same numbers, fastest
    first: layer by layer from taps (and per-example gradients for parameters that taps do not know), per-example
    functional gradients for everything, and one backward pass per column. The first two assume that a row of
    outputs depends on its own example alone. A random combination U w is compared with a plain backward pass, and
    the next way is taken where they disagree (dropout, parameters used behind a layer's back).
    """

    def __init__(self, linearization: Linearization, factor: Tensor) -> None:
        self.linearization, self.factor = linearization, factor
        self.rank = factor.shape[0] * factor.shape[2]
        self.batch = batch_of(linearization.function, len(factor))
        self.columns = self.rank // self.batch  # cotangents per example: backward passes of the layer-wise way

    @property
    def space(self) -> Space:
        """The space of the parameters."""
        return self.linearization.space

    def combine(self, weights: Tensor) -> Tensor:
        """F w, a cotangent on the outputs: (r,) -> (R, m)."""
        columns = weights.to(self.factor.dtype).view(self.factor.shape[0], -1)
        return torch.einsum("imq,iq->im", self.factor, columns)

    def mv(self, weights: Tensor) -> Tensor:
        """U w: (r,) -> (n,), a third of a gradient from the layers' rows."""
        return self.space.flatten(self._shaped(merged(part.mv(weights) for part in self.parts)))

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v: (n,) -> (r,)."""
        tangents = {name: part.to(self.space.dtype) for name, part in self.space.unflatten(vector).items()}
        return torch.stack([part.rmv(tangents) for part in self.parts]).sum(0)

    def backward(self, weights: Tensor) -> Tensor:
        """U w by one backward pass: needs no rows, and is what they are checked against."""
        return self.linearization.vjp(self.combine(weights))

    def gram(self) -> Tensor:
        """U^T U, shape (r, r)."""
        lower = self.lower_gram()
        return lower.tril() + lower.tril(-1).mT

    def lower_gram(self) -> Tensor:
        """U^T U in the lower triangle (r, r), anything above: what Cholesky and eigh read. Half the work of `gram`."""
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.factor.device)
        for part in self.parts:
            part.add_gram(total)
        return total

    def dense(self) -> Tensor:
        """U written out, shape (n, r)."""
        rows = merged(part.rows() for part in self.parts)
        return torch.cat([rows[name] for name in self.space], dim=1).mT

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        return self.space.flatten(self._shaped(merged(part.squares() for part in self.parts)))

    @cached_property
    def parts(self) -> list[Part]:
        """The row gradients, parameter by parameter, by the fastest way that proves right."""
        ways: tuple[Callable[[], list[Part] | None], ...] = (self._layerwise, self._per_example)
        for way in ways:
            try:
                parts = way()
            except Exception:  # noqa: BLE001 - taps and vmap fail on models in many ways; the way by columns always works
                continue
            if parts is not None and self._agrees(parts):
                return parts
        return [self._by_column()]

    def _agrees(self, parts: list[Part]) -> bool:
        generator = torch.Generator(self.factor.device).manual_seed(0)
        kind = {"generator": generator, "dtype": self.space.dtype, "device": self.factor.device}
        probe = torch.randn(self.rank, **kind)
        found = self.space.flatten(self._shaped(merged(part.mv(probe) for part in parts)))
        expected = self.backward(probe)
        tolerance = 1e3 * torch.finfo(expected.dtype).eps
        return bool(
            (found - expected).norm() <= tolerance * expected.norm().clamp(min=torch.finfo(expected.dtype).tiny)
        )

    def _layerwise(self) -> list[Part] | None:
        pure = pure_of(self.linearization.function)
        if pure is None or not isinstance(pure.model, nn.Module) or mixes_examples(pure.model):
            return None
        point = frozen_point(self.linearization.leaves)
        outputs, taps = record_taps(pure.model, self.space, lambda: self.linearization.function(point))
        if not taps or any(len(tap.dummy) != self.batch for tap in taps):
            return None
        deltas = zip(
            *(backward_to_taps(outputs, taps, c) for c in position_cotangents(self.factor, self.batch)), strict=True
        )
        parts = [tap.part(delta, self.space.dtype) for tap, delta in zip(taps, deltas, strict=True)]
        known = {name for tap in taps for name in (tap.weight, tap.bias)}
        rest = [name for name in self.space if name not in known]
        if not rest:
            return parts
        extra = self._per_example(rest)
        return None if extra is None else parts + extra

    def _per_example(self, names: list[str] | None = None) -> list[Part] | None:
        """Row gradients of the named parameters (default: all), one functional backward pass per example and column."""
        function = output_map(self.linearization.function)
        if function is None or mixes_examples(function.pure.model) or self.batch == 1:
            return None
        point = {name: leaf.detach() for name, leaf in self.linearization.leaves.items()}
        names = list(point) if names is None else names
        rest = {name: tensor for name, tensor in point.items() if name not in names}
        rows = example_rows(function, point, names, rest, self.factor.view(self.batch, -1, *self.factor.shape[1:]))
        return [Explicit(rows.to(self.space.dtype), {name: point[name].numel() for name in names})]

    def _by_column(self) -> Part:
        eye = torch.eye(self.rank, dtype=self.factor.dtype, device=self.factor.device)
        rows = torch.stack([self.backward(unit) for unit in eye])
        return Explicit(rows, {name: block.size for name, block in self.space.blocks.items()})

    def _shaped(self, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.view(self.space.blocks[name].shape) for name, tensor in flat.items()}


def merged(dicts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One dict of disjoint dicts."""
    return {name: tensor for found in dicts for name, tensor in found.items()}


def pure_of(function: object) -> PureModel | None:
    """The pure model behind an output map, or None for any other function of the parameters."""
    found = output_map(function)
    return None if found is None else found.pure


def batch_of(function: object, rows: int) -> int:
    """Number of examples behind `rows` rows of outputs: the inputs' leading size if it divides them, else 1."""
    pure = pure_of(function)
    if pure is None or not any(t.dim() > 0 for t in pure.call.tensors()):
        return 1
    batch = pure.call.batch()
    return batch if batch and rows % batch == 0 else 1


def example_rows(
    function: OutputMap, point: dict[str, Tensor], names: list[str], rest: dict[str, Tensor], factor: Tensor
) -> Tensor:
    """Row gradients (r, size of the named parameters), factor (b, positions, m, q), by vmap over single examples."""
    call = function.pure.call
    batched = [t.dim() > 0 and len(t) == len(factor) for t in call.tensors()]

    def single(chosen: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        queue = iter(t.unsqueeze(0) if cut else t for t, cut in zip(tensors, batched, strict=True))
        pure = PureModel(function.pure.model, call.map(lambda _: next(queue)), function.pure.random)
        return PlainAttention(OutputMap(pure, function.rows))(chosen | rest)

    def gradients(tensors: tuple[Tensor, ...], root: Tensor) -> Tensor:
        pull = torch.func.vjp(lambda chosen: single(chosen, tensors), {name: point[name] for name in names})[1]

        def row(cotangent: Tensor) -> Tensor:
            (found,) = pull(cotangent)
            return torch.cat([found[name].reshape(-1) for name in names])

        return torch.func.vmap(row)(cotangents_of_one(root))

    dims = tuple(0 if cut else None for cut in batched)
    rows = torch.func.vmap(gradients, in_dims=(dims, 0), randomness="same")(tuple(call.tensors()), factor)
    return rows.reshape(-1, rows.shape[-1]).detach()


def position_cotangents(factor: Tensor, batch: int) -> list[Tensor]:
    """One (R, m) per position of an example and column of the factor (R, m, q), all examples of the batch at once."""
    count, m, q = factor.shape
    split = factor.view(batch, count // batch, m, q)
    found = []
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
