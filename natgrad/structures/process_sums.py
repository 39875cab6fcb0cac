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
    token = _EXCHANGE.set(exchange)
    try:
        yield
    finally:
        _EXCHANGE.reset(token)


def exchanged(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics that add over examples, added up over the processes; as they are where there is only one."""
    exchange = _EXCHANGE.get()
    return fresh if exchange is None else exchange(fresh)
