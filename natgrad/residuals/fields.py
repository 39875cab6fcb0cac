"""A network as a function of one point, which reads its derivatives there from tables where they are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from natgrad.ground.jets import Derivatives
from natgrad.ground.messages import write_choices


@dataclass(eq=False)
class Notes:
    """What a term asked of an unknown at its points.

    Attributes:
        plans: The position of the point among the term's arguments -> what was asked there.
        elsewhere: Whether it was evaluated anywhere else.
    """

    plans: dict[int, Derivatives] = field(default_factory=dict)
    elsewhere: bool = False

    def note(self, place: int, plan: Derivatives) -> None:
        """Add a wish."""
        self.plans[place] = self.plans.get(place, Derivatives()).merge(plan)


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
        if len(args) != 1 or self._place(args[0]) is None:
            self._note_elsewhere()
        return self.evaluate(*args)

    def read_first(self, x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
        """du/dx_i, shape (len(dims), m), where a table has them.

        Args:
            x: The point.
            dims: The coordinates.
        """
        return self._read(x, Derivatives(tuple(sorted(dims))), lambda layout, jets: jets[layout.places_of(dims)])

    def read_second(self, x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
        """sum_i d^2u/dx_i^2, shape (m,), where a table has it.

        Args:
            x: The point.
            dims: The coordinates.
        """
        group = tuple(sorted(dims))
        return self._read(x, Derivatives((), (group,)), lambda layout, jets: jets[layout.place_of_sum(group)])

    def plain_at(self, x: Tensor) -> Callable[..., Tensor]:
        """What to differentiate at a point where no table helps: derivatives there do not count as other points.

        Args:
            x: The point.
        """
        return self if self._place(x) is None else self.evaluate

    def _read(self, x: Any, wish: Derivatives, pick: Callable[[Derivatives, Tensor], Tensor]) -> Tensor | None:
        place = self._place(x)
        if place is None:
            return None
        if self.notes is not None:
            self.notes.note(place, wish)
        if place not in self.tables:
            return None
        layout, jets = self.tables[place]
        return pick(layout, jets) if layout.holds(wish) else None

    def _place(self, x: Any) -> int | None:
        return next((i for i, point in enumerate(self.points) if point is x), None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"an unknown has no {name!r}: {ORDER}")

    def _note_elsewhere(self) -> None:
        if self.notes is not None:
            self.notes.elsewhere = True


def refuse_as_tensor(*args: Any, **kwargs: Any) -> NoReturn:
    """TypeError: an unknown is no tensor."""
    raise TypeError(ORDER)


for operation in AS_TENSORS:
    setattr(Field, f"__{operation}__", refuse_as_tensor)
setattr(Field, "__torch_function__", classmethod(refuse_as_tensor))  # noqa: B010 - what torch is given
