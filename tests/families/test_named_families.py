"""What textbooks say of single families: special cases of one another, far parameters, coordinates by name."""

from __future__ import annotations

import math

import pytest
import torch
from models import F64, draw
from torch import Tensor, distributions
from torch.testing import assert_close

from natgrad.families import (
    ChiSquare,
    ComplexNormal,
    Exponential,
    ExponentialFamily,
    Gamma,
    Geometric,
    InverseGamma,
    InverseGaussian,
    Logarithmic,
    LogNormal,
    NegativeBinomial,
    Rayleigh,
    SubModel,
    VonMisesFisher,
    Weibull,
    Wishart,
)

GENERATOR = torch.Generator().manual_seed(0)


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def scipy_cases(stats) -> list[tuple[ExponentialFamily, Tensor, object]]:
    scale = tensor([[2.0, 0.4], [0.4, 0.7]])
    scatter, sphere = Wishart(2), tensor([1.0, -2.0, 0.5])
    kappa = float(sphere.norm())
    return [
        (LogNormal(), LogNormal().from_mean_std(tensor(0.4), tensor(0.7)), stats.lognorm(0.7, scale=math.exp(0.4))),
        (InverseGamma(), tensor([1.3, -0.7]), stats.invgamma(2.3, scale=0.7)),
        (Weibull(1.7), Weibull(1.7).from_scale(tensor([0.8])), stats.weibull_min(1.7, scale=0.8)),
        (Rayleigh(), tensor([-0.5 / 1.3**2]), stats.rayleigh(scale=1.3)),
        (ChiSquare(), tensor([0.7]), stats.chi2(3.4)),
        (
            InverseGaussian(),
            InverseGaussian().from_mean_shape(tensor(1.5), tensor(2.5)),
            stats.invgauss(1.5 / 2.5, scale=2.5),
        ),
        (NegativeBinomial(2.5), tensor([0.6]).log(), stats.nbinom(2.5, 0.4)),
        (Geometric(), tensor([0.6]).log(), stats.geom(0.4, loc=-1)),
        (Logarithmic(), tensor([0.6]).log(), stats.logser(0.6)),
        (VonMisesFisher(3), sphere, stats.vonmises_fisher((sphere / kappa).numpy(), kappa)),
        (scatter, scatter.from_degrees_scale(tensor(4.5), scale), stats.wishart(4.5, scale.numpy())),
    ]


def test_densities_and_entropies_are_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    for family, theta, peer in scipy_cases(stats):
        x = family.sample(theta, 20, generator=GENERATOR)
        counts = isinstance(family, NegativeBinomial | Logarithmic)
        log_density = peer.logpmf if counts else peer.logpdf  # type: ignore[attr-defined]
        values = x.squeeze(-1) if x.shape[-1] == 1 else x
        if isinstance(family, Wishart):
            values = x.movedim(0, -1)
        expected = torch.as_tensor(log_density(values.numpy())).reshape(20)
        assert_close(family.log_prob(theta, x), expected, rtol=1e-9, atol=1e-9, msg=repr(family))
        if not counts:  # SciPy's sums take seconds
            assert_close(family.entropy(theta), tensor(float(peer.entropy())), rtol=1e-9, atol=1e-9)  # type: ignore[attr-defined]


SAME = {
    "a Weibull of shape one waits": (Weibull(1.0), tensor([-0.7]), Exponential(), tensor([-0.7])),
    "chi-square is a gamma": (ChiSquare(), tensor([0.7]), Gamma(), tensor([0.7, -0.5])),
    "one failure": (NegativeBinomial(1.0), tensor([-0.7]), Geometric(), tensor([-0.7])),
    "Rayleigh": (Rayleigh(), tensor([-0.7]), Weibull(2.0), tensor([-0.7])),
}


@pytest.mark.parametrize("name", SAME)
def test_special_cases_agree(name):
    family, theta, whole, point = SAME[name]
    x = family.sample(theta, 10, generator=GENERATOR)
    assert_close(family.log_prob(theta, x), whole.log_prob(point, x))
    assert_close(family.entropy(theta), whole.entropy(point), rtol=1e-10, atol=1e-12)


