"""Search of continuous variables by a Gaussian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import leaves
from natgrad.search.base import Best, Search, as_popsize, new_generator, next_seed
from natgrad.search.convergence import ConvergenceMonitor, Tolerances
from natgrad.search.domain import (
    Domain,
    as_bounds,
    as_integer_mask,
    as_point,
    as_scales,
    as_tensor,
    round_bounds,
)
from natgrad.search.full_covariance import Full
from natgrad.search.model import GaussianModel, State
from natgrad.search.ranking import Ranking


def keep_integer_margin(
    mean: Tensor, deviation: Tensor, lower: Tensor, upper: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Means and standard deviations (k,) of integer variables, moved so that other integers keep a chance.

    A variable is rounded from N(mean, deviation^2). Between its bounds, the integers below and those above its present
    one get a chance of margin / 2 each; at a bound, those on the other side get `margin`.

    Reference:
        Hamano et al. 2022.

    mean: (k,). deviation: Standard deviations, (k,). lower: Lower bounds, integers or -infinity, (k,). upper:
    Upper bounds, integers or infinity, (k,).
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

    mean: (k,). deviation: Standard deviations, (k,). low: Where the present integer begins, (k,). high: Where it
    ends, (k,).
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

    points: Candidates, (p, d). centre: The point at the distribution's centre, (d,). integer: True for the variables
    that are rounded, (d,). lower: Lower bounds, (d,). upper: Upper bounds, (d,).
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

    chance: Numbers in (0, 1).
    """
    return torch.special.ndtri(chance.clamp(1e-300, 1 - 1e-16))


# Which neighbours of the best integer point were evaluated, so that a search knows a minimum of its neighbourhood


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

        best: The best point, (d,), whose neighbours are meant from now on.
        """
        self.best, self.tried = best.clone(), torch.zeros_like(self.tried)

    def record(self, points: Tensor) -> None:
        """Take a generation into account.

        points: What was evaluated, (p, d), and is not better.
        """
        steps = points - self.best
        beside = steps[steps.abs().sum(1) == 1]  # one variable of integers differs, by one
        self.tried = self.tried | torch.stack([(beside == -1).any(0), (beside == 1).any(0)])

    def is_minimum(self) -> bool:
        """True if every neighbour within the bounds had a value."""
        return not bool(self._find_untried().any())

    def put_untried(self, points: Tensor) -> Tensor:
        """Candidates of which the first ones are neighbours that have no value yet, as many as there are.

        points: Candidates, (p, d).
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
        """Continue from there."""
        self.best, self.tried = state["best"].clone(), state["tried"].clone()


# Draws of a generation that do not repeat one another: normal vectors at right angles


