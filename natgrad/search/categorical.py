"""Search of variables with a few values each and no order among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.search.base import as_popsize, derive_seed, spell_arguments
from natgrad.search.ranking import CGA, PBIL, renew_update
from natgrad.search.relaxation import Relaxation, take_ranked_step


class CategoricalSearch(Relaxation):
    """Minimum over x with x_i in {0, ..., sizes_i - 1} by independent variables with a probability for every value.

    Candidates are the numbers of the values, as float64 (popsize, n). `probabilities` is a list of tensors (sizes_i,).

    Args:
        sizes: How many values each variable has, n integers >= 2.
        popsize: Candidates per generation; default a quarter of all values, at least 20.
        seed: Of the search's own generator; None for another one each time.
        update: `PBIL(rate)` or `CGA(population)`, which use ranks; None for the natural gradient by regression, which
            trusts the values of f.
        margin: Least probability of every value, so that none is lost; default 1 / n, shared by the other values of a
            variable.

    Raises:
        ValueError: If sizes, popsize or margin do not fit.

    Example:
        >>> goal = torch.tensor([2, 0, 3])
        >>> search = ng.search.CategoricalSearch((3, 4, 5), seed=0)
        >>> for _ in range(30):
        ...     X = search.ask()  # numbers of values, (popsize, 3)
        ...     search.tell(X, (X != goal).sum(1))
        >>> search.best.x.tolist()
        [2.0, 0.0, 3.0]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        popsize: int | None = None,
        seed: int | None = None,
        *,
        update: PBIL | CGA | None = None,
        margin: float | None = None,
    ) -> None:
        self.sizes = as_sizes(sizes)
        n, total = len(self.sizes), sum(self.sizes)
        self.update, self.margin = update, margin
        default = max(20, total // 4) if update is None else update.popsize(n)
        counts = torch.tensor(self.sizes)
        each = counts.to(torch.float64)
        if margin is not None and not 0 < margin * float(each.max()) < 1:
            most = int(counts.max())
            raise ValueError(f"margin is {margin}, expected a probability > 0 and below 1 / {most}, the most values")
        usual = torch.minimum(1 / (n * (each - 1)), 1 / (2 * each))
        least = usual if margin is None else torch.full_like(each, margin)
        self._least = torch.repeat_interleave(least, counts)  # the least probability of every value, (total,)
        self._owner = torch.repeat_interleave(torch.arange(n), counts)  # variable of each column
        self._start = counts.cumsum(0) - counts  # first column of each variable
        super().__init__(n, total, as_popsize(popsize, default), seed, float(each.log().sum()))
        settings = {"sizes": self.sizes, "popsize": self.popsize, "update": update, "margin": margin}
        self.arguments = spell_arguments(**settings, seed=seed)

    def renew(self, popsize: int, run: int) -> CategoricalSearch:
        update, size = renew_update(self.update, popsize, self.popsize)
        seed = derive_seed(self._generator, run)
        return CategoricalSearch(self.sizes, size, seed, update=update, margin=self.margin)

    @property
    def probabilities(self) -> list[Tensor]:
        """P(x_i = k), a tensor (sizes_i,) per variable."""
        return list(self._softmax(self.theta).split(self.sizes))

    def ask(self) -> Tensor:
        columns = [
            torch.multinomial(p, self.popsize, replacement=True, generator=self._generator) for p in self.probabilities
        ]
        return torch.stack(columns, 1).to(torch.float64)

    def statistics(self, points: Tensor) -> Tensor:
        """Indicators of the values (N, total), a column per value of each variable, at numbers of values (N, n)."""
        return points.new_zeros(len(points), len(self._owner)).scatter_(1, points.long() + self._start, 1.0)

    def _count_free(self) -> int:
        return len(self._owner) - len(self.sizes)  # the columns of a variable add up to one

    def _move(self, points: Tensor, values: Tensor) -> None:
        if self.update is None:
            super()._move(points, values)
            return
        self._count_equal_values(points, values)
        mean, samples = self._softmax(self.theta), self.statistics(points)
        moved = take_ranked_step(mean, samples, values, self.update, len(self.sizes)).clamp(min=0)
        self.theta = self._raise_to_least(moved).log()

    def _limit_parameters(self, theta: Tensor) -> Tensor:
        return self._raise_to_least(self._softmax(theta)).log()

    def _drop_limited(self, direction: Tensor) -> Tensor:
        """A value at its least probability stays there where the step would lower it: it moves as the others do."""
        probabilities = self._softmax(self.theta)
        least, held = probabilities <= self._least * (1 + 1e-9), torch.zeros_like(direction, dtype=torch.bool)
        while True:  # without those that are held the mean moves, and others may fall below it
            free = torch.where(held, 0.0, probabilities)
            mean = self._sum_by_variable(free * direction) / self._sum_by_variable(free)
            lowered = held | (least & (direction > mean))
            if torch.equal(lowered, held):
                return torch.where(held, mean, direction)
            held = lowered

    def _softmax(self, theta: Tensor) -> Tensor:
        """Probabilities (total,) of logits, variable by variable."""
        top = torch.full((len(self.sizes),), -torch.inf, dtype=theta.dtype)
        top = top.scatter_reduce(0, self._owner, theta, "amax")
        odds = (theta - top[self._owner]).exp()
        return odds / self._sum_by_variable(odds)

    def _raise_to_least(self, probabilities: Tensor) -> Tensor:
        """Probabilities (total,) of at least the margin; the excess above it is shrunk in proportion."""
        excess = (probabilities - self._least).clamp(min=0)
        return self._least + excess * (1 - self._sum_by_variable(self._least)) / self._sum_by_variable(excess)

    def _sum_by_variable(self, columns: Tensor) -> Tensor:
        """The sum over the columns of a variable, repeated in each of them."""
        return columns.new_zeros(len(self.sizes)).index_add_(0, self._owner, columns)[self._owner]

    def _check_candidates(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points, values = super()._check_candidates(X, F)
        if not bool(((points == points.floor()) & (points >= 0) & (points < torch.tensor(self.sizes))).all()):
            raise ValueError("X has entries that are no numbers of values, expected what ask() gave: 0 to sizes_i - 1")
        return points, values


def as_sizes(sizes: Any) -> list[int]:
    """How many values each variable has, as a list."""
    listed = isinstance(sizes, Sequence) or hasattr(sizes, "tolist")
    if not listed or not len(sizes):
        came = "empty" if listed else repr(sizes)
        raise ValueError(f"sizes is {came}, expected how many values each variable has, such as (3, 3, 5)")
    return [check_integer("sizes", size, 2, hint=": how many values a variable has") for size in sizes]
