"""What holds while one frame runs, and ends with it whatever cuts the frame short: values, and torch's gradients."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import FrameType, TracebackType
from typing import Generic, ParamSpec, TypeVar

import torch

T = TypeVar("T")
P = ParamSpec("P")


@dataclass
class Entered(Generic[T]):
    """One value that was set.

    Attributes:
        value: It.
        outer: What was set around it; None for nothing.
        thread: Which thread's frame set it.
        frame: The frame that set it and whose end is its end; None where frames cannot be seen, in compiled code.
    """

    value: T
    outer: Entered[T] | None
    thread: int
    frame: FrameType | None

    def lives(self) -> bool:
        """Whether the frame still runs; that of another thread, which lent its context, counts as running."""
        return self.frame is None or self.thread != threading.get_ident() or is_running(self.frame)


class ScopedValue(Generic[T]):
    """A value for the time of a `with` block, per thread and task, as a `ContextVar` with a cleanup that cannot fail.

    Ctrl-C inside the very cleanup of a block leaves a plain context variable set for good. A value from here holds only
    as long as the function that has the block runs, so that the block must not stand in a generator.

    Args:
        name: For its `repr`.
        default: Outside of all blocks.

    Example:
        >>> from natgrad.scoped_values import ScopedValue
        >>> depth = ScopedValue("depth", 0)
        >>> with depth.holding(1):
        ...     inside = depth.get()
        >>> inside, depth.get()
        (1, 0)
    """

    def __init__(self, name: str, default: T) -> None:
        self.default = default
        self.entered: ContextVar[Entered[T] | None] = ContextVar(name, default=None)

    def get(self) -> T:
        """The value of the innermost block that is under way, or the default."""
        entered = self.innermost()
        return self.default if entered is None else entered.value

    def innermost(self) -> Entered[T] | None:
        """The innermost block that is under way; None outside of all."""
        entered = self.entered.get()
        while entered is not None and not entered.lives():
            entered = entered.outer
        return entered

    def holding(self, value: T) -> Holding[T]:
        """A context manager: inside, `get` returns this."""
        return Holding(self, value)


class Holding(Generic[T]):
    """The `with` block of a `ScopedValue`."""

    def __init__(self, scope: ScopedValue[T], value: T) -> None:
        self.scope, self.value = scope, value
        self.outer: Entered[T] | None = None

    def __enter__(self) -> None:
        self.outer = self.scope.innermost()
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)  # pyright: ignore[reportPrivateUsage] (no public way)
        self.scope.entered.set(Entered(self.value, self.outer, threading.get_ident(), frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scope.entered.set(self.outer)


def is_running(frame: FrameType) -> bool:
    """Whether a frame is on this thread's stack."""
    here: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] (no public way)
    while here is not None and here is not frame:
        here = here.f_back
    return here is frame


def keep_gradient_mode(function: Callable[P, T]) -> Callable[P, T]:
    """The function, after which torch's gradients are on or off as before it.

    Ctrl-C inside of `torch.no_grad()`'s own lines leaves gradients off for the rest of the session: Python calls no
    `__exit__` where `__enter__` did not end.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_grad_enabled(enabled)

    return run
