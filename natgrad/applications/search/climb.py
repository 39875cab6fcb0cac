"""Climbs of bits: the children of one point, which replace it where they are no worse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

POWER = 1.5  # in how many bits children of a stuck parent differ from it: k with a chance of k^-1.5


class Climb:
    """A (1 + lambda)-EA of bits, none of whose children repeats its parent.

    Attributes:
        parent: The best point so far, and of equal ones the last: it drifts where values do not change. Shape (n,).
        value: Its value; infinity before the first evaluation.
        spent: Evaluations so far.
        gap: The longest time without a better value, in evaluations, that ended with one.
    """

    def __init__(self, parent: Tensor) -> None:
        self.parent, self.value = parent, math.inf
        self.spent = self.gap = self._gained = 0

    @property
    def since(self) -> int:
        """Evaluations since the last better value."""
        return self.spent - self._gained

    def draw_children(self, draws: Tensor, margin: float, stuck: bool, generator: torch.Generator) -> Tensor:
        """Children of the parent: each bit flips with a chance of `margin`, and at least one does.

        Where the climb is stuck, k bits flip with a chance of k^-1.5 (Doerr et al. 2017, heavy tails).

        Args:
            draws: Uniform numbers, shape (count, n).
            margin: Between 0 and 1/2.
            stuck: True for heavy tails: two local minima may differ in several bits.
            generator: Of further draws.
        """
        n = draws.shape[1]
        if stuck:
            sizes = torch.arange(1, max(1, n // 2) + 1, dtype=torch.float64)
            counts = 1 + torch.multinomial(sizes**-POWER, len(draws), replacement=True, generator=generator)
            flips = draws.argsort(1).argsort(1) < counts.unsqueeze(1)
        else:
            flips = draws < margin
            none = (~flips.any(1)).nonzero().squeeze(1)
            flips[none, draws[none].argmin(1)] = True
        return (self.parent - flips.to(torch.float64)).abs()

    def accept(self, points: Tensor, values: Tensor) -> None:
        """Go on from the best of some points, if it is no worse than the parent; of equal ones from the last.

        Args:
            points: Shape (count, n); there may be none.
            values: f of them, shape (count,).
        """
        self.spent += len(values)
        if not len(values) or float(least := values.min()) > self.value:
            return
        if float(least) < self.value:
            self.gap, self._gained = max(self.gap, self.since), self.spent
        place = int((values == least).nonzero()[-1])
        self.parent, self.value = points[place].clone(), float(least)

    def begin_counts(self) -> None:
        """Forget the evaluations so far, but not the parent."""
        self.spent = self.gap = self._gained = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes."""
        return {"parent": self.parent, "value": self.value, "counts": (self.spent, self.gap, self._gained)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there.

        Args:
            state: From `state_dict`.
        """
        self.parent, self.value = state["parent"], state["value"]
        self.spent, self.gap, self._gained = state["counts"]
