"""What is remembered of a layer's Fisher, one block per unit, and its damped inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.helmholtz.rows import Rows, fisher_rows
from natgrad.linalg import all_finite
from natgrad.operators import Operator, Scaled, SharedRows, Units

ROWS = 256
"""Rows that a refresh takes at most where the unit's inputs are fewer."""
EXACT = 128
"""Inputs up to which every unit's own block is inverted, unless told otherwise."""
RANK = 256
"""Directions of a shared basis."""
FEW = 128
"""Rows that the length of a step is measured on."""
RADIUS = 0.03
"""Nats that a step may move a unit by, unless told otherwise, in machines with wide layers."""


@dataclass
class Kept:
    """What is remembered of one layer's Fisher: blocks with their weight, or the rows of the last refreshes.

    exact: whether every unit's own block is inverted; else all are diagonal in one basis, made from the rows.
    """

    decay: float
    damping: float
    state: dict[str, Any]
    mask: Tensor | None = None
    exact: bool = True
    inverse: Operator | None = None

    def refresh(self, rows: Rows) -> bool:
        """Take a batch into the running average and invert. False, with everything as it was, if that fails."""
        fresh = fisher_rows(thinned(rows, max(ROWS, rows.inputs.shape[1])))
        few = not self.exact or 2 * len(fresh.rows) <= fresh.rows.shape[1]
        state = self._with_rows(fresh) if few or "rows" in self.state else self._with_blocks(fresh)
        inverse = self._operator(state).inverse(self.damping)
        if inverse is None or not all_finite(_spot(inverse)):
            return False
        self.state, self.inverse = state, Scaled(inverse, 1 + self.damping)
        return True

    def rebuild(self) -> None:
        """The inverse of what was loaded."""
        if self.state:
            found = self._operator(self.state).inverse(self.damping)
            assert found is not None
            self.inverse = Scaled(found, 1 + self.damping)

    def _window(self, fresh: SharedRows) -> int:
        """Refreshes that a running average with this decay sees, but for exact blocks only rows half as many as the
        columns: beyond these Woodbury costs more than the blocks do."""
        seen = round(1 / (1 - self.decay))
        return max(1, min(fresh.rows.shape[1] // (2 * len(fresh.rows)), seen) if self.exact else seen)

    def _with_blocks(self, fresh: SharedRows) -> dict[str, Any]:
        blocks, weight = fresh.blocks(), 1.0
        if "blocks" in self.state:
            blocks = self.decay * self.state["blocks"] + blocks
            weight = self.decay * self.state["weight"] + weight
        return {"blocks": blocks, "weight": weight}

    def _with_rows(self, fresh: SharedRows) -> dict[str, Any]:
        rows, weights = [fresh.rows], [fresh.weights]
        counts = [len(fresh.rows)]
        if "rows" in self.state:
            past = self.state["counts"][: self._window(fresh) - 1]
            rows.append(self.state["rows"][: sum(past)])
            weights.append(self.decay * self.state["weights"][:, : sum(past)])
            counts += past
        return {"rows": torch.cat(rows), "weights": torch.cat(weights, dim=1), "counts": counts}

    def _operator(self, state: dict[str, Any]) -> Operator:
        if "blocks" in state:
            return Units(state["blocks"] / state["weight"])
        share = sum(self.decay**age for age in range(len(state["counts"])))
        found = SharedRows(state["rows"], state["weights"] / share, self.mask)
        return found if self.exact else found.spectral(RANK)


def within(radius: float, direction: Tensor, rows: Rows, rate: float) -> Tensor:
    """Every unit's direction (size, columns), shortened where `rate` times it is too far.

    A step moves a unit's distribution by KL <= E[(rate d_j . a)^2] / 8 nats in the mean over its inputs a, since the
    log-partition log(1 + e^z) has no second derivative above 1/4; this is held to `radius`, on FEW of the rows. The
    Fisher matrix cannot bound it: that of a unit which is wrong and sure of it vanishes, and its step is then long.
    """
    seen = thinned(rows, FEW)
    moved = (seen.weights / seen.weights.sum()) @ (seen.inputs @ direction.mT).square() * rate**2
    return direction * (8 * radius / moved).sqrt().clamp(max=1).unsqueeze(1)


def thinned(rows: Rows, most: int) -> Rows:
    """At most as many rows, drawn in proportion to their weights, each of equal weight.

    Systematic draws: a row of weight w is taken floor(w m) or ceil(w m) times of m, so that the mean of any function of
    the rows is kept within 1/m. They start at the middle of a step, so that nothing random is added.
    """
    many = len(rows.inputs)
    if many <= most:
        return rows
    total = rows.weights.cumsum(0)
    places = torch.searchsorted(total, (torch.arange(most, device=total.device) + 0.5) * (total[-1] / most))
    taken = places.clamp(max=many - 1)
    weights = (total[-1] / most).expand(most)
    return Rows(rows.inputs[taken], rows.residuals[taken], rows.slopes[taken], weights, rows.mask)


def refresh_cost(kept: Kept, weight: Tensor, rows: Rows) -> int:
    """Multiplications of a refresh; those of a factorisation count as often as they take as long (measured)."""
    units, columns = weight.shape
    many = min(len(rows.inputs), max(ROWS, columns))
    if not kept.exact:
        many *= round(1 / (1 - kept.decay))
        return columns * columns * (many + 5 * columns) + units * many * min(RANK, columns)
    if 2 * many <= columns:
        return units * many * (columns + 2 * many * many)
    return units * columns * columns * (many + 2 * columns)


def _spot(inverse: Operator) -> Tensor:
    """A product with it: not finite if any part that matters is not."""
    return inverse.mv(
        torch.full((inverse.size,), 1 / math.sqrt(inverse.size), dtype=inverse.dtype, device=inverse.device)
    )
