"""From the search's own coordinates, which have no bounds, to the points that the user sees, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.states import Stateful

ROUNDED = 1e-6  # of a number: what float32 leaves out of it, with room


@dataclass(frozen=True)
class Domain:
    """Boxes and scales: x = fold(scale u), within lower <= x <= upper; a minimum on a bound looks like a smooth one."""

    scale: Tensor  # of each variable, shape (d,)
    lower: Tensor  # lower bounds, shape (d,); -infinity for none
    upper: Tensor  # upper bounds, shape (d,); infinity for none
    integer: Tensor  # True for the variables that are rounded, shape (d,)

    @cached_property
    def has_bounds(self) -> bool:
        """True if any bound is finite."""
        return bool(torch.isfinite(self.lower).any() or torch.isfinite(self.upper).any())

    @cached_property
    def has_integers(self) -> bool:
        """True if any variable is rounded."""
        return bool(self.integer.any())

    def points(self, latent: Tensor) -> Tensor:
        """x (..., d) of u, the search's own coordinates."""
        x = latent * self.scale
        if self.has_bounds:
            x = torch.where(self.integer, x, fold(x, self.lower, self.upper))
        if self.has_integers:
            x = torch.where(self.integer, x.round() + 0.0, x)  # 0.0 for -0.0
        return x.clamp(self.lower, self.upper) if self.has_bounds else x

    def admit(self, points: Tensor) -> Tensor:
        """The points (N, d), brought back to bounds and integers where they miss them by the round-off of float32."""
        admitted = torch.where(self.integer, points.round(), points).clamp(self.lower, self.upper)
        for row, i in ((points - admitted).abs() > ROUNDED * (1 + admitted.abs())).nonzero().tolist():
            kind = "an integer" if bool(self.integer[i]) else "a number"
            raise ValueError(
                f"X[{row}, {i}] is {float(points[row, i]):g}, expected {kind} within the bounds "
                f"[{float(self.lower[i]):g}, {float(self.upper[i]):g}] of variable {i}: tell points at which f may be "
                "evaluated, as ask() gives them"
            )
        return admitted

    def latent(self, points: Tensor) -> Tensor:
        """A u whose image is x (..., d), within the bounds."""
        if self.has_bounds:
            points = torch.where(self.integer, points, unfold(points, self.lower, self.upper))
        return points / self.scale


