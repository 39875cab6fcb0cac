"""Variational Monte Carlo: ground states of quantum systems by stochastic reconfiguration."""

from natgrad.applications.vmc.amplitude import LogAmplitude, read_amplitude, read_log, read_phase, read_sign
from natgrad.applications.vmc.energy import Energy, estimate_energy, extrapolate_variance
from natgrad.applications.vmc.reconfiguration import StochasticReconfiguration, stochastic_reconfiguration

__all__ = [
    "Energy",
    "LogAmplitude",
    "StochasticReconfiguration",
    "estimate_energy",
    "extrapolate_variance",
    "read_amplitude",
    "read_log",
    "read_phase",
    "read_sign",
    "stochastic_reconfiguration",
]