def test_scatter_of_one_variable_is_a_gamma():
    theta = tensor([0.7, -0.4])  # a = theta_0 + 1
    x = Gamma().sample(theta, 10, generator=GENERATOR)
    assert_close(Wishart(1).log_prob(theta, x.unsqueeze(-1)), Gamma().log_prob(theta, x))
    assert_close(Wishart(1).entropy(theta), Gamma().entropy(theta))
    assert_close(Wishart(1).covariance(theta), Gamma().covariance(theta))


def test_scatter_matrices_are_sums_of_squares_of_normals():
    """E[W] and the covariance of its entries, nu (V_ik V_jl + V_il V_jk), at whole degrees of freedom."""
    family, scale = Wishart(2), tensor([[2.0, 0.4], [0.4, 0.7]])
    theta = family.from_degrees_scale(tensor(3.0), scale)
    for found, given in zip(family.degrees_scale(theta), (tensor(3.0), scale), strict=True):
        assert_close(found, given)
    moments = family.covariance(theta)[1:, 1:]
    v00, v11, v01 = 2.0, 0.7, 0.4
    entries = [[2 * v00**2, 2 * v01**2, 4 * v00 * v01], [2 * v01**2, 2 * v11**2, 4 * v11 * v01]]
    entries.append([4 * v00 * v01, 4 * v11 * v01, 4 * (v00 * v11 + v01**2)])
    assert_close(moments, 3 * tensor(entries))


def test_the_scatter_operator_has_its_inverse():
    family = Wishart(12)
    root = torch.eye(12, dtype=F64) + 0.1 * draw(12, 12)
    theta = family.from_degrees_scale(tensor(14.5), root @ root.mT)
    operator, vector = family.fisher(theta), draw(family.size)
    inverse = operator.inverse(0.0)
    assert inverse is not None
    assert_close(inverse @ (operator @ vector), vector, rtol=1e-8, atol=1e-9)
    assert_close(family.natural(family.expectation(theta)), theta, rtol=1e-9, atol=1e-9)


