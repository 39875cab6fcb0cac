"""Coordinates: there and back, the Fisher matrix in each, and vectors and covectors that change with them."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from models import F64, draw, tensor
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import (
    Concentration,
    Coordinates,
    DiagonalNormal,
    Expectation,
    ExponentialRate,
    Mapped,
    MeanCholesky,
    MeanCovariance,
    MeanStd,
    Natural,
    ShapeRate,
    ShapeScale,
    SparseNormal,
    convert,
    convert_covector,
    convert_vector,
    fisher_in,
)
from natgrad.testing import check_operator

FULL = ng.MultivariateNormal(3)


def normal_theta(*shape: int) -> Tensor:
    root = torch.eye(3, dtype=F64) + 0.3 * draw(*shape, 3, 3)
    return FULL.from_mean_covariance(draw(*shape, 3), root @ root.mT)


def gamma_theta(*shape: int) -> Tensor:
    return draw(*shape, 2).exp() * tensor([1.0, -1.0]) - tensor([0.7, 0.0])


def std_theta(d: int) -> Callable[..., Tensor]:
    return lambda *s: torch.cat([draw(*s, d), -draw(*s, d, seed=1).exp()], dim=-1)


def log_mean(family: ng.Exponential) -> Mapped:
    return Mapped(family, lambda xi: -(-xi).exp(), lambda theta: -(-theta).log())


SPARSE = SparseNormal(3, [(0, 1)])
CASES: dict[str, tuple[Coordinates, Callable[..., Tensor]]] = {
    "theta": (Natural(FULL), normal_theta),
    "eta": (Expectation(FULL), normal_theta),
    "eta of gamma": (Expectation(ng.Gamma()), gamma_theta),
    "eta of a field": (Expectation(ng.Ising(2)), lambda *s: 0.5 * draw(*s, 3)),
    "eta of a graph": (Expectation(SPARSE), lambda *s: tensor([0.1, 0.2, 0.3, -1, -1, -1, 0.2]) + 0.05 * draw(*s, 7)),
    "means of bits": (Expectation(ng.Bernoulli()), lambda *s: draw(*s, 3)),
    "rates of counts": (Expectation(ng.Poisson()), lambda *s: draw(*s, 2)),
    "mean and covariance": (MeanCovariance(FULL), normal_theta),
    "Cholesky": (MeanCholesky(FULL), normal_theta),
    "log-Cholesky": (MeanCholesky(FULL, log_diagonal=True), normal_theta),
    "mean and deviation": (MeanStd(ng.Normal()), std_theta(1)),
    "of the full family": (MeanStd(ng.MultivariateNormal(1)), std_theta(1)),
    "means and deviations": (MeanStd(DiagonalNormal(3)), std_theta(3)),
    "mean and log deviation": (MeanStd(DiagonalNormal(2), log_std=True), std_theta(2)),
    "shape and rate": (ShapeRate(ng.Gamma()), gamma_theta),
    "shape and scale": (ShapeScale(ng.Gamma()), gamma_theta),
    "rate": (ExponentialRate(ng.Exponential()), lambda *s: -draw(*s, 1).exp()),
    "alpha of beta": (Concentration(ng.Beta()), lambda *s: draw(*s, 2).exp() - 0.8),
    "alpha": (Concentration(ng.Dirichlet(4)), lambda *s: draw(*s, 4).exp() - 0.8),
    "one's own": (log_mean(ng.Exponential()), lambda *s: -draw(*s, 1).exp()),
}
every = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name != "one's own"])
def test_coordinates_go_to_another_process(name):
    coordinates, make = CASES[name]
    xi = coordinates.of(make())
    assert torch.equal(pickle.loads(pickle.dumps(coordinates)).natural(xi), coordinates.natural(xi))


@every
def test_there_and_back(name):
    coordinates, make = CASES[name]
    theta = make(4)
    xi = coordinates.of(theta)
    assert xi.shape == theta.shape
    assert_close(coordinates.natural(xi), theta, rtol=1e-10, atol=1e-10)
    assert_close(coordinates.of(theta[1]), xi[1])
    assert_close(convert(theta, Natural(coordinates.family), coordinates), xi)


@every
def test_the_fisher_matrix_follows_the_jacobian_rule(name):
    coordinates, make = CASES[name]
    theta = make()
    xi = coordinates.of(theta)
    jacobian = torch.func.jacrev(coordinates.natural)(xi)
    expected = jacobian.mT @ coordinates.family.covariance(theta) @ jacobian
    operator = coordinates.fisher(xi)
    check_operator(operator)
    assert_close(operator.dense(), expected, rtol=1e-8, atol=1e-9)
    assert_close(coordinates.covariance(xi), expected, rtol=1e-8, atol=1e-9)
    assert coordinates.covariance(xi.expand(2, 0, -1)).shape == (2, 0, *expected.shape)
    inverse = operator.inverse(0.0)
    if inverse is not None:
        assert_close(inverse.dense() @ expected, torch.eye(len(xi), dtype=F64), rtol=0, atol=1e-7)


@every
def test_vectors_and_covectors_change_so_that_their_product_does_not(name):
    coordinates, make = CASES[name]
    xi = coordinates.of(make(2))
    velocity, slope = draw(*xi.shape), draw(*xi.shape, seed=9)
    moved = coordinates.vector_to_natural(xi, velocity)
    turned = coordinates.covector_to_natural(xi, slope)
    assert_close((moved * turned).sum(-1), (velocity * slope).sum(-1), rtol=1e-8, atol=1e-9)
    assert_close(coordinates.vector_from_natural(xi, moved), velocity, rtol=1e-8, atol=1e-8)
    assert_close(coordinates.covector_from_natural(xi, turned), slope, rtol=1e-8, atol=1e-8)
    # the length of a velocity is that of the distribution's motion
    one = coordinates.fisher(xi[0])
    other = coordinates.family.covariance(coordinates.natural(xi))[0]
    assert_close(velocity[0] @ (one @ velocity[0]), moved[0] @ other @ moved[0], rtol=1e-8, atol=1e-9)


@every
def test_the_natural_gradient_is_the_same_direction_everywhere(name):
    coordinates, make = CASES[name]
    theta = make()
    xi = coordinates.of(theta)
    other = coordinates.family.natural(coordinates.family.expectation(theta) * 0.999 + 1e-4)

    def objective(at: Tensor) -> Tensor:
        return coordinates.family.kl(at, other)

    slope = torch.func.grad(lambda x: objective(coordinates.natural(x)))(xi)
    found = coordinates.vector_to_natural(xi, coordinates.natural_gradient(xi, slope))
    matrix = coordinates.family.covariance(theta)
    assert_close(found, torch.linalg.solve(matrix, torch.func.grad(objective)(theta)), rtol=1e-6, atol=1e-8)


def test_from_one_system_to_another():
    first, second = MeanCovariance(FULL), MeanCholesky(FULL)
    xi, velocity, slope = first.of(normal_theta()), draw(9), draw(9, seed=2)
    there = convert_vector(xi, velocity, first, second)
    assert_close(there, second.vector_from_natural(convert(xi, first, second), first.vector_to_natural(xi, velocity)))
    turned = convert_covector(xi, slope, first, second)
    assert_close(there @ turned, velocity @ slope)
    theta = gamma_theta(5)
    scale = convert(ShapeRate(ng.Gamma()).of(theta), ShapeRate(ng.Gamma()), ShapeScale(ng.Gamma()))
    assert_close(scale[:, 1], 1 / -theta[:, 1])


def test_a_curved_family_has_a_metric_too():
    """N(s, s^2): one parameter, Fisher information 3 / s^2."""
    s = tensor([1.7])
    operator = fisher_in(ng.Normal(), lambda s: ng.Normal().from_mean_std(s[..., 0], s[..., 0]), s)
    assert_close(operator.dense(), tensor([[3 / 1.7**2]]))
    assert operator.inverse(0.0) is None
    whole = MeanStd(ng.Normal())
    xi = tensor([0.3, 2.0])
    same = fisher_in(ng.Normal(), whole.natural, xi, whole.of)
    assert_close(same.dense(), torch.diag(tensor([1 / 4, 2 / 4])))
    assert same.inverse(0.0) is not None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MeanCovariance(ng.Normal()), ("Normal()", "MultivariateNormal(d)")),
        (lambda: MeanStd(FULL), ("MultivariateNormal(3)", "MeanCholesky")),
        (lambda: MeanStd(ng.Normal()).natural(tensor([0.0, -1.0])), ("standard deviations <= 0",)),
        (lambda: MeanCholesky(ng.MultivariateNormal(1)).natural(tensor([0.0, -1.0])), ("L_ii <= 0",)),
        (lambda: MeanCovariance(FULL).natural(torch.zeros(9)), ("positive definite",)),
        (lambda: MeanCovariance(FULL).fisher(torch.zeros(2, 9)), ("(2, 9)", "one distribution")),
        (lambda: ExponentialRate(ng.Exponential()).natural(tensor([-1.0])), ("outside", "negative")),
        (lambda: Concentration(ng.Beta()).natural(tensor([0.5, 0.0])), ("outside", "concentration")),
        (lambda: ShapeRate(ng.Gamma()).of(tensor([0.0, 1.0])), ("outside",)),
        (lambda: ShapeRate(ng.Gamma()).natural(tensor([-1.0, 2.0])), ("outside", "first above -1")),
        (lambda: ShapeScale(ng.Gamma()).natural(tensor([1.0, -2.0])), ("outside", "second negative")),
        (lambda: convert(tensor([1.0, 2.0]), ShapeRate(ng.Gamma()), MeanStd(ng.Normal())), ("Gamma", "same family")),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
