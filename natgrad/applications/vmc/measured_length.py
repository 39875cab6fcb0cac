"""The system of a step of stochastic reconfiguration: S at this step's samples, which measures what blocks propose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from natgrad.metrics import GeometricTensor, Metric
from natgrad.operators import Operator
from natgrad.optim import NaturalGradient, Point
from natgrad.pure import Model, RandomState
from natgrad.solvers import Solution
from natgrad.spaces import Params
from natgrad.typed_torch import measure_norm


@dataclass(eq=False)
class Prepared(Metric):
    """A metric whose operator at this step's samples is known already, since the gradient came from it.

    Args:
        metric: Which S; about zero for structures by layers, which listen to a pass of their own.
        operator: S at the samples, centred; None: between steps.
    """

    metric: GeometricTensor
    operator: Operator | None = None
    needs_targets = True
    weighs_inputs = True

    @property
    def is_joined(self) -> bool:  # type: ignore[override]
        """True while its operator is known, which the processes have joined."""
        return self.metric.centred and self.operator is not None

    @property
    def model(self) -> Model:
        """What returns log psi."""
        return self.metric.model

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        known = self.operator if self.metric.centred else None
        return self.metric.at(params, inputs, random=random) if known is None else known


class ReconfigurationOptimizer(NaturalGradient):
    """The engine of stochastic reconfiguration. What a structure by layers proposes takes its length from S itself.

    Blocks leave out what layers, and the positions of a convolution, have in common: along a translation S is as many
    times larger than its blocks as there are sites, and their own step would be as many times too long.
    """

    def _solve(
        self, point: Point, metric: Metric, operator: Operator
    ) -> tuple[Solution, float | Tensor, dict[str, Any] | None]:
        found, damping, prepared = super()._solve(point, metric, operator)
        own = self.metric
        assert isinstance(own, Prepared)
        if not own.metric.centred and own.operator is not None:
            found = measure_length(own.operator, point.gradient, found, damping, self._guess(point))
        return found, damping, prepared


def measure_length(
    operator: Operator, rhs: Tensor, found: Solution, damping: float | Tensor, guess: Tensor | None
) -> Solution:
    """a x with the a that minimises 1/2 a^2 x^T (S + damping I) x - a x^T (b + damping x_0): one product with S.

    Args:
        operator: S, of size n.
        rhs: b, shape (n,).
        found: x, of another matrix than S.
        damping: A number, or one per entry (n,).
        guess: x_0, to which damping pulls, shape (n,); None: to zero.
    """
    value = found.value
    image = operator.mv(value) + damping * value
    pulled = rhs if guess is None else rhs + damping * guess
    form = value @ image
    length = torch.where(form > 0, (value @ pulled) / form, 1.0).clamp(min=0)
    value, image = length * value, length * image
    residual = measure_norm(rhs - image)
    return replace(found, value=value, image=image, residual=residual, steps=found.steps + 1, basis=None, iterates=())
