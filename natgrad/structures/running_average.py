"""Running averages with weights: sum_s decay^(t - s) x_s / sum_s decay^(t - s), kept as a total and its weight.

The first batch counts as itself, so that nothing has to be corrected for the start.
"""

from __future__ import annotations

from torch import Tensor

from natgrad.structures.base import Memory


def accumulate_total(before: Tensor | None, fresh: Tensor, decay: float, *, reuse: bool = False) -> Tensor:
    """decay * before + fresh.

    Args:
        before: The total so far; None at first.
        fresh: What is new, in the total's shape.
        decay: Weight of the past, in [0, 1).
        reuse: True to write into the storage of `fresh`.
    """
    if before is None:
        return fresh
    return fresh.add_(before, alpha=decay) if reuse else decay * before + fresh


def accumulate_weight(before: float | None, decay: float, fresh: float = 1.0) -> float:
    """decay * before + fresh: what a total is divided by, to be an average.

    Args:
        before: The weight so far; None at first.
        decay: Weight of the past, in [0, 1).
        fresh: The weight of what is new.
    """
    return fresh if before is None else decay * before + fresh


def average_tensor(memory: Memory | None, fresh: Tensor, decay: float, names: list[str]) -> tuple[Tensor, Memory]:
    """The running average of one tensor over steps, and what to keep of it.

    Args:
        memory: What was kept at the step before; None at first.
        fresh: This step's tensor.
        decay: Weight of the past, in [0, 1); 0 keeps nothing.
        names: Of the parameters: where they are others than before, the average starts anew.
    """
    if not decay:
        return fresh, {}
    before = memory if memory and memory["names"] == names else {"total": None, "weight": None}
    total = accumulate_total(before["total"], fresh, decay)
    weight = accumulate_weight(before["weight"], decay)
    return total / weight, {"total": total, "weight": weight, "names": names}
