"""Bits, classes and counts: likelihoods of outputs that are exponential families too."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw, tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import (
    Bernoulli,
    Categorical,
    ExponentialFamily,
    Geometric,
    Multinomial,
    NegativeBinomial,
    Poisson,
)
from natgrad.operators import Operator
from natgrad.testing import check_operator

GENERATOR = torch.Generator().manual_seed(0)
BOTH = [Bernoulli(), Bernoulli(3), Poisson(), Poisson(3), Categorical(), Categorical(3)]


@pytest.mark.parametrize("family", [Categorical(4), Multinomial(3, 4)], ids=repr)
def test_products_keep_their_digits_where_a_class_is_nearly_certain(family):
    theta, vectors = tensor([[15.0, -1, 0, 1]]), draw(5, 4)
    exact, single = family.covariance(theta), family.covariance(theta.float())
    assert_close(single.double(), exact, rtol=1e-5, atol=0.0)
    products = {"operator": family.fisher(theta[0].float()).mm(vectors.float().mT).mT}
    if isinstance(family, ng.Likelihood):
        products["form"] = family.mv(theta.float().expand(5, 4), vectors.float())
    for product in products.values():
        assert_close(product.double(), vectors @ exact[0], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("family", BOTH, ids=repr)
def test_both_faces_in_one_class(family):
    assert isinstance(family, ExponentialFamily)
    assert isinstance(family, ng.Likelihood)
    rows = draw(5, 3)
    matrices = family.fisher(rows)
    assert_close(matrices, family.covariance(rows))
    operator = family.fisher(rows[2])
    assert isinstance(operator, Operator)
    check_operator(operator)
    assert_close(operator.dense(), matrices[2])
    assert family.sample(rows, GENERATOR).shape == family.sample(rows, generator=GENERATOR).shape
    assert len(family.sample(rows, GENERATOR)) == 5
    drawn = family.sample(rows, 7, generator=GENERATOR)
    assert drawn.shape[:2] == (7, 5)
    assert_close(family.log_prob(rows, drawn[0]), -family.nll(rows, drawn[0]))
    assert_close(family.log_prob(rows, drawn)[0], family.log_prob(rows, drawn[0]))
    assert_close(family.kl(rows[0], rows[1]), family.kl(rows[:1], rows[1:2])[0])


@pytest.mark.parametrize("family", [Categorical(4), Categorical(), Multinomial(6, 4)], ids=repr)
def test_logits_are_known_up_to_a_constant(family):
    """Their Fisher matrix has rank C - 1; natural(eta) has the sum zero; the other matrix is the pseudo-inverse."""
    theta = draw(3, 4)
    eta = family.expectation(theta)
    back = family.natural(eta)
    assert_close(back, theta - theta.mean(-1, keepdim=True))
    assert_close(family.expectation(back), eta)
    assert_close(family.expectation(theta + 5), eta)
    operator, dual = family.fisher(theta[0]), family.fisher_expectation(eta[0])
    assert_close(dual.dense(), torch.linalg.pinv(operator.dense(), hermitian=True), rtol=1e-9, atol=1e-11)
    for each in (operator, dual):
        check_operator(each)
    inverse = operator.inverse(0.0)
    assert inverse is not None
    assert_close(inverse.dense(), dual.dense())
    assert_close(family.log_partition(theta) + family.conjugate(eta), (theta * eta).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    ("family", "low", "high"), [(Bernoulli(), -50.0, 50.0), (Poisson(), -30.0, 15.0), (Categorical(), -200.0, 200.0)]
)
def test_extreme_parameters_give_numbers(family, low, high, dtype):
    theta = torch.tensor([low, 0.0, high], dtype=dtype)
    drawn = family.sample(theta, 4, generator=GENERATOR)
    found = [
        family.log_partition(theta),
        family.expectation(theta),
        family.entropy(theta),
        family.covariance(theta),
        family.log_prob(theta, drawn),
        family.kl(theta, theta.flip(0)),
        family.mean_log_base(theta),
    ]
    assert all(bool(torch.isfinite(each).all()) and each.dtype == dtype for each in found)
    assert bool((family.kl(theta, theta.flip(0)) >= 0).all())
    assert bool((family.entropy(theta) >= 0).all())
    assert bool((family.fisher(theta).diagonal() >= 0).all())


def test_a_size_must_be_told_where_it_is_needed():
    for family in (Bernoulli(), Poisson(), Categorical()):
        with pytest.raises(AttributeError, match="say how many"):
            _ = family.size
    with pytest.raises(AttributeError, match=r"Categorical\(3\)"):
        Categorical().statistics(torch.tensor([1]))
    product = ng.families.Product((Bernoulli(2), 2), (Poisson(1), 1))
    assert_close(product.expectation(torch.zeros(3)), torch.tensor([0.5, 0.5, 1.0]))


def test_integers_and_others_are_no_parameters():
    for wrong in (torch.zeros(3, dtype=torch.long), [0.1, 0.2]):
        with pytest.raises(TypeError, match="floating"):
            Bernoulli().expectation(wrong)
    with pytest.raises(TypeError, match="class numbers"):
        Categorical(3).statistics([1, 2])


@pytest.mark.parametrize("rate", [0.1, 59.0, 61.0, 1000.0])  # a series from 60 on
def test_the_entropy_of_counts_is_the_sum_over_them(rate):
    counts, log_rate = torch.arange(2000, dtype=F64), tensor([rate]).log()
    log_p = counts * log_rate - rate - torch.lgamma(counts + 1)
    torch.testing.assert_close(Poisson(1).entropy(log_rate), -(log_p.exp() * log_p).sum(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_counts_of_many_trials_are_as_exact_as_those_of_few(dtype):
    shares, trials = tensor([0.2, 0.3, 0.5]), 10**6
    family, theta = Multinomial(trials, 3), shares.log().to(dtype)
    normal = 0.5 * ((2 * torch.pi * torch.e * trials) ** 2 * shares.prod()).log()  # but for a multiple of 1 / trials
    torch.testing.assert_close(family.entropy(theta).double(), normal, rtol=1e-5, atol=0)
    mode = (trials * shares).to(dtype)
    log_peak = -0.5 * ((2 * torch.pi * trials) ** 2 * shares.prod()).log()
    torch.testing.assert_close(family.log_prob(theta, mode).double(), log_peak, rtol=1e-5, atol=0)


def test_a_draw_of_a_billion_trials_costs_no_more_than_one():
    shares, trials = tensor([0.2, 0.0, 0.3, 0.5]), 10**9
    x = Multinomial(trials, 4).sample(shares.log(), 4000, generator=torch.Generator().manual_seed(0))
    assert bool((x.sum(1) == trials).all())
    assert bool((x[:, 1] == 0).all())
    covariance = trials * (shares.diag() - shares.outer(shares))
    error = (covariance.diagonal() / len(x)).sqrt()
    assert bool(((x.mean(0) - trials * shares).abs() <= 4.5 * error).all())
    size = covariance.diagonal().sqrt().outer(covariance.diagonal().sqrt())
    assert bool(((torch.cov(x.mT) - covariance).abs() <= 4.5 * size * (2 / len(x)) ** 0.5).all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("family", [Bernoulli(1), Poisson(1), NegativeBinomial(3), Geometric()], ids=repr)
def test_kl_of_counts_that_are_all_zero(family, dtype):
    """psi(other) from them, and eta (theta - other) - psi(theta) to them, also where exp(theta) is zero."""
    zero, other = torch.tensor([[-1000.0], [-0.5]], dtype=dtype)
    assert_close(family.kl(zero, other), family.log_partition(other))
    expected = (family.expectation(other) * (other - zero)).sum() - family.log_partition(other)
    assert_close(family.kl(other, zero), expected)
    slope = torch.func.grad(family.kl)(other, zero)
    assert_close(slope, family.covariance(other) @ (other - zero))
