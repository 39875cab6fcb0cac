"""Which derivatives of a network are carried through its layers, and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
    def dims(self) -> tuple[int, ...]:
        """All coordinates along which derivatives are carried."""
        return tuple(sorted({*self.first, *(i for group in self.second for i in group)}))

    @cached_property
    def count(self) -> int:
        """T: numbers carried per unit."""
        return 1 + len(self.dims) + len(self.second)

    def merge(self, other: Plan) -> Plan:
        """What either of them wants.

        Args:
            other: The other plan.
        """
        first = tuple(sorted({*self.first, *other.first}))
        return Plan(first, tuple(dict.fromkeys((*self.second, *other.second))))

    def place_of(self, coordinate: int) -> int:
        """The position of d/dx_i among the T numbers.

        Args:
            coordinate: i.
        """
        return 1 + self.dims.index(coordinate)

    def place_of_sum(self, group: tuple[int, ...]) -> int:
        """The position of a sum of second derivatives among the T numbers.

        Args:
            group: The coordinates of the sum.
        """
        return 1 + len(self.dims) + self.second.index(group)
