"""Starting again: with growing populations (IPOP), or large and small ones in turn (BIPOP)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from natgrad.ground.checks import check_integer


@dataclass(frozen=True)
class Run:
    """One run of a restarted search.

    Args:
        popsize: Candidates per generation.
        shrink: Its sigma, as a multiple of sigma0.
        budget: Most evaluations; None for no bound.
        kind: `first`, `large` or `small`.
    """

    popsize: int
    shrink: float
    budget: int | None
    kind: str


class Restarts(ABC):
    """How often to start again, and with which populations.

    Attributes:
        times: Number of restarts.
    """

    times: int

    @abstractmethod
    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        """The next run, or None.

        Args:
            popsize: Of the first run.
            past: The runs so far, each with the evaluations that it took.
            uniform: Two draws in [0, 1).
        """


@dataclass(frozen=True)
class IPOP(Restarts):
    """Restarts with growing populations: each run has `factor` times the population of the last.

    Args:
        times: Restarts after the first run.
        factor: At least 1.

    Raises:
        ValueError: If a number is too small.

    Reference:
        Auger & Hansen 2005.
    """

    times: int = 9
    factor: float = 2.0

    def __post_init__(self) -> None:
        check_integer("times", self.times, 0, hint=": restarts after the first run")
        if not self.factor >= 1:
            raise ValueError(f"factor is {self.factor}, expected a number >= 1 that multiplies popsize")

    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        if len(past) > self.times:
            return None
        return Run(int(popsize * self.factor ** len(past)), 1.0, None, "large" if past else "first")


@dataclass(frozen=True)
class BIPOP(Restarts):
    """Restarts with large populations, doubled each time, and between them small ones with a small sigma.

    A small run comes while all small ones together took fewer evaluations than the large ones. Its population is drawn
    between the default and half of the last large one, its sigma between a hundredth of sigma0 and sigma0.

    Args:
        times: Restarts with a large population.

    Raises:
        ValueError: If it is negative.

    Reference:
        Hansen 2009.
    """

    times: int = 9

    def __post_init__(self) -> None:
        check_integer("times", self.times, 0, hint=": restarts with a large population")

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
    """The restarts that a number or a name stands for."""
    if isinstance(restarts, Restarts):
        return restarts
    named = {"ipop": IPOP, "bipop": BIPOP}
    if isinstance(restarts, str) and restarts.lower() in named:
        return named[restarts.lower()]()
    return IPOP(check_integer("restarts", restarts, 0, hint=": or IPOP(times), BIPOP(times), 'IPOP', 'BIPOP'"))