def draw_orthogonal_normals(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors z_i of N(0, I) of which d at a time are orthogonal, shape (count, d).

    Each row by itself is a draw from N(0, I): its direction is uniform, and its length is the one that was drawn for
    it. Means over a generation of functions that are linear or quadratic in z vary less than with independent rows.

    Reference:
        Wang, Emmerich & Baeck 2019, *Mirrored orthogonal sampling for covariance matrix adaptation evolution
        strategies*, of which only the orthogonality is taken.

    like: A vector (d,) of the dtype and on the device that are wanted.
    """
    d = len(like)
    normals = torch.randn(count, d, generator=generator, dtype=like.dtype, device=like.device)
    whole = count - count % d
    parts = [normals[:whole].view(-1, d, d), normals[whole:].unsqueeze(0)]
    return torch.cat([make_orthogonal(part).reshape(-1, d) for part in parts if part.numel()])


def make_orthogonal(rows: Tensor) -> Tensor:
    """Gram and Schmidt's rows, each with the length that it had.

    rows: (..., k, d) with k <= d.
    """
    q, r = torch.linalg.qr(rows.mT)
    signs = torch.copysign(torch.ones_like(r[..., 0]), r.diagonal(dim1=-2, dim2=-1))  # LAPACK leaves the sign open
    return q.mT * (signs * rows.norm(dim=-1)).unsqueeze(-1)


# Search of continuous variables by a Gaussian

Bounds = tuple[Any, Any] | list[Any] | Tensor | None

FAR = 1e4  # deviations at which candidates have to be finite
OVERFLOW = "overflow: the next step would leave the range of the numbers; f seems to fall without end"
NEIGHBOURS = "converged: every integer point next to the best one was evaluated, and none is better"
STALLED = ("stagnation", "condition")
"""Ends before which a search of integers alone evaluates the neighbours of its best point."""


class GaussianSearch(Search):
    """Search by a Gaussian N(mean, sigma^2 C) whose parameters follow the natural gradient of the expected rank.

    Everything is float64, on the device of x0.

    Args:
        x0: Where to start, shape (d,).
        sigma0: The standard deviation at the start, a number or one per variable (d,): about a third of the distance at
            which you would look for the minimum.
        popsize: Candidates per generation; default 4 + floor(3 ln d).
        seed: Of the search's own generator; None for another one each time.
        bounds: (lower, upper), each a number, a vector (d,) or None; every candidate lies within.
        integers: Indices of the variables that are rounded, or a mask (d,). Other integers than the present one keep a
            chance of at least 1 / (popsize d). Where all variables are integers, steps count as rounded.
        model: How C is stored and moved: `Full()` (default), `Separable()`, `LowRank()`, `SparsePrecision(edges)` or
            `XNES()` from `ng.search`.
        tolerances: When to stop, `Tolerances(...)`.

    Raises:
        ValueError: If x0 is not finite or out of bounds, bounds are inverted, sigma0 is not positive, or popsize is
            below 2.

    Reference:
        Hansen 2016; Ollivier et al. 2017; Hamano et al. 2022 for integers.

    Example:
        >>> search = ng.GaussianSearch([3.0, -2.0], sigma0=1.0, seed=0)
        >>> while search.stop() is None:
        ...     X = search.ask()  # (popsize, 2)
        ...     search.tell(X, ((X - 1) ** 2).sum(1))
        >>> search.best.fun < 1e-10
        True
    """

    def __init__(
        self,
        x0: Tensor | Sequence[float],
        sigma0: float | Tensor,
        popsize: int | None = None,
        seed: int | None = None,
        bounds: Bounds = None,
        *,
        integers: Any = None,
        model: GaussianModel | None = None,
        tolerances: Tolerances | None = None,
    ) -> None:
        start = as_point(x0, "x0")
        sigma, scale = as_scales(sigma0, start)
        lower, upper = as_bounds(bounds, start)
        integer = as_integer_mask(integers, start)
        self._arguments = (start, as_tensor(sigma0, "sigma0"), (lower, upper), integer, model, tolerances)
        self.domain = Domain.of(scale, *round_bounds(lower, upper, integer), integer)
        self.model = Full() if model is None else model
        self.model.check(len(start))
        self.popsize = as_popsize(popsize, self.model.popsize(len(start)))
        self.nfev, self.nit, self._overflown = 0, 0, False
        inside = torch.maximum(torch.minimum(start.round(), self.domain.upper), self.domain.lower)
        self.best = Best(torch.where(integer, inside, start), torch.inf, 0)
        self._generator = new_generator(seed, start.device)
        self._state: State = self.model.start(self.domain.latent(start), sigma, self.popsize)
        if self.domain.mixed:
            self._state["stretch"] = torch.ones_like(start)
            self._keep_margin()
        self._neighbours = TriedNeighbours(self.domain.lower, self.domain.upper) if bool(integer.all()) else None
        self._stalled: str | None = None
        self._asked: tuple[Tensor, Tensor, Tensor] | None = None
        chosen = Tolerances() if tolerances is None else tolerances
        # a better integer comes with a chance of about 1 / popsize in a generation: equal values say less
        self._monitor = ConvergenceMonitor(
            chosen, len(start), self.popsize, sigma, patience=3 if self.domain.mixed else 1
        )

    @property
    def state(self) -> State:
        """The distribution in the search's own coordinates: `mean`, `sigma`, and what its model keeps."""
        return self._state

    @property
    def mean(self) -> Tensor:
        """The point at the centre of the distribution (d,)."""
        return self.domain.points(self._state["mean"])

    @property
    def sigma(self) -> float:
        """The common factor of the standard deviations."""
        return self._state["sigma"]

    def renew(self, popsize: int, run: int) -> GaussianSearch:
        start, sigma0, bounds, integers, model, tolerances = self._arguments
        settings = {"integers": integers, "model": model, "tolerances": tolerances}
        return GaussianSearch(start, sigma0, popsize, next_seed(self._generator, run), bounds, **settings)

    def ask(self) -> Tensor:
        mean = self._state["mean"]
        normals = draw_orthogonal_normals(self.popsize, mean, self._generator)
        steps = self.model.steps(self._state, normals)
        spread = steps * self._state["stretch"] if self.domain.mixed else steps
        points = self.domain.points(torch.add(mean, spread, alpha=self.sigma))
        if self.domain.mixed:
            domain = self.domain
            points = move_repeats(points, self.mean, domain.integer, domain.lower, domain.upper, self._generator)
        if self._neighbours is not None and self.asks_for_neighbours:
            points = self._neighbours.put_untried(points)
        self._asked = (points, normals, steps)
        return points.clone()

    def centre(self) -> Tensor:
        return self.mean

    def standardise(self, points: Tensor) -> Tensor:
        """(x_i - mean_i) / deviation_i: a sum of functions of single variables stays one.

        Args:
            points: x, shape (N, d), within the bounds.
        """
        return (self.domain.latent(points) - self._state["mean"]) / self._deviations()

    def locate(self, places: Tensor) -> Tensor:
        """x_i = mean_i + deviation_i z_i, within the bounds and rounded where integers are wanted.

        Args:
            places: z, shape (N, d).
        """
        return self.domain.points(self._state["mean"] + self._deviations() * places)

    def _deviations(self) -> Tensor:
        variances = self.model.variances(self._state)
        return self.sigma * (torch.ones_like(self._state["mean"]) if variances is None else variances.sqrt())

    def stop(self) -> str | None:
        if self._overflown:
            return OVERFLOW
        if self._neighbours is None or self._stalled is None:
            return self._find_reason()
        return f"{NEIGHBOURS} ({self._stalled})" if self._neighbours.is_minimum() else None

    def settles_above(self, target: float) -> bool:
        """True if the run ends at a value above the target: its last values are much closer to one another than to it.

        Where integers are among the variables this is never said: their steps come late.

        Args:
            target: The value that is wanted.
        """
        return not self.domain.mixed and self._monitor.has_settled(self.best.fun - target)

    @property
    def asks_for_neighbours(self) -> bool:
        """True while a search of integers evaluates the neighbours of its best point, at its end."""
        return self._stalled is not None

    def _find_reason(self) -> str | None:
        return self.model.trouble(self._state) or self._monitor.reason_to_stop()

    def measures(self) -> dict[str, float]:
        """`sigma`, and the `condition` number of the covariance where it is known."""
        found = {"sigma": self.sigma}
        return found | {"condition": self._state["condition"]} if "condition" in self._state else found

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": dict(self._state),
            "asked": self._asked,
            "generator": self._generator.get_state(),
            "best": (self.best.x, self.best.fun, self.best.nfev),
            "counts": (self.nfev, self.nit, self.popsize),
            "watch": self._monitor.state_dict(),
            "overflown": self._overflown,
            "neighbours": None if self._neighbours is None else self._neighbours.state_dict(),
            "stalled": self._stalled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["best"][0].shape != self.best.x.shape or state["counts"][2] != self.popsize:
            raise ValueError(
                f"the state is of a search with {len(state['best'][0])} variables and popsize {state['counts'][2]}, "
                f"this one has {len(self.best.x)} and {self.popsize}: build it with the same arguments"
            )
        if set(state["state"]) != set(self._state):
            raise ValueError(f"the state is of another model than {self.model}: build the search with the same model")
        self._state = dict(state["state"])
        self._asked = None if state["asked"] is None else tuple(state["asked"])
        self._generator.set_state(state["generator"])
        self.best = Best(*state["best"])
        self.nfev, self.nit, _ = state["counts"]
        self._monitor.load_state_dict(state["watch"])
        self._overflown = state.get("overflown", False)
        if self._neighbours is not None and state.get("neighbours") is not None:
            self._neighbours.load_state_dict(state["neighbours"])
        self._stalled = state.get("stalled")

    def _dim(self) -> int:
        return len(self.best.x)

    def _check_candidates(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points, values = super()._check_candidates(X, F)
        return self.domain.admit(points), values

    def _move(self, points: Tensor, values: Tensor) -> None:
        ranking = Ranking.of(values)
        normals, steps = self._recover_draws(points)
        if self._neighbours is not None:  # integers alone: steps of real variables shrink without end, beside which
            normals, steps = self._measure_rounded_steps(points, normals, steps)  # a whole one is out of proportion
        self._asked, before = None, self._state
        if not ranking.flat:
            order = ranking.order
            self._state = self.model.advance(self._state, normals[order], steps[order], ranking)
        elif torch.isfinite(values[0]):  # a plateau: look farther
            self._state = self._state | {"sigma": self.sigma * 1.2}
        self._overflown = not self._can_draw()
        if self._overflown:
            self._state = before
        if self.domain.mixed:
            self._keep_margin()
        self._monitor.record(values, self._largest_deviation(), self._state)
        if self._neighbours is not None:
            self._watch_neighbours(self._neighbours, points)

    def _watch_neighbours(self, neighbours: TriedNeighbours, points: Tensor) -> None:
        """Note whether the search of integers stalls: it ends when no neighbour is better, and goes on from one."""
        if self._stalled is not None:
            if torch.equal(self.best.x, neighbours.best):
                neighbours.record(points)
                return
            self._stalled = None
        why = self._find_reason()
        if why is not None and why.split(":")[0] in STALLED:
            self._stalled = why
            neighbours.start(self.best.x)

    def _can_draw(self) -> bool:
        """True if all numbers of the state are finite, and candidates far from the mean are, too."""
        mean, sigma = self._state["mean"], self.sigma
        if not (math.isfinite(sigma) and all(all_finite(part) for part in leaves(dict(self._state)))):
            return False
        steps = self.model.steps(self._state, torch.full_like(mean, FAR).unsqueeze(0))[0]
        return all_finite((mean + sigma * steps) * self.domain.scale)

    def _recover_draws(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z behind the points; points that were not asked for are treated as injected."""
        if self._asked is not None:
            asked, normals, steps = self._asked
            if torch.equal(points, asked):
                return normals, steps
            same = (points == asked).all(1, keepdim=True)
            z, y = self._shorten_foreign_steps(points)
            return torch.where(same, normals, z), torch.where(same, steps, y)
        return self._shorten_foreign_steps(points)

    def _measure_rounded_steps(self, points: Tensor, normals: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z with the steps to the integers that were evaluated, where these differ from those of the centre.

        A draw of 0.6 was evaluated at 1. If its step were 0.6, the mean would stay at 0 however much better 1 is, and
        the deviation would shrink below the grid.
        """
        whole = (self.domain.latent(points) - self._state["mean"]) / (self.sigma * self._state["stretch"])
        moved = self.domain.integer & (points != self.mean)
        steps = torch.where(moved, whole, steps)
        return torch.where(moved.any(1, keepdim=True), self.model.whiten(self._state, steps), normals), steps

    def _shorten_foreign_steps(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z of points from elsewhere, shortened to the length of typical draws: Hansen 2011."""
        steps = (self.domain.latent(points) - self._state["mean"]) / self.sigma
        if self.domain.mixed:
            steps = steps / self._state["stretch"]
        normals = self.model.whiten(self._state, steps)
        d = points.shape[1]
        shrink = ((d**0.5 + 2 * d / (d + 2)) / normals.norm(dim=1, keepdim=True)).clamp(max=1)
        return normals * shrink, steps * shrink

    def _keep_margin(self) -> None:
        """Move the means and stretch the deviations of integer variables, so that other integers keep a chance."""
        variances = self.model.variances(self._state)
        if variances is None:
            raise ValueError(
                f"{self.model} does not know its variances, which integers need: choose Full() or Separable()"
            )
        domain, chosen = self.domain, self.domain.integer
        unit = (self.sigma * variances.sqrt() * domain.scale)[chosen]
        mean, deviation = keep_integer_margin(
            (self._state["mean"] * domain.scale)[chosen],
            unit * self._state["stretch"][chosen],
            domain.lower[chosen],
            domain.upper[chosen],
            1 / (self.popsize * self._dim()),
        )
        moved, stretch = self._state["mean"].clone(), self._state["stretch"].clone()
        moved[chosen], stretch[chosen] = mean / domain.scale[chosen], deviation / unit
        self._state = self._state | {"mean": moved, "stretch": stretch}

    def _largest_deviation(self) -> float:
        """The largest standard deviation, in the search's own coordinates."""
        variances = self.model.variances(self._state)
        return self.sigma * (1.0 if variances is None else float(variances.max()) ** 0.5)
