"""Flows: known solutions, invariance under coordinates, where they end and why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import Gamma, Ising, MultivariateNormal
from natgrad.flows import (
    FlowCoordinates,
    destinations,
    deviation_coordinates,
    expectation_coordinates,
    expected_value,
    flow,
    flow_field,
    lattice,
    probability_coordinates,
)
from natgrad.flows.pictures import choose_chart

pytest.importorskip("scipy")

TOY = Ising(2, [(0,), (1,)])
MU = probability_coordinates(TOY)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "flows.json").read_text())


def toy(x):
    return x[:, 0] + 2 * x[:, 1] + 3 * x[:, 0] * x[:, 1]


F = expected_value(TOY, toy)


def point(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("one", VECTORS["independence_model"], ids=lambda one: str(one["mu"]))
def test_gradients_of_the_toy_example(one):
    mu = point(*one["mu"])
    theta = MU.theta(mu)
    assert_close(F(theta).item(), one["F"], rtol=0, atol=1e-12)
    eta = expectation_coordinates(TOY)
    for name, chart, at in (("mu", MU, mu), ("theta", None, theta), ("eta", eta, point(*one["eta"]))):
        for kind, natural in (("grad", False), ("natgrad", True)):
            found = flow_field(F, TOY, chart, natural=natural, maximise=True)(at)
            assert_close(found, point(*one[f"{kind}_{name}"]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("one", VECTORS["independence_flow"], ids=lambda one: str(one["mu0"]))
def test_the_natural_flow_has_the_reference_points(one):
    found = flow(F, TOY, point(*one["mu0"]), point(*one["t"]), MU)
    assert_close(found.points, torch.tensor(one["mu"], dtype=torch.float64), rtol=0, atol=1e-8)
    assert found.status == "end"
    assert bool((found.values.diff() < 0).all())


def test_the_natural_flow_is_the_same_in_all_coordinates():
    one = VECTORS["independence_flow"][-1]
    times, mu0, expected = point(*one["t"][:2]), point(*one["mu0"]), torch.tensor(one["mu"][:2], dtype=torch.float64)
    theta0 = MU.theta(mu0)
    in_theta = flow(F, TOY, theta0, times)
    assert_close(torch.sigmoid(2 * in_theta.points), expected, rtol=0, atol=1e-8)
    in_eta = flow(F, TOY, 2 * mu0 - 1, times, expectation_coordinates(TOY))
    assert_close((in_eta.points + 1) / 2, expected, rtol=0, atol=1e-8)
    mine = FlowCoordinates("mine", lambda xi: xi + xi**3 / 3)
    in_mine = flow(F, TOY, point(*[_cubic(t) for t in theta0.tolist()]), times, mine)
    assert_close(torch.sigmoid(2 * mine.theta(in_mine.points)), expected, rtol=0, atol=1e-8)


def test_many_starts_end_at_the_same_places_in_all_coordinates():
    starts = torch.stack([point(0.3, 0.6), point(1.2, 0.5), point(0.8, 0.1)])  # the second one is outside
    in_mu = destinations(flow_field(F, TOY, MU), starts, 0.5, MU.inside, steps=5)
    eta = expectation_coordinates(TOY)
    in_eta = destinations(flow_field(F, TOY, eta), 2 * starts - 1, 0.5, eta.inside, steps=5)
    assert_close((in_eta + 1) / 2, in_mu, rtol=0, atol=1e-9)


def _cubic(value):
    x = value
    for _ in range(60):
        x -= (x + x**3 / 3 - value) / (1 + x**2)
    return x


@pytest.mark.parametrize("one", [VECTORS["gaussian_quadratic_flow"]])
def test_univariate_quadratic_ascent_is_the_closed_form(one):
    family, chart = MultivariateNormal(1), deviation_coordinates()
    value = expected_value(family, lambda x: (x - 3 * x.square()).squeeze(-1), nodes=2)
    start, times = point(one["mu0"], one["sigma0"]), point(0.0, *one["t"][:2])
    natural = flow(value, family, start, times, chart, maximise=True).points[1:]
    assert_close(natural, torch.stack([point(*one["mu"][:2]), point(*one["sigma"][:2])], 1), rtol=1e-8, atol=1e-8)
    plain = flow(value, family, start, times[:2], chart, maximise=True, natural=False).points
    decay = (-6 * times[:2]).exp()
    assert_close(plain, torch.stack([1 / 6 - 7 / 6 * decay, decay], 1), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("end", [0.02, 0.1, 0.3, 0.5])
def test_points_come_at_all_times_that_are_asked_for(end):
    """Whatever torch's default dtype makes of them."""
    bits = Ising(2, [(0,), (1,)])
    value = expected_value(bits, lambda x: x[:, 0] + 2 * x[:, 1] + 3 * x[:, 0] * x[:, 1])
    path = flow(value, bits, torch.zeros(2, dtype=torch.float64), [0.0, end / 2, end])
    assert path.times.tolist() == [0.0, end / 2, end]
    assert path.points.shape == (3, 2)


