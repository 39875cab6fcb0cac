"""`ng.residuals`: a physics-informed network, trained by Gauss-Newton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_precision
from natgrad.ground.messages import explain_calls
from natgrad.ground.spaces import split_complex_parameters, trainable
from natgrad.residuals.optimizer import ResidualOptimizer
from natgrad.residuals.point_weights import PointWeights
from natgrad.residuals.system import read_terms
from natgrad.rules import Damping, LevenbergMarquardt, LineSearch, Rule
from natgrad.solvers import LeastSquares, Solver

Net = nn.Module | Mapping[str, nn.Module | nn.Parameter] | Iterable[nn.Module | nn.Parameter]


@explain_calls
def residuals(
    net: Net,
    terms: Mapping[str, Callable[..., Any]] | Callable[..., Any],
    weights: Mapping[str, float] | None = None,
    *,
    point_weights: Mapping[str, PointWeights] | None = None,
    lr: float = 1.0,
    damping: float | Damping | None = None,
    solver: Solver | None = None,
    rule: Rule | None = None,
    acceleration: bool = True,
    scaling: bool = True,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    params: Iterable[Any] | None = None,
    group: Any = None,
    on_trouble: Literal["skip", "raise"] = "raise",
) -> ResidualOptimizer:
    """Train a network so that residuals vanish: the loss sum_k w_k mean |r_k|^2 over named terms, each on its points.

    A term is a function of the network `u` and one point `x`, a tensor (d,): `u(x)`, `ng.grad(u, x)` and
    `ng.laplacian(u, x)` are its values and derivatives there; `torch.autograd.grad` works too. The library batches it.
    Points may be others at every step. Every step is Gauss-Newton's with Levenberg-Marquardt damping in units of the
    metric's own diagonal, and is bent by its geodesic acceleration; a step that would raise the loss is not taken.

    Args:
        net: The network. For several unknowns a list or a dict of modules and of parameters (coefficients to be found):
            a term then takes them in that order, `lambda u, k, x: ...`. Complex parameters of a module are trained by
            their real and imaginary parts, as in `ng.LogAmplitude`.
        terms: Name -> function of the unknowns and a point. It returns the residual, a tensor of any shape. A term on
            data takes more than the point: `lambda u, x, y: u(x) - y` and `step(data=(x, y))`.
        weights: w by name, default 1.
        point_weights: Weights of a term's points that follow its residuals, by name: `Causal` and `WhereLarge` of
            `natgrad.residuals`. They are fixed within a step.
        lr: Share of the step that is taken.
        damping: A strategy, in units of the metric's diagonal with `scaling`; default
            `ng.LevenbergMarquardt(1e-3, raise_by=3, lower_by=1/3, floor=1e-12, per="loss")`. A number stays constant.
        solver: Of the linear system; default `ng.LeastSquares()`, the smaller of the two Gram matrices.
        rule: How the solution becomes a step; default
            `ng.LineSearch(backtracks=1, sufficient=0)`: one that would raise the loss is not taken, and raises the
            damping.
        acceleration: True adds the second-order correction of the step: one more evaluation of the residuals.
        scaling: True damps every parameter in units of the largest diagonal entry of the metric so far, as MINPACK
            does; False damps all alike.
        momentum: Share of the last solution from which the next one starts, SPRING's mu in [0, 1]; for points that are
            drawn anew.
        weight_decay: Decoupled: theta <- (1 - lr * weight_decay) theta.
        params: What is trained, default all that require a gradient: as in torch.optim.
        group: The processes of `torch.distributed` that each have points of their own: loss, metric and step are those
            of all points together; default those of a `DistributedDataParallel` around the network.
        on_trouble: What a step does for a number that is not finite: "raise" or "skip", as in `ng.NaturalGradient`.

    Returns:
        An optimizer: `.step(inside=points, boundary=points)` takes one step and returns the loss before it,
        `.fit(steps, sample)` several on points that it draws; `.losses` has the mean square of every term,
        `.state_report()` how the step went.

    Raises:
        TypeError: For terms or unknowns of another kind.
        ValueError: For weights that belong to no term or are not positive.

    Reference:
        Mueller & Zeinhofer 2023 (energy natural gradients); Jnini et al. 2024 (Gauss-Newton natural gradients);
        Transtrum & Sethna 2012 (geodesic acceleration); More 1978 (scaling).

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> terms = {"inside": lambda u, x: ng.laplacian(u, x) + 1, "boundary": lambda u, x: u(x)}
        >>> opt = ng.residuals(net, terms, weights={"boundary": 10.0})
        >>> inside, ends = torch.rand(50, 1).double(), torch.tensor([[0.0], [1.0]]).double()
        >>> for _ in range(50):
        ...     loss = opt.step(inside=inside, boundary=ends)
        >>> bool(loss < 1e-6)  # u is x (1 - x) / 2
        True
    """
    model, unknowns = read_unknowns(net)
    system = read_terms(terms, unknowns, weights, point_weights)
    if damping is None:  # with a floor at 1e-12, or at the round-off of the parameters
        floor = max(1e-12, max(torch.finfo(p.dtype).eps for p in trainable(model).values()) * 8)
        damping = LevenbergMarquardt(1e-3, raise_by=3.0, lower_by=1 / 3, floor=floor, per="loss")
    return ResidualOptimizer(
        model,
        system,
        lr,
        acceleration,
        scaling,
        momentum,
        damping=damping,
        solver=LeastSquares() if solver is None else solver,
        rule=LineSearch(backtracks=1, sufficient=0.0) if rule is None else rule,
        weight_decay=weight_decay,
        params=params,
        group=group,
        on_trouble=on_trouble,
    )


# What is solved for: networks and physical coefficients, under names


def read_unknowns(given: Any) -> tuple[nn.Module, Mapping[str, nn.Module | nn.Parameter]]:
    """What is trained as one module, and the unknowns in a term's order by name, "" for a module alone.

    Complex parameters of modules become their real and imaginary parts, in place.
    """
    if isinstance(given, nn.Module) and not isinstance(given, (nn.ModuleDict, nn.ModuleList)):
        check_precisions("net", given)
        split_complex_parameters(given)
        return given, {"": given}
    if isinstance(given, (nn.ModuleList, Sequence)) and not isinstance(given, str):
        given = {f"unknown{i}": part for i, part in enumerate(given)}
    if not isinstance(given, (Mapping, nn.ModuleDict)):
        raise TypeError(
            f"net is {type(given).__name__}, expected a torch.nn.Module, or several unknowns: a list or a dict of "
            'modules and of parameters, {"u": net, "k": nn.Parameter(torch.tensor(1.0))}'
        )
    parts = dict(given.items())
    if not parts:
        raise ValueError("net is empty, expected at least one torch.nn.Module")
    networks_first = sorted(parts.values(), key=lambda part: not isinstance(part, nn.Module))
    dtypes = (p.dtype.to_real() for part in networks_first for p in list_parameters(part))
    dtype = next(dtypes, torch.get_default_dtype())  # of the first network, or coefficient where there is none
    for name, part in parts.items():
        check_unknown(name, part, dtype)
    for part in parts.values():
        if isinstance(part, nn.Module):
            split_complex_parameters(part)
    model = nn.Module()  # all of them as one, whose parameters an optimizer trains
    for name, part in parts.items():
        setattr(model, name, part)
    return model, parts


def list_parameters(part: Any) -> list[nn.Parameter]:
    """Those of a module, or the parameter itself."""
    return list(part.parameters()) if isinstance(part, nn.Module) else [part] * isinstance(part, nn.Parameter)


def check_unknown(name: Any, part: Any, dtype: torch.dtype) -> None:
    """TypeError or ValueError unless an unknown is a module or a parameter, under a usable name and of this dtype."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"net has an unknown called {name!r}, expected a name such as 'u'")
    if not isinstance(part, (nn.Module, nn.Parameter)):
        wrapped = f"; wrap a number: nn.Parameter(torch.tensor(1.0, dtype={dtype}))"
        hint = wrapped if isinstance(part, (Tensor, float, int)) else ""
        raise TypeError(f"net[{name!r}] is {type(part).__name__}, expected a module or a parameter{hint}")
    if isinstance(part, nn.Parameter) and part.is_complex():
        raise ValueError(
            f"net[{name!r}] is a parameter of {part.dtype}, expected a real one: give two, its real and its imaginary "
            "part, and write torch.complex(a, b) in the terms"
        )
    check_precisions(f"net[{name!r}]", part)
    for p in list_parameters(part)[:1]:
        if p.dtype.to_real() != dtype:
            like = f"{name} = nn.Parameter({name}.detach().to({dtype}))" if p is part else f"{name}.to({dtype})"
            raise ValueError(f"net[{name!r}] is {p.dtype}, the first network {dtype}, expected one precision: {like}")


def check_precisions(name: str, part: nn.Module | nn.Parameter) -> None:
    """ValueError for parameters in half precision."""
    for p in list_parameters(part):
        check_precision(name, p.dtype, f"call {name}.double()")
