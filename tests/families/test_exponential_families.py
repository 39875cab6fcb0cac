"""Exponential families: what follows from T and psi, for every family; closed forms; the lectures' normal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from models import F64, draw, tensor
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import (
    ChiSquare,
    ComplexNormal,
    DiagonalNormal,
    FixedCovarianceNormal,
    FixedMeanNormal,
    Geometric,
    InverseGamma,
    InverseGaussian,
    Logarithmic,
    LogNormal,
    NegativeBinomial,
    Rayleigh,
    SparseNormal,
    VonMisesFisher,
    Weibull,
    Wishart,
)
from natgrad.operators import DenseOperator
from natgrad.testing import check_exponential_family

NORMAL = ng.MultivariateNormal(3)


def normal_theta(*shape: int) -> Tensor:
    root = torch.eye(3, dtype=F64) + 0.4 * draw(*shape, 3, 3)
    return NORMAL.from_mean_covariance(draw(*shape, 3), root @ root.mT)


def chain(*shape: int) -> Tensor:
    """A precision without an entry between the first and the last variable."""
    return tensor([0.3, -0.2, 0.1, -0.6, -0.7, -0.8, 0.2, 0.3]) + 0.05 * draw(*shape, 8)


DIAGONAL, SPARSE, CENTRED = DiagonalNormal(3), SparseNormal(3, [(1, 0), (1, 2)]), FixedMeanNormal(tensor([0.5, -1.0]))
CENTRED_SPARSE = FixedMeanNormal(torch.zeros(3, dtype=F64), [(0, 2)])
KNOWN = FixedCovarianceNormal(tensor([[2.0, 0.3], [0.3, 1.0]]))
CHAIN = ng.SubModel(NORMAL, [0, 1, 2, 3, 4, 5, 6, 8], base=tensor([0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0]))
PAIR = ng.Product((ng.Gamma(), 1), (ng.Ising(2), 2))
SCATTER, COMPLEX = Wishart(2), ComplexNormal(2)


def scatter_theta(*shape: int) -> Tensor:
    root = torch.eye(2, dtype=F64) + 0.3 * draw(*shape, 2, 2)
    return SCATTER.from_degrees_scale(2.5 + draw(*shape, seed=1).exp(), root @ root.mT)


def complex_theta(*shape: int) -> Tensor:
    root = torch.eye(2, dtype=F64) + 0.3 * torch.complex(draw(*shape, 2, 2), draw(*shape, 2, 2, seed=1))
    return COMPLEX.from_mean_covariance(torch.complex(draw(*shape, 2), draw(*shape, 2, seed=1)), root @ root.mH)


# a family and theta (*shape, n)
CASES: dict[str, tuple[ng.ExponentialFamily, Callable[..., Tensor]]] = {
    "normal": (NORMAL, normal_theta),
    "exponential": (ng.Exponential(), lambda *s: -draw(*s, 1).exp()),
    "gamma": (ng.Gamma(), lambda *s: draw(*s, 2).exp() * tensor([1.0, -1.0]) - tensor([0.7, 0.0])),
    "beta": (ng.Beta(), lambda *s: draw(*s, 2).exp() - 0.8),
    "dirichlet": (ng.Dirichlet(4), lambda *s: draw(*s, 4).exp() - 0.8),
    "ising": (ng.Ising(3), lambda *s: 0.5 * draw(*s, 6)),
    "triple": (ng.Ising(3, [(0,), (2, 1), (0, 1, 2)], values=(0, 1)), lambda *s: draw(*s, 3)),
    "chain": (CHAIN, chain),
    "bits": (ng.Bernoulli(3), lambda *s: draw(*s, 3)),
    "classes": (ng.SubModel(ng.Categorical(4), range(3)), lambda *s: draw(*s, 3)),
    "multinomial": (ng.SubModel(ng.Multinomial(5, 3), range(2)), lambda *s: draw(*s, 2)),
    "counts": (ng.Poisson(2), lambda *s: draw(*s, 2)),
    "univariate": (ng.Normal(), lambda *s: ng.Normal().from_mean_std(draw(*s), draw(*s).exp())),
    "diagonal": (DIAGONAL, lambda *s: DIAGONAL.from_mean_std(draw(*s, 3), draw(*s, 3).exp())),
    "sparse": (SPARSE, chain),
    "centred": (CENTRED, lambda *s: tensor([-0.5, -0.7, 0.3]) + 0.05 * draw(*s, 3)),
    "centred, sparse": (CENTRED_SPARSE, lambda *s: tensor([-0.5, -0.7, -0.4, 0.3]) + 0.05 * draw(*s, 4)),
    "known covariance": (KNOWN, lambda *s: draw(*s, 2)),
    "log-normal": (LogNormal(), lambda *s: LogNormal().from_mean_std(draw(*s), draw(*s, seed=1).exp())),
    "inverse gamma": (InverseGamma(), lambda *s: draw(*s, 2).exp() * tensor([1.0, -1.0]) + tensor([0.3, 0.0])),
    "weibull": (Weibull(1.7), lambda *s: -draw(*s, 1).exp()),
    "rayleigh": (Rayleigh(), lambda *s: -draw(*s, 1).exp()),
    "chi-square": (ChiSquare(), lambda *s: draw(*s, 1).exp() - 0.8),
    "inverse gaussian": (InverseGaussian(), lambda *s: -draw(*s, 2).exp()),
    "negative binomial": (NegativeBinomial(2.5), lambda *s: -draw(*s, 1).exp()),
    "geometric": (Geometric(), lambda *s: -draw(*s, 1).exp()),
    "logarithmic": (Logarithmic(), lambda *s: -draw(*s, 1).exp()),
    "sphere": (VonMisesFisher(4), lambda *s: draw(*s, 4)),
    "scatter": (SCATTER, scatter_theta),
    "complex": (COMPLEX, complex_theta),
    "product": (PAIR, lambda *s: torch.cat([tensor([0.5, -1.0]).expand(*s, 2), 0.3 * draw(*s, 3)], -1)),
}
every = pytest.mark.parametrize("name", CASES)
INVERTED = (  # each way from eta to theta
    *("normal", "exponential", "gamma", "dirichlet", "ising", "chain", "bits", "counts", "diagonal", "sparse"),
    *("centred, sparse", "log-normal", "inverse gaussian", "negative binomial", "logarithmic", "sphere", "scatter"),
    *("complex", "product"),
)


@every
def test_every_family_keeps_the_contract(name):
    family, make = CASES[name]
    theta = make(2)
    check_exponential_family(family, theta, samples=4000)
    x = family.sample(theta, 5, generator=torch.Generator().manual_seed(0))
    slope = (theta * family.statistics(x)).sum(-1)
    assert_close(slope - family.log_partition(theta) + family.log_base(x), family.log_prob(theta, x))


@every
def test_divergences_take_two_precisions(name):
    family, make = CASES[name]
    theta = make(2)
    single = theta.float()
    assert_close(family.kl(single, theta), family.kl(single.double(), theta), rtol=1e-3, atol=1e-5)
    assert_close(family.bregman(single, theta), family.bregman(single.double(), theta), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", INVERTED)
def test_derivatives_of_natural_are_the_same_in_every_mode(name):
    """torch takes a custom function's forward derivative of a forward derivative for zero, without a word."""
    family, make = CASES[name]
    theta = make()
    eta, back, forward = family.expectation(theta).detach(), torch.func.jacrev, torch.func.jacfwd
    second = back(back(family.natural))(eta)
    scale = float(second.abs().max())
    for modes in ((forward, forward), (back, forward)):
        found = modes[0](modes[1](family.natural))(eta)
        assert_close(found, second, rtol=1e-7, atol=1e-9 * max(scale, 1.0))
    if len(theta) <= 2 and name != "logarithmic":  # its third derivatives take ten seconds
        third = forward(second_of(family.natural, back))(eta)
        found = forward(second_of(family.natural, forward))(eta)
        assert_close(found, third, rtol=1e-6, atol=1e-8 * max(float(third.abs().max()), 1.0))


