"""The derivation of 2022 by search: the least loss on a small ball of KL lies along the natural gradient."""

import math
from itertools import pairwise

import pytest
import torch

import natgrad as ng
from natgrad_lab.papers.blog_2022 import steepest

PLACE = steepest.make_place()


def test_the_least_loss_on_a_ball_comes_to_the_natural_gradient_as_the_root_of_its_nats():
    angles = steepest.list_angles(PLACE)
    natural = [natural for natural, _ in angles.values()]
    for wide, narrow in pairwise(natural):  # a tenth of the nats
        assert wide / narrow == pytest.approx(math.sqrt(10), rel=0.1)
    assert all(plain > 30 for _, plain in angles.values())


@pytest.mark.parametrize("nats", [1e-2, 1e-4])
def test_no_point_of_the_ball_has_less_loss(nats):
    lowest = steepest.find_lowest(PLACE, nats)
    ball = PLACE.on_ball(steepest.circle(), nats)
    assert PLACE.kl(lowest).item() == pytest.approx(nats, rel=1e-10)
    torch.testing.assert_close(PLACE.kl(ball), torch.full_like(ball[:, 0], nats), rtol=1e-9, atol=0)
    assert PLACE.loss(lowest) <= PLACE.loss(ball).min()


def test_gradient_and_kl_are_those_of_the_model():
    outputs = PLACE.model(PLACE.inputs)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, PLACE.labels)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(PLACE.model.parameters()))])
    torch.testing.assert_close(PLACE.gradient, expected, rtol=1e-12, atol=1e-14)
    step = 1e-3 * torch.tensor([1.0, -2.0], dtype=torch.float64)
    metric = ng.fisher(PLACE.model, ng.Bernoulli()).at(ng.trainable(PLACE.model), PLACE.inputs)
    assert PLACE.kl(PLACE.point + step).item() == pytest.approx((step @ metric.mv(step) / 2).item(), rel=0.01)


def test_angles_have_no_sign():
    first = torch.tensor([1.0, 0.0])
    assert steepest.measure_angle(first, torch.tensor([0.0, -2.0])) == pytest.approx(90)


def test_the_pages_three_formulas_come_to_what_they_stand_for_as_the_root_of_the_nats():
    numbers = list(steepest.compare_formulas(PLACE).values())
    for name in ("nats", "multiplier", "loss"):
        wide, narrow = (abs(given / true - 1) for given, true in (ball[name] for ball in numbers[-2:]))
        assert narrow < 0.03
        assert wide / narrow == pytest.approx(math.sqrt(10), rel=0.1)
