"""The states that a lattice model has: spins, or bosons on sites."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer

LARGEST = 2**22
"""States that are enumerated at most."""


@dataclass(frozen=True)
class Spins:
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

    def __post_init__(self) -> None:
        check_integer("count", self.count)
        if self.up is not None and not 0 <= self.up <= self.count:
            raise ValueError(f"up is {self.up}, expected a number of spins from 0 to {self.count}, or None for any")

    @property
    def values(self) -> tuple[float, ...]:
        """What one variable may be, in order."""
        return (-1.0, 1.0)

    @property
    def size(self) -> int:
        """Number of states."""
        return 2**self.count if self.up is None else comb(self.count, self.up)

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
        check_enumerable(self.size)
        if self.up is None:
            numbers = torch.arange(self.size, device=device)
            bits = (numbers.unsqueeze(1) >> torch.arange(self.count - 1, -1, -1, device=device)) & 1
        else:
            places = torch.tensor(list(itertools.combinations(range(self.count), self.up)), dtype=torch.long)
            bits = torch.zeros(self.size, self.count, dtype=torch.long).scatter_(1, places.view(self.size, -1), 1)
            bits = bits.flip(0).to(device)
        return (2 * bits - 1).to(dtype or torch.get_default_dtype())

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """States at random, all equally likely.

        Args:
            shape: How many.
            generator: Source of the draws; the states lie on its device.
            dtype: Of the states.

        Returns:
            Shape (*shape, n).
        """
        kind = {"generator": generator, "device": generator.device}
        if self.up is None:
            return (2 * torch.randint(0, 2, (*shape, self.count), **kind) - 1).to(dtype)
        order = torch.rand(*shape, self.count, **kind).argsort(-1)
        return (2 * (order < self.up).long() - 1).to(dtype)

    def number(self, states: Tensor) -> Tensor:
        """A different integer for every state, shape (...,), that grows in the order of `all_states`.

        Args:
            states: Shape (..., n).
        """
        return count_in_base(states > 0, 2)

    def contains(self, states: Tensor) -> Tensor:
        """True for the states that are among these, shape (...,).

        Args:
            states: Shape (..., n).
        """
        if states.shape[-1] != self.count:
            return torch.zeros(states.shape[:-1], dtype=torch.bool, device=states.device)
        inside = ((states == -1) | (states == 1)).all(-1)
        return inside if self.up is None else inside & ((states > 0).sum(-1) == self.up)


@dataclass(frozen=True)
class Bosons:
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
    def count(self) -> int:
        """Variables of a state: the sites."""
        return self.sites

    @property
    def values(self) -> tuple[float, ...]:
        """What one variable may be, in order."""
        return tuple(float(k) for k in range(self.most + 1))

    @property
    def size(self) -> int:
        """Number of states."""
        if self.particles is None:
            return (self.most + 1) ** self.sites
        ways = [1]
        for _ in range(self.sites):
            ways = [sum(ways[max(0, k - self.most) : k + 1]) for k in range(len(ways) + self.most)]
        return ways[self.particles]

    def all_states(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Every state, by increasing `number`.

        Args:
            dtype: Of the states; None: torch's default.
            device: Where they lie.

        Returns:
            Shape (size, sites).

        Raises:
            ValueError: If there are too many to enumerate.
        """
        check_enumerable((self.most + 1) ** self.sites)
        numbers = torch.arange((self.most + 1) ** self.sites, device=device)
        powers = (self.most + 1) ** torch.arange(self.sites - 1, -1, -1, device=device)
        states = (numbers.unsqueeze(1) // powers) % (self.most + 1)
        if self.particles is not None:
            states = states[states.sum(1) == self.particles]
        return states.to(dtype or torch.get_default_dtype())

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """States at random: numbers alone where their sum is free, particles on sites with room where it is not.

        Args:
            shape: How many.
            generator: Source of the draws; the states lie on its device.
            dtype: Of the states.

        Returns:
            Shape (*shape, sites).
        """
        kind = {"generator": generator, "device": generator.device}
        if self.particles is None:
            return torch.randint(0, self.most + 1, (*shape, self.sites), **kind).to(dtype)
        places = torch.rand(*shape, self.sites * self.most, **kind).argsort(-1) < self.particles
        return places.unflatten(-1, (self.sites, self.most)).sum(-1).to(dtype)

    def number(self, states: Tensor) -> Tensor:
        """A different integer for every state, shape (...,), that grows in the order of `all_states`.

        Args:
            states: Shape (..., sites).
        """
        return count_in_base(states, self.most + 1)

    def contains(self, states: Tensor) -> Tensor:
        """True for the states that are among these, shape (...,).

        Args:
            states: Shape (..., sites).
        """
        if states.shape[-1] != self.sites:
            return torch.zeros(states.shape[:-1], dtype=torch.bool, device=states.device)
        whole = states.round() == states if states.is_floating_point() else torch.ones_like(states, dtype=torch.bool)
        inside = (whole & (states >= 0) & (states <= self.most)).all(-1)
        return inside if self.particles is None else inside & (states.sum(-1) == self.particles)


Configurations = Spins | Bosons


def without_sector(space: Configurations) -> Configurations:
    """The same variables with the same values, and nothing conserved."""
    return Spins(space.count) if isinstance(space, Spins) else Bosons(space.sites, None, space.most)


def count_in_base(digits: Tensor, base: int) -> Tensor:
    """The number with these digits, the first one the largest, (..., n) -> (...,)."""
    n = digits.shape[-1]
    if base**n >= 2**63:
        raise ValueError(f"{base}^{n} states have no numbers of 64 bits: take fewer variables")
    powers = base ** torch.arange(n - 1, -1, -1, device=digits.device)
    return (digits.round().long() * powers).sum(-1) if digits.is_floating_point() else (digits.long() * powers).sum(-1)


def check_enumerable(size: int) -> None:
    """ValueError beyond what is enumerated."""
    if size > LARGEST:
        raise ValueError(f"there are {size} states, expected at most {LARGEST} to enumerate: sample with Metropolis")
