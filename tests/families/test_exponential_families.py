"""Exponential families: what follows from T and psi, for every family; closed forms; the lectures' normal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import F64, draw
from torch import Tensor, distributions
from torch.testing import assert_close

from natgrad.families import (
    Bernoulli,
    Beta,
    Categorical,
    ChiSquare,
    ComplexNormal,
    DiagonalNormal,
    Dirichlet,
    Exponential,
    ExponentialFamily,
    FixedCovarianceNormal,
    FixedMeanNormal,
    Gamma,
    Geometric,
    InverseGamma,
    InverseGaussian,
    Ising,
    Logarithmic,
    LogNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    Product,
    Rayleigh,
    SparseNormal,
    SubModel,
    VonMisesFisher,
    Weibull,
    Wishart,
)
from natgrad.operators import DenseOperator
from natgrad.testing import check_operator

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "families.json").read_text(encoding="utf-8"))
GENERATOR = torch.Generator().manual_seed(0)
NORMAL = MultivariateNormal(3)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def normal_theta(*shape: int) -> Tensor:
    root = torch.eye(3, dtype=F64) + 0.4 * draw(*shape, 3, 3)
    return NORMAL.from_mean_covariance(draw(*shape, 3), root @ root.mT)


def chain(*shape: int) -> Tensor:
    """A precision without an entry between the first and the last variable."""
    return tensor([0.3, -0.2, 0.1, -0.6, -0.7, -0.8, 0.2, 0.3]) + 0.05 * draw(*shape, 8)


def normals(family: Any) -> Callable[[Tensor], Any]:
    """torch's distribution of a theta of a family of normals."""
    return lambda t: distributions.MultivariateNormal(*family.mean_covariance(t))


DIAGONAL, SPARSE, CENTRED = DiagonalNormal(3), SparseNormal(3, [(1, 0), (1, 2)]), FixedMeanNormal(tensor([0.5, -1.0]))
CENTRED_SPARSE = FixedMeanNormal(torch.zeros(3, dtype=F64), [(0, 2)])
KNOWN = FixedCovarianceNormal(tensor([[2.0, 0.3], [0.3, 1.0]]))
CHAIN = SubModel(NORMAL, [0, 1, 2, 3, 4, 5, 6, 8], base=tensor([0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0]))
PAIR = Product((Gamma(), 1), (Ising(2), 2))
SCATTER, COMPLEX = Wishart(2), ComplexNormal(2)


def scatter_theta(*shape: int) -> Tensor:
    root = torch.eye(2, dtype=F64) + 0.3 * draw(*shape, 2, 2)
    return SCATTER.from_degrees_scale(2.5 + draw(*shape, seed=1).exp(), root @ root.mT)


def complex_theta(*shape: int) -> Tensor:
    root = torch.eye(2, dtype=F64) + 0.3 * torch.complex(draw(*shape, 2, 2), draw(*shape, 2, 2, seed=1))
    return COMPLEX.from_mean_covariance(torch.complex(draw(*shape, 2), draw(*shape, 2, seed=1)), root @ root.mH)


