"""The whole job: sample, local energies, step; and the exact energy of small systems."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.exchanges import any_asks
from natgrad.ground.linalg import eigh
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.progress import Callbacks, join_callbacks, run_steps
from natgrad.ground.pure import set_modes_aside
from natgrad.optim import Processes, read_parts, write_parts
from natgrad.vmc.amplitude import LogAmplitude, evaluate
from natgrad.vmc.configurations import Configurations
from natgrad.vmc.continuous import Harmonic, Molecule
from natgrad.vmc.energy import EnergyEstimate, estimate_jointly
from natgrad.vmc.hamiltonians import place_elements
from natgrad.vmc.local_energies import has_connections, read_connections, take_local_energies
from natgrad.vmc.networks import AntisymmetricNet
from natgrad.vmc.reconfiguration import StochasticReconfiguration
from natgrad.vmc.samples import Sampler, Samples


class GroundState:
    """Sampler, Hamiltonian and stochastic reconfiguration in one loop.

    Args:
        hamiltonian: As `ng.vmc.local_energies` takes it.
        sampler: Draws the states.
        optimizer: What `ng.stochastic_reconfiguration` gave; it knows psi.

    Raises:
        TypeError: If the sampler or the optimizer is none.
        ValueError: If the Hamiltonian, the sampler and psi are not over the same states. A Hamiltonian that leads out
            of the sampler's states, or a sampler that draws others than the Hamiltonian's, raises at a draw.

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
        check_spaces(hamiltonian, sampler, optimizer.psi)
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

    @set_modes_aside
    def step(self) -> EnergyEstimate:
        """One step: the energy before it, with its error."""
        drawn, local = self._draw()
        return self.optimizer.step(drawn.states, local, drawn.weights, enumerated=drawn.enumerated)

    @set_modes_aside
    @explain_calls
    def run(
        self, steps: int, *, callback: Callbacks[GroundState] | None = None, progress: bool | None = None
    ) -> list[EnergyEstimate]:
        """Several steps. Ctrl-C ends them after the last whole one.

        Args:
            steps: How many.
            callback: Called with this object after each step, or a list of such functions; no more steps are taken if
                one returns True.
            progress: True for a line that shows how far it is, False for none; None for one where the standard error is
                a terminal.

        Returns:
            Their energies, each before its step.
        """
        steps, energies = check_integer("steps", steps, 0), list[EnergyEstimate]()
        call, processes = join_callbacks(callback, "the GroundState"), self.optimizer.processes

        def step() -> dict[str, EnergyEstimate]:
            energies.append(self.step())
            return {"energy": energies[-1]}

        run_steps(step, "steps", steps, progress, lambda: any_asks(processes, call(self), self.psi.device))
        return energies

    @set_modes_aside
    def measure(self, draws: int = 1) -> EnergyEstimate:
        """The energy of psi as it is, without a step.

        Args:
            draws: How many times the sampler draws.
        """
        parts, processes = [], self.optimizer.processes
        for _ in range(check_integer("draws", draws)):
            drawn, local = self._draw()
            if drawn.weights is not None:
                return estimate_jointly(processes, local, drawn.weights, enumerated=drawn.enumerated)
            parts.append(local)
        return estimate_jointly(processes, torch.cat(parts, dim=1 if self.sampler.continues else 0), None)

    def _draw(self) -> tuple[Samples, Tensor]:
        """Samples with their local energies."""
        if not self._met:  # with the other processes
            check_draws(self.optimizer.processes, self.sampler.generator)
            self._met = True
        drawn = self.sampler.draw(self.psi)
        own, space = (getattr(part, "space", None) for part in (self.sampler, self.hamiltonian))
        own = own if isinstance(own, Configurations) else None
        local = take_local_energies(self.psi, self.hamiltonian, drawn.states, space=own)
        if own is None and isinstance(space, Configurations) and not bool(space.contains(drawn.states).all()):
            raise ValueError(
                f"sampler draws states that are not of hamiltonian.space, {space}: take a sampler over it, such as "
                "ng.vmc.Metropolis(hamiltonian.space)"
            )
        return drawn, local

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, psi's parameters included: plain values and tensors."""
        return write_parts(self._parts())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`: on the CPU bit for bit as if never stopped.

        Args:
            state_dict: What that returned.

        Raises:
            ValueError: If it lacks a part, or is of another sampler or optimizer. Nothing is changed then.
        """
        read_parts(self._parts(), state_dict, "GroundState.state_dict()")

    def _parts(self) -> dict[str, Any]:
        return {"psi": self.psi, "optimizer": self.optimizer, "sampler": self.sampler}


def lowest_energy(hamiltonian: Any, *, space: Configurations | None = None, steps: int = 200, seed: int = 0) -> float:
    """The exact ground state energy, by Lanczos over all states: up to some million of them.

    Args:
        hamiltonian: A lattice Hamiltonian, real or complex: an `ng.vmc.Hamiltonian`, or anything with
            `connected(states)` or NetKet's `get_conn_padded(states)`.
        space: Its states, such as `ng.vmc.Spins(6)`. None: `hamiltonian.space`.
        steps: Products with H at most; it stops when the energy stands to 12 digits of H's largest eigenvalue, and
            warns where that takes more.
        seed: Of the start.

    Raises:
        TypeError: For no lattice Hamiltonian, or one that does not say which states it has.
        ValueError: For too many states, for no step, and for an H that leads out of its states or is not Hermitian.

    Reference:
        Lanczos 1950, without reorthogonalisation: the lowest value is right, though it may come several times.

    Example:
        >>> round(ng.vmc.lowest_energy(ng.vmc.Heisenberg(4)), 10)
        -2.0
    """
    steps = check_integer("steps", steps)
    over: Any = getattr(hamiltonian, "space", None) if space is None else space
    if not isinstance(over, Configurations) or not has_connections(hamiltonian):
        raise TypeError(
            f"hamiltonian is {type(hamiltonian).__name__} over {over}, expected an ng.vmc.Hamiltonian, or something "
            "with connected(states) or get_conn_padded(states) and a space: lowest_energy(h, space=ng.vmc.Spins(6))"
        )
    states = over.all_states(torch.float64)
    others, values = read_connections(hamiltonian, states)
    values = values.to(torch.promote_types(values.dtype, torch.float64))
    matrix = place_elements(hamiltonian, over, states, others, values)
    check_hermitian(hamiltonian, matrix)
    size = matrix.shape[0]
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu").to(
        matrix.dtype
    )
    vector, before = vector / vector.norm(), torch.zeros_like(vector)
    diagonal, side, estimate, scale = list[float](), list[float](), float("inf"), 0.0
    for step in range(min(steps, size)):
        image = (matrix @ vector.unsqueeze(1)).squeeze(1)
        diagonal.append(float(torch.vdot(vector, image).real))
        image = image - diagonal[-1] * vector - (side[-1] * before if side else 0)
        side.append(float(image.norm()))
        scale = max(scale, abs(diagonal[-1]), side[-1])  # near H's largest eigenvalue
        ended = side[-1] <= 1e-12 * scale  # the vectors so far span all that the start has a part in
        if step % 5 == 4 or step == min(steps, size) - 1 or ended:
            centre, off = (torch.tensor(part, dtype=torch.float64) for part in (diagonal, side[:-1]))
            lowest = float(eigh(torch.diag(centre) + torch.diag(off, 1) + torch.diag(off, -1))[0][0])
            if abs(lowest - estimate) <= 1e-12 * scale or ended:
                return lowest
            estimate = lowest
        before, vector = vector, image / side[-1]
    if steps < size:
        warnings.warn(
            f"the lowest energy, {estimate}, does not stand to 12 digits after {steps} products with H: pass more "
            "steps",
            stacklevel=2,
        )
    return estimate


def check_hermitian(hamiltonian: Any, matrix: Tensor) -> None:
    """ValueError unless <u|H v> = <H u|v> for two vectors at random: Lanczos believes it."""
    generator = torch.Generator().manual_seed(1)
    u, v = torch.randn(2, len(matrix), dtype=torch.complex128, generator=generator, device=generator.device).unbind()
    images = matrix.to(u.dtype) @ torch.stack([u, v], 1)
    gap = (torch.vdot(u, images[:, 1]) - torch.vdot(images[:, 0], v)).abs()
    if float(gap) > 1e-10 * float(images[:, 0].norm() * v.norm()):
        raise ValueError(
            f"{hamiltonian} is not Hermitian, <s|H|s'> and the conjugate of <s'|H|s> differ: look at the elements that "
            "it gives for connected states"
        )


def check_spaces(hamiltonian: Any, sampler: Sampler, psi: LogAmplitude) -> None:
    """ValueError unless Hamiltonian, sampler and psi are over the same states, as far as they say which.

    The network is tried on two of them.
    """
    own, drawn = (getattr(part, "space", None) for part in (hamiltonian, sampler))
    own = hamiltonian if own is None and callable(getattr(hamiltonian, "draw", None)) else own
    lattice = [isinstance(space, Configurations) for space in (own, drawn)]
    if all(lattice):
        fits = own == drawn
    elif any(lattice) and isinstance(drawn if lattice[0] else own, (Harmonic, Molecule)):
        fits = False
    else:
        fits = getattr(own, "count", None) in (None, getattr(drawn, "count", None)) or drawn is None
    if not fits:
        raise ValueError(
            f"sampler draws from {drawn} and hamiltonian is over {own}: an energy is right over one space alone; take "
            f"{type(sampler).__name__} over {'hamiltonian.space' if lattice[0] else 'the hamiltonian itself'}, or a "
            "hamiltonian over the sampler's space"
        )
    for net in psi.net.modules():
        if isinstance(net, AntisymmetricNet) and isinstance(own, Molecule) and not net.molecule.equals(own):
            raise ValueError(f"psi is of {net.molecule} and hamiltonian is {own}: take a network of the hamiltonian")
    space: Any = own if hasattr(own, "draw") else drawn
    if space is None or not callable(getattr(space, "draw", None)):
        return
    states = space.draw((2,), torch.Generator().manual_seed(0), psi.dtype).to(psi.device)
    try:
        evaluate(psi, states)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"psi's network does not take the states of {space}, {tuple(states.shape)} of {states.dtype}: {error}"
        ) from error


def check_draws(processes: Processes, generator: Any) -> None:
    """ValueError if samplers of two processes would draw the same walkers, which would count them twice."""
    if processes.size == 1 or not isinstance(generator, torch.Generator):
        return
    states = processes.share_objects(generator.get_state().tolist())
    for rank, state in enumerate(states):
        if state in states[:rank]:
            raise ValueError(
                f"the samplers of process {states.index(state)} and {rank} would draw the same walkers: give each a "
                "seed of its own, such as seed=torch.distributed.get_rank()"
            )
