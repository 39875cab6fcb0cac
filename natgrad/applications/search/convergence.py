"""When a search has nothing more to find: the usual criteria, Hansen 2016, B.3 and Hansen 2009."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.model import State


@dataclass(frozen=True)
class Tolerances:
    """When a Gaussian search stops; 0 or None switches a criterion off.

    tolx: all standard deviations below tolx sigma0.   tolfun: the best values of the last generations, and all values
    of this one, within tolfun.   stagnation: stop when neither bests nor medians get better over a long time.
    flat: generations in a row in which all values were equal.   maxiter: generations, None for no limit.
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


class Watch:
    """Looks at each generation and says when to stop."""

    def __init__(self, tolerances: Tolerances, d: int, popsize: int, sigma0: float, patience: int = 1) -> None:
        self.tolerances, self.sigma0 = tolerances, sigma0
        # long enough to see a trend: Hansen 2009, table of termination criteria
        self._recent: deque[float] = deque(maxlen=patience * (10 + -(-30 * d // popsize)))
        self._history: list[tuple[float, float]] = []
        self._patience = patience * (120 + 30 * d / popsize)
        self._flat = self._count = 0
        self._verdict: str | None = None

    def see(self, values: Tensor, spread: float, state: State) -> None:
        """One generation's values (popsize,), the largest standard deviation, and the state after it."""
        ordered = values.sort().values.tolist()
        best, worst, median = ordered[0], ordered[-1], ordered[len(ordered) // 2]
        self._count += 1
        self._flat = self._flat + 1 if best == worst else 0
        self._recent.append(best)
        self._history.append((best, median))
        del self._history[:-20000]
        self._verdict = self._judge(best, worst, spread, state)

    def verdict(self) -> str | None:
        """Why to stop, or None."""
        return self._verdict

    def _judge(self, best: float, worst: float, spread: float, state: State) -> str | None:
        t = self.tolerances
        if t.maxiter is not None and self._count >= t.maxiter:
            return f"maxiter: {self._count} generations"
        if t.flat and self._flat >= t.flat:
            how = "equal" if best < torch.inf else "infinitely bad"
            return f"flat: all values were {how} for {self._flat} generations"
        if spread < t.tolx * self.sigma0:
            return f"tolx: all standard deviations are below {t.tolx:g} sigma0"
        if len(self._recent) == self._recent.maxlen and worst < torch.inf:
            span = max(*self._recent, worst) - min(*self._recent, best)
            if span < t.tolfun:
                return f"tolfun: the values of the last generations lie within {t.tolfun:g}"
        if torch.equal(state["mean"] + 0.2 * spread, state["mean"]):
            return "precision: steps are below the resolution of the numbers"
        if t.stagnation and self._stagnates():
            return "stagnation: neither the best nor the median value got better"
        return None

    def _stagnates(self) -> bool:
        """Whether neither bests nor medians fell from the first to the last third of the last fifth of the history."""
        if len(self._history) < self._patience or self._count % 10:
            return False
        window = self._history[-max(int(self._patience), len(self._history) // 5) :]
        third = int(0.3 * len(window))
        early, late = window[:third], window[-third:]
        return all(statistics.median(g[i] for g in late) >= statistics.median(g[i] for g in early) for i in (0, 1))

    def state_dict(self) -> dict[str, Any]:
        """What has been seen."""
        return {
            "recent": list(self._recent),
            "history": list(self._history),
            "counts": (self._flat, self._count),
            "verdict": self._verdict,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._recent.clear()
        self._recent.extend(state["recent"])
        self._history = [tuple(pair) for pair in state["history"]]
        self._flat, self._count = state["counts"]
        self._verdict = state["verdict"]
