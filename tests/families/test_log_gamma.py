"""log Gamma, its derivatives and the Fisher matrices made of them, against 50 digits."""

from __future__ import annotations

import itertools

import mpmath as mp
import pytest
import torch
from family_references import exact
from models import F64
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

from natgrad.families import Beta, Dirichlet, ExponentialFamily, Gamma
from natgrad.families.log_gamma import digamma, log_gamma, trigamma

mp.mp.dps = 50
X = torch.cat([torch.logspace(-8, 8, 161, dtype=F64), torch.linspace(0.5, 30, 119, dtype=F64)])
MODES = {
    "forward": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "backward": torch.func.grad,
}
FORWARD_TWICE = lambda f: torch.func.jacfwd(torch.func.jacfwd(f))  # noqa: E731
FAMILIES = {"gamma": Gamma(), "beta": Beta(), "dirichlet": Dirichlet(3)}


def polygamma(order: int, x: Tensor = X) -> Tensor:
    return torch.tensor([float(mp.psi(order, number)) for number in exact(x)], dtype=F64)


@pytest.mark.parametrize("orders", [2, 3, 4])
def test_derivatives_of_any_order_and_mode_have_all_digits(orders):
    """`torch.polygamma(1, x)`, which torch takes for the second one, is off by 5e-10."""
    expected = polygamma(orders - 1)
    for modes in itertools.product(MODES, repeat=orders):
        found = log_gamma
        for mode in modes:
            found = MODES[mode](found)
        assert_close(torch.func.vmap(found)(X), expected, rtol=1e-14, atol=0, msg=f"{modes} of log_gamma")


@pytest.mark.parametrize("mode", MODES)
def test_each_function_is_the_derivative_of_the_one_before(mode):
    def derivative(f):
        return torch.func.vmap(MODES[mode](f))(X)

    assert torch.equal(log_gamma(X), torch.lgamma(X))
    assert torch.equal(digamma(X), torch.digamma(X))
    assert_close(derivative(log_gamma), torch.digamma(X), rtol=1e-14, atol=1e-15)
    assert_close(derivative(digamma), trigamma(X), rtol=1e-14, atol=0)
    assert_close(trigamma(X), polygamma(1), rtol=1e-14, atol=0)
    assert_close(derivative(trigamma), polygamma(2), rtol=1e-14, atol=0)


def test_dual_numbers_over_a_graph():
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(log_gamma(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        (found,) = torch.autograd.grad(slope.sum(), x)
    assert_close(found, polygamma(1), rtol=1e-14, atol=0)


def test_the_edge_is_torch_s():
    edge = torch.tensor([0.0, torch.inf, torch.nan, 1e308, 1e-308], dtype=F64)
    assert_close(log_gamma(edge), torch.lgamma(edge), rtol=0, atol=0, equal_nan=True)
    assert_close(digamma(edge), torch.digamma(edge), rtol=0, atol=0, equal_nan=True)
    assert_close(trigamma(edge[:3]), torch.polygamma(1, edge[:3]), rtol=0, atol=0, equal_nan=True)


def draw_parameters(family: ExponentialFamily, spread: float, count: int = 12) -> Tensor:
    """theta whose concentrations, shapes and rates are 10^-2 to 10^(spread - 2)."""
    generator = torch.Generator().manual_seed(3)
    size = 10 ** (spread * torch.rand(count, family.size, dtype=F64, generator=generator) - 2)
    return torch.stack([size[:, 0] - 1, -size[:, 1]], dim=1) if isinstance(family, Gamma) else size - 1


def define_derivatives(family: ExponentialFamily, theta: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """All derivatives of psi of order 2 or 3 and the sizes of the terms they are made of, each (n, ..., n)."""
    numbers = exact(theta)
    places = list(itertools.product(range(family.size), repeat=order))
    if isinstance(family, Gamma):
        shape, rate = numbers[0] + 1, -numbers[1]
        seconds, thirds = [mp.psi(1, shape), 1 / rate, shape / rate**2], [mp.psi(2, shape), 0, 1 / rate**2]
        by_rate = seconds if order == 2 else [*thirds, 2 * shape / rate**3]  # how many of the variables are theta_2
        values = sizes = [by_rate[sum(place)] for place in places]
    else:
        alpha = [t + 1 for t in numbers]
        own, total = [mp.psi(order - 1, a) for a in alpha], mp.psi(order - 1, sum(alpha))
        parts = [own[place[0]] if len(set(place)) == 1 else mp.mpf(0) for place in places]
        values, sizes = [part - total for part in parts], [part + total for part in parts]
    shape = [family.size] * order
    return tuple(torch.tensor([float(x) for x in xs], dtype=F64).view(shape) for xs in (values, sizes))


@pytest.mark.parametrize("name", FAMILIES)
def test_fisher_matrices_have_all_digits(name):
    family = FAMILIES[name]
    hessians = [torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f)), FORWARD_TWICE]
    for theta in draw_parameters(family, 6.0):
        expected, size = define_derivatives(family, theta, 2)
        found = [family.covariance(theta), family.fisher(theta).dense(), torch.func.jacrev(family.expectation)(theta)]
        for matrix in [*found, *(hessian(family.log_partition)(theta) for hessian in hessians)]:
            assert ((matrix - expected).abs() <= 1e-13 * size.abs()).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_third_derivatives_have_all_digits(name):
    family = FAMILIES[name]
    for theta in draw_parameters(family, 6.0, 6):
        expected, size = define_derivatives(family, theta, 3)
        for third in (
            torch.func.jacfwd(family.covariance)(theta),
            torch.func.jacrev(family.covariance)(theta),
            torch.func.jacfwd(torch.func.hessian(family.log_partition))(theta),
        ):
            assert ((third - expected).abs() <= 1e-13 * size.abs()).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_curvature_of_a_density_is_the_fisher_matrix(name):
    """log p = theta . T - psi: whatever x is."""
    family = FAMILIES[name]
    for theta in draw_parameters(family, 4.0):
        expected, size = define_derivatives(family, theta, 2)
        x = family.sample(torch.full_like(theta, -0.5), 1, generator=torch.Generator().manual_seed(0))[0]
        found = -torch.func.hessian(family.log_prob)(theta, x)
        assert ((found - expected).abs() <= 1e-12 * size.abs().amax()).all()
