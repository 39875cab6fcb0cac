"""Several terms, each on points of its own: their loss, and its linear model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_positive
from natgrad.ground.exchanges import share_count, sum_numbers, sum_tensors
from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import RandomState
from natgrad.ground.spaces import Params, Space
from natgrad.metrics import Metric
from natgrad.operators import Operator
from natgrad.optim import NotFiniteError, meet_processes
from natgrad.residuals.point_weights import PointWeights
from natgrad.residuals.stacked_rows import JoinedStackedRows, RowsOperator, StackedRows, TermRows
from natgrad.residuals.terms import Term, Unknown, describe

Points = dict[str, tuple[Tensor, ...]]
NO_DERIVATIVE = (
    "natgrad: term {name!r} does not depend on any parameter at its points, so that nothing is learnt from it: second "
    "derivatives of ReLU and of linear networks are zero (use tanh), and .detach() or a number cuts the graph"
)


@dataclass(frozen=True, eq=False)
class LinearisedTerms:
    """r(theta + d) ~ r + J d of all terms, each row times sqrt(2 weight / points)."""

    residuals: Tensor  # shape (r,): half the sum of their squares is the loss
    operator: RowsOperator  # G = J^T J
    losses: dict[str, Tensor]  # the mean square of each term, by name
    factors: dict[str, Tensor]  # what this process's residuals of each term were multiplied by, shape (m, b)
    points: Points  # of this process

    @property
    def loss(self) -> Tensor:
        """The sum of weight times mean square over the terms, a scalar tensor."""
        return self.residuals.square().sum() / 2


class System:
    """The loss sum_k w_k mean |r_k|^2 of named terms, over the points of all processes, which make the same calls."""

    def __init__(
        self,
        terms: Mapping[str, Term],
        weights: Mapping[str, float],
        point_weights: Mapping[str, PointWeights],
    ) -> None:
        self.terms, self.weights, self.point_weights = dict(terms), dict(weights), dict(point_weights)
        self.processes = meet_processes({}, None)
        self._looked: set[str] = set()  # terms whose derivative was seen once

    @torch.no_grad()
    def linearise(self, params: Params, points: Mapping[str, Any]) -> LinearisedTerms:
        """The residuals with their Jacobian; of several processes one may have no points of a term."""
        space = Space(params)
        with self.processes.failing_together(space.device):
            own = check_points(self, points, params)
            weighed = {} if self.processes.size == 1 else self.point_weights  # one alone evaluates its residuals once
            squares = {name: self.squares(name, params, own[name]) for name in weighed}
        totals = sum_numbers(self.processes, [len(p[0]) for p in own.values()], space.device)
        counts = dict(zip(own, map(int, totals), strict=True))
        lacking = [name for name, count in counts.items() if not count]
        if lacking:
            raise ValueError(f"step got no points for {lacking} on any process; give at least one of them a point")
        weights = {name: self._weigh_jointly(name, values, own[name][0]) for name, values in squares.items()}
        with self.processes.failing_together(space.device):
            parts, none = list[TermRows](), space.zeros().view(1, -1)[:, :0]
            for name, term in self.terms.items():
                weigh = partial(self._weigh, name, own[name], counts[name], weights.get(name))
                parts.append(term.rows(params, own[name], weigh) if len(own[name][0]) else TermRows(none.mT, none))
            residuals = [(part.values.mT * part.factor).reshape(-1) for part in parts]
            self._tell_idle_terms(space, parts)
        means = [part.values.square().sum() / counts[name] for name, part in zip(self.terms, parts, strict=True)]
        losses = dict(zip(self.terms, sum_tensors(self.processes, means), strict=True))
        rows, placed = StackedRows(space, parts), self.processes.gather_rows(torch.cat(residuals).to(space.dtype))
        factors = {name: part.factor for name, part in zip(self.terms, parts, strict=True)}
        joined = rows if self.processes.size == 1 else JoinedStackedRows(rows, self.processes)
        return LinearisedTerms(placed, RowsOperator(joined), losses, factors, own)

    def _weigh_jointly(self, name: str, squares: Tensor, points: Tensor) -> Tensor:
        """The weights of this process's points, which follow the residuals at all of them."""
        everyone = self.processes.gather_rows(torch.cat([squares.unsqueeze(1), points.to(squares)], 1))
        weights = self.point_weights[name].weigh(everyone[:, 0].contiguous(), everyone[:, 1:].to(points))
        counts = share_count(self.processes, len(squares), squares.device)
        return weights[sum(counts[: self.processes.rank]) :][: len(squares)]

    def _tell_idle_terms(self, space: Space, parts: list[TermRows]) -> None:
        """A warning at the first step for a term that no parameter changes."""
        for name, part in zip(self.terms, parts, strict=True):
            if name in self._looked or not part.count:
                continue
            self._looked.add(name)
            squares = space.zeros()
            part.add_squares(space, squares)
            if bool((part.values.mT * part.factor).any()) and not bool(squares.any()):
                warnings.warn(NO_DERIVATIVE.format(name=name), stacklevel=2)

    def _weigh(
        self, name: str, points: tuple[Tensor, ...], count: int, weights: Tensor | None, values: Tensor
    ) -> Tensor:
        """The factors of a term's rows (m, b): sqrt(2 w / count) times the root of the point's weight."""
        check_residuals(name, values, points)
        # half the sum of the squares of all rows is then sum_k w_k mean |r_k|^2
        plain = torch.full_like(values.mT, (2 * self.weights[name] / count) ** 0.5)
        if name not in self.point_weights:
            return plain
        if weights is None:
            weights = self.point_weights[name].weigh(values.square().sum(1), points[0])
        return plain * weights.sqrt()

    @torch.no_grad()
    def residuals(self, params: Params, now: LinearisedTerms) -> Tensor:
        """The residuals elsewhere, times the same factors, (r,): NaN where they are not finite."""
        with self.processes.failing_together(now.residuals.device):
            columns = [
                (term.values(params, now.points[name]).mT * now.factors[name]).reshape(-1)
                for name, term in self.terms.items()
                if len(now.points[name][0])
            ]
        return self.processes.gather_rows(torch.cat(columns) if columns else now.residuals[:0])

    @torch.no_grad()
    def squares(self, name: str, params: Params, points: tuple[Tensor, ...]) -> Tensor:
        """|r|^2 of a term at each of its points, shape (b,)."""
        if not len(points[0]):
            return next(iter(params.values())).new_zeros(0)
        values = self.terms[name].values(params, points)
        check_residuals(name, values, points)
        return values.square().sum(1)


