"""What happened in a search, generation by generation."""

from __future__ import annotations

import math
from typing import Any

from natgrad.shown_tables import Columns


class SearchHistory(Columns):
    """Lists of equal length with one entry per generation.

    `history["nfev"]` are evaluations, `["best"]` the best value so far, `["median"]` that of the generation, `["run"]`
    the number of the restart, from 0. The search's own measures, such as `sigma` and `condition`, are None in
    generations that have none.
    """

    def __init__(self) -> None:
        super().__init__(("nfev", "best", "median", "run"), "generations")

    def add(self, **measures: Any) -> None:
        """Append one generation.

        Args:
            **measures: A value per name.
        """
        length = len(self)
        for name, value in measures.items():
            self._columns.setdefault(name, [None] * length).append(value)
        for column in self._columns.values():
            if len(column) == length:
                column.append(None)

    def plot(self, target: float | None = None) -> Any:
        """A matplotlib figure of values and sizes over evaluations; grey lines are restarts.

        Args:
            target: The minimum where it is known; it is subtracted from the values, on a logarithmic axis. Without it
                the axis is logarithmic if all values are positive.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from matplotlib.figure import Figure  # an extra: only where a picture is asked for

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        floor = 0.0 if target is None else target
        for name in ("median", "best"):
            left.plot(self["nfev"], [hide_infinite(value - floor) for value in self[name]], label=name)
        logarithmic = target is not None or all(value > 0 for value in self["best"])
        left.set(xlabel="evaluations", ylabel=label_difference("f", floor), yscale="log" if logarithmic else "linear")
        for name in self.names[4:]:
            right.plot(self["nfev"], self[name], label=name)
        right.set(xlabel="evaluations", yscale="log")
        for axes in (left, right):
            for place in self._restarts():
                axes.axvline(place, color="0.8", linewidth=0.8, zorder=0)
            if axes.lines:
                axes.legend()
        return figure

    def _restarts(self) -> list[int]:
        """Evaluations at which a new run began."""
        runs = self["run"]
        return [self["nfev"][k - 1] for k in range(1, len(runs)) if runs[k] != runs[k - 1]]


def hide_infinite(value: float) -> float | None:
    """The value, or None if it cannot be drawn.

    Args:
        value: Any number.
    """
    return value if math.isfinite(value) else None


def label_difference(name: str, floor: float) -> str:
    """`f - 3`, `f + 3` for -3, `f` for 0.

    Args:
        name: Of the first number, f.
        floor: What is subtracted.
    """
    return name if floor == 0 else f"{name} {'-' if floor > 0 else '+'} {abs(floor):.6g}"
