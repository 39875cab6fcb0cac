"""Generations whose points are evaluated while those of the next are drawn: no worker waits for the slowest."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.applications.search.base import Search
from natgrad.applications.search.black_box import BlackBox


class AheadEvaluations:
    """Keeps popsize + `ahead` points with the workers, and gives out the first popsize that have an answer.

    Points beyond the generation are drawn from the distribution before it moves. The search is told them with the next
    one, as points that it did not ask for, and shortens their steps where they are too long (Hansen 2011,
    arXiv:1110.4181). Which points a generation has depends on who answers first: two runs differ even with one seed.

    Args:
        objective: f, with workers.
        ahead: Points beyond the generation.
    """

    def __init__(self, objective: BlackBox, ahead: int) -> None:
        self.objective, self.ahead = objective, ahead
        self._search: Search | None = None

    def evaluate_generation(self, search: Search) -> tuple[Tensor, Tensor]:
        """Points (popsize, d) and values (popsize,) of the next generation, NaN where f had none.

        Args:
            search: Whose distribution the points are drawn from; those of another search are dropped.
        """
        if search is not self._search:
            self.objective.drop_started()
            self._search = search
        points: list[Tensor] = []
        values: list[float] = []
        while len(points) < search.popsize:
            missing = search.popsize - len(points) + self.ahead - self.objective.in_flight
            if missing > 0:
                drawn = [search.ask() for _ in range(-(-missing // search.popsize))]
                self.objective.start(torch.cat(drawn)[:missing])
            answered = self.objective.take_answered()
            points += [point for point, _ in answered]
            values += [value for _, value in answered]
        size = search.popsize  # there are more only where all were given up at once
        return torch.stack(points[:size]), torch.tensor(values[:size], dtype=torch.float64, device=points[0].device)
