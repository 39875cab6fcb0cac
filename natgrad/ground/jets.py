"""Derivatives of a network in its inputs, carried forward through its layers beside the values: Taylor mode.

With z what goes into an elementwise f, z_i = dz/dx_i and s = sum_i d^2z/dx_i^2 over a set of coordinates,

    d f(z)/dx_i  =  f'(z) z_i          sum_i d^2 f(z)/dx_i^2  =  f'(z) s + f''(z) sum_i z_i^2

and linear layers map value, z_i and s alike. One pass with 1 + d + 1 numbers in the place of each gives value,
gradient and Laplacian (Li et al. 2023, the forward Laplacian), and one pass back gives every row of their Jacobian in
the weights as a sum of outer products. Behind the first layer z_i is the same at all points and s is zero; behind the
last elementwise function only what is asked for is left.

An energy needs d^2/dx_i^2 for every i by itself. These are sums over the elementwise functions of f''(z) z_i^2 with
what the energy changes by in f(z), so that z_i goes forward and one derivative back, and no s is carried at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.linalg import is_concrete
from natgrad.ground.spaces import Params

Function = Callable[[Tensor], Tensor]

ACTIVATIONS = (
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.LogSigmoid,
    nn.Softsign, nn.Tanhshrink, nn.ReLU, nn.LeakyReLU,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.AlphaDropout)


@dataclass(frozen=True)
class Derivatives:
    """What is carried beside a unit's value, in this order: first derivatives, then sums of second ones."""

    first: tuple[int, ...] = ()  # the coordinates of the first derivatives, in order
    second: tuple[tuple[int, ...], ...] = ()  # sets of coordinates over which second derivatives are summed

    @property
    def count(self) -> int:
        """T: numbers per unit, its value with them."""
        return 1 + len(self.first) + len(self.second)

    def place_of(self, coordinate: int) -> int:
        """The position of d/dx_i among the T numbers."""
        return 1 + self.first.index(coordinate)

    def place_of_sum(self, group: tuple[int, ...]) -> int:
        """The position of a sum of second derivatives among the T numbers."""
        return 1 + len(self.first) + self.second.index(group)

    def holds(self, wish: Derivatives) -> bool:
        """True if all of a wish is among the T numbers."""
        return set(wish.first) <= set(self.first) and set(wish.second) <= set(self.second)

    def merge(self, other: Derivatives) -> Derivatives:
        """What either of them has."""
        first = tuple(sorted({*self.first, *other.first}))
        return Derivatives(first, tuple(dict.fromkeys((*self.second, *other.second))))

    @cached_property
    def inner(self) -> Derivatives:
        """What goes through the layers for it: second derivatives need the first ones on their way."""
        return self.merge(Derivatives(tuple(i for group in self.second for i in group)))


@dataclass(frozen=True)
class Affine:
    """z = W a + b, by the parameters' names; b may be None."""

    weight: str
    bias: str | None


@dataclass(frozen=True, eq=False)
class Features:
    """What a network does with its points before its first layer, without parameters: (b, d) -> (b, f)."""

    function: Function


@dataclass(frozen=True, eq=False)
class Constraint:
    """g(x) + D(x) n(x) behind the last layer: D (b, d) -> (b, 1), g (b, d) -> (b, m) or None for zero."""

    distance: Function
    values: Function | None

    def push(self, inputs: Tensor, layout: Derivatives, jets: Tensor) -> tuple[Tensor, ConstraintPass]:
        """The jets (T, b, m) of D n + g from those of n at x (b, d)."""
        factor = differentiate_map(self.distance, inputs, layout)
        out = factor[0] * jets
        out[1:] += factor[1:] * jets[0]
        for group in layout.second:
            for i in group:  # sum_i (D n)_ii has 2 D_i n_i
                out[layout.place_of_sum(group)].addcmul_(factor[layout.place_of(i)], jets[layout.place_of(i)], value=2)
        if self.values is not None:
            out += differentiate_map(self.values, inputs, layout)
        return out, ConstraintPass(factor, layout)


