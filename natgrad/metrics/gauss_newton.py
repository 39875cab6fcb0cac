"""The curvature of a loss: its Hessian in the outputs, pulled back (Gauss-Newton), or in the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Likelihood, as_criterion
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Model, PureModel, RandomState, Select, check_select
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Metric, PullbackMetric, add_up_rows, build_pure_model, explain_at, split_targets
from natgrad.operators import Form, Linearization, Operator
from natgrad.operators.curvature import Curvature

Loss = Callable[[Any, Any], Tensor]


@explain_calls
def gauss_newton(
    model: Model, loss: Likelihood | nn.Module | Criterion | Loss, *, outputs: Select | None = None
) -> GaussNewton | LossGaussNewton:
    """G_N = E[J^T H J], H the Hessian of the loss in the outputs.

    For a `torch.nn` loss or an `ng` likelihood H is the Fisher form. In natural parameters that is the Hessian. For
    predicted variances, for PoissonNLLLoss(log_input=False) and BCELoss, and for L1Loss, SmoothL1Loss and HuberLoss it
    is not: pass a plain function there. The metric is in the units of the mean loss, with its class weights and its
    ignored and weighted targets.

    Args:
        model: A module, or a function f(params, x).
        loss: A `torch.nn` loss, an `ng` likelihood, or any function loss(outputs, targets) -> scalar that is convex in
            the outputs.
        outputs: A function that picks what the loss is of, where the model returns more than that: `outputs=lambda out:
            out.logits`.

    Returns:
        A metric; `.at(params, (inputs, targets))` gives the operator.

    Reference:
        Schraudolph 2002; Pascanu & Bengio 2013, eq. 14.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> x, y = torch.randn(10, 4), torch.randn(10, 1)
        >>> G = ng.gauss_newton(model, nn.MSELoss()).at(ng.trainable(model), (x, y))
        >>> torch.allclose(G.dense()[:4, :4], 2 * x.T @ x / 10, atol=1e-5)
        True
    """
    own = isinstance(loss, partial) or inspect.isroutine(loss)  # its own Hessian, even where it is known
    criterion = Criterion(PlainOutputs(), cast("Loss", loss)) if own else read_loss(loss)
    kind = LossGaussNewton if isinstance(criterion.family, PlainOutputs) else GaussNewton
    return kind(model, criterion, outputs=outputs)


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
        Pascanu & Bengio 2013, section 4.2 and Fig. 1; absolute values: Dauphin et al. 2014.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> x, y = torch.randn(10, 2), torch.randn(10, 1)
        >>> H = ng.hessian(model, nn.MSELoss()).at(ng.trainable(model), (x, y))
        >>> (H @ torch.ones(13)).shape
        torch.Size([13])
    """
    return Hessian(model, read_loss(loss), outputs=outputs)


def read_loss(loss: Any) -> Criterion:
    """A loss as a likelihood, or where it is none that is known as a plain function."""
    try:
        return as_criterion(loss)
    except TypeError:
        if not callable(loss) or isinstance(loss, type):
            raise
        return Criterion(PlainOutputs(), cast("Loss", loss))


@dataclass(frozen=True, repr=False)
class GaussNewton(PullbackMetric):
    """What `gauss_newton` gives for a loss that is a likelihood.

    Targets may be None (unlabelled data): then all rows weigh the same.
    """

    needs_targets = True

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        if targets is None:
            return self.criterion.family, None
        self.criterion.check(outputs, targets)
        return self.criterion.family, self.criterion.weights(outputs, targets)


@dataclass(frozen=True, repr=False)
class LossGaussNewton(PullbackMetric):
    """What `gauss_newton` gives for any twice differentiable loss(outputs, targets) -> scalar."""

    needs_targets = True

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        form = LossHessian(self.criterion.loss, outputs, targets)
        return form, torch.ones_like(linearization.outputs[:, 0])  # the loss holds its own mean

    def add_up(self, params: Params, inputs: Any) -> tuple[Operator, float]:
        return Metric.add_up(self, params, inputs)


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
        if targets is None and self.criterion.family.needs_targets:
            raise ValueError(
                "targets is None: the Hessian of the loss needs them; pass (inputs, targets), compute the loss with "
                "optimizer.loss(outputs, targets), or use ng.fisher, which needs none"
            )
        pure = build_pure_model(self.model, params, data, random)
        loss = LossOfParams(pure, self.outputs, self.criterion, targets)
        curvature = Curvature(loss, params, self.model)
        return curvature.declare(nats=loss.nats)

    def add_up(self, params: Params, inputs: Any) -> tuple[Operator, float]:
        if isinstance(self.criterion.family, PlainOutputs):
            return super().add_up(params, inputs)
        return add_up_rows(self, params, *split_targets(inputs), self.criterion, self.model, self.outputs)


@dataclass
class LossOfParams:
    """The mean loss as a function of the parameters."""

    pure: PureModel  # params -> what the model returns
    select: Select | None  # of that, what the loss is of
    criterion: Criterion
    targets: Any
    nats: float = 1.0  # per example in one unit of the loss, from the last value on

    def __call__(self, point: Params) -> Tensor:
        outputs = self.pure(point) if self.select is None else self.select(self.pure(point))
        self.nats = self.criterion.nats(outputs)
        return self.criterion.value(outputs, self.targets) / self.criterion.scale(outputs, self.targets)


class LossHessian:
    """The form of a scalar loss at given outputs: its Hessian there, of all rows together."""

    def __init__(self, loss: Loss, outputs: Tensor, targets: Any) -> None:
        self.curvature = Curvature(partial(evaluate_loss, loss, targets), {"outputs": outputs})

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """H t: (R, m) -> (R, m)."""
        return self.curvature.mv(tangents.reshape(-1)).view(tangents.shape)

    def root(self, outputs: Tensor) -> None:
        """No factor is known."""
        return None


def evaluate_loss(loss: Loss, targets: Any, point: Params) -> Tensor:
    """A loss as a function of the outputs."""
    return loss(point["outputs"], targets)


class PlainOutputs(Likelihood):
    """Outputs of an arbitrary loss: one tensor, laid out as (b, m)."""

    def rows(self, outputs: Any) -> Tensor:
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"the model returned {type(outputs).__name__}, expected one tensor for a plain loss function"
            )
        return super().rows(outputs)

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        raise TypeError("a plain loss function has no likelihood; use ng.gauss_newton, or pass an ng likelihood")

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Any:
        raise TypeError("a plain loss function has no likelihood to sample from; pass an ng likelihood")
