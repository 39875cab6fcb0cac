"""An optimizer may have a part of a model, given in any of torch.optim's ways, and follows its dtype."""

from __future__ import annotations

import copy
import io
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded
from optim_models import CE, X, Y, flat, iterate, net
from torch import nn

import natgrad as ng
from natgrad.ground.pure import leaves

STRUCTURED = [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise, ng.online_ng, ng.tonga]
MATRIX_FREE = [ng.hessian_free, ng.natgrad_cg, ng.krylov_subspace]
EVERY = [*STRUCTURED, *MATRIX_FREE]
WAYS = {
    "all": lambda part: None,
    "parameters": lambda part: list(part.parameters()),
    "a generator": lambda part: part.parameters(),
    "named": lambda part: part.named_parameters(),
    "a list of pairs": lambda part: list(part.named_parameters()),
    "a dict": lambda part: dict(part.named_parameters()),
    "a module": lambda part: part,
    "a group": lambda part: [{"params": part.parameters()}],
    "a named group": lambda part: [{"params": part.named_parameters()}],
    "a group by module": lambda part: [{"params": part}],
    "two named groups": lambda part: [
        {"params": [pair for pair in part.named_parameters() if pair[1].dim() > 1]},
        {"params": [pair for pair in part.named_parameters() if pair[1].dim() == 1], "weight_decay": 0.0},
    ],
}


def train(model: nn.Module, *optimizers: Any, steps: int = 4) -> list[float]:
    """The loop, with all optimizers of ours and of others."""
    losses = []
    for _ in range(steps):
        for opt in optimizers:
            opt.zero_grad()
        outputs = model(X)
        told = [opt.loss(outputs, Y) for opt in optimizers if hasattr(opt, "loss")]
        told[0].backward()
        losses.append(float(told[0].detach()))
        for opt in optimizers:
            opt.step()
    return losses


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", EVERY)
def test_every_way_of_giving_all_parameters_takes_the_same_steps(recipe: Any, way: str):
    twin = net()
    train(twin, recipe(twin, CE, params=WAYS[way](twin)))
    assert_close(flat(twin), train_without_params(recipe), 1e-8)


@cache
def train_without_params(recipe: Any) -> torch.Tensor:
    """The parameters at the end of the loop."""
    model = net()
    train(model, recipe(model, CE))
    return flat(model)


def parts(model: nn.Module) -> dict[str, nn.Module]:
    return {"body": model.get_submodule("0"), "head": model.get_submodule("2")}


@pytest.mark.parametrize("part", ["body", "head"])
@pytest.mark.parametrize("recipe", EVERY)
def test_a_part_is_trained_beside_another_optimizer_on_the_rest(recipe: Any, part: str):
    model = net()
    own, other = parts(model)[part], parts(model)[{"body": "head", "head": "body"}[part]]
    opt, adam = recipe(model, CE, params=own), torch.optim.Adam(other.parameters(), 1e-2)
    before, held = flat(other), flat(own)
    losses = train(model, opt)
    assert torch.equal(flat(other), before)
    assert not torch.equal(flat(own), held)
    assert losses[-1] < losses[0]
    train(model, opt, adam)
    assert bool(flat(model).isfinite().all())
    assert not torch.equal(flat(other), before)
    assert {row.parameter for row in opt.report()} == {
        n for n, p in model.named_parameters() if p in set(own.parameters())
    }


@pytest.mark.parametrize("recipe", STRUCTURED)
def test_a_part_steps_as_if_the_rest_were_frozen(recipe: Any):
    model, frozen = net(), net()
    frozen.get_submodule("0").requires_grad_(False)
    opt, other = recipe(model, CE, params=model.get_submodule("2").named_parameters()), recipe(frozen, CE)
    train(model, opt)
    train(frozen, other)
    assert_close(flat(model), flat(frozen), 1e-8)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("first", "second"), [(ng.kfac, ng.kfac), (ng.ekfac, ng.diagonal), (ng.kfac, ng.hessian_free)])
