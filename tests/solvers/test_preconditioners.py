"""Preconditioners: what they are, that they change the cost and not the answer, and their doors."""

from __future__ import annotations

import copy

import pytest
import torch
from models import CASES, F64, Assembled, assert_close, draw, mlp, pair
from optim_models import CE, X, Y, flat, iterate, net
from torch import nn

import natgrad as ng
from natgrad.operators import DenseOperator
from natgrad.structures import StructurePreconditioner
from natgrad.structures.preconditioners import probed_diagonal, safe_power

LAMBDA = 0.05


def make_preconditioner(choice, metric=None, inputs=(X, Y), damping: float = LAMBDA):
    """(P, G) at a small network."""
    model = net()
    params = ng.trainable(model)
    metric = (metric or ng.gauss_newton)(model, CE)
    operator = metric.at(params, inputs)
    inverse, _ = choice.update(None, metric, params, inputs, damping, operator)
    return inverse, operator, (model, params)


@pytest.mark.parametrize("power", [0.75, 1.0])
def test_the_exact_diagonal(power):
    P, G, _ = make_preconditioner(ng.DiagonalPreconditioner(power=power, samples=None))
    assert_close(P.dense(), torch.diag((G.dense().diagonal() + LAMBDA) ** -power), 1e-12)


def test_martens_diagonal_is_that_of_the_squared_gradients():
    P, _, (model, params) = make_preconditioner(ng.DiagonalPreconditioner(empirical=True))
    U = ng.empirical_fisher(model, CE).at(params, (X, Y))
    assert_close(P.diagonal(), (U.dense().diagonal() + LAMBDA) ** -0.75, 1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv2d"])
def test_the_estimated_diagonal_is_unbiased(name):
    case = CASES[name]
    model, params = case.make()
    metric = ng.fisher(model, case.family)
    G = metric.at(params, case.inputs)
    exact = G.diagonal()
    P, _ = ng.DiagonalPreconditioner(power=1.0, samples=1000).update(None, metric, params, case.inputs, 0.0, G)
    kept = exact > 1e-12
    assert float((1 / P.diagonal() - exact)[kept].norm() / exact.norm()) < 0.085


def test_the_running_average_draws_anew_and_is_kept():
    choice, model = ng.DiagonalPreconditioner(power=1.0, decay=0.5), net()
    params, metric = ng.trainable(model), ng.gauss_newton(model, CE)
    G, memory, seen = metric.at(params, (X, Y)), None, []
    for _ in range(3):
        P, memory = choice.update(memory, metric, params, (X, Y), LAMBDA, G)
        seen.append(1 / P.diagonal() - LAMBDA)
    singles = []
    for draw_ in range(2):
        once, _ = ng.DiagonalPreconditioner(power=1.0).update(
            None if draw_ == 0 else singles[0][1], metric, params, (X, Y), LAMBDA, G
        )
        singles.append((1 / once.diagonal() - LAMBDA, _))
    assert_close(seen[0], singles[0][0], 1e-9)
    assert_close(seen[1], (0.5 * singles[0][0] + singles[1][0]) / 1.5, 1e-9)


def test_metrics_without_labels_are_probed_by_products():
    matrix = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=F64))
    assert_close(probed_diagonal(DenseOperator(matrix) + DenseOperator(matrix), 1), 2 * matrix.diagonal(), 1e-14)
    model = mlp(3, 4, 2)
    params, metric = ng.trainable(model), ng.gauss_newton(model, lambda r, t: (r - t).pow(4).mean())
    data = X, draw(8, 2)
    G = metric.at(params, data)
    exact = G.dense().diagonal()
    P, _ = ng.DiagonalPreconditioner(power=1.0, samples=1500).update(None, metric, params, data, 0.0, G)
    assert float((1 / P.diagonal() - exact).norm() / exact.norm()) < 0.14


@pytest.mark.parametrize("examples", [3, 100])
def test_the_empirical_preconditioner_is_a_woodbury_inverse(examples):
    P, _, (model, params) = make_preconditioner(ng.EmpiricalPreconditioner(examples))
    drawn = torch.randperm(8, generator=torch.Generator().manual_seed(0))[:examples]
    data = (X, Y) if examples >= 8 else (X[drawn], Y[drawn])
    U = ng.empirical_fisher(model, CE).at(params, data).dense()
    assert_close(P.dense(), torch.linalg.inv(U + LAMBDA * torch.eye(len(U)).to(U)), 1e-9)


def test_a_structure_with_a_closed_form_is_one():
    P, G, _ = make_preconditioner(StructurePreconditioner(ng.Dense()))
    assert_close(P.dense(), torch.linalg.inv(G.dense() + LAMBDA * torch.eye(G.size).to(G.dense())), 1e-9)


CHOICES = {
    "diagonal": ng.DiagonalPreconditioner(),
    "Jacobi, exact": ng.DiagonalPreconditioner(power=1.0, samples=None),
    "Martens": ng.DiagonalPreconditioner(empirical=True),
    "empirical": ng.EmpiricalPreconditioner(4),
    "structure": ng.Dense(),
    "Kronecker": ng.Kronecker(),
}
SOLVERS = {
    "CG": ng.CG(rtol=1e-12, max_steps=500),
    "MINRES-QLP": ng.MinresQLP(rtol=1e-12, max_steps=500),
    "Krylov": ng.KrylovSubspace(dimension=31),
}


