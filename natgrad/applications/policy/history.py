"""What training went through, update by update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from natgrad.applications.policy.environments import Episode
from natgrad.applications.policy.natural_step import Move
from natgrad.shown_tables import Columns

COLUMNS = (
    "update",
    "steps",
    "episodes",
    "return",
    "length",
    "accepted",
    "kl",
    "predicted_kl",
    "gain",
    "predicted_gain",
    "backtracks",
    "cg_residual",
    "cg_steps",
    "damping",
    "entropy",
    "explained_variance",
    "critic_loss",
    "seconds",
)


def describe_update(
    counts: Mapping[str, int], episodes: Sequence[Episode], move: Move, **more: float
) -> dict[str, Any]:
    """A row of the history, all but its seconds.

    Args:
        counts: Updates and steps so far.
        episodes: Those that ended in the batch.
        move: What the policy did.
        **more: Columns as they are.
    """
    return {
        **counts,
        "episodes": len(episodes),
        "return": float(np.mean([one.ret for one in episodes])) if episodes else None,
        "length": float(np.mean([one.length for one in episodes])) if episodes else None,
        "accepted": move.accepted,
        "kl": move.kl,
        "predicted_kl": move.predicted_kl,
        "gain": move.gain,
        "predicted_gain": move.predicted_gain,
        "backtracks": move.backtracks,
        "cg_residual": move.residual,
        "cg_steps": move.cg_steps,
        "damping": move.damping,
        **more,
    }


class LearningHistory(Columns):
    """Lists of equal length, one entry per update: `history["return"]`, `history["kl"]`, ...

    The columns:

    - `update`, `steps`: how many so far.
    - `episodes`: how many ended in the update's batch.
    - `return`, `length`: means over these episodes; None where none ended.
    - `accepted`: True if the policy moved.
    - `kl`: the mean KL of the update, measured, in nats per state; 0 where the policy did not move.
    - `predicted_kl`: the same by the quadratic model that the step was taken by.
    - `gain`: of the surrogate, measured, in units of the standardised advantage.
    - `predicted_gain`: the same by the linear model.
    - `backtracks`: trials of the line search that were rejected.
    - `cg_residual`: |g - (F + damping I) x| / |g|.
    - `cg_steps`: products of the solver.
    - `damping`: lambda of the solve.
    - `entropy`: of the policy that acted, in nats.
    - `explained_variance`: of the returns, by the critic before it learned from them.
    - `critic_loss`: the critic's mean squared error over the last epoch.
    - `seconds`: of the update.
    """

    def __init__(self) -> None:
        super().__init__(COLUMNS, "updates")

    def add(self, row: dict[str, Any]) -> None:
        """Add one update.

        Args:
            row: A value for every column, by name.

        Raises:
            ValueError: Unless every column has its value.
        """
        if set(row) != set(self._columns):
            raise ValueError(f"row has {sorted(row)}, expected {sorted(self._columns)}")
        for name, value in row.items():
            self._columns[name].append(value)

    def last(self) -> dict[str, Any]:
        """The last update's numbers."""
        return {name: column[-1] for name, column in self._columns.items()}

    def plot(self) -> Any:
        """A matplotlib figure: return, KL against what was predicted, entropy, explained variance, over steps.

        Needs matplotlib.
        """
        from matplotlib.figure import Figure  # an extra: only where a picture is asked for

        figure = Figure(figsize=(9, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True)
        groups = (("return",), ("kl", "predicted_kl"), ("entropy",), ("explained_variance",))
        for axes, group in zip(panels.flat, groups, strict=True):
            for name in group:
                pairs = [(x, y) for x, y in zip(self["steps"], self[name], strict=True) if y is not None]
                axes.plot([x for x, _ in pairs], [y for _, y in pairs], label=name.replace("_", " "))
            axes.set_ylabel(group[0].replace("_", " "))
        panels[0, 1].legend()
        panels[1, 1].set_ylim(-1, 1.05)
        for axes in panels[1]:
            axes.set_xlabel("steps")
        return figure
