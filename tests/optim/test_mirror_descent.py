"""Mirror descent: each step minimises its model over its region."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import F64, draw
from optim_models import flat, pass_through_file
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.geometry import Ball, Box, LogPartition, NegativeEntropy, PNorm, Potential, ProbabilitySimplex, SquaredNorm

ENTROPY, SIMPLEX = NegativeEntropy(), ProbabilitySimplex()


# a potential, a region, and points in both
Draw = Callable[..., Tensor]


def shares(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).softmax(-1)


def inside_ball(p: float, radius: float) -> Draw:
    def make(*shape: int, seed: int = 0) -> Tensor:
        w = draw(*shape, seed=seed)
        return w * radius * (0.3 + seed % 7 / 10) / torch.linalg.vector_norm(w, p)

    return make


def change(function: Callable[[Tensor], Tensor]) -> Draw:
    """Normal numbers behind a function."""
    return lambda *shape, seed=0: function(draw(*shape, seed=seed))


# a potential, a region, and points in both
CASES: dict[str, tuple[Potential, Any, Draw]] = {
    "gradient descent": (SquaredNorm(), None, draw),
    "projected on a box": (SquaredNorm(), Box(-0.3, 0.5), change(lambda w: w.clamp(-0.3, 0.5))),
    "projected on a ball": (SquaredNorm(), Ball(0.7), inside_ball(2.0, 0.7)),
    "projected on the simplex": (SquaredNorm(), SIMPLEX, shares),
    "exponentiated": (ENTROPY, None, change(torch.exp)),
    "exponentiated in a box": (ENTROPY, Box(0.5, 2.0), change(lambda w: w.exp().clamp(0.5, 2.0))),
    "exponentiated on the simplex": (ENTROPY, SIMPLEX, shares),
    "p-norm": (PNorm(1.3), None, draw),
    "p-norm above two": (PNorm(3.0), None, draw),
    "p-norm in its ball": (PNorm(1.3), Ball(0.7), inside_ball(1.3, 0.7)),
    "counts": (LogPartition(ng.Poisson(4)), None, change(lambda w: 1 + 0.2 * w)),
}
every = pytest.mark.parametrize("name", CASES)


def take_step(
    potential: Potential, region: Any, start: Tensor, gradient: Tensor, rate: float, **options: Any
) -> Tensor:
    w = start.clone().requires_grad_()
    opt = ng.MirrorDescent([w], potential, lr=rate, projection=region, **options)
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


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"maximize": True}])
def test_euclidean_is_torch_s_gradient_descent(options):
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    theirs.load_state_dict(ours.state_dict())
    first = ng.MirrorDescent(ours.parameters(), lr=0.1, **options)
    second = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    for k in range(5):
        for model, opt in ((ours, first), (theirs, second)):
            opt.zero_grad()
            model(draw(6, 3, seed=k)).square().mean().backward()
            opt.step()
    assert_close(flat(ours), flat(theirs))


def test_exponentiated_steps_multiply():
    start, gradient = shares(2, 3), draw(2, 3, seed=1)
    product = start * (-0.4 * gradient).exp()
    assert_close(take_step(ENTROPY, None, start, gradient, 0.4), product)
    assert_close(take_step(ENTROPY, None, start, -gradient, 0.4, maximize=True), product)
    assert_close(take_step(ENTROPY, ProbabilitySimplex(0), start, gradient, 0.4), product / product.sum(0))


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
    one = torch.zeros(1, dtype=F64)  # eta = 1
    found = take_step(LogPartition(ng.Poisson(1)), None, one, torch.tensor([3.0], dtype=F64), 1.0)
    assert_close(found.exp(), torch.tensor([0.25], dtype=F64))  # 1 - 3 / 4


def train(opt, params, steps, start=0):
    for k in range(start, start + steps):

        def closure(seed=k):
            opt.zero_grad()
            value = sum((p.square() * draw(*p.shape, seed=seed)).sum() for p in params)
            value.backward()
            return value

        opt.step(closure)


def build():
    params = [shares(2, 3).requires_grad_(), draw(4).requires_grad_()]
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
    opt.param_groups[0]["lr"] = np.float64(opt.param_groups[0]["lr"])
    saved = pass_through_file({"opt": opt.state_dict(), "params": params})
    copies = [copy.deepcopy((opt, params)), pickle.loads(pickle.dumps((opt, params)))]
    train(opt, params, 3, start=3)
    others, fresh = build()
    with torch.no_grad():
        for p, q in zip(others, saved["params"], strict=True):
            p.copy_(q)
    fresh.load_state_dict(saved["opt"])
    for again, held in [(fresh, others), *copies]:
        train(again, held, 3, start=3)
        for p, q in zip(params, held, strict=True):
            assert torch.equal(p, q)
    assert_close(params[0].sum(-1), torch.ones(2, dtype=F64))


def test_a_checkpoint_of_another_potential_is_refused():
    _, opt = build()
    w = [shares(2, 3).requires_grad_(), draw(4).requires_grad_()]
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
