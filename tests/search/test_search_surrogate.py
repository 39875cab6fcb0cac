"""Searches whose candidates are ranked by a regression of f."""

from __future__ import annotations

import pytest
import torch
from black_boxes import ellipsoid, rosenbrock
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import QuadraticSurrogate
from natgrad.search.black_box import BlackBox
from natgrad.search.surrogate import SurrogateEvaluations


def test_a_quadratic_function_takes_as_many_evaluations_as_it_has_coefficients():
    """About: eleven where it is a sum over the variables. Without the model it takes 1300."""
    found = ng.minimize(ellipsoid, torch.ones(5), 2.0, surrogate=True, ftarget=1e-8, seed=0, vectorized=True)
    assert found.success
    assert found.nfev < 40


def test_all_that_is_told_of_the_best_point_is_true():
    """Also while most candidates have a value of the model alone."""
    calls: list[Tensor] = []

    def count_calls(X: Tensor) -> Tensor:
        calls.append(X)
        return rosenbrock(X)

    seen: list[bool] = []

    def look(search: ng.Search) -> None:
        seen.append(search.best.fun == float(rosenbrock(search.best.x.unsqueeze(0))))

    result = ng.minimize(
        count_calls, torch.zeros(3), 0.5, surrogate=True, maxfevals=150, seed=1, vectorized=True, callback=look
    )
    assert all(seen)
    assert result.nfev == sum(len(X) for X in calls) <= 150
    evaluated = torch.cat(calls)
    assert result.fun == float(rosenbrock(evaluated).min())
    assert bool((evaluated == result.x).all(1).any())


def test_the_model_of_a_quadratic_function_is_the_function():
    search = ng.GaussianSearch(torch.ones(5), 1.0, popsize=30, seed=0)
    ranked = SurrogateEvaluations(BlackBox(ellipsoid, True), QuadraticSurrogate())
    ranked.evaluate_generation(search)
    model = ranked._fit(search)
    assert model is not None
    X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(model.values(X), ellipsoid(X), rtol=1e-6, atol=1e-3)
    minimum = model.find_minimum()
    assert minimum is not None
    assert_close(minimum, torch.zeros(5, dtype=torch.float64), atol=1e-5, rtol=0)
    ranked.evaluate_generation(search)
    assert ranked.objective.nfev == 31  # one of the generation tells that the model ranks it


def test_a_generation_that_no_model_ranks_is_evaluated_once_in_ever_larger_parts():
    sizes: list[int] = []
    generator = torch.Generator().manual_seed(0)

    def draw_values(X: Tensor) -> Tensor:
        sizes.append(len(X))
        return torch.rand(len(X), generator=generator, dtype=torch.float64)

    search = ng.GaussianSearch(torch.ones(5), 1.0, popsize=30, seed=0)
    ranked = SurrogateEvaluations(BlackBox(draw_values, True), QuadraticSurrogate(0.999))
    for _ in range(2):
        search.tell(*ranked.evaluate_generation(search))
    assert sizes == [30, 1, 1, 1, 2, 3, 4, 6, 9, 3]
    assert ranked._points is not None
    assert len(ranked._points.unique(dim=0)) == len(ranked._points)


def test_a_model_is_fitted_to_the_last_finite_evaluations():
    """Of twice as many as a quadratic model has coefficients: 42 in five variables."""
    ranked = SurrogateEvaluations(BlackBox(ellipsoid, True), QuadraticSurrogate())
    X = torch.arange(300.0, dtype=torch.float64).reshape(60, 5)
    F = X.sum(1)
    F[50] = torch.nan
    for points, values in zip(X.split(10), F.split(10), strict=True):
        ranked._remember(points, values)
    assert ranked._points is not None
    known = torch.isfinite(F)
    assert torch.equal(ranked._points, X[known][-42:])
    assert torch.equal(ranked._values, F[known][-42:])


@pytest.mark.parametrize(
    "f",
    [lambda X: torch.full((len(X),), torch.nan), lambda X: torch.zeros(len(X)), lambda X: X.sum(1) * torch.inf],
    ids=["nan", "flat", "infinite"],
)
@pytest.mark.filterwarnings("ignore:f is NaN")
def test_functions_without_a_model_end(f):
    result = ng.minimize(f, torch.ones(3), 1.0, surrogate=True, maxfevals=1200, seed=0, vectorized=True)
    assert result.message
