"""Steps of reweighted wake-sleep on drawn bits, plain, with Adam and natural, refreshes included."""

from __future__ import annotations

import torch

import natgrad as ng
from benchmarks.timing import Work, ratios

CYCLE = 60  # steps that are timed together: a few times those between two refreshes
WARM = 100  # steps before, since refreshes are rarer later
SIZES = (([64, 32, 16], 50), ([784, 200, 200, 10], 100), ([784, 300, 200, 100, 75, 50, 35, 25, 20, 15, 10, 10], 100))
TITLE = f"One step of reweighted wake-sleep, 5 draws, from {{}} cycles of {CYCLE}"
HEADS = ("Adam / plain", "natural / plain", "exact blocks / plain")


def report(cycles: int) -> list[tuple[str, ...]]:
    """Rows: a machine, its batch, and the ratios."""
    return [
        (f"{'-'.join(map(str, sizes))}, batch {batch}", *measure_machine(sizes, batch, cycles))
        for sizes, batch in SIZES
    ]


def measure_machine(sizes: list[int], batch: int, cycles: int) -> list[str]:
    """One machine. Exact blocks of the widest one take gigabytes and are left out."""
    x = (torch.rand(batch, sizes[0], generator=torch.Generator().manual_seed(0)) < 0.2).float()
    works = {
        "Adam": cycle(ng.WakeSleep(machine(sizes), optimizer=lambda p: torch.optim.Adam(p, 1e-3)), x),
        "natural": cycle(ng.NaturalWakeSleep(machine(sizes), 0.01, damping=0.3), x),
    }
    if len(sizes) < 5:
        works["exact"] = cycle(ng.NaturalWakeSleep(machine(sizes), 0.01, damping=0.3, exact=True), x)
    times = ratios(cycle(ng.WakeSleep(machine(sizes), 0.01), x), works, cycles)
    return [str(times[name]) if name in times else "" for name in ("Adam", "natural", "exact")]


def machine(sizes: list[int]) -> ng.HelmholtzMachine:
    torch.manual_seed(0)
    return ng.HelmholtzMachine(sizes)


def cycle(trainer: ng.WakeSleep, x: torch.Tensor) -> Work:
    """CYCLE steps of a trainer that has taken WARM."""

    def steps(many: int) -> None:
        for _ in range(many):
            trainer.step(x)

    steps(WARM)
    return lambda: steps(CYCLE)
