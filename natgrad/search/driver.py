"""`minimize`: a search from the first point to a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

from natgrad.ground.checks import check_integer, is_real
from natgrad.ground.messages import explain_calls
from natgrad.ground.progress import Progress, check_callback
from natgrad.ground.pure import keep_gradient_mode
from natgrad.ground.state_files import FORMAT, read_state_file, write_state_file
from natgrad.search.base import Search, as_popsize
from natgrad.search.black_box import BlackBox, Function, Pool
from natgrad.search.convergence import Tolerances
from natgrad.search.domain import as_bounds, as_integer_mask, as_point, as_scales, as_tensor
from natgrad.search.full_covariance import Full
from natgrad.search.gaussian import Bounds, GaussianSearch
from natgrad.search.model import GaussianModel
from natgrad.search.noise import NoiseHandling, Repeated
from natgrad.search.relaxation import Relaxation
from natgrad.search.restarts import IPOP, Restarts, as_restarts
from natgrad.search.runs import GaussianRunFactory, GivenRunFactory, RunFactory, SearchResult, SearchRuns
from natgrad.search.surrogate import QuadraticSurrogate


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
    callback: Callable[[Search], Any] | None = None,
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
        callback: Called with the search after each generation; the search stops if it returns True.
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
            from it, bit for bit.
        checkpoint_every: Generations between two writes.

    Returns:
        The best point, its value, the counts, why the search ended, and its history.

    Raises:
        TypeError: If f is no function, or cannot be pickled and the executor's processes need that.
        ValueError: If an argument does not fit, such as inverted bounds or a budget below one generation.

    Example:
        >>> result = ng.minimize(lambda X: (X - 1).square().sum(1), [3.0, -2.0], sigma0=1.0, seed=0)
        >>> result.success, round(float(result.x[0]), 4)
        (True, 1.0)
    """
    chosen = {"popsize": popsize, "bounds": bounds, "integers": integers, "model": model, "tolerances": tolerances}
    if restarts is None:
        restarts = 0 if not isinstance(x0, Relaxation) or ftarget is None or maxfevals is None else IPOP()
    factory = as_run_factory(x0, sigma0, chosen, as_restarts(restarts), seed)
    check_workers(executor, timeout, ahead, noise)
    assistance = as_surrogate(surrogate, factory, noise, ahead)
    objective = BlackBox(f, vectorized, executor, timeout)
    check_goals(ftarget, maxfevals, factory.popsize, objective.asking)
    check_callback(callback, "the search")
    check_integer("checkpoint_every", checkpoint_every, 1, hint=": a number of generations")
    objective.limit = math.inf if maxfevals is None else float(maxfevals)
    handling = as_handling(noise)
    repeated = None if handling is None else Repeated(objective, handling)
    runs = SearchRuns(factory, objective, repeated, ahead, assistance)
    file = None if checkpoint is None else CheckpointFile(runs, Path(checkpoint), checkpoint_every)
    try:
        with Progress("evaluations", maxfevals, progress) as shown:
            ending = run_to_ending(runs, ftarget, maxfevals, callback, file, shown)
    except KeyboardInterrupt:
        ending = "interrupted: the result is what was found so far"
    finally:
        objective.close()
    if file is not None:
        file.write()
    return runs.result(ending, ftarget)


def run_to_ending(
    runs: SearchRuns,
    ftarget: float | None,
    maxfevals: float | None,
    callback: Callable[[Search], Any] | None,
    file: CheckpointFile | None,
    shown: Progress,
) -> str:
    """Run generations until all runs are over. Returns why they are."""
    while (ending := runs.find_ending(ftarget, maxfevals)) is None:
        runs.run_generation()
        if file is not None:
            file.keep()
        shown.update(runs.nfev, {"generation": runs.nit, "best": float(runs.best.fun)})
        if callback is not None and callback(runs.search) is True:
            return "callback: it returned True"
    return ending


class CheckpointFile:
    """The state after the last whole generation, in memory and now and then in a file.

    A generation that is interrupted leaves half of a state, which is never written.

    Args:
        runs: What is saved; it continues from the file if there is one.
        path: Its place.
        every: Generations between two writes.
    """

    def __init__(self, runs: SearchRuns, path: Path, every: int) -> None:
        self.runs, self.path, self.every = runs, path, every
        if path.exists():
            runs.load_state_dict(read_state_file(path))
        self.state = deepcopy(runs.state_dict())

    def keep(self) -> None:
        """Note the state, and write it where that is due."""
        self.state = deepcopy(self.runs.state_dict())
        if self.runs.nit % self.every == 0:
            self.write()

    def write(self) -> None:
        """Write the noted state; a crash in between leaves the old file."""
        write_state_file({"format": FORMAT, **self.state}, self.path)


