"""Derivatives of a network in its inputs, carried forward through its layers beside the values: Taylor mode.

With z what goes into an elementwise f, z_i = dz/dx_i and s = sum_i d^2z/dx_i^2 over a set of coordinates,

    d f(z)/dx_i  =  f'(z) z_i          sum_i d^2 f(z)/dx_i^2  =  f'(z) s + f''(z) sum_i z_i^2

and linear layers map value, z_i and s alike. One pass with 1 + d + 1 numbers in the place of each gives value,
gradient and Laplacian (Li et al. 2023, the forward Laplacian), and one pass back gives every row of their Jacobian in
the weights as a sum of outer products. Behind the first layer z_i is the same at all points and s is zero; behind the
last elementwise function only what a term asks for is left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from natgrad.ground.densities import ACTIVATIONS, Affine, flatten_parts, has_hooks, passes_through
from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.messages import show_choice
from natgrad.residuals.plan import JetLayout, Plan

Function = Callable[[Tensor], Tensor]


class HardConstraint(nn.Module):
    """u(x) = g(x) + D(x) net(x): u = g wherever D = 0, whatever the weights.

    Args:
        net: A network, (b, d) -> (b, m).
        distance: D, points (b, d) -> (b, 1): zero on the boundary and nowhere else, such as x (1 - x).
        values: g, points (b, d) -> (b, m). None: 0.

    Reference:
        Lagaris, Likas & Fotiadis 1998, eq. 2.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> u = ng.residuals.HardConstraint(net, lambda x: x * (1 - x))
        >>> u(torch.tensor([[0.0], [1.0]])).abs().max().item()
        0.0
    """

    def __init__(self, net: nn.Module, distance: Function, values: Function | None = None) -> None:
        super().__init__()
        for name, function in (("distance", distance), ("values", values)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {type(function).__name__}, expected a function of points (b, d)")
        self.net, self.distance, self.values = net, distance, values

    def extra_repr(self) -> str:
        """The functions, before the network, for `repr`."""
        known = {"distance": self.distance, "values": self.values}
        return ", ".join(f"{name}={show_choice(one)}" for name, one in known.items() if one is not None)

    def forward(self, x: Tensor) -> Tensor:
        """u at points.

        Args:
            x: Shape (b, d), or one point (d,).

        Returns:
            Shape (b, m), or (m,).

        Raises:
            ValueError: If the distance is not one number per point.
        """
        if x.dim() == 1:
            return self(x.unsqueeze(0)).squeeze(0)  # the functions are of points (b, d)
        found, distance = self.net(x), self.distance(x)
        if distance.shape != (*found.shape[:-1], 1):
            raise ValueError(
                f"distance returned {tuple(distance.shape)} for points {tuple(x.shape)}, expected one number for each, "
                f"{(*found.shape[:-1], 1)}: write it for a batch, lambda x: x[:, :1] * (1 - x[:, :1])"
            )
        return distance * found if self.values is None else self.values(x) + distance * found


class Periodic(nn.Module):
    """The coordinates with some of them as (cos, sin) of whole periods: what follows is periodic in these.

    Other coordinates pass through. The result has, in order, one number for each of those and two times `harmonics` for
    each periodic one.

    Args:
        periods: Coordinate -> its period.
        harmonics: cos and sin of 1, 2, ... times the angle.

    Reference:
        Dong & Ni 2021.

    Example:
        >>> embed = ng.residuals.Periodic({0: 2.0})
        >>> embed(torch.tensor([[0.5, 3.0], [2.5, 3.0]])).round(decimals=3).abs()
        tensor([[0., 1., 3.],
                [0., 1., 3.]])
    """

    def __init__(self, periods: Mapping[int, float], harmonics: int = 1) -> None:
        super().__init__()
        for coordinate, period in periods.items():
            if not isinstance(coordinate, int) or coordinate < 0 or not 0 < period < math.inf:
                raise ValueError(f"periods has {coordinate!r}: {period!r}, expected a coordinate and a period > 0")
        if harmonics < 1:
            raise ValueError(f"harmonics is {harmonics}, expected an integer >= 1")
        self.periods, self.harmonics = dict(periods), harmonics

    def extra_repr(self) -> str:
        """The choices, for `repr`."""
        return f"periods={self.periods}, harmonics={self.harmonics}"

    def forward(self, x: Tensor) -> Tensor:
        """The features of points.

        Args:
            x: Shape (b, d).

        Returns:
            Shape (b, features).
        """
        if self.periods and max(self.periods) >= x.shape[-1]:
            raise ValueError(f"periods names coordinate {max(self.periods)}, and the points have {x.shape[-1]}")
        parts = []
        for i in range(x.shape[-1]):
            one = x[..., i : i + 1]
            if i not in self.periods:
                parts.append(one)
                continue
            for k in range(1, self.harmonics + 1):
                angle = (2 * math.pi * k / self.periods[i]) * one
                parts += [torch.cos(angle), torch.sin(angle)]
        return torch.cat(parts, dim=-1)


# Functions of the points alone, before and behind the layers of a network: features, and hard constraints


@dataclass(frozen=True, eq=False)
class Features:
    """What a network does with its points before its first layer, without parameters.

    Args:
        function: Points (b, d) -> (b, f), each by itself.
    """

    function: Function


@dataclass(frozen=True, eq=False)
class Constraint:
    """g(x) + D(x) n(x), behind the last layer.

    Args:
        distance: D, points (b, d) -> (b, 1).
        values: g, points (b, d) -> (b, m). None: 0.
    """

    distance: Function
    values: Function | None

    def push(self, inputs: Tensor, layout: JetLayout, jets: Tensor) -> tuple[Tensor, ConstraintPass]:
        """The jets (T, b, m) of D n + g from those of n.

        inputs: x, (b, d). jets: Of n, (T, b, m).
        """
        factor = differentiate_map(self.distance, inputs, layout)
        out = factor[0] * jets
        out[1:] += factor[1:] * jets[0]
        for group in layout.second:
            for i in group:
                out[layout.place_of_sum(group)].addcmul_(factor[layout.place_of(i)], jets[layout.place_of(i)], value=2)
        if self.values is not None:
            out += differentiate_map(self.values, inputs, layout)
        return out, ConstraintPass(factor, layout)


@dataclass(frozen=True, eq=False)
class ConstraintPass:
    """A product with a function of the point on the way: what its pass back needs.

    Args:
        factor: The jets of D, shape (T, b, 1).
        layout: Their order.
    """

    factor: Tensor
    layout: JetLayout

    def pull(self, cotangents: Tensor) -> Tensor:
        """The cotangents (k, T, b, m) before the product, from those behind it.

        cotangents: (k, T, b, m).
        """
        layout = self.layout
        out = cotangents * self.factor[0]
        out[:, 0] += (cotangents[:, 1:] * self.factor[1:]).sum(1)
        for group in layout.second:
            for i in group:
                place = layout.place_of(i)
                out[:, place].addcmul_(cotangents[:, layout.place_of_sum(group)], self.factor[place], value=2)
        return out


def differentiate_map(function: Function, inputs: Tensor, layout: JetLayout) -> Tensor:
    """A function's value and derivatives at points, (T, b, f): in forward mode, all points at once.

    function: Points (b, d) -> (b, f), each by itself. inputs: x, (b, d).
    """
    value = function(inputs)
    if value.dim() != 2 or len(value) != len(inputs):
        raise RuntimeError(f"a function of points {tuple(inputs.shape)} returned {tuple(value.shape)}")
    jets = value.new_zeros(layout.count, *value.shape)
    jets[0] = value
    for i in layout.dims:
        unit = torch.zeros_like(inputs)
        unit[:, i] = 1

        def along(x: Tensor, unit: Tensor = unit) -> Tensor:
            with exact_derivatives():
                return torch.func.jvp(function, (x,), (unit,))[1]

        groups = [group for group in layout.second if i in group]
        if not groups:
            jets[layout.place_of(i)] = along(inputs)
            continue
        with exact_derivatives():
            both = torch.func.jvp(along, (inputs,), (unit,))
        jets[layout.place_of(i)] = both[0]
        for group in groups:
            jets[layout.place_of_sum(group)] += both[1]
    return jets


def is_feature_map(part: nn.Module) -> bool:
    """Whether a module has nothing to train and no listeners, so that it may stand before the first layer."""
    return next(part.parameters(), None) is None and not any(has_hooks(one) for one in part.modules())


# Elementwise functions on the way of a network's values and derivatives, forward and back

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

        stacked: (T, b, h).
        """
        last = 1 + len(layout.dims)
        return Jets(stacked[0], stacked[1:last], stacked[last:])

    def stack(self, sets: int = 0) -> Tensor:
        """(T, b, h): value, first derivatives, sums; with zeros for those that are None."""
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

        cotangents: (k, T', b, h), by `behind`.
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
    """f(z) with its derivatives, from z with its own."""
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


# Derivatives of a network in its inputs, carried forward through its layers beside the values: Taylor mode


@dataclass(frozen=True, eq=False)
class LayerRows:
    """What one pass back tells of an affine layer: row (j, x) of W is sum_t delta_jtx a_tx^T, of b delta_j0x.

    Args:
        layer: The layer.
        inputs: a, shape (T, b, i).
        deltas: Shape (k, T, b, o).
    """

    layer: Affine
    inputs: Tensor
    deltas: Tensor


Record = tuple[Affine, Tensor] | Bend | ConstraintPass


@dataclass(frozen=True, eq=False)
class JetPass:
    """One pass through a network.

    Args:
        outputs: The value and its derivatives, shape (T, b, m).
        layout: Which derivatives they are.
        records: What each part left behind, in order.
        state: The parameters by name.
    """

    outputs: Tensor
    layout: JetLayout
    records: list[Record]
    state: Mapping[str, Tensor]

    def pull_back(self, cotangents: Tensor) -> list[LayerRows]:
        """The rows of J^T for cotangents on the outputs.

        cotangents: (k, T, b, m).
        """
        found, now = list[LayerRows](), cotangents
        count = sum(isinstance(one, tuple) for one in self.records)
        for record in reversed(self.records):
            if not isinstance(record, tuple):
                now = record.pull(now)
                continue
            layer, inputs = record
            found.append(LayerRows(layer, inputs, now[:, : len(inputs)]))
            if len(found) < count:
                now = now @ self.state[layer.weight]
        return found


Part = Affine | Elementwise | Features | Constraint


@dataclass(frozen=True, eq=False)
class LayerChain:
    """Affine maps and elementwise functions, one after the other: (b, d) -> (b, m).

    Args:
        parts: In order; the first may be features of the points, the last ones constraints.
    """

    parts: tuple[Part, ...]

    def run(self, state: Mapping[str, Tensor], inputs: Tensor, plan: Plan, rows: bool = True) -> JetPass:
        """Values and derivatives.

        inputs: x, (b, d).
        """
        now, layout, records = start_jets(inputs, plan.inner_layout), plan.inner_layout, list[Record]()
        for number, part in enumerate(self.parts):
            if isinstance(part, Affine):
                if rows:
                    records.append((part, now if isinstance(now, Tensor) else now.stack()))
                now = map_linearly(part, state, now)
            elif isinstance(part, Features):
                now = differentiate_map(part.function, inputs, layout)
            elif isinstance(part, Constraint):
                now, product = part.push(inputs, layout, stack(now, layout))
                records.append(product)
            else:
                jets = Jets.split(now, layout) if isinstance(now, Tensor) else now
                behind = plan.outer_layout if number == self._last_bend else layout
                now, bend = push_through(part, jets, layout, behind, rows)
                layout = behind
                records += [bend] if bend is not None else []
        return JetPass(stack(now, layout), layout, records, state)

    @cached_property
    def _last_bend(self) -> int:
        """The number of the last elementwise function; -1 where a constraint behind it needs all derivatives."""
        bends = [i for i, part in enumerate(self.parts) if not isinstance(part, (Affine, Features, Constraint))]
        return bends[-1] if bends and not isinstance(self.parts[-1], Constraint) else -1


def start_jets(inputs: Tensor, layout: JetLayout) -> Jets:
    """x, the unit vectors, and no second derivatives."""
    first = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)[list(layout.dims)]
    return Jets(inputs, first.unsqueeze(1), None)