# a family, theta (*shape, n), and torch's distribution of one theta or None
CASES: dict[str, tuple[ExponentialFamily, Callable[..., Tensor], Callable[[Tensor], Any] | None]] = {
    "normal": (NORMAL, normal_theta, lambda t: distributions.MultivariateNormal(*NORMAL.mean_covariance(t))),
    "exponential": (Exponential(), lambda *s: -draw(*s, 1).exp(), lambda t: distributions.Exponential(-t)),
    "gamma": (
        Gamma(),
        lambda *s: draw(*s, 2).exp() * tensor([1.0, -1.0]) - tensor([0.7, 0.0]),
        lambda t: distributions.Gamma(t[0] + 1, -t[1]),
    ),
    "beta": (Beta(), lambda *s: draw(*s, 2).exp() - 0.8, lambda t: distributions.Beta(t[0] + 1, t[1] + 1)),
    "dirichlet": (Dirichlet(4), lambda *s: draw(*s, 4).exp() - 0.8, lambda t: distributions.Dirichlet(t + 1)),
    "ising": (Ising(3), lambda *s: 0.5 * draw(*s, 6), None),
    "triple": (Ising(3, [(0,), (2, 1), (0, 1, 2)], values=(0, 1)), lambda *s: draw(*s, 3), None),
    "chain": (CHAIN, chain, lambda t: distributions.MultivariateNormal(*NORMAL.mean_covariance(CHAIN.whole(t)))),
    "bits": (
        Bernoulli(),
        lambda *s: draw(*s, 3),
        lambda t: distributions.Independent(distributions.Bernoulli(logits=t), 1),
    ),
    "classes": (SubModel(Categorical(4), range(3)), lambda *s: draw(*s, 3), None),
    "multinomial": (SubModel(Multinomial(5, 3), range(2)), lambda *s: draw(*s, 2), None),
    "counts": (Poisson(2), lambda *s: draw(*s, 2), None),
    "univariate": (Normal(), lambda *s: Normal().from_mean_std(draw(*s), draw(*s).exp()), normals(Normal())),
    "diagonal": (DIAGONAL, lambda *s: DIAGONAL.from_mean_std(draw(*s, 3), draw(*s, 3).exp()), normals(DIAGONAL)),
    "sparse": (SPARSE, chain, normals(SPARSE)),
    "centred": (CENTRED, lambda *s: tensor([-0.5, -0.7, 0.3]) + 0.05 * draw(*s, 3), normals(CENTRED)),
    "centred, sparse": (CENTRED_SPARSE, lambda *s: tensor([-0.5, -0.7, -0.4, 0.3]) + 0.05 * draw(*s, 4), None),
    "known covariance": (KNOWN, lambda *s: draw(*s, 2), normals(KNOWN)),
    "log-normal": (
        LogNormal(),
        lambda *s: LogNormal().from_mean_std(draw(*s), draw(*s, seed=1).exp()),
        lambda t: distributions.LogNormal(*LogNormal().mean_std(t)),
    ),
    "inverse gamma": (InverseGamma(), lambda *s: draw(*s, 2).exp() * tensor([1.0, -1.0]) + tensor([0.3, 0.0]), None),
    "weibull": (Weibull(1.7), lambda *s: -draw(*s, 1).exp(), None),
    "rayleigh": (Rayleigh(), lambda *s: -draw(*s, 1).exp(), None),
    "chi-square": (ChiSquare(), lambda *s: draw(*s, 1).exp() - 0.8, None),
    "inverse gaussian": (InverseGaussian(), lambda *s: -draw(*s, 2).exp(), None),
    "negative binomial": (NegativeBinomial(2.5), lambda *s: -draw(*s, 1).exp(), None),
    "geometric": (Geometric(), lambda *s: -draw(*s, 1).exp(), None),
    "logarithmic": (Logarithmic(), lambda *s: -draw(*s, 1).exp(), None),
    "sphere": (VonMisesFisher(4), lambda *s: draw(*s, 4), None),
    "scatter": (SCATTER, scatter_theta, None),
    "complex": (COMPLEX, complex_theta, None),
    "product": (PAIR, lambda *s: torch.cat([tensor([0.5, -1.0]).expand(*s, 2), 0.3 * draw(*s, 3)], -1), None),
}
every = pytest.mark.parametrize("name", CASES)


@every
def test_expectation_and_fisher_are_derivatives_of_the_log_partition(name):
    family, make, _ = CASES[name]
    theta = make()
    assert_close(family.expectation(theta), torch.func.grad(family.log_partition)(theta))
    hessian = torch.func.hessian(family.log_partition)(theta)
    assert_close(family.covariance(theta), hessian, rtol=1e-8, atol=1e-10)
    check_operator(family.fisher(theta))
    assert_close(family.fisher(theta).dense(), hessian, rtol=1e-8, atol=1e-10)


@every
def test_there_and_back(name):
    family, make, _ = CASES[name]
    theta = make(4)
    eta = family.expectation(theta)
    assert eta.shape == theta.shape
    assert_close(family.natural(eta), theta, rtol=1e-9, atol=1e-10)
    assert_close(family.natural(eta[0]), theta[0], rtol=1e-9, atol=1e-10)
    assert_close(family.expectation(theta[2]), eta[2])


@every
def test_the_two_fisher_matrices_are_inverse(name):
    family, make, _ = CASES[name]
    theta = make()
    eta = family.expectation(theta)
    product = family.fisher(theta).dense() @ family.fisher_expectation(eta).dense()
    assert_close(product, torch.eye(len(theta), dtype=F64), rtol=0, atol=1e-8)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert_close(family.fisher_expectation(eta).dense(), jacobian(family.natural)(eta), rtol=1e-7, atol=1e-8)


