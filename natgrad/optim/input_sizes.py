"""How large the inputs of layers are from reading to reading: one whose inputs are far larger is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.optim.last_pass import Loss
from natgrad.optim.readings import HEADROOM, Reading, norm
from natgrad.typed_torch import list_numbers, measure_norm

FAR = 100.0  # times the mean square so far of a layer's inputs: one row of 64 that is eighty times too large
KEEPS = 0.9  # of that mean, per reading
PATIENCE = 3  # readings in a row that are left out; the next one counts, since the data must have changed


@dataclass
class InputSizes:
    """Mean squares of the layers' inputs, and whether a reading is fit to be averaged with those before.

    One row of a batch that is far too large would stay in the second moments of the inputs for as long as they
    remember, and hold a layer still along all others: with layer norm behind the layer the loss does not even show it.
    Its step is left out too, since the gradient would stay in the momentum.

    Attributes:
        squares: By layer, a running mean over readings.
        refused: Readings in a row, up to now, that were left out for their inputs.
        far: True if a reading of this step was.
    """

    squares: dict[str, float] = field(default_factory=dict[str, float])
    refused: int = 0
    far: bool = False

    def accept(self, reading: Reading) -> bool:
        """Whether a reading counts. It is remembered if it does.

        No second moment may overflow, sums of many such readings included: every entry of a factor is at most the
        squared norm of its side, every entry of a block the product of both. And no layer's inputs may be far larger
        than they were, and larger than those of all layers.

        Args:
            reading: This process's part.
        """
        sizes, bounds = measure_sides(reading)
        if not bounds:
            return True
        largest = min(torch.finfo(one.dtype).max for one in bounds)
        squares = [one.double() ** 2 for one in (*bounds, *sizes.values())]
        found = list_numbers(torch.stack(squares))  # in one synchronisation; comparisons with a NaN are false
        if not all(one <= HEADROOM * largest for one in found[: len(bounds)]):
            return False
        fresh = dict(zip(sizes, found[len(bounds) :], strict=True))
        # a layer behind one that starts near zero may see a thousand times more within a step, and yet less than others
        most = max(self.squares.values(), default=0.0)
        far = any(one > max(FAR * self.squares[key], most) for key, one in fresh.items() if key in self.squares)
        if far and self.refused < PATIENCE:
            self.refused, self.far = self.refused + 1, True
            return False
        for key, one in fresh.items():
            if one > 0:
                kept = self.squares.get(key) or one
                self.squares[key] = one if far else KEEPS * kept + (1 - KEEPS) * one
        self.refused = 0
        return True

    def spoil(self, losses: Sequence[Loss]) -> Sequence[Loss]:
        """The losses of a step, without a number where it is to be left out: on all processes, which add them up.

        Args:
            losses: Of this process.
        """
        if not self.far:
            return losses
        self.far = False
        return [loss._replace(value=loss.value * math.nan) for loss in losses]

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"squares": dict(self.squares), "refused": self.refused}

    @staticmethod
    def load(saved: Mapping[str, Any] | None) -> InputSizes:
        """From `save()`; None in older checkpoints.

        Args:
            saved: What a checkpoint has.
        """
        return InputSizes() if saved is None else InputSizes(dict(saved["squares"]), int(saved["refused"]))


def measure_sides(reading: Reading) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The root mean square of each layer's inputs, and all norms whose squares must not overflow.

    Args:
        reading: This process's part.
    """
    sizes, bounds = dict[str, Tensor](), [squares.sum().sqrt() for squares in reading.squares.values()]
    for seen in reading.layers:
        for number, part in enumerate(seen.split_parts()):
            sides = [measure_norm(torch.stack([norm(deltas) for deltas in part.deltas]))]
            if not part.by_token:
                sides.append(part.bound_inputs())
                sizes[f"{seen.key} {number}"] = sides[1] / max(part.positions, 1.0) ** 0.5
            bounds += [*sides, torch.stack(sides).prod()]
    return sizes, bounds
