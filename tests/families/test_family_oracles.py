"""Families against SciPy and by quadrature: densities, entropies, extreme parameters, single precision, bad data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import F64, draw
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import DiagonalNormal, SparseNormal

GENERATOR = torch.Generator().manual_seed(0)


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def dense(family, theta: Tensor):
    mean, sigma = (part.numpy() for part in family.mean_covariance(theta))
    return pytest.importorskip("scipy.stats").multivariate_normal(mean, sigma)


def cases(stats) -> list[tuple[ng.ExponentialFamily, Tensor, object]]:
    full, diagonal, sparse = ng.MultivariateNormal(3), DiagonalNormal(2), SparseNormal(3, [(0, 2)])
    theta = full.from_mean_covariance(draw(3), tensor([[2.0, 0.4, -0.3], [0.4, 1.5, 0.6], [-0.3, 0.6, 1.0]]))
    two, three = diagonal.from_mean_std(draw(2), tensor([0.5, 3.0])), tensor([0.1, 0.2, 0.3, -1.0, -0.5, -2.0, 0.4])
    return [
        (ng.Exponential(), tensor([-2.5]), stats.expon(scale=0.4)),
        (ng.Gamma(), tensor([1.3, -0.7]), stats.gamma(2.3, scale=1 / 0.7)),
        (ng.Gamma(), tensor([-0.9, -2.0]), stats.gamma(0.1, scale=0.5)),
        (ng.Beta(), tensor([1.5, -0.6]), stats.beta(2.5, 0.4)),
        (ng.Dirichlet(3), tensor([1.5, -0.6, 4.0]), stats.dirichlet([2.5, 0.4, 5.0])),
        (ng.Normal(), ng.Normal().from_mean_std(tensor(1.5), tensor(0.3)), stats.norm(1.5, 0.3)),
        (full, theta, dense(full, theta)),
        (diagonal, two, dense(diagonal, two)),
        (sparse, three, dense(sparse, three)),
    ]


def test_densities_and_entropies_are_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    for family, theta, peer in cases(stats):
        x = family.sample(theta, 20, generator=GENERATOR)
        values = x.squeeze(-1).numpy()
        if isinstance(family, ng.Dirichlet):
            values = (x / x.sum(-1, keepdim=True)).mT.numpy()
        expected = torch.as_tensor(peer.logpdf(values)).reshape(20)  # type: ignore[attr-defined]
        assert_close(family.log_prob(theta, x), expected, rtol=1e-9, atol=1e-9, msg=repr(family))
        assert_close(family.entropy(theta), tensor(float(peer.entropy())), rtol=1e-9, atol=1e-9)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "theta", "low", "high"),
    [
        (ng.Exponential(), tensor([-2.5]), 0.0, 20.0),
        (ng.Gamma(), tensor([1.3, -0.7]), 0.0, 80.0),
        (ng.Beta(), tensor([1.5, 0.6]), 0.0, 1.0),
        (ng.Normal(), tensor([1.0, -0.5]), -10.0, 12.0),
    ],
    ids=lambda value: repr(value) if isinstance(value, ng.ExponentialFamily) else None,
)
def test_moments_by_quadrature(family, theta, low, high):
    """Gauss-Legendre in t with x = low + (high - low) t^3: singular derivatives at the edge do no harm."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(400))
    t = (nodes + 1) / 2
    x = (low + (high - low) * t.pow(3)).unsqueeze(1)
    p = family.log_prob(theta, x).exp() * weights / 2 * (high - low) * 3 * t.square()
    assert_close(p.sum(), tensor(1.0), rtol=1e-6, atol=1e-6)
    statistics = family.statistics(x)
    assert_close(p @ statistics, family.expectation(theta), rtol=1e-5, atol=1e-6)
    centred = statistics - p @ statistics
    assert_close(centred.mT @ (p.unsqueeze(1) * centred), family.covariance(theta), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", [(1e-3, 1e-3, 1e-3), (1e-3, 1.0, 1e4), (1e4, 1e4, 1e4), (1e4, 1e-3, 2.0)])
def test_extreme_concentrations(alpha):
    family, theta = ng.Dirichlet(3), tensor(alpha) - 1
    assert_close(family.natural(family.expectation(theta)) + 1, tensor(alpha), rtol=1e-6, atol=0)
    for dtype in (F64, torch.float32):
        point = theta.to(dtype)
        x = family.sample(point, 3000, generator=GENERATOR)
        values = [family.statistics(x), family.log_prob(point, x), family.entropy(point), family.kl(point, 0 * point)]
        assert all(bool(torch.isfinite(value).all()) for value in values)
        mean = tensor(alpha) / sum(alpha)
        spread = (mean * (1 - mean) / (sum(alpha) + 1) / 3000).sqrt()
        assert bool(((x.double().mean(0) - mean).abs() < 6 * spread + 1e-6).all())
