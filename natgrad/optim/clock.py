"""When a structured optimizer last did what it does not do at every step, as plain numbers for a checkpoint."""

from __future__ import annotations

Clock = dict[str, int]
RAMP = 10  # steps after which the intervals between updates grow by one


def started() -> Clock:
    """The clock of a fresh optimizer.

    failures: steps, readings and inverses that came to nothing.   refused: steps that would have raised the loss.
    """
    return {"step": 0, "updated": -1, "inverted": -1, "measured": -1, "judged": -1, "failures": 0, "refused": 0}


def due(clock: Clock, event: str, every: int) -> bool:
    """Whether it is time: at every step in the first ten, one step later after each ten more, at most `every` apart."""
    return clock["step"] - clock[event] >= min(every, 1 + clock["step"] // RAMP)
