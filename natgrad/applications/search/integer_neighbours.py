"""Which neighbours of the best integer point were evaluated, so that a search knows a minimum of its neighbourhood."""

from __future__ import annotations

import torch
from torch import Tensor


class TriedNeighbours:
    """Records which points, one step away from the best one in one variable, had a value while a search asked for them.

    Args:
        lower: Lower bounds of the integer variables, integers or -infinity, shape (d,).
        upper: Upper bounds, integers or infinity, shape (d,).
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self.lower, self.upper = lower, upper
        self.best = lower
        self.tried = torch.zeros(2, len(lower), dtype=torch.bool, device=lower.device)

    def start(self, best: Tensor) -> None:
        """Forget what was tried.

        Args:
            best: The best point, shape (d,), whose neighbours are meant from now on.
        """
        self.best, self.tried = best.clone(), torch.zeros_like(self.tried)

    def record(self, points: Tensor) -> None:
        """Take a generation into account.

        Args:
            points: What was evaluated, shape (p, d), and is not better.
        """
        steps = points - self.best
        beside = steps[steps.abs().sum(1) == 1]  # one variable of integers differs, by one
        self.tried = self.tried | torch.stack([(beside == -1).any(0), (beside == 1).any(0)])

    def is_minimum(self) -> bool:
        """True if every neighbour within the bounds had a value."""
        return not bool(self._find_untried().any())

    def put_untried(self, points: Tensor) -> Tensor:
        """Candidates of which the first ones are neighbours that have no value yet, as many as there are.

        Args:
            points: Candidates, shape (p, d).
        """
        side, column = self._find_untried().nonzero()[: len(points)].unbind(1)
        found = points.clone()
        found[: len(side)] = self.best
        found[torch.arange(len(side), device=side.device), column] += (2 * side - 1).to(points.dtype)
        return found

    def _find_untried(self) -> Tensor:
        """True for neighbours below (first row) and above that lie within the bounds and have no value, (2, d)."""
        outside = torch.stack([self.best <= self.lower, self.best >= self.upper])
        return ~(self.tried | outside)

    def state_dict(self) -> dict[str, Tensor]:
        """What has been recorded."""
        return {"best": self.best, "tried": self.tried}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from there.

        Args:
            state: From `state_dict`.
        """
        self.best, self.tried = state["best"].clone(), state["tried"].clone()
