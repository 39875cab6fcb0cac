"""The whole job: sample, local energies, step; and the exact energy of small systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.vmc.amplitude import LogAmplitude
from natgrad.applications.vmc.energy import EnergyEstimate
from natgrad.applications.vmc.hamiltonians import Hamiltonian
from natgrad.applications.vmc.joined_walkers import check_draws, estimate_jointly
from natgrad.applications.vmc.local_energies import local_energies
from natgrad.applications.vmc.reconfiguration import StochasticReconfiguration
from natgrad.applications.vmc.samples import Sampler
from natgrad.checks import check_integer
from natgrad.lapack import eigh
from natgrad.optim import RankExchange
from natgrad.progress import Progress, check_callback
from natgrad.shown_tables import write_choices


class GroundState:
    """Sampler, Hamiltonian and stochastic reconfiguration in one loop.

    Args:
        hamiltonian: As `ng.vmc.local_energies` takes it.
        sampler: Draws the states.
        optimizer: What `ng.stochastic_reconfiguration` gave; it knows psi.

    Example:
        >>> h, psi = ng.vmc.TransverseIsing(4), ng.LogAmplitude(ng.vmc.RBM(4))
        >>> sr = ng.stochastic_reconfiguration(psi, lr=0.1)
        >>> search = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), sr)
        >>> energies = search.run(50)
        >>> abs(energies[-1].mean - ng.vmc.lowest_energy(h)) < 0.1
        True
    """

    def __init__(self, hamiltonian: Any, sampler: Sampler, optimizer: StochasticReconfiguration) -> None:
        if not isinstance(optimizer, StochasticReconfiguration):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}, expected ng.stochastic_reconfiguration(psi, ...)"
            )
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler is {type(sampler).__name__}, expected one such as ng.vmc.Metropolis(space)")
        self.hamiltonian, self.sampler, self.optimizer = hamiltonian, sampler, optimizer
        self._met = False

    def __repr__(self) -> str:
        return write_choices(self, hamiltonian=self.hamiltonian, sampler=self.sampler, optimizer=self.optimizer)

    @property
    def psi(self) -> LogAmplitude:
        """The wave function."""
        return self.optimizer.psi

    @property
    def energies(self) -> list[EnergyEstimate]:
        """The energy at every step so far, each with its error."""
        return self.optimizer.energies

    def step(self) -> EnergyEstimate:
        """One step: the energy before it, with its error."""
        self._meet()
        drawn = self.sampler.draw(self.psi)
        local = local_energies(self.psi, self.hamiltonian, drawn.states)
        return self.optimizer.step(drawn.states, local, drawn.weights, enumerated=drawn.enumerated)

    def run(
        self, steps: int, *, callback: Callable[[GroundState], Any] | None = None, progress: bool | None = None
    ) -> list[EnergyEstimate]:
        """Several steps. Ctrl-C ends them after the last whole one.

        Args:
            steps: How many.
            callback: Called with this object after each step; no more steps are taken if it returns True.
            progress: True for a line that tells how far it is, False for none; None for one where the standard error is
                a terminal.

        Returns:
            Their energies, each before its step.
        """
        steps, found = check_integer("steps", steps, 0), list[EnergyEstimate]()
        check_callback(callback, "the GroundState")
        with Progress("steps", steps, progress) as shown:
            try:
                while len(found) < steps:
                    found.append(self.step())
                    shown.update(len(found), {"energy": found[-1]})
                    if callback is not None and self._ends(callback(self) is True):
                        break
            except KeyboardInterrupt:
                pass  # a step is taken whole or not at all
        return found

    def measure(self, draws: int = 1) -> EnergyEstimate:
        """The energy of psi as it is, without a step.

        Args:
            draws: How many times the sampler draws.
        """
        found, processes = [], self._meet()
        for _ in range(check_integer("draws", draws)):
            drawn = self.sampler.draw(self.psi)
            local = local_energies(self.psi, self.hamiltonian, drawn.states)
            if drawn.weights is not None:
                return estimate_jointly(processes, local, drawn.weights, enumerated=drawn.enumerated)
            found.append(local)
        return estimate_jointly(processes, torch.cat(found, dim=1 if self.sampler.continues else 0), None)

    def _ends(self, asked: bool) -> bool:
        """Whether the callback of some process asked to end."""
        return any(one for (one,) in self.optimizer.processes.share_numbers([asked], self.psi.device))

    def _meet(self) -> RankExchange:
        """The processes that have walkers, each with draws of its own."""
        processes = self.optimizer.processes
        if not self._met:
            check_draws(processes, self.sampler)
            self._met = True
        return processes

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, psi's parameters included: plain values and tensors."""
        parts = {"psi": self.psi, "optimizer": self.optimizer, "sampler": self.sampler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`: on the CPU bit for bit as if never stopped.

        Args:
            state_dict: What that returned.
        """
        self.psi.load_state_dict(state_dict["psi"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.sampler.load_state_dict(state_dict["sampler"])


def lowest_energy(hamiltonian: Hamiltonian, *, steps: int = 200, seed: int = 0) -> float:
    """The exact ground state energy, by Lanczos over all states: up to some million of them.

    Args:
        hamiltonian: A lattice Hamiltonian.
        steps: Products with H at most; it stops when the energy stands to 12 digits.
        seed: Of the start.

    Raises:
        ValueError: For too many states.

    Reference:
        Lanczos 1950, without reorthogonalisation: the lowest value is right, though it may come several times.

    Example:
        >>> round(ng.vmc.lowest_energy(ng.vmc.Heisenberg(4)), 10)
        -2.0
    """
    matrix = hamiltonian.matrix()
    size = matrix.shape[0]
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    vector, before = vector / vector.norm(), torch.zeros_like(vector)
    diagonal, side, found = list[Tensor](), list[Tensor](), float("inf")
    for step in range(min(steps, size)):
        image = (matrix @ vector.unsqueeze(1)).squeeze(1)
        diagonal.append(vector @ image)
        image = image - diagonal[-1] * vector - (side[-1] * before if side else 0)
        side.append(image.norm())
        if step % 5 == 4 or step == min(steps, size) - 1 or float(side[-1]) < 1e-12:
            lowest = float(eigh(tridiagonal(diagonal, side))[0][0])
            if abs(lowest - found) < 1e-12 * abs(lowest) or float(side[-1]) < 1e-12:
                return lowest
            found = lowest
        before, vector = vector, image / side[-1]
    return found


def tridiagonal(diagonal: list[Tensor], side: list[Tensor]) -> Tensor:
    """The matrix with these entries on and beside its diagonal."""
    matrix = torch.diag(torch.stack(diagonal))
    off = torch.stack(side[: len(diagonal) - 1]) if len(diagonal) > 1 else matrix.new_zeros(0)
    return matrix + torch.diag(off, 1) + torch.diag(off, -1)