@dataclass(frozen=True, eq=False)
class ConstraintPass:
    """A product with a function of the point on the way: the jets (T, b, 1) of D, by which cotangents go back."""

    factor: Tensor
    layout: Derivatives

    def pull(self, cotangents: Tensor) -> Tensor:
        """The cotangents (k, T, b, m) before the product, from those behind it."""
        layout = self.layout
        out = cotangents * self.factor[0]
        out[:, 0] += (cotangents[:, 1:] * self.factor[1:]).sum(1)
        for group in layout.second:
            for i in group:
                place = layout.place_of(i)
                out[:, place].addcmul_(cotangents[:, layout.place_of_sum(group)], self.factor[place], value=2)
        return out


@dataclass(frozen=True, eq=False)
class LayerRows:
    """What a pass back tells of an affine layer: row (j, x) of W is sum_t delta_jtx a_tx^T, of b delta_j0x."""

    layer: Affine  # the layer
    inputs: Tensor  # a, shape (T, b, i)
    deltas: Tensor  # shape (k, T, b, o)


@dataclass(frozen=True, eq=False)
class JetPass:
    """One pass through a network."""

    outputs: Tensor  # the value and its derivatives, shape (T, b, m)
    layout: Derivatives  # which derivatives they are
    records: list[tuple[Affine, Tensor] | Bend | ConstraintPass]  # what each part left behind, in order
    state: Params  # the parameters by name

    def pull_back(self, cotangents: Tensor) -> list[LayerRows]:
        """The rows of J^T for cotangents (k, T, b, m) on the outputs."""
        rows, left = list[LayerRows](), sum(isinstance(record, tuple) for record in self.records)
        for record in reversed(self.records):
            if not isinstance(record, tuple):
                cotangents = record.pull(cotangents)
                continue
            layer, inputs = record
            rows.append(LayerRows(layer, inputs, cotangents[:, : len(inputs)]))
            left -= 1
            if left:
                cotangents = cotangents @ self.state[layer.weight]
        return rows


