"""Steps of a given length in nats: a bound on the KL that is measured, and one on the damped form."""

from __future__ import annotations

import math

import pytest
import torch
from models import F64, draw
from torch import Tensor

import natgrad as ng
from natgrad.rules import FlatStep, MeasuredTrustRegion, NormalisedRate, Quadratic

RADIUS = 0.01


class Bowl:
    """A loss -g . d + bend |d|^4 whose step moves a KL of 1/2 d^T G d + bend |d|^4; counts its trials."""

    def __init__(self, model: Quadratic, bend: float) -> None:
        self.model, self.bend, self.trials = model, bend, 0

    def __call__(self, vector: Tensor) -> float:
        return self.measure(vector)[0]

    def measure(self, vector: Tensor) -> tuple[float, float]:
        self.trials += 1
        more = self.bend * float(vector @ vector) ** 2
        kl = 0.5 * float(vector @ self.model.operator.mv(vector))
        return float(self.model.gradient @ vector) + more, kl + more


def quadratic(damping: float = 0.1, seed: int = 0) -> Quadratic:
    root = draw(5, 7, seed=seed)
    metric, gradient = ng.operators.DenseOperator(root @ root.mT / 7), draw(5, seed=seed + 1)
    found = ng.natural_gradient(metric, gradient, solver=ng.Direct(), damping=damping).value
    return Quadratic(gradient, metric, damping, FlatStep(-found, -metric.mv(found)), loss=0.0)


@pytest.mark.parametrize("bend", [0.0, 1.0, 1e3, 1e8])
def test_a_measured_bound_holds_whatever_the_model_says(bend: float):
    model = quadratic()
    loss_at = Bowl(model, bend)
    step, memory = MeasuredTrustRegion(RADIUS, backtracks=30).step(model, loss_at, {})
    loss, kl = loss_at.measure(step.vector)
    assert memory == {}
    assert 0 < kl <= RADIUS
    assert loss < 0
    torch.testing.assert_close(step.image, model.operator.mv(step.vector))
    if not bend:
        assert kl > 0.6 * RADIUS  # the first trial is a hair beyond the radius, the second one is taken


def test_the_measured_rule_stays_where_nothing_is_gained():
    model = quadratic()
    for broken in (lambda d: (1.0, 0.0), lambda d: (-1.0, math.nan), lambda d: (math.nan, 0.0), lambda d: (-1, 1.0)):
        loss_at = Bowl(model, 0.0)
        loss_at.measure = broken  # type: ignore[method-assign]
        step, _ = MeasuredTrustRegion(RADIUS, backtracks=4).step(model, loss_at, {})
        assert not step.vector.any()


def test_the_measured_rule_asks_for_the_kl():
    with pytest.raises(ValueError, match="measures the KL at trial points"):
        MeasuredTrustRegion(RADIUS).step(quadratic(), lambda d: 0.0, {})
    with pytest.raises(ValueError, match="backtracks is 0"):
        MeasuredTrustRegion(RADIUS, backtracks=0)
    for rule in (MeasuredTrustRegion, NormalisedRate):
        for radius in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="radius is"):
                rule(radius)


@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_a_normalised_step_has_the_radius_in_its_damped_form(damping: float):
    model = quadratic(damping)
    step, _ = NormalisedRate(RADIUS).step(model, None, {})
    form = step.vector @ (step.image + damping * step.vector)
    torch.testing.assert_close(0.5 * form, torch.tensor(RADIUS, dtype=F64))
    assert model.kl(step) < RADIUS


def test_no_rule_goes_uphill():
    model = quadratic()
    uphill = Quadratic(model.gradient, model.operator, 0.1, model.proposal.scale_by(-1.0), loss=0.0)
    for rule in (MeasuredTrustRegion(RADIUS), NormalisedRate(RADIUS)):
        assert not rule.step(uphill, Bowl(uphill, 0.0), {})[0].vector.any()
