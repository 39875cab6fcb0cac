"""Models of every kind, and which of their parameters are trained."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import (
    TOKENS,
    Assembled,
    Tied,
    affine,
    assert_close,
    build_named_twice,
    build_seeded,
    build_twice,
    build_unreached,
    draw,
    in_place,
    mlp,
)
from optim_models import (
    CE,
    X,
    Y,
    assert_step,
    build,
    fisher_step,
    flat,
    flat_gradient,
    iterate,
    kind,
    mean_gradient,
    move_copy,
    net,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import natgrad as ng


def solve_damped(matrix: Tensor, gradient: Tensor) -> Tensor:
    """(G + 0.1 I)^-1 g."""
    return torch.linalg.solve(matrix + 0.1 * torch.eye(len(gradient)).to(gradient), gradient)


@pytest.mark.parametrize(
    ("solver", "rule"),
    [
        *((solver, ng.LineSearch()) for solver in (ng.Auto(), ng.Direct(), ng.CG(rtol=1e-13, max_steps=200))),
        (ng.KrylovSubspace(4), ng.SubspaceSearch(3)),  # gradients at trial points
    ],
    ids=kind,
)
def test_activation_checkpointing_changes_nothing(solver: ng.Solver, rule: ng.Rule) -> None:
    """Of some parameters too: the others are computed again with a graph."""
    for count in (4, 2):
        plain, saving = net(), Assembled(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=net())
        for model in (plain, saving):
            params = list(model.parameters())[:count]
            iterate(build(model, solver=solver, rule=rule, params=params), model, X, Y)
        assert_close(flat(saving), flat(plain), 1e-10)


def test_a_compiled_loop_takes_the_same_steps_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    def run(compiled: Any) -> Any:
        torch.compiler.reset()
        model = net()
        opt = ng.kfac(model, CE)

        def find_loss() -> Any:
            return opt.loss(model(X), Y)

        def train() -> None:
            opt.zero_grad()
            loss.backward()
            opt.step()

        find_loss, train = compiled(find_loss), compiled(train)
        for _ in range(3):
            loss = find_loss()
            train()
        return flat(model)

    expected = run(lambda function: function)
    assert_close(run(lambda function: torch.compile(function, backend="eager")), expected, 1e-12)
    assert [str(warning.message) for warning in recwarn if "Dynamo" in str(warning.message)] == []


COMPILED: dict[str, Any] = {
    "around": lambda model: torch.compile(model, backend="eager"),
    "in place": lambda model: model.compile(backend="eager") or model,
    "a function": lambda model: torch.compile(lambda x: model(x), backend="eager"),
}


ATTRIBUTES = [SimpleNamespace(width=3), torch.tanh, [{"a": 1}], random.Random(0)]


@pytest.mark.parametrize(("way", "attributes"), [*((way, ATTRIBUTES) for way in COMPILED), ("a function", [])])
def test_a_compiled_model_takes_the_same_step(way: str, attributes: list[Any]) -> None:
    """Calls go through the model that the optimizer knows, whatever else it holds."""
    expected, model = move_copy(net(), CE, X, Y), net()
    for i, attribute in enumerate(attributes):
        setattr(model, f"attribute{i}", attribute)
    torch.compiler.reset()
    iterate(build(model), COMPILED[way](model), X, Y)
    assert_close(flat(model), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", [ng.Auto(), ng.Direct(), ng.CG()], ids=kind)
def test_half_precision_parameters_can_be_trained(solver: ng.Solver, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    expected = move_copy(net(), CE, X, Y) - flat(net())
    before = flat(model)
    iterate(build(model, solver=solver), model, X.to(dtype), Y)
    found = (flat(model) - before).double()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert float((found - expected).norm()) < 0.1 * float(expected.norm())  # eight bits of mantissa


def test_parameters_may_have_different_dtypes() -> None:
    """A single-precision layer below a double-precision one."""
    first, _, last = net()
    run = lambda m, x: m.last(torch.tanh(m.first(x.float())).double())  # noqa: E731
    model = Assembled(run, first=first.float(), last=last)
    iterate(build(model), model, X, Y)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
    assert_close(flat(model).double(), move_copy(net(), CE, X, Y), 1e-6)


def test_arguments_may_be_dicts_tuples_and_keywords() -> None:
    run = lambda m, batch, extra, *, scale=1.0: scale * torch.tanh(m.a(batch["x"])) + m.b(extra)  # noqa: E731
    model, extra = Assembled(run, a=mlp(3, 3), b=mlp(2, 3)), draw(8, 2, seed=3)
    opt, before = build(model, lr=1.0, rule=ng.LineSearch()), flat(model)

    def rows(p: dict[str, Tensor], x: Tensor, e: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, ({"x": x}, e), {"scale": 0.7})

    matrix = ng.fisher(rows, ng.Categorical()).at(ng.trainable(model), (X, extra)).dense()
    opt.loss(model({"x": X}, extra=extra, scale=0.7), Y).backward()
    step = -solve_damped(matrix, flat_gradient(model))
    opt.step()
    assert_step(model, before, step, 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_may_return_a_tuple(reduction: str) -> None:
    """A mean and a positive variance."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = m.inner(x).chunk(2, dim=1)
        return mean, spread.exp()

    model, targets = Assembled(run, inner=mlp(3, 4, 4)), draw(8, 2, seed=6)
    criterion = nn.GaussianNLLLoss(reduction=reduction, eps=1e-12)
    damping = ng.Constant(0.1, per="loss")
    opt, before = build(model, criterion, lr=1.0, damping=damping, rule=ng.Rate()), flat(model)
    matrix = ng.fisher(model, ng.HeteroscedasticGaussian(log_variance=False)).at(ng.trainable(model), X).dense()
    opt.loss(model(X), targets).backward()
    step = -solve_damped(matrix, flat_gradient(model) / (1 if reduction == "mean" else targets.numel()))
    opt.step()
    assert_step(model, before, step, 1e-9)


