"""The Hessian of the loss, for Newton's method: not a metric in the strict sense, since it may be indefinite."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from natgrad.families import Criterion, Likelihood
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Model, RandomState, Select, check_select
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Metric, build_pure_model, explain_at, split_targets
from natgrad.metrics.gauss_newton import Loss, read_loss
from natgrad.operators.curvature import Curvature


@explain_calls
def hessian(model: Model, loss: Likelihood | nn.Module | Criterion | Loss, *, outputs: Select | None = None) -> Hessian:
    """H = d^2 L / d theta^2 of the mean loss: Newton's method in place of the natural gradient.

    H = G_N + sum_i (dL/dr_i) d^2 r_i / d theta^2 with the extended Gauss-Newton matrix G_N (`gauss_newton`). The second
    part makes it indefinite away from a minimum, and plain Newton steps go uphill along negative curvature. Solve with
    `ng.MinresQLP()`, which takes indefinite systems. To move away from saddle points, solve with the absolute values of
    the eigenvalues: `ng.Direct(absolute=True)` for small models, `ng.KrylovSubspace(absolute=True)` for any.

    Args:
        model: A module, or a function f(params, x).
        loss: A `torch.nn` criterion, an `ng` likelihood, or any twice differentiable function loss(outputs, targets) ->
            scalar.
        outputs: What the loss is of, as in `fisher`.

    Returns:
        A metric; `.at(params, (inputs, targets))` gives the operator.

    Reference:
        Pascanu & Bengio 2013, section 3 and Fig. 1; absolute values: Dauphin et al. 2014.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> x, y = torch.randn(10, 2), torch.randn(10, 1)
        >>> H = ng.hessian(model, nn.MSELoss()).at(ng.trainable(model), (x, y))
        >>> (H @ torch.ones(13)).shape
        torch.Size([13])
    """
    return Hessian(model, read_loss(loss), outputs=outputs)


@dataclass(frozen=True, repr=False)
class Hessian(Metric):
    """What `hessian` gives: H = d^2 L / d theta^2 of the mean loss.

    Args:
        model: A module, or a function f(params, x).
        criterion: The loss, as a likelihood or as a plain function.
        outputs: What the loss is of, as in `fisher`.
    """

    model: Model
    criterion: Criterion
    needs_targets = True
    outputs: Select | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_select(self.outputs)

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Curvature:
        data, targets = split_targets(inputs)
        if targets is None:
            raise ValueError(
                "targets is None: the Hessian of the loss needs them; pass (inputs, targets), compute the loss with "
                "optimizer.loss(outputs, targets), or use ng.fisher, which needs none"
            )
        pure = build_pure_model(self.model, params, data, random)
        nats: list[float] = []

        def value(point: Params) -> Tensor:
            outputs = pure(point) if self.outputs is None else self.outputs(pure(point))
            nats.append(self.criterion.nats(outputs))
            return self.criterion.value(outputs, targets) / self.criterion.scale(outputs, targets)

        return Curvature(value, params, self.model).declare(nats=nats[0])
