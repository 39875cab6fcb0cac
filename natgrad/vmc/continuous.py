"""Particles in continuous space: harmonic oscillators and molecules, with their local energies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.jets import Derivatives, Jet, NotCarriedError, start_jets, wrap_jets
from natgrad.ground.pure import mark_evaluation, run_uncompiled
from natgrad.vmc.amplitude import LogAmplitude

TRUSTED = WeakKeyDictionary[LogAmplitude, tuple[tuple[int, Any], bool]]()
"""Wave functions -> their network and head, and whether derivatives go through these."""


def kinetic_energies(psi: LogAmplitude, states: Tensor) -> Tensor:
    """-1/2 (Laplace psi) / psi = -1/2 sum_i (d_i^2 log psi + (d_i log psi)^2), mass one.

    Values, gradients and Laplacians go forward through the network together, where it is made of operations that are
    known for that and no graph is wanted (`torch.no_grad()`); elsewhere a backward pass goes through the gradient for
    every coordinate. The two are compared at the first call for a wave function.

    Args:
        psi: The wave function.
        states: x, shape (b, d).

    Returns:
        Shape (b,), real or complex as log psi is.

    Reference:
        Li et al. 2023, the forward Laplacian.
    """
    slopes, laplacian = differentiate_log(psi, states)
    return -(laplacian + slopes.square().sum(0)) / 2


def differentiate_log(psi: LogAmplitude, states: Tensor) -> tuple[Tensor, Tensor]:
    """d_i log psi, shape (d, b), and its Laplacian (b,), in one pass where that is right for the first two walkers."""
    if not torch.is_grad_enabled():
        network = (id(psi.net), psi.head)
        if psi not in TRUSTED or TRUSTED[psi][0] != network:
            TRUSTED[psi] = network, agrees(psi, states[:2])
        if TRUSTED[psi][1]:
            try:
                return carry_log(psi, states)
            except NotCarriedError:  # a branch of the network that the walkers before did not take
                TRUSTED[psi] = network, False
    return differentiate_twice(psi, states)


def agrees(psi: LogAmplitude, states: Tensor) -> bool:
    """Whether the derivatives that are carried forward are those taken one after the other, but for round-off."""
    try:
        carried = carry_log(psi, states)
    except Exception:  # noqa: BLE001 - whatever a network does with its input, the other way tells of it
        return False
    expected = differentiate_twice(psi, states)
    allowed = torch.finfo(states.dtype).eps ** 0.5
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= allowed * b.abs().max())
        for a, b in zip(carried, expected, strict=True)
    )


def carry_log(psi: LogAmplitude, states: Tensor) -> tuple[Tensor, Tensor]:
    """The same by one pass through the network; NotCarriedError where that cannot be."""
    every = tuple(range(states.shape[1]))
    layout = Derivatives(every, (every,))
    with run_uncompiled():
        log = psi.take_moving(psi(wrap_jets(start_jets(states, layout), layout)))
    if not isinstance(log, Jet):
        raise NotCarriedError("log psi came back without its derivatives")
    return log.jets[1:-1], log.jets[-1]


def differentiate_twice(psi: LogAmplitude, states: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a backward pass through the gradient for every coordinate; with a graph where one is wanted."""
    wanted = torch.is_grad_enabled()
    with torch.enable_grad(), mark_evaluation(), exact_derivatives():
        x = states.clone() if wanted and states.requires_grad else states.detach().requires_grad_()
        log = psi.take_moving(psi(x))
        parts = [differentiate_real(part, x, wanted) for part in ((log.real, log.imag) if log.is_complex() else (log,))]
    pair = parts[0] if len(parts) == 1 else [torch.complex(*both) for both in zip(*parts, strict=True)]
    slopes, laplacian = pair if wanted else [tensor.detach() for tensor in pair]
    return slopes, laplacian


def differentiate_real(log: Tensor, x: Tensor, graph: bool) -> tuple[Tensor, Tensor]:
    """The gradient (d, b) and the Laplacian (b,) of b real numbers, each a function of its own row of x (b, d)."""
    if not log.requires_grad:
        return torch.zeros_like(x).mT, torch.zeros_like(log)
    (slopes,) = torch.autograd.grad(log.sum(), x, create_graph=True, materialize_grads=True)
    laplacian = torch.zeros_like(log)
    for i, slope in enumerate(slopes.unbind(1)):
        if slope.requires_grad:
            rows = torch.autograd.grad(slope.sum(), x, retain_graph=True, create_graph=graph, materialize_grads=True)
            laplacian = laplacian + rows[0][:, i]
    return slopes.mT, laplacian


class ParticleSystem(ABC):
    """H = sum -1/2 Laplace + V(x) for particles of mass one, with `count` coordinates in all."""

    @abstractmethod
    def potential(self, states: Tensor) -> Tensor:
        """V(x), shape (b,).

        Args:
            states: x, shape (b, count).
        """

    def local_energies(self, psi: LogAmplitude, states: Tensor) -> Tensor:
        """(H psi)(x) / psi(x), shape (b,).

        Args:
            psi: The wave function.
            states: x, shape (b, count).
        """
        return kinetic_energies(psi, states) + self.potential(states)

    @abstractmethod
    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Where walkers start, near where the ground state has them, shape (*shape, count).

        Args:
            shape: How many.
            generator: Source of the draws; the states lie on its device.
            dtype: Of the states.
        """


@dataclass(frozen=True)
class Harmonic(ParticleSystem):
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
        return self.frequency**2 * states.square().sum(1) / 2

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        kind = {"generator": generator, "dtype": dtype, "device": generator.device}
        return torch.randn(*shape, self.count, **kind) / (2 * self.frequency) ** 0.5  # the ground state's width


@dataclass(frozen=True)
class Molecule(ParticleSystem):
    """Electrons around fixed nuclei, in hartree and bohr; states are (b, 3 electrons), spin up first.

    V is the attraction of the nuclei, the repulsion of the electrons, and that of the nuclei.

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

    def equals(self, other: Molecule) -> bool:
        """True if nuclei and electrons are the same, in lists or in tuples.

        Args:
            other: Another molecule.
        """
        mine, others = ((list(m.charges), [list(p) for p in m.positions], m.up, m.down) for m in (self, other))
        return mine == others

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
        x = states.unflatten(1, (-1, 3))
        charges, places = self.nuclei(states)
        attraction = (charges / (x.unsqueeze(2) - places).norm(dim=3)).sum((1, 2))
        i, j = torch.triu_indices(self.electrons, self.electrons, 1)
        a, b = torch.triu_indices(len(charges), len(charges), 1)
        constant = (charges[a] * charges[b] / (places[a] - places[b]).norm(dim=1)).sum()
        return (1 / (x[:, i] - x[:, j]).norm(dim=2)).sum(1) - attraction + constant

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        kind = {"generator": generator, "dtype": dtype, "device": generator.device}
        x = torch.randn(*shape, self.electrons, 3, **kind)
        _, places = self.nuclei(x)
        return (x + places[self.assign_electrons()]).flatten(-2)

    def assign_electrons(self) -> list[int]:
        """The nucleus at which each electron starts: both spins are spread over the nuclei by their charges."""
        left = [float(charge) for charge in self.charges]
        chosen = dict[int, int]()
        for electron in sorted(range(self.electrons), key=lambda i: (i if i < self.up else i - self.up, i)):
            chosen[electron] = max(range(len(left)), key=left.__getitem__)
            left[chosen[electron]] -= 1
        return [chosen[i] for i in range(self.electrons)]
