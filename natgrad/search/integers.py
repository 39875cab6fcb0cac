"""Integers among the variables of a Gaussian search: a chance for each of them, and an end that is a minimum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.ground.states import Stateful


def keep_integer_margin(
    mean: Tensor, deviation: Tensor, lower: Tensor, upper: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Means and standard deviations (k,) of integer variables, moved so that other integers keep a chance."""
    # A variable is rounded from N(mean, deviation^2). Between its bounds, the integers below and those above its
    # present one get a chance of margin / 2 each; at a bound, those on the other side get `margin`. Hamano et al. 2022.
    mode = mean.round().clamp(lower, upper)
    low, high = mode - 0.5, mode + 0.5
    inner_mean, inner_deviation = keep_inner_margin(mean, deviation, low, high, margin)
    reach = -find_quantile(torch.full_like(mean, margin)) * deviation
    at_lower, at_upper = mode <= lower, mode >= upper
    edge_mean = torch.where(at_lower, torch.maximum(mean, high - reach), torch.minimum(mean, low + reach))
    edge = at_lower | at_upper
    return torch.where(edge, edge_mean, inner_mean), torch.where(edge, deviation, inner_deviation)


def keep_inner_margin(
    mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """The case between bounds: P(x < low) and P(x > high) of at least margin / 2, by mean and deviation together."""
    below = torch.special.ndtr((low - mean) / deviation)
    above = torch.special.ndtr((mean - high) / deviation)
    least = margin / 2
    raised = [chance.clamp(min=least) for chance in (below, above)]
    middle = 1 - below - above
    excess = 1 - raised[0] - raised[1] - middle  # taken from all, in proportion to what they can spare
    share = excess / (raised[0] + raised[1] + middle - 3 * least).clamp(min=1e-12)
    left, right = (-find_quantile(chance + share * (chance - least)) for chance in raised)
    changed = (below < least) | (above < least)
    wide = (high - low) / (left + right).clamp(min=1e-12)
    return torch.where(changed, low + left * wide, mean), torch.where(changed, wide, deviation)


def move_repeats(
    points: Tensor, centre: Tensor, integer: Tensor, lower: Tensor, upper: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Candidates of which every second one that repeats the centre has one integer variable moved."""
    # By one step at a chance of 1/2, by two at 1/4, and so on: the margin reaches the next integer only, and a search
    # would end where a better one lies two steps away. Nothing repeats the centre where a variable is real.
    repeats = (points == centre).all(1)
    moved = repeats & (repeats.cumsum(0) % 2 == 0)
    if not bool(moved.any()):
        return points
    place, length, side = torch.rand(
        3, len(points), generator=generator, dtype=points.dtype, device=points.device
    ).unbind()
    columns = integer.nonzero().squeeze(1)
    column = columns[(place * len(columns)).long().clamp(max=len(columns) - 1)]
    steps = 1 - length.clamp(min=2.0**-30).log2().ceil()
    goal = centre[column] + torch.where(side < 0.5, -steps, steps)
    goal = goal.clamp(lower[column], upper[column]).unsqueeze(1)
    return torch.where(moved.unsqueeze(1), points.scatter(1, column.unsqueeze(1), goal), points)


def find_quantile(chance: Tensor) -> Tensor:
    """Phi^-1, the quantiles of N(0, 1)."""
    return torch.special.ndtri(chance.clamp(1e-300, 1 - 1e-16))


class TriedNeighbours(Stateful):
    """Which points, one step away from the best one in one variable, had a value while a search asked for them."""

    STATE = ("best", "tried")

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self.lower, self.upper = lower, upper
        self.best = lower
        self.tried = torch.zeros(2, len(lower), dtype=torch.bool, device=lower.device)

    def start(self, best: Tensor) -> None:
        """Forget what was tried."""
        self.best, self.tried = best.clone(), torch.zeros_like(self.tried)

    def record(self, points: Tensor) -> None:
        """Take a generation into account."""
        steps = points - self.best
        beside = steps[steps.abs().sum(1) == 1]  # one variable of integers differs, by one
        self.tried = self.tried | torch.stack([(beside == -1).any(0), (beside == 1).any(0)])

    def put_untried(self, points: Tensor) -> Tensor:
        """Candidates of which the first ones are neighbours that have no value yet, as many as there are."""
        side, column = self.find_untried().nonzero()[: len(points)].unbind(1)
        candidates = points.clone()
        candidates[: len(side)] = self.best
        candidates[torch.arange(len(side), device=side.device), column] += (2 * side - 1).to(points.dtype)
        return candidates

    def find_untried(self) -> Tensor:
        """True for neighbours below (first row) and above that lie within the bounds and have no value, (2, d)."""
        outside = torch.stack([self.best <= self.lower, self.best >= self.upper])
        return ~(self.tried | outside)


def as_integer_mask(integers: Any, x0: Tensor) -> Tensor:
    """True for the variables that are rounded, shape (d,)."""
    mask = torch.zeros(len(x0), dtype=torch.bool, device=x0.device)
    if integers is None:
        return mask
    chosen = torch.as_tensor(integers, device=x0.device)
    if chosen.dtype == torch.bool:
        if chosen.shape != x0.shape:
            raise ValueError(f"integers is a mask of shape {tuple(chosen.shape)}, expected {tuple(x0.shape)}")
        return chosen.clone()
    if chosen.is_floating_point() and len(chosen):
        raise ValueError(f"integers is {integers!r}, expected indices of variables or a mask of {len(x0)} booleans")
    chosen = chosen.long()
    if len(chosen) and not bool(((chosen >= -len(x0)) & (chosen < len(x0))).all()):
        raise ValueError(f"integers is {integers!r}, expected indices below {len(x0)}, the number of variables")
    mask[chosen] = True
    return mask


def round_bounds(lower: Tensor, upper: Tensor, integer: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of integer variables moved inwards to integers."""
    lower, upper = torch.where(integer, lower.ceil(), lower), torch.where(integer, upper.floor(), upper)
    wrong = (integer & (lower > upper)).nonzero()
    if len(wrong):
        raise ValueError(f"integers: no integer lies within the bounds of variable {int(wrong[0])}")
    return lower, upper
