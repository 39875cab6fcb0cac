"""Manifolds: exp and log undo one another, transport keeps lengths, equations agree with closed forms."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from models import F64, draw, tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import DiagonalNormal, FixedCovarianceNormal, FixedMeanNormal
from natgrad.geometry import (
    Bits,
    Descent,
    HalfPlane,
    Location,
    NaturalParameters,
    Normals,
    PositiveDefinite,
    ProductManifold,
    Rates,
    Scales,
    Simplex,
    Wasserstein,
    fisher_rao,
    integrate,
)
from natgrad.ground.linalg import symmetrise


def spd(*batch, d=2, seed=0):
    root = draw(*batch, d, d, seed=seed)
    return root @ root.mT + 0.5 * torch.eye(d, dtype=F64)


def normals(d):
    manifold = Normals(d)
    return manifold.join(draw(3, d, seed=1), spd(3, d=d, seed=2)), manifold.join(
        draw(3, d, seed=3), spd(3, d=d, seed=4)
    )


def thetas(d, seed):
    return ng.MultivariateNormal(d).from_mean_covariance(draw(3, d, seed=seed), spd(3, d=d, seed=seed + 1))


PAIR = ng.Product((ng.Exponential(), 1), (ng.MultivariateNormal(1), 1))
CASES = {
    "rates": (Rates(), draw(3, 2).exp(), draw(3, 2, seed=1).exp()),
    "scales": (Scales(2.5), draw(3, 2).exp(), draw(3, 2, seed=1).exp()),
    "bits": (Bits(), draw(3, 2).sigmoid(), draw(3, 2, seed=1).sigmoid()),
    "location": (Location(spd()), draw(3, 2), draw(3, 2, seed=1)),
    "simplex": (Simplex(4), draw(3, 4).softmax(-1), draw(3, 4, seed=1).softmax(-1)),
    "half plane": (HalfPlane(), *(torch.stack([draw(3, seed=s), draw(3, seed=s + 1).exp()], -1) for s in (0, 2))),
    "cone": (PositiveDefinite(), spd(3, d=3, seed=1), spd(3, d=3, seed=2)),
    "normals": (Normals(2), *normals(2)),
    "wasserstein": (Wasserstein(2), *normals(2)),
    "together": (
        ProductManifold((Rates(), 2), (PositiveDefinite(), 4)),
        torch.cat([draw(3, 2).exp(), spd(3, seed=1).flatten(-2)], -1),
        torch.cat([draw(3, 2, seed=1).exp(), spd(3, seed=2).flatten(-2)], -1),
    ),
    "theta of normals in 1": (fisher_rao(ng.MultivariateNormal(1)), thetas(1, 1), thetas(1, 3)),
    "theta of normals in 2": (fisher_rao(ng.MultivariateNormal(2)), thetas(2, 1), thetas(2, 3)),
    "theta of a product": (
        fisher_rao(PAIR),
        *(torch.cat([-draw(3, 1, seed=s).exp(), thetas(1, s)], -1) for s in (1, 3)),
    ),
    "theta of independent spins": (fisher_rao(ng.Ising(2, [(0,), (1,)])), draw(3, 2), draw(3, 2, seed=1)),
    "theta of bits": (fisher_rao(ng.Bernoulli(2)), 3 * draw(3, 2), 3 * draw(3, 2, seed=1)),
    "theta of counts": (fisher_rao(ng.Poisson(2)), draw(3, 2), draw(3, 2, seed=1)),
    "theta of classes": (fisher_rao(ng.Categorical(4)), draw(3, 4), draw(3, 4, seed=1)),
    "theta of draws": (fisher_rao(ng.Multinomial(5, 3)), draw(3, 3), draw(3, 3, seed=1)),
    "theta of classes, one held": (fisher_rao(ng.SubModel(ng.Categorical(3), [0, 2])), draw(3, 2), draw(3, 2, seed=1)),
    "theta of independent normals": (
        fisher_rao(DiagonalNormal(2)),
        *(torch.cat([draw(3, 2, seed=s), -draw(3, 2, seed=s + 1).exp()], -1) for s in (0, 5)),
    ),
    "theta of a known mean": (
        fisher_rao(FixedMeanNormal(torch.zeros(2).double())),
        *(ng.MultivariateNormal(2).pack(-spd(3, seed=s) / 2) for s in (1, 2)),
    ),
    "theta of a known covariance": (fisher_rao(FixedCovarianceNormal(spd())), draw(3, 2), draw(3, 2, seed=1)),
    "equations of gamma": (
        NaturalParameters(ng.Gamma()),
        *(torch.stack([1 + draw(3, seed=s).sigmoid(), -2 - draw(3, seed=s + 1).sigmoid()], -1) for s in (0, 5)),
    ),
}


def tangent(manifold, point, seed):
    vector = 0.3 * draw(*point.shape, seed=seed)
    if isinstance(manifold, ProductManifold):
        vector = torch.cat(
            [v.flatten(-m.event) for m, v in zip(manifold.manifolds, _parts(manifold, vector), strict=True)], -1
        )
    return manifold.project(point, vector)


def _parts(manifold, vector):
    pieces = vector.split(manifold.sizes, -1)
    return [
        symmetrise(p.unflatten(-1, (2, 2))) if m.event == 2 else p
        for m, p in zip(manifold.manifolds, pieces, strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
def test_log_undoes_exp(case):
    manifold, point, other = CASES[case]
    velocity = manifold.log(point, other)
    assert_close(manifold.exp(point, velocity), other, rtol=1e-8, atol=1e-9)
    assert_close(manifold.distance(point, other), manifold.norm(point, velocity), rtol=1e-9, atol=1e-10)
    assert_close(manifold.distance(point, other), manifold.distance(other, point), rtol=1e-8, atol=1e-9)
    assert_close(manifold.exp(point, torch.zeros_like(point)), point)


@pytest.mark.parametrize("case", CASES)
def test_geodesics_have_constant_speed(case):
    manifold, point, other = CASES[case]
    way = manifold.geodesic(point, other, tensor([0.0, 0.3, 0.7, 1.0]))
    assert way.shape == (4, *point.shape)
    whole = manifold.distance(point, other)
    assert_close(manifold.distance(way[0], way[1]), 0.3 * whole, rtol=1e-8, atol=1e-8)
    assert_close(manifold.distance(way[1], way[2]), 0.4 * whole, rtol=1e-8, atol=1e-8)
    assert_close(manifold.geodesic(point, other, 0.3), way[1])


@pytest.mark.parametrize("case", [name for name in CASES if name != "wasserstein"])
def test_transport_keeps_products_and_the_geodesic_s_velocity(case):
    manifold, point, other = CASES[case]
    u, v = tangent(manifold, point, 7), tangent(manifold, point, 8)
    moved = [manifold.transport(point, other, w) for w in (u, v)]
    assert_close(manifold.inner(other, *moved), manifold.inner(point, u, v), rtol=1e-8, atol=1e-9)
    arrived = manifold.transport(point, other, manifold.log(point, other))
    assert_close(arrived, -manifold.log(other, point), rtol=1e-7, atol=1e-7)
    end, carried = manifold.carry(point, manifold.log(point, other), u)
    assert_close(end, other, rtol=1e-8, atol=1e-8)
    assert_close(carried, moved[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_natural_gradient_represents_the_derivative(case):
    manifold, point, _ = CASES[case]
    weights = draw(*point.shape, seed=9)
    if manifold.event == 2:
        weights = symmetrise(weights)
    v = tangent(manifold, point, 7)
    derivative = (weights * v).flatten(-manifold.event).sum(-1)
    if case == "together":
        pytest.skip("the matrix part of its gradient must be symmetric: tested by the cone")
    assert_close(manifold.inner(point, manifold.natural(point, weights), v), derivative)


@pytest.mark.parametrize("case", CASES)
def test_retractions_start_as_geodesics_do_and_stay_inside(case):
    manifold, point, _ = CASES[case]
    v, h = tangent(manifold, point, 7), 1e-4
    near = (manifold.retract(point, h * v) - manifold.retract(point, -h * v)) / (2 * h)
    assert_close(near, v, rtol=1e-5, atol=1e-6)
    for size in (1e1, -1e12, 1e200, -1e200):
        end = manifold.retract(point, size * v)
        assert bool(manifold.inside(end).all())
        assert bool(torch.isfinite(manifold.retract(end, manifold.project(end, abs(size) * v))).all())


@pytest.mark.parametrize("case", CASES)
def test_distances_have_gradients(case):
    """And at the other point itself no NaN."""
    manifold, point, other = CASES[case]
    v = tangent(manifold, point, 7)
    start = point.clone().requires_grad_()
    (slope,) = torch.autograd.grad(manifold.distance(start, other).sum(), start)
    h = 1e-5
    ahead, behind = (manifold.distance(point + s * h * v, other) for s in (1, -1))
    assert_close((slope * v).flatten(-manifold.event).sum(-1), (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-6)
    end = other.clone().requires_grad_()
    (slope,) = torch.autograd.grad(manifold.distance(other, end).sum(), end)
    assert bool(torch.isfinite(slope).all())
    assert_close(manifold.distance(other, other), torch.zeros(3, dtype=F64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_first_derivatives_are_those_of_differences_in_both_modes(case):
    manifold, point, other = CASES[case]
    moves = tangent(manifold, point, 7), tangent(manifold, point, 8)
    v = tangent(manifold, point, 9)

    def measure(p, q):
        ways = manifold.log(p, q), manifold.transport(p, q, v), manifold.geodesic(p, q, 0.3), manifold.exp(p, v)
        return torch.cat([x.flatten() for x in (manifold.inner(p, v, v), manifold.distance(p, q), *ways)])

    h = 1e-5
    ahead, behind = (measure(*(x + s * h * m for x, m in zip((point, other), moves, strict=True))) for s in (1, -1))
    pushed = torch.func.jvp(measure, (point, other), moves)[1]
    assert_close(pushed, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-6)
    weights = draw(len(pushed))
    pulled = torch.func.vjp(measure, point, other)[1](weights)
    assert_close(sum((a * b).sum() for a, b in zip(pulled, moves, strict=True)), weights @ pushed)


@pytest.mark.parametrize("case", CASES)
def test_single_precision_is_that_of_its_numbers(case):
    manifold, point, other = CASES[case]
    single = tuple(x.float() for x in (point, other, tangent(manifold, point, 7)))
    moved, expected = (manifold.transport(*each) for each in (single, [x.double() for x in single]))
    assert moved.dtype == torch.float32
    assert_close(moved.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_manifolds_go_to_another_process(case):
    manifold, point, other = CASES[case]
    assert torch.equal(pickle.loads(pickle.dumps(manifold)).log(point, other), manifold.log(point, other))


@pytest.mark.parametrize("case", CASES)
def test_leading_dimensions_broadcast(case):
    manifold, point, other = CASES[case]
    v, w = (tangent(manifold, point, s) for s in (7, 8))
    calls = {
        "natural": (point, v),
        "inner": (point, v, w),
        "exp": (point, v),
        "transport": (point, other, v),
        "translate": (point, other, v),
    }
    for name, given in calls.items():
        call = getattr(manifold, name)
        for i in range(len(given)):
            alone, repeated = ((*given[:i], x, *given[i + 1 :]) for x in (given[i][0], given[i][:1].expand_as(point)))
            assert_close(call(*alone), call(*repeated))


PAIRS = {
    "half plane": (ng.MultivariateNormal(1), thetas(1, 1), thetas(1, 3)),
    "normals": (ng.MultivariateNormal(2), thetas(2, 1), thetas(2, 3)),
    "exponential": (ng.Exponential(), -draw(3, 1).exp(), -draw(3, 1, seed=1).exp()),
    "counts": (ng.Poisson(1), draw(3, 1), draw(3, 1, seed=1)),
    "classes": (ng.SubModel(ng.Categorical(3), [0, 2]), draw(3, 2), draw(3, 2, seed=1)),
    "deviation": (DiagonalNormal(1), thetas(1, 1), thetas(1, 3)),
    "known mean": (
        FixedMeanNormal(torch.zeros(2).double()),
        *(ng.MultivariateNormal(2).pack(-spd(3, seed=s) / 2) for s in (1, 2)),
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_closed_forms_agree_with_the_geodesic_equation(case):
    family, theta, other = PAIRS[case]
    closed, general = fisher_rao(family), NaturalParameters(family)
    v = 0.2 * closed.log(theta, other)  # short: within theta, curvature of the chart is all that is asked
    w = 0.3 * draw(*theta.shape, seed=5)
    assert_close(closed.exp(theta, v), general.exp(theta, v), rtol=1e-8, atol=1e-9)
    for ours, theirs in zip(closed.carry(theta, v, w), general.carry(theta, v, w), strict=True):
        assert_close(ours, theirs, rtol=1e-7, atol=1e-8)
    assert_close(closed.inner(theta, v, w), general.inner(theta, v, w))
    assert_close(closed.natural(theta, w), general.natural(theta, w))
    assert_close(closed.distance(theta, other), general.distance(theta, other), rtol=1e-7, atol=1e-8)


def test_known_distances():
    one = tensor([0.0, 1.0])
    wide = tensor([0.0, math.e])
    assert_close(HalfPlane().distance(one, wide), tensor(math.sqrt(2)))
    far = tensor([2.0, 1.0])  # sqrt 2 arccosh(1 + 4 / 4)
    assert_close(HalfPlane().distance(one, far), tensor(math.sqrt(2) * math.acosh(2)))
    p, q = tensor([0.2, 0.8]), tensor([0.5, 0.5])
    angle = 2 * math.acos(math.sqrt(0.1) + math.sqrt(0.4))
    assert_close(Simplex().distance(p, q).item(), angle)
    assert_close(Bits().distance(p[:1], q[:1]).item(), angle)
    assert_close(Rates().distance(4 * one[1:], 9 * one[1:]).item(), 2.0)
    assert_close(Scales().distance(one[1:], wide[1:]).item(), 1.0)
    eye = torch.eye(2, dtype=F64)
    assert_close(PositiveDefinite().distance(eye, math.e**2 * eye).item(), 2.0)  # sqrt(1/2 (4 + 4))
    assert_close(Location(4 * eye).distance(one, far).item(), 1.0)


KNOWN = {
    "bits": (ng.Bernoulli(2), Bits(), lambda theta: theta.sigmoid()),
    "spins": (ng.Ising(2, [(0,), (1,)]), Bits(), lambda theta: (2 * theta).sigmoid()),
    "counts": (ng.Poisson(3), Rates(), lambda theta: theta.exp()),
    "classes": (ng.Categorical(3), Simplex(), lambda theta: theta.softmax(-1)),
    "draws": (ng.Multinomial(7, 3), Simplex(7), lambda theta: theta.softmax(-1)),
    "one held": (
        ng.SubModel(ng.Categorical(3), [1, 2]),
        Simplex(),
        lambda theta: torch.nn.functional.pad(theta, (1, 0)).softmax(-1),
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_natural_parameters_are_the_known_manifold_s(case):
    """Distances, ways, transport, and steps beyond the edge, from which both come back."""
    family, known, there = KNOWN[case]
    manifold = fisher_rao(family)
    theta, other, v, w = (draw(4, family.size, seed=s) for s in range(4))
    (p, moved), carried = (torch.func.jvp(there, (theta,), (x,)) for x in (v, w))
    assert_close(manifold.distance(theta, other), known.distance(p, there(other)))
    assert_close(there(manifold.geodesic(theta, other, 0.3)), known.geodesic(p, there(other), 0.3))
    assert_close(manifold.inner(theta, v, w), known.inner(p, moved, carried[1]))
    for size in (1.0, 10.0):
        assert_close(there(manifold.exp(theta, size * v)), known.exp(p, size * moved))
    end = manifold.transport(theta, other, w)
    assert_close(torch.func.jvp(there, (other,), (end,))[1], known.transport(p, there(other), carried[1]))


def test_logits_lose_no_digits_where_probabilities_are_one():
    """At logits of 60, sqrt p is 1 - 4e-27: the arc to the edge is 2 exp(-30)."""
    theta, other = (tensor([x, -x]) for x in (60.0, 62.0))
    arc = 2 * (math.exp(-30) - math.exp(-31)) * math.sqrt(2)
    manifold = fisher_rao(ng.Bernoulli())
    assert_close(float(manifold.distance(theta, other)), arc, rtol=1e-12, atol=0)
    assert_close(manifold.exp(theta, manifold.log(theta, other)), other, rtol=1e-12, atol=0)
    classes = fisher_rao(ng.Categorical(2))
    assert_close(float(classes.distance(theta / 2, other / 2)), arc / math.sqrt(2), rtol=1e-12, atol=0)
    assert_close(classes.exp(theta / 2, classes.log(theta / 2, other / 2)), other / 2, rtol=1e-12, atol=0)


def test_integration_is_exact_to_its_tolerance_and_has_gradients():
    start = torch.tensor([[1.0], [2.0]], dtype=F64, requires_grad=True)
    end = integrate(lambda x: x, start)
    assert_close(end, math.e * start, rtol=1e-10, atol=0)
    assert_close(integrate(lambda x: x, end, span=-1.0), start, rtol=1e-10, atol=0)
    (slope,) = torch.autograd.grad(end.sum(), start)
    assert_close(slope, torch.full_like(start, math.e), rtol=1e-8, atol=0)
    edge = integrate(lambda x: torch.where(x < 1.5, 1.0, torch.nan) * torch.ones_like(x), start.detach())
    assert bool(torch.isnan(edge).all())  # 1 + t reaches the edge at t = 1/2; 2 is beyond it
    blown = integrate(torch.square, tensor([[3.0], [0.5]]))  # x / (1 - x t): infinite at t = 1/3, and 1 at the end
    assert bool(torch.isnan(blown[0]).all())
    assert_close(blown[1], tensor([1.0]), rtol=1e-8, atol=0)


def test_bad_points_are_told():
    with pytest.raises(ValueError, match="positive probabilities"):
        Simplex().retract(tensor([0.5, 0.6]), torch.zeros(2).double())
    with pytest.raises(ValueError, match="not finite"):
        Rates().retract(torch.ones(1).double(), torch.full((1,), torch.nan).double())
    with pytest.raises(ValueError, match="trials"):
        Simplex(0)
    with pytest.raises(ValueError, match="covariance"):
        Location(-torch.eye(2))
    with pytest.raises(TypeError, match="floating"):
        Rates().check(torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize("transport", ["cheap", "parallel"])
@pytest.mark.parametrize("case", ["half plane", "cone", "simplex", "wasserstein"])
def test_momentum_finds_the_nearest_point(case, transport):
    """Half the squared distance to a point is minimised there; its natural gradient is -log."""
    manifold, point, other = CASES[case]
    descent, velocity = Descent(manifold, 0.2, 0.5, transport), None
    for _ in range(25):
        start = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(manifold.distance(start, other).square().sum() / 2, start)
        point, velocity = descent.step(point, gradient, velocity)
    assert float(manifold.distance(point, other).max()) < 1e-2


@pytest.mark.parametrize("case", CASES)
def test_within_vmap_what_looks_at_numbers_is_refused_in_words(case):
    manifold, start, end = CASES[case]
    calls = [manifold.retract]
    if isinstance(getattr(manifold, "manifold", manifold), Normals | NaturalParameters):
        calls += [manifold.log, manifold.distance, lambda p, q: manifold.carry(p, q - p, q - p)[1]]
    for call in calls:
        with pytest.raises(ValueError, match=r"comes through torch.func.vmap, .* the whole batch instead"):
            torch.func.vmap(call)(start, end)