def test_directions_on_the_circle_are_torch_s():
    theta = tensor([[1.0, 2.0], [-0.2, 0.1], [30.0, -40.0]])
    angle = torch.atan2(theta[:, 1], theta[:, 0])
    x = VonMisesFisher(2).sample(theta, 5, generator=GENERATOR)
    peer = distributions.VonMises(angle, theta.norm(dim=1))
    assert_close(
        VonMisesFisher(2).log_prob(theta, x), peer.log_prob(torch.atan2(x[..., 1], x[..., 0])), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("d", [2, 3, 7, 60])
def test_uniform_directions(d):
    """psi is smooth at zero: its second and fourth derivatives are those of E[exp(theta . x)] over the sphere."""
    family, zero = VonMisesFisher(d), torch.zeros(d, dtype=F64)
    area = 2 * math.pi ** (d / 2) / math.gamma(d / 2)
    assert_close(family.entropy(zero), tensor(math.log(area)))
    assert_close(family.covariance(zero), torch.eye(d, dtype=F64) / d)
    assert_close(family.natural(zero), zero)
    along = lambda t: family.log_partition(torch.cat([t.unsqueeze(0), zero[1:]]))  # noqa: E731
    fourth = along
    for _ in range(4):
        fourth = torch.func.grad(fourth)
    assert_close(fourth(zero[0]), tensor(3 / (d * (d + 2)) - 3 / d**2))
    ends = [family.log_partition(s * torch.eye(d, dtype=F64)[0]) for s in (1 - 1e-6, 1 + 1e-6)]
    assert_close(ends[1] - ends[0], 2e-6 * family.expectation(torch.eye(d, dtype=F64)[0])[0], rtol=1e-5, atol=0)
    x = family.sample(zero, 4000, generator=GENERATOR)
    assert bool((x.mean(0).abs() < 5 / (4000 * d) ** 0.5).all())


@pytest.mark.parametrize("kappa", [1e-6, 0.9, 30.0, 1e4, 1e8])
@pytest.mark.parametrize("d", [2, 3, 40])
def test_far_concentrations(d, kappa):
    family, mean = VonMisesFisher(d), torch.nn.functional.normalize(draw(d), dim=0)
    theta = kappa * mean
    eta = family.expectation(theta)
    if kappa < 1e6:  # beyond, the length of eta has no digit of it
        assert_close(family.natural(eta), theta, rtol=1e-5, atol=1e-9)
    else:  # a normal of variance 1 / kappa in d - 1 dimensions
        expected = (d - 1) / 2 * math.log(2 * math.pi * math.e / kappa)
        assert_close(family.entropy(theta), tensor(expected), rtol=1e-6, atol=1e-6)
    x = family.sample(theta, 2000, generator=GENERATOR)
    spread = (family.covariance(theta).diagonal() / 2000).sqrt()
    assert bool(((x.mean(0) - eta).abs() < 5 * spread + 1e-14).all())


def test_entropies_of_widely_spread_counts_are_their_sums():
    for family, p in ((NegativeBinomial(0.3), 0.999), (NegativeBinomial(12.5), 0.99), (Logarithmic(), 0.999)):
        theta, x = tensor([p]).log(), torch.arange(family.least, 60_000, dtype=F64).unsqueeze(1)
        log_p = family.log_prob(theta, x)
        assert_close(log_p.exp().sum(), tensor(1.0), rtol=1e-12, atol=0)
        assert_close(family.entropy(theta), -(log_p.exp() * log_p).sum(), rtol=1e-11, atol=0)
        assert_close(family.natural(family.expectation(theta)), theta, rtol=1e-9, atol=0)


def test_rare_and_frequent_logarithmic_counts():
    family, log_p = Logarithmic(), tensor([[-700.0], [-40.0], [-20.0], [-1e-12]])
    assert_close(family.expectation(log_p)[:3], torch.ones(3, 1, dtype=F64), rtol=1e-8, atol=0)
    x = family.sample(log_p, 50, generator=GENERATOR)
    assert bool((x[:, :2] == 1).all())
    assert bool(torch.isfinite(family.log_prob(log_p, x)).all())
    assert bool(torch.isfinite(family.entropy(log_p)).all())
    with pytest.raises(ValueError, match="above 1"):
        family.natural(tensor([1.0]))


def test_complex_normals_have_no_preferred_phase():
    family = ComplexNormal(2)
    covariance = torch.tensor([[2.0, 0.5 - 0.8j], [0.5 + 0.8j, 1.5]], dtype=torch.complex128)
    mean = torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128)
    theta = family.from_mean_covariance(mean, covariance)
    for found, given in zip(family.mean_covariance(theta), (mean, covariance), strict=True):
        assert_close(found, given)
    away = family.sample(theta, 40_000, generator=GENERATOR) - mean
    assert_close(away.mT @ away.conj() / 40_000, covariance, rtol=0, atol=0.06)
    assert_close(away.mT @ away / 40_000, torch.zeros_like(covariance), rtol=0, atol=0.06)
    x = torch.tensor([0.3 - 0.1j, 0.2 + 1.0j], dtype=torch.complex128)
    gap = (x - mean).conj() @ torch.linalg.inv(covariance) @ (x - mean)
    log_det = torch.linalg.det(covariance).real.log()
    assert_close(family.log_prob(theta, x), -gap.real - log_det - 2 * math.log(math.pi))


def test_complex_normals_of_mean_zero_are_a_sub_model():
    family = ComplexNormal(2)
    base = torch.zeros(8, dtype=F64).index_fill(0, torch.tensor([4, 5]), -1.0)
    centred, theta = SubModel(family, range(4, 8), base), tensor([-1.0, -2.0, 0.3, -0.4])
    assert_close(family.mean_covariance(centred.whole(theta))[0], torch.zeros(2, dtype=torch.complex128))
    assert_close(centred.natural(centred.expectation(theta)), theta, rtol=1e-8, atol=1e-8)


