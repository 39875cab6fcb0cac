"""Points evaluated by an executor; points that a lost worker had are evaluated elsewhere."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from inspect import signature
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

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

    Raises:
        TypeError: If `executor` has no submit(), or if it needs to pickle f and cannot.
    """

    def __init__(self, f: Callable[[Tensor], Any], executor: Pool) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(
                f"executor is {type(executor).__name__}, expected one of concurrent.futures, or what has its submit()"
            )
        if isinstance(executor, ProcessPoolExecutor):
            check_pickles(f)
        self.f, self.executor = f, executor
        self._options = {"pure": False} if has_argument(executor.submit, "pure") else {}
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
        found = [self._wait_for(future) for future in futures]
        lost = [k for k, outcome in enumerate(found) if isinstance(outcome, Lost)]
        if lost:
            self._warn(len(lost), found[lost[0]].error)
        for k in lost:
            found[k] = self._evaluate_elsewhere(points[k], found[k].error)
        return found

    def close(self) -> None:
        """Shut down the pool that replaced a broken one; the given one belongs to its owner."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None

    def _submit(self, point: Tensor) -> Any:
        try:
            return self.executor.submit(self.f, point, **self._options)
        except LOST as error:
            return Lost(error)

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
        again = self._wait_for(self._submit(point))
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
        outcome = self._wait_for(self._submit(point))
        if isinstance(outcome, Lost):
            return RuntimeError(f"the process that evaluates this point dies: {outcome.error}")
        return outcome

    def _replace(self) -> None:
        """Start a pool like the broken one; none if its processes cannot even receive f."""
        self.close()
        self._own = copy_pool(self.executor)
        self.executor = self._own
        if isinstance(self._wait_for(self._submit_to_fresh_pool(callable, self.f)), Lost):
            self.close()
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


class Lost:
    """Stands for an outcome that is missing because the worker failed, not f.

    Args:
        error: What the executor raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


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