@dataclass(frozen=True, eq=False)
class ResidualMetric(Metric):
    """Gauss-Newton's matrix of a sum of squares: G = sum_k 2 w_k mean J_k^T J_k, its inputs a dict of points by term.

    Args:
        system: The terms.
        alike: What else must be the same on all processes.
    """

    system: System
    alike: tuple[object, ...] = ()

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        return self.system.linearise(params, inputs).operator


def check_points(system: System, points: Mapping[str, Any], params: Params, caller: str = "step") -> Points:
    """Points as tuples of tensors. TypeError or ValueError for anything but a batch for each term ("step") or some."""
    step = caller == "step"
    unknown, missing = sorted(points.keys() - system.terms.keys()), sorted(system.terms.keys() - points.keys())
    missing = missing if step or not points else []
    if unknown or missing:
        parts = [f"no points for {missing}"] * bool(missing)
        parts += [f"points for {unknown}, which is no term"] * bool(unknown)
        call = ", ".join(f"{name}=..." for name in system.terms)
        which = "of each term" if step else "of those that are wanted"
        raise ValueError(f"{caller} got {', and '.join(parts)}: call {caller}({call}) with the points {which}")
    like = next(iter(params.values()))
    fewest = int(not step or system.processes.size == 1)  # one process of several may lack them
    return {name: check_batch_of_points(name, points[name], like, fewest) for name in system.terms if name in points}


def check_batch_of_points(name: str, given: Any, like: Tensor, fewest: int) -> tuple[Tensor, ...]:
    """One term's points: tensors with one leading size, in the parameters' dtype and on their device."""
    tensors = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for place, tensor in enumerate(tensors):
        part = name if tensor is given else f"{name}[{place}]"
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            came = "a scalar tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            advice = f"; convert with torch.as_tensor({part})" if hasattr(tensor, "__array__") else ""
            raise TypeError(
                f"{part} is {came}, expected points: a tensor (b, d), or a tuple of tensors (b, ...){advice}"
            )
        if tensor.is_floating_point() and tensor.dtype != like.dtype:
            advice = "" if like.dtype == torch.float64 else "; double precision, net.double(), reaches smaller errors"
            raise ValueError(
                f"{part} is {tensor.dtype}, the network {like.dtype}: convert with {part}.to({like.dtype}){advice}"
            )
        if tensor.device != like.device:
            raise ValueError(f"{part} is on {tensor.device}, the network on {like.device}; move one to the other")
        if not all_finite(tensor.detach()):
            raise ValueError(f"{part} holds a NaN or an infinity; look at how the points are drawn")
    if len({*map(len, tensors)}) != 1 or len(tensors[0]) < fewest:
        raise ValueError(
            f"{name} has tensors of leading sizes {[*map(len, tensors)]}, expected the same number of points, "
            "at least one"
        )
    if tensors[0].dim() == 1:
        raise ValueError(
            f"{name} has shape {tuple(tensors[0].shape)}, expected points (b, d): for one coordinate, {name}[:, None]"
        )
    return tuple(tensor.detach() for tensor in tensors)


