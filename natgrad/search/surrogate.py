"""A linear or quadratic model of f that ranks candidates, so that few of them need to be evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families import regress
from natgrad.ground.checks import check_range
from natgrad.ground.linalg import eigh
from natgrad.ground.states import Stateful
from natgrad.search.black_box import BlackBox
from natgrad.search.gaussian import GaussianSearch

TRUSTED = 15  # evaluations whose order by the model is compared with the true one
SPARE = 1.1  # evaluations per coefficient from which on a model is fitted
REACH = 1.0  # of the model's minimum, in lengths of typical steps
HEAVY = 20.0  # weight of the best evaluation, relative to that of the worst


@dataclass(frozen=True)
class QuadraticSurrogate:
    """Candidates are ranked by a regression of f, linear, with squares, or fully quadratic as evaluations allow.

    In each generation the candidates that the model takes for the best are evaluated, one at first and then half as
    many again, until the model ranks the last evaluations as f does. The rest is ranked by the model. One candidate is
    the minimum of the model, where it has one.

    Args:
        correlation: Kendall's tau between the model's and the true order at which a generation needs no more
            evaluations, in (0, 1).

    Raises:
        ValueError: If the correlation is out of its range.

    Reference:
        Hansen 2019, lq-CMA-ES.
    """

    correlation: float = 0.85

    def __post_init__(self) -> None:
        check_range("correlation", self.correlation, "(0, 1)", hint=", such as 0.85")


class SurrogateEvaluations(Stateful):
    """Values of generations, most of them from the model."""

    STATE = ("_points", "_values")

    def __init__(self, objective: BlackBox, choice: QuadraticSurrogate) -> None:
        self.objective, self.choice = objective, choice
        self._points: Tensor | None = None
        self._values = torch.zeros(0, dtype=torch.float64)

    def evaluate_generation(self, search: GaussianSearch) -> tuple[Tensor, Tensor]:
        """Points (popsize, d) and their values (popsize,), of which the least is true."""
        points = search.ask()
        if search.asks_for_neighbours:  # which are to be known, and not predicted
            return points, self.objective(points)
        size = len(points)
        values = torch.full((size,), torch.nan, dtype=torch.float64, device=points.device)
        model, wanted = self._fit(search), 1
        minimum = None if model is None else model.find_minimum()
        if minimum is not None:
            points[-1] = minimum
        while True:
            order = range(size)
            if model is None:
                wanted = size
            else:
                predicted = model.values(points)
                if self._agrees(model, int((~values.isnan()).sum())):
                    return points, mix_values(values, predicted)
                order = predicted.argsort().tolist()
            chosen = [i for i in order if values[i].isnan()][:wanted]
            if not chosen:
                return points, values
            values[chosen] = self.objective(points[chosen])
            self._remember(points[chosen], values[chosen])
            model, wanted = self._fit(search), max(1, math.ceil(int((~values.isnan()).sum()) / 2))

    def _agrees(self, model: FittedSurrogate, evaluated: int) -> bool:
        """True if the model ranks the last evaluations as f does; some of them are of this generation."""
        assert self._points is not None
        if not evaluated:
            return False
        last = max(TRUSTED, math.ceil(1.2 * evaluated))
        predicted = model.values(self._points[-last:])
        return measure_kendall_tau(predicted, self._values[-last:]) >= self.choice.correlation

    def _remember(self, points: Tensor, values: Tensor) -> None:
        finite = torch.isfinite(values)
        d = points.shape[1]
        most = max(2 * TRUSTED, (d + 1) * (d + 2))  # twice as many as coefficients: f is quadratic only nearby
        before = points[:0] if self._points is None else self._points
        self._points = torch.cat([before, points[finite]])[-most:]
        self._values = torch.cat([self._values.to(values.device), values[finite]])[-most:]

    def _fit(self, search: GaussianSearch) -> FittedSurrogate | None:
        """The model by all evaluations that are kept, the better ones with more weight; None if they are too few."""
        count = len(self._values)
        d = search.best.x.shape[0]
        kinds = [kind for kind, size in ((0, d), (1, 2 * d), (2, d * (d + 3) // 2)) if count >= SPARE * (size + 1)]
        if self._points is None or not kinds or count < TRUSTED:
            return None
        statistics = expand_statistics(search.standardise(self._points), kinds[-1])
        share = torch.empty_like(self._values)
        share[self._values.argsort(stable=True)] = torch.linspace(HEAVY, 1, count).to(share)
        share = share / share.sum()
        slope = regress(statistics, self._values.unsqueeze(1), share)[0]
        level = share @ (self._values - statistics @ slope)
        return FittedSurrogate(search, kinds[-1], slope, level)


@dataclass(frozen=True)
class FittedSurrogate:
    """level + slope T(z), with z the point in the coordinates of the search."""

    search: GaussianSearch  # says the coordinates
    kind: int  # 0 for linear, 1 with squares, 2 with all products
    slope: Tensor  # shape (K,)
    level: Tensor  # a scalar

    def values(self, points: Tensor) -> Tensor:
        """Predicted values, shape (N,)."""
        return expand_statistics(self.search.standardise(points), self.kind) @ self.slope + self.level

    def find_minimum(self) -> Tensor | None:
        """The point (d,) at which the model is least, at most `REACH` (sqrt(d) + 2) deviations away."""
        # None if there is none, as where the model is linear or a saddle.
        d = len(self.search.best.x)
        if self.kind == 0:
            return None
        linear, rest = self.slope[:d], self.slope[d:]
        if self.kind == 1:
            curvature = torch.diag(rest)
        else:
            i, j = torch.triu_indices(d, d, device=rest.device)
            curvature = rest.new_zeros(d, d).index_put_((i, j), rest)
        values, vectors = eigh(curvature + curvature.mT)
        if not float(values[0]) > 1e-10 * float(values[-1]):
            return None
        z = -vectors @ ((vectors.mT @ linear) / values)
        z = z * min(1.0, REACH * (math.sqrt(d) + 2) / max(float(z.norm()), 1e-300))
        return self.search.locate(z.unsqueeze(0))[0]


def expand_statistics(z: Tensor, kind: int) -> Tensor:
    """z, with its squares if kind is 1, with all products of two if it is 2."""
    if kind == 0:
        return z
    if kind == 1:
        return torch.cat([z, z.square()], 1)
    i, j = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
    return torch.cat([z, z[:, i] * z[:, j]], 1)


def mix_values(values: Tensor, predicted: Tensor) -> Tensor:
    """Predicted values, raised above the least true one, which stays as it is."""
    known = torch.where(values.isnan(), torch.inf, values)
    best = int(known.argmin())
    if not bool(torch.isfinite(known[best])):
        return known
    others = torch.arange(len(values), device=values.device) != best
    spread = (predicted.max() - predicted.min()).clamp(min=1e-300)
    raised = predicted - predicted[others].min() + known[best] + 1e-9 * spread + 1e-12 * known[best].abs()
    return torch.where(others & ~values.isinf(), raised, known)


def measure_kendall_tau(first: Tensor, second: Tensor) -> float:
    """The share of pairs in the same order less that in the other one, between -1 and 1."""
    count = len(first)
    agreement = (first.unsqueeze(1) - first).sign() * (second.unsqueeze(1) - second).sign()
    return float(agreement.sum()) / (count * (count - 1))
