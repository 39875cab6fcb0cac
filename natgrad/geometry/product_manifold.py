"""Independent models side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.stable_functions import safe_sqrt


class ProductManifold(Manifold):
    """Points of several manifolds joined along one dimension, (..., total); squared lengths add.

    Args:
        *parts: (manifold, size) with the entries of one of its points; matrices are laid out row by row.
    """

    domain = "the points of all parts joined, each inside its own"

    def __init__(self, *parts: tuple[Manifold, int]) -> None:
        if not parts or not all(isinstance(m, Manifold) and isinstance(s, int) and s > 0 for m, s in parts):
            raise ValueError("ProductManifold takes pairs (manifold, entries of one of its points), at least one")
        self.manifolds, self.sizes = tuple(m for m, _ in parts), [s for _, s in parts]

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([m.inner(*each) for m, *each in self._cut(point, first, second)]).sum(0)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return self._each(lambda m, p, g: m.natural(p, g), point, gradient)

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self._each(lambda m, p, v: m.exp(p, v), point, tangent)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        return self._each(lambda m, p, q: m.log(p, q), point, other)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return self._each(lambda m, p, q, v: m.transport(p, q, v), point, other, vector)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        return safe_sqrt(torch.stack([m.distance(*each).square() for m, *each in self._cut(point, other)]).sum(0))

    def inside(self, point: Tensor) -> Tensor:
        return torch.stack([m.inside(p) for m, p in self._cut(point)]).all(0)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self._each(lambda m, p, v: m.curve(p, v), point, tangent)

    def project(self, point: Tensor, vector: Tensor) -> Tensor:
        return self._each(lambda m, p, v: m.project(p, v), point, vector)

    def _cut(self, *tensors: Tensor) -> list[tuple]:
        pieces = [tensor.split(self.sizes, dim=-1) for tensor in tensors]
        return [
            (m, *map(lambda x, m=m: _shape_point(m, x), each)) for m, *each in zip(self.manifolds, *pieces, strict=True)
        ]

    def _each(self, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        found = [work(m, *each).flatten(-m.event) for m, *each in self._cut(*tensors)]
        return torch.cat(found, dim=-1)

    def __repr__(self) -> str:
        return f"ProductManifold{tuple(zip(self.manifolds, self.sizes, strict=True))!r}"


def _shape_point(manifold: Manifold, flat: Tensor) -> Tensor:
    if manifold.event == 1:
        return flat
    side = round(flat.shape[-1] ** 0.5)
    return flat.unflatten(-1, (side, side))
