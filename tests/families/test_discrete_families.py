"""Bits, classes and counts: likelihoods of outputs that are exponential families too."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import Bernoulli, Categorical, ExponentialFamily, Multinomial, Poisson
from natgrad.operators import Operator
from natgrad.testing import check_operator

GENERATOR = torch.Generator().manual_seed(0)
BOTH = [Bernoulli(), Bernoulli(3), Poisson(), Poisson(3), Categorical(), Categorical(3)]
LISTED = [Bernoulli(3), Categorical(3), Multinomial(4, 3)]


def tensor(values):
    return torch.tensor(values, dtype=F64)


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


@pytest.mark.parametrize("family", LISTED, ids=repr)
def test_probabilities_of_all_outcomes_give_every_mean(family):
    theta = draw(2, family.size)[1]
    x = family.outcomes(theta)
    log_p = family.log_prob(theta, x)
    p, statistics = log_p.exp(), family.statistics(x).to(F64)
    assert_close(p.sum(), tensor(1.0))
    assert_close(p @ statistics, family.expectation(theta))
    centred = statistics - p @ statistics
    assert_close(centred.mT @ (p.unsqueeze(1) * centred), family.covariance(theta))
    assert_close(-p @ log_p, family.entropy(theta))
    other = draw(3, family.size)[2]
    assert_close(p @ (log_p - family.log_prob(other, x)), family.kl(theta, other))
    assert_close(family.fisher(theta).dense(), torch.func.hessian(family.log_partition)(theta))


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


def test_densities_are_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    theta = draw(3)
    p = theta.softmax(0)
    for x in Multinomial(4, 3).outcomes(theta):
        expected = stats.multinomial(4, p.numpy()).logpmf(x.numpy())
        assert_close(Multinomial(4, 3).log_prob(theta, x), tensor(float(expected)))
    counts = torch.arange(9)
    peer = stats.poisson(theta[0].exp().item())
    assert_close(Poisson().log_prob(theta[:1], counts.unsqueeze(1)), tensor(peer.logpmf(counts.numpy())))
    bits = stats.bernoulli(theta[0].sigmoid().item())
    found = Bernoulli().log_prob(theta[:1], torch.tensor([[0], [1]]))
    assert_close(found, tensor(bits.logpmf([0, 1])))
    assert_close(Categorical().log_prob(theta, torch.arange(3)), p.log())


@pytest.mark.parametrize("log_rate", [-30.0, -3.0, 0.0, 2.0, 4.09, 4.1, 5.0])
def test_the_entropy_of_counts_is_the_sum(log_rate):
    """At 60 = exp(4.094) a sum gives way to a series."""
    theta, counts = tensor([log_rate]), torch.arange(600, dtype=F64).unsqueeze(1)
    log_p = Poisson().log_prob(theta, counts)
    assert_close(Poisson().entropy(theta), -(log_p.exp() * log_p).sum(), rtol=1e-12, atol=1e-20)
    mean = -(log_p.exp() * torch.lgamma(counts[:, 0] + 1)).sum()
    assert_close(Poisson().mean_log_base(theta), mean, rtol=1e-11, atol=1e-25)


def test_gradients_of_the_entropy_pass_from_sum_to_series():
    theta = tensor([[3.0], [4.0], [4.2], [9.0]]).requires_grad_()
    (slope,) = torch.autograd.grad(Poisson().entropy(theta).sum(), theta)
    ends = [Poisson().entropy((theta + s).detach()) for s in (1e-5, -1e-5)]
    assert_close(slope.squeeze(1), (ends[0] - ends[1]) / 2e-5, rtol=1e-8, atol=1e-9)


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


def test_what_is_nearly_certain_keeps_its_digits():
    theta = tensor([50.0])
    small = tensor(-50.0).exp()
    assert_close(Bernoulli().entropy(theta), 51 * small, rtol=1e-12, atol=0)
    assert_close(Bernoulli().fisher(theta).diagonal(), small.view(1), rtol=1e-12, atol=0)
    assert_close(Bernoulli().kl(theta, theta - 1), small * (torch.e - 2), rtol=1e-6, atol=0)
    assert_close(Bernoulli().log_prob(theta, tensor([1.0])), -small, rtol=1e-12, atol=0)
    assert_close(Bernoulli().natural(tensor([1e-30])), tensor([1e-30]).log())
    assert_close(Poisson().kl(tensor([15.0]), tensor([15.0 + 1e-6])), tensor(0.5e-12 * 3269017.37), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Bernoulli().natural(tensor([0.5, 1.0])), ("0 < eta < 1", "edge")),
        (lambda: Bernoulli(3).expectation(draw(2)), ("(2,)", "(..., 3)")),
        (lambda: Bernoulli(0), ("n is 0", "bits")),
        (lambda: Bernoulli().statistics(tensor([0.0, 2.0])), ("bits, 0 or 1",)),
        (lambda: Bernoulli(2).statistics(draw(3)), ("(3,)", "(..., 2)")),
        (lambda: Bernoulli().expectation(tensor([torch.nan])), ("outside", "NaN")),
        (lambda: Bernoulli().outcomes(draw(30)), ("30 bits", "20")),
        (lambda: Poisson().natural(tensor([0.0])), ("<= 0", "log rate")),
        (lambda: Poisson().statistics(tensor([1.5])), ("counts 0, 1, 2",)),
        (lambda: Poisson().outcomes(draw(1)), ("infinitely many", "sample")),
        (lambda: Categorical(1), ("classes is 1", "dim=")),
        (lambda: Categorical(3).statistics(torch.tensor([3])), ("from 0 to 2",)),
        (lambda: Categorical(3).statistics(tensor(1.0)), ("x.long()",)),
        (lambda: Categorical().expectation(draw(0)), ("n >= 1",)),
        (lambda: Categorical(3).natural(tensor([0.5, 0.5, 0.0])), ("positive",)),
        (lambda: Categorical(3).natural(tensor([0.5, 0.5, 0.5])), ("sum other than 1",)),
        (lambda: Categorical(3).mle(torch.zeros(0, dtype=torch.long)), ("empty",)),
        (lambda: Multinomial(3, 2).statistics(tensor([1.0, 1.0])), ("sum 3",)),
        (lambda: Multinomial(3, 2).natural(tensor([1.0, torch.nan])), ("not finite",)),
        (lambda: Multinomial(50, 20).outcomes(draw(20)), ("outcomes", "at most")),
        (lambda: Multinomial(0, 2), ("n_trials is 0",)),
        (lambda: Categorical().sample(draw(3), 0), ("n is 0",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


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


def test_examples_give_maximum_likelihood():
    classes = torch.tensor([0, 0, 1, 2])
    assert_close(Categorical(3).expectation(Categorical(3).mle(classes)), torch.tensor([0.5, 0.25, 0.25]))
    bits = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 1]])
    assert_close(Bernoulli().expectation(Bernoulli().mle(bits)), torch.tensor([0.5, 0.75]))
    assert_close(Poisson().mle(torch.tensor([[1], [3]])), torch.tensor([2.0]).log())


def test_one_class_is_certain():
    """psi = theta, no entropy, no divergence, no Fisher matrix: what a choice among one tells."""
    family, theta, other = Categorical(), draw(3, 1), draw(3, 1, seed=1)
    nothing = torch.zeros(3, dtype=F64)
    assert_close(family.log_partition(theta), theta.squeeze(1))
    assert_close(family.expectation(theta), torch.ones(3, 1, dtype=F64))
    for value in (family.entropy(theta), family.kl(theta, other), family.nll(theta, torch.zeros(3, dtype=torch.long))):
        assert_close(value, nothing)
    for matrix in (family.covariance(theta), family.fisher(theta)):
        assert_close(matrix, nothing.view(3, 1, 1))
    assert_close(family.fisher(theta[0]).dense(), torch.zeros(1, 1, dtype=F64))
    assert torch.equal(family.sample(theta), torch.zeros(3, dtype=torch.long))
