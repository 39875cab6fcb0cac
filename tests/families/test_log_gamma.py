"""log Gamma, its derivatives and the Fisher matrices made of them, against 50 digits."""

from __future__ import annotations

import itertools

import mpmath as mp
import pytest
import torch
from family_references import exact
from models import F64
from torch import Tensor
from torch.testing import assert_close

from natgrad.families import Beta, Dirichlet, ExponentialFamily, Gamma
from natgrad.families.special_functions import log_gamma

mp.mp.dps = 50
X = torch.cat([torch.logspace(-8, 8, 161, dtype=F64), torch.linspace(0.5, 30, 119, dtype=F64)])
MODES = {"forward": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1], "backward": torch.func.grad}
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
def test_expectations_in_single_precision_have_all_its_digits(name):
    """eta_i = digamma(alpha_i) - digamma(sum alpha) is -1e-6 where alpha_i is nearly the sum."""
    family = FAMILIES[name]
    theta = draw_parameters(family, 8.0).float()
    assert_close(family.expectation(theta), family.expectation(theta.double()).float(), rtol=1e-6, atol=0)
    sizes = torch.tensor([[1e6, 0.5, 2.0], [1e-6, 100.0, 1.0], [1e3, 1e-3, 1e6]])[:, : family.size]
    if not isinstance(family, Gamma):  # whose mean has no digit more
        assert float(family.kl(sizes - 1, family.natural(family.expectation(sizes - 1))).max()) < 1e-3