def second_of(function, jacobian):
    """The second derivative in one mode."""
    return jacobian(jacobian(function))


@pytest.mark.parametrize("name", INVERTED)
def test_second_derivatives_flow_through_the_coordinates(name):
    """phi is convex with the Hessian Cov(T)^-1, and its third derivative is that of the inverse matrix."""
    family, make = CASES[name]
    eta = family.expectation(make())
    hessian = torch.func.hessian(family.conjugate)(eta)
    assert_close(hessian, family.fisher_expectation(eta).dense(), rtol=1e-6, atol=1e-7)
    probe, moved = draw(len(eta)), eta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(family.natural(moved) @ probe, moved, create_graph=True)
    (second,) = torch.autograd.grad(slope @ probe, moved)
    step = 1e-5 * eta.abs().min() * probe
    ends = [probe @ (family.fisher_expectation(eta + s * step) @ probe) for s in (1, -1)]
    assert_close(second @ step, (ends[0] - ends[1]) / 2, rtol=1e-3, atol=1e-9)


@every
def test_a_family_is_a_form_on_outputs(name):
    family, make = CASES[name]
    theta = make(3)
    tangents = draw(*theta.shape)
    expected = family.covariance(theta)
    assert_close(family.mv(theta, tangents), (expected @ tangents.unsqueeze(-1)).squeeze(-1))
    root = family.root(theta)
    assert_close(root @ root.mT, expected, rtol=1e-8, atol=1e-9)


