"""Named combinations of metric, structure, solver, damping and rule: wiring, no mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor, nn

from natgrad.damping import LevenbergMarquardt
from natgrad.families import Likelihood, as_criterion
from natgrad.metrics import Metric, gauss_newton
from natgrad.optim.optimizer import NaturalGradient
from natgrad.optim.recipe_options import FlatOptions, FlatSettings, with_options
from natgrad.pure import Select
from natgrad.rules import LineSearch, OnlineRadius, SubspaceSearch
from natgrad.solvers import CG, KrylovSubspace
from natgrad.structures import AdaptiveInverse, Averaged, Update


@with_options(FlatOptions, FlatSettings, "structure", warm_start=0.95, damping=None)
def hessian_free(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    outputs: Select | None = None,
    **options: Unpack[FlatOptions],
) -> NaturalGradient:
    """Truncated Newton on the exact Fisher (the Gauss-Newton matrix): products, CG, Levenberg-Marquardt, line search.

    Martens' backtracking over CG's iterates: `solver=ng.CG(max_steps=50, progress=5e-4, keep=1.3)` with
    `rule=ng.LineSearch(iterates=True)`. Large batches, some thousand examples, suit it best. Of the options below the
    defaults here are: solver `ng.CG(max_steps=50, progress=5e-4)`, damping `ng.LevenbergMarquardt(start=1.0)`, rule
    `ng.LineSearch()`.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Length of the first trial step.
        outputs: What the criterion is of, for a model that returns more than that: `outputs=lambda out: out.logits`.
        **options: What `ng.NaturalGradient` takes too: `natgrad.optim.FlatOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.

    Reference:
        Martens 2010; Pascanu & Bengio 2013 show that it is natural gradient descent.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.hessian_free(model, nn.CrossEntropyLoss())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    chosen = fill_options(
        options,
        FlatOptions(
            solver=CG(rtol=1e-6, max_steps=50, progress=5e-4),
            damping=LevenbergMarquardt(start=1.0),
            rule=LineSearch(),
            warm_start=0.95,
        ),
    )
    return NaturalGradient(model, gauss_newton(model, as_criterion(criterion), outputs=outputs), lr, **chosen)


@with_options(FlatOptions, FlatSettings, "structure", "solver", "rule", "warm_start")
def krylov_subspace(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    dimension: int = 20,
    steps: int = 10,
    outputs: Select | None = None,
    **options: Unpack[FlatOptions],
) -> NaturalGradient:
    """Krylov subspace descent (Vinyals & Povey 2012): BFGS on the loss itself, within a Krylov space of the Fisher.

    With metric_batch and search_batch the space is from some of the batch's examples, the search on others and the
    gradient on all: the few dimensions are fitted to what they are searched on. Or `opt.observe(...)` and
    `opt.search_on(inputs, targets)`. The damping is that of the solution which BFGS starts from, and of its first
    matrix; the step itself is not bounded by it, so that `ng.LevenbergMarquardt` goes on raising it.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: The share of the step found that is taken.
        dimension: Of the space, one product each; the last step joins it.
        steps: Of BFGS, a gradient each at least.
        outputs: As in `hessian_free`.
        **options: What `ng.NaturalGradient` takes too: `natgrad.optim.FlatOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.krylov_subspace(model, nn.CrossEntropyLoss(), dimension=5)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    chosen = fill_options(
        options,
        FlatOptions(solver=KrylovSubspace(dimension=dimension), rule=SubspaceSearch(steps=steps), warm_start=1.0),
    )
    return NaturalGradient(model, gauss_newton(model, as_criterion(criterion), outputs=outputs), lr, **chosen)


@with_options(FlatOptions, FlatSettings, "structure", damping=1e-2)
def natgrad_cg(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 0.1,
    *,
    outputs: Select | None = None,
    **options: Unpack[FlatOptions],
) -> NaturalGradient:
    """Algorithm 1 of Pascanu & Bengio 2013: the exact Fisher, a truncated linear solve, a learning rate.

    The default solver is `ng.CG(rtol=1e-4, max_steps=20)`, the paper's numbers; it used MINRES-QLP, `ng.MinresQLP`. As
    damping the paper keeps .01 with a metric from the gradient's batch or another, and Levenberg-Marquardt from 2 with
    unlabelled data (section 8.5).

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Learning rate; .1 and 5 in the paper.
        outputs: As in `hessian_free`.
        **options: What `ng.NaturalGradient` takes too: `natgrad.optim.FlatOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.
    """
    chosen = fill_options(options, FlatOptions(solver=CG(rtol=1e-4, max_steps=20), damping=1e-2))
    return NaturalGradient(model, gauss_newton(model, as_criterion(criterion), outputs=outputs), lr, **chosen)


@with_options(FlatOptions, FlatSettings, "structure", "solver", "damping", "warm_start")
def ang(
    params_or_model: nn.Module | Mapping[str, Tensor],
    metric: Metric,
    lr: float = 0.5,
    *,
    method: Update | None = None,
    bound: float = 0.033,
    hold: float = 6000.0,
    **options: Unpack[FlatOptions],
) -> NaturalGradient:
    """Adaptive natural gradient (Karakida, Okada & Amari 2016): an online average of G, its inverse, a bounded step.

    With the score metric, lengths and damping are measured by the data's own spread: the same model of data in other
    units takes the same steps. For up to some thousand parameters: memory 2 K^2 numbers, time O(r K^2 + K^3 / 3) a
    step, O(r K^2) with the other methods, r columns of the root. A `rule` among the options takes the place of bound
    and hold: `ng.Rate()` for the paper's plain rate.

    Args:
        params_or_model: A dict of tensors, or a module.
        metric: Any with a root, `ng.score_metric(log_p)` in the paper.
        lr: The share of G^-1 g that is taken, where the bound allows it.
        method: How the average is inverted, default `ng.Averaged()`; the paper's eq. 4 is `ng.FirstOrder()`.
        bound: lr * sqrt(g^T G^-1 g) stays below bound * unit * sqrt(b) for b examples a step: `ng.OnlineRadius`. The
            unit is N / sqrt(tr Cov x) for N variables x of a score metric, 5 for a metric in nats.
        hold: Examples after which the bound falls as 1 / seen.
        **options: What `ng.NaturalGradient` takes too: `natgrad.optim.FlatOptions`.

    Example:
        >>> log_p = lambda params, x: -0.5 * (params["precision"] * x * x).sum()
        >>> params, x = {"precision": torch.ones(3, requires_grad=True)}, torch.randn(50, 3)
        >>> opt = ng.ang(params, ng.score_metric(log_p))
        >>> ng.score_matching_loss(log_p, params, x).backward()
        >>> opt.step()
    """
    usual = FlatOptions(structure=AdaptiveInverse(method or Averaged()), damping=0.0, rule=OnlineRadius(bound, hold))
    return NaturalGradient(params_or_model, metric, lr, **fill_options(options, usual))


def fill_options(options: FlatOptions, defaults: FlatOptions) -> FlatOptions:
    """A recipe's options; its defaults where the user gave none, or None."""
    given = {key: value for key, value in options.items() if value is not None or key not in defaults}
    return FlatOptions(**{**defaults, **given})  # type: ignore[typeddict-item]
