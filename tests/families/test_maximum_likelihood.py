"""Maximum likelihood of examples that vary little, or not at all: nothing that decides is left to round-off."""

from __future__ import annotations

import pytest
import torch
from models import draw
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import (
    ComplexNormal,
    DiagonalNormal,
    FixedMeanNormal,
    InverseGamma,
    InverseGaussian,
    LogNormal,
    SparseNormal,
    VonMisesFisher,
    Wishart,
)

F32, F64 = torch.float32, torch.float64


def positive(z: Tensor) -> Tensor:
    return 3.7 * (1 + z)


def matrices(z: Tensor) -> Tensor:
    """About one matrix, (b, 1) -> (b, 2, 2)."""
    return torch.tensor([[1.3, 0.4], [0.4, 0.9]], dtype=F64) * (1 + z.unsqueeze(-1))


def directions(z: Tensor) -> Tensor:
    return torch.cat([(0.7 + z).cos(), (0.7 + z).sin()], dim=-1)


def shares(z: Tensor) -> Tensor:
    return torch.cat([0.3 + z, 0.7 - z], dim=-1)


def several(z: Tensor) -> Tensor:
    """Three variables that vary independently about (3.7, 37, -370)."""
    more = torch.cat([z, z.flip(0), z.roll(7, 0)], dim=-1)
    return torch.tensor([3.7, 37.0, -370.0], dtype=F64) * (1 + more)


# examples from small numbers z (b, 1), and the statistic whose variance is compared; None: that of no single one
CASES: dict[str, tuple[ng.ExponentialFamily, object, int | None]] = {
    "normal": (ng.Normal(), positive, 0),
    "diagonal normal": (DiagonalNormal(3), several, 2),
    "multivariate normal": (ng.MultivariateNormal(3), several, 2),
    "sparse normal": (SparseNormal(3, [(0, 1)]), several, 2),
    "complex normal": (ComplexNormal(1), lambda z: torch.complex(3 + z, 4 + z.flip(0)), None),
    "known mean": (FixedMeanNormal(torch.zeros(2, dtype=F64)), lambda z: several(z)[:, :2], None),
    "gamma": (ng.Gamma(), positive, 1),
    "inverse gamma": (InverseGamma(), positive, 1),
    "inverse gaussian": (InverseGaussian(), positive, 0),
    "log-normal": (LogNormal(), positive, 0),
    "Wishart(1)": (Wishart(1), lambda z: positive(z).unsqueeze(-1), 1),
    "Wishart(2)": (Wishart(2), matrices, None),
    "beta": (ng.Beta(), lambda z: 0.3 + z, 0),
    "Dirichlet": (ng.Dirichlet(2), shares, 0),
    "directions": (VonMisesFisher(2), directions, 0),
    "product": (ng.Product((ng.Normal(), 1), (ng.Gamma(), 1)), lambda z: torch.cat([5 + z, positive(z)], -1), 3),
}
every = pytest.mark.parametrize("name", CASES)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.complex64 if dtype == F32 else torch.complex128) if x.is_complex() else x.to(dtype)


@every
@pytest.mark.parametrize("dtype", [F32, F64])
def test_examples_that_do_not_vary_are_refused(name, dtype):
    """For every number of them and every size: round-off of their mean decides on nothing."""
    family, make, _ = CASES[name]
    for seed in range(20):
        x = in_dtype(make(0.2 * torch.sigmoid(draw(1, 1, seed=seed))), dtype)
        with pytest.raises(ValueError, match=r"vary|positive definite"):
            family.mle(x.expand(seed + 1, *x.shape[1:]).clone())


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("known mean", "complex normal", "Wishart(2)")])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_examples_that_vary_by_their_last_digit_are_refused(name, dtype):
    family, make, _ = CASES[name]
    for seed in range(10):
        x = in_dtype(make(0.2 * torch.sigmoid(draw(1, 1, seed=seed)).expand(30, 1)), dtype)
        up = torch.nextafter(x, torch.full_like(x, torch.inf))
        mixed = torch.where(draw(30, *[1] * (x.dim() - 1), seed=seed) > 0, x, up)
        with pytest.raises(ValueError, match=r"vary|positive definite"):
            family.mle(mixed)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
@pytest.mark.parametrize(("dtype", "spread", "rtol"), [(F32, 1e-3, 1e-2), (F64, 1e-5, 1e-3)])
def test_the_likeliest_distribution_varies_as_its_examples_do(name, dtype, spread, rtol):
    """With little variation all families are normal: Var(T_i) of theta is that of the examples."""
    family, make, i = CASES[name]
    x = in_dtype(make(spread * draw(400, 1)), dtype)
    theta = family.mle(x)
    assert theta.dtype == dtype
    wide = x.double() / x.double().sum(-1, keepdim=True) if name == "Dirichlet" else x.double()
    wide = torch.nn.functional.normalize(wide, dim=-1) if name == "directions" else wide
    seen = family.statistics(wide)[:, i].var(correction=0)
    assert_close(family.covariance(theta.double())[i, i], seen, rtol=rtol, atol=0)


def test_maximum_likelihood_is_differentiable():
    """d theta / d x by differences, through every form that loses no digits."""
    z = 0.2 * torch.sigmoid(draw(5, 1))
    for name in ("gamma", "inverse gaussian", "log-normal", "normal", "beta", "multivariate normal"):
        family, make, _ = CASES[name]
        x = (
            torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=F64) if "multi" in name else make(z)
        ).requires_grad_()
        assert torch.autograd.gradcheck(family.mle, (x,), atol=1e-3, rtol=1e-4), name
