"""The covariance of the gradients, TONGA's metric: centred, or the uncentred second moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from natgrad.families import Criterion, Likelihood, as_criterion
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Model, RandomState, Select
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Metric, Scores, explain_at
from natgrad.metrics.fisher import EmpiricalFisher
from natgrad.operators import Centred, Operator, Pullback


@explain_calls
def covariance(
    model: Model, family: Likelihood | nn.Module | Criterion, *, centred: bool = False, outputs: Select | None = None
) -> Covariance:
    """U = E[g g^T], or C = U - gbar gbar^T, of the per-example gradients g of -log p, in the unit of the loss.

    U is that of `ng.empirical_fisher`: the Fisher on average where targets are the model's own. The metric takes
    targets: `.at(params, (inputs, targets))`. It is kept in sample space, so the number of parameters is no obstacle:
    `ng.SampleSpace()` solves with it. With gradient and covariance from one batch (U + lambda)^-1 g and
    (C + lambda)^-1 g are exactly parallel, of length ratio 1 / (1 - n g^T (U + lambda)^-1 g), n the entries of an
    example that the loss averages over: centring changes the length alone, and can make it explode.

    Args:
        model: A module, or a function f(params, x).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one.
        centred: C instead of U.
        outputs: As in `fisher`.

    Returns:
        A metric; `.at(params, (inputs, targets))` gives the operator.

    Reference:
        Le Roux, Manzagol & Bengio 2008 (TONGA); Pascanu & Bengio 2013, eq. 12, 13, with the per-example gradients that
        the printed formulas lack.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> metric = ng.covariance(model, nn.CrossEntropyLoss(), centred=True)
        >>> opt = ng.NaturalGradient(model, metric, solver=ng.SampleSpace(), damping=0.1)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    return Covariance(EmpiricalFisher(model, as_criterion(family), outputs=outputs), centred)


@dataclass(frozen=True, repr=False)
class Covariance(Metric):
    """What `covariance` gives: U = E[g g^T], or C = U - gbar gbar^T.

    Args:
        moment: The uncentred moment U.
        centred: C instead of U.
    """

    moment: EmpiricalFisher
    centred: bool = False
    needs_targets = True

    @property
    def criterion(self) -> Criterion:
        """The loss that the gradients are of."""
        return self.moment.criterion

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        operator = self.moment.at(params, inputs, random=random)
        if not self.centred or not isinstance(operator, Pullback):
            return operator
        assert isinstance(operator.form, Scores)
        return Centred(operator, operator.form.counted)
