"""The numbers of a training as TensorBoard shows them, under the names that stable-baselines3 gives them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAGS = {
    "return": "rollout/ep_rew_mean",
    "length": "rollout/ep_len_mean",
    "kl": "train/kl_divergence_loss",
    "critic_loss": "train/value_loss",
    "accepted": "train/is_line_search_success",
    "seconds": "time/seconds",
}
"""Columns of the history -> its names; the others are `train/` and the column's own."""


class ScalarLog:
    """What `tensorboard_log=` says, into one folder per agent; outside of a `with` block nothing is written."""

    def __init__(self, parent: str | Path | None, name: str) -> None:
        self.parent, self.name = None if parent is None else Path(parent), name
        self.folder: Path | None = None  # the first of name_1, name_2, ... that does not exist
        self._writer: Any = None
        if parent is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tensorboard_log is {str(self.parent)!r}, which needs tensorboard: pip install tensorboard, or leave "
                "tensorboard_log out and take the numbers from the history that learn returns"
            ) from error
        self._open = SummaryWriter

    def __enter__(self) -> ScalarLog:
        if self.parent is not None:
            if self.folder is None:
                names = (self.parent / f"{self.name}_{i}" for i in itertools.count(1))
                self.folder = next(place for place in names if not place.exists())
            self._writer = self._open(str(self.folder))
        return self

    def __exit__(self, *error: object) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def write_update(self, row: Mapping[str, Any]) -> None:
        """Write a row of the history."""
        numbers = {TAGS.get(name, f"train/{name}"): value for name, value in row.items() if name != "steps"}
        self.write(numbers, row["steps"])

    def write(self, numbers: Mapping[str, float | None], step: int) -> None:
        """Write numbers by tag; nothing for a None."""
        if self._writer is not None:
            for tag, value in numbers.items():
                if value is not None:
                    self._writer.add_scalar(tag, float(value), step)
