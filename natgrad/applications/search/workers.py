"""Points evaluated by an executor; points that a lost worker had are evaluated elsewhere."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from inspect import signature
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

LOST = (BrokenExecutor, CancelledError, TimeoutError)
"""What a future raises where the worker, and not f, failed."""


class Pool(Protocol):
    """What evaluates points elsewhere: an `Executor`, or a client of Dask, Ray or MPI with the same `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Something with `result()`, which gives fn(*args) or raises what fn raised.

        Args:
            fn: A function.
            *args: Its arguments.
        """


class Workers:
    """f at points by an executor.

    A worker that dies or does not answer takes its points with it. They are submitted once more, and if they are lost
    again, evaluated here. Where processes died, the point may be what kills them: a fresh pool evaluates the lost
    points one after another and stays in use; a point that kills its process a second time has no value.

    Args:
        f: A function of one point.
        executor: Where it is called.
        timeout: Seconds without an answer from any worker, after which the points that still have none are given up;
            None: wait for ever.

    Raises:
        TypeError: If `executor` has no submit(), or if it needs to pickle f and cannot.
    """

    def __init__(self, f: Callable[[Tensor], Any], executor: Pool, timeout: float | None = None) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(
                f"executor is {type(executor).__name__}, expected one of concurrent.futures, or what has its submit(); "
                "for Ray, ng.applications.search.RayPool()"
            )
        if isinstance(executor, ProcessPoolExecutor):
            check_pickles(f)
        self.f, self.executor, self.timeout = f, executor, timeout
        self._answers: SimpleQueue[int] = SimpleQueue()  # numbers of points whose futures are done
        self._started: dict[int, tuple[Tensor, Any]] = {}  # number -> a point that was started, and its future
        self._number = 0
        self._options = {"pure": False} if has_argument(executor.submit, "pure") else {}
        self._at, self._keeps_tensors = AtNumbers(f), isinstance(executor, ThreadPoolExecutor)
        self._own: ProcessPoolExecutor | None = None
        self._here = self._warned = False

    def evaluate(self, points: Sequence[Tensor]) -> list[Any]:
        """What f gave at each point, or the exception in its place.

        Args:
            points: One tensor each.
        """
        if self._here:
            return [self._evaluate_here(point) for point in points]
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

        Args:
            point: Shape (d,) or (1, d).
        """
        self._number += 1
        future = Lost(BrokenExecutor("no pool works")) if self._here else self._submit(point)
        self._started[self._number] = (point, future)
        self._listen(self._number, future, self._answers)

    @property
    def count(self) -> int:
        """Points that were started and not taken."""
        return len(self._started)

    def take(self) -> tuple[Tensor, Any] | None:
        """The next point that has an answer, in the order of the answers, with what f gave or the exception.

        None: no worker answered within the timeout.
        """
        number = 0
        while number not in self._started:  # answers of points that were given up come too
            try:
                number = self._answers.get(timeout=self.timeout)
            except Empty:
                return None
        point, future = self._started.pop(number)
        outcome = self._evaluate_here(point) if self._here else self._wait_for(future)
        if isinstance(outcome, Lost):
            self._warn(1, outcome.error)
            outcome = self._evaluate_elsewhere(point, outcome.error)
        return point, outcome

    def give_up(self) -> tuple[list[Tensor], int]:
        """Forget the points that were started, and cancel those that no worker has yet.

        Returns:
            The points, and how many were cancelled: f is not called there.
        """
        points = [point for point, _ in self._started.values()]
        cancelled = sum(cancel_future(future) for _, future in self._started.values())
        self._started = {}
        return points, cancelled

    def close(self) -> None:
        """Shut down the pool that replaced a broken one; the given one belongs to its owner."""
        self.give_up()
        self._close_own()

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None

    def _submit(self, point: Tensor) -> Any:
        try:
            if self._keeps_tensors or point.device.type != "cpu" or point.dtype == torch.bfloat16:
                return self.executor.submit(self.f, point, **self._options)
            # tensors are sent to processes by files that they share, which takes longer than a few numbers do
            return self.executor.submit(self._at, point.numpy(), **self._options)
        except LOST as error:
            return Lost(error)

    def _wait_for_all(self, futures: Sequence[Any]) -> list[Any]:
        """The outcomes; where no worker answers for as long as `timeout`, points without one have a `NoAnswerError`."""
        if self.timeout is None:
            return [self._wait_for(future) for future in futures]
        answers: SimpleQueue[int] = SimpleQueue()
        for k, future in enumerate(futures):
            self._listen(k, future, answers)
        found: dict[int, Any] = {}
        while len(found) < len(futures):
            try:
                k = answers.get(timeout=self.timeout)
            except Empty:
                break
            found[k] = self._wait_for(futures[k])
        for k, future in enumerate(futures):
            if k not in found:
                cancel_future(future)
        return [found[k] if k in found else NoAnswerError(self.timeout) for k in range(len(futures))]

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
            return error if is_own_timeout(future, error) else Lost(error)
        except Exception as error:  # noqa: BLE001 a black box may raise anything
            speaks_of_pickling = isinstance(error, pickle.PicklingError) or "pickle" in str(error)
            if speaks_of_pickling and not isinstance(self.executor, ThreadPoolExecutor):
                check_pickles(self.f)
            return error

    def _evaluate_elsewhere(self, point: Tensor, error: BaseException) -> Any:
        if isinstance(error, BrokenProcessPool) and can_pickle(self.f):
            return self._evaluate_in_fresh_pool(point)
        (again,) = self._wait_for_all([self._submit(point)])
        if not isinstance(again, Lost):
            return again
        if isinstance(again.error, TimeoutError):  # here it would take as long, and nobody would stop it
            return again.error
        return self._evaluate_here(point)

    def _evaluate_in_fresh_pool(self, point: Tensor) -> Any:
        """The outcome in a pool that works, where the point is alone."""
        if self._own is None or isinstance(self._wait_for(self._submit_to_fresh_pool(int)), Lost):
            self._replace()
        if self._own is None:
            return self._evaluate_here(point)
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

    def _evaluate_here(self, point: Tensor) -> Any:
        try:
            return self.f(point)
        except Exception as error:  # noqa: BLE001 a black box may raise anything
            return error

    def _warn(self, count: int, error: BaseException) -> None:
        if not self._warned:
            warnings.warn(
                f"the executor lost {count} points ({type(error).__name__}: {error}); lost points are evaluated "
                "elsewhere, this is said once",
                RuntimeWarning,
                stacklevel=2,
            )
        self._warned = True


class AtNumbers:
    """f at a point that comes as an array.

    Args:
        f: A function of a tensor.
    """

    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        self.f, self.__name__ = f, getattr(f, "__name__", "f")  # by which Dask shows tasks

    def __call__(self, point: Any) -> Any:
        return self.f(torch.tensor(point))


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
    """Cancel what no worker has begun; what runs goes on, and nobody waits for it. True if it was in time.

    Args:
        future: What `submit` gave.
    """
    cancel = getattr(future, "cancel", None)
    return callable(cancel) and cancel() is True


def is_own_timeout(future: Any, error: BaseException) -> bool:
    """True if f raised the TimeoutError itself: the future is done then, and not merely waited for too long.

    Args:
        future: What `submit` gave.
        error: What its `result` raised.
    """
    done = getattr(future, "done", None)
    return isinstance(error, TimeoutError) and callable(done) and bool(done())


def copy_pool(executor: Any) -> ProcessPoolExecutor:
    """A pool of as many processes, started in the same way if the broken one was of this class too.

    Args:
        executor: The broken one.
    """
    if not isinstance(executor, ProcessPoolExecutor):
        return ProcessPoolExecutor(getattr(executor, "_max_workers", None))
    return ProcessPoolExecutor(
        getattr(executor, "_max_workers", None),
        mp_context=getattr(executor, "_mp_context", None),
        initializer=getattr(executor, "_initializer", None),
        initargs=getattr(executor, "_initargs", ()),
    )


def can_pickle(f: Any) -> bool:
    """True if f can be sent to another process.

    Args:
        f: Any object.
    """
    try:
        check_pickles(f)
    except TypeError:
        return False
    return True


def check_pickles(f: Any) -> None:
    """Check that f can be sent to another process.

    Args:
        f: Any object.

    Raises:
        TypeError: If it cannot.
    """
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


def has_argument(function: Callable[..., Any], name: str) -> bool:
    """True if the function has a parameter of that name.

    Dask's submit has `pure`: unless it is False, a point that was evaluated before gets its old value without a call.

    Args:
        function: Any.
        name: Of the parameter.
    """
    try:
        return name in signature(function).parameters
    except (TypeError, ValueError):
        return False
