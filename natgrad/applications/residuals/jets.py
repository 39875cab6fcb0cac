"""Derivatives of a network in its inputs, carried forward through its layers beside the values: Taylor mode.

With z what goes into an elementwise f, z_i = dz/dx_i and s = sum_i d^2z/dx_i^2 over a set of coordinates,

    d f(z)/dx_i  =  f'(z) z_i          sum_i d^2 f(z)/dx_i^2  =  f'(z) s + f''(z) sum_i z_i^2

and linear layers map value, z_i and s alike. One pass with 1 + d + 1 numbers in the place of each gives value,
gradient and Laplacian (Li et al. 2023, the forward Laplacian), and one pass back gives every row of their Jacobian in
the weights as a sum of outer products. Behind the first layer z_i is the same at all points and s is zero; behind the
last elementwise function only what a term asks for is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from natgrad.applications.residuals.conditions import HardConstraint
from natgrad.applications.residuals.elementwise import Bend, Elementwise, Jets, acts_elementwise, push_through
from natgrad.applications.residuals.plan import JetLayout, Plan
from natgrad.applications.residuals.point_maps import (
    Constraint,
    ConstraintPass,
    Features,
    differentiate_map,
    is_feature_map,
)
from natgrad.layered_energies import Affine, flatten_parts, has_hooks, passes_through


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

        Args:
            cotangents: Shape (k, T, b, m).

        Returns:
            One entry per affine layer.
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

        Args:
            state: The parameters by name.
            inputs: x, shape (b, d).
            plan: Which derivatives.
            rows: Whether a pass back will follow, which takes one derivative more of the elementwise functions.
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
