"""The runs of one `minimize`, and what they found together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.messages import Columns
from natgrad.search.base import Best, Search, new_generator
from natgrad.search.black_box import BlackBox
from natgrad.search.domain import as_bounds
from natgrad.search.gaussian import GaussianSearch
from natgrad.search.noise import Repeated
from natgrad.search.restarts import Restarts, Run
from natgrad.search.surrogate import QuadraticSurrogate, SurrogateEvaluations


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
        """Points (popsize, d) and values (popsize,) of the next generation, NaN where f had none."""
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


# What happened in a search, generation by generation


class SearchHistory(Columns):
    """Lists of equal length with one entry per generation.

    `history["nfev"]` are evaluations, `["best"]` the best value so far, `["median"]` that of the generation, `["run"]`
    the number of the restart, from 0. The search's own measures, such as `sigma` and `condition`, are None in
    generations that have none.
    """

    def __init__(self) -> None:
        super().__init__(("nfev", "best", "median", "run"), "generations")

    def add(self, **measures: Any) -> None:
        """Append one generation.

        Args:
            **measures: A value per name.
        """
        length = len(self)
        for name, value in measures.items():
            self._columns.setdefault(name, [None] * length).append(value)
        for column in self._columns.values():
            if len(column) == length:
                column.append(None)

    def plot(self, target: float | None = None) -> Any:
        """A matplotlib figure of values and sizes over evaluations; grey lines are restarts.

        Args:
            target: The minimum where it is known; it is subtracted from the values, on a logarithmic axis. Without it
                the axis is logarithmic if all values are positive.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from matplotlib.figure import Figure  # an extra: only where a picture is asked for

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        floor = 0.0 if target is None else target
        for name in ("median", "best"):
            left.plot(self["nfev"], [hide_infinite(value - floor) for value in self[name]], label=name)
        logarithmic = target is not None or all(value > 0 for value in self["best"])
        left.set(xlabel="evaluations", ylabel=label_difference("f", floor), yscale="log" if logarithmic else "linear")
        for name in self.names[4:]:
            right.plot(self["nfev"], self[name], label=name)
        right.set(xlabel="evaluations", yscale="log")
        for axes in (left, right):
            for place in self._restarts():
                axes.axvline(place, color="0.8", linewidth=0.8, zorder=0)
            if axes.lines:
                axes.legend()
        return figure

    def _restarts(self) -> list[int]:
        """Evaluations at which a new run began."""
        runs = self["run"]
        return [self["nfev"][k - 1] for k in range(1, len(runs)) if runs[k] != runs[k - 1]]


def hide_infinite(value: float) -> float | None:
    """The value, or None if it cannot be drawn."""
    return value if math.isfinite(value) else None


def label_difference(name: str, floor: float) -> str:
    """`f - 3`, `f + 3` for -3, `f` for 0."""
    return name if floor == 0 else f"{name} {'-' if floor > 0 else '+'} {abs(floor):.6g}"


# The runs of one `minimize`, and what they found together

HOPELESS = 20  # generations without any value, of the first one's size, after which no more come
CONVERGED = ("ftarget", "tolfun", "tolx", "precision", "converged")


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        x: The best point, shape (d,); where f is noisy, the distribution's centre.
        fun: Its value, or where f is noisy the mean of values there.
        nfev: Evaluations, all restarts together.
        nit: Generations, all restarts together.
        success: True if ftarget was reached, or without one, if the last run converged.
        message: Why it ended.
        history: Generation by generation.
        failures: Evaluations that gave no value: NaN, no number at all, or an exception.
    """

    x: Tensor
    fun: float
    nfev: int
    nit: int
    success: bool
    message: str
    history: SearchHistory = field(repr=False)
    failures: int = 0


class RunFactory(ABC):
    """Builds the search of each run.

    Attributes:
        popsize: Candidates per generation of the first run.
    """

    popsize: int

    @abstractmethod
    def build_first(self) -> Search:
        """The search of the first run."""

    @abstractmethod
    def build(self, run: Run) -> Search:
        """A search of the same kind, whose state is loaded afterwards."""

    @abstractmethod
    def build_next(self, past: list[tuple[Run, int]]) -> tuple[Run, Search] | None:
        """The next run with its search, or None."""

    def state_dict(self) -> dict[str, Any]:
        """What the choice of restarts depends on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""


class GivenRunFactory(RunFactory):
    """Builds runs from a search that was given: first itself, then others of its kind.

    Args:
        search: Of the first run.
        restarts: Says the populations.
    """

    def __init__(self, search: Search, restarts: Restarts) -> None:
        self.search, self.popsize, self.restarts = search, search.popsize, restarts
        self._number = 0

    def build_first(self) -> Search:
        return self.search

    def build(self, run: Run) -> Search:
        return self.search if run.kind == "first" else self.search.renew(run.popsize, self._number)

    def build_next(self, past: list[tuple[Run, int]]) -> tuple[Run, Search] | None:
        draws = torch.rand(2, generator=torch.Generator().manual_seed(len(past)), dtype=torch.float64).tolist()
        run = self.restarts.next(self.popsize, past, (draws[0], draws[1]))
        self._number = len(past)
        return None if run is None else (run, self.search.renew(run.popsize, self._number))


