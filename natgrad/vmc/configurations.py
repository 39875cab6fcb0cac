"""The states that a lattice model has: spins, or bosons on sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer

LARGEST = 2**22
"""States that are enumerated at most."""


class LatticeStates:
    """States (..., n) of n variables, low + step k with k = 0 ... most; the sum of all k may be conserved."""

    count: int
    most: int
    low: ClassVar[float] = 0.0
    step: ClassVar[float] = 1.0

    @property
    def total(self) -> int | None:
        """The conserved sum of all k; None: any."""
        raise NotImplementedError

    @property
    def values(self) -> tuple[float, ...]:
        """What one variable may be, in order."""
        return tuple(self.low + self.step * k for k in range(self.most + 1))

    @property
    def size(self) -> int:
        """Number of states."""
        if self.total is None:
            return (self.most + 1) ** self.count
        ways = [1]  # of every sum over the sites so far
        for _ in range(self.count):
            ways = [sum(ways[max(0, k - self.most) : k + 1]) for k in range(len(ways) + self.most)]
        return ways[self.total]

    def all_states(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Every state, by increasing `number`.

        Args:
            dtype: Of the states; None: torch's default.
            device: Where they lie.

        Returns:
            Shape (size, n).

        Raises:
            ValueError: If there are too many to enumerate.
        """
        if self.size > LARGEST:
            raise ValueError(
                f"there are {self.size} states, expected at most {LARGEST} to enumerate: sample with Metropolis"
            )
        digits = torch.zeros(1, 0, dtype=torch.long, device=device)
        sums = digits.sum(1)
        each = torch.arange(self.most + 1, device=device)
        for left in range(self.count - 1, -1, -1):
            sums = (sums.unsqueeze(1) + each).flatten()
            last = each.repeat(len(digits)).unsqueeze(1)
            digits = torch.cat([digits.repeat_interleave(len(each), 0), last], 1)
            if self.total is not None:
                allowed = (sums <= self.total) & (sums + self.most * left >= self.total)
                digits, sums = digits[allowed], sums[allowed]
        return self._place(digits, dtype or torch.get_default_dtype())

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Random states (*shape, n): variables alone where nothing is conserved, units on places with room where it is.

        All states of spins are equally likely, and all of bosons whose number is free.

        Args:
            shape: How many.
            generator: Source of the draws; the states lie on its device.
            dtype: Of the states.
        """
        kind = {"generator": generator, "device": generator.device}
        if self.total is None:
            return self._place(torch.randint(0, self.most + 1, (*shape, self.count), **kind), dtype)
        places = torch.rand(*shape, self.count * self.most, **kind).argsort(-1) < self.total
        return self._place(places.unflatten(-1, (self.count, self.most)).sum(-1), dtype)

    def number(self, states: Tensor) -> Tensor:
        """A different integer for every state, shape (...,), that grows in the order of `all_states`.

        Args:
            states: Shape (..., n).

        Raises:
            ValueError: If 64 bits do not hold it.
        """
        base = self.most + 1
        if base**self.count >= 2**63:
            raise ValueError(f"{base}^{self.count} states have no numbers of 64 bits: take fewer variables")
        powers = base ** torch.arange(self.count - 1, -1, -1, device=states.device)
        return (((states - self.low) / self.step).round().long() * powers).sum(-1)

    def contains(self, states: Tensor) -> Tensor:
        """True for the states that are among these, shape (...,).

        Args:
            states: Shape (..., n).
        """
        inside = self.has_values(states)
        if self.total is None:
            return inside
        return inside & (states.sum(-1) == self.low * self.count + self.step * self.total)

    def has_values(self, states: Tensor) -> Tensor:
        """True for states (..., n) of n variables with these values, whatever is conserved, shape (...,).

        Args:
            states: Shape (..., n).
        """
        if states.shape[-1] != self.count:
            return torch.zeros(states.shape[:-1], dtype=torch.bool, device=states.device)
        return torch.isin(states, torch.tensor(self.values, device=states.device)).all(-1)

    def _place(self, digits: Tensor, dtype: torch.dtype) -> Tensor:
        return digits.to(dtype) if self.step == 1 else (self.low + self.step * digits).to(dtype)


@dataclass(frozen=True)
class Spins(LatticeStates):
    """n spins of -1 and 1, of which `up` are 1 where that is conserved.

    Args:
        count: n.
        up: How many spins are 1; None: any number.

    Raises:
        ValueError: For numbers out of range.

    Example:
        >>> ng.vmc.Spins(3, up=1).all_states()
        tensor([[-1., -1.,  1.],
                [-1.,  1., -1.],
                [ 1., -1., -1.]])
    """

    count: int
    up: int | None = None
    most: ClassVar[int] = 1
    low: ClassVar[float] = -1.0
    step: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        check_integer("count", self.count)
        if self.up is not None and not 0 <= self.up <= self.count:
            raise ValueError(f"up is {self.up}, expected a number of spins from 0 to {self.count}, or None for any")

    @property
    def total(self) -> int | None:
        """How many spins are 1; None: any number."""
        return self.up


@dataclass(frozen=True)
class Bosons(LatticeStates):
    """Occupation numbers 0 ... most on sites, with `particles` in all where that is conserved.

    Args:
        sites: Number of sites.
        particles: Their sum; None: any.
        most: The largest number on a site.

    Raises:
        ValueError: For numbers out of range.
    """

    sites: int
    particles: int | None = None
    most: int = 3

    def __post_init__(self) -> None:
        check_integer("sites", self.sites)
        check_integer("most", self.most)
        if self.particles is not None and not 0 <= self.particles <= self.most * self.sites:
            raise ValueError(f"particles is {self.particles}, expected 0 to {self.most * self.sites}, or None for any")

    @property
    def count(self) -> int:  # type: ignore[override]
        """Variables of a state: the sites."""
        return self.sites

    @property
    def total(self) -> int | None:
        """The number of bosons; None: any."""
        return self.particles


Configurations = Spins | Bosons
