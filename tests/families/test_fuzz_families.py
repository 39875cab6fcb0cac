"""Families against their definitions in 50 digits: any family, parameters, batch shape, dtype."""

from __future__ import annotations

import pytest
import torch
from family_references import CASES, exact
from hypothesis import given
from hypothesis import strategies as st
from models import tensor
from torch import Tensor
from torch.testing import assert_close

from natgrad.families import Categorical, Dirichlet, Multinomial, SubModel

DTYPES = {"float32": torch.float32, "float64": torch.float64}
BATCHES = [(), (3,), (2, 1, 2), (0,)]

cases = st.sampled_from(sorted(CASES))
dtypes = st.sampled_from(sorted(DTYPES))
seeds = st.integers(0, 2**31)
SPREADS = st.floats(0.1, 5.0)
NEAR = st.floats(-4.0, 0.5)


def near_theta(theta: Tensor, far: Tensor, size: float) -> Tensor:
    """A point on the straight line to another one: natural parameters are a convex set."""
    return theta + min(1.0, 10.0**size) * (far - theta)


def close_to(found: Tensor, expected, allowed: float, what: str) -> None:
    error = abs(float(found) - float(expected))
    assert error <= allowed, f"{what}: {float(found)!r}, by definition {float(expected)!r}, error {error:.2g}"


@given(name=cases, dtype=dtypes, spread=SPREADS, size=NEAR, seed=seeds)
def test_fuzz_log_prob_entropy_and_kl_are_those_of_the_given_numbers(name, dtype, spread, size, seed):
    """The error is that of rounding theta once more, for however extreme numbers: means 1e5 deviations off too."""
    case, generator = CASES[name], torch.Generator().manual_seed(seed)
    eps = torch.finfo(DTYPES[dtype]).eps
    theta = case.theta(spread, generator).to(DTYPES[dtype])
    other = near_theta(theta.double(), case.theta(spread, generator), size).to(DTYPES[dtype])
    if not bool(case.family.inside(torch.stack([theta, other])).all()):
        return  # a concentration that rounds to zero
    numbers, goal, far = exact(theta), exact(other), 1e-12 + 1e-14 * 10.0**spread
    entropy = case.entropy(numbers)
    close_to(case.family.entropy(theta), entropy, 200 * eps * (1 + abs(float(entropy))), "entropy")
    divergence = case.kl(numbers, goal)
    tight = 100 * eps * (float(divergence) + float(divergence) ** 0.5 * (1 + abs_logits(name, theta, other)))
    close_to(case.family.kl(theta, other), divergence, tight + far * float(divergence) ** 0.5 + 1e-18, "kl")
    x = case.family.sample(theta, 1, generator=generator)[0]
    log_p = case.log_prob(numbers, exact(x))
    close_to(
        case.family.log_prob(theta, x),
        log_p,
        500 * eps * (1 + abs(float(log_p))) + rounding_of(name, x, eps) + far,
        "log p",
    )


def abs_logits(name: str, theta: Tensor, other: Tensor) -> float:
    """Families that work in their own dtype know a logit to |logit| eps."""
    own = name in ("bits", "classes", "multinomial", "counts")
    return float(torch.stack([theta, other]).abs().amax()) if own else 1.0


def rounding_of(name: str, x: Tensor, eps: float) -> float:
    """What the logarithm of a count does not know of it, in float32: sqrt(count) log(count) eps."""
    return 30 * eps * float(x.double().amax()) ** 0.5 * 20 if name == "counts" else 0.0


@given(name=cases, dtype=dtypes, batch=st.sampled_from(BATCHES), seed=seeds)
def test_fuzz_batches_are_their_rows(name, dtype, batch, seed):
    case, generator = CASES[name], torch.Generator().manual_seed(seed)
    count = torch.Size(batch).numel()
    rows = [case.theta(1.0, generator).to(DTYPES[dtype]) for _ in range(max(1, count))]
    theta = torch.stack(rows)[:count].view(*batch, len(rows[0]))
    family = case.family
    x = family.sample(theta, 4, generator=generator)
    assert x.shape[: 1 + len(batch)] == (4, *batch)
    found = [family.log_prob(theta, x), family.entropy(theta), family.kl(theta, theta.flip(0) if batch else theta)]
    eta = family.expectation(theta)
    assert [value.shape for value in found] == [(4, *batch), batch, batch]
    assert all(value.dtype == DTYPES[dtype] for value in (*found, eta))
    flat, places = eta.reshape(count, theta.shape[-1]), x.reshape(4, count, *x.shape[1 + len(batch) :])
    for k, row in enumerate(rows[:count]):
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-10}
        assert_close(flat[k], family.expectation(row), **tolerance)
        assert_close(found[0].reshape(4, count)[:, k], family.log_prob(row, places[:, k]), **tolerance)
        assert_close(found[1].reshape(count)[k], family.entropy(row), **tolerance)


