"""Networks that are chains of affine maps and elementwise functions: their derivatives, and rows of the Jacobian.

One pass forward carries derivatives in the inputs (`natgrad.ground.jets`), one pass back gives every row of their
Jacobian in the weights as a sum of outer products. Behind the last elementwise function only what is asked for is left.

An energy needs d^2/dx_i^2 for every i by itself. These are sums over the elementwise functions of f''(z) z_i^2 with
what the energy changes by in f(z), so that z_i goes forward and one derivative back, and no sum is carried at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.jets import (
    Derivatives,
    bend_jets,
    differentiate_elementwise,
    differentiate_map,
    map_layer,
    pull_bend,
    start_jets,
    wrap_jets,
)
from natgrad.ground.pure import DROPOUTS, Hook, computes_as
from natgrad.ground.spaces import Params

Function = Callable[[Tensor], Tensor]

ACTIVATIONS = (
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.LogSigmoid,
    nn.Softsign, nn.Tanhshrink, nn.ReLU, nn.LeakyReLU,
)  # fmt: skip


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

    def push(self, inputs: Tensor, layout: Derivatives, jets: Tensor) -> Tensor:
        """D n + g with its derivatives, from n with its own at x (b, d)."""
        product = wrap_jets(differentiate_map(self.distance, inputs, layout), layout) * wrap_jets(jets, layout)
        return product.jets if self.values is None else differentiate_map(self.values, inputs, layout) + product.jets


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
    records: list[tuple[Affine, Tensor] | Function]  # each layer with what went in, and the ways back of the others
    state: Params  # the parameters by name

    def pull_back(self, cotangents: Tensor) -> list[LayerRows]:
        """The rows of J^T for cotangents (k, T, b, m) on the outputs."""
        rows, left = list[LayerRows](), sum(isinstance(record, tuple) for record in self.records)
        for record in reversed(self.records):
            if not isinstance(record, tuple):
                cotangents = record(cotangents)
                continue
            layer, inputs = record
            rows.append(LayerRows(layer, inputs, cotangents[:, : len(inputs)]))
            left -= 1
            if left:
                cotangents = cotangents @ self.state[layer.weight]
        return rows


@dataclass(frozen=True, eq=False)
class LayerChain:
    """Affine maps and elementwise functions, one after the other: (b, d) -> (b, m)."""

    # in order; the first may be features of the points, the last ones constraints
    parts: tuple[Affine | Function | Features | Constraint, ...]

    @torch.no_grad()
    def run(self, state: Params, inputs: Tensor, wish: Derivatives, rows: bool = True) -> JetPass:
        """The values at x (b, d) with their derivatives, and with `rows` what a pass back needs; without a graph."""
        layout, records, jets = wish.inner, list[tuple[Affine, Tensor] | Function](), None
        order, last = bool(layout.first) + bool(layout.second) + rows, self._find_last_bend()
        for number, part in enumerate(self.parts):
            if isinstance(part, Affine):
                if rows:  # of the points themselves there are no sums
                    records.append((part, start_jets(inputs, Derivatives(layout.first)) if jets is None else jets))
                jets = map_affine(part, state, inputs, jets, layout)
            elif isinstance(part, Features):
                jets = differentiate_map(part.function, inputs, layout)
            elif isinstance(part, Constraint):
                jets = start_jets(inputs, layout) if jets is None else jets
                push = partial(part.push, inputs, layout)
                if rows:
                    pull = torch.func.vjp(push, jets)[1]
                    records.append(torch.func.vmap(lambda cotangents, pull=pull: pull(cotangents)[0]))
                jets = push(jets)
            else:
                jets = start_jets(inputs, layout) if jets is None else jets
                slopes = differentiate_elementwise(part, jets[0], order)
                chosen = layout.select(wish) if number == last and wish != layout else None
                records += [partial(pull_bend, jets, layout, slopes, chosen)] * rows
                jets, layout = bend_jets(jets, layout, slopes, chosen), layout if chosen is None else wish
        assert jets is not None
        return JetPass(jets, layout, records, state)

    def _find_last_bend(self) -> int:
        """The number of the last elementwise function; -1 where a constraint behind it needs all derivatives."""
        bends = [i for i, part in enumerate(self.parts) if not isinstance(part, (Affine, Features, Constraint))]
        return bends[-1] if bends and not isinstance(self.parts[-1], Constraint) else -1

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
        value, bends, last = inputs, list[tuple[Tensor, Tensor, Tensor]](), self._find_last_bend()
        for number, part in enumerate(self.parts[: last + 1]):
            if isinstance(part, Affine):
                weight = state[part.weight]
                value = nn.functional.linear(value, weight, None if part.bias is None else state[part.bias])
                if jacobian is not None:
                    jacobian = jacobian @ weight.mT
                else:
                    jacobian = weight.mT if dims is None else weight.mT[list(dims)]
                continue
            assert not isinstance(part, (Features, Constraint))
            if jacobian is None:  # a function of x itself
                units = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
                jacobian = units if dims is None else units[list(dims)]
            value, slope, bend = differentiate_elementwise(part, value, 2)
            bends.append((jacobian, slope, bend))
            if number < last:
                jacobian = slope.unsqueeze(1) * jacobian
        return bends


def map_affine(layer: Affine, state: Params, inputs: Tensor, jets: Tensor | None, layout: Derivatives) -> Tensor:
    """W a + b with its derivatives, (T, b, o), from a with its own; from the points themselves for None."""
    weight, bias = state[layer.weight], None if layer.bias is None else state[layer.bias]
    if jets is not None:
        return map_layer(jets, weight, bias)
    image = inputs.new_zeros(layout.count, len(inputs), len(weight))
    image[0] = nn.functional.linear(inputs, weight, bias)
    image[1 : 1 + len(layout.first)] = weight.mT[list(layout.first)].unsqueeze(1)  # the same at all points
    return image


def sum_weighted_squares(jacobian: Tensor, weights: Tensor) -> Tensor:
    """sum_h w_h J_ih^2 per example, (b, i), for J (b, i, h), or (i, h) where it is the same for all examples."""
    if jacobian.dim() == 2:
        return weights @ jacobian.square().mT
    return (jacobian.square() @ weights.unsqueeze(2)).squeeze(2)


# which modules are chains


def read_chain(module: nn.Module, prefix: str = "") -> LayerChain | None:
    """A module, with its parameters' prefix, as affine maps and elementwise functions; None if it is not made so."""
    parts = list[Affine | Function | Features | Constraint]()
    for path, part in flatten_parts(module, prefix):
        if computes_as(part, nn.Linear) and not has_hooks(part):
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
    if not computes_as(module, nn.Sequential) or has_hooks(module):
        yield prefix, module
        return
    for name, child in vars(module)["_modules"].items():  # `named_children` leaves out a part's second use
        yield from flatten_parts(child, f"{prefix}{name}.")


def has_hooks(module: nn.Module) -> bool:
    """Whether something may change what goes in or comes out; this library's own hooks pass over such calls."""
    open_module: Any = module  # torch has no public list of hooks
    hooks = [*open_module._forward_hooks.values(), *open_module._forward_pre_hooks.values()]
    return not all(map(Hook.stands_behind, hooks))


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
