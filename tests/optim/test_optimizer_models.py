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
    assert_close,
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


@pytest.mark.parametrize("solver", [ng.Auto(), ng.Direct(), ng.CG(rtol=1e-13, max_steps=200)], ids=kind)
def test_activation_checkpointing_changes_nothing(solver: ng.Solver) -> None:
    def build_saving() -> nn.Module:
        """Computes its activations again on the way back."""
        return Assembled(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=net())

    expected = move_copy(net(), CE, X, Y, solver=solver, rule=ng.LineSearch())
    assert_close(move_copy(build_saving(), CE, X, Y, solver=solver, rule=ng.LineSearch()), expected, 1e-10)


def compile_around(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compile_in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def compile_function(model: nn.Module) -> Any:
    return torch.compile(lambda x: model(x), backend="eager")


@pytest.mark.parametrize("attribute", [None, SimpleNamespace(width=3), torch.tanh, [{"a": 1}], random.Random(0)])
@pytest.mark.parametrize("compiled", [compile_around, compile_in_place, compile_function])
def test_a_compiled_model_takes_the_same_step(compiled: Any, attribute: Any) -> None:
    """Calls go through the model that the optimizer knows, whatever else it holds."""
    expected, model = move_copy(net(), CE, X, Y), net()
    model.attribute = attribute
    torch.compiler.reset()
    iterate(build(model), compiled(model), X, Y)
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
    class Mixed(nn.Module):
        """A single-precision layer below a double-precision one."""

        def __init__(self) -> None:
            super().__init__()
            first, _, last = net()
            self.first, self.last = first.float(), last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x.float())).double())

    model = Mixed()
    iterate(build(model), model, X, Y)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
    assert_close(
        torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]), move_copy(net(), CE, X, Y), 1e-6
    )


class Keywords(nn.Module):
    """A dict of tensors, a second argument and a number by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(3, 3), mlp(2, 3)

    def forward(self, batch: dict[str, Tensor], extra: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * torch.tanh(self.a(batch["x"])) + self.b(extra)


def test_arguments_may_be_dicts_tuples_and_keywords() -> None:
    model, extra = build_seeded(Keywords), draw(8, 2, seed=3)
    opt, before = build(model, lr=1.0, rule=ng.LineSearch()), flat(model)
    params = ng.trainable(model)

    def rows(p: dict[str, Tensor], x: Tensor, e: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, ({"x": x}, e), {"scale": 0.7})

    matrix = ng.fisher(rows, ng.Categorical()).at(params, (X, extra)).dense()
    opt.loss(model({"x": X}, extra=extra, scale=0.7), Y).backward()
    g = flat_gradient(model)
    opt.step()
    assert_step(model, before, -torch.linalg.solve(matrix + 0.1 * torch.eye(len(g)).to(g), g), 1e-9)


class MeanAndVariance(nn.Module):
    """A tuple of outputs, the second positive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3, 4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.inner(x).chunk(2, dim=1)
        return mean, spread.exp()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_may_return_a_tuple(reduction: str) -> None:
    model, targets = build_seeded(MeanAndVariance), draw(8, 2, seed=6)
    criterion = nn.GaussianNLLLoss(reduction=reduction, eps=1e-12)
    damping = ng.Constant(0.1, per="loss")
    opt, before = build(model, criterion, lr=1.0, damping=damping, rule=ng.Rate()), flat(model)
    matrix = ng.fisher(model, ng.HeteroscedasticGaussian(log_variance=False)).at(ng.trainable(model), X).dense()
    opt.loss(model(X), targets).backward()
    g = flat_gradient(model) / (1 if reduction == "mean" else targets.numel())
    opt.step()
    assert_step(model, before, -torch.linalg.solve(matrix + 0.1 * torch.eye(len(g)).to(g), g), 1e-9)


def affine(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"]) + params["b"]


def test_a_function_of_a_dict_of_tensors_is_a_model() -> None:
    params = {"w": draw(3, 3, seed=8).requires_grad_(), "b": draw(3, seed=9).requires_grad_()}
    opt, before = ng.NaturalGradient(params, ng.fisher(affine, CE), lr=1.0, damping=0.1), flat(params)
    matrix = ng.fisher(affine, ng.Categorical()).at(params, X).dense()
    opt.observe(X)
    opt.loss(affine(params, X), Y).backward()
    g = torch.cat([p.grad.reshape(-1) for p in params.values()])
    opt.step()
    assert_close(flat(params) - before, -torch.linalg.solve(matrix + 0.1 * torch.eye(len(g)).to(g), g), 1e-10)
    assert [row.parameter for row in opt.report()] == ["w", "b"]


# every trainable parameter is trained, and no other


@pytest.mark.parametrize("make", [in_place, Tied, build_twice], ids=["in-place rectifier", "tied", "twice used"])
def test_awkward_models_take_the_dense_step(make: Any) -> None:
    model = build_seeded(make)
    labels = Y % 2
    g, before = mean_gradient(model, X, labels), flat(model)
    expected = fisher_step(model, X, ng.Categorical(), g, 0.1)
    iterate(build(model, lr=1.0, rule=ng.LineSearch()), model, X, labels)
    assert_step(model, before, -expected, 1e-9)


def test_tied_parameters_stay_one_and_are_counted_once() -> None:
    model = build_seeded(Tied)
    opt = build(model)
    iterate(opt, model, X, Y)
    assert model.decode.weight is model.encode.weight
    assert [row.parameter for row in opt.report()] == ["encode.weight", "encode.bias", "decode.bias"]


def test_frozen_parameters_do_not_move() -> None:
    model = net()
    model[0].requires_grad_(False)
    frozen, last = model[0].weight.clone(), model[2].weight.detach().clone()
    opt = build(model, weight_decay=0.1)
    iterate(opt, model, X, Y)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, last)
    assert [row.parameter for row in opt.report()] == ["2.weight", "2.bias"]


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


def test_a_parameter_unfrozen_later_can_be_added() -> None:
    model = net()
    model[0].requires_grad_(False)
    opt = build(model, lr=1.0, rule=ng.Momentum(0.5))
    iterate(opt, model, X, Y)
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
