"""Search of continuous variables by a Gaussian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import Best, Search, as_popsize, new_generator, next_seed
from natgrad.applications.search.convergence import Tolerances, Watch
from natgrad.applications.search.domain import Domain, as_bounds, as_integer, as_point, as_scales, whole
from natgrad.applications.search.full_covariance import Full
from natgrad.applications.search.integer_margin import with_margin
from natgrad.applications.search.model import GaussianModel, State
from natgrad.applications.search.ranking import Ranking

Bounds = tuple[Any, Any] | list[Any] | Tensor | None


class GaussianSearch(Search):
    """Search by a Gaussian N(mean, sigma^2 C) whose parameters follow the natural gradient of the expected rank.

    x0: (d,), where to start.   sigma0: the standard deviation to start with, a number or one per variable (d,): about a
    third of the distance at which you would look for the minimum.   popsize: candidates per generation, default
    4 + floor(3 ln d).   seed: of the search's own generator.   bounds: (lower, upper), each a number, a vector (d,) or
    None; every candidate lies within.   integers: indices of the variables that are rounded, or a mask (d,); integers
    other than the present one keep a chance of 1 / (popsize d) at least (Hamano et al. 2022), and steps count as
    rounded.   model: how C is stored and moved, default `Full()`.   tolerances: when to stop.

    Everything is float64, on the device of x0. ValueError for an x0 that is not finite or out of bounds, inverted
    bounds, a sigma0 that is not positive, a popsize below 2.
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
        integer = as_integer(integers, start)
        self._arguments = (start, sigma0, bounds, integers, model, tolerances)
        self.domain = Domain.of(scale, *whole(lower, upper, integer), integer)
        self.model = Full() if model is None else model
        self.model.check(len(start))
        self.popsize = as_popsize(popsize, self.model.popsize(len(start)))
        self.nfev = self.nit = 0
        self.best = Best(start, torch.inf, 0)
        self._generator = new_generator(seed, start.device)
        self._state: State = self.model.start(self.domain.latent(start), sigma, self.popsize)
        if self.domain.mixed:
            self._state["stretch"] = torch.ones_like(start)
            self._keep_margin()
        self._asked: tuple[Tensor, Tensor, Tensor] | None = None
        chosen = Tolerances() if tolerances is None else tolerances
        # a better integer comes with a chance of about 1 / popsize in a generation: equal values say less
        self._watch = Watch(chosen, len(start), self.popsize, sigma, patience=3 if self.domain.mixed else 1)

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
        normals = torch.randn(self.popsize, len(mean), generator=self._generator, dtype=mean.dtype, device=mean.device)
        steps = self.model.steps(self._state, normals)
        spread = steps * self._state["stretch"] if self.domain.mixed else steps
        points = self.domain.points(torch.add(mean, spread, alpha=self.sigma))
        self._asked = (points, normals, steps)
        return points.clone()

    def centre(self) -> Tensor:
        return self.mean

    def stop(self) -> str | None:
        return self.model.trouble(self._state) or self._watch.verdict()

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
            "watch": self._watch.state_dict(),
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
        self._watch.load_state_dict(state["watch"])

    def _dim(self) -> int:
        return len(self.best.x)

    def _move(self, points: Tensor, values: Tensor) -> None:
        ranking = Ranking.of(values)
        normals, steps = self._drawn(points)
        if self.domain.mixed:
            normals, steps = self._rounded(points, normals, steps)
        self._asked = None
        if not ranking.flat:
            order = ranking.order
            self._state = self.model.advance(self._state, normals[order], steps[order], ranking)
        elif torch.isfinite(values[0]):  # a plateau: look farther
            self._state = self._state | {"sigma": self.sigma * 1.2}
        if self.domain.mixed:
            self._keep_margin()
        self._watch.see(values, self._spread(), self._state)

    def _drawn(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z behind the points; those that were not asked for are taken as injected."""
        if self._asked is not None:
            asked, normals, steps = self._asked
            if torch.equal(points, asked):
                return normals, steps
            same = (points == asked).all(1, keepdim=True)
            z, y = self._injected(points)
            return torch.where(same, normals, z), torch.where(same, steps, y)
        return self._injected(points)

    def _rounded(self, points: Tensor, normals: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z with the steps to the integers that were evaluated, where these are others than the centre's.

        A draw of 0.6 was evaluated at 1. Were its step 0.6, the mean would stay at 0 however much better 1 is, and the
        deviation would shrink below the grid.
        """
        whole = (self.domain.latent(points) - self._state["mean"]) / (self.sigma * self._state["stretch"])
        moved = self.domain.integer & (points != self.mean)
        steps = torch.where(moved, whole, steps)
        return torch.where(moved.any(1, keepdim=True), self.model.whiten(self._state, steps), normals), steps

    def _injected(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """z and A z of foreign points, shortened to the length that draws have: Hansen 2011."""
        steps = (self.domain.latent(points) - self._state["mean"]) / self.sigma
        if self.domain.mixed:
            steps = steps / self._state["stretch"]
        normals = self.model.whiten(self._state, steps)
        d = points.shape[1]
        shrink = ((d**0.5 + 2 * d / (d + 2)) / normals.norm(dim=1, keepdim=True)).clamp(max=1)
        return normals * shrink, steps * shrink

    def _keep_margin(self) -> None:
        """Move means and stretch deviations of integer variables, for the sake of the other integers."""
        variances = self.model.variances(self._state)
        if variances is None:
            raise ValueError(
                f"{self.model} does not know its variances, which integers need: choose Full() or Separable()"
            )
        domain, chosen = self.domain, self.domain.integer
        unit = (self.sigma * variances.sqrt() * domain.scale)[chosen]
        mean, deviation = with_margin(
            (self._state["mean"] * domain.scale)[chosen],
            unit * self._state["stretch"][chosen],
            domain.lower[chosen],
            domain.upper[chosen],
            1 / (self.popsize * self._dim()),
        )
        moved, stretch = self._state["mean"].clone(), self._state["stretch"].clone()
        moved[chosen], stretch[chosen] = mean / domain.scale[chosen], deviation / unit
        self._state = self._state | {"mean": moved, "stretch": stretch}

    def _spread(self) -> float:
        """The largest standard deviation, in the search's own coordinates."""
        variances = self.model.variances(self._state)
        return self.sigma * (1.0 if variances is None else float(variances.max()) ** 0.5)
