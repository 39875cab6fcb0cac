"""Networks that meet a condition whatever their weights: values on a boundary, and periodicity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from natgrad.ground.chains import Constraint, LayerChain, has_hooks, read_chain
from natgrad.ground.checks import check_integer
from natgrad.ground.messages import show_choice

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
        return ", ".join(f"{name}={show_choice(function)}" for name, function in known.items() if function is not None)

    def forward(self, x: Tensor) -> Tensor:
        """u at points, shape (b, m), or (m,).

        Args:
            x: Shape (b, d), or one point (d,).

        Raises:
            ValueError: If the distance is not one number per point.
        """
        if x.dim() == 1:
            return self(x.unsqueeze(0)).squeeze(0)  # the functions are of points (b, d)
        values, distance = self.net(x), self.distance(x)
        if distance.shape != (*values.shape[:-1], 1):
            raise ValueError(
                f"distance returned {tuple(distance.shape)} for points {tuple(x.shape)}, expected one number for each, "
                f"{(*values.shape[:-1], 1)}: write it for a batch, lambda x: x[:, :1] * (1 - x[:, :1])"
            )
        return distance * values if self.values is None else self.values(x) + distance * values


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
        self.periods, self.harmonics = dict(periods), check_integer("harmonics", harmonics)

    def extra_repr(self) -> str:
        """The choices, for `repr`."""
        return f"periods={self.periods}, harmonics={self.harmonics}"

    def forward(self, x: Tensor) -> Tensor:
        """The features of points, shape (b, features).

        Args:
            x: Shape (b, d).
        """
        if self.periods and max(self.periods) >= x.shape[-1]:
            raise ValueError(f"periods names coordinate {max(self.periods)}, and the points have {x.shape[-1]}")
        parts = []
        for i in range(x.shape[-1]):
            coordinate = x[..., i : i + 1]
            if i not in self.periods:
                parts.append(coordinate)
                continue
            for k in range(1, self.harmonics + 1):
                angle = (2 * math.pi * k / self.periods[i]) * coordinate
                parts += [torch.cos(angle), torch.sin(angle)]
        return torch.cat(parts, dim=-1)


def network_of(module: nn.Module, prefix: str) -> LayerChain | None:
    """A module, constrained ones too, as affine maps and elementwise functions; None where it is not made of them."""
    if type(module) is not HardConstraint or has_hooks(module):
        return read_chain(module, prefix)
    if any(isinstance(function, nn.Module) for function in (module.distance, module.values)):
        return None
    inner = network_of(module.net, f"{prefix}net.")
    return inner and LayerChain((*inner.parts, Constraint(module.distance, module.values)))