def measure_folds(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Width of the parabola beside each bound: (1 + |bound|) / 20, at most a quarter of the interval."""
    quarter = (upper - lower) / 4
    low, high = ((1 + bound.abs()) / 20 for bound in (lower, upper))
    ones = torch.ones_like(lower)
    return (
        torch.where(torch.isfinite(lower), torch.minimum(low, quarter), ones),
        torch.where(torch.isfinite(upper), torch.minimum(high, quarter), ones),
    )


def fold(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Any real x brought to lower <= x <= upper: unchanged inside, parabolas at the bounds, mirrored beyond."""
    a, b = measure_folds(lower, upper)
    first, last = lower - a, upper + b
    length = last - first
    both = torch.isfinite(length)
    turned = torch.remainder(x - first, torch.where(both, 2 * length, 1))  # mirrored with a period of two lengths
    turned = first + torch.minimum(turned, 2 * length - turned)
    mirrored = torch.where(torch.isfinite(lower), first + (x - first).abs(), last - (last - x).abs())
    free = torch.isinf(lower) & torch.isinf(upper)
    x = torch.where(free, x, torch.where(both, turned, mirrored))
    x = torch.where(x < lower + a, lower + (x - first).square() / (4 * a), x)
    return torch.where(x > upper - b, upper - (last - x).square() / (4 * b), x)


def unfold(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The inverse of `fold` that lies nearest to the box."""
    a, b = measure_folds(lower, upper)
    low = lower - a + 2 * (a * (x - lower).clamp(min=0)).sqrt()
    high = upper + b - 2 * (b * (upper - x).clamp(min=0)).sqrt()
    return torch.where(x < lower + a, low, torch.where(x > upper - b, high, x))


def as_point(value: Any, name: str) -> Tensor:
    """A float64 vector (d,), on the device of a tensor."""
    point = as_tensor(value, name)
    if point.dim() != 1 or not len(point):
        raise ValueError(f"{name} has shape {tuple(point.shape)}, expected a vector (d,) with d >= 1")
    for bad in (~torch.isfinite(point)).nonzero().flatten().tolist():
        raise ValueError(f"{name}[{bad}] is {float(point[bad])}, expected finite numbers: where does the search start?")
    return point


def as_tensor(value: Any, name: str) -> Tensor:
    """A float64 tensor of its own memory, on the device of a tensor, without a graph."""
    try:
        if isinstance(value, (list, tuple)) and value and all(isinstance(part, Tensor) for part in value):
            value = torch.stack(list(value))  # torch.as_tensor takes a list of single numbers alone
        return torch.as_tensor(value, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {type(value).__name__}, expected numbers: {error}") from error


def as_scales(sigma0: Any, x0: Tensor) -> tuple[float, Tensor]:
    """A common sigma and scales (d,) of geometric mean 1."""
    sigmas = as_tensor(sigma0, "sigma0").to(x0.device)
    if sigmas.shape not in (torch.Size([]), x0.shape):
        raise ValueError(f"sigma0 has shape {tuple(sigmas.shape)}, expected a number or one per variable {(len(x0),)}")
    if not bool((torch.isfinite(sigmas) & (sigmas > 0)).all()):
        raise ValueError(f"sigma0 is {sigma0}, expected standard deviations > 0: about a third of the region to search")
    if sigmas.dim() == 0:
        return float(sigmas), torch.ones_like(x0)
    common = float(sigmas.log().mean().exp())
    return common, sigmas / common


PAIRS = "a list of pairs, one per variable as in SciPy, becomes bounds=list(zip(*pairs))"
"""What to say where bounds may have been meant so."""


def as_bounds(bounds: Any, x0: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds, (d,) each."""
    if bounds is None:
        return torch.full_like(x0, -torch.inf), torch.full_like(x0, torch.inf)
    if not hasattr(bounds, "__len__") or isinstance(bounds, (str, dict)) or len(bounds) != 2:
        raise ValueError(
            f"bounds is {bounds!r}, expected a pair (lower, upper) of numbers, vectors (d,) or None; {PAIRS}"
        )
    sides: list[Tensor] = []
    for side, name, none in zip(bounds, ("lower", "upper"), (-torch.inf, torch.inf), strict=True):
        each = [none if bound is None else bound for bound in side] if isinstance(side, (list, tuple)) else side
        bound = as_tensor(none if each is None else each, f"bounds: {name}").to(x0.device)
        if bound.shape not in (torch.Size([]), x0.shape):
            raise ValueError(f"bounds: {name} has shape {tuple(bound.shape)}, expected a number or {tuple(x0.shape)}")
        if bool(bound.isnan().any()):
            raise ValueError(f"bounds: {name} is {side}, NaN is no bound; infinity or None is no limit")
        sides.append(bound.expand_as(x0).clone())
    lower, upper = sides
    for i in (~(lower < upper)).nonzero().flatten().tolist():
        raise ValueError(
            f"bounds are inverted at variable {i}: lower {float(lower[i])}, upper {float(upper[i])}, expected "
            f"lower < upper; leave a constant variable out of x; {PAIRS}"
        )
    for i in ((x0 < lower) | (x0 > upper)).nonzero().flatten().tolist():
        raise ValueError(f"x0[{i}] is {float(x0[i])}, outside its bounds [{float(lower[i])}, {float(upper[i])}]")
    return lower, upper


# Integers among the variables: a chance for each of them, and an end that is a minimum


def keep_integer_margin(
    mean: Tensor, deviation: Tensor, lower: Tensor, upper: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Means and standard deviations (k,) of integer variables, moved so that other integers keep a chance."""
    # A variable is rounded from N(mean, deviation^2). Between its bounds, the integers below and those above its
    # present one get a chance of margin / 2 each; at a bound, those on the other side get `margin`. Hamano et al. 2022.
    mode = mean.round().clamp(lower, upper)
    low, high = mode - 0.5, mode + 0.5
    # between the bounds: P(x < low) and P(x > high) of at least margin / 2, by mean and deviation together
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
    inner_mean, inner_deviation = torch.where(changed, low + left * wide, mean), torch.where(changed, wide, deviation)
    reach = -find_quantile(torch.full_like(mean, margin)) * deviation
    at_lower, at_upper = mode <= lower, mode >= upper
    edge_mean = torch.where(at_lower, torch.maximum(mean, high - reach), torch.minimum(mean, low + reach))
    edge = at_lower | at_upper
    return torch.where(edge, edge_mean, inner_mean), torch.where(edge, deviation, inner_deviation)


def move_repeats(points: Tensor, centre: Tensor, domain: Domain, generator: torch.Generator) -> Tensor:
    """Candidates of which every second one that repeats the centre has one integer variable moved."""
    # By one step at a chance of 1/2, by two at 1/4, and so on: the margin reaches the next integer only, and a search
    # would end where a better one lies two steps away. Nothing repeats the centre where a variable is real.
    repeats = (points == centre).all(1)
    moved = repeats & (repeats.cumsum(0) % 2 == 0)
    if not bool(moved.any()):
        return points
    draws = torch.rand(3, len(points), generator=generator, dtype=points.dtype, device=points.device)
    place, length, side = draws.unbind()
    columns = domain.integer.nonzero().squeeze(1)
    column = columns[(place * len(columns)).long().clamp(max=len(columns) - 1)]
    steps = 1 - length.clamp(min=2.0**-30).log2().ceil()
    goal = centre[column] + torch.where(side < 0.5, -steps, steps)
    goal = goal.clamp(domain.lower[column], domain.upper[column]).unsqueeze(1)
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
    inside = bool(((chosen >= -len(x0)) & (chosen < len(x0))).all())
    if len(chosen) and (chosen.is_floating_point() or not inside):
        raise ValueError(f"integers is {integers!r}, expected indices below {len(x0)} or a mask of {len(x0)} booleans")
    mask[chosen.long()] = True
    if int(mask.sum()) < len(chosen):
        raise ValueError(
            f"integers is {integers!r}, which names a variable twice, expected different indices, or a mask of "
            f"{len(x0)} booleans: torch.tensor(integers).bool() makes one of zeros and ones"
        )
    return mask


def round_bounds(lower: Tensor, upper: Tensor, integer: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of integer variables moved inwards to integers."""
    lower, upper = torch.where(integer, lower.ceil(), lower), torch.where(integer, upper.floor(), upper)
    for i in (integer & (lower > upper)).nonzero().flatten().tolist():
        raise ValueError(f"integers: no integer lies within the bounds of variable {i}")
    return lower, upper
