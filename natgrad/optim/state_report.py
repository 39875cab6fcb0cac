"""What an optimizer tells: what each parameter gets, and how the last step went."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from natgrad.shown_tables import write_table


class Row(NamedTuple):
    """One parameter in a `Report`.

    Attributes:
        parameter: Its name in the model.
        structure: The structure that it gets.
        size: Its number of entries.
        memory: The numbers remembered for it between steps.
    """

    parameter: str
    structure: str
    size: int
    memory: int


class Report(list[Row]):
    """Rows of `optimizer.report()`; prints as a table."""

    def _repr_html_(self) -> str:
        return write_table(Row._fields, [(p, s, f"{n:,}", f"{m:,}") for p, s, n, m in self])

    def __str__(self) -> str:
        rows = [Row._fields, *((p, s, f"{n:,}", f"{m:,}") for p, s, n, m in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{p:<{widths[0]}}  {s:<{widths[1]}}  {n:>{widths[2]}}  {m:>{widths[3]}}" for p, s, n, m in rows
        )


@dataclass(frozen=True, repr=False)
class StateReport:
    """The last step in numbers. NaN or None where a number was not needed and so not computed; those are not printed.

    Attributes:
        step: Steps taken so far.
        loss: The mean loss before the step.
        kl: Nats per example that the step moved, to second order.
        damping: The lambda that the system was solved with. Structured optimizers give it in units of a block's mean
            eigenvalue, as their first parameter group has it.
        ratio: True over predicted decrease of the loss.
        solver_steps: Steps of the solver.
        residual: Of the solve, relative to the norm of the gradient.
        status: How the solve ended.
        outside: |g - G x| / |g|, the share of the gradient that the metric leaves to the damping. It is near 1 where
            the gradient lies outside the metric's range, as on other data, or where the damping is far above the
            metric.
        excess: d^T G d along the proposal as it was last measured, over what the blocks promise. Above 1 a step is
            shortened by it.
        rate: Length of the step relative to the proposal; 0 for a rejected step.
        gradient: Norm of the mean loss's gradient.
        failures: Steps since the start that were skipped for numerical trouble.
        refused: Steps since the start that were not taken because they raised the loss.
        cuts: How many times as long the step would be without a setting that bounds it, by the setting: 1 where it
            changes nothing.
        counts: What the structure counted: examples seen, updates refused, inverses kept.
    """

    step: int = 0
    loss: float = math.nan
    kl: float = math.nan
    damping: float = math.nan
    ratio: float | None = None
    solver_steps: int = 0
    residual: float = math.nan
    status: str = "no step yet"
    outside: float = math.nan
    excess: float = math.nan
    rate: float = math.nan
    gradient: float = math.nan
    failures: int = 0
    refused: int = 0
    cuts: Mapping[str, float] = field(default_factory=dict[str, float])
    counts: Mapping[str, float] = field(default_factory=dict[str, float])

    def list_known(self) -> dict[str, Any]:
        """What applies to this optimizer and was computed at this step, by name and in order."""
        solved = not math.isnan(self.residual) or self.solver_steps > 0
        judged = self.ratio is not None or self.refused > 0
        unknown = [("solver_steps", solved), ("refused", judged)]
        left_out = {"counts", "cuts"} | {name for name, known in unknown if not known}
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        own |= self.counts
        return {n: v for n, v in own.items() if v is not None and not (isinstance(v, float) and math.isnan(v))}

    def count_step(self, failed: bool = False, refused: bool = False) -> StateReport:
        """The counts after one more step, of which nothing else is known yet.

        Args:
            failed: Whether it was skipped for numerical trouble.
            refused: Whether it was not taken because it raised the loss.
        """
        return StateReport(self.step + 1, failures=self.failures + failed, refused=self.refused + refused)

    def numbers(self) -> dict[str, float]:
        """What is known, as finite numbers for a logger.

        Example:
            >>> ng.optim.StateReport(step=3, loss=0.5, status="stepped").numbers()
            {'step': 3, 'loss': 0.5, 'failures': 0}
        """
        return {n: v for n, v in self.list_known().items() if not isinstance(v, str) and math.isfinite(v)}

    def __str__(self) -> str:
        return "  ".join(f"{name} {show(value)}" for name, value in self.list_known().items())

    def __repr__(self) -> str:
        return f"StateReport({', '.join(f'{name}={show(value)}' for name, value in self.list_known().items())})"

    def _repr_html_(self) -> str:
        return write_table(("", "last step"), [(name, show(value)) for name, value in self.list_known().items()])


def show(value: float | str | None) -> str:
    """A number in four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_cuts(cuts: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """What a rule says of its bounds, as numbers."""
    return {name: float(lengthen()) for name, lengthen in cuts.items()}


def state_report(told: Mapping[str, Any], step: int, failures: int, refused: int) -> StateReport:
    """From what a structured step told, as tensors of one number, and the counts."""
    numbers = {key: float(value) for key, value in told.items() if key != "cuts"}
    skipped = "refused" if "ratio" in numbers else "skipped" if step else "no step yet"
    known: dict[str, Any] = {"rate": 0.0 if step else math.nan, "cuts": read_cuts(told.get("cuts", {}))} | numbers
    status = "stepped" if "kl" in numbers else skipped
    return StateReport(step=step, status=status, failures=failures, refused=refused, **known)