@every
def test_maximum_likelihood_has_the_mean_statistics(name):
    family, make = CASES[name]
    x = family.sample(make(), 400, generator=torch.Generator().manual_seed(0))
    theta = family.mle(x)
    rtol = 1e-8 if theta.dtype == F64 else 2e-4  # class numbers are integers: the default dtype
    assert_close(family.expectation(theta), family.statistics(x).mean(0), rtol=rtol, atol=1e-9)
    nearby = theta + 1e-3 * draw(*theta.shape)
    assert family.log_prob(theta, x).mean() > family.log_prob(nearby, x).mean()


OUTSIDE = {
    "exponential": (ng.Exponential(), [0.5]),
    "gamma": (ng.Gamma(), [-1.5, -1.0]),
    "gamma's rate": (ng.Gamma(), [0.5, 1.0]),
    "beta": (ng.Beta(), [-1.5, 0.0]),
    "dirichlet": (ng.Dirichlet(3), [0.0, -1.5, 0.0]),  # where lgamma has finite values
    "diagonal normal": (DiagonalNormal(1), [1.0, 0.5]),
    "normal": (ng.MultivariateNormal(2), [0.0, 0.0, -0.5, -0.5, 2.0]),
    "fixed mean": (FixedMeanNormal(torch.zeros(2).double()), [-0.5, -0.5, 2.0]),
    "product": (ng.Product((ng.Gamma(), 1), (ng.Poisson(1), 1)), [0.5, 1.0, 0.0]),
    "log-normal": (LogNormal(), [0.4, 0.5]),
    "inverse gamma": (InverseGamma(), [0.4, 2.0]),
    "weibull": (Weibull(1.5), [0.7]),
    "chi-square": (ChiSquare(), [-1.5]),
    "inverse gaussian": (InverseGaussian(), [0.7, -1.0]),
    "negative binomial": (NegativeBinomial(3), [0.7]),
    "logarithmic": (Logarithmic(), [0.7]),
    "scatter": (Wishart(2), [-1.5, -0.5, -1.0, 0.3]),
    "scatter's scale": (Wishart(2), [0.5, -0.5, -1.0, 2.0]),
    "complex": (ComplexNormal(1), [0.4, -0.5, 1.0]),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_the_log_partition_is_infinite_outside(case):
    family, numbers = OUTSIDE[case]
    theta = torch.tensor(numbers, dtype=torch.float64)
    assert float(family.log_partition(theta)) == torch.inf
    with pytest.raises(ValueError, match="outside"):
        family.expectation(theta)


@every
def test_theta_that_does_not_fit_is_told_everywhere(name):
    family, make = CASES[name]
    theta = make()
    long, x = torch.cat([theta, theta[:1]]), family.sample(theta, 2)
    calls = (family.log_partition, family.expectation, family.entropy, family.fisher, family.covariance)
    for ask in (*calls, lambda t: family.kl(t, t), lambda t: family.log_prob(t, x)):
        with pytest.raises(ValueError, match=r"has shape .* expected"):
            ask(long)
        with pytest.raises(TypeError, match="ndarray, expected a floating-point tensor"):
            ask(theta.numpy())
        with pytest.raises(TypeError, match=r"torch.int64, expected a floating-point tensor"):
            ask(torch.zeros(len(theta), dtype=torch.long))


@every
@pytest.mark.parametrize("x", [torch.ones(4, 99, dtype=F64), torch.full((4, 99), 7), [1.0]])
def test_x_that_does_not_fit_is_told_everywhere(name, x):
    family, make = CASES[name]
    for ask in (family.statistics, family.mle, lambda y: family.log_prob(make(), y)):
        with pytest.raises((ValueError, TypeError), match=r"^x .*expected|^x has values"):
            ask(x)


def test_an_operator_is_of_one_distribution():
    assert isinstance(ng.Ising(2).fisher(tensor([0.1, 0.2, 0.3])), DenseOperator)
    for call in (ng.Ising(2).fisher, ng.MultivariateNormal(1).fisher_expectation):
        with pytest.raises(ValueError, match="one distribution"):
            call(torch.zeros(5, 3 if call.__self__.size == 3 else 2, dtype=F64))


def test_the_bregman_divergence_of_psi_is_the_kl_with_its_arguments_swapped():
    theta = normal_theta()
    other = NORMAL.from_mean_covariance(torch.ones(3, dtype=F64), 2 * torch.eye(3, dtype=F64))
    gap = theta - other
    expected = NORMAL.log_partition(theta) - NORMAL.log_partition(other) - (NORMAL.expectation(other) * gap).sum(-1)
    assert_close(NORMAL.bregman(theta, other), expected)
    assert_close(NORMAL.bregman(theta, other), NORMAL.kl(other, theta))
    assert abs(float(NORMAL.bregman(theta, other) - NORMAL.kl(theta, other))) > 1e-3


UNITS = {  # families closed under a change of the unit of x: a distribution of that scale, and the entries of x
    "Normal": (ng.Normal(), lambda c: ng.Normal().from_mean_std(tensor(c), tensor(2 * c)), 1),
    "DiagonalNormal": (
        DiagonalNormal(2),
        lambda c: DiagonalNormal(2).from_mean_std(tensor([c, -c]), tensor([c, 2 * c])),
        2,
    ),
    "MultivariateNormal": (
        ng.MultivariateNormal(1),
        lambda c: ng.MultivariateNormal(1).from_mean_covariance(tensor([c]), tensor([[4 * c * c]])),
        1,
    ),
    "Gamma": (ng.Gamma(), lambda c: tensor([1.5, -2 / c]), 1),
    "InverseGamma": (InverseGamma(), lambda c: tensor([1.5, -2 * c]), 1),
    "InverseGaussian": (InverseGaussian(), lambda c: InverseGaussian().from_mean_shape(tensor(c), tensor(3 * c)), 1),
}


@pytest.mark.parametrize("unit", [1e-9, 1e5, 1e9])
@pytest.mark.parametrize("name", UNITS)
def test_the_fisher_matrix_does_not_depend_on_the_unit_of_x(name, unit):
    family, make, _ = UNITS[name]

    def measure(unit: float) -> Tensor:
        theta, other = make(unit), make(1.25 * unit)
        slope, fisher = torch.func.grad(family.kl)(theta, other), family.fisher(theta)
        steps = [
            fisher.inverse(0.0) @ slope,
            ng.Direct().solve(fisher, slope).value,
            ng.Auto().solve(fisher, slope).value,
        ]
        steps.append(ng.families.Natural(family).natural_gradient(theta, slope))
        return torch.stack([theta @ (fisher @ theta), *(step @ slope for step in steps)])

    assert_close(measure(unit), measure(1.0), rtol=1e-8, atol=0)


@pytest.mark.parametrize("unit", [1e-120, 1e-60, 1e60, 1e120])
@pytest.mark.parametrize("name", UNITS)
def test_kl_and_entropy_do_not_depend_on_the_unit_of_x(name, unit):
    family, make, size = UNITS[name]

    def measure(unit: float) -> Tensor:
        theta, other = make(unit), make(1.25 * unit)
        return torch.stack([family.kl(theta, other), family.entropy(theta) - size * math.log(unit)])

    assert_close(measure(unit), measure(1.0), rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    "make", [ng.Normal().from_mean_std, LogNormal().from_mean_std, InverseGaussian().from_mean_shape]
)
def test_a_number_beside_a_tensor_is_taken_in_its_dtype(make):
    exact = make(tensor(0.1), tensor(0.3))
    assert torch.equal(make(0.1, tensor(0.3)), exact)
    assert torch.equal(make(tensor(0.1), 0.3), exact)
    assert make(0.1, 0.3).dtype == torch.get_default_dtype()


@every
def test_no_distributions_have_gradients_of_no_numbers(name):
    family, make = CASES[name]
    theta = make(2)[:0].requires_grad_()
    eta, entropy, divergence = family.expectation(theta), family.entropy(theta), family.kl(theta, theta.detach())
    matrices = [] if family is KNOWN else [family.covariance(theta)]
    for value in (eta, family.natural(eta), entropy, divergence, *matrices):
        (slope,) = torch.autograd.grad(value.sum(), theta, retain_graph=True)
        assert slope.shape == theta.shape
