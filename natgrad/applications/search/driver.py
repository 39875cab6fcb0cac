"""`minimize`: a search from the first point to a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import Best, Search, as_popsize, new_generator
from natgrad.applications.search.convergence import Tolerances
from natgrad.applications.search.domain import as_bounds, as_point
from natgrad.applications.search.full import Full
from natgrad.applications.search.gaussian import Bounds, GaussianSearch
from natgrad.applications.search.history import History
from natgrad.applications.search.model import GaussianModel
from natgrad.applications.search.objective import Function, Objective
from natgrad.applications.search.restarts import Restarts, Run, as_restarts

CONVERGED = ("ftarget", "tolfun", "tolx", "precision")


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    x: the best point (d,).   fun: its value.   nfev, nit: evaluations and generations, all restarts together.
    success: whether ftarget was reached, or without one, whether the last run converged.   message: why it ended.
    history: generation by generation.
    """

    x: Tensor
    fun: float
    nfev: int
    nit: int
    success: bool
    message: str
    history: History = field(repr=False)


def minimize(
    f: Function,
    x0: Tensor | Sequence[float],
    sigma0: float | Tensor,
    *,
    popsize: int | None = None,
    bounds: Bounds = None,
    integers: Any = None,
    model: GaussianModel | None = None,
    ftarget: float | None = None,
    maxfevals: int | None = None,
    restarts: Restarts | int = 0,
    tolerances: Tolerances | None = None,
    callback: Callable[[Search], Any] | None = None,
    seed: int | None = None,
    vectorized: bool = True,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
) -> SearchResult:
    """Minimum of a black box f by natural gradient search with a Gaussian.

    f: values (popsize,) of a batch of points (popsize, d), or with vectorized=False the value of one point (d,); gets
    tensors, gives tensors, arrays or numbers. NaN or an exception is a worst value.   x0, sigma0, popsize, bounds,
    integers, model, tolerances, seed: as for `GaussianSearch`.   ftarget: stop at a value as low.   maxfevals: bound on
    evaluations, default none.   restarts: a number, `IPOP(times)` or `BIPOP(times)`; they start at x0, or anywhere
    within bounds if all are finite.   callback: called with the search after each generation; stops if it returns True.
    executor: evaluates points in parallel, needs vectorized=False.   checkpoint: a file that is written every so many
    generations and at the end, and from which the same call goes on, bit for bit.

    Ctrl-C ends the search with the result so far.
    """
    start = as_point(x0, "x0")
    settings = {
        "bounds": bounds,
        "integers": integers,
        "model": Full() if model is None else model,
        "tolerances": tolerances,
    }
    size = as_popsize(popsize, settings["model"].popsize(len(start)))
    check_budget(maxfevals, size, checkpoint_every)
    journey = Journey(start, sigma0, settings, as_restarts(restarts), size, seed)
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists():
        journey.load_state_dict(torch.load(file, weights_only=True))
    objective = Objective(f, vectorized, executor)
    try:
        while (ending := journey.ending(ftarget, maxfevals)) is None:
            journey.generation(objective)
            if callback is not None and callback(journey.search) is True:
                ending = "callback: it returned True"
                break
            if file is not None and journey.nit % checkpoint_every == 0:
                save(journey, file)
    except KeyboardInterrupt:
        ending = "interrupted: the result is what was found so far"
    if file is not None:
        save(journey, file)
    return journey.result(ending, ftarget)