@dataclass(frozen=True, eq=False)
class LayerChain:
    """Affine maps and elementwise functions, one after the other: (b, d) -> (b, m).

    Args:
        parts: In order; the first may be features of the points, the last ones constraints.
    """

    parts: tuple[Affine | Function | Features | Constraint, ...]

    def run(self, state: Params, inputs: Tensor, wish: Derivatives, rows: bool = True) -> JetPass:
        """The values at x (b, d) with their derivatives, and with `rows` what a pass back needs; without a graph."""
        layout, records = wish.inner, list[tuple[Affine, Tensor] | Bend | ConstraintPass]()
        jets: Tensor | Jets = start_jets(inputs, layout)
        for number, part in enumerate(self.parts):
            if isinstance(part, Affine):
                if rows:
                    records.append((part, jets if isinstance(jets, Tensor) else jets.stack()))
                jets = map_linearly(part, state, jets)
            elif isinstance(part, Features):
                jets = differentiate_map(part.function, inputs, layout)
            elif isinstance(part, Constraint):
                jets, product = part.push(inputs, layout, stack_jets(jets, layout))
                records.append(product)
            else:
                before = Jets.split(jets, layout) if isinstance(jets, Tensor) else jets
                behind = wish if number == self._last_bend else layout
                jets, bend = push_through(part, before, layout, behind, rows)
                layout = behind
                records += [bend] if bend is not None else []
        return JetPass(stack_jets(jets, layout), layout, records, state)

    def scores_and_curvatures(self, state: Params, inputs: Tensor, dims: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """-dE/dx (b, N) and -d^2E/dx_i^2 (b, len(dims)) of an energy, m = 1, as functions of the parameters.

        dims: The coordinates i. None: all.
        """
        bends = self._push_jacobian(state, inputs, dims)
        delta, seconds = inputs.new_ones(len(inputs), 1), inputs.new_zeros(())
        for part in reversed(self.parts):
            if isinstance(part, Affine):
                delta = delta @ state[part.weight]
                continue
            jacobian, slope, bend = bends.pop()
            seconds = seconds - sum_weighted_squares(jacobian, delta * bend)  # dE/df(z) f''(z) (dz/dx_i)^2
            delta = delta * slope
        return -delta, seconds.expand(len(inputs), inputs.shape[1] if dims is None else len(dims))

    def _push_jacobian(
        self, state: Params, inputs: Tensor, dims: Sequence[int] | None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each elementwise f of z: dz/dx, (i, h) or (b, i, h), with f'(z) and f''(z), (b, h)."""
        jacobian: Tensor | None = None
        value, bends = inputs, list[tuple[Tensor, Tensor, Tensor]]()
        left = sum(not isinstance(part, Affine) for part in self.parts)
        for part in self.parts:
            if isinstance(part, Affine):
                weight = state[part.weight]
                value = nn.functional.linear(value, weight, None if part.bias is None else state[part.bias])
                if left and jacobian is None:
                    jacobian = weight.mT if dims is None else weight.mT[list(dims)]
                elif left and jacobian is not None:
                    jacobian = jacobian @ weight.mT
                continue
            assert not isinstance(part, (Features, Constraint))
            if jacobian is None:  # a function of x itself
                units = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
                jacobian = units if dims is None else units[list(dims)]
            value, slope, bend = differentiate_elementwise(part, value, 2)
            bends.append((jacobian, slope, bend))
            left -= 1
            if left:
                jacobian = slope.unsqueeze(1) * jacobian
        return bends

    @cached_property
    def _last_bend(self) -> int:
        """The number of the last elementwise function; -1 where a constraint behind it needs all derivatives."""
        bends = [i for i, part in enumerate(self.parts) if not isinstance(part, (Affine, Features, Constraint))]
        return bends[-1] if bends and not isinstance(self.parts[-1], Constraint) else -1


def sum_weighted_squares(jacobian: Tensor, weights: Tensor) -> Tensor:
    """sum_h w_h J_ih^2 per example, (b, i), for J (b, i, h), or (i, h) where it is the same for all examples."""
    if jacobian.dim() == 2:
        return weights @ jacobian.square().mT
    return (jacobian.square() @ weights.unsqueeze(2)).squeeze(2)


# what goes through the layers


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
    def split(stacked: Tensor, layout: Derivatives) -> Jets:
        """Jets out of the tensor (T, b, h) that has them in this order."""
        last = 1 + len(layout.first)
        return Jets(stacked[0], stacked[1:last], stacked[last:])

    def stack(self, sets: int = 0) -> Tensor:
        """(T, b, h): value, first derivatives, sums; with zeros for those that are None."""
        value = self.value.unsqueeze(0)
        parts = [value, self.first.expand(-1, *self.value.shape)]
        parts.append(value.new_zeros(sets, *self.value.shape) if self.sums is None else self.sums)
        return torch.cat(parts)


def start_jets(inputs: Tensor, layout: Derivatives) -> Jets:
    """x, the unit vectors, and no second derivatives."""
    first = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)[list(layout.first)]
    return Jets(inputs, first.unsqueeze(1), None)


def stack_jets(jets: Tensor | Jets, layout: Derivatives) -> Tensor:
    """Jets as one tensor (T, b, h) in this order."""
    return jets if isinstance(jets, Tensor) else jets.stack(len(layout.second))


def map_linearly(layer: Affine, state: Params, jets: Tensor | Jets) -> Tensor | Jets:
    """W a + b with its derivatives, from a with its own."""
    weight = state[layer.weight].mT
    if isinstance(jets, Tensor):
        out = jets @ weight
        if layer.bias is not None:
            out[0] += state[layer.bias]
        return out
    value = jets.value @ weight if layer.bias is None else torch.addmm(state[layer.bias], jets.value, weight)
    return Jets(value, jets.first @ weight, None)


def push_through(
    part: Function, jets: Jets, before: Derivatives, behind: Derivatives, rows: bool
) -> tuple[Tensor, Bend | None]:
    """f(z) with its derivatives, from z with its own."""
    order = bool(before.first) + bool(before.second) + rows
    value, *slopes = differentiate_elementwise(part, jets.value, order)
    out = value.new_empty(behind.count, *value.shape)
    out[0] = value
    if behind.first and behind.first == before.first:
        torch.mul(jets.first, slopes[0], out=out[1 : 1 + len(behind.first)])
    else:
        for i in behind.first:
            torch.mul(jets.first[before.place_of(i) - 1], slopes[0], out=out[behind.place_of(i)])
    squares = []
    for number, group in enumerate(before.second):
        square = sum_squares(jets.first, [before.place_of(i) - 1 for i in group])
        place = out[behind.place_of_sum(group)]
        torch.mul(slopes[1], square, out=place)  # f'' sum_i z_i^2 + f' s
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


@dataclass(frozen=True, eq=False)
class Bend:
    """An elementwise function on the way: its derivatives f', f'', f''' at z, shape (b, h) each, and what went in."""

    slopes: list[Tensor]  # f', f'' and f''', as many as a pass back needs
    jets: Jets  # z and its derivatives
    squares: list[Tensor]  # sum_i z_i^2 for every sum of second derivatives, shape (b, h) or (1, h) each
    before: Derivatives  # the derivatives of z
    behind: Derivatives  # those of f(z) that are kept

    def pull(self, cotangents: Tensor) -> Tensor:
        """The cotangents (k, T, b, h) before the elementwise function, from those (k, T', b, h) behind it."""
        before, jets, slope = self.before, self.jets, self.slopes[0]
        count = before.count if jets.sums is not None else 1 + len(before.first)
        k, _, b, h = cotangents.shape
        out = cotangents.new_empty(k, count, b, h)
        torch.mul(cotangents[:, 0], slope, out=out[:, 0])
        if not before.first:
            return out
        self._pull_first(cotangents, out)
        along = self._sum_along(cotangents)
        for number, (group, square) in enumerate(zip(before.second, self.squares, strict=True)):
            upper = cotangents[:, self.behind.place_of_sum(group)]
            out[:, 0].addcmul_(upper, self.slopes[2] * square)  # d/dz of f'' sum_i z_i^2
            twice = upper * (2 * self.slopes[1])
            for i in group:
                place = before.place_of(i)
                out[:, place].addcmul_(twice, jets.first[place - 1])
            if jets.sums is not None:
                torch.mul(upper, slope, out=out[:, before.place_of_sum(group)])
                product = upper * jets.sums[number]
                along = product if along is None else along.add_(product)
        if along is not None:
            out[:, 0].addcmul_(along, self.slopes[1])  # d/dz of f' z_i and of f' s
        return out

    def _pull_first(self, cotangents: Tensor, out: Tensor) -> None:
        """f' times the cotangents of the first derivatives; zeros for those that were not kept."""
        last = 1 + len(self.before.first)
        if self.behind.first == self.before.first:
            torch.mul(cotangents[:, 1:last], self.slopes[0], out=out[:, 1:last])
            return
        out[:, 1:last].zero_()
        for i in self.behind.first:
            torch.mul(cotangents[:, self.behind.place_of(i)], self.slopes[0], out=out[:, self.before.place_of(i)])

    def _sum_along(self, cotangents: Tensor) -> Tensor | None:
        """sum_i c_i z_i over the first derivatives that were kept, (k, b, h)."""
        if not self.behind.first:
            return None
        first = self.jets.first
        if self.behind.first != self.before.first:
            first = first[[self.before.place_of(i) - 1 for i in self.behind.first]]
        return (cotangents[:, 1 : 1 + len(self.behind.first)] * first).sum(1)


# functions of one number, and of the point alone


def differentiate_elementwise(function: Function, z: Tensor, order: int) -> list[Tensor]:
    """f(z), f'(z), ... up to this order, at most 3: in closed form for the commonest activations, else by torch."""
    closed = CLOSED.get(type(function))
    if closed is not None:
        return list(islice(closed(z), order + 1))
    if type(function) is nn.Softplus:
        return list(islice(differentiate_softplus(z, function), order + 1))
    if not is_concrete(z):  # inside torch.func
        return nest_gradients(function, order)(z)
    graph = z.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        point = z if graph else z.detach().requires_grad_()
        values = [function(point)]
        for _ in range(order):
            if not values[-1].requires_grad:  # f is piecewise linear
                values.append(torch.zeros_like(z))
                continue
            slope = torch.autograd.grad(values[-1].sum(), point, create_graph=True, materialize_grads=True)
            values += slope
    return values if graph else [value.detach() for value in values]


def nest_gradients(function: Function, order: int) -> Callable[[Tensor], list[Tensor]]:
    """z -> f(z), f'(z), ..., each the gradient of the sum of the one before."""
    if order == 0:
        return lambda z: [function(z)]
    lower = nest_gradients(function, order - 1)

    def sum_last(z: Tensor) -> tuple[Tensor, list[Tensor]]:
        values = lower(z)
        return values[-1].sum(), values

    def differentiate(z: Tensor) -> list[Tensor]:
        slope, values = torch.func.grad(sum_last, has_aux=True)(z)
        return [*values, slope]

    return differentiate


def differentiate_tanh(z: Tensor) -> Iterator[Tensor]:
    """tanh z, and its derivatives as far as they are asked for."""
    value = torch.tanh(z)
    yield value
    square = value.square()
    slope = 1 - square
    yield slope
    yield (value * slope).mul_(-2)
    yield square.mul_(6).sub_(2).mul_(slope)  # in place: nothing asks for three of them with a graph


def differentiate_sigmoid(z: Tensor) -> Iterator[Tensor]:
    """1 / (1 + exp(-z)), and its derivatives."""
    value = torch.sigmoid(z)
    yield value
    slope = value * (1 - value)
    yield slope
    yield slope * (1 - 2 * value)
    yield slope * (1 - 6 * slope)


def differentiate_silu(z: Tensor) -> Iterator[Tensor]:
    """z / (1 + exp(-z)), and its derivatives: z s has k s^(k-1) + z s^(k)."""
    gate = differentiate_sigmoid(z)
    below = next(gate)
    yield z * below
    for times, above in enumerate(gate, 1):
        yield times * below + z * above
        below = above


def differentiate_softplus(z: Tensor, part: Any) -> Iterator[Tensor]:
    """log(1 + exp(beta z)) / beta, and its derivatives; z itself beyond the threshold."""
    yield part(z)
    straight = part.beta * z > part.threshold
    for order, slope in enumerate(differentiate_sigmoid(part.beta * z)):
        yield torch.where(straight, 0 if order else 1, part.beta**order * slope if order else slope)


def differentiate_sqrt(z: Tensor) -> Iterator[Tensor]:
    """The root of z, with two derivatives."""
    value = z.sqrt()
    yield value
    slope = 0.5 / value
    yield slope
    yield -0.5 * slope / z


def differentiate_reciprocal(z: Tensor) -> Iterator[Tensor]:
    """1 / z, with two derivatives."""
    value = 1 / z
    yield value
    square = value.square()
    yield -square
    yield 2 * square * value


def differentiate_square(z: Tensor) -> Iterator[Tensor]:
    """z^2, with two derivatives."""
    yield z.square()
    yield 2 * z
    yield torch.full_like(z, 2)


SMOOTH: dict[str, Callable[[Tensor], Iterator[Tensor]]] = {
    "tanh": differentiate_tanh,
    "sigmoid": differentiate_sigmoid,
    "silu": differentiate_silu,
    "sqrt": differentiate_sqrt,
    "reciprocal": differentiate_reciprocal,
    "square": differentiate_square,
    "exp": lambda z: repeat(z.exp()),
    "log": lambda z: (f(z) for f in (torch.log, torch.reciprocal, lambda z: -1 / z.square())),
    "log1p": lambda z: (f(z) for f in (torch.log1p, lambda z: 1 / (1 + z), lambda z: -1 / (1 + z).square())),
    "sin": lambda z: (f(z) for f in (torch.sin, torch.cos, lambda z: -z.sin())),
    "cos": lambda z: (f(z) for f in (torch.cos, lambda z: -z.sin(), lambda z: -z.cos())),
}
"""By the names of torch's functions: z -> f and its derivatives at z, as far as they are asked for."""
CLOSED: dict[Any, Callable[[Tensor], Iterator[Tensor]]] = {
    nn.Tanh: differentiate_tanh,
    nn.Sigmoid: differentiate_sigmoid,
    nn.SiLU: differentiate_silu,
}
"""Activations whose derivatives are written out."""


def differentiate_map(function: Function, inputs: Tensor, layout: Derivatives) -> Tensor:
    """The value and the derivatives (T, b, f) of a function of each point (b, d) by itself: in forward mode."""
    value = function(inputs)
    if value.dim() != 2 or len(value) != len(inputs):
        raise RuntimeError(f"a function of points {tuple(inputs.shape)} returned {tuple(value.shape)}")
    jets = value.new_zeros(layout.count, *value.shape)
    jets[0] = value
    for i in layout.first:
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
            pair = torch.func.jvp(along, (inputs,), (unit,))
        jets[layout.place_of(i)] = pair[0]
        for group in groups:
            jets[layout.place_of_sum(group)] += pair[1]
    return jets


# which modules are chains


def read_chain(module: nn.Module, prefix: str = "") -> LayerChain | None:
    """A module, with its parameters' prefix, as affine maps and elementwise functions; None if it is not made so."""
    parts = list[Affine | Function | Features | Constraint]()
    for path, part in flatten_parts(module, prefix):
        if type(part) is nn.Linear and not has_hooks(part):
            own = dict(part.named_parameters(recurse=False))
            if "weight" not in own or any(type(p) is not nn.Parameter for p in own.values()):
                return None
            parts.append(Affine(f"{path}weight", None if part.bias is None else f"{path}bias"))
        elif acts_elementwise(part):
            parts.append(part)
        elif passes_through(part):
            continue
        elif not parts and next(part.parameters(), None) is None and not any(map(has_hooks, part.modules())):
            parts.append(Features(part))
        else:
            return None
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    linear = any(isinstance(part, Affine) for part in parts)
    return LayerChain(tuple(parts)) if linear and all(count == 1 for count in uses.values()) else None


def flatten_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of nested `nn.Sequential`s in order, each with the prefix of its parameters' names."""
    if type(module) is not nn.Sequential or has_hooks(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from flatten_parts(child, f"{prefix}{name}.")


def has_hooks(module: nn.Module) -> bool:
    """Whether something may change what goes in or comes out; this library's own hooks pass over such calls."""
    open_module: Any = module  # torch has no public list of hooks
    hooks = [*open_module._forward_hooks.values(), *open_module._forward_pre_hooks.values()]
    return any(not type(hook).__module__.startswith("natgrad.") for hook in hooks)


def passes_through(part: nn.Module) -> bool:
    """Whether it leaves (b, d) as it is."""
    if has_hooks(part):
        return False
    if type(part) in DROPOUTS:
        return not part.training
    return type(part) is nn.Identity or (type(part) is nn.Flatten and part.start_dim == 1)


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
            rows, single, turned = (part(t) for t in (numbers.view(2, 3), numbers.view(6, 1), numbers.flip(0)[None]))
    except Exception:  # noqa: BLE001 - whatever it is, it is no elementwise function
        return False
    same = (rows.reshape(-1), single.reshape(-1), turned.reshape(-1).flip(0))
    return all(t.shape == same[0].shape and bool((t - same[0]).abs().max() <= 1e-12) for t in same)