def as_run_factory(x0: Any, sigma0: Any, chosen: dict[str, Any], restarts: Restarts, seed: int | None) -> RunFactory:
    """A factory of Gaussian searches, or of searches like the one that was given as x0.

    x0: A point (d,), or a search.
    """
    if isinstance(x0, Search):
        others = {"sigma0": sigma0, "seed": seed, **chosen}
        wrong = [name for name, value in others.items() if value is not None]
        if wrong:
            raise ValueError(f"{wrong[0]} is given beside a {type(x0).__name__}, to whose arguments it belongs")
        return GivenRunFactory(x0, restarts)
    if sigma0 is None:
        raise ValueError("sigma0 is missing: about a third of the distance at which the minimum may lie")
    start = as_point(x0, "x0")
    as_scales(sigma0, start)  # checks it
    model = Full() if chosen["model"] is None else chosen["model"]
    if not isinstance(model, GaussianModel):
        raise TypeError(f"model is {model!r}, expected a Gaussian model such as Full(); a search is given as x0")
    size = as_popsize(chosen["popsize"], model.popsize(len(start)))
    settings = {
        "bounds": as_bounds(chosen["bounds"], start),  # copies: restarts come later
        "integers": as_integer_mask(chosen["integers"], start),
        "tolerances": chosen["tolerances"],
        "model": model,
    }
    return GaussianRunFactory(start, as_tensor(sigma0, "sigma0"), settings, restarts, size, seed)


def as_handling(noise: bool | NoiseHandling) -> NoiseHandling | None:
    """How noise is handled; None if there is none."""
    if isinstance(noise, NoiseHandling):
        return noise
    if not isinstance(noise, bool):
        raise TypeError(f"noise is {noise!r}, expected True, False or NoiseHandling(...)")
    return NoiseHandling() if noise else None


def as_surrogate(surrogate: Any, factory: RunFactory, noise: Any, ahead: int) -> QuadraticSurrogate | None:
    """When a model of f is believed; None if there is none."""
    if not isinstance(surrogate, (bool, QuadraticSurrogate)):
        raise TypeError(f"surrogate is {surrogate!r}, expected True, False or QuadraticSurrogate(...)")
    if surrogate is False:
        return None
    first = factory.search if isinstance(factory, GivenRunFactory) else None
    if first is not None and not isinstance(first, GaussianSearch):
        raise ValueError(f"surrogate={surrogate!r} is given with a {type(first).__name__}: it needs a GaussianSearch")
    if noise is not False or ahead > 0:
        name, value = ("noise", noise) if noise is not False else ("ahead", ahead)
        raise ValueError(
            f"{name} is {value!r} with surrogate={surrogate!r}: only one of the two can choose what to evaluate"
        )
    return QuadraticSurrogate() if surrogate is True else surrogate


def check_goals(ftarget: Any, maxfevals: Any, popsize: int, asking: int) -> None:
    """Check the target and the budget."""
    if ftarget is not None and (not is_real(ftarget) or math.isnan(ftarget)):
        came = "NaN" if isinstance(ftarget, float) else repr(ftarget)
        raise ValueError(f"ftarget is {came}, expected a number, or None for no target")
    if maxfevals is not None and not (is_real(maxfevals) and float(maxfevals) >= popsize):
        raise ValueError(f"maxfevals is {maxfevals!r}, expected at least {popsize}, the evaluations of one generation")
    if maxfevals is not None and float(maxfevals) < popsize + asking:
        raise ValueError(
            f"maxfevals is {maxfevals!r}, expected at least {popsize + asking}: one generation, and {asking} to find "
            "out whether f takes a batch or a point; vectorized=True or False says it"
        )


def check_workers(executor: Any, timeout: Any, ahead: Any, noise: Any) -> None:
    """Check what is said of workers."""
    check_integer("ahead", ahead, 0, hint=": points that workers have beyond a generation")
    if timeout is not None and not (is_real(timeout) and float(timeout) > 0):
        raise ValueError(f"timeout is {timeout!r}, expected seconds above 0, or None to wait for ever")
    for name, given in (("timeout", timeout is not None), ("ahead", ahead > 0)):
        if given and executor is None:
            raise ValueError(f"{name} is given without an executor, whose workers it is about: pass executor=pool")
    if ahead > 0 and noise is not False:
        raise ValueError(f"ahead is {ahead} with noise={noise!r}, which evaluates points again: use ahead=0")