@given(name=cases, seed=seeds)
def test_fuzz_coordinates_round_trip_and_the_metric_is_the_second_derivative_of_kl(name, seed):
    case, generator = CASES[name], torch.Generator().manual_seed(seed)
    theta, family = case.theta(0.3, generator), case.family
    if isinstance(family, Categorical | Multinomial):
        theta = theta - theta.mean()
    assert_close(family.natural(family.expectation(theta)), theta, rtol=1e-6, atol=1e-6)
    metric = family.fisher(theta).dense()
    assert_close(metric, family.covariance(theta), rtol=1e-7, atol=1e-9)
    step = torch.randn(len(theta), generator=generator, dtype=torch.float64)
    step = step * 1e-4 / torch.maximum((step @ metric @ step).sqrt(), step.abs().amax())
    if not bool(family.inside(torch.stack([theta + step, theta - step])).all()):
        return
    both = family.kl(theta.expand(2, -1), torch.stack([theta + step, theta - step])).mean()
    assert_close(both, 0.5 * step @ metric @ step, rtol=1e-3, atol=1e-20)


@given(seed=seeds, dtype=dtypes, name=st.sampled_from(["normal", "diagonal normal", "multivariate normal"]))
def test_fuzz_mle_far_off_the_origin(name, dtype, seed):
    """Examples 1000 deviations off the origin: their spread is not lost in the mean of their squares."""
    family, generator = CASES[name].family, torch.Generator().manual_seed(seed)
    d = family.d  # type: ignore[attr-defined]
    x = (1000 + torch.randn(200, d, generator=generator, dtype=torch.float64)).to(DTYPES[dtype])
    mean, covariance = family.mean_covariance(family.mle(x))  # type: ignore[attr-defined]
    expected = torch.atleast_2d(torch.cov(x.double().mT, correction=0))
    if name != "multivariate normal":
        expected = torch.diag(expected.diagonal())
    assert_close(mean.double(), x.double().mean(0), rtol=1e-5, atol=0)
    assert_close(covariance.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [(1e-3, 1e-3, 1e-3), (1e-3, 1.0, 1e4), (1e4, 1e4, 1e4), (1e4, 1e-3, 2.0)])
def test_extreme_concentrations(alpha):
    family, sizes = Dirichlet(3), torch.tensor(alpha, dtype=torch.float64)
    theta = sizes - 1
    assert_close(family.natural(family.expectation(theta)) + 1, sizes, rtol=1e-6, atol=0)
    for dtype in (torch.float64, torch.float32):
        point = theta.to(dtype)
        x = family.sample(point, 3000, generator=torch.Generator().manual_seed(0))
        values = [family.statistics(x), family.log_prob(point, x), family.entropy(point), family.kl(point, 0 * point)]
        assert all(bool(torch.isfinite(value).all()) for value in values)
        mean = sizes / sizes.sum()
        spread = (mean * (1 - mean) / (sum(alpha) + 1) / 3000).sqrt()
        assert bool(((x.double().mean(0) - mean).abs() < 6 * spread + 1e-6).all())


@pytest.mark.parametrize("alpha", [1e5, 1e7, 1e9])
def test_large_concentrations_do_not_cancel(alpha):
    """KL of neighbours is half their squared distance, whatever the size of log Gamma."""
    family, theta = Dirichlet(3), torch.full((3,), alpha - 1, dtype=torch.float64)
    for step in (torch.tensor([1.0, -1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])):
        other = theta + step.double() * alpha**0.5 / 100
        away = other - theta
        assert_close(family.kl(theta, other), 0.5 * away @ family.covariance(theta) @ away, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("log_p", [-40.0, -20.0, -4.5, -1.4])
def test_rare_logarithmic_counts(log_p):
    """KL is about p d^2 / 4 between neighbours and p' / 2 far off, where all terms of its first order cancel."""
    case, theta = CASES["logarithmic"], tensor([log_p])
    for other in (theta * 1.01, theta - 5, tensor([-1.0]), tensor([-30.0]), tensor([-1e-3])):
        for start, end in ((theta, other), (other, theta)):
            expected = tensor(float(case.kl(exact(start), exact(end))))
            assert_close(case.family.kl(start, end), expected, rtol=1e-9, atol=0)
    lost = tensor([-800.0])  # p is zero in float64
    assert_close(case.family.kl(lost, theta), case.family.log_partition(theta) - theta[0], rtol=0, atol=1e-13)
    assert bool(case.family.kl(theta, lost) > 0)


def test_a_sub_model_asks_the_whole_family():
    case = CASES["sub-model"]
    assert isinstance(case.family, SubModel)
    theta = case.theta(4.0, torch.Generator().manual_seed(0))
    whole = case.family.whole(theta)
    assert_close(case.family.entropy(theta), case.family.family.entropy(whole))
