"""The metric of any divergence, by its second derivative: the slow reference for all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.families import Likelihood
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Call, Model, PureModel, RandomState, as_call
from natgrad.ground.spaces import Params, check_parameters
from natgrad.metrics.base import Metric, explain_at
from natgrad.operators import Curvature, DenseOperator

Divergence = Callable[[Params, Params, Any], Tensor]


@explain_calls
def divergence(d: Divergence) -> DivergenceMetric:
    """G = d^2/dphi^2 D(theta, phi) at phi = theta, as a dense matrix.

    Costs n double-backward products: a reference for small models.

    Args:
        d: A function d(params, other, inputs) -> scalar tensor, a mean over examples. It is zero and stationary at
            other = params, and twice differentiable in `other`. See `kl` for one.

    Returns:
        A metric; `.at(params, inputs)` gives the operator. It raises a ValueError if d(params, params) is not zero or
        not stationary.

    Reference:
        Eguchi 1983.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> metric = ng.divergence(ng.kl(model, ng.Categorical()))
        >>> metric.at(ng.trainable(model), torch.randn(5, 2)).dense().shape
        torch.Size([9, 9])
    """
    return DivergenceMetric(d)


@explain_calls
def kl(model: Model, family: Likelihood) -> Divergence:
    """d(params, other, inputs) = E_x KL(p(.|x; params), p(.|x; other)), in nats, a mean over rows of outputs.

    Args:
        model: A module, or a function f(params, x).
        family: An `ng` likelihood with `kl`.

    Returns:
        A function to give to `divergence`.
    """

    def between(params: Params, other: Params, inputs: Any) -> Tensor:
        random = RandomState.capture(*{t.device for t in as_call(inputs).tensors()})
        first, second = (family.rows(PureModel(model, as_call(inputs), random)(p)) for p in (params, other))
        return family.kl(first, second).mean()

    return between


@dataclass(frozen=True, repr=False)
class DivergenceMetric(Metric):
    """What `divergence` gives: the second derivative of a divergence.

    Args:
        d: A function d(params, other, inputs) -> scalar tensor.

    Raises:
        ValueError: At `.at`, if d(params, params) is not zero or not stationary.
    """

    d: Divergence

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> DenseOperator:
        check_parameters(params)
        fixed = {name: p.detach() for name, p in params.items()}
        data = inputs.unwrap() if isinstance(inputs, Call) else inputs
        with (random or RandomState.capture(next(iter(fixed.values())).device)).replay():
            curvature = Curvature(lambda other: self.d(fixed, other, data), fixed, name="d(params, other, inputs)")
        matrix = curvature.dense()
        tolerance = torch.finfo(matrix.dtype).eps ** 0.5 * float(1 + matrix.abs().max())
        value, steepest = float(curvature.value), float(curvature.gradient.abs().max())
        if not (abs(value) <= tolerance and steepest <= tolerance):
            raise ValueError(
                f"d(params, params) is {value:.3g}, its gradient's largest entry {steepest:.3g}, expected zero: d is "
                "not a divergence, or draws at random"
            )
        return DenseOperator(matrix)