class GaussianRunFactory(RunFactory):
    """Builds Gaussian searches that start at x0, or for restarts anywhere in a finite box.

    Args:
        x0: Shape (d,).
        sigma0: A number or one standard deviation per variable (d,).
        settings: Further keyword arguments of `GaussianSearch`.
        restarts: Says the populations.
        popsize: Of the first run.
        seed: Of the first search, and of the seeds and starts of the others.
    """

    def __init__(
        self, x0: Tensor, sigma0: Any, settings: dict[str, Any], restarts: Restarts, popsize: int, seed: int | None
    ) -> None:
        self.x0, self.sigma0, self.settings, self.restarts, self.popsize = x0, sigma0, settings, restarts, popsize
        self.seed = seed
        self.generator = new_generator(seed, torch.device("cpu"))

    def build_first(self) -> Search:
        return self._search(self.popsize, 1.0, self.x0, self.seed)

    def build(self, run: Run) -> Search:
        return self._search(run.popsize, run.shrink, self.x0, 0)

    def build_next(self, past: list[tuple[Run, int]]) -> tuple[Run, Search] | None:
        draws = torch.rand(2, generator=self.generator, dtype=torch.float64).tolist()
        run = self.restarts.next(self.popsize, past, (draws[0], draws[1]))
        if run is None:
            return None
        seed = int(torch.randint(2**62, (), generator=self.generator))
        return run, self._search(run.popsize, run.shrink, self._draw_start(), seed)

    def _search(self, popsize: int, shrink: float, x0: Tensor, seed: int | None) -> GaussianSearch:
        sigma = torch.as_tensor(self.sigma0, dtype=torch.float64) * shrink
        return GaussianSearch(x0, sigma, popsize, seed, **self.settings)

    def _draw_start(self) -> Tensor:
        lower, upper = as_bounds(self.settings["bounds"], self.x0)
        share = torch.rand(len(self.x0), generator=self.generator, dtype=torch.float64).to(self.x0.device)
        place = lower + share * (upper - lower)
        return place if bool(torch.isfinite(place).all()) else self.x0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class SearchRuns:
    """The present run, those before it, and the best point of all.

    Args:
        factory: Builds the searches.
        objective: f.
        repeated: The same f evaluated several times per point, where it is noisy; else None.
        ahead: Points with the workers beyond those of a generation.
        surrogate: Says when a model of f is believed; None for none.
    """

    def __init__(
        self,
        factory: RunFactory,
        objective: BlackBox,
        repeated: Repeated | None = None,
        ahead: int = 0,
        surrogate: QuadraticSurrogate | None = None,
    ) -> None:
        self.factory, self.objective, self.repeated = factory, objective, repeated
        self.ahead = AheadEvaluations(objective, ahead) if ahead else None
        self.surrogate = None if surrogate is None else SurrogateEvaluations(objective, surrogate)
        self.history = SearchHistory()
        self.past: list[tuple[Run, int]] = []
        self.run, self.search = Run(factory.popsize, 1.0, None, "first"), factory.build_first()
        self.best = Best(self.search.best.x, torch.inf, 0)
        self.nfev = self.nit = self._began = 0
        self._level = torch.inf  # what ftarget is compared with
        self._settled = Best(self.best.x, torch.inf, 0)  # where f is noisy: the best centre of the runs before

    def run_generation(self) -> None:
        """Ask, evaluate, tell, and write the history."""
        points, values = self._evaluate_generation()
        self.search.tell(points, values)
        self._count(points, values)
        median = float(values.median())
        self._level = self.best.fun if self.repeated is None else median
        measures = self.search.measures() | self._noise_measures()
        self.history.add(nfev=self.nfev, best=self.best.fun, median=median, run=len(self.past), **measures)

    def _evaluate_generation(self) -> tuple[Tensor, Tensor]:
        if self.surrogate is not None and isinstance(self.search, GaussianSearch):
            return self.surrogate.evaluate_generation(self.search)
        if self.ahead is not None and self.objective.vectorized is not None:
            return self.ahead.evaluate_generation(self.search)
        points = self.search.ask()
        return points, self.objective(points) if self.repeated is None else self.repeated(points)

    def _count(self, points: Tensor, values: Tensor) -> None:
        self.nfev = self.objective.nfev
        self.nit += 1
        i = int(values.argmin())
        if float(values[i]) < self.best.fun:
            each = self.repeated is None and self.surrogate is None
            nfev = self.nfev - len(values) + i + 1 if each else self.nfev
            self.best = Best(points[i].clone(), float(values[i]), nfev)

    def _noise_measures(self) -> dict[str, float]:
        return {} if self.repeated is None else {"evaluations": float(self.repeated.evaluations)}

    def find_ending(self, ftarget: float | None, maxfevals: float | None) -> str | None:
        """Why all runs are over, or None; starts the next run where the last one is over."""
        if ftarget is not None and self._level <= ftarget:
            return f"ftarget: a value of {self._level:g}, at most {ftarget:g}, was found"
        if silence := self.objective.silence:
            return f"failed: {silence}"
        if self.objective.points >= HOPELESS * self.factory.popsize and (first := self.objective.hopeless):
            return f"failed: none of {self.nfev} evaluations had a value; {first}"
        why = self.search.stop()
        if why is None and self.run.budget is not None and self.nfev - self._began >= self.run.budget:
            why = "budget: of a small run"
        if why is not None:
            why = self._restart(why)
        elif ftarget is not None and self._settles_above(ftarget):
            self._restart("target: values settle above it")  # without a further run, this one goes on
        if why is None and maxfevals is not None and self.nfev + self._next_cost() > maxfevals:
            return f"maxfevals: {self.nfev} evaluations, the next generation would take more than {maxfevals:g}"
        return why

    def _settles_above(self, ftarget: float) -> bool:
        """True if the present run will not reach the target; never said where values are noisy."""
        return self.repeated is None and isinstance(self.search, GaussianSearch) and self.search.settles_above(ftarget)

    def _next_cost(self) -> int:
        """Evaluations of the next generation, and where f is noisy, of the centre at the end."""
        size, asking = self.search.popsize, self.objective.asking
        if self.repeated is None:
            return asking + size + (0 if self.ahead is None else self.ahead.ahead - self.objective.in_flight)
        return asking + self.repeated.cost(size) + self._repeats(self.repeated.handling.growth)

    def _repeats(self, growth: float = 1.0) -> int:
        """Evaluations of the centre at the end: as many as a generation takes."""
        assert self.repeated is not None
        return round(growth * self.repeated.evaluations * self.search.popsize) + 1

    def _restart(self, why: str) -> str | None:
        """Begin the next run and return None, or say why there is none."""
        past = [*self.past, (self.run, self.nfev - self._began)]
        following = self.factory.build_next(past)
        if following is None:
            return why
        self._settled = self._settle()
        self.past, (self.run, self.search) = past, following
        self._began = self.nfev = self.objective.nfev
        return None

    def _settle(self) -> Best:
        """The best centre of a run so far, where f is noisy: a mean of values is not the luck of one evaluation."""
        if self.repeated is None or not self.nit:
            return self._settled
        x = self.search.centre()
        found = Best(x, float(self.repeated.mean(x.unsqueeze(0), self._repeats())), self.objective.nfev)
        return min(self._settled, found, key=lambda best: best.fun)

    def result(self, message: str, ftarget: float | None) -> SearchResult:
        """The result."""
        best = self.best if self.repeated is None else self._settle()
        word = message.split(":")[0]
        success = word in CONVERGED if ftarget is None else self._level <= ftarget
        counts = self.objective.nfev, self.nit, success, message, self.history, self.objective.failures
        return SearchResult(best.x, best.fun, *counts)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes."""
        return {
            "search": self.search.state_dict(),
            "past": [(run.popsize, run.shrink, run.budget, run.kind, used) for run, used in self.past],
            "run": (self.run.popsize, self.run.shrink, self.run.budget, self.run.kind),
            "counts": (self.nfev, self.nit, self.factory.popsize, self._began),
            "best": (self.best.x, self.best.fun, self.best.nfev),
            "level": self._level,
            "settled": (self._settled.x, self._settled.fun, self._settled.nfev),
            "runs": self.factory.state_dict(),
            "objective": self.objective.state_dict(),
            "noise": None if self.repeated is None else self.repeated.state_dict(),
            "surrogate": None if self.surrogate is None else self.surrogate.state_dict(),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        if state["best"][0].shape != self.best.x.shape or state["counts"][2] != self.factory.popsize:
            raise ValueError(
                f"the checkpoint is of a search with {len(state['best'][0])} variables and popsize "
                f"{state['counts'][2]}, this one has {len(self.best.x)} and {self.factory.popsize}: choose another file"
            )
        if (state["noise"] is None) != (self.repeated is None):
            raise ValueError("the checkpoint differs in noise=: choose another file, or the same argument")
        if (state.get("surrogate") is None) != (self.surrogate is None):
            raise ValueError("the checkpoint differs in surrogate=: choose another file, or the same argument")
        self.past = [(Run(*entry[:4]), entry[4]) for entry in state["past"]]
        self.run = Run(*state["run"])
        self.search = self.factory.build(self.run)
        self.search.load_state_dict(state["search"])
        self.nfev, self.nit, _, self._began = state["counts"]
        self.objective.load_state_dict(state["objective"])
        self.best, self._level = Best(*state["best"]), state["level"]
        self._settled = Best(*state["settled"])
        self.factory.load_state_dict(state["runs"])
        if self.repeated is not None:
            self.repeated.load_state_dict(state["noise"])
        if self.surrogate is not None:
            self.surrogate.load_state_dict(state["surrogate"])
        self.history.load_state_dict(state["history"])
