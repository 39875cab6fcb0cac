"""What a search went through, generation by generation."""

from __future__ import annotations

from typing import Any


class History:
    """Lists of equal length, one entry per generation: `history["nfev"]`, `["best"]`, `["median"]`, `["run"]`, sizes.

    best: the best value so far.   median: of the generation.   run: number of the restart, from 0.   The search's own
    measures, such as `sigma` and `condition`, are None in generations that have none.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {"nfev": [], "best": [], "median": [], "run": []}

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]

    def __len__(self) -> int:
        return len(self._columns["nfev"])

    def __repr__(self) -> str:
        return f"History of {len(self)} generations: {', '.join(self._columns)}"

    @property
    def names(self) -> list[str]:
        """The columns."""
        return list(self._columns)

    def add(self, **measures: Any) -> None:
        """One generation."""
        length = len(self)
        for name, value in measures.items():
            self._columns.setdefault(name, [None] * length).append(value)
        for column in self._columns.values():
            if len(column) == length:
                column.append(None)

    def plot(self, target: float | None = None) -> Any:
        """A matplotlib figure of value and sizes over evaluations; `target` is subtracted, for a logarithmic axis.

        target: the minimum where it is known, default a little below the best value. Needs matplotlib (`natgrad[lab]`).
        """
        from matplotlib.figure import Figure  # an extra: only where a picture is asked for

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        best = self["best"]
        floor = target if target is not None else (best[-1] if best else 0.0)
        for name, style in (("median", "-"), ("best", "-")):
            left.plot(
                self["nfev"], [max(v - floor, 1e-300) if v - floor > 0 else None for v in self[name]], style, label=name
            )
        left.set(xlabel="evaluations", ylabel=f"f - {floor:.6g}", yscale="log")
        left.legend()
        for name in self.names[4:]:
            right.plot(self["nfev"], self[name], label=name)
        right.set(xlabel="evaluations", yscale="log")
        if self.names[4:]:
            right.legend()
        return figure

    def state_dict(self) -> dict[str, list[Any]]:
        """The columns, for a checkpoint."""
        return {name: list(column) for name, column in self._columns.items()}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Go on from there."""
        self._columns = {name: list(column) for name, column in state.items()}
