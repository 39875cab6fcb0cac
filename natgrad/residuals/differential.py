"""Differential operators on functions of one point: gradient, Jacobian, divergence, Laplacian, time derivative.

Of an unknown of `ng.residuals` at the very point that the term was given they are read from one pass through the
network (`natgrad.ground.jets`); of any other function, such as `lambda y: k(y) * ng.grad(u, y)`, they are taken in
forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from natgrad.ground.jets import Derivatives, differentiate_along
from natgrad.ground.messages import write_choices

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
        group = tuple(sorted(chosen))
        sums = u._read(x, Derivatives((), (group,)), lambda layout, jets: jets[layout.place_of_sum(group)])
        if sums is not None:
            return sums
        u = u._plain_at(x)

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
        slopes = u._read(x, Derivatives(tuple(sorted(dims))), lambda layout, jets: jets[layout.places_of(dims)])
        if slopes is not None:
            return slopes
        u = u._plain_at(x)
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


@dataclass(eq=False)
class Notes:
    """What a term asked of an unknown at its points."""

    plans: dict[int, Derivatives] = field(default_factory=dict)  # the point's position -> what was asked there
    elsewhere: bool = False  # true if it was evaluated anywhere else


ORDER = (
    "a term of ng.residuals is called as term(u, x): first its unknowns, which are functions, then one point x of "
    "shape (d,). The value there is u(x), derivatives are ng.grad(u, x), ng.jacobian(u, x) and ng.laplacian(u, x). A "
    "pde(x, u) over a batch, as DeepXDE has it, becomes lambda u, x: ..."
)
"""What to say where an unknown is taken for a tensor, or a point for a function."""
AS_TENSORS = (
    *("getitem", "iter", "len", "float", "neg", "matmul", "rmatmul", "pow", "rpow", "lt", "le", "gt", "ge"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
)
"""What tensors do and functions do not."""


class Field:
    """An unknown of `ng.residuals` as its terms see it: u(x) for one point x of shape (d,), and no batch.

    Args:
        evaluate: The network at one point.
        points: The tensors that the term was given.
        tables: The position of a point -> the values and derivatives there, shape (T, m), and their order.
        notes: Where wishes are written down; None: nowhere.
    """

    def __init__(
        self,
        evaluate: Callable[..., Tensor],
        points: tuple[Any, ...],
        tables: dict[int, tuple[Derivatives, Tensor]] | None = None,
        notes: Notes | None = None,
    ) -> None:
        self.evaluate, self.points, self.tables, self.notes = evaluate, points, tables or {}, notes

    def __repr__(self) -> str:
        return write_choices(self, at=len(self.points), tables=len(self.tables))

    def __call__(self, *args: Any) -> Tensor:
        """The network's outputs at one point.

        Args:
            *args: The network's arguments, without a batch dimension.
        """
        value = self._read(args[0], Derivatives(), lambda layout, jets: jets[0]) if len(args) == 1 else None
        if value is not None:
            return value
        if self.notes is not None and (len(args) != 1 or self._place(args[0]) is None):
            self.notes.elsewhere = True
        return self.evaluate(*args)

    def _plain_at(self, x: Tensor) -> Callable[..., Tensor]:
        """What to differentiate at a point where no table helps: derivatives there do not count as other points."""
        return self if self._place(x) is None else self.evaluate

    def _read(self, x: Any, wish: Derivatives, pick: Callable[[Derivatives, Tensor], Tensor]) -> Tensor | None:
        """What to pick from the table of a point, where it has what is wished for."""
        place = self._place(x)
        if place is None:
            return None
        if self.notes is not None:
            plans = self.notes.plans
            plans[place] = plans.get(place, Derivatives()).merge(wish)
        if place not in self.tables:
            return None
        layout, jets = self.tables[place]
        return pick(layout, jets) if layout.holds(wish) else None

    def _place(self, x: Any) -> int | None:
        return next((i for i, point in enumerate(self.points) if point is x), None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"an unknown has no {name!r}: {ORDER}")


def refuse_as_tensor(*args: Any, **kwargs: Any) -> NoReturn:
    """TypeError: an unknown is no tensor."""
    raise TypeError(ORDER)


for operation in AS_TENSORS:
    setattr(Field, f"__{operation}__", refuse_as_tensor)
setattr(Field, "__torch_function__", classmethod(refuse_as_tensor))  # noqa: B010 - what torch is given
