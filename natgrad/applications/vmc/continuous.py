"""Particles in continuous space: harmonic oscillators and molecules, with their local energies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.applications.vmc.amplitude import LogAmplitude
from natgrad.checks import check_integer, check_positive


def kinetic_energies(psi: LogAmplitude, states: Tensor) -> Tensor:
    """-1/2 (Laplace psi) / psi = -1/2 sum_i (d_i^2 log psi + (d_i log psi)^2), mass one.

    Both derivatives come from one pass in forward mode, along every coordinate, all walkers together.

    Args:
        psi: The wave function.
        states: x, shape (b, d).

    Returns:
        Shape (b,), real or complex as log psi is.

    Reference:
        Li et al. 2023 carry the same numbers forward through the layers.
    """

    def log(x: Tensor) -> Tensor:
        return psi.take_moving(psi(x))

    def differentiate(unit: Tensor) -> tuple[Tensor, Tensor]:
        along = unit.expand_as(states)
        slope, bend = torch.func.jvp(lambda x: torch.func.jvp(log, (x,), (along,))[1], (states,), (along,))[:2]
        return slope, bend

    units = torch.eye(states.shape[1], dtype=states.dtype, device=states.device)
    slopes, bends = torch.func.vmap(differentiate)(units)
    return -(bends + slopes.square()).sum(0) / 2


@dataclass(frozen=True)
class Harmonic:
    """H = sum -1/2 Laplace + 1/2 omega^2 x^2: `count` coordinates, ground state energy omega count / 2.

    Args:
        count: Coordinates: particles times dimensions.
        frequency: omega.

    Raises:
        ValueError: For numbers out of range.

    Example:
        >>> ng.vmc.Harmonic(2).potential(torch.tensor([[1.0, 2.0]]))
        tensor([2.5000])
    """

    count: int
    frequency: float = 1.0

    def __post_init__(self) -> None:
        check_integer("count", self.count)
        check_positive("frequency", self.frequency)

    def potential(self, states: Tensor) -> Tensor:
        """1/2 omega^2 |x|^2.

        Args:
            states: Shape (b, count).
        """
        return self.frequency**2 * states.square().sum(1) / 2

    def local_energies(self, psi: LogAmplitude, states: Tensor) -> Tensor:
        """(H psi)(x) / psi(x).

        Args:
            psi: The wave function.
            states: x, shape (b, count).
        """
        return kinetic_energies(psi, states) + self.potential(states)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Where walkers start: normal with the ground state's width.

        Args:
            shape: How many.
            generator: Source of the draws.
            dtype: Of the states.

        Returns:
            Shape (*shape, count).
        """
        kind = {"generator": generator, "dtype": dtype, "device": generator.device}
        return torch.randn(*shape, self.count, **kind) / (2 * self.frequency) ** 0.5


@dataclass(frozen=True)
class Molecule:
    """Electrons around fixed nuclei, in hartree and bohr; states are (b, 3 electrons), spin up first.

    Args:
        charges: Of the nuclei.
        positions: Of the nuclei, three numbers each.
        up: Electrons with spin up.
        down: Electrons with spin down.

    Raises:
        ValueError: For lists that do not fit, or no electron.

    Example:
        >>> ng.vmc.Molecule.helium().potential(torch.tensor([[1.0, 0.0, 0.0, -1.0, 0.0, 0.0]]))  # -2 - 2 + 1/2
        tensor([-3.5000])
    """

    charges: Sequence[float]
    positions: Sequence[Sequence[float]]
    up: int = 1
    down: int = 1

    def __post_init__(self) -> None:
        if len(self.charges) != len(self.positions) or any(len(position) != 3 for position in self.positions):
            raise ValueError(
                f"positions has {len(self.positions)} entries, expected three numbers for each of the "
                f"{len(self.charges)} charges"
            )
        check_integer("up", self.up)
        check_integer("down", self.down, 0)

    @classmethod
    def hydrogen(cls) -> Molecule:
        """The atom: -0.5 hartree."""
        return cls((1.0,), ((0.0, 0.0, 0.0),), up=1, down=0)

    @classmethod
    def helium(cls) -> Molecule:
        """The atom: -2.903724 hartree."""
        return cls((2.0,), ((0.0, 0.0, 0.0),))

    @classmethod
    def hydrogen_molecule(cls, distance: float = 1.401) -> Molecule:
        """H2: -1.174476 hartree at 1.401 bohr.

        Args:
            distance: Of the nuclei, in bohr.
        """
        return cls((1.0, 1.0), ((0.0, 0.0, -distance / 2), (0.0, 0.0, distance / 2)))

    @classmethod
    def lithium_hydride(cls, distance: float = 3.015) -> Molecule:
        """LiH: -8.0705 hartree at 3.015 bohr.

        Args:
            distance: Of the nuclei, in bohr.
        """
        return cls((3.0, 1.0), ((0.0, 0.0, 0.0), (0.0, 0.0, distance)), up=2, down=2)

    @property
    def electrons(self) -> int:
        """Their number."""
        return self.up + self.down

    @property
    def count(self) -> int:
        """Coordinates of a state."""
        return 3 * self.electrons

    def nuclei(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Charges (A,) and positions (A, 3).

        Args:
            like: A tensor of the dtype and the device wanted.
        """
        kind = {"dtype": like.dtype, "device": like.device}
        return torch.tensor(self.charges, **kind), torch.tensor(self.positions, **kind)

    def potential(self, states: Tensor) -> Tensor:
        """Attraction of the nuclei, repulsion of the electrons, repulsion of the nuclei.

        Args:
            states: Shape (b, 3 electrons).

        Returns:
            Shape (b,).
        """
        x = states.unflatten(1, (-1, 3))
        charges, places = self.nuclei(states)
        total = -(charges / (x.unsqueeze(2) - places).norm(dim=3)).sum((1, 2))
        for i in range(self.electrons):
            for j in range(i):
                total = total + 1 / (x[:, i] - x[:, j]).norm(dim=1)
        for a in range(len(charges)):
            for b in range(a):
                total = total + charges[a] * charges[b] / (places[a] - places[b]).norm()
        return total

    def local_energies(self, psi: LogAmplitude, states: Tensor) -> Tensor:
        """(H psi)(x) / psi(x).

        Args:
            psi: The wave function.
            states: x, shape (b, 3 electrons).
        """
        return kinetic_energies(psi, states) + self.potential(states)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Where walkers start: every electron near a nucleus, as many as its charge attracts.

        Args:
            shape: How many.
            generator: Source of the draws.
            dtype: Of the states.

        Returns:
            Shape (*shape, 3 electrons).
        """
        kind = {"generator": generator, "dtype": dtype, "device": generator.device}
        x = torch.randn(*shape, self.electrons, 3, **kind)
        _, places = self.nuclei(x)
        return (x + places[self.assign_electrons()]).flatten(-2)

    def assign_electrons(self) -> list[int]:
        """The nucleus at which each electron starts: both spins are spread over the nuclei by their charges."""
        left = [float(charge) for charge in self.charges]
        order = sorted(range(self.electrons), key=lambda i: (i if i < self.up else i - self.up, i))
        chosen = dict[int, int]()
        for electron in order:
            nucleus = max(range(len(left)), key=lambda a: left[a])
            left[nucleus] -= 1
            chosen[electron] = nucleus
        return [chosen[i] for i in range(self.electrons)]
