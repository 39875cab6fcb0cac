"""Variational Monte Carlo: ground states of quantum systems by stochastic reconfiguration.

Example:
    >>> h, psi = ng.vmc.TransverseIsing(4), ng.LogAmplitude(ng.vmc.RBM(4))
    >>> sr = ng.stochastic_reconfiguration(psi, lr=0.1)
    >>> energies = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), sr).run(5)
"""

from natgrad.applications.vmc.amplitude import LogAmplitude, read_amplitude, read_log, read_phase, read_sign
from natgrad.applications.vmc.antisymmetric import AntisymmetricNet
from natgrad.applications.vmc.configurations import Bosons, Spins
from natgrad.applications.vmc.continuous import Harmonic, Molecule, kinetic_energies
from natgrad.applications.vmc.energy import EnergyEstimate, estimate_energy, extrapolate_variance
from natgrad.applications.vmc.ground_state import GroundState, lowest_energy
from natgrad.applications.vmc.hamiltonians import (
    BoseHubbard,
    Hamiltonian,
    Heisenberg,
    TransverseIsing,
    chain_edges,
    square_edges,
)
from natgrad.applications.vmc.local_energies import local_energies
from natgrad.applications.vmc.metropolis import Exchange, Flip, Hop, Metropolis, Shift, WidthTuning
from natgrad.applications.vmc.networks import RBM, AutoregressiveNet
from natgrad.applications.vmc.reconfiguration import StochasticReconfiguration, stochastic_reconfiguration
from natgrad.applications.vmc.samples import AncestralSampler, Enumerated, ExactSampler, Sampler, Samples
from natgrad.applications.vmc.symmetric import SymmetricNet, chain_translations, square_translations

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
