"""The natural gradient of E_p[f]: exact where it can be, unbiased where it must be, the same by every road."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from models import F64, draw, tensor
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import dual_gradient, effective_draws, gradient_of_mean

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "families.json").read_text(encoding="utf-8"))
PAIR = ng.MultivariateNormal(2)
BITS = ng.Bernoulli(2)


def normal_pair() -> Tensor:
    return PAIR.from_mean_covariance(tensor([1.0, -0.5]), tensor([[1.0, -0.5], [-0.5, 2.0]]))


def quadrature(mean: Tensor, covariance: Tensor, points: int = 6) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite nodes of a normal distribution and the logarithms of their weights: exact up to degree 11."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(points))
    d = len(mean)
    grid = torch.cartesian_prod(*[nodes] * d).view(-1, d)
    logs = torch.cartesian_prod(*[weights.log()] * d).view(-1, d).sum(1)
    return mean + grid @ torch.linalg.cholesky(covariance).mT, logs


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("method", ["regression", "fisher", None])
def test_the_lectures_normal_by_quadrature(d, method):
    """f = sum x_i^3 + x_0 x_{d-1}: the natural gradient in theta is the gradient in eta, and the other way round."""
    family, case = ng.MultivariateNormal(d), VECTORS[f"gaussian_d{d}"]
    mean, covariance = tensor(case["inputs"]["mu"]), tensor(case["inputs"]["Sigma"])
    theta = family.from_mean_covariance(mean, covariance)
    x, log_weights = quadrature(mean, covariance)
    f = x.pow(3).sum(1) + x[:, 0] * x[:, -1]
    share = torch.softmax(log_weights, 0)
    found = ng.natural_gradient_of_mean(family, theta, f, x, method=method, log_weights=log_weights)
    biased = 1 - share.square().sum() if method == "fisher" else 1  # the estimator takes nodes for draws
    assert_close(found * biased, tensor(case["expected"]["grad_eta_F"]), rtol=1e-9, atol=1e-10)
    plain = gradient_of_mean(family, theta, f, x, log_weights=log_weights, baseline=0.3)
    assert_close(plain, tensor(case["expected"]["grad_theta_F"]), rtol=1e-9, atol=1e-10)


def test_the_lectures_independence_model_exactly():
    family, case = ng.Ising(2, [(0,), (1,)]), VECTORS["independence_model"]

    def f(x: Tensor) -> Tensor:
        return x[:, 0] + 2 * x[:, 1] + 3 * x[:, 0] * x[:, 1]

    for point in case["expected"]:
        theta = tensor(point["theta"])
        found = ng.exact_natural_gradient_of_mean(family, theta, f)
        assert_close(found, tensor(point["grad_eta"]), rtol=1e-10, atol=1e-12)
        assert_close(found, tensor(point["natgrad_theta"]), rtol=1e-10, atol=1e-12)

        def mean(eta: Tensor) -> Tensor:
            return eta[0] + 2 * eta[1] + 3 * eta[0] * eta[1]

        assert_close(dual_gradient(family, mean, theta=theta), found, rtol=1e-10, atol=1e-12)
        eta = family.expectation(theta)
        other = dual_gradient(family, lambda t: mean(family.expectation(t)), eta=eta)
        assert_close(other, tensor(point["grad_theta"]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("baseline", [None, 0.7, "optimal"])
def test_the_covariance_is_unbiased(baseline):
    """The mean over all samples of three draws of two bits, each with its probability."""
    theta, f = tensor([0.4, -0.8]), tensor([1.0, -2.0, 0.5, 3.0])
    x = BITS.outcomes(theta)
    p, total = BITS.log_prob(theta, x).exp(), torch.zeros(2, dtype=F64)
    for places in product(range(4), repeat=3):
        chosen = list(places)
        total += p[chosen].prod() * gradient_of_mean(BITS, theta, f[chosen], x[chosen], baseline=baseline)
    exact = BITS.statistics(x).mT @ (p * (f - p @ f))
    assert_close(total, exact, rtol=1e-12, atol=1e-14)


def test_the_optimal_baseline_has_less_variance():
    theta = tensor([1.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    x = BITS.sample(theta, 5_000, generator=generator).view(250, 20, 2)
    f = 10 + x[..., 0] - x[..., 1] + x.prod(-1)

    def spread(baseline) -> float:
        found = [gradient_of_mean(BITS, theta, f[i], x[i], baseline=baseline) for i in range(250)]
        return float(torch.stack(found).var(0).sum())

    optimal, mean, none = spread("optimal"), spread(None), spread(0.0)
    assert optimal < 0.85 * mean  # for rare bits the mean of f is not the best
    assert mean < 0.05 * none


@pytest.mark.parametrize("method", ["regression", "ridge", "fisher"])
def test_many_draws_agree_with_the_exact_one(method):
    family = ng.Ising(3, values=(0, 1))
    theta = 0.5 * draw(6)

    def f(x: Tensor) -> Tensor:
        return x[:, 0] * x[:, 1] * x[:, 2] + x[:, 1]

    exact = ng.exact_natural_gradient_of_mean(family, theta, f)
    x = family.sample(theta, 40_000, generator=torch.Generator().manual_seed(2))
    found = ng.natural_gradient_of_mean(family, theta, f(x), x, method=method)
    assert_close(found, exact, rtol=0, atol=0.06)


def test_earlier_draws_are_reweighted():
    """All outcomes once are draws from theta = 0; reweighted they give every other theta exactly."""
    theta = tensor([0.4, -0.8])
    x, f = BITS.outcomes(theta), tensor([1.0, -2.0, 0.5, 3.0])
    exact = ng.exact_natural_gradient_of_mean(BITS, theta, f)
    for given in ({"sampled_from": torch.zeros_like(theta)}, {"log_weights": BITS.log_prob(theta, x) + 7}):
        assert_close(ng.natural_gradient_of_mean(BITS, theta, f, x, method="regression", **given), exact)
    each = torch.zeros(4, 2, dtype=F64)
    assert_close(ng.natural_gradient_of_mean(BITS, theta, f, x, method="regression", sampled_from=each), exact)
    assert_close(effective_draws(torch.zeros(8)), torch.tensor(8.0))
    assert effective_draws(tensor([0.0, -50.0])) < 1.001
    with pytest.raises(ValueError, match="draw anew"):
        ng.natural_gradient_of_mean(BITS, tensor([30.0, 30.0]), f, x, sampled_from=torch.zeros_like(theta))


def test_several_functions_and_batches():
    theta = torch.stack([normal_pair(), PAIR.from_mean_covariance(tensor([0.0, 0.3]), torch.eye(2, dtype=F64))])
    x = PAIR.sample(theta, 30, generator=torch.Generator().manual_seed(3))
    f = torch.stack([x.pow(3).sum(-1), x[..., 0], x[..., 1].sin()], dim=-1)
    for method in ("regression", "fisher", "ridge"):
        found = ng.natural_gradient_of_mean(PAIR, theta, f, x, method=method)
        assert found.shape == (2, 3, 5)
        for i, j in product(range(2), range(3)):
            one = ng.natural_gradient_of_mean(PAIR, theta[i], f[:, i, j], x[:, i], method=method)
            assert_close(found[i, j], one)
        assert ng.natural_gradient_of_mean(PAIR, theta[:0], f[:, :0], x[:, :0], method=method).shape == (0, 3, 5)
    assert gradient_of_mean(PAIR, theta[:0], f[:, :0, 0], x[:, :0]).shape == (0, 5)
    assert gradient_of_mean(PAIR, theta, f, x, baseline="optimal").shape == (2, 3, 5)
    values = torch.stack([tensor([1.0, 2, 3, 4]), tensor([0.0, 0, 0, 1])], dim=1)
    exact = ng.exact_natural_gradient_of_mean(BITS, 0.3 * draw(3, 2), values)
    assert exact.shape == (3, 2, 2)
    assert ng.exact_natural_gradient_of_mean(BITS, draw(0, 2), values).shape == (0, 2, 2)


X = BITS.outcomes(torch.zeros(2, dtype=F64))
ZERO = torch.zeros(2, dtype=F64)
F = tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F[:3], X), ("f_values is (3,)", "(4")),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, [1, 2, 3, 4], X), ("f_values is list",)),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F * math.nan, X), ("f_values", "not finite")),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F[:1], X[:1]), ("1 draws", "at least 2")),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X, method="best"), ("'best'", "regression")),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X, method="regression", baseline=1.0), ("baseline",)),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X, baseline="worst"), ("'worst'", "optimal")),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X, log_weights=F[:2]), ("(2,)", "(4,)")),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X, log_weights=F, sampled_from=ZERO), ("one of them",)),
        (
            lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X, sampled_from=torch.zeros(3, 2)),
            ("one theta per draw",),
        ),
        (lambda: ng.natural_gradient_of_mean(BITS, ZERO, F, X.unsqueeze(1)), ("draws first",)),
        (lambda: ng.exact_natural_gradient_of_mean(BITS, ZERO, F[:2]), ("(2,)", "(4,)")),
        (lambda: ng.exact_natural_gradient_of_mean(ng.Poisson(), ZERO, F), ("infinitely many",)),
        (lambda: dual_gradient(BITS, torch.sum), ("theta=",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
