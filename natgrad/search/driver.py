"""`minimize`: ask, evaluate, tell, restart, stop, from the first point to a result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_number, check_range, is_real
from natgrad.ground.messages import Columns, explain_calls
from natgrad.ground.progress import Callbacks, Progress, join_callbacks
from natgrad.ground.pure import keep_gradient_mode
from natgrad.ground.state_files import FORMAT, read_state_file, write_state_file
from natgrad.ground.states import Stateful, check_parts
from natgrad.search.base import Best, Search, build_generator, check_arguments, spell_arguments
from natgrad.search.black_box import BlackBox, Function, Pool
from natgrad.search.gaussian import Bounds, GaussianSearch, Tolerances, build_alike
from natgrad.search.model import GaussianModel
from natgrad.search.noise import NoiseHandling, Repeated
from natgrad.search.relaxation import Relaxation
from natgrad.search.surrogate import QuadraticSurrogate, SurrogateEvaluations

Choice = TypeVar("Choice")
HOPELESS = 20  # generations without any value, of the first one's size, after which no more come
CONVERGED = ("ftarget", "tolfun", "tolx", "precision", "converged")


@keep_gradient_mode
@explain_calls
def minimize(
    f: Function,
    x0: Tensor | Sequence[float] | Search,
    sigma0: float | Tensor | None = None,
    *,
    popsize: int | None = None,
    bounds: Bounds = None,
    integers: Any = None,
    model: GaussianModel | None = None,
    noise: bool | NoiseHandling = False,
    surrogate: bool | QuadraticSurrogate = False,
    ftarget: float | None = None,
    maxfevals: float | None = None,
    restarts: Restarts | int | str | None = None,
    tolerances: Tolerances | None = None,
    callback: Callbacks[Search] | None = None,
    progress: bool | None = None,
    seed: int | None = None,
    vectorized: bool | None = None,
    executor: Pool | None = None,
    timeout: float | None = None,
    ahead: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
) -> SearchResult:
    """Minimum of a black box f by natural gradient search with a Gaussian, or with a search that is given.

    Ctrl-C ends the search with the result so far. Evaluations that fail, by an exception or by giving NaN, None, a
    tuple, a string or an array of another shape, are counted in the result's `failures` and rank last; one warning
    shows the first. If none of 20 generations had a value, the search ends and the result says so.

    Args:
        f: Values (popsize,) of a batch of points (popsize, d), or the value of one point (d,). It gets tensors and
            gives tensors, arrays or numbers.
        x0: Where to start, shape (d,); or a search of any kind, such as `BernoulliSearch(n)`, in the place of x0,
            sigma0, popsize, bounds, integers, model, tolerances and seed.
        sigma0: The standard deviation at the start, a number or one per variable (d,): about a third of the distance
            at which the minimum may lie.
        popsize: Candidates per generation; default 4 + floor(3 ln d).
        bounds: (lower, upper), each a number, a vector (d,) or None.
        integers: Indices of the variables that are rounded, or a mask (d,).
        model: How the covariance is stored and moved, default `Full()`; see `GaussianSearch`.
        noise: True or a `NoiseHandling` if two evaluations of a point differ. They are then repeated as needed, ftarget
            applies to the median of a generation, and the result is the distribution's centre.
        surrogate: True or a `QuadraticSurrogate` if f is expensive and smooth: a quadratic model ranks the candidates,
            of which few are evaluated. Only for a Gaussian search, without noise and ahead.
        ftarget: Stop at a value as low.
        maxfevals: Bound on evaluations; default none.
        restarts: A number, `IPOP(times)`, `BIPOP(times)` or their names. Restarts begin at x0, or anywhere within
            bounds if all are finite; a search that was given is built anew with their populations. None: a given search
            of bits or categories starts again while it has a target to meet and a budget; others do not.
        tolerances: When a run stops, `Tolerances(...)`.
        callback: Called with the search after each generation, or a list of such functions; the search stops if one
            returns True.
        progress: True for a line that shows how far it is, False for none; None for one where the standard error is a
            terminal.
        seed: Of all draws; None for another one each time.
        vectorized: True if f takes batches, False if it takes one point, None to find out: f is then called with a
            batch of one, with the whole batch and, if these do not fit, with a point. These calls, at most four more
            than the points need, count as evaluations.
        executor: Evaluates points in parallel, one by one: any of `concurrent.futures`, loky's, Dask's client, mpi4py's
            pool, `ng.search.RayPool()`. Points that a lost worker had are evaluated elsewhere.
        timeout: Seconds after which a point that a worker has begun is given up and ranks last, and all points if no
            worker answers; None: wait for ever. What already runs cannot be stopped and keeps its worker.
        ahead: Points that the workers have beyond those of a generation, so that none waits for the slowest: the
            number of workers is a good choice. The order of the answers decides then, and a seed repeats no run.
        checkpoint: A file that is written every `checkpoint_every` generations and at the end. The same call continues
            from it, bit for bit. Budgets, tolerances, restarts and callbacks may differ; f, which is not compared, may
            not.
        checkpoint_every: Generations between two writes.

    Returns:
        The best point, its value, the counts, why the search ended, and its history.

    Raises:
        TypeError: If f is no function, or cannot be pickled and the executor's processes need that.
        ValueError: If an argument does not fit, such as inverted bounds or a budget below one generation, or if it
            differs from that of the checkpoint.

    Example:
        >>> result = ng.minimize(lambda X: (X - 1).square().sum(1), [3.0, -2.0], sigma0=1.0, seed=0)
        >>> result.success, round(float(result.x[0]), 4)
        (True, 1.0)
    """
    others = {"popsize": popsize, "bounds": bounds, "integers": integers, "model": model, "tolerances": tolerances}
    if restarts is None:
        restarts = 0 if not isinstance(x0, Relaxation) or ftarget is None or maxfevals is None else IPOP()
    first, generator = build_first(x0, {"sigma0": sigma0, "seed": seed, **others})
    choices = as_choice("noise", noise, NoiseHandling), as_choice("surrogate", surrogate, QuadraticSurrogate)
    check_evaluations(first, executor, timeout, ahead, noise, surrogate)
    objective = BlackBox(f, vectorized, executor, timeout)
    check_goals(ftarget, maxfevals, first.popsize, objective.asking)
    call = join_callbacks(callback, "the search")
    check_integer("checkpoint_every", checkpoint_every, 1, hint=": a number of generations")
    runs = SearchRuns(first, as_restarts(restarts), generator, objective, *choices, ahead, ftarget, maxfevals)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        runs.load_state_dict(read_state_file(path))
    # of the last whole generation: one that is interrupted leaves half of a state, which is never written
    state = None if path is None else deepcopy(runs.state_dict())
    try:
        with Progress("evaluations", maxfevals, progress) as shown:
            while (ending := runs.find_ending()) is None:
                runs.tell(*runs.ask_and_evaluate())
                if path is not None:
                    state = deepcopy(runs.state_dict())
                    if runs.nit % checkpoint_every == 0:
                        write_state_file({"format": FORMAT, **state}, path)
                shown.update(runs.nfev, {"generation": runs.nit, "best": float(runs.best.fun)})
                if call(runs.search):
                    ending = "callback: it returned True"
                    break
    except KeyboardInterrupt:
        ending = "interrupted: the result is what was found so far"
    finally:
        objective.drop_started(close=True)
    if path is not None and state is not None:
        write_state_file({"format": FORMAT, **state}, path)
    return runs.describe_result(ending)


class SearchRuns(Stateful):
    """The present run of one `minimize`, those before it, and the best point of all."""

    STATE = (
        "search", "past", "run", "nfev", "nit", "_began", "best", "_level", "_settled", "popsize", "generator",
        "objective", "repeated", "surrogate", "history", "arguments",
    )  # fmt: skip

    def __init__(
        self,
        first: Search,
        restarts: Restarts,
        generator: torch.Generator | None,
        objective: BlackBox,
        handling: NoiseHandling | None,
        surrogate: QuadraticSurrogate | None,
        ahead: int,
        ftarget: float | None,
        maxfevals: float | None,
    ) -> None:
        self.first, self.restarts, self.generator = first, restarts, generator
        self.objective, self.ftarget, self.maxfevals = objective, ftarget, maxfevals
        self.popsize, self.ahead = first.popsize, ahead  # that of bits changes later on
        objective.limit = math.inf if maxfevals is None else float(maxfevals)
        self.repeated = None if handling is None else Repeated(objective, handling)
        self.surrogate = None if surrogate is None else SurrogateEvaluations(objective, surrogate)
        self.history = SearchHistory()
        own = spell_arguments(search=first, noise=handling is not None, surrogate=surrogate is not None)
        self.arguments = own | dict(first.arguments)
        self.past: list[tuple[Run, int]] = []
        self.run, self.search = Run(first.popsize, 1.0, None, "first"), first
        self.best = Best(self.search.best.x, torch.inf, 0)
        self.nfev = self.nit = self._began = 0
        self._level = torch.inf  # what ftarget is compared with
        self._settled = self.best  # where f is noisy: the best centre of the runs before

    def ask_and_evaluate(self) -> tuple[Tensor, Tensor]:
        """Points (popsize, d) of the next generation and their values (popsize,)."""
        if self.surrogate is not None and isinstance(self.search, GaussianSearch):
            return self.surrogate.evaluate_generation(self.search)
        if self.ahead and self.objective.vectorized is not None:
            return self.objective.evaluate_ahead(self.search, self.ahead)
        points = self.search.ask()
        return points, self.objective(points) if self.repeated is None else self.repeated(points)

    def tell(self, points: Tensor, values: Tensor) -> None:
        """Move the search by a generation, and write it down."""
        self.search.tell(points, values)
        self.nfev, self.nit = self.objective.nfev, self.nit + 1
        i = int(values.argmin())
        if float(values[i]) < self.best.fun:
            one_each = self.repeated is None and self.surrogate is None
            nfev = self.nfev - len(values) + i + 1 if one_each else self.nfev
            self.best = Best(points[i].clone(), float(values[i]), nfev)
        median = float(values.median())
        self._level = self.best.fun if self.repeated is None else median
        noise = {} if self.repeated is None else {"evaluations": float(self.repeated.evaluations)}
        numbers = {"nfev": self.nfev, "best": self.best.fun, "median": median, "run": len(self.past)}
        self.history.add(**numbers, **self.search.measures() | noise)

    def find_ending(self) -> str | None:
        """Why all runs are over, or None; starts the next run where the last one is over."""
        goal, objective = self.ftarget, self.objective
        if goal is not None and self._level <= goal:
            return f"ftarget: a value of {self._level:g}, at most {goal:g}, was found"
        if silence := objective.silence:
            return f"failed: {silence}"
        if objective.points >= HOPELESS * self.popsize and (failure := objective.hopeless):
            return f"failed: no evaluation had a value; {failure}"
        why = self.search.stop()
        if why is None and self.run.budget is not None and self.nfev - self._began >= self.run.budget:
            why = "budget: of a small run"
        if why is not None:
            why = self._restart(why)
        elif goal is not None and self.repeated is None and self.search.settles_above(goal):
            self._restart("target: values settle above it")  # without a further run, this one goes on
        if why is None and self.maxfevals is not None and self.nfev + self._next_cost() > self.maxfevals:
            return f"maxfevals: with the next generation, evaluations would be more than {self.maxfevals:g}"
        return why

    def _restart(self, why: str) -> str | None:
        """Begin the next run and return None, or say why there is none."""
        past = [*self.past, (self.run, self.nfev - self._began)]
        generator = self.generator or torch.Generator().manual_seed(len(past))
        draws = torch.rand(2, generator=generator, device=generator.device, dtype=torch.float64).tolist()
        run = self.restarts.next(self.popsize, past, (draws[0], draws[1]))
        if run is None:
            return why
        self._settled = self._settle()
        self.objective.drop_started()
        self.past, self.run, self.search = past, run, self._build(run, len(past))
        self._began = self.nfev = self.objective.nfev
        return None

    def _next_cost(self) -> int:
        """Evaluations of the next generation, and where f is noisy, of the centre at the end."""
        size, asking = self.search.popsize, self.objective.asking
        if self.repeated is None:
            return asking + size + self.ahead - self.objective.in_flight
        return asking + self.repeated.cost(size) + self._count_repeats(self.repeated.handling.growth)

    def _count_repeats(self, growth: float = 1.0) -> int:
        """Evaluations of the centre at the end: as many as a generation takes."""
        assert self.repeated is not None
        return round(growth * self.repeated.evaluations * self.search.popsize) + 1

    def _settle(self) -> Best:
        """The best centre of a run so far, where f is noisy: a mean of values is not the luck of one evaluation."""
        if self.repeated is None or not self.nit:
            return self._settled
        x = self.search.centre()
        value = float(self.repeated.mean(x.unsqueeze(0), self._count_repeats()))
        return min(self._settled, Best(x, value, self.objective.nfev), key=lambda best: best.fun)

    def _build(self, run: Run, number: int) -> Search:
        """The search of run `number`, or one of its kind whose state is loaded afterwards."""
        # each is like the first one; the Gaussian searches of `minimize` itself begin anywhere in a finite box
        if self.generator is None or not isinstance(self.first, GaussianSearch):
            return self.first if run.kind == "first" else self.first.renew(run.popsize, number)
        seed = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
        share = torch.rand(
            len(self.first.best.x), generator=self.generator, device=self.generator.device, dtype=torch.float64
        )
        return build_alike(self.first, run.popsize, seed, run.shrink, share)

    def describe_result(self, message: str) -> SearchResult:
        """The result."""
        best = self.best if self.repeated is None else self._settle()
        success = message.split(":")[0] in CONVERGED if self.ftarget is None else self._level <= self.ftarget
        counts = self.objective.nfev, self.nit, success, message, self.history, self.objective.failures
        return SearchResult(best.x, best.fun, *counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        check_parts(self, state)
        hint = "delete the file to begin anew, choose another one, or give the same arguments"
        check_arguments("the checkpoint", state["arguments"], self.arguments, hint)
        run = Run(*state["run"])
        self.search = self._build(run, len(state["past"]))
        super().load_state_dict(state)
        self.past = [(Run(*past), used) for past, used in state["past"]]


# Starting again: the search of each run, with populations that grow (IPOP), or are large and small in turn (BIPOP)


@dataclass(frozen=True)
class Run:
    """One run of a restarted search.

    Args:
        popsize: Candidates per generation.
        shrink: Its sigma, as a multiple of sigma0.
        budget: Most evaluations; None for no bound.
        kind: `first`, `large` or `small`.
    """

    popsize: int
    shrink: float
    budget: int | None
    kind: str


class Restarts(ABC):
    """How often to start again, and with which populations.

    Attributes:
        times: Number of restarts.
    """

    times: int

    @abstractmethod
    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        """The next run, or None.

        Args:
            popsize: Of the first run.
            past: The runs so far, each with the evaluations that it took.
            uniform: Two draws in [0, 1).
        """


@dataclass(frozen=True)
class IPOP(Restarts):
    """Restarts with growing populations: each run has `factor` times the population of the last.

    Args:
        times: Restarts after the first run.
        factor: At least 1.

    Raises:
        ValueError: If a number is too small.

    Reference:
        Auger & Hansen 2005.
    """

    times: int = 9
    factor: float = 2.0

    def __post_init__(self) -> None:
        check_integer("times", self.times, 0, hint=": restarts after the first run")
        check_range("factor", self.factor, "[1, inf)", hint=", which multiplies popsize")

    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        if len(past) > self.times:
            return None
        return Run(int(popsize * self.factor ** len(past)), 1.0, None, "large" if past else "first")


@dataclass(frozen=True)
class BIPOP(Restarts):
    """Restarts with large populations, doubled each time, and between them small ones with a small sigma.

    A small run comes while all small ones together took fewer evaluations than the large ones. Its population is drawn
    between the default and half of the last large one, its sigma between a hundredth of sigma0 and sigma0.

    Args:
        times: Restarts with a large population.

    Raises:
        ValueError: If it is negative.

    Reference:
        Hansen 2009.
    """

    times: int = 9

    def __post_init__(self) -> None:
        check_integer("times", self.times, 0, hint=": restarts with a large population")

    def next(self, popsize: int, past: list[tuple[Run, int]], uniform: tuple[float, float]) -> Run | None:
        if not past:
            return Run(popsize, 1.0, None, "first")
        large = [(run, used) for run, used in past if run.kind == "large"]
        small = sum(used for run, used in past if run.kind == "small")
        if large and small < sum(used for _, used in large):
            last = large[-1]
            size = int(popsize * (0.5 * last[0].popsize / popsize) ** (uniform[0] ** 2))
            return Run(max(size, 2), 10 ** (-2 * uniform[1]), last[1] // 2, "small")
        if len(large) >= self.times:
            return None
        return Run(popsize * 2 ** (len(large) + 1), 1.0, None, "large")


# The result, and what happened generation by generation


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
            self.setdefault(name, [None] * length).append(value)
        for column in self.values():
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
            values = [value - floor if math.isfinite(value) else None for value in self[name]]
            left.plot(self["nfev"], values, label=name)
        logarithmic = target is not None or all(value > 0 for value in self["best"])
        label = "f" if floor == 0 else f"f {'-' if floor > 0 else '+'} {abs(floor):.6g}"
        left.set(xlabel="evaluations", ylabel=label, yscale="log" if logarithmic else "linear")
        for name in self.names[4:]:
            right.plot(self["nfev"], self[name], label=name)
        right.set(xlabel="evaluations", yscale="log")
        for axes in (left, right):
            for k in range(1, len(self)):
                if self["run"][k] != self["run"][k - 1]:
                    axes.axvline(self["nfev"][k - 1], color="0.8", linewidth=0.8, zorder=0)
            if axes.lines:
                axes.legend()
        return figure


# Checks at the door


def build_first(x0: Any, chosen: dict[str, Any]) -> tuple[Search, torch.Generator | None]:
    """The search that was given as x0, or a Gaussian one with a source of draws for those after it."""
    if isinstance(x0, Search):
        for name in (name for name, value in chosen.items() if value is not None):
            raise ValueError(f"{name} is given beside a {type(x0).__name__}, to whose arguments it belongs")
        return x0, None
    if chosen["sigma0"] is None:
        raise ValueError("sigma0 is missing: about a third of the distance at which the minimum may lie")
    model = chosen["model"]
    if model is not None and not isinstance(model, GaussianModel):
        raise TypeError(f"model is {model!r}, expected a Gaussian model such as Full(); a search is given as x0")
    generator = build_generator(chosen["seed"], torch.device("cpu"))
    return GaussianSearch(x0, **chosen), generator


def as_restarts(restarts: Restarts | int | str) -> Restarts:
    """The restarts that a number or a name stands for."""
    named = {"ipop": IPOP(), "bipop": BIPOP()}
    choice = named.get(restarts.lower(), restarts) if isinstance(restarts, str) else restarts
    if isinstance(choice, Restarts):
        return choice
    return IPOP(check_integer("restarts", restarts, 0, hint=": or IPOP(times), BIPOP(times), 'IPOP', 'BIPOP'"))


def as_choice(name: str, value: Any, kind: type[Choice]) -> Choice | None:
    """The choice, for which True stands with its defaults; None for False."""
    if isinstance(value, bool):
        return kind() if value else None
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, expected True, False or {kind.__name__}(...)")
    return value


def check_goals(ftarget: Any, maxfevals: Any, popsize: int, asking: int) -> None:
    """Check the target and the budget."""
    if ftarget is not None:
        check_number("ftarget", ftarget, -math.inf, hint=", or None for no target")
    if maxfevals is not None and not (is_real(maxfevals) and float(maxfevals) >= popsize + asking):
        more = f", and {asking} to find out whether f takes a batch or a point; vectorized=True or False says it"
        raise ValueError(
            f"maxfevals is {maxfevals!r}, expected at least {popsize + asking}: one generation" + more * (asking > 0)
        )


def check_evaluations(first: Search, executor: Any, timeout: Any, ahead: Any, noise: Any, surrogate: Any) -> None:
    """Check what is said of workers, and that one thing alone chooses what to evaluate."""
    check_integer("ahead", ahead, 0, hint=": points that workers have beyond a generation")
    if timeout is not None:
        check_range("timeout", timeout, "(0, inf]", hint=": seconds, or None to wait for ever")
    for name, given in (("timeout", timeout is not None), ("ahead", ahead > 0)):
        if given and executor is None:
            raise ValueError(f"{name} is given without an executor, whose workers it is about: pass executor=pool")
    chosen = {"noise": noise, "surrogate": surrogate, "ahead": ahead if ahead > 0 else False}
    chosen = {name: value for name, value in chosen.items() if value is not False}
    if len(chosen) > 1:
        words = " and ".join(f"{name}={value!r}" for name, value in chosen.items())
        raise ValueError(f"{words} are given: only one of these can choose what to evaluate")
    if surrogate is not False and not isinstance(first, GaussianSearch):
        raise ValueError(f"surrogate={surrogate!r} is given with a {type(first).__name__}: it needs a GaussianSearch")
