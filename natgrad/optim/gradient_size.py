"""How long gradients are from step to step: one that is far longer is cut before it enters the momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

LONG = 3.0  # times the root mean square of those before
FADES = 0.9  # of that mean, per step
EARLIEST = 5  # steps until it is known


def find_cut(sizes: Sequence[float], length: float, steps: int) -> tuple[float, list[float]]:
    """What a gradient is multiplied by, at most 1, and the running sums with it.

    A batch with wrong labels, or with inputs that tell nothing, has a gradient that is many times too long. It would
    lead the momentum for dozens of steps, and pass for noise where the share of signal decides on the kind of steps. A
    gradient that grows by a third per step is never cut.

    Args:
        sizes: The running mean of squares without its correction, and what its weights add up to.
        length: |g|, finite.
        steps: Taken so far.
    """
    square, weight = sizes
    usual = math.sqrt(square / weight) if weight > 0 else 0.0
    factor = LONG * usual / length if steps >= EARLIEST and length > LONG * usual > 0 else 1.0
    return factor, [FADES * square + (1 - FADES) * (factor * length) ** 2, FADES * weight + 1 - FADES]


def cut(factor: float, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, or their norms, times a factor.

    Args:
        factor: At most 1.
        gradients: By name.
    """
    return gradients if factor == 1 else {name: factor * g for name, g in gradients.items()}
