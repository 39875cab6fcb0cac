"""Named combinations of metric, structure, solver, damping and rule: wiring, no mathematics."""

from __future__ import annotations

from torch import nn

from natgrad.damping import Damping, LevenbergMarquardt
from natgrad.families import Likelihood, as_criterion
from natgrad.metrics import gauss_newton
from natgrad.optim.optimizer import NaturalGradient
from natgrad.rules import LineSearch, Rule
from natgrad.solvers import CG, Solver


def hessian_free(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    solver: Solver | None = None,
    damping: float | Damping | None = None,
    rule: Rule | None = None,
    weight_decay: float = 0.0,
    warm_start: float = 0.95,
) -> NaturalGradient:
    """Truncated Newton on the exact Fisher (the Gauss-Newton matrix): products, CG, Levenberg-Marquardt, line search.

    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   lr: length of the first trial
    step.   solver: default CG(max_steps=50, progress=5e-4).   damping: default LevenbergMarquardt(start=1.0).
    rule: default LineSearch(): backtracking on the step's own batch.   warm_start: the last solution,
    decayed, starts the next solve.

    Martens 2010; Pascanu & Bengio 2013 show that it is natural gradient descent. Loop: `loss = opt.loss(model(x), y);
    loss.backward(); opt.step()`, or the same in a closure. Large batches, some thousand examples, suit it best.
    TypeError for a criterion that is not a likelihood.
    """
    return NaturalGradient(
        model,
        gauss_newton(model, as_criterion(criterion)),
        lr,
        solver=solver or CG(rtol=1e-6, max_steps=50, progress=5e-4),
        damping=LevenbergMarquardt(start=1.0) if damping is None else damping,
        rule=rule or LineSearch(),
        weight_decay=weight_decay,
        warm_start=warm_start,
    )
