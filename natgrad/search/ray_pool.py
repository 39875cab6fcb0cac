"""Ray as an executor: it has no `submit` of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any

from natgrad.ground.messages import write_choices


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
