"""The bound comes with its error: how far the points of a fit may be from the expectation under the same q."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.variational import Draws, Sobol
from natgrad.variational.quadrature import Points


def funnel(z: Tensor) -> Tensor:
    """Neal's funnel: the scale of all but the first coordinate is exp(z_0 / 2)."""
    return -0.5 * z[0] ** 2 / 9 - 0.5 * (z[1:] ** 2).sum() * (-z[0]).exp() - z[0] * (len(z) - 1) / 2


def banana(z: Tensor) -> Tensor:
    return -0.5 * (z[0] ** 2 + 4 * (z[1] - z[0] ** 2) ** 2)


def normal(z: Tensor) -> Tensor:
    return -0.5 * (z - 1).square().sum() - 0.25 * (z[0] - z[1]) ** 2


FITS = {
    "full": lambda log_p, d, points: ng.variational(log_p, d, points=points),
    "low rank": lambda log_p, d, points: ng.variational_low_rank(log_p, d, rank=1, points=points),
    "mixture": lambda log_p, d, points: ng.variational_mixture(log_p, [[-1.0] * d, [1.0] * d], points=points),
}


def fit(kind: str, log_p: object, d: int, points: Points | None) -> tuple[object, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        q = FITS[kind](log_p, d, points)
        return q, q.fit(60, tolerance=1e-2)


@pytest.mark.parametrize(
    ("kind", "log_p", "d"),
    [("full", funnel, 3), ("low rank", banana, 2), ("mixture", normal, 2), ("mixture", banana, 2)],
)
def test_the_error_covers_the_expectation(kind: str, log_p: object, d: int):
    q, bounds = fit(kind, log_p, d, Sobol(64))
    elsewhere = q.elbos_elsewhere()
    assert len(elsewhere) > 1
    truth = sum(elsewhere) / len(elsewhere)
    assert abs(q.elbo() - truth) <= bounds.error
    assert bounds.known == (bounds.error <= 1e-2)


def test_a_bound_that_is_hardly_known_is_no_end_of_a_fit():
    q = ng.variational(funnel, 3)
    with pytest.warns(RuntimeWarning, match="known to") as told:
        bounds = q.fit(200)
    assert told[0].filename == __file__
    assert not bounds.converged
    assert bounds.error > 0.05
    # of the same q, by four thousand points
    other = ng.variational(funnel, 3, points=Sobol(4096))
    other.restore(q.snapshot())
    assert abs(other.elbo() - q.elbo()) <= bounds.error


def test_more_points_know_the_bound_better():
    errors = [fit("full", banana, 2, Sobol(count))[1].error for count in (32, 256, 2048)]
    assert errors[2] < errors[1] < errors[0]


def test_a_normal_density_is_known_to_round_off():
    """Points in pairs z, -z with unit variances integrate a quadratic function nearly exactly."""
    _, bounds = fit("full", normal, 2, Sobol(2048))
    assert bounds.converged
    assert bounds.error < 1e-2


def test_fresh_points_tell_their_scatter():
    _, bounds = fit("full", banana, 2, Draws(64))
    assert math.isfinite(bounds.error)
    last = torch.tensor(bounds[-10:])
    assert bounds.error == pytest.approx(float(last.std()))
