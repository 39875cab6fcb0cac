"""Differential operators on functions of one point: gradient, Jacobian, divergence, Laplacian, time derivative.

Of an unknown of `ng.residuals` at the very point that the term was given they are read from one pass through the
network (`natgrad.ground.jets`); of any other function, such as `lambda y: k(y) * ng.grad(u, y)`, they are taken in
forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.jets import differentiate_along
from natgrad.residuals.fields import ORDER, Field

Function = Callable[[Tensor], Tensor]


def grad(u: Field | Function, x: Tensor) -> Tensor:
    """(du/dx_1, ..., du/dx_d) of a scalar u.

    Args:
        u: A function of one point with one number back.
        x: The point, shape (d,).

    Returns:
        Shape (d,).

    Raises:
        ValueError: If u has several components: their derivatives are `ng.jacobian`.

    Example:
        >>> ng.grad(lambda x: x[0] * x[1], torch.tensor([2.0, 5.0]))
        tensor([5., 2.])
    """
    slopes = first_derivatives(u, x, choose_dims(x, None))
    if slopes[0].numel() != 1:
        raise ValueError(
            f"u has shape {tuple(slopes[0].shape)} at a point, expected one number: the derivatives of several "
            "components are ng.jacobian(u, x)"
        )
    return slopes.reshape(-1)


def jacobian(u: Field | Function, x: Tensor) -> Tensor:
    """du_j/dx_i.

    Args:
        u: A function of one point, with m numbers back.
        x: The point, shape (d,).

    Returns:
        Shape (m, d); (d,) for a u without dimensions.

    Example:
        >>> ng.jacobian(lambda x: torch.stack([x[0] * x[1], x[1]]), torch.tensor([2.0, 5.0]))
        tensor([[5., 2.],
                [0., 1.]])
    """
    return first_derivatives(u, x, choose_dims(x, None)).movedim(0, -1)


def divergence_of(u: Field | Function, x: Tensor, dims: Iterable[int] | None = None) -> Tensor:
    """sum_i du_i/dx_i.

    Args:
        u: A vector field: a function of one point, as many numbers back as there are coordinates.
        x: The point, shape (d,).
        dims: The coordinates, in the order of u's components, where time is among them too. None: all.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: If u has another number of components than there are coordinates.

    Example:
        >>> ng.divergence_of(lambda x: x**2, torch.tensor([1.0, 3.0]))
        tensor(8.)
    """
    chosen = choose_dims(x, dims)
    slopes = first_derivatives(u, x, chosen)
    if slopes.shape != (len(chosen), len(chosen)):
        raise ValueError(
            f"u has shape {tuple(slopes.shape[1:])} at a point, expected ({len(chosen)},): a divergence needs one "
            "component per coordinate; name the coordinates with dims=..., or cut u: lambda y: u(y)[:2]"
        )
    return slopes.diagonal().sum()


def laplacian(u: Field | Function, x: Tensor, dims: Iterable[int] | None = None) -> Tensor:
    """sum_i d^2u/dx_i^2, of each component.

    Args:
        u: A function of one point.
        x: The point, shape (d,).
        dims: The coordinates of the sum. None: all; leave out time with `dims=range(d - 1)`.

    Returns:
        The shape of u(x).

    Example:
        >>> ng.laplacian(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        tensor(18.)
    """
    chosen = choose_dims(x, dims)
    if isinstance(u, Field):
        sums = u.read_second(x, chosen)
        if sums is not None:
            return sums
        u = u.plain_at(x)

    def second(unit: Tensor) -> Tensor:
        return differentiate_along(lambda y: differentiate_along(u, y, unit), x, unit)

    return torch.func.vmap(second)(unit_vectors(x, chosen)).sum(0)


def biharmonic(u: Field | Function, x: Tensor, dims: Iterable[int] | None = None) -> Tensor:
    """The Laplacian of the Laplacian, sum_ij d^4u/dx_i^2 dx_j^2, of each component.

    Args:
        u: A function of one point.
        x: The point, shape (d,).
        dims: The coordinates of the sum. None: all.

    Returns:
        The shape of u(x).

    Example:
        >>> ng.biharmonic(lambda x: (x**4).sum(), torch.tensor([1.0, 2.0]))
        tensor(48.)
    """
    chosen = choose_dims(x, dims)
    return laplacian(lambda y: laplacian(u, y, chosen), x, chosen)


def time_derivative(u: Field | Function, x: Tensor, time: int = -1) -> Tensor:
    """du/dt, of each component.

    Args:
        u: A function of one point.
        x: The point, shape (d,), time among its coordinates.
        time: Which coordinate time is; default the last.

    Returns:
        The shape of u(x).

    Example:
        >>> ng.time_derivative(lambda x: x[0] * x[1] ** 2, torch.tensor([1.0, 3.0]))
        tensor(6.)
    """
    return first_derivatives(u, x, choose_dims(x, [time]))[0]


def first_derivatives(u: Field | Function, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """du/dx_i for each of the coordinates, (len(dims), *shape of u)."""
    if isinstance(u, Field):
        slopes = u.read_first(x, dims)
        if slopes is not None:
            return slopes
        u = u.plain_at(x)
    return torch.func.vmap(lambda unit: differentiate_along(u, x, unit))(unit_vectors(x, dims))


def unit_vectors(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """e_i for each of the coordinates, (len(dims), d)."""
    return torch.eye(len(x), dtype=x.dtype, device=x.device)[list(dims)]


def choose_dims(x: Any, dims: Iterable[int] | None) -> tuple[int, ...]:
    """The coordinates as numbers from 0. ValueError for a point of another shape, or coordinates that it lacks."""
    if isinstance(x, Field):
        raise TypeError(ORDER)
    if not isinstance(x, Tensor) or x.dim() != 1 or not x.is_floating_point():
        came = f"a tensor {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x is {came}, expected one point: a floating-point tensor of shape (d,)")
    if dims is None:
        return tuple(range(len(x)))
    if isinstance(dims, int):
        raise TypeError(f"dims is {dims}, expected several coordinates: dims=[{dims}] for this one")
    given = tuple(dims)
    chosen = tuple(int(i) % len(x) for i in given if -len(x) <= i < len(x))
    if not given or len(set(chosen)) != len(given):
        raise ValueError(f"dims is {given}, expected different coordinates of a point of {len(x)}, from 0")
    return chosen
