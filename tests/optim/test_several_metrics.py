"""Metrics of several terms, each on its own data, add up in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, draw, mlp
from optim_models import Closure, flat, kind
from torch import Tensor, nn

import natgrad as ng

INSIDE, EDGE, VALUES = draw(6, 2), draw(4, 2, seed=1), draw(4, 1, seed=2)
WEIGHTS = {"edge": 10.0}
SOLVERS = [ng.Direct(), ng.SampleSpace(), ng.CG(rtol=1e-14, max_steps=300), ng.Auto(), ng.LeastSquares()]


def slope(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """du/dx at points: another output of the same network."""

    def evaluate(params: dict[str, Tensor], x: Tensor) -> Tensor:
        one = lambda y: torch.func.functional_call(model, params, (y.unsqueeze(0),)).sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(one))(x)

    return evaluate


def terms(model: nn.Module) -> dict[str, ng.Metric]:
    return {"inside": ng.fisher(slope(model), ng.Gaussian()), "edge": ng.gauss_newton(model, nn.MSELoss())}


def loss(model: nn.Module, inside: Tensor = INSIDE) -> Tensor:
    residual = slope(model)(dict(model.named_parameters()), inside)
    return residual.square().sum(1).mean() / 2 + 10 * (model(EDGE) - VALUES).square().mean()


def by_definition(model: nn.Module) -> Tensor:
    """sum_k w_k J_k^T M_k J_k, from the Jacobians."""
    params = {name: p.detach() for name, p in ng.trainable(model).items()}
    space = ng.Space(params)

    def rows(function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        found = torch.func.jacrev(function)(params)
        return torch.cat([found[name].flatten(2) for name in space], 2).flatten(0, 1)

    inside = rows(lambda chosen: slope(model)(chosen, INSIDE))
    edge = rows(lambda chosen: torch.func.functional_call(model, chosen, (EDGE,)))
    return inside.mT @ inside / len(INSIDE) + 10 * 2 * edge.mT @ edge / len(EDGE)


def take_step(model: nn.Module, opt: ng.NaturalGradient, data: object, targets: object = None) -> None:
    closure = Closure(opt, lambda: loss(model))

    opt.observe(data, targets)
    opt.step(closure)


DATA = {"inside": INSIDE, "edge": (EDGE, VALUES)}


@pytest.mark.parametrize("structure", [ng.Exact(), ng.Dense()], ids=kind)
@pytest.mark.parametrize("solver", SOLVERS, ids=kind)
@pytest.mark.parametrize("width", [2, 9])  # fewer and more parameters than the 16 rows
def test_a_step_is_that_of_the_dense_sum(solver: ng.Solver, structure: ng.Structure, width: int) -> None:
    model = mlp(2, width, 1)
    matrix, before = by_definition(model), flat(model)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(model), list(model.parameters()))])
    opt = ng.NaturalGradient(
        model, metrics=terms(model), weights=WEIGHTS, lr=0.5, damping=0.1, solver=solver, structure=structure
    )
    take_step(model, opt, DATA)
    expected = torch.linalg.solve(matrix + 0.1 * torch.eye(len(matrix)).double(), gradient)
    assert_close(flat(model) - before, -0.5 * expected, 1e-9)


def test_the_sum_is_the_dense_sum_by_every_product() -> None:
    model = mlp(2, 5, 1)
    params, expected = ng.trainable(model), by_definition(model)
    found = ng.metrics.sum_metrics(terms(model), WEIGHTS).at(params, DATA)
    assert_close(found.dense(), expected, 1e-11)
    assert_close(found.diagonal(), expected.diagonal(), 1e-11)
    assert_close(found @ draw(len(expected)), expected @ draw(len(expected)), 1e-11)
    rows = found.sample_rows
    assert rows is not None
    assert found.sample_rank == rows.rank == 16
    root = rows.dense()
    assert_close(root @ root.mT, expected, 1e-11)
    assert_close(rows.lower_gram().tril(), (root.mT @ root).tril(), 1e-11)
    assert_close(rows.mv(draw(16)), root @ draw(16), 1e-11)
    assert_close(rows.rmv(draw(len(expected))), root.mT @ draw(len(expected)), 1e-11)


def adaptive(model: nn.Module) -> ng.NaturalGradient:
    """With what looks at the loss, and with labels that are drawn from sources of their own."""
    metrics = terms(model) | {
        name: ng.sampled_fisher(model, ng.Gaussian(), generator=torch.Generator().manual_seed(seed))
        for name, seed in (("first", 3), ("second", 4))
    }
    choices = {"damping": ng.LevenbergMarquardt(0.1), "rule": ng.LineSearch()}
    return ng.NaturalGradient(model, metrics=metrics, weights=WEIGHTS, **choices)


def test_a_line_search_on_the_sum_descends_and_a_run_resumes_bit_for_bit() -> None:
    """Targets may be observed beside the inputs, or by term."""
    plain = {"inside": INSIDE, "edge": EDGE, "first": EDGE, "second": INSIDE}
    straight, stopped = mlp(2, 5, 1), mlp(2, 5, 1)
    opt, first = adaptive(straight), adaptive(stopped)
    start = float(loss(straight).detach())
    for _ in range(4):
        take_step(straight, opt, plain | DATA)
    for _ in range(2):
        take_step(stopped, first, plain, {"edge": VALUES})
    second = adaptive(stopped)
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        take_step(stopped, second, plain | DATA)
    assert torch.equal(flat(straight), flat(stopped))
    assert opt.state_report() == second.state_report()
    assert float(loss(straight).detach()) < 0.5 * start


def test_units_differ_and_the_bound_on_the_kl_holds_for_the_largest() -> None:
    model = mlp(2, 4, 3)
    x, params = draw(5, 2), ng.trainable(model)
    nats = {"mean": ng.gauss_newton(model, nn.MSELoss()), "sum": ng.fisher(model, ng.Gaussian())}
    data = {"mean": (x, draw(5, 3)), "sum": x}
    units = [metric.at(params, data[name]).nats for name, metric in nats.items()]
    assert units[0] != units[1]
    assert ng.metrics.sum_metrics(nats).at(params, data).nats == max(units)


ONE = ng.fisher(mlp(2, 3, 1), ng.Gaussian())
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no metric": ({}, TypeError, "metric is None, expected one"),
    "both": ({"metric": ONE, "metrics": {"one": ONE}}, TypeError, "give one of them"),
    "weights alone": ({"metric": ONE, "weights": {"edge": 1.0}}, TypeError, "without metrics"),
    "no term": ({"metrics": {}}, TypeError, "metrics is {}"),
    "a class": ({"metrics": {"a": ng.metrics.Fisher}}, TypeError, "forget the parentheses"),
    "a name": ({"metrics": {1: ONE}}, TypeError, "expected a string"),
    "a stranger": ({"metrics": {"edge": ONE}, "weights": {"egde": 1.0}}, ValueError, "egde"),
    "a structure of layers": ({"metrics": {"a": ONE}, "structure": ng.Kronecker()}, TypeError, "records one pass"),
    "a weight": ({"metrics": {"edge": ONE}, "weights": {"edge": -1.0}}, ValueError, r"weights\['edge'\] is -1.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_choices_are_refused_at_the_door(case: str) -> None:
    given, error, said = BAD[case]
    with pytest.raises(error, match=said):
        ng.NaturalGradient(mlp(2, 3, 1), **given)


@pytest.mark.parametrize(
    ("data", "targets", "said"),
    [
        ({"inside": INSIDE}, None, "no data for \\['edge'\\]"),
        ({**DATA, "rand": EDGE}, None, "data for \\['rand'\\], which is no term"),
        (INSIDE, None, "expected a dict with the data of"),
        (DATA, {"rand": EDGE}, "targets has \\['rand'\\]"),
        (DATA, VALUES, "targets has \\['Tensor'\\]"),
    ],
)
def test_data_that_does_not_fit_the_terms_changes_nothing(data: object, targets: object, said: str) -> None:
    model = mlp(2, 3, 1)
    opt = ng.NaturalGradient(model, metrics=terms(model))
    before = flat(model)
    with pytest.raises((TypeError, ValueError), match=said):
        take_step(model, opt, data, targets)
    assert torch.equal(flat(model), before)
    loss(model).backward()
    with pytest.raises((TypeError, ValueError), match="observe"):
        opt.step()  # nothing was observed


def test_auto_solves_a_sum_in_the_space_of_its_rows() -> None:
    model = mlp(2, 40, 1)
    operator = ng.metrics.sum_metrics(terms(model), WEIGHTS).at(ng.trainable(model), DATA)
    assert isinstance(ng.Auto().choose(operator), ng.SampleSpace)
    assert isinstance(ng.Auto(dense=10).choose(0.5 * operator), ng.SampleSpace)
    narrow = mlp(2, 2, 1)  # 9 parameters for 16 rows
    operator = ng.metrics.sum_metrics(terms(narrow), WEIGHTS).at(ng.trainable(narrow), DATA)
    assert isinstance(ng.Auto().choose(operator), ng.Direct)


def test_rows_of_one_layer_in_two_terms_are_multiplied_without_the_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(3, 6, 5, 2)
    params, one = ng.trainable(model), ng.fisher(model, ng.Gaussian())
    left, right = (one.at(params, x) for x in (draw(4, 3), draw(3, 3, seed=1)))
    expected = torch.cat([left.root(), 3**0.5 * right.root()], 1)
    rows = (left + 3.0 * right).sample_rows
    monkeypatch.setattr(ng.operators.Rows, "dense", lambda self: pytest.fail("the Jacobian was written out"))
    assert_close(rows.lower_gram().tril(), (expected.mT @ expected).tril(), 1e-12)