def test_two_optimizers_share_a_model(first: Any, second: Any, reduction: str):
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    model = net()
    one, two = (
        build(model, criterion, params=part) for build, part in zip((first, second), parts(model).values(), strict=True)
    )
    losses = train(model, one, two, steps=6)
    assert losses[-1] < 0.95 * losses[0]
    for opt in (one, two):
        assert opt.state_report().failures == 0
        assert opt.state_report().step == 6
    assert one.state_report().loss == pytest.approx(losses[-1] / (len(X) if reduction == "sum" else 1))
    for part, opt in zip(parts(model).values(), (one, two), strict=True):
        gradients = [p.grad.reshape(-1) for p in part.parameters() if p.grad is not None]
        norm = torch.cat(gradients).norm() / (len(X) if reduction == "sum" else 1)
        assert opt.state_report().gradient == pytest.approx(float(norm), rel=1e-9)
    one.detach()
    two.detach()
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0


@pytest.mark.parametrize("recipe", STRUCTURED)
def test_a_part_with_names_is_saved_and_goes_on(recipe: Any):
    model = net()
    opt = recipe(model, CE, params=model.get_submodule("0").named_parameters())
    train(model, opt)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    twin = copy.deepcopy(model)
    other = recipe(twin, CE, params=twin.get_submodule("0").named_parameters())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    train(model, opt)
    train(twin, other)
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("recipe", STRUCTURED)
def test_a_parameter_that_was_frozen_is_trained_once_it_is_not(recipe: Any):
    model = net()
    model.get_submodule("0").requires_grad_(False)
    opt = recipe(model, CE, params=list(model.parameters()))
    before = flat(model.get_submodule("0"))
    train(model, opt)
    assert torch.equal(flat(model.get_submodule("0")), before)
    model.get_submodule("0").requires_grad_(True)
    with pytest.warns(UserWarning, match="have a gradient but no statistics"):
        train(model, opt, steps=1)
    train(model, opt, steps=2)
    assert not torch.equal(flat(model.get_submodule("0")), before)
    assert {row.structure for row in opt.report()} != {"not read yet"}


def test_parameters_of_another_model_are_refused_by_name_too():
    for recipe in (ng.kfac, ng.hessian_free):
        model, other = net(), build_seeded(net)
        with pytest.raises(ValueError, match="not parameters of the model"):
            recipe(model, CE, params=other.named_parameters())
        with pytest.raises(TypeError):
            recipe(model, CE, params=[1.0])


@pytest.mark.parametrize("recipe", STRUCTURED)
def test_an_optimizer_follows_a_model_to_another_dtype(recipe: Any):
    model, twin = net().float(), net().float()
    opt, other = recipe(model, CE, estimate=ng.ExactLabels()), recipe(twin, CE, estimate=ng.ExactLabels())
    run(model, opt, torch.float32)
    run(twin, other, torch.float32)
    model.double()
    run(model, opt, torch.float64)
    run(twin, other, torch.float32)
    assert {t.dtype for t in tensors(opt) if t.is_floating_point()} == {torch.float64}
    assert_close(flat(model).float(), flat(twin), 1e-2)  # the same steps, up to float32's rounding of the factors
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        run(model, opt, dtype)
        assert bool(flat(model).isfinite().all())
        assert opt.state_report().failures == 0
        assert {t.dtype for t in tensors(opt) if t.is_floating_point()} == {torch.float32}


def run(model: nn.Module, opt: Any, dtype: torch.dtype) -> None:
    for _ in range(3):
        opt.zero_grad()
        opt.loss(model(X.to(dtype)), Y).backward()
        opt.step()


def tensors(opt: Any) -> list[torch.Tensor]:
    return [t for numbers in opt._by_parameter().values() for t in leaves(numbers)]


@pytest.mark.parametrize("recipe", [ng.kfac, ng.diagonal, ng.hessian_free], ids=lambda r: r.__name__)
def test_a_layer_that_was_replaced_is_told_once(recipe: Any):
    model = net()
    opt = recipe(model, CE)
    iterate(opt, model, X, Y)
    fresh = model[2] = nn.Linear(4, 3).double()  # type: ignore[index]
    with pytest.warns(UserWarning, match=r"parameters \['2.bias', '2.weight'\] are no longer the model's"):
        iterate(opt, model, X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(opt, model, X, Y)
        opt.add_param_group({"params": list(fresh.parameters())})
        before = fresh.weight.detach().clone()
        for _ in range(3):
            iterate(opt, model, X, Y)
    assert not torch.equal(fresh.weight, before)
