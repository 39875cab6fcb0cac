"""An optimizer may have a part of a model, given in any of torch.optim's ways, and follows its dtype."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded
from optim_models import CE, X, Y, flat, iterate, net, same
from torch import nn
from torch.nn.utils import parametrizations, prune

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
def test_a_parameter_that_was_frozen_is_trained_once_it_is_not(recipe: Any):
    model = net()
    model.get_submodule("0").requires_grad_(False)
    opt = recipe(model, CE, params=list(model.parameters()))
    before = flat(model.get_submodule("0"))
    train(model, opt)
    assert torch.equal(flat(model.get_submodule("0")), before)
    model.get_submodule("0").requires_grad_(True)
    train(model, opt, steps=1)
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


# entries of a gradient that a hook or a mask sets to zero stay, or a sentence says that the metric moves them


MASKS = {
    "rows": lambda g: torch.cat([torch.zeros_like(g[:1]), g[1:]]),
    "columns": lambda g: torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:]], 1),
    "entries": lambda g: g * (torch.arange(g.numel()).reshape(g.shape) % 3 > 0),
    "all": torch.zeros_like,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["hook", "after backward"])
@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal, ng.hessian_free, ng.natgrad_cg])
def test_entries_that_a_mask_freezes_stay_or_are_named(recipe: Any, way: str, mask: str) -> None:
    """Adam leaves them; a metric that ties them to others moves them, and says so."""
    model, hold = net(), MASKS[mask]
    weight = model.get_submodule("2").weight
    free = hold(torch.ones_like(weight)) != 0
    if way == "hook":
        weight.register_hook(hold)
    opt = recipe(model, CE)
    before = weight.detach().clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            if way != "hook":
                weight.grad = hold(weight.grad)
            opt.step()
    moved = (weight.detach() - before)[~free]
    named = [str(one.message) for one in told if "['2.weight'] is zero in entries" in str(one.message)]
    assert len(named) == 1 if bool(moved.any()) else len(named) <= 1
    assert len(told) == len(named)


# pruning and parametrisations put on in the middle of a run give parameters new names: training goes on


Recipe = Callable[..., Any]
RECIPES: list[Recipe] = [ng.kfac, ng.ekfac, ng.diagonal, ng.online_ng, ng.hessian_free, ng.natgrad_cg]
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.__name__)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return request.param


def step_by_hand(opt: Any, model: nn.Module) -> None:
    """As loops do that clear the model's gradients, and not the optimizer's."""
    model.zero_grad()
    opt.loss(model(X), Y).backward()
    opt.step()


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return float(CE(model(X), Y))


def list_rows(opt: Any) -> list[tuple[str, str]]:
    return sorted((row.parameter, row.structure) for row in opt.report())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [step_by_hand, lambda opt, model: iterate(opt, model, X, Y)], ids=["model", "opt"])
def test_training_goes_on_with_what_an_optimizer_built_now_would_give(recipe, change, step):
    model = net()
    opt = recipe(model, CE)
    step(opt, model)
    weight = model[0].weight
    CHANGES[change](model[0])
    assert any(p is weight for p in model.parameters())
    before, first = weight.detach().clone(), loss_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(opt, model)
    assert not torch.equal(weight, before)
    assert loss_of(model) < first
    CHANGES[change]((twin := net())[0])
    fresh = recipe(twin, CE)
    step(fresh, twin)
    assert list_rows(opt) == list_rows(fresh)


def test_the_state_of_a_renamed_run_is_loaded_by_one_built_so(recipe):
    model, twin = net(), net()
    opt = recipe(model, CE)
    iterate(opt, model, X, Y)
    CHANGES["prune"](model[0])
    early = copy.deepcopy(opt.state_dict())  # before a pass has heard of it
    iterate(opt, model, X, Y)
    CHANGES["prune"](twin[0])
    other = recipe(twin, CE)
    other.load_state_dict(early)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    for _ in range(3):
        iterate(opt, model, X, Y)
        iterate(other, twin, X, Y)
    assert_close(flat(twin), flat(model), rtol=1e-6)  # sums over the entries have another order, and so has CG's end


@pytest.mark.parametrize("choices", [{}, {"rule": ng.Momentum()}], ids=["", "velocities"])
def test_what_is_remembered_of_the_other_parameters_stays(recipe, choices):
    model = net()
    opt = recipe(model, CE, **choices)
    for _ in range(2):
        iterate(opt, model, X, Y)
    before = copy.deepcopy(opt._by_parameter())
    CHANGES["prune"](model[0])
    opt.loss(model(X), Y)
    opt.state_dict()  # follows the names
    after = opt._by_parameter()
    assert not after.get("0.weight")
    assert all(same(after[name], before[name]) for name in ("2.weight", "2.bias"))


@pytest.mark.parametrize("change", ["replaced", "weight_norm"])
def test_parameters_that_the_model_holds_no_more_are_named_and_stand_still(recipe, change):
    """`model.zero_grad()` does not reach their gradients: no step is made of what is left in them."""
    model = net()
    opt = recipe(model, CE)
    step_by_hand(opt, model)
    weight = model[0].weight
    before = weight.detach().clone()
    if change == "replaced":
        model[0] = nn.Linear(3, 4).double()  # the new weight has the old one's name
    else:
        parametrizations.weight_norm(model[0])
    new = [p.detach().clone() for p in model[0].parameters()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            step_by_hand(opt, model)
    assert len([w for w in told if "0.weight" in str(w.message) and "no longer the model's" in str(w.message)]) == 1
    assert torch.equal(weight, before)
    if change == "replaced":
        assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), new, strict=True))
