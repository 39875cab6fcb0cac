"""The dual geometry: Pythagoras, mirror descent; balls of a divergence; the Wasserstein metric by definition."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw, tensor
from torch.testing import assert_close

from natgrad.families import Gamma, Ising, MultivariateNormal, SubModel
from natgrad.geometry import (
    Normals,
    Wasserstein,
    e_geodesic,
    e_projection,
    fisher_rao,
    kl_ball,
    level_set,
    m_geodesic,
    m_projection,
    mirror_step,
    tilt,
)
from natgrad.testing import check_operator


def moments(d, seed):
    root = draw(d, d, seed=seed)
    return draw(d, seed=seed + 50), root @ root.mT + 0.5 * torch.eye(d, dtype=F64)


def thetas(d=2, seed=0):
    return MultivariateNormal(d).from_mean_covariance(*moments(d, seed))


FIELD = Ising(3)
INDEPENDENT = SubModel(FIELD, [0, 1, 2])
SPARSE = SubModel(
    MultivariateNormal(3), [0, 1, 2, 3, 4, 5, 6, 8], base=thetas(3).new_tensor([0, 0, 0, -1, -1, -1, 0, 0, 0])
)
SUBS = {
    "independent spins": (INDEPENDENT, 0.5 * draw(6), draw(3, seed=1)),
    "sparse precision": (SPARSE, thetas(3), SPARSE.mle(draw(20, 3, seed=3))),
    "a normal without one linear term": (  # where natural gradient steps do not settle
        SubModel(MultivariateNormal(2), [0, 2, 3, 4], base=tensor([0.0, 0.0, -0.5, -0.5, 0.0])),
        tensor([3.31, 3.98, -2.17, -1.43, -0.98]),
        tensor([0.3, -0.5, -0.6, 0.1]),
    ),
}


@pytest.mark.parametrize("case", SUBS)
def test_pythagoras_for_the_m_projection(case):
    sub, theta, other = SUBS[case]
    nearest = sub.whole(m_projection(sub, theta))
    kl, q = sub.family.kl, sub.whole(other)
    assert_close(kl(theta, q), kl(theta, nearest) + kl(nearest, q), rtol=1e-9, atol=1e-10)


def test_pythagoras_for_tilting():
    theta, positions = 0.5 * draw(6), [0, 3]
    means = tensor([0.2, -0.3])
    found = tilt(FIELD, theta, positions, means)
    assert_close(FIELD.expectation(found)[positions], means)
    other = tilt(FIELD, draw(6, seed=4), positions, means)
    assert_close(FIELD.kl(other, theta), FIELD.kl(other, found) + FIELD.kl(found, theta), rtol=1e-9, atol=1e-10)
    assert_close(tilt(FIELD, theta, positions, torch.stack([means, -means]))[0], found)
    assert_close(tilt(FIELD, theta, positions, means.float()), found, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="not reached"):
        tilt(FIELD, theta, [0], tensor([1.5]))
    for wrong in ([-1], [6], [0, 0]):
        with pytest.raises(ValueError, match=r"positions .* from 0 to 5"):
            tilt(FIELD, theta, wrong, tensor([0.2]))


@pytest.mark.parametrize("seed", [0, 1])
def test_e_projection_settles_where_the_m_projection_is_at_the_edge(seed):
    theta = 20 * draw(6, seed=seed)  # whether the m-projection is reached is a matter of the processor
    whole = INDEPENDENT.whole(e_projection(INDEPENDENT, theta))
    slope = (FIELD.covariance(whole) @ (whole - theta))[:3]
    assert float(slope.abs().max()) < 1e-9


@pytest.mark.parametrize("case", SUBS)
def test_e_projection_is_a_minimum_within_the_sub_model(case):
    sub, theta, _ = SUBS[case]
    found = e_projection(sub, theta)
    least = sub.family.kl(sub.whole(found), theta)
    for seed in range(5):
        near = sub.whole(found + 1e-2 * draw(sub.size, seed=seed))
        assert float(sub.family.kl(near, theta)) > float(least)


def test_straight_lines():
    family, a, b = MultivariateNormal(2), thetas(seed=1), thetas(seed=2)
    t = tensor([0.0, 0.25, 1.0])
    e, m = e_geodesic(family, a, b, t), m_geodesic(family, a, b, t)
    assert_close(e[1], 0.75 * a + 0.25 * b)
    assert_close(family.expectation(m[1]), 0.75 * family.expectation(a) + 0.25 * family.expectation(b))
    for way in (e, m):
        assert_close(way[[0, 2]], torch.stack([a, b]))
    assert_close(m_geodesic(family, a, b, 0.25), m[1])


@pytest.mark.parametrize("case", ["spins", "normal", "gamma"])
def test_mirror_descent_is_the_natural_gradient_in_the_expectations(case):
    family, theta = {
        "spins": (FIELD, 0.3 * draw(6)),
        "normal": (MultivariateNormal(2), thetas()),
        "gamma": (Gamma(), tensor([1.0, -2.0])),
    }[case]
    gradient = draw(family.size, seed=2)
    found = mirror_step(family, theta, gradient, 0.01)
    eta = family.expectation(theta)
    assert_close(family.expectation(found), eta - 0.01 * gradient, rtol=1e-10, atol=1e-12)
    in_eta = torch.linalg.solve(family.covariance(theta), gradient)  # dF/d eta
    natural = family.fisher_expectation(eta).inverse().mv(in_eta)
    assert_close(family.expectation(found), eta - 0.01 * natural, rtol=1e-8, atol=1e-10)
    step = torch.linalg.solve(family.covariance(theta), gradient)
    assert float((found - (theta - 0.01 * step)).abs().max()) > 1e-6  # not the step in theta


def test_mirror_steps_that_leave_are_told_or_shortened():
    theta, gradient = torch.zeros(6, dtype=F64), tensor([1.0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="lower it or give backtracks"):
        mirror_step(FIELD, theta, gradient, 3.0)
    found = mirror_step(FIELD, theta, gradient, 3.0, backtracks=5)
    assert_close(FIELD.expectation(found)[0].item(), -0.75)


@pytest.mark.parametrize("reverse", [False, True])
def test_balls_have_their_radius(reverse):
    family = MultivariateNormal(1)
    theta = family.from_mean_covariance(tensor([0.5]), tensor([[2.0]]))
    ball = kl_ball(family, theta, 0.02, 50, reverse=reverse)
    assert ball.shape == (50, 2)
    ends = (ball, theta.expand_as(ball)) if reverse else (theta.expand_as(ball), ball)
    assert_close(family.kl(*ends), torch.full((50,), 0.02, dtype=F64), rtol=1e-9, atol=0)
    assert_close(ball[0], ball[-1])
    single = kl_ball(family, theta.float(), 0.02, 50, reverse=reverse)
    assert_close(single.double(), kl_ball(family, theta.float().double(), 0.02, 50, reverse=reverse), rtol=0, atol=1e-5)
    axes = torch.eye(2, dtype=torch.long)
    assert_close(*(kl_ball(family, theta, 0.02, rays, reverse=reverse) for rays in (axes, axes.double())))
    many = kl_ball(FIELD, torch.zeros(6, dtype=F64), 0.1, draw(7, 6))
    assert_close(FIELD.kl(torch.zeros(7, 6).double(), many), torch.full((7,), 0.1, dtype=F64))


def test_rays_that_never_arrive_are_nan():
    centre, rays = torch.zeros(1, dtype=F64), tensor([[1.0], [-1.0]])
    found = level_set(lambda x: torch.where(x[:, 0] > 0, x[:, 0], torch.tanh(-x[:, 0]) / 2), centre, 1.0, rays)
    assert_close(found[0], torch.ones(1, dtype=F64))
    assert bool(torch.isnan(found[1]))
    with pytest.raises(ValueError, match="directions"):
        level_set(lambda x: x.square().sum(1), torch.zeros(3), 1.0)


def w2(space, point, other):
    """The squared distance as Dowson & Landau 1982 write it."""
    (m, s), (n, t) = space.split(point), space.split(other)
    values, vectors = torch.linalg.eigh(s)
    root = vectors @ torch.diag(values.sqrt()) @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ t @ root).sqrt().sum()
    return (m - n).square().sum() + s.trace() + t.trace() - 2 * cross


@pytest.mark.parametrize("d", [1, 2, 3])
def test_wasserstein_metric_is_half_the_second_derivative(d):
    space = Wasserstein(d)
    point, other = space.join(*moments(d, 1)), space.join(*moments(d, 2))
    assert_close(space.distance(point, other).square(), w2(space, point, other))
    metric = space.metric(point)
    check_operator(metric)
    h, n = 1e-4, space.size  # the distance itself by differences
    eye = h * torch.eye(n, dtype=F64)

    def half(x):
        return w2(space, point, x) / 2

    differences = torch.stack(
        [
            torch.stack(
                [(half(point + a + b) - half(point + a - b) - half(point - a + b) + half(point - a - b)) for b in eye]
            )
            for a in eye
        ]
    ) / (4 * h**2)
    assert_close(metric.dense(), differences, rtol=1e-4, atol=1e-5)
    g = draw(n, seed=3)
    assert_close(metric.inverse().mv(metric @ g), g)
    assert_close(space.natural(point, metric @ g), g)


def test_fisher_rao_of_normals_does_not_change_under_affine_maps_and_wasserstein_does():
    fisher, wasserstein = Normals(2), Wasserstein(2)
    (m, s), (n, t), a = moments(2, 1), moments(2, 2), draw(2, 2, seed=9)
    points = [fisher.join(m, s), fisher.join(n, t)]
    moved = [fisher.join(a @ m + 1, a @ s @ a.mT), fisher.join(a @ n + 1, a @ t @ a.mT)]
    assert_close(fisher.distance(*moved), fisher.distance(*points), rtol=1e-9, atol=1e-9)
    assert abs(float(wasserstein.distance(*moved) - wasserstein.distance(*points))) > 0.01


POINT = torch.zeros(2, dtype=F64)
DOORS = {
    "fisher_rao": fisher_rao,
    "e_geodesic": lambda family: e_geodesic(family, POINT, POINT, 0.5),
    "m_geodesic": lambda family: m_geodesic(family, POINT, POINT, 0.5),
    "tilt": lambda family: tilt(family, POINT, [0], POINT[:1]),
    "mirror_step": lambda family: mirror_step(family, POINT, POINT, 0.1),
    "kl_ball": lambda family: kl_ball(family, POINT, 0.1, 4),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_distribution_of_torch_is_no_family(name: str):
    with pytest.raises(TypeError, match=r"family is Normal.*expected an exponential family of natgrad"):
        DOORS[name](torch.distributions.Normal(0.0, 1.0))
