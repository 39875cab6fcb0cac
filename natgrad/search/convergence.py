"""When a search has nothing more to find: the usual criteria, Hansen 2016, B.3 and Hansen 2009."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.search.model import State

SETTLED = 1e-5  # of the distance from the target: values that lie within it belong to a run that ends elsewhere


@dataclass(frozen=True)
class Tolerances:
    """When a Gaussian search stops; 0 or None switches a criterion off.

    Args:
        tolx: Stop when all standard deviations are below tolx times sigma0.
        tolfun: Stop when the best values of the last generations and all values of this one lie within tolfun.
        flat: Stop after this many generations in a row in which all values were equal.
        stagnation: Stop when neither the best nor the median values get better over a long time.
        maxiter: Largest number of generations; None for no limit.

    Raises:
        ValueError: If a tolerance is negative.
    """

    tolx: float = 1e-11
    tolfun: float = 1e-11
    flat: int = 20
    stagnation: bool = True
    maxiter: int | None = None

    def __post_init__(self) -> None:
        for name in ("tolx", "tolfun", "flat"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number >= 0; 0 switches it off")


class ConvergenceMonitor:
    """Records each generation and says when to stop.

    Args:
        tolerances: The criteria.
        d: Number of variables.
        popsize: Candidates per generation.
        sigma0: The standard deviation at the start.
        patience: Multiplies the numbers of generations over which trends are judged.
    """

    def __init__(self, tolerances: Tolerances, d: int, popsize: int, sigma0: float, patience: int = 1) -> None:
        self.tolerances, self.sigma0 = tolerances, sigma0
        # long enough to see a trend: Hansen 2009, table of termination criteria
        self._recent: deque[float] = deque(maxlen=patience * (10 + -(-30 * d // popsize)))
        self._history: list[tuple[float, float]] = []
        self._patience = patience * (120 + 30 * d / popsize)
        self._flat = self._count = 0
        self._span = torch.inf
        self._verdict: str | None = None

    def record(self, values: Tensor, spread: float, state: State) -> None:
        """Take one generation into account.

        values: Of the candidates, (popsize,).
        """
        ordered = values.sort().values.tolist()
        best, worst, median = ordered[0], ordered[-1], ordered[len(ordered) // 2]
        self._count += 1
        self._flat = self._flat + 1 if best == worst else 0
        self._recent.append(best)
        self._history.append((best, median))
        del self._history[:-20000]
        if len(self._recent) == self._recent.maxlen and worst < torch.inf:
            self._span = max(*self._recent, worst) - min(*self._recent, best)
        else:
            self._span = torch.inf
        self._verdict = self._find_reason(best, worst, spread, state)

    def reason_to_stop(self) -> str | None:
        """Why to stop, or None."""
        return self._verdict

    def has_settled(self, distance: float) -> bool:
        """True if the values of the last generations, as in `tolfun`, lie within `SETTLED` of a distance."""
        return distance < torch.inf and self._span < SETTLED * distance

    def _find_reason(self, best: float, worst: float, spread: float, state: State) -> str | None:
        t = self.tolerances
        if t.maxiter is not None and self._count >= t.maxiter:
            return f"maxiter: {self._count} generations"
        if t.flat and self._flat >= t.flat:
            how = "equal" if best < torch.inf else "infinitely bad"
            return f"flat: all values were {how} for {self._flat} generations"
        if spread < t.tolx * self.sigma0:
            return f"tolx: all standard deviations are below {t.tolx:g} sigma0"
        if self._span < t.tolfun:
            return f"tolfun: the values of the last generations lie within {t.tolfun:g}"
        if torch.equal(state["mean"] + 0.2 * spread, state["mean"]):
            return "precision: steps are below the resolution of the numbers"
        if t.stagnation and self._stagnates():
            return "stagnation: neither the best nor the median value got better"
        return None

    def _stagnates(self) -> bool:
        """True if neither best nor median values fell over the last fifth of the history.

        The medians of its first and of its last third are compared.
        """
        if len(self._history) < self._patience or self._count % 10:
            return False
        window = self._history[-max(int(self._patience), len(self._history) // 5) :]
        third = int(0.3 * len(window))
        early, late = window[:third], window[-third:]
        return all(statistics.median(g[i] for g in late) >= statistics.median(g[i] for g in early) for i in (0, 1))

    def state_dict(self) -> dict[str, Any]:
        """What has been recorded."""
        return {
            "recent": list(self._recent),
            "history": list(self._history),
            "counts": (self._flat, self._count),
            "span": self._span,
            "verdict": self._verdict,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._recent.clear()
        self._recent.extend(state["recent"])
        self._history = [tuple(pair) for pair in state["history"]]
        self._flat, self._count = state["counts"]
        self._span = state.get("span", torch.inf)
        self._verdict = state["verdict"]
