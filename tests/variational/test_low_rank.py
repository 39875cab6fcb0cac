"""Covariances of diagonal plus low rank: the Fisher matrix and the step by definition, and what is found."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from models import F64, assert_close
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.variational import Draws, Sobol
from natgrad.variational.fitting import Bounds, has_ended
from natgrad.variational.low_rank import FactoredCovariance, FactorFisher

G = torch.Generator().manual_seed(0)
X = torch.randn(40, 6, dtype=F64, generator=G)
SIGNS = (X[:, 0] + 0.5 * torch.randn(40, dtype=F64, generator=G)).sign()


def logistic(z: Tensor) -> Tensor:
    return functional.logsigmoid(SIGNS * (z @ X.mT)).sum(-1) - 0.5 * z.square().sum(-1)


def build_factored(d: int, r: int) -> FactoredCovariance:
    generator = torch.Generator().manual_seed(1)
    scales, factor = torch.rand(d, dtype=F64, generator=generator), torch.randn(d, r, dtype=F64, generator=generator)
    return FactoredCovariance(scales + 0.5, factor)


def move_densely(start: FactoredCovariance, step: Tensor) -> Tensor:
    """Sigma after a step in (log s, diag(s)^-1 B), written out."""
    d = len(start.scales)
    scales = start.scales * step[:d].exp()
    factor = start.factor + start.scales.unsqueeze(1) * step[d:].view_as(start.factor)
    return torch.diag(scales**2) + factor @ factor.mT


def test_the_fisher_matrix_and_the_entropys_slopes_are_those_of_the_definition():
    start = build_factored(5, 2)
    zero = torch.zeros(15, dtype=F64)
    slopes = torch.autograd.functional.jacobian(lambda v: move_densely(start, v), zero)
    inverse = torch.linalg.inv(start.dense())
    expected = 0.5 * torch.einsum("ij,jkn,kl,lim->nm", inverse, slopes, inverse, slopes)
    assert_close(FactorFisher(start).dense(), expected, rtol=1e-11)
    found = torch.autograd.functional.jacobian(lambda v: 0.5 * torch.logdet(move_densely(start, v)), zero)
    own, sides = start.entropy_slopes()
    assert_close(torch.cat([own, sides.reshape(-1)]), found, rtol=1e-11)
    assert_close(start.half_logdet(), 0.5 * torch.logdet(start.dense()), rtol=1e-11)
    step = 0.1 * torch.arange(15, dtype=F64)
    assert_close(start.move(step[:5], step[5:].view(5, 2)).dense(), move_densely(start, step), rtol=1e-11)


def test_a_short_step_is_the_natural_gradient_of_the_bound():
    q = ng.variational_low_rank(logistic, torch.full((6,), 0.1, dtype=F64), rank=2, points=Sobol(32), lr=1e-5)
    mean, start = q.mean, FactoredCovariance(q.scales, q.factor)
    z, weights = Sobol(32).at(8, 0)

    def measure_bound(step: Tensor) -> Tensor:
        scales = start.scales * step[6:12].exp()
        factor = start.factor + start.scales.unsqueeze(1) * step[12:].view(6, 2)
        places = mean + step[:6] + z[:, :6] * scales + z[:, 6:] @ factor.mT
        return weights @ logistic(places) + 0.5 * torch.logdet(torch.diag(scales**2) + factor @ factor.mT)

    slope = torch.autograd.functional.jacobian(measure_bound, torch.zeros(24, dtype=F64))
    fisher = torch.block_diag(torch.linalg.inv(start.dense()), FactorFisher(start).dense())
    natural = torch.linalg.pinv(fisher, rtol=1e-10) @ slope
    q.step()
    assert_close((q.mean - mean) / 1e-5, natural[:6], rtol=1e-4)
    expected = move_densely(start, 1e-5 * natural[6:]) - start.dense()
    assert_close((q.covariance - start.dense()) / 1e-5, expected / 1e-5, rtol=1e-3)


@pytest.mark.parametrize("covariance", [1e-3, 1.0, 100.0])
def test_a_posterior_of_the_family_is_found(covariance):
    truth = build_factored(8, 2)
    precision, centre = torch.linalg.inv(truth.dense()), torch.arange(8, dtype=F64)
    q = ng.variational_low_rank(
        lambda z: -0.5 * ((z - centre) @ precision * (z - centre)).sum(-1), 8, rank=2, covariance=covariance
    )
    bounds = q.fit(200, tolerance=1e-9)
    assert bounds.converged
    assert all(later > earlier - 1e-6 for earlier, later in pairwise(bounds))
    assert_close(q.covariance, truth.dense(), rtol=1e-3)
    assert_close(q.mean, centre, rtol=1e-5)
    assert_close(q.variances, q.covariance.diagonal())
    assert bounds[-1] == pytest.approx(float(0.5 * torch.logdet(2 * torch.pi * truth.dense())), abs=1e-6)


def test_a_start_far_wider_than_a_correlated_posterior_arrives():
    """Rotations of B that are nearly free have steps of 1e7, which are left out: the others go on."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 6, dtype=F64, generator=generator) @ torch.randn(6, 6, dtype=F64, generator=generator)
    signs = (
        x @ torch.randn(6, dtype=F64, generator=generator) + torch.randn(200, dtype=F64, generator=generator)
    ).sign()

    def weigh_correlated(z: Tensor) -> Tensor:
        return functional.logsigmoid(signs * (z @ x.mT)).sum(-1) - z.square().sum(-1) / 200

    bounds = ng.variational_low_rank(weigh_correlated, 6, rank=3, covariance=1.0).fit(150)
    assert bounds.converged
    assert abs(bounds[-1] - ng.variational(weigh_correlated, 6).fit()[-1]) < 0.5


def test_a_system_that_was_not_solved_is_no_end():
    bounds = Bounds([1.0])
    bounds.gap = -1e8
    assert not has_ended(bounds, 1e-6)


def test_a_network_is_fitted_by_gradients_alone_and_continues_from_a_checkpoint():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    y = SIGNS.unsqueeze(1).gt(0).double()

    def build() -> ng.variational.LowRankVariational:
        options = {"criterion": nn.BCEWithLogitsLoss(), "data_size": 40, "points": Draws(8)}
        return ng.variational_low_rank(net, rank=3, lr=0.1, **options)  # type: ignore[arg-type]

    q = build()
    before = q.elbo(X, y)
    for _ in range(20):
        q.step(X, y)
    assert q.elbo(X, y) > before + 5
    assert q.predict(X, samples=4).shape == (4, 40, 1)
    assert q.sample(3).shape == (3, q.mean.numel())
    again = build()
    again.load_state_dict(q.state_dict())
    assert q.step(X, y) == again.step(X, y)
    assert torch.equal(q.covariance, again.covariance)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, ("rank", "1")),
        ({"rank": 7}, ("rank is 7", "d = 6")),
        ({"rank": 2, "lr": -1.0}, ("lr",)),
        ({"rank": 2, "covariance": torch.eye(6)}, ("covariance", "(6,)")),
    ],
)
def test_bad_arguments_say_what_to_do(options, words):
    with pytest.raises(ValueError) as caught:
        ng.variational_low_rank(logistic, 6, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
