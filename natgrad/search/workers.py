"""Points evaluated by an executor; points that a lost worker had are evaluated elsewhere."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
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

LOST = (BrokenExecutor, CancelledError, OSError, EOFError)
"""What a future raises where the worker or the connection to it failed. What f raises comes back as a value."""


PATIENCE = 30.0
"""Seconds in which an executor that has lost points is to answer a question that takes no time."""


class Pool(Protocol):
    """What evaluates points elsewhere: an `Executor`, or a client of Dask, Ray or MPI with the same `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Something with `result()`, which gives fn(*args) or raises what fn raised."""


class Workers:
    """f at points by an executor.

    A worker that dies or does not answer takes its points with it. They are submitted once more, and if they are lost
    again, evaluated here. Where processes died, the point may be what kills them: a fresh pool evaluates the lost
    points one after another and stays in use; a point that kills its process a second time has no value. An executor
    that lost points and then answers nothing, as a client whose connection was reset, is not asked again.

    Every point is submitted with a name of its own: a pool that remembers what it evaluated, such as Dask's, would give
    a noisy f's first value again where it is asked about a point again.

    Args:
        f: A function of one point.
        executor: Where it is called.
        timeout: Seconds after which a point that a worker has begun is given up, and all points if no worker answers;
            None: wait for ever.

    Raises:
        TypeError: If `executor` has no submit(), or if it needs to pickle f and cannot.
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
        self._answers: SimpleQueue[int] = SimpleQueue()  # numbers of points whose futures are done
        self._started: dict[int, tuple[Tensor, Any]] = {}  # number -> a point that was started, and its future
        self._running = RunningPoints(timeout)  # of these numbers
        self._number, self._name = 0, uuid4().hex
        kinds = read_parameters(executor.submit)
        self._options = {"pure": False} if "pure" in kinds else {}  # which spares Dask to hash f
        self._takes_names = not kinds or Parameter.VAR_POSITIONAL in kinds.values()
        self._at, self._keeps_tensors = AtPoint(f), isinstance(executor, ThreadPoolExecutor)
        self._own: ProcessPoolExecutor | None = None
        self._here = self._warned = False

    def evaluate(self, points: Sequence[Tensor]) -> list[Any]:
        """What f gave at each point; `Raised` where it raised, and an exception where the executor did."""
        if self._here:
            return [self._at(point) for point in points]
        futures = [self._submit(point) for point in points]
        found = self._wait_for_all(futures)
        lost = [k for k, outcome in enumerate(found) if isinstance(outcome, Lost)]
        if lost:
            self._warn(len(lost), found[lost[0]].error)
        for k in lost:
            found[k] = self._evaluate_elsewhere(points[k], found[k].error)
        return found

    def start(self, point: Tensor) -> None:
        """Have a point evaluated, and do not wait.

        point: (d,) or (1, d).
        """
        self._number += 1
        future = Lost(BrokenExecutor("no pool works")) if self._here else self._submit(point)
        self._started[self._number] = (point, future)
        self._running.add(self._number)
        self._listen(self._number, future, self._answers)

    @property
    def count(self) -> int:
        """Points that were started and not taken."""
        return len(self._started)

    def take(self) -> tuple[Tensor, Any] | None:
        """The next point that has an answer, in the order of the answers, with its outcome as of `evaluate`.

        None: no worker answered within the timeout.
        """
        number = None
        while number is None or number not in self._started:  # answers of points that were given up come too
            number, late = wait_for_answer(self._answers, self._running)
            if late and len(late) == len(self._started):
                self.silent += 1
                return None
            if late:
                self._running.remove(late[0])
                point, future = self._started.pop(late[0])
                cancel_future(future)
                return point, NoAnswerError(self.timeout or 0.0)
        self.silent = 0
        point, future = self._started.pop(number)
        outcome = self._at(point) if self._here else self._wait_for(future)
        if isinstance(outcome, Lost):
            self._warn(1, outcome.error)
            outcome = self._evaluate_elsewhere(point, outcome.error)
        return point, outcome

    def give_up(self) -> tuple[list[Tensor], int]:
        """Forget the points that were started, and cancel those that no worker has yet."""
        points = [point for point, _ in self._started.values()]
        cancelled = sum(cancel_future(future) for _, future in self._started.values())
        self._started, self._running = {}, RunningPoints(self.timeout)
        return points, cancelled

    def close(self) -> None:
        """Shut down the pool that replaced a broken one; the given one belongs to its owner."""
        self.give_up()
        self._close_own()

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None

    def _submit(self, point: Tensor, at: Callable[..., Any] | None = None) -> Any:
        """The future of f at a point, or of another function."""
        # tensors are sent to processes by files that they share, which takes longer than a few numbers do
        whole = self._keeps_tensors or point.device.type != "cpu" or point.dtype == torch.bfloat16
        self._number += 1
        name = [f"{self._name} {self._number}"] if self._takes_names else []
        try:
            return self.executor.submit(at or self._at, point if whole else point.numpy(), *name, **self._options)
        except (TypeError, ValueError, AttributeError, pickle.PickleError):  # what cannot be sent
            raise
        except Exception as error:  # noqa: BLE001 a pool that was closed raises what it likes
            return Lost(error)

    def _wait_for_all(self, futures: Sequence[Any]) -> list[Any]:
        """The outcomes; points that are late have a `NoAnswerError`."""
        if self.timeout is None:
            return [self._wait_for(future) for future in futures]
        answers: SimpleQueue[int] = SimpleQueue()
        running = RunningPoints(self.timeout)
        for k, future in enumerate(futures):
            running.add(k)
            self._listen(k, future, answers)
        found: dict[int, Any] = {}
        while len(found) < len(futures):
            number, late = wait_for_answer(answers, running)
            for k in late:
                running.remove(k)
                cancel_future(futures[k])
                found[k] = NoAnswerError(self.timeout)
            if number is not None and number not in found:
                found[number] = self._wait_for(futures[number])
        self.silent = self.silent + 1 if all(isinstance(one, NoAnswerError) for one in found.values()) else 0
        return [found[k] for k in range(len(futures))]

    def _listen(self, number: int, future: Any, answers: SimpleQueue[int]) -> None:
        """Put the number into the queue as soon as the future is done."""
        if isinstance(future, Lost):
            answers.put(number)
            return
        add = getattr(future, "add_done_callback", None)
        if not callable(add):
            raise TypeError(
                f"timeout= and ahead= need futures that tell when they are done, by add_done_callback(); those of "
                f"{type(self.executor).__name__} do not"
            )
        add(lambda _: answers.put(number))

    def _wait_for(self, future: Any) -> Any:
        if isinstance(future, Lost):
            return future
        try:
            return future.result()
        except LOST as error:
            return Lost(error)
        except Exception as error:  # noqa: BLE001 pools raise what they like where they cannot send f or its value
            speaks_of_pickling = isinstance(error, pickle.PicklingError) or "pickle" in str(error)
            if speaks_of_pickling and not isinstance(self.executor, ThreadPoolExecutor):
                check_pickles(self.f)
            return error

    def _evaluate_elsewhere(self, point: Tensor, error: BaseException) -> Any:
        if isinstance(error, BrokenProcessPool) and can_pickle(self.f):
            return self._evaluate_in_fresh_pool(point)
        if self._here or not (isinstance(error, TimeoutError) or self._still_answers(point)):
            return self._at(point)
        (again,) = self._wait_for_all([self._submit(point)])
        if not isinstance(again, Lost):
            return again
        if isinstance(again.error, TimeoutError):  # here it would take as long, and nobody would stop it
            return again.error
        return self._at(point)

    def _still_answers(self, point: Tensor) -> bool:
        """Whether a worker answers a question that takes no time. If none does, the executor is not asked again."""
        future = self._submit(point, give_zero)
        if isinstance(future, Lost):
            return False
        if callable(getattr(future, "add_done_callback", None)):
            answers: SimpleQueue[int] = SimpleQueue()
            self._listen(0, future, answers)
            try:
                answers.get(timeout=PATIENCE)
            except Empty:
                self._here = True
                return False
        return not isinstance(self._wait_for(future), (Lost, Exception))

    def _evaluate_in_fresh_pool(self, point: Tensor) -> Any:
        """The outcome in a pool that works, where the point is alone."""
        if self._own is None or isinstance(self._wait_for(self._submit_to_fresh_pool(int)), Lost):
            self._replace()
        if self._own is None:
            return self._at(point)
        (outcome,) = self._wait_for_all([self._submit(point)])
        if isinstance(outcome, Lost):
            return RuntimeError(f"the process that evaluates this point dies: {outcome.error}")
        return outcome

    def _replace(self) -> None:
        """Start a pool like the broken one; none if its processes cannot even receive f."""
        self._close_own()
        self._own = copy_pool(self.executor)
        self.executor = self._own
        if isinstance(self._wait_for(self._submit_to_fresh_pool(callable, self.f)), Lost):
            self._close_own()
            self._here = True

    def _submit_to_fresh_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert self._own is not None
        try:
            return self._own.submit(function, *arguments)
        except LOST as error:
            return Lost(error)

    def _warn(self, count: int, error: BaseException) -> None:
        if not self._warned:
            warnings.warn(
                f"the executor lost {count} points ({type(error).__name__}: {error}); lost points are evaluated "
                "elsewhere, this is said once",
                RuntimeWarning,
                stacklevel=2,
            )
        self._warned = True


@dataclass(frozen=True)
class Raised:
    """Stands for the value of a point where f raised. It can be pickled, which not every exception can.

    Attributes:
        kind: The exception's class.
        message: What it said.
    """

    kind: str
    message: str


class AtPoint:
    """f at a point: its value, in memory of its own, or what it raised.

    Args:
        f: A function of a tensor.
    """

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


class RunningPoints:
    """Since when points are known to run. Pools begin them in their order: as a later one is answered, an earlier runs.

    Args:
        timeout: Seconds for each from then on; None: for ever.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout, self.answered = timeout, monotonic()
        self._since: dict[int, float] = {}  # number of a point -> when, infinite if it may still be waiting

    def add(self, number: int) -> None:
        """A point was submitted, after all those that were added before."""
        if not self._since:
            self.answered = monotonic()
        self._since[number] = math.inf

    def remove(self, number: int) -> None:
        """Nobody waits for a point any more."""
        self._since.pop(number, None)

    def record(self, number: int) -> None:
        """A point was answered just now."""
        self.answered = monotonic()
        self.remove(number)
        for earlier in self._since:
            if earlier < number:
                self._since[earlier] = min(self._since[earlier], self.answered)

    def seconds_left(self) -> float | None:
        """How long to wait until some point is late; None: for ever."""
        if self.timeout is None:
            return None
        return max(0.0, min([self.answered, *self._since.values()]) + self.timeout - monotonic())

    def find_late(self) -> list[int]:
        """The points that have taken too long; all of them, if no worker has answered for so long."""
        if self.timeout is None:
            return []
        start = monotonic() - self.timeout
        silent = self.answered <= start
        return [number for number, since in self._since.items() if silent or since <= start]


def wait_for_answer(answers: SimpleQueue[int], running: RunningPoints) -> tuple[int | None, list[int]]:
    """The number of the next point that is answered, or None and those that are late."""
    try:
        number = answers.get_nowait()
    except Empty:
        if late := running.find_late():
            return None, late
        try:
            number = answers.get(timeout=running.seconds_left())
        except Empty:
            return None, running.find_late()
    running.record(number)
    return number, []


class Lost:
    """Stands for an outcome that is missing because the worker failed, not f.

    Args:
        error: What the executor raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class NoAnswerError(TimeoutError):
    """Stands for the value of a point that no worker gave in time.

    Args:
        seconds: How long nothing was answered.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no worker answered for {seconds:g} seconds (timeout=), and the point was given up")


def cancel_future(future: Any) -> bool:
    """Cancel what no worker has begun; what runs goes on, and nobody waits for it. True if it was in time."""
    cancel = getattr(future, "cancel", None)
    return callable(cancel) and cancel() is True


def copy_pool(executor: Any) -> ProcessPoolExecutor:
    """A pool of as many processes, started in the same way if the broken one was of this class too."""
    if not isinstance(executor, ProcessPoolExecutor):
        return ProcessPoolExecutor(getattr(executor, "_max_workers", None))
    return ProcessPoolExecutor(
        getattr(executor, "_max_workers", None),
        mp_context=getattr(executor, "_mp_context", None),
        initializer=getattr(executor, "_initializer", None),
        initargs=getattr(executor, "_initargs", ()),
    )


def can_pickle(f: Any) -> bool:
    """True if f can be sent to another process."""
    try:
        check_pickles(f)
    except TypeError:
        return False
    return True


def check_pickles(f: Any) -> None:
    """Check that f can be sent to another process."""
    try:
        pickle.dumps(f)
    except Exception:  # noqa: BLE001 objects raise what they like here
        try:
            ForkingPickler.dumps(f)  # knows more kinds of objects, such as locks and connections
        except Exception as error:
            raise TypeError(
                f"f cannot be pickled, which sending it to the executor's processes needs ({error}): define it with "
                "def at the top of a module, not as a lambda or inside of a function, or pass a ThreadPoolExecutor"
            ) from error


def read_parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The kinds of a function's parameters by their names; empty if it does not tell."""
    try:
        return {name: parameter.kind for name, parameter in signature(function).parameters.items()}
    except (TypeError, ValueError):
        return {}