def test_a_function_of_a_dict_of_tensors_is_a_model() -> None:
    params = {"w": draw(3, 3, seed=8).requires_grad_(), "b": draw(3, seed=9).requires_grad_()}
    opt, before = ng.NaturalGradient(params, ng.fisher(affine, CE), lr=1.0, damping=0.1), flat(params)
    matrix = ng.fisher(affine, ng.Categorical()).at(params, X).dense()
    opt.observe(X)
    opt.loss(affine(params, X), Y).backward()
    g = torch.cat([p.grad.reshape(-1) for p in params.values()])
    opt.step()
    assert_close(flat(params) - before, -solve_damped(matrix, g), 1e-10)
    assert [row.parameter for row in opt.report()] == ["w", "b"]


# every trainable parameter is trained, and no other


AWKWARD = {"in-place rectifier": in_place, "tied": Tied, "twice used": build_twice, "named twice": build_named_twice}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_models_take_the_dense_step(name: str) -> None:
    model = build_seeded(AWKWARD[name])
    own = list(model.parameters())
    labels = Y % 2
    g, before = mean_gradient(model, X, labels), flat(model)
    expected = fisher_step(model, X, ng.Categorical(), g, 0.1)
    opt = build(model, lr=1.0, rule=ng.LineSearch())
    iterate(opt, model, X, labels)
    assert_step(model, before, -expected, 1e-9)
    names = [name for name, _ in model.named_parameters()]  # a tied one is one, and is counted once
    assert [row.parameter for row in opt.report()] == names
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_that_the_loss_does_not_reach_stays(set_to_none: bool) -> None:
    model = build_seeded(build_unreached)
    kept = model.unused.weight.detach().clone()
    opt = build(model, lr=1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.zero_grad(set_to_none=set_to_none)
    g = mean_gradient(model, X, Y % 2)[:8]
    expected = fisher_step(model.used, X, ng.Categorical(), g, 0.1)
    before = flat(model.used)
    opt.loss(model(X), Y % 2).backward()
    opt.step()
    assert torch.equal(model.unused.weight, kept)
    assert_step(model.used, before, -expected, 1e-9)


def test_a_frozen_parameter_stays_and_can_be_added_later() -> None:
    model = net()
    model[0].requires_grad_(False)
    frozen, opt = flat(model[0]), build(model, lr=1.0, rule=ng.Momentum(0.5))
    iterate(opt, model, X, Y)
    assert torch.equal(flat(model[0]), frozen)
    assert [row.parameter for row in opt.report()] == ["2.weight", "2.bias"]
    first = -(flat(net()) - flat(model))
    model[0].requires_grad_(True)
    opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
    before, g = flat(model), mean_gradient(model, X, Y)
    rates = torch.cat([torch.full((16,), 0.1), torch.ones(15)]).double()
    expected = 0.5 * first - rates * fisher_step(model, X, ng.Categorical(), g, 0.1)
    iterate(opt, model, X, Y)
    assert_step(model, before, expected, 1e-7)
    assert [row.parameter for row in opt.report()] == ["2.weight", "2.bias", "0.weight", "0.bias"]


def test_sparse_gradients_are_gradients() -> None:
    labels = torch.tensor([0, 1, 2])
    found = []
    for sparse in (False, True):
        model = build_seeded(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)))
        model[0].sparse = sparse
        iterate(build(model), model, TOKENS, labels)
        found.append(flat(model))
    assert_close(found[1], found[0], 1e-12)
