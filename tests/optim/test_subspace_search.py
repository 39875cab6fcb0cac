"""Krylov subspace descent, going back over CG's iterates, and trial points on other data."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from models import F64, Assembled, assert_close, draw, mlp
from optim_models import CE, Closure, X, Y, dropout_net, flat, iterate, mean_gradient, net, train
from scipy.optimize import minimize
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import DenseOperator
from natgrad.rules import FlatStep, Quadratic, SystemFacts

G = torch.diag(torch.tensor([4.0, 1.0, 0.25, 0.1], dtype=F64))
g = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=F64)


class Known:
    """A loss with its gradient, that counts what it was asked."""

    def __init__(self, loss) -> None:
        self.loss, self.values, self.gradients = loss, 0, 0

    def __call__(self, vector: Tensor) -> float:
        self.values += 1
        return float(self.loss(vector))

    def gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        self.gradients += 1
        point = vector.clone().requires_grad_()
        value = self.loss(point)
        return float(value.detach()), torch.autograd.grad(value, point)[0]


def model(loss: float = 0.0, dimension: int = 3, damping: float = 0.05, rate: float = 1.0) -> Quadratic:
    """The quadratic model with the Krylov solution as its proposal."""
    solution = ng.KrylovSubspace(dimension).solve(DenseOperator(G), g, damping=damping)
    proposal = FlatStep(-rate * solution.value, -rate * (solution.image - damping * solution.value))
    return Quadratic(g, DenseOperator(G), damping, proposal, 1.0, loss, system=SystemFacts(basis=solution.basis))


def bend_model(d: Tensor) -> Tensor:
    """Not quadratic: the model is wrong away from 0."""
    return g @ d + 0.5 * d @ G @ d + 0.3 * d.pow(4).sum() + 0.2 * torch.sin(3 * d).sum() - 0.6 * d.sum()


def test_the_search_finds_the_lowest_loss_of_the_subspace():
    m = model(0.0)
    step, _ = ng.SubspaceSearch(steps=100, progress=0.0).step(m, Known(bend_model), {})
    assert m.system.basis is not None
    found = m.system.basis.vectors @ step.vector
    assert_close(m.system.basis.at(found), step.vector, 1e-12)  # it stays inside
    assert_close(step.image, G @ step.vector, 1e-12)

    def outside(a):
        return float(bend_model(m.system.basis.at(torch.from_numpy(a))))

    peer = minimize(outside, found.numpy(), method="BFGS", options={"gtol": 1e-9})
    assert float(bend_model(step.vector)) == pytest.approx(peer.fun, abs=1e-8)


def test_on_an_exact_quadratic_the_proposal_is_the_answer_at_once():
    def quadratic(d: Tensor) -> Tensor:
        return g @ d + 0.5 * d @ G @ d

    loss, m = Known(quadratic), model(damping=0.0)
    step, _ = ng.SubspaceSearch().step(m, loss, {})
    assert_close(step.vector, m.proposal.vector, 1e-9)
    assert loss.gradients <= 2


@pytest.mark.parametrize("rate", [1.0, 50.0])
def test_a_bad_start_and_losses_that_are_not_finite_are_rejections(rate):
    def wall_model(d: Tensor) -> Tensor:
        return bend_model(d) if float(d.detach().norm()) < 0.3 else torch.full((), math.nan, dtype=F64) * d.sum()

    step, _ = ng.SubspaceSearch(steps=30).step(model(rate=rate), Known(wall_model), {})
    assert 0 < float(step.vector.norm()) < 0.3
    assert float(bend_model(step.vector)) < 0
    nowhere, _ = ng.SubspaceSearch().step(model(), Known(lambda d: d.sum() * math.nan), {})
    assert not nowhere.vector.any()


def test_what_the_search_needs_is_named():
    rule = ng.SubspaceSearch()
    with pytest.raises(ValueError, match="KrylovSubspace"):
        rule.step(Quadratic(g, DenseOperator(G), 0.1, model().proposal), Known(bend_model), {})
    with pytest.raises(ValueError, match="gradient of the loss"):
        rule.step(model(), lambda d: 0.0, {})
    with pytest.raises(ValueError, match="re-evaluates the loss"):
        rule.step(model(), None, {})
    for name, value in (("steps", 0), ("steps", 2.5), ("progress", math.nan)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            ng.SubspaceSearch(**{name: value})


# going back over iterates


def cg_model(loss_at, keep: float | None = 1.01, rate: float = 1.0) -> tuple[Quadratic, list[Tensor]]:
    matrix = torch.diag(torch.logspace(0, 3, 12, dtype=F64))
    b = draw(12, seed=3)
    solution = ng.CG(rtol=0, max_steps=9, keep=keep).solve(DenseOperator(matrix), b, damping=0.1)
    steps = [FlatStep(-rate * i.value, -rate * (i.image - 0.1 * i.value)) for i in (*solution.iterates, solution)]
    earlier = [lambda s=s: s for s in steps[:-1]]
    made = Quadratic(b, DenseOperator(matrix), 0.1, steps[-1], 1.0, loss_at(torch.zeros(12, dtype=F64)))
    made = replace(made, system=SystemFacts(earlier=earlier))
    return made, [s.vector for s in steps]


def test_cg_keeps_the_iterates_it_passed_with_their_images():
    matrix, b = torch.diag(torch.logspace(0, 3, 12, dtype=F64)), 1e3 * draw(12, seed=3)
    passed = []
    solver = ng.CG(rtol=0, max_steps=11, keep=1.3, callback=lambda i, x, r: passed.append(x.clone()))
    solution = solver.solve(DenseOperator(matrix), b, damping=0.1)
    assert [any(torch.equal(i.value, x) for x in passed) for i in solution.iterates] == [True] * len(solution.iterates)
    expected = [1, 2, 3, 4, 6, 8]  # each at least 1.3 times the last; 11 is the solution itself
    assert [i for i, x in enumerate(passed, 1) if any(torch.equal(x, k.value) for k in solution.iterates)] == expected
    for iterate_ in solution.iterates:
        assert_close(iterate_.image, matrix @ iterate_.value + 0.1 * iterate_.value, 1e-9)
    assert ng.CG(max_steps=5).solve(DenseOperator(matrix), b).iterates == ()
    with pytest.raises(ValueError, match="keep is 1"):
        ng.CG(keep=1.0)


def test_the_line_search_goes_back_while_the_loss_falls():
    target = cg_model(lambda d: 0.0)[1][4]  # the fifth iterate is where the true loss is lowest

    def loss(d: Tensor) -> float:
        return float((d - target).square().sum())

    m, steps = cg_model(loss)
    step, _ = ng.LineSearch(iterates=True, sufficient=0.0).step(m, loss, {})
    assert torch.equal(step.vector, steps[4])
    plain, _ = ng.LineSearch(sufficient=0.0).step(m, loss, {})
    assert not torch.equal(plain.vector, steps[4])


def test_it_goes_back_over_iterates_whose_loss_is_not_finite():
    limit = float(cg_model(lambda d: 0.0)[1][2].norm()) * 1.0001

    def loss(d: Tensor) -> float:
        return -float(d.norm()) if float(d.norm()) <= limit else math.nan

    m, steps = cg_model(loss)
    step, _ = ng.LineSearch(iterates=True, sufficient=0.0).step(m, loss, {})
    assert torch.equal(step.vector, steps[2])


# in the optimizer


def test_krylov_subspace_descent_trains_and_its_loss_is_never_higher():
    net_ = mlp(3, 6, 3)
    losses = train(ng.krylov_subspace(net_, CE, dimension=5, steps=4), net_, 12)
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[-1] < 0.1 * losses[0]


def test_the_step_is_the_lowest_point_of_the_space_on_the_batch_of_the_search():
    net_, (a, b) = net(), (draw(9, 3, seed=8), torch.tensor([0, 1, 2] * 3))
    twin = copy.deepcopy(net_)
    opt = ng.krylov_subspace(net_, CE, dimension=4, steps=60, damping=0.1)
    opt.rule = ng.SubspaceSearch(steps=60, progress=0.0)
    opt.search_on(a, b)
    iterate(opt, net_, X, Y)
    moved = flat(net_) - flat(twin)
    metric = ng.fisher(twin, CE).at(ng.trainable(twin), X)
    basis = ng.KrylovSubspace(4).solve(metric, mean_gradient(twin, X, Y), damping=0.1).basis
    assert basis is not None
    assert_close(basis.at(basis.vectors @ moved), moved, 1e-9)
    # stationary there, on the search's data and not on the gradient's
    assert float((basis.vectors @ mean_gradient(net_, a, b)).norm()) < 1e-5
    assert float((basis.vectors @ mean_gradient(net_, X, Y)).norm()) > 1e-2


def test_the_last_step_joins_the_next_space():
    net_ = net()
    opt = ng.krylov_subspace(net_, CE, dimension=3, damping=0.1)
    before = flat(net_)
    iterate(opt, net_, X, Y)
    step = flat(net_) - before
    kept = opt.state_dict()["state"].values()
    assert_close(torch.cat([vectors["solution"].flatten() for vectors in kept]), -step, 1e-12)
    iterate(opt, net_, X, Y)
    assert opt.state_report().solver_steps == 4  # three, and the last step's


@pytest.mark.parametrize("rule", [ng.LineSearch(), ng.SubspaceSearch(steps=3)], ids=["line search", "subspace search"])
def test_trial_points_are_drawn_apart_from_the_metric_and_resume(rule):
    def build(model: nn.Module) -> ng.NaturalGradient:
        metric = ng.gauss_newton(model, CE)
        return ng.NaturalGradient(model, metric, solver=ng.KrylovSubspace(4), rule=rule, metric_batch=3, search_batch=4)

    straight, stopped = net(), net()
    opt, first = build(straight), build(stopped)
    # the loss told is that of the search's examples: the last four of the order whose first three the metric has
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    expected = float(CE(straight(X[order[-4:]]), Y[order[-4:]]).detach())
    train(opt, straight, 1)
    assert opt.state_report().loss == pytest.approx(expected, rel=1e-12)
    train(opt, straight, 1)
    train(first, stopped, 1)
    second = build(stopped)
    second.load_state_dict(first.state_dict())
    train(second, stopped, 1)
    assert torch.equal(flat(straight), flat(stopped))


def test_masks_are_the_same_at_every_trial_point_and_closures_work_too():
    model_ = dropout_net()
    opt = ng.krylov_subspace(model_, CE, dimension=4, steps=3)
    train(opt, model_, 3)
    assert opt.state_report().failures == 0
    by_loss, by_closure = net(), net()
    first, second = (ng.krylov_subspace(m, CE, dimension=4, steps=3) for m in (by_loss, by_closure))
    train(first, by_loss, 2)
    for _ in range(2):
        second.step(Closure(second, lambda: CE(by_closure(X), Y)))
    assert_close(flat(by_closure), flat(by_loss), 1e-8)


@pytest.mark.parametrize("solver", [None, ng.CG(), ng.Auto()])
def test_going_back_needs_a_solver_that_keeps_iterates(solver):
    net_ = net()
    with pytest.raises(ValueError, match=r"ng\.CG\(keep=1\.3\)"):
        ng.NaturalGradient(net_, ng.fisher(net_, CE), solver=solver, rule=ng.LineSearch(iterates=True))


def test_bad_requests_are_named():
    net_ = net()
    with pytest.raises(ValueError, match="search_batch is 0"):
        ng.krylov_subspace(net_, CE, search_batch=0)
    with pytest.raises(TypeError, match=r"metric_batch is 4\.5"):
        ng.krylov_subspace(net_, CE, metric_batch=4.5)  # type: ignore[arg-type]
    opt = ng.krylov_subspace(net_, CE)
    with pytest.raises(ValueError, match="targets is None"):
        opt.search_on(X, None)
    with pytest.raises(ValueError, match="empty batch"):
        opt.search_on(X[:0], Y[:0])
    opt = ng.krylov_subspace(net_, CE, search_batch=4)
    with pytest.raises(ValueError, match=r"optimizer\.loss"):
        opt.step(Closure(opt, lambda: CE(net_(X), Y)))
    for choice in ("metric_batch", "search_batch"):  # of columns, which the model takes for its examples
        opt = ng.krylov_subspace(Assembled(lambda m, x: m.net(x.mT), net=net_), CE, **{choice: 2})
        opt.loss(opt.model(X.mT), Y).backward()
        with pytest.raises(ValueError, match=r"targets has shape \(8,\), expected \(3, \.\.\.\)"):
            opt.step()
    params = {"w": torch.zeros(3, 3, dtype=F64, requires_grad=True)}
    plain = ng.NaturalGradient(params, ng.fisher(lambda p, x: x @ p["w"], CE))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        plain.search_on(X, Y)
    with pytest.raises(TypeError, match=r"search_batch needs an nn\.Module"):
        ng.NaturalGradient(params, plain.metric, search_batch=4)


def test_the_learning_rate_is_the_share_of_the_step_that_is_taken():
    def move(**choices) -> Tensor:
        model_ = net()
        solver, rule = ng.KrylovSubspace(4), ng.SubspaceSearch(steps=3)
        metric = ng.gauss_newton(model_, CE)
        if "rates" in choices:  # by group: the same space and the same search, each part at its own rate
            groups = zip(([p] for p in model_.parameters()), choices.pop("rates"), strict=True)
            choices["params"] = [{"params": part, "lr": rate} for part, rate in groups]
        train(ng.NaturalGradient(model_, metric, solver=solver, rule=rule, damping=1e-3, **choices), model_, 1)
        return flat(model_) - flat(net())

    whole = move(lr=1.0)
    assert_close(move(lr=0.3), 0.3 * whole, 1e-12)
    assert not move(lr=0.0).any()
    parts = move(rates=(0.0, 1.0, 1.0, 1.0))
    assert not parts[:12].any()
    assert_close(parts[12:], whole[12:], 1e-12)


def test_a_loss_that_is_not_finite_at_the_start_is_counted():
    model_ = net()
    opt = ng.krylov_subspace(model_, CE, dimension=4)
    opt.search_on(X * math.inf, Y)
    before = flat(model_)
    iterate(opt, model_, X, Y)
    assert torch.equal(flat(model_), before)
    assert opt.state_report().failures == 1
    iterate(opt, model_, X, Y)
    assert opt.state_report().failures == 1
    assert not torch.equal(flat(model_), before)


# the metric on part of a large batch


ROWS, LABELS = draw(12, 3), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1])


def build_part(model: nn.Module, **choices) -> ng.NaturalGradient:
    """Exact steps, so that only the data decide."""
    metric = ng.gauss_newton(model, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], dtype=torch.float64)))
    return ng.NaturalGradient(model, metric, lr=0.5, solver=ng.Direct(), damping=1e-2, **choices)


def test_the_metric_is_that_of_the_drawn_examples_and_the_gradient_that_of_all():
    part, observed = mlp(3, 4, 2), mlp(3, 4, 2)
    opt, reference = build_part(part, metric_batch=5), build_part(observed)
    seen = []
    for _ in range(3):
        drawn = torch.randperm(12, generator=torch.Generator().manual_seed(opt.state_report().step))[:5]
        seen.append(set(drawn.tolist()))
        reference.observe(ROWS[drawn], LABELS[drawn])
        iterate(opt, part, ROWS, LABELS)
        iterate(reference, observed, ROWS, LABELS)
        assert_close(flat(part), flat(observed), 1e-13)
    assert seen[0] != seen[1]
    small, whole = mlp(3, 4, 2), mlp(3, 4, 2)  # a batch that is small enough is taken whole
    iterate(build_part(small, metric_batch=12), small, ROWS, LABELS)
    iterate(build_part(whole), whole, ROWS, LABELS)
    assert torch.equal(flat(small), flat(whole))


# the first recipe, truncated Newton with Levenberg-Marquardt damping


def clusters(classes: int = 5, size: int = 200) -> tuple[Tensor, Tensor]:
    """Images that look a little like digits: noisy prototypes of 16 pixels, on very different scales."""
    y = torch.arange(size) % classes
    prototypes = draw(classes, 16, seed=21)
    x = prototypes[y] + 0.8 * draw(size, 16, seed=22)
    return x * torch.logspace(-1, 1, 16, dtype=torch.float64), y


def test_ten_steps_reach_lower_than_ten_of_plain_gradient_descent_at_its_best_rate() -> None:
    x, y = clusters()
    start, plain = mlp(16, 12, 5), []
    for lr in (0.01, 0.1, 0.3, 1.0):
        model = copy.deepcopy(start)
        opt = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(10):
            opt.zero_grad()
            CE(model(x), y).backward()
            opt.step()
        plain.append(float(CE(model(x), y).detach()))
    losses = train(ng.hessian_free(start, CE), start, 11, x, y)
    assert losses[-1] < 0.2 * min(plain)
    assert all(b <= a for a, b in pairwise(losses))  # the line search never raises it


def test_its_damping_follows_its_ratio() -> None:
    x, y = clusters()
    model = mlp(16, 6, 5)
    opt = ng.hessian_free(model, CE)
    dampings, ratios = [], []
    for _ in range(8):
        iterate(opt, model, x, y)
        told = opt.state_report()
        dampings.append(told.damping)
        ratios.append(told.ratio)
    for before, after, ratio in zip(dampings, dampings[1:], ratios, strict=False):
        assert after == ng.LevenbergMarquardt().update(before, ratio)