def map_linearly(layer: Affine, state: Mapping[str, Tensor], now: Tensor | Jets) -> Tensor | Jets:
    """W a + b with its derivatives, from a with its own."""
    weight = state[layer.weight].mT
    if isinstance(now, Tensor):
        out = now @ weight
        if layer.bias is not None:
            out[0] += state[layer.bias]
        return out
    value = now.value @ weight if layer.bias is None else torch.addmm(state[layer.bias], now.value, weight)
    return Jets(value, now.first @ weight, None)


def stack(now: Tensor | Jets, layout: JetLayout) -> Tensor:
    """Jets as one tensor (T, b, h) in this order."""
    return now if isinstance(now, Tensor) else now.stack(len(layout.second))


def network_of(module: nn.Module, prefix: str) -> LayerChain | None:
    """A module as affine maps and elementwise functions, or None where it is not made of them."""
    if type(module) is HardConstraint and not has_hooks(module):
        plain = not any(isinstance(one, nn.Module) for one in (module.distance, module.values))
        inner = network_of(module.net, f"{prefix}net.") if plain else None
        return inner and LayerChain((*inner.parts, Constraint(module.distance, module.values)))
    parts = list[Part]()
    for path, part in flatten_parts(module, prefix):
        if type(part) is nn.Linear and not has_hooks(part):
            if any(type(p) is not nn.Parameter for p in part.parameters(recurse=False)) or "weight" not in dict(
                part.named_parameters(recurse=False)
            ):
                return None
            parts.append(Affine(f"{path}weight", None if part.bias is None else f"{path}bias"))
        elif acts_elementwise(part):
            parts.append(part)
        elif not parts and is_feature_map(part) and not passes_through(part):
            parts.append(Features(part))
        elif not passes_through(part):
            return None
    uses = Counter(id(p) for p in (q for _, q in module.named_parameters(remove_duplicate=False)))
    linear = any(isinstance(part, Affine) for part in parts)
    return LayerChain(tuple(parts)) if linear and not any(count > 1 for count in uses.values()) else None