class Journey:
    """The runs of one `minimize`, and what they found together."""

    def __init__(
        self, x0: Tensor, sigma0: Any, settings: dict[str, Any], restarts: Restarts, popsize: int, seed: int | None
    ) -> None:
        self.x0, self.sigma0, self.settings, self.restarts, self.popsize = x0, sigma0, settings, restarts, popsize
        self.generator = new_generator(seed, torch.device("cpu"))
        self.history = History()
        self.best = Best(x0, torch.inf, 0)
        self.past: list[tuple[Run, int]] = []
        self.nfev = self.nit = 0
        first = Run(popsize, 1.0, None, "first")
        self.run, self.search = first, self._build(first, x0, seed)

    def generation(self, objective: Objective) -> None:
        """Ask, evaluate, tell, write down."""
        points = self.search.ask()
        values = objective(points)
        self.search.tell(points, values)
        if self.search.best.fun < self.best.fun:
            self.best = Best(self.search.best.x, self.search.best.fun, self.nfev + self.search.best.nfev - self._used())
        self.nfev += len(values)
        self.nit += 1
        measures = self.search.measures()
        median = float(values.median())
        self.history.add(nfev=self.nfev, best=self.best.fun, median=median, run=len(self.past), **measures)

    def ending(self, ftarget: float | None, maxfevals: int | None) -> str | None:
        """Why all runs are over, or None; starts the next run where the last one is over."""
        if ftarget is not None and self.best.fun <= ftarget:
            return f"ftarget: a value of {self.best.fun:g}, at most {ftarget:g}, was found"
        why = self.search.stop()
        if why is None and self.run.budget is not None and self.search.nfev >= self.run.budget:
            why = "budget: of a small run"
        if why is not None:
            why = self._restart(why)
        if why is None and maxfevals is not None and self.nfev + self.run.popsize > maxfevals:
            return f"maxfevals: {self.nfev} evaluations, the next generation would take more than {maxfevals}"
        return why

    def _restart(self, why: str) -> str | None:
        """Begin the next run and return None, or say why there is none."""
        past = [*self.past, (self.run, self.search.nfev)]
        draws = torch.rand(2, generator=self.generator, dtype=torch.float64).tolist()
        following = self.restarts.next(self.popsize, past, (draws[0], draws[1]))
        if following is None:
            return why
        seed = int(torch.randint(2**62, (), generator=self.generator))
        self.past, self.run = past, following
        self.search = self._build(following, self._anew(), seed)
        return None

    def _anew(self) -> Tensor:
        """Where a restart begins: anywhere in a finite box, else at x0."""
        lower, upper = as_bounds(self.settings["bounds"], self.x0)
        share = torch.rand(len(self.x0), generator=self.generator, dtype=torch.float64).to(self.x0.device)
        place = lower + share * (upper - lower)
        return place if bool(torch.isfinite(place).all()) else self.x0

    def _build(self, run: Run, x0: Tensor, seed: int | None) -> GaussianSearch:
        sigma = torch.as_tensor(self.sigma0, dtype=torch.float64) * run.shrink
        return GaussianSearch(x0, sigma, run.popsize, seed, **self.settings)

    def _used(self) -> int:
        """Evaluations of this run before its last generation."""
        return self.search.nfev - self.run.popsize

    def result(self, message: str, ftarget: float | None) -> SearchResult:
        """The result, with the reason for the end."""
        word = message.split(":")[0]
        success = word in CONVERGED if ftarget is None else self.best.fun <= ftarget
        return SearchResult(self.best.x, self.best.fun, self.nfev, self.nit, success, message, self.history)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes."""
        return {
            "search": self.search.state_dict(),
            "runs": [(run.popsize, run.shrink, run.budget, run.kind, used) for run, used in self.past],
            "run": (self.run.popsize, self.run.shrink, self.run.budget, self.run.kind),
            "counts": (self.nfev, self.nit, self.popsize),
            "best": (self.best.x, self.best.fun, self.best.nfev),
            "generator": self.generator.get_state(),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. ValueError if it belongs to another problem."""
        if state["best"][0].shape != self.x0.shape or state["counts"][2] != self.popsize:
            raise ValueError(
                f"the checkpoint is of a search with {len(state['best'][0])} variables and popsize "
                f"{state['counts'][2]}, this one has {len(self.x0)} and {self.popsize}: choose another file"
            )
        self.past = [(Run(*entry[:4]), entry[4]) for entry in state["runs"]]
        self.run = Run(*state["run"])
        self.search = self._build(self.run, self.x0, 0)
        self.search.load_state_dict(state["search"])
        self.nfev, self.nit, _ = state["counts"]
        self.best = Best(*state["best"])
        self.generator.set_state(state["generator"])
        self.history.load_state_dict(state["history"])


def save(journey: Journey, file: Path) -> None:
    """Write a checkpoint; a crash in between leaves the old one."""
    partial = file.with_name(file.name + ".part")
    torch.save(journey.state_dict(), partial)
    partial.replace(file)


def check_budget(maxfevals: int | None, popsize: int, every: int) -> None:
    """ValueError for a budget that does not pay for one generation."""
    if maxfevals is not None and not maxfevals >= popsize:
        raise ValueError(f"maxfevals is {maxfevals}, expected at least {popsize}, the evaluations of one generation")
    if not every >= 1:
        raise ValueError(f"checkpoint_every is {every}, expected a number of generations >= 1")
