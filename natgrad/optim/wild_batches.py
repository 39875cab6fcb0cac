"""Batches whose loss is far above anything that a run has seen: one is left out, a new scale of the data is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WILD = 10.0  # times the highest loss so far, the first ones included: no step of a sound run raises it so far at once
PATIENCE = 3  # batches in a row that are left out; the next one counts, since the data must have changed
EARLIEST = 10  # steps until such a loss is wild
FIRST = 1e4  # times the highest loss before that: the first losses alone do not say much


@dataclass(frozen=True)
class WildBatches:
    """What the losses of a run were like.

    Attributes:
        highest: The highest loss of a step that was taken, a scalar tensor; None before the first.
        refused: Batches in a row, up to now, that were left out.
    """

    highest: Tensor | None = None
    refused: int = 0

    def is_wild(self, loss: Tensor, steps: int) -> Tensor:
        """Whether a step with this loss is left out, a scalar tensor.

        Args:
            loss: Of the step, at least 0 by its criterion.
            steps: Taken so far.
        """
        if self.highest is None or self.refused >= PATIENCE:
            return torch.zeros_like(loss, dtype=torch.bool)
        highest = self.highest.to(loss)
        return (loss > (FIRST if steps < EARLIEST else WILD) * highest) & (highest > 0)

    def after(self, loss: Tensor | None, taken: bool) -> WildBatches:
        """The same after one more step."""
        if loss is None or not taken:
            return WildBatches(self.highest, self.refused + (not taken))
        before = loss if self.highest is None else self.highest.to(loss)
        return WildBatches(torch.fmax(before, loss).detach(), 0)

    def save(self) -> dict[str, Tensor]:
        """For a checkpoint: tensors of the same dtype and device, whatever happened so far."""
        highest = torch.zeros(()) if self.highest is None else self.highest
        return {"highest": highest.double().cpu(), "refused": torch.tensor(self.refused)}

    @staticmethod
    def load(saved: Mapping[str, Tensor] | None) -> WildBatches:
        """From `save()`; None in older checkpoints."""
        if saved is None or not bool(saved["highest"] > 0):
            return WildBatches()
        return WildBatches(saved["highest"], int(saved["refused"]))
