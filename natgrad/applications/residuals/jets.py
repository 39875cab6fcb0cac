"""Derivatives of a network in its inputs, carried forward through its layers beside the values: Taylor mode.

With z what goes into an elementwise f, z_i = dz/dx_i and s = sum_i d^2z/dx_i^2 over a set of coordinates,

    d f(z)/dx_i  =  f'(z) z_i          sum_i d^2 f(z)/dx_i^2  =  f'(z) s + f''(z) sum_i z_i^2

and linear layers map value, z_i and s alike. One pass with 1 + d + 1 numbers in the place of each gives value,
gradient and Laplacian (Li et al. 2023, the forward Laplacian), and one pass back gives every row of their Jacobian in
the weights as a sum of outer products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.applications.residuals.conditions import HardConstraint
from natgrad.applications.residuals.plan import Plan
from natgrad.applications.residuals.point_maps import (
    Constraint,
    ConstraintPass,
    Features,
    differentiate_map,
    is_feature_map,
)
from natgrad.layered_energies import ACTIVATIONS, Affine, flatten_parts, has_hooks, passes_through

Elementwise = Callable[[Tensor], Tensor]


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


@dataclass(frozen=True, eq=False)
class Bend:
    """An elementwise function on the way: its derivatives f', f'', f''' at z, shape (b, h) each, and what went in.

    Args:
        slopes: f', f'' and f''', as many as the plan needs for a pass back.
        jets: z and its derivatives, shape (T, b, h).
        squares: sum_i z_i^2 for every sum of second derivatives, shape (b, h) each.
    """

    slopes: list[Tensor]
    jets: Tensor
    squares: list[Tensor]


Record = tuple[Affine, Tensor] | Bend | ConstraintPass


@dataclass(frozen=True, eq=False)
class JetPass:
    """One pass through a network.

    Args:
        outputs: The value and its derivatives, shape (T, b, m).
        records: What each part left behind, in order.
        plan: Which derivatives they are.
        state: The parameters by name.
    """

    outputs: Tensor
    records: list[Record]
    plan: Plan
    state: Mapping[str, Tensor]

    def pull_back(self, cotangents: Tensor) -> list[LayerRows]:
        """The rows of J^T for cotangents on the outputs.

        Args:
            cotangents: Shape (k, T, b, m).

        Returns:
            One entry per affine layer.
        """
        found, now = list[LayerRows](), cotangents
        for record in reversed(self.records):
            if isinstance(record, Bend):
                now = pull_through(record, self.plan, now)
                continue
            if isinstance(record, ConstraintPass):
                now = record.pull(self.plan, now)
                continue
            layer, inputs = record
            found.append(LayerRows(layer, inputs, now))
            if len(found) < sum(isinstance(one, tuple) for one in self.records):
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

        Args:
            state: The parameters by name.
            inputs: x, shape (b, d).
            plan: Which derivatives.
            rows: Whether a pass back will follow, which takes one derivative more of the elementwise functions.
        """
        jets, records = start_jets(inputs, plan), list[Record]()
        for part in self.parts:
            if isinstance(part, Features):
                jets = differentiate_map(part.function, inputs, plan)
                continue
            if isinstance(part, Constraint):
                jets, product = part.push(inputs, plan, jets)
                records.append(product)
                continue
            if isinstance(part, Affine):
                records.append((part, jets))
                jets = jets @ state[part.weight].mT
                if part.bias is not None:
                    jets[0] += state[part.bias]
                continue
            jets, record = push_through(part, plan, jets, rows)
            records.append(record)
        return JetPass(jets, records, plan, state)


def start_jets(inputs: Tensor, plan: Plan) -> Tensor:
    """x, the unit vectors and zeros, (T, b, d)."""
    jets = inputs.new_zeros(plan.count, *inputs.shape)
    jets[0] = inputs
    for place, coordinate in enumerate(plan.dims):
        jets[1 + place, :, coordinate] = 1
    return jets


def push_through(part: Elementwise, plan: Plan, jets: Tensor, rows: bool) -> tuple[Tensor, Bend]:
    """f(z) with its derivatives, from z with its own, (T, b, h)."""
    value, *slopes = differentiate_elementwise(part, jets[0], bool(plan.dims) + bool(plan.second) + rows)
    out = torch.empty_like(jets)
    out[0] = value
    squares = []
    if plan.dims:
        torch.mul(jets[1:], slopes[0], out=out[1:])
    for group in plan.second:
        square = sum_of_squares(jets, [plan.place_of(i) for i in group])
        out[plan.place_of_sum(group)].addcmul_(slopes[1], square)
        squares.append(square)
    return out, Bend(slopes, jets, squares)


def pull_through(bend: Bend, plan: Plan, cotangents: Tensor) -> Tensor:
    """The cotangents (k, T, b, h) before the elementwise function, from those behind it."""
    out = cotangents * bend.slopes[0]
    if not plan.dims:
        return out
    along = (cotangents[:, 1:] * bend.jets[1:]).sum(1) * bend.slopes[1]
    for group, square in zip(plan.second, bend.squares, strict=True):
        upper = cotangents[:, plan.place_of_sum(group)]
        along.addcmul_(upper, bend.slopes[2] * square)
        twice = 2 * upper * bend.slopes[1]
        for i in group:
            out[:, plan.place_of(i)].addcmul_(twice, bend.jets[plan.place_of(i)])
    out[:, 0] += along
    return out


def sum_of_squares(jets: Tensor, places: Sequence[int]) -> Tensor:
    """sum z_i^2 over some of the positions of (T, b, h)."""
    first, last = places[0], places[-1]
    if list(places) == list(range(first, last + 1)):
        return jets[first : last + 1].square().sum(0)
    return jets[list(places)].square().sum(0)


def differentiate_elementwise(part: Elementwise, z: Tensor, order: int) -> list[Tensor]:
    """f(z), f'(z), ... up to this order; in closed form for tanh and the sine, else by autograd."""
    if type(part) is nn.Tanh:
        value = torch.tanh(z)
        first = 1 - value.square()
        found = [value, first]
        if order > 1:
            found.append(-2 * value * first)
        if order > 2:
            found.append(first * (6 * value.square() - 2))
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


def network_of(module: nn.Module, prefix: str) -> LayerChain | None:
    """A module as affine maps and elementwise functions, or None where it is not made of them.

    Args:
        module: The module.
        prefix: What its parameters' names start with.
    """
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
