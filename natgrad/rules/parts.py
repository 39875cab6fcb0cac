"""A vector over parameters that lie apart, with what rules do with a flat one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.ground.messages import write_choices
from natgrad.ground.typed_torch import as_tensor_like, measure_norm, torch_plain


class Parts:
    """A vector over parameters that lie apart: d_p = length * share_p * rate_p * part_p, by name. No flat copy is made.

    It has what rules do with a flat vector (n,): `a * v`, `v + w`, `v @ w`, `-v`, `v.norm()`, `v.clone()`. The squares
    of its parts are summed up once, for all vectors that were made of it by factors.

    Args:
        parts: Tensors by name.
        rates: A factor by name; None: 1 for all.
        length: A factor that all have in common: a number, or a scalar tensor.
        shares: Another factor by name, scalar tensors; None: 1 for all.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        rates: Mapping[str, float] | None = None,
        length: Tensor | float = 1.0,
        shares: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parts, self.rates, self.length, self.shares = parts, rates, length, shares
        self._sizes = dict[str, Tensor]()

    def __repr__(self) -> str:
        return write_choices(self, parts=len(self.parts), size=sum(part.numel() for part in self.parts.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __getitem__(self, name: str) -> Tensor:
        part = self.parts[name]
        return part * self.factor(name, part)

    def factor(self, name: str, like: Tensor) -> Tensor | float:
        """What a part is multiplied by: a number, or a scalar tensor.

        Args:
            name: The parameter's.
            like: Of the dtype and on the device wanted.
        """
        factor = as_factor(self.length, like) * self.rate(name)
        return factor if self.shares is None else factor * as_factor(self.shares[name], like)

    def rate(self, name: str) -> float:
        """The factor of one parameter, without the common one.

        Args:
            name: The parameter's.
        """
        return 1.0 if self.rates is None else self.rates[name]

    def tensors(self) -> dict[str, Tensor]:
        """The entries by name."""
        return {name: self[name] for name in self.parts}

    def list_tensors(self, like: Sequence[Tensor]) -> Sequence[Tensor]:
        """The entries in the order of the names: by one call where all parts have one factor.

        Args:
            like: Of the dtypes and on the devices wanted.
        """
        parts = [part.to(reference.dtype) for part, reference in zip(self.parts.values(), like, strict=True)]
        rates = {1.0} if self.rates is None else set(self.rates.values())
        if self.shares is None and len(rates) == 1 and len({(p.dtype, p.device) for p in parts}) == 1:
            return torch_plain._foreach_mul(parts, as_tensor_like(self.length * rates.pop(), parts[0]))
        return [part * self.factor(name, part) for name, part in zip(self.parts, parts, strict=True)]

    def __mul__(self, factor: Tensor | float) -> Parts:
        return self._share_sizes(Parts(self.parts, self.rates, self.length * factor, self.shares))

    __rmul__ = __mul__

    def __neg__(self) -> Parts:
        return -1.0 * self

    def __add__(self, other: Parts) -> Parts:
        parts = other.tensors()
        for name in self.parts:
            parts[name] = self[name] + parts[name] if name in parts else self[name]
        return Parts(parts)

    def __sub__(self, other: Parts) -> Parts:
        return self + -1.0 * other

    def scale_each(self, shares: Mapping[str, Tensor]) -> Parts:
        """The vector with each part times a factor of its own, without a copy.

        Args:
            shares: Scalar tensors by name.
        """
        before = self.shares
        factors = shares if before is None else {name: before[name] * share for name, share in shares.items()}
        return self._share_sizes(Parts(self.parts, self.rates, self.length, factors))

    def _share_sizes(self, scaled: Parts) -> Parts:
        scaled._sizes = self._sizes
        return scaled

    def __matmul__(self, other: Parts) -> Tensor:
        """The inner product, a scalar tensor; entries that only one of them has count as zero in the other."""
        names = [name for name in self.parts if name in other.parts]
        if not names:
            return torch.zeros(())
        pairs = [
            self._measure_part(n).square()
            if self.parts[n] is other.parts[n]
            else inner_product(self.parts[n], other.parts[n])
            for n in names
        ]
        home, rates = pairs[0], [self.rate(name) * other.rate(name) for name in names]
        products = torch.stack([product.to(home) for product in pairs]) * torch.tensor(
            rates, dtype=home.dtype, device=home.device
        )
        for shares in (self.shares, other.shares):
            if shares is not None:
                products = products * torch.stack([shares[name].to(home) for name in names])
        return products.sum() * as_factor(self.length, home) * as_factor(other.length, home)

    def square(self, name: str) -> Tensor:
        """|d_p|^2 of one parameter, a scalar tensor.

        Args:
            name: The parameter's.
        """
        part = self.parts[name]
        return (self._measure_part(name) * self.factor(name, part)).square()

    def _measure_part(self, name: str) -> Tensor:
        """|part_p|, measured once."""
        if name not in self._sizes:
            self._sizes[name] = measure_part(self.parts[name])
        return self._sizes[name]

    def norm(self) -> Tensor:
        """|d|, a scalar tensor."""
        return add_scalars([self.square(name) for name in self.parts]).sqrt()

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


def add_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Their sum, on the device of the first: a model may lie on several."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).sum() if scalars else torch.zeros(())


def measure_part(part: Tensor) -> Tensor:
    """|x|, a scalar tensor. A part is often a view: a layer's weight in its matrix, whose rows also hold the bias."""
    # by rows in a fifth of the time of the whole view
    return measure_norm(part if part.is_contiguous() else measure_norm(part, dim=-1))


def as_factor(length: Tensor | float, like: Tensor) -> Tensor | float:
    """A common factor in the dtype and on the device of what it multiplies."""
    return length.to(like) if isinstance(length, Tensor) else length
