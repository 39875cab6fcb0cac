"""How widely real actions are explored at first: half the bounds, or a third of that where episodes last longer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from natgrad.applications.policy.environments import Episode
from natgrad.applications.policy.heads import GaussianHead, Head

SHARE = 1 / 3
"""Of half the bounds, the width that is tried."""
SURE = 3.0
"""Standard errors by which its mean return must be the higher one."""
UNIT = 1.0
"""Of the environment: a narrower width is not tried, since the second batch does not tell what it costs later on."""
FEWEST = 5
"""Episodes of a batch that decide anything."""


class WidthTrial:
    """Tries a third of the width in the second batch, if the task ended all episodes of the first; keeps the better.

    A wide start throws a balanced pendulum over. A task whose episodes last until a time limit is left alone: there a
    wide start is what swings it up.

    Args:
        set_share: Called with the share of half the bounds that one unit of the policy's outputs is.
        possible: Whether anything is tried.
    """

    def __init__(self, set_share: Callable[[float], None], possible: bool) -> None:
        self.set_share = set_share
        self.share, self.left = 1.0, 2 if possible else 0
        self.wide: list[float] = []

    def look_at(self, episodes: Sequence[Episode]) -> None:
        """Take in the episodes of a batch, and choose the width of the next one.

        Args:
            episodes: Those that ended in it.
        """
        if not self.left:
            return
        self.left -= 1
        returns = [one.ret for one in episodes]
        if self.left and len(returns) >= FEWEST and all(one.terminated for one in episodes):
            self.wide = returns
            self._choose(SHARE)
        elif self.left:
            self.left = 0
        elif not is_higher(returns, self.wide):
            self._choose(1.0)

    def state_dict(self) -> dict[str, Any]:
        """What changes."""
        return {"share": self.share, "left": self.left, "wide": list(self.wide)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.left, self.wide = state["left"], list(state["wide"])
        if state["share"] != self.share:
            self._choose(state["share"])

    def _choose(self, share: float) -> None:
        self.share = share
        self.set_share(share)


def is_wide(head: Head) -> bool:
    """True if a third of every entry's width is one unit of the environment or more.

    Args:
        head: The distribution of actions.
    """
    return isinstance(head, GaussianHead) and bool((SHARE * head.units >= UNIT).all())


def is_higher(returns: Sequence[float], others: Sequence[float]) -> bool:
    """True if the mean of the first is the higher one by three standard errors."""
    if len(returns) < FEWEST:
        return False
    gain = float(np.mean(returns) - np.mean(others))
    return gain > SURE * math.sqrt(np.var(returns) / len(returns) + np.var(others) / len(others))
