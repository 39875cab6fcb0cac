"""Elementwise functions on the way of a network's values and derivatives, forward and back.

With z what goes in, z_i = dz/dx_i and s = sum_i d^2z/dx_i^2 over a set of coordinates,

    d f(z)/dx_i  =  f'(z) z_i          sum_i d^2 f(z)/dx_i^2  =  f'(z) s + f''(z) sum_i z_i^2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.applications.residuals.plan import JetLayout
from natgrad.layered_energies import ACTIVATIONS, has_hooks

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Jets:
    """The values and derivatives of all units of a layer.

    Args:
        value: z, shape (b, h).
        first: z_i, shape (D, b, h); (D, 1, h) where they are the same at all points.
        sums: s for every set of coordinates, shape (G, b, h). None: zeros, of a linear function of the points.
    """

    value: Tensor
    first: Tensor
    sums: Tensor | None

    @staticmethod
    def split(stacked: Tensor, layout: JetLayout) -> Jets:
        """Jets out of the tensor (T, b, h) that has them in this order.

        Args:
            stacked: Shape (T, b, h).
            layout: The order.
        """
        last = 1 + len(layout.dims)
        return Jets(stacked[0], stacked[1:last], stacked[last:])

    def stack(self, sets: int = 0) -> Tensor:
        """(T, b, h): value, first derivatives, sums; with zeros for those that are None.

        Args:
            sets: How many sums of zeros.
        """
        value = self.value.unsqueeze(0)
        parts = [value, self.first.expand(-1, *self.value.shape)]
        parts.append(value.new_zeros(sets, *self.value.shape) if self.sums is None else self.sums)
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Bend:
    """An elementwise function on the way: its derivatives f', f'', f''' at z, shape (b, h) each, and what went in.

    Args:
        slopes: f', f'' and f''', as many as a pass back needs.
        jets: z and its derivatives.
        squares: sum_i z_i^2 for every sum of second derivatives, shape (b, h) or (1, h) each.
        before: The derivatives of z.
        behind: Those of f(z) that are kept.
    """

    slopes: list[Tensor]
    jets: Jets
    squares: list[Tensor]
    before: JetLayout
    behind: JetLayout

    def pull(self, cotangents: Tensor) -> Tensor:
        """The cotangents (k, T, b, h) before the elementwise function, from those behind it.

        Args:
            cotangents: Shape (k, T', b, h), by `behind`.

        Returns:
            By `before`; without sums where these are None.
        """
        before, jets, slope = self.before, self.jets, self.slopes[0]
        count = before.count if jets.sums is not None else 1 + len(before.dims)
        k, _, b, h = cotangents.shape
        out = cotangents.new_empty(k, count, b, h)
        torch.mul(cotangents[:, 0], slope, out=out[:, 0])
        if not before.dims:
            return out
        self._pull_first(cotangents, out)
        along = self._sum_along(cotangents)
        for number, (group, square) in enumerate(zip(before.second, self.squares, strict=True)):
            upper = cotangents[:, self.behind.place_of_sum(group)]
            out[:, 0].addcmul_(upper, self.slopes[2] * square)
            twice = upper * (2 * self.slopes[1])
            for i in group:
                place = before.place_of(i)
                out[:, place].addcmul_(twice, jets.first[place - 1])
            if jets.sums is not None:
                torch.mul(upper, slope, out=out[:, before.place_of_sum(group)])
                product = upper * jets.sums[number]
                along = product if along is None else along.add_(product)
        if along is not None:
            out[:, 0].addcmul_(along, self.slopes[1])
        return out

    def _pull_first(self, cotangents: Tensor, out: Tensor) -> None:
        """f' times the cotangents of the first derivatives; zeros for those that were not kept."""
        last = 1 + len(self.before.dims)
        if self.behind.dims == self.before.dims:
            torch.mul(cotangents[:, 1:last], self.slopes[0], out=out[:, 1:last])
            return
        out[:, 1:last].zero_()
        for i in self.behind.dims:
            torch.mul(cotangents[:, self.behind.place_of(i)], self.slopes[0], out=out[:, self.before.place_of(i)])

    def _sum_along(self, cotangents: Tensor) -> Tensor | None:
        """sum_i c_i z_i over the first derivatives that were kept, (k, b, h)."""
        if not self.behind.dims:
            return None
        first = self.jets.first
        if self.behind.dims != self.before.dims:
            first = first[[self.before.place_of(i) - 1 for i in self.behind.dims]]
        return (cotangents[:, 1 : 1 + len(self.behind.dims)] * first).sum(1)


def push_through(
    part: Elementwise, jets: Jets, before: JetLayout, behind: JetLayout, rows: bool
) -> tuple[Tensor, Bend | None]:
    """f(z) with its derivatives, from z with its own.

    Args:
        part: f.
        jets: z.
        before: Its derivatives.
        behind: Those of f(z) that are kept.
        rows: Whether a pass back will follow, which takes one derivative more of f.

    Returns:
        Shape (T, b, h), by `behind`, and what a pass back needs.
    """
    value, *slopes = differentiate_elementwise(part, jets.value, bool(before.dims) + bool(before.second) + rows)
    out = value.new_empty(behind.count, *value.shape)
    out[0] = value
    if behind.dims and behind.dims == before.dims:
        torch.mul(jets.first, slopes[0], out=out[1 : 1 + len(behind.dims)])
    else:
        for i in behind.dims:
            torch.mul(jets.first[before.place_of(i) - 1], slopes[0], out=out[behind.place_of(i)])
    squares = []
    for number, group in enumerate(before.second):
        square = sum_squares(jets.first, [before.place_of(i) - 1 for i in group])
        place = out[behind.place_of_sum(group)]
        torch.mul(slopes[1], square, out=place)
        if jets.sums is not None:
            place.addcmul_(slopes[0], jets.sums[number])
        squares.append(square)
    return out, Bend(slopes, jets, squares, before, behind) if rows else None


def sum_squares(first: Tensor, places: list[int]) -> Tensor:
    """sum z_i^2 over some of the positions of (D, b, h)."""
    start, last = places[0], places[-1]
    if places == list(range(start, last + 1)):
        return first[start : last + 1].square().sum(0)
    return first[places].square().sum(0)


def differentiate_elementwise(part: Elementwise, z: Tensor, order: int) -> list[Tensor]:
    """f(z), f'(z), ... up to this order; in closed form for tanh, else by autograd."""
    if type(part) is nn.Tanh:
        value = torch.tanh(z)
        square = value.square()
        found = [value]
        if order > 0:
            found.append(1 - square)
        if order > 1:
            found.append((value * found[1]).mul_(-2))
        if order > 2:
            found.append(square.mul_(6).sub_(2).mul_(found[1]))
        return found
    with torch.enable_grad():
        point = z.detach().requires_grad_()
        found = [part(point)]
        for _ in range(order):
            last = found[-1]
            if not last.requires_grad:  # f is piecewise linear
                found.append(torch.zeros_like(z))
                continue
            (slope,) = torch.autograd.grad(last.sum(), point, create_graph=True, materialize_grads=True)
            found.append(slope)
    return [tensor.detach() for tensor in found]


def acts_elementwise(part: nn.Module) -> bool:
    """Whether a module without parameters maps every number by itself: torch's activations, or one of the user's.

    One of the user's is tried on a few numbers, in two shapes and two orders.
    """
    if has_hooks(part) or getattr(part, "inplace", False):
        return False
    if type(part) in ACTIVATIONS:
        return True
    known = next(part.parameters(), None) is not None or next(part.buffers(), None) is not None
    if known or next(part.children(), None) is not None or type(part).__module__.startswith("torch.nn"):
        return False
    numbers = torch.tensor([0.3, -1.1, 0.7, 2.0, -0.2, 0.05], dtype=torch.float64)
    try:
        with torch.no_grad():
            whole, single, turned = (part(t) for t in (numbers.view(2, 3), numbers.view(6, 1), numbers.flip(0)[None]))
    except Exception:  # noqa: BLE001 - whatever it is, it is no elementwise function
        return False
    same = (whole.reshape(-1), single.reshape(-1), turned.reshape(-1).flip(0))
    return all(t.shape == same[0].shape and bool((t - same[0]).abs().max() <= 1e-12) for t in same)
