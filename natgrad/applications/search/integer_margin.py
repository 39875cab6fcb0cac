"""Integer variables: the chance of leaving the present integer never falls below a margin."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_integer_margin(
    mean: Tensor, deviation: Tensor, lower: Tensor, upper: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Means and standard deviations (k,) of integer variables, moved so that other integers keep a chance.

    A variable is rounded from N(mean, deviation^2). Between its bounds, the integers below and those above its present
    one get a chance of margin / 2 each; at a bound, those on the other side get `margin`.

    Args:
        mean: Shape (k,).
        deviation: Standard deviations, shape (k,).
        lower: Lower bounds, integers or -infinity, shape (k,).
        upper: Upper bounds, integers or infinity, shape (k,).
        margin: The least chance of leaving the present integer.

    Reference:
        Hamano et al. 2022.
    """
    mode = torch.maximum(torch.minimum(mean.round(), upper), lower)
    low, high = mode - 0.5, mode + 0.5
    inner_mean, inner_deviation = keep_inner_margin(mean, deviation, low, high, margin)
    reach = -normal_quantile(torch.full_like(mean, margin)) * deviation
    at_lower, at_upper = mode <= lower, mode >= upper
    edge_mean = torch.where(at_lower, torch.maximum(mean, high - reach), torch.minimum(mean, low + reach))
    edge = at_lower | at_upper
    return torch.where(edge, edge_mean, inner_mean), torch.where(edge, deviation, inner_deviation)


def keep_inner_margin(
    mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """The case between bounds: P(x < low) and P(x > high) of at least margin / 2, by mean and deviation together.

    Args:
        mean: Shape (k,).
        deviation: Standard deviations, shape (k,).
        low: Where the present integer begins, shape (k,).
        high: Where it ends, shape (k,).
        margin: The least chance of leaving it.
    """
    below = torch.special.ndtr((low - mean) / deviation)
    above = torch.special.ndtr((mean - high) / deviation)
    least = margin / 2
    raised = [chance.clamp(min=least) for chance in (below, above)]
    middle = 1 - below - above
    excess = (
        1 - raised[0] - raised[1] - middle
    )  # what was added is taken from all, in proportion to what they can spare
    share = excess / (raised[0] + raised[1] + middle - 3 * least).clamp(min=1e-12)
    left, right = (-normal_quantile(chance + share * (chance - least)) for chance in raised)
    changed = (below < least) | (above < least)
    wide = (high - low) / (left + right).clamp(min=1e-12)
    return torch.where(changed, low + left * wide, mean), torch.where(changed, wide, deviation)


def move_repeats(
    points: Tensor, centre: Tensor, integer: Tensor, lower: Tensor, upper: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Candidates of which every second one that repeats the centre has one integer variable moved.

    By one step at a chance of 1/2, by two at 1/4, and so on: the margin reaches the next integer only, and a search
    would end where a better one lies two steps away. Nothing repeats the centre where a variable is real.

    Args:
        points: Candidates, shape (p, d).
        centre: The point at the distribution's centre, shape (d,).
        integer: True for the variables that are rounded, shape (d,).
        lower: Lower bounds, shape (d,).
        upper: Upper bounds, shape (d,).
        generator: Source of the draws; nothing is drawn where nothing is moved.

    Returns:
        Shape (p, d).
    """
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
    goal = torch.maximum(torch.minimum(goal, upper[column]), lower[column]).unsqueeze(1)
    return torch.where(moved.unsqueeze(1), points.scatter(1, column.unsqueeze(1), goal), points)


def normal_quantile(chance: Tensor) -> Tensor:
    """Phi^-1, the quantiles of N(0, 1).

    Args:
        chance: Numbers in (0, 1).
    """
    return torch.special.ndtri(chance.clamp(1e-300, 1 - 1e-16))
