"""The autoencoder of one hidden unit and one weight: its error, its steps by four methods, at one point or at many.

Pascanu & Bengio 2013, section 4 and 8.4. The methods go through natgrad's metrics; `at_many` has them in closed form,
for maps of a whole window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import natgrad as ng
from natgrad.ground.linalg import solve_or_nan

Params = dict[str, Tensor]
FAMILY = ng.Gaussian(std=0.5**0.5)  # -log p is the squared error itself, up to a constant
RATES = {"gradient descent": 0.1, "natural gradient": 0.5, "covariance": 1.0, "Newton": 1.0}
DAMPINGS = {"natural gradient": 0.01, "covariance": 1.0, "Newton": 1.0}


@dataclass(frozen=True)
class Unit:
    """y = w sigmoid(w x + b) + sign b for inputs x (n, 1); the error is the mean of (x - y)^2.

    sign: -1 is the paper's (x - w sigmoid(w x + b) + b)^2 as printed, 1 the other reading, with x - (w sigmoid + b).
    The two are mirror images: the one at (b, w) with data x is the other at (b, -w) with data -x.
    """

    x: Tensor
    sign: float

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return params["w"] * torch.sigmoid(params["w"] * x + params["b"]) + self.sign * params["b"]

    def error(self, params: Params) -> Tensor:
        """The mean squared error, a scalar."""
        return (self.x - self(params, self.x)).square().mean()

    def divergence(self, params: Params, other: Params) -> Tensor:
        """KL(p_theta, p_other), a mean over the data in nats."""
        return FAMILY.kl(self(params, self.x), self(other, self.x)).mean()


def point(at: Tensor) -> Params:
    """(b, w) as named parameters."""
    return {"b": at[0], "w": at[1]}


def gradient(unit: Unit, at: Tensor) -> Tensor:
    """d error / d (b, w), shape (2,)."""
    return torch.func.grad(lambda a: unit.error(point(a)))(at)


def hessian(unit: Unit, at: Tensor) -> Tensor:
    """The Hessian of the error, (2, 2)."""
    return ng.hessian(unit, FAMILY).at(point(at), (unit.x, unit.x)).dense()


def _operator(unit: Unit, at: Tensor, method: str) -> ng.Operator:
    if method == "natural gradient":
        return ng.fisher(unit, FAMILY).at(point(at), unit.x)
    metric = ng.covariance(unit, FAMILY, centred=True) if method == "covariance" else ng.hessian(unit, FAMILY)
    return metric.at(point(at), (unit.x, unit.x))


def step(unit: Unit, at: Tensor, method: str) -> Tensor:
    """What a method takes off (b, w), with the paper's rates and dampings (section 8.4); the 2 x 2 system is exact.

    "Newton, |H|" takes the absolute values of the Hessian's eigenvalues, so that saddles do not attract it.
    """
    g = gradient(unit, at)
    if method == "gradient descent":
        return RATES[method] * g
    plain = method.removesuffix(", |H|")
    solver = ng.Direct(absolute=plain != method)
    operator = _operator(unit, at, plain)
    return RATES[plain] * ng.natural_gradient(operator, g, solver=solver, damping=DAMPINGS[plain]).value


def at_many(unit: Unit, at: Tensor, method: str) -> Tensor:
    """`step` at many points (k, 2) at once, from the definitions."""
    return torch.func.vmap(lambda a: _take_closed_step(unit, a, method))(at)


def _take_closed_step(unit: Unit, at: Tensor, method: str) -> Tensor:
    g = gradient(unit, at)
    if method == "gradient descent":
        return RATES[method] * g
    matrix = CLOSED[method](unit, at) + DAMPINGS[method] * torch.eye(2, dtype=at.dtype)
    return RATES[method] * solve_or_nan(matrix, g)


def _fisher(unit: Unit, at: Tensor) -> Tensor:
    slopes = torch.func.jacfwd(lambda a: unit(point(a), unit.x)[:, 0])(at)  # J (n, 2)
    return slopes.T @ slopes / (len(unit.x) * FAMILY.std**2)


def _covariance(unit: Unit, at: Tensor) -> Tensor:
    each = torch.func.jacfwd(lambda a: (unit.x - unit(point(a), unit.x))[:, 0].square())(at)  # g_i (n, 2)
    centred = each - each.mean(0)
    return centred.T @ centred / len(unit.x)


def _hessian(unit: Unit, at: Tensor) -> Tensor:
    return torch.func.hessian(lambda a: unit.error(point(a)))(at)


CLOSED: dict[str, Callable[[Unit, Tensor], Tensor]] = {
    "natural gradient": _fisher,
    "covariance": _covariance,
    "Newton": _hessian,
}
