"""Mirror descent: each step minimises its model over its region."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw
from optim_models import pass_through_file
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.geometry import (
    Ball,
    Box,
    LogPartition,
    NegativeEntropy,
    PNorm,
    Potential,
    ProbabilitySimplex,
    SquaredNorm,
)

ENTROPY, SIMPLEX = NegativeEntropy(), ProbabilitySimplex()


def free(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed)


def positive(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).exp()


def shares(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).softmax(-1)


def inside_ball(p: float, radius: float):
    def make(*shape: int, seed: int = 0) -> Tensor:
        w = draw(*shape, seed=seed)
        return w * radius * (0.3 + seed % 7 / 10) / torch.linalg.vector_norm(w, p)

    return make


# a potential, a region, and points in both
CASES = {
    "gradient descent": (SquaredNorm(), None, free),
    "projected on a box": (SquaredNorm(), Box(-0.3, 0.5), lambda *s, seed=0: draw(*s, seed=seed).clamp(-0.3, 0.5)),
    "projected on a ball": (SquaredNorm(), Ball(0.7), inside_ball(2.0, 0.7)),
    "projected on the simplex": (SquaredNorm(), SIMPLEX, shares),
    "exponentiated": (ENTROPY, None, positive),
    "exponentiated in a box": (ENTROPY, Box(0.5, 2.0), lambda *s, seed=0: positive(*s, seed=seed).clamp(0.5, 2.0)),
    "exponentiated on the simplex": (ENTROPY, SIMPLEX, shares),
    "p-norm": (PNorm(1.3), None, free),
    "p-norm above two": (PNorm(3.0), None, free),
    "p-norm in its ball": (PNorm(1.3), Ball(0.7), inside_ball(1.3, 0.7)),
    "counts": (LogPartition(ng.Poisson(4)), None, lambda *s, seed=0: 1 + 0.2 * draw(*s, seed=seed)),
}
every = pytest.mark.parametrize("name", CASES)


def take_step(potential: Potential, region, start: Tensor, gradient: Tensor, rate: float) -> Tensor:
    w = start.clone().requires_grad_()
    opt = ng.MirrorDescent([w], potential, lr=rate, projection=region)
    w.grad = gradient.clone()
    opt.step()
    return w.detach()


@every
def test_the_dual_is_the_gradient_and_has_its_inverse(name):
    potential, _, make = CASES[name]
    point = make(3, 4)
    assert_close(potential.dual(point), torch.func.grad(potential.value)(point))
    assert_close(potential.primal(potential.dual(point)), point)
    assert float(potential.divergence(point, make(3, 4, seed=1))) > 0
    assert_close(potential.divergence(point, point), torch.zeros((), dtype=F64), rtol=0, atol=1e-12)


@every
def test_a_step_minimises_its_model_over_the_region(name):
    """<g, w'> + D(w', w) / rate is no lower at any other point of the region, nearby or far."""
    potential, region, make = CASES[name]
    start, gradient, rate = make(3, 4), 0.3 * draw(3, 4, seed=7), 0.8
    found = take_step(potential, region, start, gradient, rate)

    def model(point: Tensor) -> float:
        return float((gradient * point).sum() + potential.divergence(point, start) / rate)

    least = model(found)
    assert least <= model(start)
    for k in range(40):
        far = make(3, 4, seed=k)
        other = far if k % 2 else found + 0.01 * (far - found)  # regions are convex
        assert least <= model(other) + 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_euclidean_is_torch_s_gradient_descent(momentum):
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    theirs.load_state_dict(ours.state_dict())
    pair = (
        ng.MirrorDescent(ours.parameters(), lr=0.1, momentum=momentum),
        torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum),
    )
    for k in range(5):
        x = draw(6, 3, seed=k)
        for model, opt in zip((ours, theirs), pair, strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(p, q)


def test_exponentiated_steps_multiply():
    start, gradient = shares(2, 3), draw(2, 3, seed=1)
    assert_close(take_step(ENTROPY, None, start, gradient, 0.4), start * (-0.4 * gradient).exp())
    product = start * (-0.4 * gradient).exp()
    found = take_step(ENTROPY, ProbabilitySimplex(0), start, gradient, 0.4)
    assert_close(found, product / product.sum(0))


def test_exponents_of_any_size_leave_probabilities_that_can_grow_again():
    w = torch.full((3,), 1 / 3, requires_grad=True)
    opt = ng.MirrorDescent([w], ENTROPY, lr=1.0, projection=SIMPLEX)
    for gradient in ([1e6, 0.0, -1e6], [-1e3, 0.0, 1e3]):
        w.grad = torch.tensor(gradient)
        opt.step()
        assert bool((w > 0).all())
        assert_close(w.detach().sum(), torch.tensor(1.0))
    assert bool(w[0] > 0.99)


def test_a_step_beyond_the_possible_means_is_halved():
    rate = torch.zeros(1, dtype=F64, requires_grad=True)  # eta = 1
    opt = ng.MirrorDescent([rate], LogPartition(ng.Poisson(1)), lr=1.0)
    rate.grad = torch.tensor([3.0], dtype=F64)
    opt.step()
    assert_close(rate.detach().exp(), torch.tensor([0.25], dtype=F64))  # 1 - 3 / 4


def train(opt, params, steps, start=0):
    for k in range(start, start + steps):

        def closure(seed=k):
            opt.zero_grad()
            value = sum((p.square() * draw(*p.shape, seed=seed)).sum() for p in params)
            value.backward()
            return value

        opt.step(closure)


def build():
    params = [shares(2, 3).requires_grad_(), free(4).requires_grad_()]
    groups = [
        {"params": [params[0]], "potential": ENTROPY, "projection": SIMPLEX},
        {"params": [params[1]], "momentum": 0.5, "lr": 0.01},
    ]
    return params, ng.MirrorDescent(groups, PNorm(1.5), lr=0.2)


def test_save_load_continue_is_never_having_stopped():
    params, opt = build()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    train(opt, params, 3)
    schedule.step()
    saved = pass_through_file({"opt": opt.state_dict(), "params": params})
    train(opt, params, 3, start=3)
    others, fresh = build()
    with torch.no_grad():
        for p, q in zip(others, saved["params"], strict=True):
            p.copy_(q)
    fresh.load_state_dict(saved["opt"])
    train(fresh, others, 3, start=3)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
    assert_close(params[0].sum(-1), torch.ones(2, dtype=F64))


def test_a_checkpoint_of_another_potential_is_refused():
    _, opt = build()
    w = [shares(2, 3).requires_grad_(), free(4).requires_grad_()]
    other = ng.MirrorDescent([{"params": [p]} for p in w])
    with pytest.raises(ValueError, match="potential NegativeEntropy"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match=r"not saved by ng\.MirrorDescent"):
        ng.MirrorDescent(w).load_state_dict(torch.optim.SGD(w, 0.1).state_dict())


def test_steps_that_are_not_finite_are_left_out_together():
    params, opt = build()
    before = [p.detach().clone() for p in params]
    params[0].grad, params[1].grad = draw(2, 3), torch.full((4,), torch.nan, dtype=F64)
    opt.step()
    assert opt.accidents.count == 1
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    strict = ng.MirrorDescent([params[1]], on_trouble="raise")
    with pytest.raises(ValueError, match="not finite"):
        strict.step()


def test_climbing_is_descent_of_the_negative():
    w = [free(3).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        w[1].copy_(w[0])
    gradient = draw(3, seed=5)
    for p, climb in zip(w, (True, False), strict=True):
        opt = ng.MirrorDescent([p], PNorm(1.5), lr=0.1, maximize=climb)
        p.grad = gradient if climb else -gradient
        opt.step()
    assert torch.equal(*w)


@pytest.mark.parametrize(
    ("build_one", "error", "words"),
    [
        (lambda w: ng.MirrorDescent([w], ENTROPY), ValueError, ("parameter 0 of group 0", "expected positive")),
        (lambda w: ng.MirrorDescent([w], NegativeEntropy), TypeError, ("potential", "parentheses")),  # type: ignore[arg-type]
        (lambda w: ng.MirrorDescent([w], projection=(0, 1)), TypeError, ("projection", "Region")),  # type: ignore[arg-type]
        (lambda w: ng.MirrorDescent([w], PNorm(1.5), projection=Box(0, 1)), TypeError, ("Box", "PNorm")),
        (lambda w: ng.MirrorDescent([w], lr=-1.0), ValueError, ("lr is -1",)),
        (lambda w: ng.MirrorDescent([w], on_trouble="stop"), ValueError, ("on_trouble",)),  # type: ignore[arg-type]
        (lambda w: ng.MirrorDescent([w], LogPartition(ng.families.Exponential())), ValueError, ("parameter 0",)),
        (lambda w: PNorm(1.0), ValueError, ("p is 1",)),
        (lambda w: Box(1.0, 0.0), ValueError, ("low",)),
        (lambda w: Ball(0.0), ValueError, ("radius",)),
    ],
)
def test_errors_name_what_is_wrong(build_one, error, words):
    with pytest.raises(error) as caught:
        build_one(torch.zeros(1, requires_grad=True))
    assert all(word in str(caught.value) for word in words), str(caught.value)