@every
def test_gradients_flow_through_the_coordinates(name):
    """Of theta -> eta the Fisher matrix in theta, of eta -> theta its inverse."""
    family, make, _ = CASES[name]
    theta = make(2).requires_grad_()
    direction = draw(*theta.shape)
    (back,) = torch.autograd.grad((family.expectation(theta) * direction).sum(), theta)
    assert_close(back, (family.covariance(theta.detach()) @ direction.unsqueeze(-1)).squeeze(-1))
    eta = family.expectation(theta.detach()).requires_grad_()
    (back,) = torch.autograd.grad((family.natural(eta) * direction).sum(), eta)
    expected = torch.linalg.solve(family.covariance(theta.detach()), direction.unsqueeze(-1)).squeeze(-1)
    assert_close(back, expected, rtol=1e-7, atol=1e-8)


@every
def test_derivatives_of_natural_are_the_same_in_every_mode(name):
    """torch takes a custom function's forward derivative of a forward derivative for zero, without a word."""
    family, make, _ = CASES[name]
    theta = make()
    eta, back, forward = family.expectation(theta).detach(), torch.func.jacrev, torch.func.jacfwd
    second = back(back(family.natural))(eta)
    scale = float(second.abs().max())
    for modes in ((forward, forward), (forward, back), (back, forward)):
        found = modes[0](modes[1](family.natural))(eta)
        assert_close(found, second, rtol=1e-7, atol=1e-9 * max(scale, 1.0))
    if len(theta) <= 3:
        third = forward(second_of(family.natural, back))(eta)
        found = forward(second_of(family.natural, forward))(eta)
        assert_close(found, third, rtol=1e-6, atol=1e-8 * max(float(third.abs().max()), 1.0))


def second_of(function, jacobian):
    """The second derivative in one mode."""
    return jacobian(jacobian(function))


@every
def test_second_derivatives_flow_through_the_coordinates(name):
    """phi is convex with the Hessian Cov(T)^-1, and its third derivative is that of the inverse matrix."""
    family, make, _ = CASES[name]
    eta = family.expectation(make())
    hessian = torch.func.hessian(family.conjugate)(eta)
    assert_close(hessian, family.fisher_expectation(eta).dense(), rtol=1e-6, atol=1e-7)
    probe, moved = draw(len(eta)), eta.clone().requires_grad_()
    if name == "known covariance":
        return  # linear
    (slope,) = torch.autograd.grad(family.natural(moved) @ probe, moved, create_graph=True)
    (second,) = torch.autograd.grad(slope @ probe, moved)
    step = 1e-5 * eta.abs().min() * probe
    ends = [probe @ (family.fisher_expectation(eta + s * step) @ probe) for s in (1, -1)]
    assert_close(second @ step, (ends[0] - ends[1]) / 2, rtol=1e-3, atol=1e-9)


@every
def test_a_family_is_a_form_on_outputs(name):
    family, make, _ = CASES[name]
    theta = make(3)
    tangents = draw(*theta.shape)
    expected = family.covariance(theta)
    assert_close(family.mv(theta, tangents), (expected @ tangents.unsqueeze(-1)).squeeze(-1))
    root = family.root(theta)
    assert_close(root @ root.mT, expected, rtol=1e-8, atol=1e-9)


@every
def test_legendre_and_bregman(name):
    family, make, _ = CASES[name]
    theta, other = make(6).split(3)
    eta = family.expectation(theta)
    assert_close(family.log_partition(theta) + family.conjugate(eta), (theta * eta).sum(-1))
    kl = family.kl(theta, other)
    assert bool((kl > 0).all())
    assert_close(kl, family.bregman(other, theta))
    # from the other potential: phi(eta) - phi(eta') - theta' . (eta - eta')
    far = family.expectation(other)
    dual = family.conjugate(eta) - family.conjugate(far) - (other * (eta - far)).sum(-1)
    assert_close(kl, dual, rtol=1e-7, atol=1e-9)
    assert_close(family.kl(theta, theta), torch.zeros(3, dtype=F64), rtol=0, atol=1e-10)


