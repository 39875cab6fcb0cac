"""Sums over processes: while several of them train one model, what a pass gives is added up before it is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_EXCHANGE: ContextVar[Exchange | None] = ContextVar("natgrad_exchange", default=None)


@contextmanager
def exchanging(exchange: Exchange | None) -> Iterator[None]:
    """Inside, `exchanged` is this."""
    before = _EXCHANGE.get()
    try:  # before the first change, for Ctrl-C
        _EXCHANGE.set(exchange)
        yield
    finally:
        _EXCHANGE.set(before)


def exchanged(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics that add over examples, added up over the processes; as they are where there is only one."""
    exchange = _EXCHANGE.get()
    return fresh if exchange is None else exchange(fresh)
