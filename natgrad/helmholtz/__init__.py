"""Helmholtz machines and their training: wake-sleep, reweighted, bidirectional, and the natural version of each.

`machine` has the two networks and `phases` what each algorithm teaches them. `wake_sleep` trains by plain gradients,
`natural_wake_sleep` by one Fisher block per unit (`blocks`).

Example:
    >>> machine = ng.helmholtz.HelmholtzMachine([6, 4])
    >>> bound = ng.helmholtz.NaturalWakeSleep(machine, lr=0.1).step(torch.rand(20, 6).round())
"""

from natgrad.ground.messages import resolve_names
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.natural_wake_sleep import NaturalWakeSleep, UnitFisher
from natgrad.helmholtz.phases import Algorithm, Bidirectional, Classic, Reweighted
from natgrad.helmholtz.wake_sleep import WakeSleep

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

resolve_names(__name__)
