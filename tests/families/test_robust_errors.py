"""Laplace's and Huber's densities: normalised, their Fisher information, draws and divergences by quadrature."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from models import F64, assert_close, draw, pair
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.families import Huber, Laplace, as_criterion
from natgrad.testing import check_family

DELTAS = [0.05, 1.0, 8.0]
NODES, WEIGHTS = torch.linalg.eigh(
    torch.diag(k := torch.arange(1, 60, dtype=F64) / (4 * torch.arange(1, 60, dtype=F64) ** 2 - 1).sqrt(), 1)
    + torch.diag(k, -1)
)
WEIGHTS = 2 * WEIGHTS[0].square()  # Gauss and Legendre on [-1, 1], exact for polynomials up to degree 119


def integrate(function: Any, edges: list[float]) -> Tensor:
    """The integral of a function (t,) -> (t, ...) over pieces on each of which it is smooth."""
    total = torch.zeros((), dtype=F64)
    for low, high in itertools.pairwise(edges):
        points = (high + low) / 2 + (high - low) / 2 * NODES
        total = total + torch.tensordot(WEIGHTS * (high - low) / 2, function(points), dims=1)
    return total


def edges_of(family: Huber | Laplace, *places: float) -> list[float]:
    """Where densities at these places have kinks, and points between them that keep the pieces short."""
    delta, scale = (family.delta, family.scale) if isinstance(family, Huber) else (0.0, family.scale)
    end = scale * (delta + 40 / (delta or 1.0))
    kinks = {place + side * delta * scale for place in places for side in (-1, 1)}
    low, high = min(places) - end, max(places) + end
    return sorted(kinks | set(torch.linspace(low, high, 60, dtype=F64).tolist()))


def density(family: Huber | Laplace, place: float, points: Tensor) -> Tensor:
    return (-family.nll(torch.full_like(points, place).unsqueeze(1), points.unsqueeze(1))).exp()


CASES = {f"Huber({delta})": Huber(delta) for delta in DELTAS} | {
    "Huber(2, scale 0.3)": Huber(2.0, 0.3),
    "Laplace": Laplace(),
    "Laplace(0.2)": Laplace(0.2),
}


@pytest.mark.parametrize("name", CASES)
def test_density_fisher_and_divergence_are_those_of_quadrature(name: str):
    family = CASES[name]
    assert_close(integrate(lambda t: density(family, 0.0, t), edges_of(family, 0.0)), torch.ones((), dtype=F64), 1e-11)
    zero = torch.zeros(1, 1, dtype=F64)

    def squared_score(points: Tensor) -> Tensor:
        place = torch.zeros_like(points).unsqueeze(1)
        return density(family, 0.0, points) * family.score(place, points.unsqueeze(1)).squeeze(1).square()

    assert_close(integrate(squared_score, edges_of(family, 0.0)), family.curvature(zero).squeeze(), 1e-11)
    for distance in (0.1, 0.9, 2.5, 7.0):

        def gap(points: Tensor, distance: float = distance) -> Tensor:
            here, there = (density(family, place, points) for place in (0.0, distance))
            return here * (here / there).log()

        expected = integrate(gap, edges_of(family, 0.0, distance))
        other = torch.full((1, 1), distance, dtype=F64)
        for found in (family.kl(zero, other), family.kl(other, zero)):
            assert_close(found.squeeze(), expected, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_families_are_sound(name: str):
    check_family(CASES[name], draw(3, 4))


@pytest.mark.parametrize(("name", "dtype"), pair(CASES, [F64, torch.float32, F64, torch.float32, torch.float32]))
def test_draws_have_the_distribution_of_the_density(name: str, dtype: torch.dtype):
    """The share of draws below a few points, in standard errors."""
    family, count = CASES[name], 200_000
    outputs = torch.full((count, 1), 0.7, dtype=dtype)
    drawn = family.sample(outputs, torch.Generator().manual_seed(0)).double().squeeze(1) - 0.7
    assert torch.isfinite(drawn).all()
    unit = 1 / family.delta if isinstance(family, Huber) else 1.0
    for point in (-2 * unit, -0.3, 0.1, 1.0, 2 * unit):
        point *= family.scale
        edges = [e for e in edges_of(family, 0.0) if e < point] + [point]
        expected = float(integrate(lambda t: density(family, 0.0, t), edges))
        error = math.sqrt(max(expected * (1 - expected), 1e-9) / count)
        assert abs(float((drawn < point).double().mean()) - expected) < 6 * error


LOSSES: dict[str, tuple[nn.Module, Any, float]] = {
    "L1Loss": (nn.L1Loss(), F.l1_loss, 1.0),
    "HuberLoss": (nn.HuberLoss(), F.huber_loss, 1.0),
    "HuberLoss, delta": (nn.HuberLoss(delta=0.3), functools.partial(F.huber_loss, delta=0.3), 1.0),
    "SmoothL1Loss": (nn.SmoothL1Loss(), F.smooth_l1_loss, 1.0),
    "SmoothL1Loss, beta": (nn.SmoothL1Loss(beta=0.2), functools.partial(F.smooth_l1_loss, beta=0.2), 1.0),
    "SmoothL1Loss, beta 0": (nn.SmoothL1Loss(beta=0.0), functools.partial(F.smooth_l1_loss, beta=0.0), 1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_likelihood_up_to_a_constant(name: str):
    """The gradient in the outputs is that of -log p, entry by entry, as a mean over entries and as a sum."""
    loss, function, _ = LOSSES[name]
    outputs, targets = draw(5, 3), draw(5, 3, seed=1)
    for kind in (loss, function):
        criterion = as_criterion(kind)
        assert torch.equal(criterion.value(outputs, targets), loss(outputs, targets))
        score = criterion.family.score(outputs, targets).view(5, 3)
        assert_close(criterion.slope(outputs, targets), -score / 15, 1e-13)
        constant = criterion.family.nll(outputs, targets).mean() - loss(outputs, targets)
        assert_close(constant, criterion.family.nll(outputs + 1, targets).mean() - loss(outputs + 1, targets), 1e-13)
    options = {k: getattr(loss, k) for k in ("delta", "beta") if hasattr(loss, k)}
    total = as_criterion(type(loss)(reduction="sum", **options))
    assert total.scale(outputs, targets) == 15
    assert total.nats(outputs) == 3


@pytest.mark.parametrize("unit", [0.2, 30.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_metric_of_a_batch_is_the_loss_at_the_temperature_of_its_errors(name: str, unit: float):
    """p = exp(-rho / tau) / Z with E[z rho'(z)] = tau: E[(d rho / d r)^2] / tau by quadrature, in units of the loss."""
    loss = LOSSES[name][0]
    outputs, targets = draw(50, 3), unit * draw(50, 3, seed=1)
    slopes = torch.autograd.grad(loss(point := outputs.clone().requires_grad_(), targets), point)[0] * outputs.numel()
    tau = max(1.0, float((slopes * (outputs - targets)).mean()))
    knee = {"delta": 1.0, "beta": 1.0} | vars(loss)
    edge = knee["delta"] if isinstance(loss, nn.HuberLoss) else knee["beta"] if isinstance(loss, nn.SmoothL1Loss) else 0
    far = edge + 40 * tau * (1 if not isinstance(loss, nn.HuberLoss) else 1 / edge)
    pieces = sorted({0.0, -edge, edge, *torch.linspace(-far, far, 80, dtype=F64).tolist()})

    def expect(points: Tensor) -> Tensor:
        place = points.clone().requires_grad_()
        rho = type(loss)(reduction="none", **{k: v for k, v in vars(loss).items() if k in ("delta", "beta")})
        values = rho(place, torch.zeros_like(place))
        (slope,) = torch.autograd.grad(values.sum(), place)
        weight = (-values.detach() / tau).exp()
        return torch.stack([weight, weight * slope.square() / tau, weight * slope * points], 1)

    mass, information, balance = integrate(expect, pieces)
    assert_close(balance / mass, torch.tensor(tau, dtype=F64), 1e-9)
    criterion = as_criterion(loss)
    weights = criterion.weights(outputs, targets)
    found = weights * criterion.family.fisher(criterion.family.rows(outputs))[:, 0, 0]
    assert_close(found, (information / mass / outputs.numel()).expand(150), 1e-9)
    assert_close(criterion.weights(outputs), torch.full((150,), 1 / 150, dtype=F64))  # without targets temperature 1
    if unit < 1:
        assert_close(weights, torch.full((150,), 1 / 150, dtype=F64))
