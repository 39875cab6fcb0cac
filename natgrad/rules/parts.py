"""A vector over parameters that lie apart, with what rules do with a flat one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from natgrad.typed_torch import measure_norm


class Parts:
    """A vector over parameters that lie apart: d_p = length * rate_p * part_p, by name. No flat copy is made.

    It has what rules do with a flat vector (n,): `a * v`, `v + w`, `v @ w`, `-v`, `v.norm()`, `v.clone()`.

    Args:
        parts: Tensors by name.
        rates: A factor by name; None: 1 for all.
        length: A factor that all have in common: a number, or a scalar tensor.
    """

    def __init__(
        self, parts: Mapping[str, Tensor], rates: Mapping[str, float] | None = None, length: Tensor | float = 1.0
    ) -> None:
        self.parts, self.rates, self.length = parts, rates, length

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __getitem__(self, name: str) -> Tensor:
        part = self.rate(name) * self.parts[name]
        return part * as_factor(self.length, part)

    def rate(self, name: str) -> float:
        """The factor of one parameter, without the common one.

        Args:
            name: The parameter's.
        """
        return 1.0 if self.rates is None else self.rates[name]

    def tensors(self) -> dict[str, Tensor]:
        """The entries by name."""
        return {name: self[name] for name in self.parts}

    def __mul__(self, factor: Tensor | float) -> Parts:
        return Parts(self.parts, self.rates, self.length * factor)

    __rmul__ = __mul__

    def __neg__(self) -> Parts:
        return -1.0 * self

    def __add__(self, other: Parts) -> Parts:
        found = other.tensors()
        for name in self.parts:
            found[name] = self[name] + found[name] if name in found else self[name]
        return Parts(found)

    def __sub__(self, other: Parts) -> Parts:
        return self + -1.0 * other

    def __matmul__(self, other: Parts) -> Tensor:
        """The inner product, a scalar tensor; entries that only one of them has count as zero in the other."""
        pairs = [
            self.rate(name) * other.rate(name) * multiply_parts(part, other.parts[name])
            for name, part in self.parts.items()
            if name in other.parts
        ]
        whole = torch.stack(pairs).sum() if pairs else torch.zeros(())
        return whole * as_factor(self.length, whole) * as_factor(other.length, whole)

    def square(self, name: str) -> Tensor:
        """|d_p|^2 of one parameter, a scalar tensor.

        Args:
            name: The parameter's.
        """
        part = self.parts[name]
        square = multiply_parts(part, part) * self.rate(name) ** 2
        return square * as_factor(self.length, square) ** 2

    def norm(self) -> Tensor:
        """|d|, a scalar tensor."""
        return (self @ self).sqrt()

    def clone(self) -> Parts:
        """The same with memory of its own."""
        return Parts(self.tensors())


Vector = Tensor | Parts
Memory = dict[str, Vector]


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, without a copy where they lie in one piece.

    Args:
        first: Any tensor.
        second: One of the same shape, whose dtype the product has.
    """
    return torch.dot(first.reshape(-1).to(second.dtype), second.reshape(-1))


def multiply_parts(first: Tensor, second: Tensor) -> Tensor:
    """The same, where a part is often a view: a layer's weight lies in its matrix, whose rows also hold the bias.

    Args:
        first: Any tensor.
        second: One of the same shape. If it is the first itself, nothing is copied.
    """
    if first is not second or first.is_contiguous():
        return inner_product(first, second)
    return measure_norm(measure_norm(first, dim=-1)).square()  # by rows in a fifth of the time of the whole view


def as_factor(length: Tensor | float, like: Tensor) -> Tensor | float:
    """A common factor in the dtype and on the device of what it multiplies."""
    return length.to(like) if isinstance(length, Tensor) else length
