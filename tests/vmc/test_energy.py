"""Errors of correlated means, and the extrapolation to zero variance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from models import F64, assert_close

import natgrad as ng


def autoregressive(chains: int, length: int, decay: float, seed: int = 0) -> torch.Tensor:
    """x_t = decay x_{t-1} + noise of unit variance: a sample is worth (1 - decay) / (1 + decay) independent ones."""
    noise = torch.randn(chains, length, dtype=F64, generator=torch.Generator().manual_seed(seed))
    x = [noise[:, 0] / math.sqrt(1 - decay**2)]
    for t in range(1, length):
        x.append(decay * x[-1] + noise[:, t])
    return torch.stack(x, dim=1)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_error_counts_correlations(decay):
    found = [ng.vmc.estimate_energy(autoregressive(4, 4096, decay, seed)) for seed in range(8)]
    expected = 1 / (1 - decay) / math.sqrt(4 * 4096)  # of the mean of such a series
    errors = torch.tensor([one.error for one in found])
    assert all(one.settled for one in found)
    assert float(errors.mean()) == pytest.approx(expected, rel=0.1)
    assert float(torch.tensor([one.correlation for one in found]).mean()) == pytest.approx(
        (1 + decay) / (1 - decay), rel=0.25
    )
    assert all(abs(one.mean) < 4 * expected for one in found)


def test_chains_that_are_too_short_say_so():
    found = ng.vmc.estimate_energy(autoregressive(2, 64, 0.99))
    assert not found.settled
    assert " or more" in str(found)


def test_chains_that_differ_say_so():
    same = autoregressive(8, 100, 0.0)
    mixed = ng.vmc.estimate_energy(same)
    assert mixed.r_hat is not None
    assert mixed.r_hat < 1.05
    assert "R-hat" not in str(mixed)
    for apart in (same + torch.arange(8, dtype=F64).unsqueeze(1), same + torch.linspace(0, 5, 100, dtype=F64)):
        found = ng.vmc.estimate_energy(apart)  # chains in different places, chains that all drift
        halves = apart.reshape(16, 50)
        within, means = halves.var(1).mean(), halves.mean(1)
        assert found.r_hat == pytest.approx(float((49 / 50 + means.var() / within).sqrt()))
        assert str(found).endswith(f", chains differ (R-hat {found.r_hat:.2f})")
    assert ng.vmc.estimate_energy(torch.arange(2.0).repeat_interleave(100).view(2, 100)).r_hat == math.inf


def test_an_energy_that_is_not_real_says_so():
    noise = torch.complex(autoregressive(8, 500, 0.9), autoregressive(8, 500, 0.9)) - 3
    assert "Hermitian" not in str(ng.vmc.estimate_energy(noise))
    assert "Hermitian" not in str(ng.vmc.estimate_energy(noise[0, :40]))
    assert "imaginary part" in str(ng.vmc.estimate_energy(noise + 9j))
    eigenstate = torch.full((8,), -2.5j)  # of i H: the energy is 0 without an error
    assert "Hermitian" in str(ng.vmc.estimate_energy(eigenstate, torch.full((8,), 1 / 8), enumerated=True))


def test_weights_enumerate_or_reweigh():
    values, p = torch.tensor([1.0, 2.0, 4.0], dtype=F64), torch.tensor([0.5, 0.25, 0.25], dtype=F64)
    whole = ng.vmc.estimate_energy(values, p, enumerated=True)
    assert (whole.mean, whole.error, whole.variance) == (2.0, 0.0, 1.5)
    assert ng.vmc.estimate_energy(values, p).error == pytest.approx(math.sqrt(0.25 + 0.25))
    assert ng.vmc.estimate_energy(values, 4 * p) == ng.vmc.estimate_energy(values, p)


def test_the_extrapolation_is_the_weighted_line():
    v, e = torch.tensor([0.1, 0.2, 0.5], dtype=F64), torch.tensor([-1.01, -0.95, -0.80], dtype=F64)
    errors = torch.tensor([0.01, 0.02, 0.01], dtype=F64)
    design = torch.stack([torch.ones_like(v), v], dim=1) / errors.unsqueeze(1)
    covariance = torch.linalg.inv(design.mT @ design)
    value = covariance @ design.mT @ (e / errors)
    given = zip(e.tolist(), errors.tolist(), v.tolist(), strict=True)
    found = ng.vmc.extrapolate_variance([ng.vmc.EnergyEstimate(*one) for one in given])
    assert_close(torch.tensor([found.mean, found.error**2], dtype=F64), torch.stack([value[0], covariance[0, 0]]))
    exact = [ng.vmc.EnergyEstimate(-1 + 0.5 * x, 0.0, x) for x in (0.1, 0.3, 0.4)]
    assert ng.vmc.extrapolate_variance(exact).mean == pytest.approx(-1)
    with pytest.raises(ValueError, match="1 different variances"):
        ng.vmc.extrapolate_variance(exact[:1])


def test_an_energy_is_written_to_two_digits_of_its_error():
    estimate = ng.vmc.estimate_energy(torch.tensor([1.0, 2.0, 4.0], dtype=F64))
    assert str(replace(estimate, mean=1.23456, error=0.0123, settled=True, r_hat=None)) == "1.235 +- 0.012"
    assert str(replace(estimate, mean=1.5, error=0.0, settled=False, r_hat=None)) == "1.50000000 +- 0.00000000 or more"
