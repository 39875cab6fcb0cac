"""Named combinations of metric, structure, solver, damping and rule: wiring, no mathematics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from natgrad.damping import Damping, LevenbergMarquardt
from natgrad.families import Likelihood, as_criterion
from natgrad.metrics import Metric, gauss_newton
from natgrad.optim.optimizer import NaturalGradient
from natgrad.pure import Select
from natgrad.rules import LineSearch, OnlineRadius, Rule, SubspaceSearch
from natgrad.solvers import CG, KrylovSubspace, Solver
from natgrad.structures import AdaptiveInverse, Averaged, Preconditioner, Structure, Update


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
    metric_batch: int | None = None,
    search_batch: int | None = None,
    preconditioner: Preconditioner | Structure | None = None,
    outputs: Select | None = None,
    params: Iterable[Any] | None = None,
    train_in_eval: bool = False,
) -> NaturalGradient:
    """Truncated Newton on the exact Fisher (the Gauss-Newton matrix): products, CG, Levenberg-Marquardt, line search.

    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   lr: length of the first trial
    step.   solver: default CG(max_steps=50, progress=5e-4).   damping: default
    LevenbergMarquardt(start=1.0).   rule: default LineSearch(): backtracking on the step's own batch.
    warm_start: the last solution, decayed, starts the next solve.   metric_batch: examples for the metric, fewer than
    the gradient's (docs/choose.md says what it gained).   search_batch: examples for the line search and the damping.
    preconditioner: for CG, default none: `ng.DiagonalPreconditioner()` and others.   outputs: what the criterion is of,
    for a model that returns more than that: `outputs=lambda out: out.logits`.

    Martens' backtracking over CG's iterates: solver=ng.CG(max_steps=50, progress=5e-4, keep=1.3) with
    rule=ng.LineSearch(iterates=True).
    Martens 2010; Pascanu & Bengio 2013 show that it is natural gradient descent. Loop: `loss = opt.loss(model(x), y);
    loss.backward(); opt.step()`, or the same in a closure. Large batches, some thousand examples, suit it best.
    TypeError for a criterion that is not a likelihood.
    """
    return NaturalGradient(
        model,
        gauss_newton(model, as_criterion(criterion), outputs=outputs),
        lr,
        solver=solver or CG(rtol=1e-6, max_steps=50, progress=5e-4),
        damping=LevenbergMarquardt(start=1.0) if damping is None else damping,
        rule=rule or LineSearch(),
        weight_decay=weight_decay,
        warm_start=warm_start,
        metric_batch=metric_batch,
        search_batch=search_batch,
        preconditioner=preconditioner,
        params=params,
        train_in_eval=train_in_eval,
    )


def krylov_subspace(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    dimension: int = 20,
    steps: int = 10,
    damping: float | Damping = 1e-3,
    weight_decay: float = 0.0,
    metric_batch: int | None = None,
    search_batch: int | None = None,
    preconditioner: Preconditioner | Structure | None = None,
    outputs: Select | None = None,
    params: Iterable[Any] | None = None,
    train_in_eval: bool = False,
) -> NaturalGradient:
    """Krylov subspace descent (Vinyals & Povey 2012): BFGS on the loss itself, within a Krylov space of the Fisher.

    dimension: of the space, one product each; the last step joins it.   steps: of BFGS, a gradient each at least.
    lr: the share of the step found that is taken.   damping: of the solution that BFGS starts from, and of its first
    matrix; the step itself is not bounded by it, so that LevenbergMarquardt goes on raising it.
    metric_batch, search_batch: the space from some of the batch's examples, the search on others, the gradient on all:
    the few dimensions are fitted to what they are searched on. Or `opt.observe(...)` and `opt.search_on(inputs,
    targets)`.
    outputs: as in `hessian_free`.   Loop as there. TypeError for a criterion that is not a likelihood.
    """
    return NaturalGradient(
        model,
        gauss_newton(model, as_criterion(criterion), outputs=outputs),
        lr,
        solver=KrylovSubspace(dimension=dimension),
        damping=damping,
        rule=SubspaceSearch(steps=steps),
        weight_decay=weight_decay,
        warm_start=1.0,
        metric_batch=metric_batch,
        search_batch=search_batch,
        preconditioner=preconditioner,
        params=params,
        train_in_eval=train_in_eval,
    )


def natgrad_cg(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 0.1,
    *,
    solver: Solver | None = None,
    damping: float | Damping = 1e-2,
    rule: Rule | None = None,
    weight_decay: float = 0.0,
    outputs: Select | None = None,
    params: Iterable[Any] | None = None,
    train_in_eval: bool = False,
) -> NaturalGradient:
    """Algorithm 1 of Pascanu & Bengio 2013: the exact Fisher, a truncated linear solve, a learning rate.

    solver: default CG(rtol=1e-4, max_steps=20), the paper's numbers; it used MINRES-QLP, `ng.MinresQLP`.   damping:
    the paper keeps .01 with a metric from the gradient's batch or another, and Levenberg-Marquardt from 2 with
    unlabelled data (section 8.5).   lr: .1 and 5 there.
    outputs: as in `hessian_free`. TypeError for a criterion that is not a likelihood.
    """
    return NaturalGradient(
        model,
        gauss_newton(model, as_criterion(criterion), outputs=outputs),
        lr,
        solver=solver or CG(rtol=1e-4, max_steps=20),
        damping=damping,
        rule=rule,
        weight_decay=weight_decay,
        params=params,
        train_in_eval=train_in_eval,
    )


def ang(
    params_or_model: nn.Module | Mapping[str, Tensor],
    metric: Metric,
    lr: float = 0.5,
    *,
    method: Update | None = None,
    bound: float = 0.033,
    hold: float = 6000.0,
    rule: Rule | None = None,
    weight_decay: float = 0.0,
) -> NaturalGradient:
    """Adaptive natural gradient (Karakida, Okada & Amari 2016): an online average of G, its inverse, a bounded step.

    With the score metric, lengths and damping are measured by the data's own spread: the same model of data in other
    units takes the same steps.

    Args:
        params_or_model: A dict of tensors, or a module.
        metric: Any with a root, `ng.score_metric(log_p)` in the paper.
        lr: The share of G^-1 g that is taken, where the bound allows it.
        method: How the average is inverted, default `ng.Averaged()`; the paper's eq. 4 is `ng.FirstOrder()`.
        bound: lr * sqrt(g^T G^-1 g) stays below bound * unit * sqrt(b) for b examples a step: `ng.OnlineRadius`. The
            unit is N / sqrt(tr Cov x) for N variables x of a score metric, 5 for a metric in nats.
        hold: Examples after which the bound falls as 1 / seen.
        rule: In place of bound and hold; ng.Rate() for the paper's plain rate.
        weight_decay: Decoupled, as elsewhere.

    For up to some thousand parameters: memory 2 K^2 numbers, time O(r K^2 + K^3 / 3) a step, O(r K^2) with the other
    methods, r columns of the root. Loop: `ng.score_matching_loss(log_p, params, X).backward(); opt.step()`.
    """
    return NaturalGradient(
        params_or_model,
        metric,
        lr,
        structure=AdaptiveInverse(method or Averaged()),
        damping=0.0,
        rule=rule or OnlineRadius(bound, hold),
        weight_decay=weight_decay,
    )