def check_residuals(name: str, values: Tensor, points: tuple[Tensor, ...]) -> None:
    """NotFiniteError with the term and its first point where a residual (b, m) is NaN or infinite."""
    if all_finite(values):
        return
    bad = (~torch.isfinite(values)).any(1).nonzero().reshape(-1)
    first = int(bad[0])
    shown = ", ".join(f"{float(v):.6g}" for v in values[first][:6])
    raise NotFiniteError(
        f"term {name!r} is not finite at {len(bad)} of {len(values)} points: it is {shown} at point {first}, "
        f"{describe(tuple(t[first] for t in points))}; look there for a division by zero, a square root or a "
        "logarithm, or for weights that have grown too large"
    )


def check_derivatives(now: LinearisedTerms, gradient: Tensor) -> None:
    """NotFiniteError with the term and its first point where a derivative is not finite; gradient (n,) of the loss."""
    if all_finite(gradient):
        return
    rows = now.operator.rows
    broken = [part.find_broken_point() for part in rows.terms] if isinstance(rows, StackedRows) else []
    for name, place in zip(now.losses, broken, strict=False):
        if place is not None:
            raise NotFiniteError(
                f"the derivative of term {name!r} in the parameters is not finite at point {place}, "
                f"{describe(tuple(t[place] for t in now.points[name]))}, where its value is; look for a square root or "
                "an absolute value at zero, or for torch.where around a division by zero"
            )
    raise NotFiniteError("the gradient of the loss is not finite: look for a derivative that is infinite, or too large")


def read_terms(
    terms: Any,
    unknowns: Mapping[str, Unknown],
    weights: Mapping[str, float] | None,
    point_weights: Mapping[str, PointWeights] | None,
) -> System:
    """The system behind what a user gave. TypeError or ValueError for what is no term or no weight."""
    if callable(terms):
        terms = {"residual": terms}
    if not isinstance(terms, Mapping) or not terms:
        raise TypeError(
            f"terms is {type(terms).__name__}, expected a dict of functions of the network and a point, "
            '{"inside": lambda u, x: ng.laplacian(u, x) + f(x), "boundary": lambda u, x: u(x) - g(x)}'
        )
    for name, function in terms.items():
        if not isinstance(name, str) or not callable(function):
            raise TypeError(
                f"terms[{name!r}] is {type(function).__name__}, expected a function of the network and a point"
            )
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(
            f"weights is {type(weights).__name__}, expected a dict from names of terms to numbers, "
            f"{{{list(terms)[-1]!r}: 10.0}}; terms that it does not name have weight 1"
        )
    weights, point_weights = dict(weights or {}), dict(point_weights or {})
    unknown = sorted(weights.keys() - terms.keys())
    if unknown:
        raise ValueError(f"weights has {unknown}, which is no term: the terms are {list(terms)}")
    for name, weight in weights.items():
        if isinstance(weight, Tensor) and (weight.dim() or weight.requires_grad):
            raise ValueError(
                f"weights[{name!r}] is a tensor {tuple(weight.shape)}, expected a number; weights of points are data "
                "of the term: lambda u, x, w: w.sqrt() * ..., step(inside=(x, w))"
            )
        check_positive(f"weights[{name!r}]", weight)
    for name, chosen in point_weights.items():
        if name not in terms:
            raise ValueError(f"point_weights has {name!r}, which is no term: the terms are {list(terms)}")
        if not isinstance(chosen, PointWeights):
            raise TypeError(f"point_weights[{name!r}] is {chosen!r}, expected Causal(...) or another PointWeights")
    built = {name: Term(name, function, unknowns) for name, function in terms.items()}
    return System(built, {name: float(weights.get(name, 1.0)) for name in terms}, point_weights)
