"""Sums over processes: while several of them train one model, what a pass gives is added up before it is remembered."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from natgrad.scoped_values import Holding, ScopedValue

Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Solve = Callable[[Callable[[], Tensor], Tensor], Tensor]

Shared = tuple[Exchange | None, Solve | None]
_SHARED: ScopedValue[Shared] = ScopedValue("natgrad_shared", (None, None))


def exchanging(exchange: Exchange | None, solve: Solve | None = None) -> Holding[Shared]:
    """Inside, `exchange_sums` and `solve_once` are these.

    Args:
        exchange: This process's sums, by name -> those of all. None: there is one process.
        solve: A function of totals and a tensor like its result -> the result, computed by one process for all.
    """
    return _SHARED.holding((exchange, solve))


def exchange_sums(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics that add over examples, added up over the processes; as they are where there is only one."""
    exchange = _SHARED.get()[0]
    return fresh if exchange is None else exchange(fresh)


def solve_once(make: Callable[[], Tensor], like: Tensor) -> Tensor:
    """What `make` gives, computed by one of the processes for all; here where there is only one.

    Args:
        make: An expensive function of totals that this process may not have.
        like: A tensor of the result's shape and dtype.
    """
    solve = _SHARED.get()[1]
    return make() if solve is None else solve(make, like)
