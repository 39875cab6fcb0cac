"""Sums over processes: while several of them train one model, what a pass gives is added up before it is remembered."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from natgrad.scoped_values import Holding, ScopedValue

Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_EXCHANGE: ScopedValue[Exchange | None] = ScopedValue("natgrad_exchange", None)


def exchanging(exchange: Exchange | None) -> Holding[Exchange | None]:
    """Inside, `exchange_sums` is this."""
    return _EXCHANGE.holding(exchange)


def exchange_sums(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics that add over examples, added up over the processes; as they are where there is only one."""
    exchange = _EXCHANGE.get()
    return fresh if exchange is None else exchange(fresh)