def test_maximum_likelihood_far_off_the_origin():
    """The spread of examples a thousand deviations away is not lost in the mean of their squares."""
    x = 1000 + torch.complex(draw(300, 2), draw(300, 2, seed=1))
    mean, covariance = ComplexNormal(2).mean_covariance(ComplexNormal(2).mle(x))
    away = x - x.mean(0)
    assert_close(mean, x.mean(0))
    assert_close(covariance, away.mT @ away.conj() / 300, rtol=1e-8, atol=1e-8)
    y = (300 + draw(300, 1)).exp()
    assert_close(LogNormal().mean_std(LogNormal().mle(y))[1], y.log().std(correction=0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draws_of_extreme_parameters_lie_in_the_support(dtype):
    cases = [
        (LogNormal(), LogNormal().from_mean_std(tensor(0.0), tensor(300.0))),
        (InverseGamma(), tensor([-0.99, -1.0])),
        (Weibull(0.01), tensor([-1.0])),
        (InverseGaussian(), InverseGaussian().from_mean_shape(tensor(1e6), tensor(1e-6))),
        (ChiSquare(), tensor([-0.999])),
        (VonMisesFisher(3), tensor([1e6, 0.0, 0.0])),
        (Wishart(3), Wishart(3).from_degrees_scale(tensor(2.01), torch.eye(3, dtype=F64))),
        (NegativeBinomial(0.01), tensor([-1e-4])),
        (Logarithmic(), tensor([-1e-6])),
    ]
    for family, theta in cases:
        x = family.sample(theta.to(dtype), 200, generator=GENERATOR)
        assert bool(torch.isfinite(family.statistics(x)).all()), repr(family)
        assert bool(torch.isfinite(family.log_prob(theta.to(dtype), x)).all()), repr(family)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Weibull(0.0), ("shape is 0",)),
        (lambda: NegativeBinomial(-1), ("failures is -1",)),
        (lambda: VonMisesFisher(1), ("d is 1", ">= 2")),
        (lambda: Wishart(0), ("d is 0",)),
        (lambda: ComplexNormal(0), ("d is 0",)),
        (lambda: LogNormal().statistics(tensor([0.0])), ("x > 0",)),
        (lambda: InverseGaussian().log_prob(tensor([-1.0, -1.0]), tensor([-1.0])), ("x > 0",)),
        (lambda: InverseGaussian().natural(tensor([2.0, 0.5])), ("1 / shape",)),
        (lambda: InverseGaussian().from_mean_shape(tensor(-1.0), tensor(1.0)), ("mean is -1",)),
        (lambda: NegativeBinomial(2).statistics(tensor([1.5])), ("whole numbers >= 0",)),
        (lambda: Logarithmic().statistics(tensor([0.0])), ("whole numbers >= 1",)),
        (lambda: NegativeBinomial(2).natural(tensor([0.0])), ("above 0",)),
        (lambda: VonMisesFisher(3).statistics(tensor([1.0, 1.0, 0.0])), ("length one",)),
        (lambda: VonMisesFisher(2).natural(tensor([0.6, 0.8])), ("shorter than one",)),
        (lambda: Wishart(2).statistics(tensor([[1.0, 0.5], [0.2, 1.0]])), ("symmetric",)),
        (lambda: Wishart(2).statistics(tensor([[1.0, 2.0], [2.0, 1.0]])), ("positive definite",)),
        (lambda: Wishart(2).natural(tensor([0.1, 1.0, 1.0, 0.0])), ("E[log det x]",)),
        (lambda: Wishart(2).from_degrees_scale(tensor(1.0), torch.eye(2)), ("degrees is 1", "above d - 1 = 1")),
        (lambda: ComplexNormal(2).statistics(tensor([1.0, 2.0])), ("torch.float64", "complex")),
        (lambda: ComplexNormal(1).natural(tensor([1.0, 0.0, 0.5])), ("positive definite",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_real_moments_are_not_those_of_a_complex_normal():
    with pytest.raises(TypeError, match="complex tensor"):
        ComplexNormal(1).from_mean_covariance(tensor([0.0]), tensor([[1.0]]))
