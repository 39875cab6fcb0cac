"""Search of continuous variables by a Gaussian."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_number
from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import leaves
from natgrad.ground.states import Stateful
from natgrad.search.base import Best, Search, as_popsize, build_generator, derive_seed, spell_arguments
from natgrad.search.cma import Full
from natgrad.search.domain import (
    Domain,
    TriedNeighbours,
    as_bounds,
    as_integer_mask,
    as_point,
    as_scales,
    as_tensor,
    keep_integer_margin,
    move_repeats,
    round_bounds,
)
from natgrad.search.model import GaussianModel, State
from natgrad.search.ranking import Ranking

Bounds = tuple[Any, Any] | list[Any] | Tensor | None

FAR = 1e4  # deviations at which candidates have to be finite
OVERFLOW = "overflow: the next step would leave the range of the numbers; f seems to fall without end"
NEIGHBOURS = "converged: every integer point next to the best one was evaluated, and none is better"
STALLED = ("stagnation", "condition", "tolx", "tolfun", "precision")
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

    STATE = ("_asked", "_generator", "_monitor", "_overflown", "_neighbours", "_stalled")

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
        settings = {"bounds": (lower, upper), "integers": integer, "model": model, "tolerances": tolerances}
        self._arguments = start, as_tensor(sigma0, "sigma0"), settings  # copies: restarts come later
        self.domain = Domain(scale, *round_bounds(lower, upper, integer), integer)
        self.model = Full() if model is None else model
        self.model.check(len(start))
        self.popsize = as_popsize(popsize, self.model.popsize(len(start)))
        fixed = {"popsize": self.popsize, "bounds": (lower, upper), "integers": integer, "model": self.model}
        self.arguments = spell_arguments(x0=start, sigma0=self._arguments[1], **fixed, seed=seed, d=len(start))
        self.nfev, self.nit, self._overflown = 0, 0, False
        inside = torch.where(integer, start.round().clamp(self.domain.lower, self.domain.upper), start)
        self.best = Best(inside, torch.inf, 0)
        self._generator = build_generator(seed, start.device)
        self._state: State = self.model.start(self.domain.latent(start), sigma, self.popsize)
        if self.domain.has_integers:
            self._state["stretch"] = torch.ones_like(start)
            self._keep_margin()
        self._neighbours = TriedNeighbours(self.domain.lower, self.domain.upper) if bool(integer.all()) else None
        self._stalled: str | None = None
        self._asked: tuple[Tensor, Tensor, Tensor] | None = None
        tolerances = Tolerances() if tolerances is None else tolerances
        # a better integer comes with a chance of about 1 / popsize in a generation: equal values say less
        patience = 3 if self.domain.has_integers else 1
        self._monitor = ConvergenceMonitor(tolerances, len(start), self.popsize, sigma, patience)

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
        return build_alike(self, popsize, derive_seed(self._generator, run))

    def ask(self) -> Tensor:
        mean = self._state["mean"]
        normals = draw_orthogonal_normals(self.popsize, mean, self._generator)
        steps = self.model.steps(self._state, normals)
        spread = steps * self._state["stretch"] if self.domain.has_integers else steps
        points = self.domain.points(torch.add(mean, spread, alpha=self.sigma))
        if self.domain.has_integers:
            points = move_repeats(points, self.mean, self.domain, self._generator)
        if self._neighbours is not None and self.asks_for_neighbours:
            points = self._neighbours.put_untried(points)
        self._asked = (points, normals, steps)
        return points.clone()

    def _list_asked(self) -> Tensor | None:
        return None if self._asked is None else self._asked[0]

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
            # a model returns what it keeps itself; the stretch of integers is the search's own
            self._state = before | self.model.advance(before, normals[order], steps[order], ranking)
        elif torch.isfinite(values[0]):  # a plateau: look farther
            self._state = self._state | {"sigma": self.sigma * 1.2}
        self._overflown = not self._can_draw()
        if self._overflown:
            self._state = before
        if self.domain.has_integers:
            self._keep_margin()
        self._monitor.record(values, float(self._deviations().max()), self._state)
        if self._neighbours is not None:
            self._watch_neighbours(self._neighbours, points)

    def _recover_draws(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z behind the points; points that were not asked for are treated as injected."""
        if self._asked is not None and torch.equal(points, self._asked[0]):
            return self._asked[1:]
        steps = (self.domain.latent(points) - self._state["mean"]) / self.sigma
        if self.domain.has_integers:
            steps = steps / self._state["stretch"]
        normals = self.model.whiten(self._state, steps)
        d = points.shape[1]
        # shortened to the length of typical draws: Hansen 2011
        shrink = ((d**0.5 + 2 * d / (d + 2)) / normals.norm(dim=1, keepdim=True)).clamp(max=1)
        normals, steps = normals * shrink, steps * shrink
        if self._asked is None:
            return normals, steps
        place, known = find_rows(points, self._asked[0])  # in whatever order they come back
        return torch.where(known, self._asked[1][place], normals), torch.where(known, self._asked[2][place], steps)

    def _measure_rounded_steps(self, points: Tensor, normals: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z with the steps to the integers that were evaluated, where these differ from those of the centre."""
        # A draw of 0.6 was evaluated at 1. If its step were 0.6, the mean would stay at 0 however much better 1 is, and
        # the deviation would shrink below the grid.
        rounded = (self.domain.latent(points) - self._state["mean"]) / (self.sigma * self._state["stretch"])
        moved = self.domain.integer & (points != self.mean)
        steps = torch.where(moved, rounded, steps)
        return torch.where(moved.any(1, keepdim=True), self.model.whiten(self._state, steps), normals), steps

    def _can_draw(self) -> bool:
        """True if all numbers of the state are finite, and candidates far from the mean are, too."""
        mean, sigma = self._state["mean"], self.sigma
        if not (math.isfinite(sigma) and all(all_finite(part) for part in leaves(dict(self._state)))):
            return False
        steps = self.model.steps(self._state, torch.full_like(mean, FAR).unsqueeze(0))[0]
        return all_finite((mean + sigma * steps) * self.domain.scale)

    def _keep_margin(self) -> None:
        """Move the means and stretch the deviations of integer variables, so that other integers keep a chance."""
        variances = self.model.variances(self._state)
        if variances is None:
            raise ValueError(
                f"{self.model} does not know its variances, which integers need: choose Full() or Separable()"
            )
        domain, rows = self.domain, self.domain.integer
        scale, lower, upper = (each[rows] for each in (domain.scale, domain.lower, domain.upper))
        mean, stretch = self._state["mean"].clone(), self._state["stretch"].clone()
        unit = self.sigma * variances.sqrt()[rows] * scale
        margin = 1 / (self.popsize * self._dim())
        means, deviations = keep_integer_margin(mean[rows] * scale, unit * stretch[rows], lower, upper, margin)
        mean[rows], stretch[rows] = means / scale, deviations / unit
        self._state = self._state | {"mean": mean, "stretch": stretch}

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
        """Standard deviations (d,), in the search's own coordinates."""
        variances = self.model.variances(self._state)
        return self.sigma * (torch.ones_like(self._state["mean"]) if variances is None else variances.sqrt())

    def stop(self) -> str | None:
        if self._overflown:
            return OVERFLOW
        if self._neighbours is None or self._stalled is None:
            return self._find_reason()
        return None if bool(self._neighbours.find_untried().any()) else f"{NEIGHBOURS} ({self._stalled})"

    def settles_above(self, target: float) -> bool:
        """True if the run ends at a value above the target: its last values are much closer to one another than to it.

        Where integers are among the variables this is never said: their steps come late.
        """
        return not self.domain.has_integers and self._monitor.has_settled(self.best.fun - target)

    @property
    def asks_for_neighbours(self) -> bool:
        """True while a search of integers evaluates the neighbours of its best point, at its end."""
        return self._stalled is not None

    def _find_reason(self) -> str | None:
        return self.model.trouble(self._state) or self._monitor.verdict

    def measures(self) -> dict[str, float]:
        """`sigma`, and the `condition` number of the covariance where it is known."""
        return {name: self._state[name] for name in ("sigma", "condition") if name in self._state}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"state": dict(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._state = dict(state["state"])


def build_alike(
    search: GaussianSearch, popsize: int, seed: int, shrink: float = 1.0, share: Tensor | None = None
) -> GaussianSearch:
    """A search with the same arguments, from the place that `share` (d,) says if it has a finite box."""
    start, sigma0, settings = search._arguments
    if share is not None:
        lower, upper = settings["bounds"]
        place = lower + share.to(start.device) * (upper - lower)
        start = place if all_finite(place) else start
    return GaussianSearch(start, sigma0 * shrink, popsize, seed, **settings)


# Draws of a generation that do not repeat one another: normal vectors at right angles


def draw_orthogonal_normals(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors z_i of N(0, I) of which d at a time are orthogonal, shape (count, d)."""
    # Each row by itself is a draw from N(0, I): its direction is uniform, and its length is the one that was drawn for
    # it. Means over a generation of functions that are linear or quadratic in z vary less than with independent rows.
    # Wang, Emmerich & Baeck 2019, *Mirrored orthogonal sampling for covariance matrix adaptation evolution strategies*,
    # of which only the orthogonality is taken.
    d = len(like)
    normals = torch.randn(count, d, generator=generator, dtype=like.dtype, device=like.device)
    full = count - count % d
    blocks: list[Tensor] = []
    for rows in (normals[:full].view(-1, d, d), normals[full:].unsqueeze(0)):
        if rows.numel():  # Gram and Schmidt's rows, each with the length that it had
            q, r = torch.linalg.qr(rows.mT)
            signs = torch.copysign(torch.ones_like(r[..., 0]), r.diagonal(dim1=-2, dim2=-1))  # LAPACK leaves them open
            blocks.append((q.mT * (signs * rows.norm(dim=-1)).unsqueeze(-1)).reshape(-1, d))
    return torch.cat(blocks)


def find_rows(points: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """For every row the place of an equal one, at its own place if that is, and whether there is one (N, 1)."""
    numbers = (torch.cat([among, points]) + 0.0).unique(dim=0, return_inverse=True)[1]  # -0 + 0 is 0
    same = numbers[len(among) :].unsqueeze(1) == numbers[: len(among)]
    own = same & torch.eye(len(points), dtype=torch.bool, device=points.device)
    return (same.int() + own.int()).argmax(1), same.any(1, keepdim=True)


# When a search has nothing more to find: the usual criteria, Hansen 2016, B.3 and Hansen 2009

SETTLED = 1e-5  # of the distance from the target: values that lie within it belong to a run that ends elsewhere


@dataclass(frozen=True)
class Tolerances:
    """When a Gaussian search stops; 0 or None switches a criterion off.

    Args:
        tolx: Stop when all standard deviations are below tolx times sigma0.
        tolfun: Stop when the best values of the last generations and all values of this one lie within tolfun.
        flat: Stop after this many generations in a row in which all values were equal.
        stagnation: Stop when neither the best nor the median values get better over a long time.
        maxiter: Largest number of generations; None for no limit.

    Raises:
        ValueError: If a tolerance is negative.
    """

    tolx: float = 1e-11
    tolfun: float = 1e-11
    flat: int = 20
    stagnation: bool = True
    maxiter: int | None = None

    def __post_init__(self) -> None:
        for name in ("tolx", "tolfun", "flat"):
            check_number(name, getattr(self, name), hint="; 0 switches it off")


class ConvergenceMonitor(Stateful):
    """Records each generation and says when to stop."""

    STATE = ("_recent", "_history", "_flat", "_count", "_span", "verdict")

    def __init__(self, tolerances: Tolerances, d: int, popsize: int, sigma0: float, patience: int) -> None:
        self.tolerances, self.sigma0 = tolerances, sigma0
        # long enough to see a trend: Hansen 2009, table of termination criteria
        self._recent: deque[float] = deque(maxlen=patience * (10 + -(-30 * d // popsize)))
        self._history: list[tuple[float, float]] = []
        self._patience = patience * (120 + 30 * d / popsize)
        self._flat = self._count = 0
        self._span = torch.inf
        self.verdict: str | None = None  # why to stop

    def record(self, values: Tensor, spread: float, state: State) -> None:
        """Take one generation into account."""
        ordered = values.sort().values.tolist()
        best, worst, median = ordered[0], ordered[-1], ordered[len(ordered) // 2]
        self._count += 1
        self._flat = self._flat + 1 if best == worst else 0
        self._recent.append(best)
        self._history.append((best, median))
        del self._history[:-20000]
        if len(self._recent) == self._recent.maxlen and worst < torch.inf:
            self._span = max(*self._recent, worst) - min(*self._recent, best)
        else:
            self._span = torch.inf
        self.verdict = self._find_reason(best, worst, spread, state)

    def has_settled(self, distance: float) -> bool:
        """True if the values of the last generations, as in `tolfun`, lie within `SETTLED` of a distance."""
        return distance < torch.inf and self._span < SETTLED * distance

    def _find_reason(self, best: float, worst: float, spread: float, state: State) -> str | None:
        t = self.tolerances
        if t.maxiter is not None and self._count >= t.maxiter:
            return f"maxiter: {self._count} generations"
        if t.flat and self._flat >= t.flat:
            how = "equal" if best < torch.inf else "infinitely bad"
            return f"flat: all values were {how} for {self._flat} generations"
        if spread < t.tolx * self.sigma0:
            return f"tolx: all standard deviations are below {t.tolx:g} sigma0"
        if self._span < t.tolfun:
            return f"tolfun: the values of the last generations lie within {t.tolfun:g}"
        if torch.equal(state["mean"] + 0.2 * spread, state["mean"]):
            return "precision: steps are below the resolution of the numbers"
        if t.stagnation and self._stagnates():
            return "stagnation: neither the best nor the median value got better"
        return None

    def _stagnates(self) -> bool:
        """True if neither best nor median values fell over the last fifth of the history."""
        # the medians of its first and of its last third are compared
        if len(self._history) < self._patience or self._count % 10:
            return False
        window = self._history[-max(int(self._patience), len(self._history) // 5) :]
        third = int(0.3 * len(window))
        early, late = window[:third], window[-third:]
        return all(statistics.median(g[i] for g in late) >= statistics.median(g[i] for g in early) for i in (0, 1))
