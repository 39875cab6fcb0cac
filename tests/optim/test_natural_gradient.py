"""(G + damping I)^-1 g as a function, and one step of the optimizer against the step written out densely."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Case, assert_close, draw, mlp, reference_metric
from optim_models import CE, X, Y, assert_step, fisher_step, flat, iterate, kind, mean_gradient, net
from torch import Tensor, nn

import natgrad as ng

SOLVERS = [ng.Direct(), ng.CG(rtol=1e-13, max_steps=200), ng.SampleSpace(), ng.Auto()]
T = draw(8, 2, seed=5)
MSE = nn.MSELoss()


# the function


@pytest.mark.parametrize("solver", [*SOLVERS, None], ids=kind)
@pytest.mark.parametrize("damping", [1e-3, 1.0, ng.Constant(0.1), ng.Relative(0.1)], ids=kind)
def test_the_function_solves_the_damped_system(solver: ng.Solver | None, damping: float | ng.Damping) -> None:
    model = net()
    G = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), X)
    g, matrix = mean_gradient(model, X, Y), G.dense()
    lam = (
        damping if isinstance(damping, float) else damping.amount(damping.initial(), ng.operators.DenseOperator(matrix))
    )
    solution = ng.natural_gradient(G, g, solver=solver, damping=damping)
    assert_close(solution.value, torch.linalg.solve(matrix + lam * torch.eye(len(g)).to(g), g), 1e-9)
    assert solution.residual <= 1e-9 * g.norm()


@pytest.mark.parametrize("solver", [ng.Direct(), ng.SampleSpace(), ng.CG(rtol=1e-12, max_steps=500), None], ids=kind)
def test_without_damping_a_singular_metric_gives_the_minimum_norm_step(solver: ng.Solver | None) -> None:
    root = draw(7, 3)
    g = root @ draw(3, seed=1)  # in the range
    found = ng.natural_gradient(ng.operators.LowRankOperator(root), g, solver=solver).value
    assert_close(found, torch.linalg.pinv(root @ root.T, hermitian=True) @ g, 1e-9)


# one step against the dense formula


@pytest.mark.parametrize("structure", [ng.Exact(), ng.Dense()], ids=kind)
@pytest.mark.parametrize("solver", SOLVERS, ids=kind)
@pytest.mark.parametrize("damping", [1e-3, 0.5])
def test_one_step_is_the_dense_formula(solver: ng.Solver, structure: ng.Structure, damping: float) -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=0.3, solver=solver, structure=structure, damping=damping)
    before, g, loss = flat(model), mean_gradient(model, X, Y), float(CE(model(X), Y).detach())
    expected = fisher_step(model, X, ng.Categorical(), g, damping)
    iterate(opt, model)
    assert_step(model, before, -0.3 * expected, 1e-9)
    told = opt.state_report()
    assert (told.step, told.damping, told.failures) == (1, damping, 0)
    assert told.loss == pytest.approx(loss, rel=1e-14)
    assert told.gradient == pytest.approx(float(g.norm()), rel=1e-12)


METRICS: dict[str, Callable[[nn.Module], ng.Metric]] = {
    "fisher": lambda model: ng.fisher(model, CE),
    "gauss_newton": lambda model: ng.gauss_newton(model, CE),
    "empirical": lambda model: ng.empirical_fisher(model, CE),
    "divergence": lambda model: ng.divergence(ng.kl(model, ng.Categorical())),
    "sampled": lambda model: ng.sampled_fisher(model, CE, samples=3, generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_drives_the_step(name: str) -> None:
    model = net()
    twin = copy.deepcopy(model)
    reference = METRICS[name](twin)
    matrix = reference.at(ng.trainable(twin), (X, Y) if reference.needs_targets else X).dense()
    g, before = mean_gradient(model, X, Y), flat(model)
    expected = torch.linalg.solve(matrix + 0.1 * torch.eye(len(g)).to(g), g)
    opt = ng.NaturalGradient(model, METRICS[name](model), lr=1.0, damping=0.1, solver=ng.Direct())
    (CE(model(X), Y) if name == "divergence" else opt.loss(model(X), Y)).backward()
    opt.step()
    assert_step(model, before, -expected, 1e-9)


def test_observe_takes_the_metric_from_other_data() -> None:
    model, other = net(), draw(20, 3, seed=7)
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=1.0, damping=0.05)
    for observed in (other, None):  # once: the next step is back to the gradient's data
        before, g = flat(model), mean_gradient(model, X, Y)
        expected = fisher_step(model, X if observed is None else observed, ng.Categorical(), g, 0.05)
        if observed is not None:
            opt.observe(observed)
        iterate(opt, model)
        assert_step(model, before, -expected, 1e-9)


def test_parameter_groups_have_their_own_rates() -> None:
    model = net()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    opt = ng.NaturalGradient(
        model,
        ng.fisher(model, CE),
        lr=0.5,
        damping=0.1,
        params=[{"params": last, "lr": 0.01}, {"params": first}],
        rule=ng.Rate(),
    )
    before, g = flat(model), mean_gradient(model, X, Y)
    step = fisher_step(model, X, ng.Categorical(), g, 0.1)
    rates = torch.cat([torch.full((16,), 0.5), torch.full((15,), 0.01)]).double()
    matrix = reference_metric(Case(net, X), model, ng.trainable(model))
    iterate(opt, model)
    assert_step(model, before, -rates * step, 1e-8)
    d = -rates * step
    assert opt.state_report().kl == pytest.approx(float(d @ matrix @ d) / 2, rel=1e-8)


def test_some_parameters_only_means_the_metric_of_those() -> None:
    model = net()
    last = list(model[2].parameters())
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=1.0, damping=0.1, params=last)
    before, g = flat(model), mean_gradient(model, X, Y)[16:]
    block = reference_metric(Case(net, X), model, ng.trainable(model))[16:, 16:]
    expected = torch.linalg.solve(block + 0.1 * torch.eye(15).to(g), g)
    iterate(opt, model)
    assert_step(model, before, torch.cat([torch.zeros(16).to(g), -expected]), 1e-9)


def test_momentum_adds_up_natural_steps_and_weight_decay_is_decoupled() -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=0.1, damping=0.1, weight_decay=0.2, rule=ng.Momentum(0.9))
    velocity = torch.zeros(31).double()
    for _ in range(4):
        before, g = flat(model), mean_gradient(model, X, Y)
        velocity = 0.9 * velocity - 0.1 * fisher_step(model, X, ng.Categorical(), g, 0.1)
        iterate(opt, model)
        assert_step(model, before, velocity - 0.1 * 0.2 * before, 1e-9)


def test_one_undamped_step_solves_least_squares() -> None:
    model = mlp(3, 2)
    iterate(ng.NaturalGradient(model, ng.fisher(model, MSE), lr=1.0, damping=0.0), model, X, T)
    design = torch.cat([X, torch.ones(8, 1).double()], dim=1)
    assert_close(model(X).detach(), design @ torch.linalg.lstsq(design, T).solution, 1e-11)


class Listening(ng.Solver):
    """A direct solver that notes where it is asked to start."""

    def __init__(self) -> None:
        self.guesses, self.found = [], []

    def solve(self, operator, rhs, *, damping=0.0, guess=None):
        self.guesses.append(guess)
        solution = ng.Direct().solve(operator, rhs, damping=damping)
        self.found.append(solution.value)
        return solution


@pytest.mark.parametrize("warm", [0.0, 0.3, 1.0])
def test_a_warm_start_is_a_fraction_of_the_last_solution(warm: float) -> None:
    model, solver = net(), Listening()
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=0.1, damping=0.1, solver=solver, warm_start=warm)
    iterate(opt, model)
    iterate(opt, model)
    assert solver.guesses[0] is None
    if warm == 0:
        assert solver.guesses[1] is None
    else:
        assert torch.equal(solver.guesses[1], warm * solver.found[0])


def test_a_floor_holds_for_observed_data_and_for_that_step_alone() -> None:
    model, reference, other = net(), net(), draw(20, 3, seed=9)
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), damping=1e-4, solver=ng.Direct())
    opt.observe(other, floor=0.2)
    iterate(opt, model)
    assert opt.state_report().damping == 0.2
    second = ng.NaturalGradient(reference, ng.fisher(reference, CE), damping=0.2, solver=ng.Direct())
    second.observe(other)
    iterate(second, reference)
    assert torch.equal(flat(model), flat(reference))
    iterate(opt, model)
    assert opt.state_report().damping == 1e-4
    with pytest.raises(ValueError, match="floor is -1"):
        opt.observe(other, floor=-1.0)


def test_the_report_tells_what_the_solver_did_and_how_much_of_the_gradient_the_metric_explains() -> None:
    model = net()
    few = ng.NaturalGradient(model, ng.fisher(model, CE), damping=1e-3, solver=ng.CG(rtol=1e-14, max_steps=2))
    assert few.state_report().status == "no step yet"
    iterate(few, model)
    told = few.state_report()
    assert told.status == "max_steps"
    assert told.solver_steps >= 2
    assert 0 < told.residual < 1
    assert "status max_steps" in str(told)
    model = net()
    params, gradient = ng.trainable(model), mean_gradient(model, X, Y)
    G = ng.fisher(model, CE).at(params, draw(2, 3, seed=4)).dense()
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), damping=1e-3, solver=ng.CG(rtol=1e-12, max_steps=200))
    opt.observe(draw(2, 3, seed=4))
    iterate(opt, model)
    x = torch.linalg.solve(G + 1e-3 * torch.eye(len(G)).to(G), gradient)
    expected = float((gradient - G @ x).norm() / gradient.norm())
    assert 0.05 < expected < 1
    assert opt.state_report().outside == pytest.approx(expected, rel=1e-6)


# operators belong to the point at which they were taken; steps that are refused change nothing


@pytest.mark.parametrize("recipe", [ng.hessian_free, ng.kfac])
def test_a_refused_step_does_not_decay_the_weights(recipe: Callable[..., Any]):
    model = net()
    rule = ng.LineSearch(backtracks=1, sufficient=1e9)  # no step can be that good
    opt = recipe(model, CE, damping=1e-2, weight_decay=0.1, rule=rule)
    before = flat(model)
    iterate(opt, model)
    assert opt.state_report().rate == 0
    assert torch.equal(flat(model), before)


def test_the_fisher_in_an_optimizer_weighs_rows_as_the_loss_does():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))
    targets, moved = torch.tensor([0, 1, -100, 2, -100, 0, -100, 0]), []
    for metric in (ng.fisher, ng.gauss_newton):
        model = net()
        iterate(ng.NaturalGradient(model, metric(model, criterion), damping=1e-2), model, X, targets)
        moved.append(flat(model))
    assert torch.equal(*moved)


GAPS = torch.tensor([0, 1, -100, -100, -100, 0, 2, 0])
WEIGHED: dict[str, tuple[Any, Tensor]] = {
    "classes": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64)), GAPS),
    "labels that are missing": (ng.Masked(ng.Categorical()), GAPS),
    "the width of the errors": (nn.HuberLoss(), 3 * draw(8, 3, seed=1)),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_rows_weigh_alike_in_chunks_and_at_once(name: str):
    """Of a chunk of one example no target may count."""
    (criterion, targets), moved = WEIGHED[name], []
    for size in (None, 1, 3):
        model = net()
        metric = ng.fisher(model, criterion, chunk_size=size)
        iterate(ng.NaturalGradient(model, metric, damping=1e-2, solver=ng.Direct()), model, X, targets)
        moved.append(flat(model))
    for parameters in moved[1:]:
        assert_close(parameters, moved[0], 1e-10)


def test_sums_and_shifts_keep_the_unit_of_their_terms():
    operator = ng.gauss_newton(mlp(3, 2), nn.MSELoss()).at(ng.trainable(mlp(3, 2)), (X, None))
    assert operator.nats == 2
    assert (operator + operator).nats == (2 * operator).nats == operator.shift(0.1).nats == 2
    with pytest.raises(ValueError, match="unit"):
        operator + ng.operators.DenseOperator(operator.dense())
