"""Functions of the points alone, before and behind the layers of a network: features, and hard constraints.

With D(x) n(x) + g(x), over a set of coordinates and with D_i = dD/dx_i,

    (D n + g)_i  =  D n_i + D_i n + g_i
    sum_i (D n + g)_ii  =  D sum_i n_ii + 2 sum_i D_i n_i + n sum_i D_ii + sum_i g_ii
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.applications.residuals.plan import JetLayout
from natgrad.derivatives import exact_derivatives
from natgrad.layered_energies import has_hooks

Function = Callable[[Tensor], Tensor]


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

        Args:
            inputs: x, shape (b, d).
            layout: Which derivatives, in which order.
            jets: Of n, shape (T, b, m).
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

        Args:
            cotangents: Shape (k, T, b, m).
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

    Args:
        function: Points (b, d) -> (b, f), each by itself.
        inputs: x, shape (b, d).
        layout: Which derivatives, in which order.

    Raises:
        RuntimeError: For a function that returns no row per point.
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
    """Whether a module has nothing to train and no listeners, so that it may stand before the first layer.

    Args:
        part: The module.
    """
    return next(part.parameters(), None) is None and not any(has_hooks(one) for one in part.modules())
