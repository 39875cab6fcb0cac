"""Variational Monte Carlo: ground states of quantum systems by stochastic reconfiguration.

`hamiltonians` and `continuous` have the systems, `networks` wave functions, `samples` and `metropolis` draws from them.
`reconfiguration` takes the step, `ground_state` has the whole job.

Example:
    >>> h, psi = ng.vmc.TransverseIsing(4), ng.LogAmplitude(ng.vmc.RBM(4))
    >>> sr = ng.stochastic_reconfiguration(psi, lr=0.1)
    >>> energies = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), sr).run(5)
"""

from natgrad.ground.messages import resolve_names
from natgrad.vmc.amplitude import LogAmplitude, read_amplitude, read_log, read_phase, read_sign
from natgrad.vmc.configurations import Bosons, Spins
from natgrad.vmc.continuous import Harmonic, Molecule, kinetic_energies
from natgrad.vmc.energy import EnergyEstimate, estimate_energy, extrapolate_variance
from natgrad.vmc.ground_state import GroundState, lowest_energy
from natgrad.vmc.hamiltonians import (
    BoseHubbard,
    Hamiltonian,
    Heisenberg,
    TransverseIsing,
    chain_edges,
    square_edges,
)
from natgrad.vmc.local_energies import local_energies
from natgrad.vmc.metropolis import Exchange, Flip, Hop, Metropolis, Shift, WidthTuning
from natgrad.vmc.networks import (
    RBM,
    AntisymmetricNet,
    AutoregressiveNet,
    SymmetricNet,
    chain_translations,
    square_translations,
)
from natgrad.vmc.reconfiguration import StochasticReconfiguration, stochastic_reconfiguration
from natgrad.vmc.samples import AncestralSampler, Enumerated, ExactSampler, Sampler, Samples

__all__ = [
    "RBM",
    "AncestralSampler",
    "AntisymmetricNet",
    "AutoregressiveNet",
    "BoseHubbard",
    "Bosons",
    "EnergyEstimate",
    "Enumerated",
    "ExactSampler",
    "Exchange",
    "Flip",
    "GroundState",
    "Hamiltonian",
    "Harmonic",
    "Heisenberg",
    "Hop",
    "LogAmplitude",
    "Metropolis",
    "Molecule",
    "Sampler",
    "Samples",
    "Shift",
    "Spins",
    "StochasticReconfiguration",
    "SymmetricNet",
    "TransverseIsing",
    "WidthTuning",
    "chain_edges",
    "chain_translations",
    "estimate_energy",
    "extrapolate_variance",
    "kinetic_energies",
    "local_energies",
    "lowest_energy",
    "read_amplitude",
    "read_log",
    "read_phase",
    "read_sign",
    "square_edges",
    "square_translations",
    "stochastic_reconfiguration",
]

resolve_names(__name__)
