"""Densities, entropies and divergences by definition in 50 digits, of the numbers that a family was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

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

mp.mp.dps = 50
Numbers = list[Any]
KNOWN_MEAN, KNOWN_COVARIANCE = torch.tensor([300.0, -2.0]), torch.tensor([[2.0, 0.6], [0.6, 0.5]])


@dataclass(frozen=True)
class Case:
    """A family, how to draw a theta, and log p, entropy and KL of it by definition.

    theta: (spread, generator) -> (n,) in float64; spread is the logarithm to base ten of how extreme it may be.
    """

    family: ng.ExponentialFamily
    theta: Callable[[float, torch.Generator], Tensor]
    log_prob: Callable[[Numbers, Numbers], Any]
    entropy: Callable[[Numbers], Any]
    kl: Callable[[Numbers, Numbers], Any]


def exact(values: Tensor) -> Numbers:
    values = torch.view_as_real(values) if values.is_complex() else values
    return [mp.mpf(value) for value in values.double().reshape(-1).tolist()]


def normals(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Normals: everything from the mean and the precision, by matrices.


def normal_case(family: Any, moments: Callable[[Numbers], tuple[Any, Any]], theta: Any) -> Case:
    def log_prob(t: Numbers, x: Numbers) -> Any:
        mean, precision = moments(t)
        away = mp.matrix(x) - mean
        return (mp.log(mp.det(precision)) - len(x) * mp.log(2 * mp.pi) - (away.T * precision * away)[0]) / 2

    def entropy(t: Numbers) -> Any:
        mean, precision = moments(t)
        return (len(mean) * (1 + mp.log(2 * mp.pi)) - mp.log(mp.det(precision))) / 2

    def kl(t: Numbers, other: Numbers) -> Any:
        (mean, p), (goal, q) = moments(t), moments(other)
        both, away = q * p**-1, goal - mean
        trace = sum(both[i, i] for i in range(len(mean)))
        return (trace - len(mean) - mp.log(mp.det(both)) + (away.T * q * away)[0]) / 2

    return Case(family, theta, log_prob, entropy, kl)


def graph_moments(d: int, edges: list[tuple[int, int]]) -> Callable[[Numbers], tuple[Any, Any]]:
    def moments(t: Numbers) -> tuple[Any, Any]:
        precision = precision_of(t[d:], d, edges)
        return mp.lu_solve(precision, mp.matrix(t[:d])), precision

    return moments


def precision_of(entries: Numbers, d: int, edges: list[tuple[int, int]]) -> Any:
    found = mp.matrix(d, d)
    for i in range(d):
        found[i, i] = -2 * entries[i]
    for value, (i, j) in zip(entries[d:], edges, strict=True):
        found[i, j] = found[j, i] = -2 * value
    return found


def far_mean(d: int, spread: float, generator: torch.Generator) -> Tensor:
    return normals(d, generator=generator) * 10.0 ** (spread * torch.rand((), generator=generator).item())


def full_theta(family: ng.MultivariateNormal) -> Callable[[float, torch.Generator], Tensor]:
    def theta(spread: float, generator: torch.Generator) -> Tensor:
        root = torch.eye(family.d, dtype=torch.float64) + 0.3 * normals(family.d, family.d, generator=generator)
        return family.from_mean_covariance(far_mean(family.d, spread, generator), root @ root.mT)

    return theta


def sparse_theta(family: SparseNormal) -> Callable[[float, torch.Generator], Tensor]:
    def theta(spread: float, generator: torch.Generator) -> Tensor:
        mean, edges = far_mean(family.d, spread, generator), 0.3 * normals(len(family.pairs.edges), generator=generator)
        own = 1.5 + normals(family.d, generator=generator).abs()
        return family.join(mean, family.pairs.unpack(torch.cat([own, edges.clamp(-0.6, 0.6)])))

    return theta


def diagonal_theta(family: DiagonalNormal) -> Callable[[float, torch.Generator], Tensor]:
    def theta(spread: float, generator: torch.Generator) -> Tensor:
        deviation = normals(family.d, generator=generator).exp()
        return DiagonalNormal(family.d).from_mean_std(deviation * far_mean(family.d, spread, generator), deviation)

    return theta


def diagonal_moments(t: Numbers) -> tuple[Any, Any]:
    d = len(t) // 2
    return mp.matrix([-t[i] / (2 * t[d + i]) for i in range(d)]), mp.diag([-2 * half for half in t[d:]])


def known_mean_moments(t: Numbers) -> tuple[Any, Any]:
    return mp.matrix(exact(KNOWN_MEAN)), precision_of(t, 2, [(0, 1)])


def known_covariance_moments(t: Numbers) -> tuple[Any, Any]:
    sigma = mp.matrix(2, 2)
    for i in range(2):
        for j in range(2):
            sigma[i, j] = mp.mpf(KNOWN_COVARIANCE[i, j].item())
    return sigma * mp.matrix(t), sigma**-1


# Positive numbers and proportions.


def gamma_log_prob(t: Numbers, x: Numbers) -> Any:
    shape, rate = t[0] + 1, -t[1]
    return shape * mp.log(rate) - mp.loggamma(shape) + (shape - 1) * mp.log(x[0]) - rate * x[0]


def gamma_entropy(t: Numbers) -> Any:
    shape, rate = t[0] + 1, -t[1]
    return shape - mp.log(rate) + mp.loggamma(shape) + (1 - shape) * mp.digamma(shape)


def gamma_kl(t: Numbers, other: Numbers) -> Any:
    (a, b), (c, d) = ((each[0] + 1, -each[1]) for each in (t, other))
    return (a - c) * mp.digamma(a) - mp.loggamma(a) + mp.loggamma(c) + c * (mp.log(b) - mp.log(d)) + a * (d - b) / b


def dirichlet_log_prob(t: Numbers, x: Numbers) -> Any:
    alpha = [value + 1 for value in t]
    return (
        mp.loggamma(sum(alpha))
        - sum(mp.loggamma(a) for a in alpha)
        + sum((a - 1) * mp.log(y) for a, y in zip(alpha, x, strict=True))
    )


def beta_log_prob(t: Numbers, x: Numbers) -> Any:
    return dirichlet_log_prob(t, [x[0], 1 - x[0]])


def dirichlet_entropy(t: Numbers) -> Any:
    alpha = [value + 1 for value in t]
    total = sum(alpha)
    found = sum(mp.loggamma(a) for a in alpha) - mp.loggamma(total) + (total - len(t)) * mp.digamma(total)
    return found - sum((a - 1) * mp.digamma(a) for a in alpha)


def dirichlet_kl(t: Numbers, other: Numbers) -> Any:
    alpha, beta = [value + 1 for value in t], [value + 1 for value in other]
    found = mp.loggamma(sum(alpha)) - mp.loggamma(sum(beta))
    for a, b in zip(alpha, beta, strict=True):
        found += mp.loggamma(b) - mp.loggamma(a) + (a - b) * (mp.digamma(a) - mp.digamma(sum(alpha)))
    return found


def concentrations(k: int) -> Callable[[float, torch.Generator], Tensor]:
    def theta(spread: float, generator: torch.Generator) -> Tensor:
        return 10.0 ** (spread * torch.rand(k, generator=generator, dtype=torch.float64) - 1) - 1

    return theta


def shape_and_rate(spread: float, generator: torch.Generator) -> Tensor:
    first, second = (spread * torch.rand(2, generator=generator, dtype=torch.float64) - 1).tolist()
    return torch.tensor([10.0**first - 1, -(10.0**second)], dtype=torch.float64)


# Functions of such variables.


def changed_case(
    family: Any, source: Case, back: Callable[[Any], Any], log_slope: Callable[[Any], Any], mean: Any
) -> Case:
    """y = g(x): `back` is g^-1, log_slope(x) is log |d x / d y|, mean(theta) its expectation."""
    return Case(
        family,
        source.theta,
        lambda t, y: source.log_prob(t, [back(y[0])]) + log_slope(back(y[0])),
        lambda t: source.entropy(t) - mean(t),
        source.kl,
    )


def exponential_case() -> Case:
    return Case(
        ng.Exponential(),
        lambda spread, g: -(10.0 ** (spread * normals(1, generator=g))),
        lambda t, x: mp.log(-t[0]) + t[0] * x[0],
        lambda t: 1 - mp.log(-t[0]),
        lambda t, o: o[0] / t[0] - 1 - mp.log(o[0] / t[0]),
    )


def weibull_case(family: Weibull) -> Case:
    k = mp.mpf(family.shape)
    return changed_case(
        family,
        Case(family, lambda s, g: -(10.0 ** (normals(1, generator=g))), *definitions(exponential_case())),
        lambda y: y**k,
        lambda x: mp.log(k) + (k - 1) * mp.log(x) / k,
        lambda t: mp.log(k) - (k - 1) / k * (mp.euler + mp.log(-t[0])),
    )


def definitions(case: Case) -> tuple[Any, Any, Any]:
    return case.log_prob, case.entropy, case.kl


def log_normal_case() -> Case:
    source = normal_case(LogNormal(), diagonal_moments, lambda _, g: diagonal_theta(ng.Normal())(0.5, g))
    return changed_case(LogNormal(), source, mp.log, lambda x: -x, lambda t: t[0] / (2 * t[1]))


def inverse_gamma_case() -> Case:
    source = Case(InverseGamma(), shape_and_rate, gamma_log_prob, gamma_entropy, gamma_kl)
    return changed_case(
        InverseGamma(),
        source,
        lambda y: 1 / y,
        lambda x: 2 * mp.log(x),
        lambda t: 2 * (mp.digamma(t[0] + 1) - mp.log(-t[1])),
    )


def chi_square_case() -> Case:
    half = -mp.mpf(1) / 2
    return Case(
        ChiSquare(),
        concentrations(1),
        lambda t, x: gamma_log_prob([t[0], half], x),
        lambda t: gamma_entropy([t[0], half]),
        lambda t, o: gamma_kl([t[0], half], [o[0], half]),
    )


def inverse_gaussian_case() -> Case:
    def split(t: Numbers) -> tuple[Any, Any]:
        return mp.sqrt(t[1] / t[0]), -2 * t[1]

    def log_prob(t: Numbers, x: Numbers) -> Any:
        mean, shape = split(t)
        return mp.log(shape / (2 * mp.pi * x[0] ** 3)) / 2 - shape * (x[0] - mean) ** 2 / (2 * mean**2 * x[0])

    def entropy(t: Numbers) -> Any:
        mean, shape = split(t)
        mean_log = mp.log(mean) - mp.exp(2 * shape / mean) * mp.e1(2 * shape / mean)
        return (1 + mp.log(2 * mp.pi / shape)) / 2 + 3 * mean_log / 2

    def kl(t: Numbers, o: Numbers) -> Any:
        psi = [-2 * mp.sqrt(a * b) - mp.log(-2 * b) / 2 for a, b in (t, o)]
        mean, shape = split(t)
        return psi[1] - psi[0] - mean * (o[0] - t[0]) - (1 / mean + 1 / shape) * (o[1] - t[1])

    def theta(spread: float, g: torch.Generator) -> Tensor:
        return -(10.0 ** (spread * torch.rand(2, generator=g, dtype=torch.float64) - 1))

    return Case(InverseGaussian(), theta, log_prob, entropy, kl)


# Directions and matrices.


def sphere_case(d: int) -> Case:
    half = mp.mpf(d) / 2

    def length(t: Numbers) -> Any:
        return mp.sqrt(sum(value**2 for value in t))

    def psi(t: Numbers) -> Any:
        return half * mp.log(2 * mp.pi) + mp.log(mp.besseli(half - 1, length(t))) - (half - 1) * mp.log(length(t))

    def ratio(t: Numbers) -> Any:  # A(kappa) / kappa
        return mp.besseli(half, length(t)) / mp.besseli(half - 1, length(t)) / length(t)

    def dot(a: Numbers, b: Numbers) -> Any:
        return sum(x * y for x, y in zip(a, b, strict=True))

    return Case(
        VonMisesFisher(d),
        lambda spread, g: normals(d, generator=g) * 10.0 ** (spread * torch.rand((), generator=g).item() - 1),
        lambda t, x: dot(t, x) - psi(t),
        lambda t: psi(t) - dot(t, t) * ratio(t),
        lambda t, o: psi(o) - psi(t) - ratio(t) * (dot(t, o) - dot(t, t)),
    )


def wishart_case() -> Case:
    family = Wishart(2)

    def split(t: Numbers) -> tuple[Any, Any]:
        return t[0] + mp.mpf(3) / 2, mp.matrix([[-t[1], -t[3]], [-t[3], -t[2]]])

    def psi(t: Numbers) -> Any:
        a, rate = split(t)
        return mp.log(mp.pi) / 2 + mp.loggamma(a) + mp.loggamma(a - mp.mpf(1) / 2) - a * mp.log(mp.det(rate))

    def moments(t: Numbers) -> Numbers:
        a, rate = split(t)
        mean = a * rate**-1
        log_det = mp.digamma(a) + mp.digamma(a - mp.mpf(1) / 2) - mp.log(mp.det(rate))
        return [log_det, mean[0, 0], mean[1, 1], 2 * mean[0, 1]]

    def dot(a: Numbers, b: Numbers) -> Any:
        return sum(x * y for x, y in zip(a, b, strict=True))

    def log_prob(t: Numbers, x: Numbers) -> Any:
        cross = (x[1] + x[2]) / 2
        return dot(t, [mp.log(x[0] * x[3] - cross**2), x[0], x[3], 2 * cross]) - psi(t)

    def theta(spread: float, g: torch.Generator) -> Tensor:
        root = torch.eye(2, dtype=torch.float64) + 0.3 * normals(2, 2, generator=g)
        edge = 10.0 ** (spread * torch.rand((), generator=g, dtype=torch.float64))  # less: W is nearly singular
        return family.from_degrees_scale(1 + 2 * edge, root @ root.mT)

    def kl(t: Numbers, o: Numbers) -> Any:
        return psi(o) - psi(t) - dot(moments(t), [b - a for a, b in zip(t, o, strict=True)])

    return Case(family, theta, log_prob, lambda t: psi(t) - dot(t, moments(t)), kl)


def complex_case() -> Case:
    family = ComplexNormal(2)

    def split(t: Numbers) -> tuple[Any, Any]:
        cross = mp.mpc(-t[6], -t[7])
        precision = mp.matrix([[-t[4], cross], [mp.conj(cross), -t[5]]])
        return mp.lu_solve(precision, mp.matrix([mp.mpc(t[0], t[2]) / 2, mp.mpc(t[1], t[3]) / 2])), precision

    def log_det(matrix: Any) -> Any:
        return mp.log(mp.re(mp.det(matrix)))

    def log_prob(t: Numbers, x: Numbers) -> Any:
        mean, precision = split(t)
        away = mp.matrix([mp.mpc(x[0], x[1]), mp.mpc(x[2], x[3])]) - mean
        return log_det(precision) - 2 * mp.log(mp.pi) - mp.re((away.H * precision * away)[0])

    def kl(t: Numbers, o: Numbers) -> Any:
        (mean, p), (goal, q) = split(t), split(o)
        both, away = q * p**-1, goal - mean
        return mp.re(both[0, 0] + both[1, 1]) - 2 - log_det(both) + mp.re((away.H * q * away)[0])

    def theta(spread: float, g: torch.Generator) -> Tensor:
        parts = normals(2, 2, 2, generator=g)
        root = torch.eye(2, dtype=torch.float64) + 0.3 * torch.complex(parts[0], parts[1])
        mean = torch.complex(far_mean(2, spread, g), far_mean(2, spread, g))
        return family.from_mean_covariance(mean, root @ root.mH)

    return Case(family, theta, log_prob, lambda t: 2 * (1 + mp.log(mp.pi)) - log_det(split(t)[1]), kl)


# Classes, bits and counts.


def moderate_log(_: float, g: torch.Generator) -> Tensor:
    return -(10.0 ** (2 * torch.rand(1, generator=g, dtype=torch.float64) - 1.3))


def sum_entropy(log_first: Any, ratio: Callable[[int], Any], start: int, mean: Any) -> Any:
    """-sum p log p from p(start) and p(x + 1) / p(x)."""
    log_p, x, found = log_first, start, mp.mpf(0)
    while x < mean or log_p > -60:
        found -= mp.exp(log_p) * log_p
        log_p, x = log_p + mp.log(ratio(x)), x + 1
    return found


def negative_binomial_case(family: NegativeBinomial) -> Case:
    r = mp.mpf(family.failures)

    def psi(t: Numbers) -> Any:
        return -r * mp.log(1 - mp.exp(t[0]))

    def mean(t: Numbers) -> Any:
        return r / (mp.exp(-t[0]) - 1)

    return Case(
        family,
        moderate_log,
        lambda t, x: mp.loggamma(x[0] + r) - mp.loggamma(x[0] + 1) - mp.loggamma(r) + t[0] * x[0] - psi(t),
        lambda t: sum_entropy(-psi(t), lambda x: mp.exp(t[0]) * (x + r) / (x + 1), 0, mean(t)),
        lambda t, o: psi(o) - psi(t) - mean(t) * (o[0] - t[0]),
    )


def logarithmic_case() -> Case:
    def psi(t: Numbers) -> Any:
        return mp.log(-mp.log(1 - mp.exp(t[0])))

    def mean(t: Numbers) -> Any:
        return 1 / (mp.exp(-t[0]) - 1) / -mp.log(1 - mp.exp(t[0]))

    return Case(
        Logarithmic(),
        moderate_log,
        lambda t, x: t[0] * x[0] - mp.log(x[0]) - psi(t),
        lambda t: sum_entropy(t[0] - psi(t), lambda x: mp.exp(t[0]) * mp.mpf(x) / (x + 1), 1, mean(t)),
        lambda t, o: psi(o) - psi(t) - mean(t) * (o[0] - t[0]),
    )


def shares(t: Numbers) -> Numbers:
    top = max(t)
    parts = [mp.exp(value - top) for value in t]
    return [part / sum(parts) for part in parts]


def classes_entropy(t: Numbers) -> Any:
    return -sum((p * mp.log(p) for p in shares(t) if p), mp.mpf(0))


def classes_kl(t: Numbers, other: Numbers) -> Any:
    pairs = zip(shares(t), shares(other), strict=True)
    return sum((p * mp.log(p / q) if q else mp.inf for p, q in pairs if p), mp.mpf(0))


def multinomial_log_prob(t: Numbers, x: Numbers) -> Any:
    found = mp.loggamma(sum(x) + 1) - sum(mp.loggamma(count + 1) for count in x)
    return found + sum((c * mp.log(p) for c, p in zip(x, shares(t), strict=True) if c), mp.mpf(0))


def multinomial_entropy(trials: int) -> Callable[[Numbers], Any]:
    def entropy(t: Numbers) -> Any:
        found = trials * classes_entropy(t) - mp.loggamma(trials + 1)
        for p in shares(t):
            for c in range(trials + 1):
                found += mp.binomial(trials, c) * p**c * (1 - p) ** (trials - c) * mp.loggamma(c + 1)
        return found

    return entropy


def per_bit(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: sum(function(*([mp.mpf(0), value] for value in each)) for each in zip(*given, strict=True))


def bits_log_prob(t: Numbers, x: Numbers) -> Any:
    return sum(mp.log(shares([mp.mpf(0), value])[int(bit)]) for value, bit in zip(t, x, strict=True))


def poisson_log_prob(t: Numbers, x: Numbers) -> Any:
    return sum(c * r - mp.exp(r) - mp.loggamma(c + 1) for r, c in zip(t, x, strict=True))


def poisson_entropy(t: Numbers) -> Any:
    found = mp.mpf(0)
    for r in t:
        rate = mp.exp(r)
        if rate > 300:  # by Stirling's formula, as far as float64 can tell
            series = (-1 / mp.mpf(12), -1 / mp.mpf(24), -19 / mp.mpf(360), -9 / mp.mpf(80))
            found += (mp.log(2 * mp.pi * mp.e * rate)) / 2 + sum(c * rate**-k for k, c in enumerate(series, 1))
            continue
        for c in range(int(rate + 40 * mp.sqrt(rate) + 60)):
            log_p = c * r - rate - mp.loggamma(c + 1)
            found -= mp.exp(log_p) * log_p
    return found


def poisson_kl(t: Numbers, other: Numbers) -> Any:
    return sum(mp.exp(r) * (r - s) + mp.exp(s) - mp.exp(r) for r, s in zip(t, other, strict=True))


def logits(k: int) -> Callable[[float, torch.Generator], Tensor]:
    return lambda spread, generator: 4 * spread * normals(k, generator=generator)


def product_case() -> Case:
    """A gamma beside a normal."""
    first, second = CASES["gamma"], CASES["normal"]
    return Case(
        ng.Product((first.family, 1), (second.family, 1)),
        lambda spread, generator: torch.cat([each.theta(spread, generator) for each in (first, second)]),
        lambda t, x: first.log_prob(t[:2], x[:1]) + second.log_prob(t[2:], x[1:]),
        lambda t: first.entropy(t[:2]) + second.entropy(t[2:]),
        lambda t, o: first.kl(t[:2], o[:2]) + second.kl(t[2:], o[2:]),
    )


def sub_model_case() -> Case:
    """A normal in three dimensions without the pair (0, 2)."""
    whole, sparse = ng.MultivariateNormal(3), CASES["sparse normal"]
    free = [0, 1, 2, 3, 4, 5, 6, 8]
    base = torch.zeros(9, dtype=torch.float64).index_fill(0, torch.tensor([3, 4, 5]), -0.5)
    return Case(ng.SubModel(whole, free, base), sparse.theta, sparse.log_prob, sparse.entropy, sparse.kl)


full, sparse = ng.MultivariateNormal(3), SparseNormal(3, [(0, 1), (1, 2)])
every = [(0, 1), (0, 2), (1, 2)]
CASES: dict[str, Case] = {
    "normal": normal_case(ng.Normal(), diagonal_moments, diagonal_theta(ng.Normal())),
    "diagonal normal": normal_case(DiagonalNormal(2), diagonal_moments, diagonal_theta(DiagonalNormal(2))),
    "multivariate normal": normal_case(full, graph_moments(3, every), full_theta(full)),
    "sparse normal": normal_case(sparse, graph_moments(3, [(0, 1), (1, 2)]), sparse_theta(sparse)),
    "fixed mean": normal_case(
        FixedMeanNormal(KNOWN_MEAN),
        known_mean_moments,
        lambda _, g: torch.cat([-0.5 - normals(2, generator=g).abs(), normals(1, generator=g).clamp(-0.4, 0.4)]),
    ),
    "fixed covariance": normal_case(
        FixedCovarianceNormal(KNOWN_COVARIANCE), known_covariance_moments, lambda s, g: far_mean(2, s, g)
    ),
    "exponential": exponential_case(),
    "gamma": Case(ng.Gamma(), shape_and_rate, gamma_log_prob, gamma_entropy, gamma_kl),
    "beta": Case(ng.Beta(), concentrations(2), beta_log_prob, dirichlet_entropy, dirichlet_kl),
    "dirichlet": Case(ng.Dirichlet(3), concentrations(3), dirichlet_log_prob, dirichlet_entropy, dirichlet_kl),
    "bits": Case(ng.Bernoulli(2), logits(2), bits_log_prob, per_bit(classes_entropy), per_bit(classes_kl)),
    "classes": Case(
        ng.Categorical(4), logits(4), lambda t, x: mp.log(shares(t)[int(x[0])]), classes_entropy, classes_kl
    ),
    "multinomial": Case(
        ng.Multinomial(5, 3), logits(3), multinomial_log_prob, multinomial_entropy(5), lambda t, o: 5 * classes_kl(t, o)
    ),
    "counts": Case(
        ng.Poisson(2),
        lambda s, g: 2 * s * normals(2, generator=g).clamp(-1, 1),
        poisson_log_prob,
        poisson_entropy,
        poisson_kl,
    ),
}
CASES |= {
    "log-normal": log_normal_case(),
    "inverse gamma": inverse_gamma_case(),
    "weibull": weibull_case(Weibull(0.7)),
    "rayleigh": weibull_case(Rayleigh()),
    "chi-square": chi_square_case(),
    "inverse gaussian": inverse_gaussian_case(),
    "circle": sphere_case(2),
    "sphere": sphere_case(5),
    "scatter": wishart_case(),
    "complex": complex_case(),
    "negative binomial": negative_binomial_case(NegativeBinomial(2.5)),
    "geometric": negative_binomial_case(Geometric()),
    "logarithmic": logarithmic_case(),
}
CASES["product"], CASES["sub-model"] = product_case(), sub_model_case()
