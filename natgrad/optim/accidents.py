"""What happens where a step would not be finite: it is left out and counted, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from natgrad.optim.stalled_runs import SKIPPED, watch

OnTrouble = Literal["skip", "raise"]


@dataclass
class Accidents:
    """Steps that were left out because a number was not finite.

    Attributes:
        on_trouble: "skip" counts them, warns at the fifth in a row and raises RuntimeError at the 25th; "raise" raises
            ValueError for the first.
        count: So far.
        in_a_row: Of the last steps.
    """

    on_trouble: OnTrouble = "skip"
    count: int = 0
    in_a_row: int = 0

    def __post_init__(self) -> None:
        if self.on_trouble not in get_args(OnTrouble):
            raise ValueError(f"on_trouble is {self.on_trouble!r}, expected 'skip' or 'raise'")

    def meet(self, trouble: str | None) -> None:
        """A step is over.

        Args:
            trouble: Why it was left out; None where it was taken.

        Raises:
            ValueError: For trouble, with `on_trouble="raise"`.
            RuntimeError: For the 25th trouble in a row.
        """
        if trouble is None:
            self.in_a_row = 0
            return
        if self.on_trouble == "raise":
            raise ValueError(f"{trouble}; nothing was changed")
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        watch(self.in_a_row, SKIPPED)