@every
def test_the_divergence_is_the_fisher_metric_to_second_order(name):
    family, make, _ = CASES[name]
    theta = make()
    direction = 0.1 * draw(*theta.shape)
    lengths = direction @ (family.fisher(theta) @ direction) / 2
    errors = [abs(family.kl(theta, theta + s * direction) - s**2 * lengths).item() for s in (0.02, 0.01)]
    assert errors[1] <= errors[0] / 6 + 1e-15  # slope 3


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_densities_entropies_and_divergences_are_torch_s(name):
    family, make, peer = CASES[name]
    theta, other = make(2)
    assert peer is not None
    p, q = peer(theta), peer(other)
    x = family.sample(theta, 5, generator=GENERATOR)
    ours = family.log_prob(theta, x)
    values = x.squeeze(-1) if p.event_shape == () and p.batch_shape == () else x
    assert_close(ours, p.log_prob(values).reshape(5), rtol=1e-9, atol=1e-9)
    assert_close(family.entropy(theta).reshape(()), p.entropy().reshape(()), rtol=1e-9, atol=1e-10)
    assert_close(
        family.kl(theta, other).reshape(()), distributions.kl_divergence(p, q).reshape(()), rtol=1e-8, atol=1e-10
    )


@every
def test_draws_have_the_moments_of_their_statistics(name):
    family, make, _ = CASES[name]
    theta, count = make(2), 20_000
    statistics = family.statistics(family.sample(theta, count, generator=GENERATOR))
    assert statistics.shape == (count, *theta.shape)
    spread = (family.covariance(theta).diagonal(dim1=-2, dim2=-1) / count).sqrt()
    assert ((statistics.mean(0) - family.expectation(theta)).abs() < 4.8 * spread).all()


@every
def test_maximum_likelihood_has_the_mean_statistics(name):
    family, make, _ = CASES[name]
    x = family.sample(make(), 400, generator=GENERATOR)
    theta = family.mle(x)
    rtol = 1e-8 if theta.dtype == F64 else 2e-4  # class numbers are integers: the default dtype
    assert_close(family.expectation(theta), family.statistics(x).mean(0), rtol=rtol, atol=1e-9)
    nearby = theta + 1e-3 * draw(*theta.shape)
    assert family.log_prob(theta, x).mean() > family.log_prob(nearby, x).mean()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_normal_has_the_reference_values(d):
    family, case = MultivariateNormal(d), VECTORS[f"gaussian_d{d}"]
    mean, covariance = tensor(case["inputs"]["mu"]), tensor(case["inputs"]["Sigma"])
    expected = {name: tensor(case["expected"][name]) for name in ("theta", "eta", "psi", "phi", "I_theta", "I_eta")}
    theta = family.from_mean_covariance(mean, covariance)
    assert_close(theta, expected["theta"])
    assert_close(family.expectation(theta), expected["eta"])
    assert_close(family.log_partition(theta), expected["psi"])
    assert_close(family.conjugate(expected["eta"]), expected["phi"])
    assert_close(family.fisher(theta).dense(), expected["I_theta"])
    assert_close(family.fisher_expectation(expected["eta"]).dense(), expected["I_eta"])
    for found, given in zip(family.mean_covariance(theta), (mean, covariance), strict=True):
        assert_close(found, given)
    # natural gradient in one system = plain gradient in the other
    plain, dual = tensor(case["expected"]["grad_theta_F"]), tensor(case["expected"]["grad_eta_F"])
    assert_close(family.fisher(theta).inverse(0.0) @ plain, dual, rtol=1e-9, atol=1e-11)
    assert_close(family.fisher_expectation(expected["eta"]).inverse(0.0) @ dual, plain, rtol=1e-9, atol=1e-11)


def test_the_normal_s_operator_does_not_need_its_matrix():
    family = MultivariateNormal(60)  # the matrix would have 1890^2 entries
    root = torch.eye(60, dtype=F64) + 0.02 * draw(60, 60)
    operator = family.fisher(family.from_mean_covariance(draw(60), root @ root.mT))
    vector = draw(family.size)
    inverse = operator.inverse(0.0)
    assert inverse is not None
    assert_close(inverse @ (operator @ vector), vector, rtol=1e-9, atol=1e-10)
    assert operator.inverse(0.1) is None


def test_an_independence_model_is_made_of_signs():
    """theta_i = 1/2 log(mu_i / (1 - mu_i)), eta_i = 2 mu_i - 1 (Malago 2023)."""
    family, mu = Ising(2, [(0,), (1,)]), tensor([0.3, 0.8])
    assert_close(family.natural(2 * mu - 1), 0.5 * mu.logit())
    assert_close(family.fisher(0.5 * mu.logit()).dense(), torch.diag(4 * mu * (1 - mu)))