def test_a_flow_in_single_precision_is_that_in_double():
    """With the defaults, from a start that also asks for a gradient; and it comes to rest as the other does."""
    start = torch.tensor([0.5, 0.4], requires_grad=True)
    for chart in (MU, None):
        single = flow(F, TOY, start, [0.0, 0.1, 0.5], chart)
        double = flow(F, TOY, start.detach().double(), [0.0, 0.1, 0.5], chart)
        assert (single.status, single.points.dtype) == ("end", torch.float32)
        assert_close(single.points.double(), double.points, rtol=1e-4, atol=1e-4)

    def square(theta):
        return theta.square().sum(-1)

    assert flow(square, TOY, start, 100.0, natural=False).status == "rest"


@pytest.mark.parametrize("span", [[], [0.5, 0.25], [0.0, 0.0, 1.0], [-0.5, 1.0], [[0.0, 1.0]]])
def test_times_that_do_not_increase_are_refused(span):
    with pytest.raises(ValueError, match="expected times that increase from 0 on"):
        flow(F, TOY, point(0.5, 0.5), span, MU)


def test_expected_values():
    family = MultivariateNormal(2)
    theta = family.from_mean_covariance(point(0.3, -0.2), torch.tensor([[1.0, 0.4], [0.4, 2.0]], dtype=torch.float64))
    found = expected_value(family, lambda x: x[:, 0] * x[:, 1] + x[:, 1] ** 4, nodes=3)(theta)
    assert_close(found.item(), 0.4 - 0.06 + 3 * 4 + 6 * 2 * 0.04 + 0.2**4)
    batch = theta.expand(3, 2, 5)
    assert expected_value(family, lambda x: x.sum(1))(batch).shape == (3, 2)
    with pytest.raises(ValueError, match="write F"):
        expected_value(Gamma(), lambda x: x.sum(1))


def test_why_a_flow_ends():
    def kl(theta):
        return TOY.kl(theta, point(0.3, -0.5).expand_as(theta))

    rest = flow(kl, TOY, point(1.0, 1.0), 1000.0)
    assert rest.status == "rest"
    assert "came to rest" in rest.message
    assert_close(rest.points[-1], point(0.3, -0.5), rtol=0, atol=1e-7)
    broken = flow(
        lambda t: torch.where(t[..., 0] > 0, t[..., 0], torch.nan) * 1.0, TOY, point(0.5, 0.0), 5.0, natural=False
    )
    assert broken.status == "not finite"
    with pytest.raises(ValueError, match="not one point inside"):
        flow(F, TOY, point(1.5, 0.5), 1.0, MU)
    with pytest.raises(TypeError, match="start is list"):
        flow(F, TOY, [0.5, 0.5], 1.0, MU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="last time"):
        flow(F, TOY, point(0.5, 0.5), 0.0, MU)
    with pytest.raises(ValueError, match=r"depend on one another, as SubModel\(family, free\)"):
        flow(lambda theta: theta[..., 0], ng.Categorical(3), torch.zeros(3).double(), 1.0)
    with pytest.raises(ValueError, match="independence model"):
        probability_coordinates(Ising(2))


