"""Points evaluated by an executor of `concurrent.futures` or its like; those that a lost worker had, elsewhere."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from inspect import Parameter, signature
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from natgrad.ground.messages import write_choices

LOST = (BrokenExecutor, CancelledError, OSError, EOFError)
"""What a future raises where the worker or the connection to it failed. What f raises comes back as a value."""
PATIENCE = 30.0
"""Seconds in which an executor that has lost points is to answer a question that takes no time."""


class Pool(Protocol):
    """What evaluates points elsewhere: an `Executor`, or a client of Dask, Ray or MPI with the same `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Something with `result()`, which gives fn(*args) or raises what fn raised."""


class Workers:
    """f at points by an executor; a point whose worker does not answer within `timeout` seconds is given up.

    Points that are lost with their worker are submitted once more, and then evaluated here. Where processes died, the
    point may be what kills them: a fresh pool evaluates the lost points one after another and stays in use.
    """

    def __init__(self, f: Callable[[Tensor], Any], executor: Pool, timeout: float | None = None) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(
                f"executor is {type(executor).__name__}, expected one of concurrent.futures, or what has its submit(); "
                "for Ray, ng.search.RayPool()"
            )
        if isinstance(executor, ProcessPoolExecutor):
            check_pickles(f)
        self.f, self.executor, self.timeout = f, executor, timeout
        self.silent = 0  # times in a row that no worker answered within the timeout
        self.flight = PointsInFlight(timeout)  # those that were started
        try:
            kinds = {name: parameter.kind for name, parameter in signature(executor.submit).parameters.items()}
        except (TypeError, ValueError):  # it does not tell
            kinds = {}
        self._options = {"pure": False} if "pure" in kinds else {}  # which spares Dask to hash f
        self._takes_names = not kinds or Parameter.VAR_POSITIONAL in kinds.values()
        self._at, self._keeps_tensors = AtPoint(f), isinstance(executor, ThreadPoolExecutor)
        self._own: ProcessPoolExecutor | None = None
        self._warned = False

    def evaluate(self, points: Sequence[Tensor]) -> list[Any]:
        """What f gave at each point; `Raised` where it raised, and an exception where the executor did."""
        return self._replace_lost(points, self._wait_for_all([self._submit(point) for point in points]))

    def start(self, point: Tensor) -> None:
        """Have a point evaluated, and do not wait."""
        self.flight.add(point, self._submit(point))

    def take(self) -> list[tuple[Tensor, Any]]:
        """The next started point that is answered, or those that are late, with outcomes as of `evaluate`."""
        answers = self.flight.take_next()
        if all(future is not None for _, future in answers):
            self.silent = 0
        elif not self.flight.points:
            self.silent += 1
        points = [point for point, _ in answers]
        outcomes = self._replace_lost(points, [self._read(future) for _, future in answers])
        return list(zip(points, outcomes, strict=True))

    def give_up(self) -> int:
        """Forget the points that were started. Returns how many of them no worker had begun."""
        cancelled = sum(cancel_future(future) for _, future in self.flight.points.values())
        self.flight = PointsInFlight(self.timeout)
        return cancelled

    def close(self) -> None:
        """Shut down the pool that replaced a broken one; the given one belongs to its owner."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None

    def _submit(self, point: Tensor, at: Callable[..., Any] | None = None) -> Any:
        """The future of f at a point, or of another function."""
        # tensors are sent to processes by files that they share, which takes longer than a few numbers do
        as_tensor = self._keeps_tensors or point.device.type != "cpu" or point.dtype == torch.bfloat16
        # a pool that remembers what it evaluated, such as Dask's, would give a noisy f's first value again
        name = [uuid4().hex] if self._takes_names else []
        try:
            return self.executor.submit(at or self._at, point if as_tensor else point.numpy(), *name, **self._options)
        except (TypeError, ValueError, AttributeError, pickle.PickleError):  # what cannot be sent
            raise
        except Exception as error:  # noqa: BLE001 a pool that was closed raises what it likes
            failed: Future[Any] = Future()
            failed.set_exception(LostError(error))
            return failed

    def _wait_for_all(self, futures: Sequence[Any]) -> list[Any]:
        """The outcomes; of points that are late, a TimeoutError."""
        if self.timeout is None:
            return [self._read(future) for future in futures]
        flight = PointsInFlight(self.timeout)
        for number, future in enumerate(futures):
            flight.add(number, future)
        answers: dict[int, Any] = {}
        while flight.points:
            answers |= flight.take_next()
        self.silent = 0 if any(future is not None for future in answers.values()) else self.silent + 1
        return [self._read(answers[number]) for number in range(len(futures))]

    def _read(self, future: Any) -> Any:
        """The outcome of a future, which is None for a point that is late."""
        if future is None:
            return TimeoutError(f"no worker answered for {self.timeout:g} seconds, and the point was given up")
        try:
            return future.result()
        except LostError as error:
            return error
        except LOST as error:
            return LostError(error)
        except Exception as error:  # noqa: BLE001 pools raise what they like where they cannot send f or its value
            speaks_of_pickling = isinstance(error, pickle.PicklingError) or "pickle" in str(error)
            if speaks_of_pickling and not isinstance(self.executor, ThreadPoolExecutor):
                check_pickles(self.f)
            return error

    def _replace_lost(self, points: Sequence[Tensor], outcomes: Sequence[Any]) -> list[Any]:
        """The outcomes, with those of points that were lost from elsewhere."""
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, LostError)]
        if errors and not self._warned:
            self._warned = True
            warnings.warn(
                f"the executor lost {len(errors)} points ({type(errors[0]).__name__}: {errors[0]}); lost points are "
                "evaluated elsewhere, this is said once",
                RuntimeWarning,
                stacklevel=2,
            )
        return [
            self._evaluate_elsewhere(point, outcome.error) if isinstance(outcome, LostError) else outcome
            for point, outcome in zip(points, outcomes, strict=True)
        ]

    def _evaluate_elsewhere(self, point: Tensor, error: BaseException) -> Any:
        broken = isinstance(error, BrokenProcessPool) and find_pickle_error(self.f) is None
        if broken and not self._renew_pool():
            return self._at(point)
        if not broken and not (isinstance(error, TimeoutError) or self._still_answers(point)):
            return self._at(point)
        (outcome,) = self._wait_for_all([self._submit(point)])
        if not isinstance(outcome, LostError):
            return outcome
        if broken:  # in a pool that works, where the point was alone
            return RuntimeError(f"the process that evaluates this point dies: {outcome.error}")
        # a point that is late would take as long here, and nobody would stop it
        return outcome.error if isinstance(outcome.error, TimeoutError) else self._at(point)

    def _still_answers(self, point: Tensor) -> bool:
        """Whether a worker answers a question that takes no time. If none does, the executor is not asked again."""
        future = self._submit(point, give_zero)
        if callable(getattr(future, "add_done_callback", None)):
            flight = PointsInFlight(PATIENCE)
            flight.add(0, future)
            if flight.take_next() == [(0, None)]:
                self.executor, self._options = Here(), {}
                return False
        return not isinstance(self._read(future), Exception)

    def _renew_pool(self) -> bool:
        """Take a fresh pool where the present one is broken. False if its processes cannot even receive f."""
        if self._own is not None and can_run(self._own, int):
            return True
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
        # as many processes, started in the same way if the broken pool was of this class too
        names = ("mp_context", "initializer", "initargs") if isinstance(self.executor, ProcessPoolExecutor) else ()
        own = {name: getattr(self.executor, f"_{name}") for name in names}
        self._own = self.executor = fresh = ProcessPoolExecutor(getattr(self.executor, "_max_workers", None), **own)
        if can_run(fresh, callable, self.f):
            return True
        fresh.shutdown(wait=False, cancel_futures=True)
        self._own, self.executor, self._options = None, Here(), {}
        return False


class Here:
    """In the place of an executor that works no more: evaluates where it is asked."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """A future of fn(*args), which is done; what f raises, fn gives as a value."""
        done: Future[Any] = Future()
        done.set_result(fn(*args))
        return done


class PointsInFlight:
    """Points with the workers. Pools begin them in their order: as a later one is answered, an earlier one runs.

    `timeout` seconds after that it is late. None: never.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout, self.answered, self._number = timeout, monotonic(), 0
        self.points: dict[int, tuple[Any, Any]] = {}  # by number in order of their submission, each with its future
        self._since: dict[int, float] = {}  # when it was known to run, infinite if it may still be waiting
        self._answers: SimpleQueue[int] = SimpleQueue()  # numbers of points whose futures are done

    def add(self, point: Any, future: Any) -> None:
        """A point was submitted, after all those that were added before."""
        listen = getattr(future, "add_done_callback", None)
        if not callable(listen):
            raise TypeError(
                "timeout= and ahead= need futures that tell when they are done, by add_done_callback(), which "
                f"{type(future).__name__} does not have"
            )
        if not self.points:
            self.answered = monotonic()
        self._number = number = self._number + 1
        self.points[number], self._since[number] = (point, future), math.inf
        listen(lambda _: self._answers.put(number))

    def take_next(self) -> list[tuple[Any, Any]]:
        """The next point that is answered, with its future, or those that are late, with None."""
        while True:
            late, seconds = self.find_late() if self._answers.empty() else ([], 0.0)
            if late:
                points = [self._remove(number) for number in late]
                for _, future in points:
                    cancel_future(future)
                return [(point, None) for point, _ in points]
            try:
                number = self._answers.get(timeout=seconds)
            except Empty:
                continue
            if number in self.points:
                self.answered = monotonic()
                for earlier in self._since:
                    if earlier < number:
                        self._since[earlier] = min(self._since[earlier], self.answered)
                return [self._remove(number)]

    def _remove(self, number: int) -> tuple[Any, Any]:
        self._since.pop(number)
        return self.points.pop(number)

    def find_late(self) -> tuple[list[int], float | None]:
        """The points that have taken too long, all if no worker has answered for so long; seconds to the next one."""
        if self.timeout is None:
            return [], None
        start = monotonic() - self.timeout
        late = [number for number, since in self._since.items() if self.answered <= start or since <= start]
        return late, max(0.0, min([self.answered, *self._since.values()]) - start)


@dataclass(frozen=True)
class Raised:
    """Stands for the value of a point where f raised. It can be pickled, which not every exception can."""

    kind: str  # the exception's class
    message: str


class AtPoint:
    """f at a point: its value, in memory of its own, or what it raised."""

    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        self.f, self.__name__ = f, getattr(f, "__name__", "f")  # by which Dask shows tasks

    def __call__(self, point: Any, name: str = "") -> Any:
        """The value at a point."""
        try:
            value = self.f(point if isinstance(point, Tensor) else torch.tensor(point))
        except Exception as error:  # noqa: BLE001 a black box may raise anything
            return Raised(type(error).__name__, str(error))
        if isinstance(value, Tensor):
            return value.detach().clone()
        return value.copy() if isinstance(value, np.ndarray) else value


def give_zero(point: Any, name: str = "") -> float:
    """0: what an executor is asked to see whether it answers."""
    return 0.0


class LostError(Exception):
    """Stands for an outcome that is missing because the worker failed, not f."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def cancel_future(future: Any) -> bool:
    """Cancel what no worker has begun; what runs goes on, and nobody waits for it. True if it was in time."""
    cancel = getattr(future, "cancel", None)
    return callable(cancel) and cancel() is True


def can_run(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> bool:
    """True if a pool's processes do not die of a function."""
    try:
        pool.submit(function, *arguments).result()
    except LOST:
        return False
    return True


def find_pickle_error(f: Any) -> Exception | None:
    """Why f cannot be sent to another process, or None."""
    wrong = None
    for dumps in (pickle.dumps, ForkingPickler.dumps):  # the second knows more kinds, such as locks and connections
        try:
            dumps(f)
        except Exception as error:  # noqa: BLE001 objects raise what they like here
            wrong = error
        else:
            return None
    return wrong


def check_pickles(f: Any) -> None:
    """Check that f can be sent to another process."""
    if (error := find_pickle_error(f)) is not None:
        raise TypeError(
            f"f cannot be pickled, which sending it to the executor's processes needs ({error}): define it with def at "
            "the top of a module, not as a lambda or inside of a function, or pass a ThreadPoolExecutor"
        ) from error


# Ray, which has no `submit` of its own


class RayPool:
    """Evaluates points as tasks of Ray, on one machine or a cluster: `ng.minimize(f, x0, 1.0, executor=RayPool())`.

    A function is sent to the cluster once, not with every point. A task whose worker or machine died is a lost point,
    which the search evaluates elsewhere; an exception of f is f's.

    Args:
        **options: Of the tasks, such as num_cpus=2 or resources={"big": 1}: those of `ray.remote`.

    Raises:
        ImportError: If Ray is not installed.

    Reference:
        Moritz et al., Ray: a distributed framework for emerging AI applications, OSDI 2018.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports] (an extra of the user)
        except ImportError as error:
            raise ImportError("RayPool needs Ray: pip install ray") from error
        self._ray: Any = ray
        if not self._ray.is_initialized():
            self._ray.init(logging_level="warning")
        task = self._ray.remote(call_function)
        self._task = task.options(**{"max_retries": 0, **options})
        self._sent: dict[int, tuple[Any, Any]] = {}  # id of a function -> the function, and where Ray keeps it
        self._options = options

    def __repr__(self) -> str:
        return write_choices(self, **self._options)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """A future of fn(*args), as executors give it.

        Args:
            fn: A function.
            *args: Its arguments.

        Returns:
            It raises what fn raised, and `BrokenExecutor` where the worker was lost.
        """
        if id(fn) not in self._sent:
            self._sent[id(fn)] = (fn, self._ray.put(fn))
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        reference = self._task.remote(self._sent[id(fn)][1], *args)
        reference.future().add_done_callback(lambda done: self._pass_on(done, answer))
        return answer

    def _pass_on(self, done: Future[Any], answer: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):  # f raised
            cause = getattr(error, "cause", None)
            answer.set_exception(cause if isinstance(cause, Exception) else error)
        else:
            answer.set_exception(BrokenExecutor(f"Ray lost the task: {type(error).__name__}"))


def call_function(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), in a task."""
    return function(*args)