@pytest.mark.parametrize(("choice", "solver"), pair(CHOICES, SOLVERS))
def test_the_step_is_the_same_with_and_without(choice, solver):
    plain, helped = net(), net()
    for model, preconditioner in ((plain, None), (helped, CHOICES[choice])):
        opt = ng.NaturalGradient(
            model,
            ng.gauss_newton(model, CE),
            lr=0.5,
            damping=0.1,
            solver=SOLVERS[solver],
            preconditioner=preconditioner,
        )
        for _ in range(2):
            iterate(opt, model, X, Y)
    assert_close(flat(helped), flat(plain), 1e-7)


def test_it_saves_products_where_the_diagonal_is_what_is_ill_conditioned():
    torch.manual_seed(0)
    x, y = torch.randn(64, 6, dtype=F64) * torch.logspace(-2, 2, 6, dtype=F64), torch.randint(3, (64,))
    steps = {}
    for name, preconditioner in {"none": None, "Jacobi": ng.DiagonalPreconditioner(power=1.0, samples=None)}.items():
        model = nn.Linear(6, 3).double()
        nn.init.zeros_(model.weight)
        opt = ng.NaturalGradient(
            model,
            ng.gauss_newton(model, CE),
            damping=1e-6,
            solver=ng.CG(rtol=1e-8, max_steps=500),
            preconditioner=preconditioner,
        )
        iterate(opt, model, x, y)
        steps[name] = opt.state_report().solver_steps
    assert steps["Jacobi"] < 0.7 * steps["none"]


def test_unlabelled_data_serve_the_diagonal_and_are_refused_by_the_empirical_one():
    model = net()
    opt = ng.natgrad_cg(model, CE, damping=0.1)
    opt.preconditioner = ng.DiagonalPreconditioner()
    opt.observe(draw(20, 3, seed=9))
    iterate(opt, model, X, Y)
    opt.preconditioner = ng.EmpiricalPreconditioner()
    before = flat(model)
    opt.observe(draw(20, 3, seed=9))
    with pytest.raises(ValueError, match="needs the data's targets"):
        iterate(opt, model, X, Y)
    assert torch.equal(flat(model), before)


def centre_covariance(model, criterion):
    return ng.covariance(model, criterion, centred=True)


@pytest.mark.parametrize("metric", [ng.covariance, centre_covariance, ng.hessian])
@pytest.mark.parametrize("choice", [ng.DiagonalPreconditioner(empirical=True), ng.EmpiricalPreconditioner()])
def test_every_metric_of_a_criterion_has_an_empirical_preconditioner(choice, metric):
    P, _, (model, params) = make_preconditioner(choice, metric)
    expected, _ = choice.update(None, ng.empirical_fisher(model, CE), params, (X, Y), LAMBDA, P)
    assert_close(P.dense(), expected.dense(), 1e-12)


def test_a_second_input_is_not_taken_for_targets():

    model = Assembled(lambda m, x, y: m.inner(x + y), inner=net())
    params, metric = ng.trainable(model), ng.fisher(model, CE)
    G = metric.at(params, (X, X))
    with pytest.raises(ValueError, match="needs the data's targets"):
        ng.EmpiricalPreconditioner().update(None, metric, params, (X, X), LAMBDA, G)
    divergence = ng.divergence(ng.metrics.kl(model, CE))
    with pytest.raises(TypeError, match="not Divergence"):
        ng.EmpiricalPreconditioner().update(None, divergence, params, (X, X), LAMBDA, G)


def test_memory_of_a_structure_is_kept_and_saved():
    straight, stopped = net(), net()

    def build(model: nn.Module) -> ng.NaturalGradient:
        return ng.hessian_free(model, CE, preconditioner=ng.Dense(decay=0.9), solver=ng.CG(max_steps=3))

    opt, first = build(straight), build(stopped)
    for _ in range(3):
        iterate(opt, straight, X, Y)
    for _ in range(2):
        iterate(first, stopped, X, Y)
    second = build(stopped)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    iterate(second, stopped, X, Y)
    assert torch.equal(flat(straight), flat(stopped))


def test_zeros_on_the_diagonal_count_as_the_smallest_positive_entry():
    assert torch.equal(safe_power(torch.tensor([0.0, 4.0, 2.0]), -1.0), torch.tensor([0.5, 0.25, 0.5]))
    assert torch.equal(safe_power(torch.zeros(2), -1.0), torch.ones(2))


def test_a_structure_that_cannot_be_one_is_named():
    model = net()
    opt = ng.hessian_free(model, CE, preconditioner=ng.Exact())
    with pytest.raises(TypeError, match="no closed-form inverse"):
        iterate(opt, model, X, Y)
    opt = ng.NaturalGradient(model, ng.hessian(model, CE), solver=ng.MinresQLP(), preconditioner=ng.Dense())
    with pytest.raises(TypeError, match="negative eigenvalues"):
        iterate(opt, model, X, Y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preconditioner": ng.DiagonalPreconditioner}, "parentheses"),
        ({"preconditioner": 3}, "expected a natgrad Preconditioner"),
        ({"solver": ng.Direct(), "preconditioner": ng.DiagonalPreconditioner()}, "takes no preconditioner"),
    ],
)
def test_what_is_no_preconditioner_is_refused(options, words):
    with pytest.raises(TypeError, match=words):
        ng.hessian_free(net(), CE, **options)