@pytest.mark.parametrize("method", ["DOP853", "LSODA", "BDF"])
def test_a_flow_ends_where_its_field_is_not_known_to_the_tolerance(method):
    """Where f is in the span of T the flow is a straight line, to where the Fisher matrix is nearly singular."""
    family, start, slope = Ising(2, [(0,), (1,), (0, 1)]), point(0.1, 0.2, -0.1), point(1.0, 2.0, 3.0)
    field = expected_value(family, toy)
    asked = 0

    def count_calls(theta):
        nonlocal asked
        asked += 1
        return field(theta)

    found = flow(count_calls, family, start, 40.0, method=method, evaluations=400)
    assert found.status in ("stuck", "not finite")
    told = re.search(r"t = ([\d.]+\d)", found.message)
    assert told is not None
    assert float(told[1]) == pytest.approx(float(found.times[-1]), rel=1e-2)
    assert asked < 500
    assert_close(found.points, start - found.times.unsqueeze(1) * slope, rtol=1e-5, atol=1e-5)
    if method != "DOP853":
        return
    early = flow(field, family, start, torch.linspace(0, 1, 5, dtype=torch.float64))
    assert early.status == "end"
    assert_close(early.points, start - early.times.unsqueeze(1) * slope, rtol=1e-7, atol=1e-7)


def test_the_toy_example_has_a_saddle_and_four_ends():
    saddle = point(1 / 6, 1 / 3)
    assert_close(flow_field(F, TOY, MU)(saddle), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-14)
    starts = lattice((0.0, 1.0), (0.0, 1.0), 5)
    for maximise, ends in ((False, [[1.0, 0.0], [0.0, 1.0]]), (True, [[1.0, 1.0], [0.0, 0.0]])):
        field = flow_field(F, TOY, MU, maximise=maximise)
        found = destinations(field, starts, 12.0, MU.inside, 150)
        nearest = torch.cdist(found, torch.tensor(ends, dtype=torch.float64)).amin(1)
        assert float(nearest.max()) < 1e-3


@pytest.mark.parametrize("family", [MultivariateNormal(1), TOY, Gamma()], ids=str)
def test_a_descent_is_drawn_by_the_gradient_beside_the_natural_gradient(family):
    """Both paths start at one point; the natural one leaves it along G^-1 times the other's direction."""
    pytest.importorskip("matplotlib")
    if isinstance(family, Gamma):
        with pytest.raises(ValueError, match="knows Ising and MultivariateNormal"):
            ng.show_descent(lambda x: x[:, 0], family)
        return
    figure = ng.show_descent(lambda x: x[:, 0] + (x[:, -1] - 1) ** 2, family)
    plain, natural = (torch.tensor(axes.lines[0].get_xydata()) for axes in figure.axes)
    assert_close(plain[0], natural[0])
    leave, leave_naturally = plain[1] - plain[0], natural[1] - natural[0]
    point = plain[0]
    of_normal = torch.stack([(-2 * point[1]).exp(), torch.full_like(point[0], 2)])
    fisher = torch.diag(1 / (point * (1 - point)) if family is TOY else of_normal)
    assert_close(fisher @ leave_naturally, leave.double(), rtol=1e-2, atol=1e-4 * float(leave.norm()))


def test_a_plane_has_two_parameters():
    with pytest.raises(ValueError, match="5 parameters, expected one with two"):
        ng.show_descent(lambda x: x[:, 0], MultivariateNormal(2))
    with pytest.raises(TypeError, match=r"family is Tensor.*where the path starts is start="):
        ng.show_descent(lambda x: x[:, 0], torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ng.show_descent(lambda x: x.sum()), "a number per row"),
        (lambda: ng.show_descent(lambda x: x[:, 0].tolist()), "f returned list"),
        (lambda: ng.show_descent(lambda x: x.sum(), Ising(2, [(0,), (1,)])), "a number per row"),
        (lambda: ng.show_descent("x^2"), "f is str"),
        (lambda: ng.show_descent(lambda x: x[:, 0], start=(0.0, 1.0, 2.0)), "two numbers"),
    ],
)
def test_what_is_no_descent_is_told(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_the_slope_of_mean_and_log_deviation_is_the_derivative():
    chart = choose_chart(MultivariateNormal(1))
    points = torch.stack([point(0.3, -0.7), point(-2.0, 0.4)])
    assert_close(chart.slope(points), torch.func.vmap(torch.func.jacrev(chart.theta))(points))
    assert chart.slope(points[:0]).shape == (0, 2, 2)
