"""Starting again: with growing populations (IPOP), or large and small ones in turn (BIPOP)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from natgrad.applications.search.base import as_count


@dataclass(frozen=True)
class Run:
    """One run of a restarted search: its popsize, its sigma as a multiple of sigma0, and its budget (None: none).

    kind: `first`, `large` or `small`.
    """

    popsize: int
    shrink: float
    budget: int | None
    kind: str


class Restarts(ABC):
    """How often to start again, and with which populations."""

    times: int

    @abstractmethod
    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        """The next run, or None.

        popsize: of the first run.   past: the runs so far, with the evaluations they took.   uniform: draws in [0, 1).
        """


@dataclass(frozen=True)
class IPOP(Restarts):
    """Each run has twice the population of the last: Auger and Hansen 2005.   times: restarts after the first run."""

    times: int = 9
    factor: float = 2.0

    def __post_init__(self) -> None:
        as_count(self.times, "times", 0, "restarts after the first run")
        if not self.factor >= 1:
            raise ValueError(f"factor is {self.factor}, expected a number >= 1 that multiplies popsize")

    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        if len(past) > self.times:
            return None
        return Run(int(popsize * self.factor ** len(past)), 1.0, None, "large" if past else "first")


@dataclass(frozen=True)
class BIPOP(Restarts):
    """Large populations, doubled each time, and between them small ones with a small sigma: Hansen 2009.

    times: restarts with a large population. A small run comes while all small ones took fewer evaluations than large
    ones; its population is drawn between the default and half the last large one, its sigma down to a hundredth.
    """

    times: int = 9

    def __post_init__(self) -> None:
        as_count(self.times, "times", 0, "restarts with a large population")

    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        if not past:
            return Run(popsize, 1.0, None, "first")
        large = [(run, used) for run, used in past if run.kind == "large"]
        small = sum(used for run, used in past if run.kind == "small")
        if large and small < sum(used for _, used in large):
            last = large[-1]
            size = int(popsize * (0.5 * last[0].popsize / popsize) ** (uniform[0] ** 2))
            return Run(max(size, 2), 10 ** (-2 * uniform[1]), last[1] // 2, "small")
        if len(large) >= self.times:
            return None
        return Run(popsize * 2 ** (len(large) + 1), 1.0, None, "large")


def as_restarts(restarts: Restarts | int | str) -> Restarts:
    """A number stands for that many restarts of `IPOP`, a name for the defaults of `IPOP` or `BIPOP`."""
    if isinstance(restarts, Restarts):
        return restarts
    named = {"ipop": IPOP, "bipop": BIPOP}
    if isinstance(restarts, str) and restarts.lower() in named:
        return named[restarts.lower()]()
    return IPOP(as_count(restarts, "restarts", 0, "or IPOP(times), BIPOP(times), 'IPOP', 'BIPOP'"))
