"""Which derivatives of a network are wanted and carried through its layers, and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class JetLayout:
    """The order of the numbers that are carried for a unit: its value, first derivatives, sums of second ones.

    Args:
        dims: The coordinates of the first derivatives.
        second: Sets of coordinates over which second derivatives are summed.
    """

    dims: tuple[int, ...] = ()
    second: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """T: numbers per unit."""
        return 1 + len(self.dims) + len(self.second)

    def place_of(self, coordinate: int) -> int:
        """The position of d/dx_i among the T numbers."""
        return 1 + self.dims.index(coordinate)

    def place_of_sum(self, group: tuple[int, ...]) -> int:
        """The position of a sum of second derivatives among the T numbers."""
        return 1 + len(self.dims) + self.second.index(group)

    def holds(self, wish: Plan) -> bool:
        """Whether all that a plan wants is among the T numbers."""
        return set(wish.first) <= set(self.dims) and set(wish.second) <= set(self.second)


@dataclass(frozen=True)
class Plan:
    """Which derivatives of a network are wanted at a point, besides its value.

    Args:
        first: The coordinates of first derivatives.
        second: Sets of coordinates over which second derivatives are summed.
    """

    first: tuple[int, ...] = ()
    second: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def inner_layout(self) -> JetLayout:
        """What goes through the layers: second derivatives need the first ones on their way."""
        dims = {*self.first, *(i for group in self.second for i in group)}
        return JetLayout(tuple(sorted(dims)), self.second)

    @cached_property
    def outer_layout(self) -> JetLayout:
        """What is left behind the last elementwise function: nothing but what is asked for."""
        return JetLayout(tuple(sorted(self.first)), self.second)

    def merge(self, other: Plan) -> Plan:
        """What either of them wants."""
        first = tuple(sorted({*self.first, *other.first}))
        return Plan(first, tuple(dict.fromkeys((*self.second, *other.second))))
