"""Helmholtz machines and their training: wake-sleep, reweighted, bidirectional, and the natural version of each."""

from natgrad.applications.helmholtz.machine import HelmholtzMachine
from natgrad.applications.helmholtz.natural_wake_sleep import NaturalWakeSleep, UnitFisher
from natgrad.applications.helmholtz.phases import Algorithm, Bidirectional, Classic, Reweighted
from natgrad.applications.helmholtz.wake_sleep import WakeSleep

__all__ = [
    "Algorithm",
    "Bidirectional",
    "Classic",
    "HelmholtzMachine",
    "NaturalWakeSleep",
    "Reweighted",
    "UnitFisher",
    "WakeSleep",
]
