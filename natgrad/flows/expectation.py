"""Expected values E[f(x)] as functions of natural parameters: what a flow goes down or up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, Ising, MultivariateNormal
from natgrad.ground.linalg import factor_or_nan, invert_or_nan

Function = Callable[[Tensor], Tensor]  # of points (..., n) -> (...)


def expected_value(family: ExponentialFamily, f: Callable[[Tensor], Tensor], nodes: int = 8) -> Function:
    """F(theta) = E[f(x)] with gradients.

    Exact over the states of an `Ising`; by Gauss-Hermite quadrature with nodes^d points for a `MultivariateNormal`,
    exact for polynomials of degree up to 2 nodes - 1 in every variable.

    Args:
        family: `Ising` or `MultivariateNormal`.
        f: A function of a batch (m, d) -> (m,).
        nodes: Of the quadrature, per variable.

    Returns:
        A function of natural parameters (..., n) -> (...).

    Raises:
        ValueError: If the family is another.

    Example:
        >>> family = ng.Ising(2, [(0,), (1,)])
        >>> F = ng.flows.expected_value(family, lambda x: x.prod(1))
        >>> float(F(torch.zeros(2)))
        0.0
    """
    if isinstance(family, Ising):
        states = family.states
        values = evaluate_rows(f, states)
        return lambda theta: family.probabilities(theta) @ values.to(theta)
    if isinstance(family, MultivariateNormal):
        points, weights = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(nodes))
        z = torch.cartesian_prod(*[points] * family.d).view(-1, family.d)
        shares = torch.cartesian_prod(*[weights / weights.sum()] * family.d).view(-1, family.d).prod(1)

        def average(theta: Tensor) -> Tensor:
            covariance = invert_or_nan(family.precision(theta))
            mean = (covariance @ theta[..., : family.d].unsqueeze(-1)).squeeze(-1)
            x = mean.unsqueeze(-2) + z.to(theta) @ factor_or_nan(covariance).mT  # (..., m, d)
            values = evaluate_rows(f, x.reshape(-1, family.d)).view(x.shape[:-1])
            return values.to(theta) @ shares.to(theta)

        return average
    raise ValueError(
        f"expected_value knows Ising and MultivariateNormal, not {family!r}: take MultivariateNormal(1) for normals, "
        "or write F(theta) as a function"
    )


def evaluate_rows(f: Callable, x: Tensor) -> Tensor:
    """f(x) (m,) of x (m, d). ValueError unless it is a tensor of a number per row."""
    values = f(x)
    if not isinstance(values, Tensor) or values.numel() != len(x):
        came = f"a tensor {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"f returned {came} for x of shape {tuple(x.shape)}, expected a tensor ({len(x)},), a number per row: "
            "lambda x: (x[:, 0] - 1) ** 2"
        )
    return values.reshape(-1)
