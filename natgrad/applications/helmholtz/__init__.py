"""Helmholtz machines and their training: wake-sleep, reweighted, bidirectional, and the natural version of each."""

from natgrad.applications.helmholtz.machine import HelmholtzMachine
from natgrad.applications.helmholtz.phases import Algorithm, Bidirectional, Classic, Reweighted
from natgrad.applications.helmholtz.training import NaturalWakeSleep, WakeSleep

__all__ = [
    "Algorithm",
    "Bidirectional",
    "Classic",
    "HelmholtzMachine",
    "NaturalWakeSleep",
    "Reweighted",
    "WakeSleep",
]
