"""A bound on the KL of a step that holds: where the estimate is near it, the step is measured on its own batch."""

from __future__ import annotations

import math

from torch import Tensor

from natgrad.rules.parts import Parts
from natgrad.rules.quadratic import Quadratic, Step

SLACK = 0.02
"""A share of the bound that is left over: a measurement is a difference of outputs, and not quite straight."""


def hold_kl(model: Quadratic, step: Step, most: Tensor | float) -> Step:
    """The step, or so much of it that it moves at most `most` nats per example on its own batch.

    An estimate far below the bound is believed; how far is `model.doubt`. Else the step is measured. Where that cannot
    be, the estimate times the doubt counts.

    Args:
        model: Says how far a step moves, as an estimate and exactly.
        step: Any of this model.
        most: Nats per example; infinite for no bound.
    """
    bound = float(most)
    if math.isinf(bound) or model.exact is None:
        return step
    kl = model.doubt * float(model.kl(step))
    if kl <= bound or not math.isfinite(kl):  # numbers that are not finite are refused where the step is taken
        return step
    measured = model.exact(step)
    if measured is not None:
        step, kl = measured, float(model.kl(measured))
    allowed = (1 - SLACK) * bound
    if kl <= allowed:
        return step
    return step.scale_by(math.sqrt(allowed / kl)) if math.isfinite(kl) else model.nothing()


def share_of_rate(step: Step) -> float:
    """The largest learning rate of a step in parts, at most 1: a lower one takes that share of the bounded step."""
    vector = step.vector
    rates = [abs(vector.rate(name)) for name in vector] if isinstance(vector, Parts) else []
    return min(1.0, max(rates, default=1.0))
