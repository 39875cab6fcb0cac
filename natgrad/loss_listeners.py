"""Who hears of a loss: a structure or an optimiser may want the examples that a loss of a density went backward on."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, cast

from torch import Tensor

from natgrad.lapack import is_concrete
from natgrad.pure import keep


class LossListener(Protocol):
    """Who wants to know which examples a loss of a density went backward on."""

    def hear(self, log_p: object, inputs: Tensor) -> None:
        """Told at a backward pass.

        inputs: X, (b, ...), detached.
        """
        ...


_LISTENERS: weakref.WeakKeyDictionary[object, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def listen_to(log_p: object, listener: LossListener) -> None:
    """Tell `listener` at every backward of a loss of log_p. Neither is kept alive; a log_p without weak references is
    not heard."""
    try:
        _LISTENERS.setdefault(_source(log_p), weakref.WeakSet()).add(listener)
    except TypeError:  # unhashable, or no weak references: the optimizer then asks for observe(X)
        return


def announce(log_p: object, inputs: Tensor, value: Tensor) -> Tensor:
    """The loss's value, which tells log_p's listeners about X once `backward` reaches it."""
    if value.requires_grad and is_concrete(value) and is_concrete(inputs):
        source, kept = _source(log_p), keep(inputs)

        def tell(_: Tensor) -> None:
            try:
                listeners = list(_LISTENERS.get(source, ()))
            except TypeError:
                return
            for listener in listeners:
                listener.hear(log_p, kept)

        cast("Any", value).register_hook(tell)
    return value


def _source(log_p: object) -> object:
    """What stays the same between two mentions: the object behind a bound method, a new one at each mention."""
    return getattr(log_p, "__self__", log_p)