def test_ising_probabilities_are_normalised_over_its_states():
    family = Ising(3, values=(0, 1))
    theta = draw(6)
    assert family.states.shape == (8, 3)
    assert_close(family.log_prob(theta, family.states).exp(), family.probabilities(theta))
    assert_close(family.probabilities(theta).sum(), tensor(1.0))


def test_a_sparse_precision_is_a_graph():
    x = NORMAL.sample(normal_theta(), 500, generator=GENERATOR)
    theta = CHAIN.whole(CHAIN.mle(x))
    assert NORMAL.precision(theta)[0, 2] == 0
    full, (_, covariance) = NORMAL.mean_covariance(NORMAL.mle(x))[1], NORMAL.mean_covariance(theta)
    for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2)):  # Dempster 1972: the covariance agrees on the graph
        assert_close(covariance[i, j], full[i, j])


def test_a_product_s_matrix_has_blocks():
    theta = tensor([0.5, -1.0, 0.1, 0.2, -0.3])
    expected = torch.block_diag(Gamma().covariance(theta[:2]), Ising(2).covariance(theta[2:]))
    assert_close(PAIR.covariance(theta), expected)
    assert_close(PAIR.entropy(theta), Gamma().entropy(theta[:2]) + Ising(2).entropy(theta[2:]))


def test_an_operator_is_of_one_distribution():
    assert isinstance(Ising(2).fisher(tensor([0.1, 0.2, 0.3])), DenseOperator)
    for call in (Ising(2).fisher, MultivariateNormal(1).fisher_expectation):
        with pytest.raises(ValueError, match="one distribution"):
            call(torch.zeros(5, 3 if call.__self__.size == 3 else 2, dtype=F64))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MultivariateNormal(0), ("d is 0", ">= 1")),
        (lambda: Ising(0), ("n is 0", "variables")),
        (lambda: Ising(2, [(0, 2)]), ("(0, 2)", "0 to 1")),
        (lambda: Ising(2, [(0,), (0,)]), ("once",)),
        (lambda: Ising(2, values=(1, -1)), ("lower first",)),
        (lambda: Ising(2).statistics(tensor([0.0, 1.0])), ("neither",)),
        (lambda: Dirichlet(1), ("k is 1", ">= 2")),
        (lambda: NORMAL.expectation(torch.zeros(9)), ("outside", "positive definite")),
        (lambda: NORMAL.expectation(torch.zeros(8)), ("(8,)", "parameters of MultivariateNormal(3)")),
        (lambda: NORMAL.from_mean_covariance(torch.zeros(3), -torch.eye(3)), ("positive definite",)),
        (lambda: NORMAL.from_mean_covariance(torch.zeros(2), torch.eye(3)), ("(2,)", "3")),
        (lambda: NORMAL.mle(draw(2, 3)), ("positive definite",)),
        (lambda: Exponential().expectation(tensor([0.5])), ("outside", "negative")),
        (lambda: Exponential().natural(tensor([-1.0])), ("above 0",)),
        (lambda: Gamma().natural(tensor([2.0, 1.0])), ("E[log x]",)),
        (lambda: Gamma().sample(tensor([1.0, -1.0]), 0), ("n is 0", ">= 1")),
        (lambda: Ising(2).natural(tensor([1.0, 1.0, 1.0])), ("eta", "edge")),
        (lambda: SubModel(NORMAL, [0, 9]), ("free", "0 to 8")),
        (lambda: SubModel(NORMAL, [0], base=torch.ones(9)), ("base", "zero")),
        (lambda: Gamma().mle(torch.ones(0, 1)), ("empty",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_integers_are_not_parameters():
    with pytest.raises(TypeError, match="floating"):
        Ising(2).expectation(torch.zeros(3, dtype=torch.long))


def test_newton_stays_inside_from_far_away():
    theta = tensor([[-0.999, -5.0, 40.0, 0.0]]) + tensor([[0.0, 5.5, 0.0, 1e-3]])
    family = Dirichlet(4)
    assert_close(family.natural(family.expectation(theta)), theta, rtol=1e-6, atol=1e-6)
    assert math.isfinite(float(family.log_partition(theta)[0]))
