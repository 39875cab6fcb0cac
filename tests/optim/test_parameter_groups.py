"""An optimizer may have a part of a model, given in any of torch.optim's ways, and follows its dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, cross, pair
from optim_models import (
    BLOCK_RECIPES,
    CE,
    RECIPES,
    X,
    Y,
    collect_warnings,
    count_hooks,
    flat,
    flat_gradient,
    iterate,
    net,
    same,
)
from torch import nn
from torch.nn.utils import parametrizations, prune

import natgrad as ng

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


def parts(model: nn.Module) -> dict[str, nn.Module]:
    return {"body": model.get_submodule("0"), "head": model.get_submodule("2")}


FIRST = ng.kfac, ng.hessian_free


@pytest.mark.parametrize(("recipe", "way"), [*((ng.kfac, way) for way in WAYS), *zip(RECIPES[1:], WAYS, strict=False)])
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


@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_building_takes_no_walk_through_the_model_for_each_group(recipe: Any):
    def count_walks(size: int) -> int:
        model, walks = nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)]), list[int]()
        walk, groups = model.named_parameters, [{"params": list(model[i].parameters())} for i in range(size)]
        model.named_parameters = lambda *args, **how: walks.append(1) or walk(*args, **how)
        recipe(model, CE, params=groups)
        return len(walks)

    assert count_walks(9) == count_walks(1)


@pytest.mark.parametrize(
    ("recipe", "part"), [*((r, "body") for r in RECIPES), *((r, "head") for r in (*FIRST, ng.online_ng))]
)
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


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_a_part_steps_as_if_the_rest_were_frozen(recipe: Any):
    model, frozen = net(), net()
    frozen.get_submodule("0").requires_grad_(False)
    opt, other = recipe(model, CE, params=model.get_submodule("2").named_parameters()), recipe(frozen, CE)
    train(model, opt)
    train(frozen, other)
    assert_close(flat(model), flat(frozen), 1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_statistics_of_a_layer_go_on_where_a_group_joins(bias: bool):
    """A layer without a bias has the shape of the matrix that is looked for beside it."""
    ends = []
    for joins in (False, True):
        model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4, bias), nn.Tanh(), nn.Linear(4, 3, bias)))
        options: dict[str, Any] = {"rule": ng.Rate(), "damping": 0.1, "measure": False, "estimate": ng.ExactLabels()}
        opt = ng.kfac(model, CE, params=model[0].parameters(), **options)
        for step in range(4):
            if joins and step == 1:
                opt.add_param_group({"params": model[2].parameters(), "lr": 0.0})
            iterate(opt, model, X + step, Y)
        ends.append(flat(model[0]))
    assert_close(*ends, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("first", "second"), [(ng.kfac, ng.kfac), (ng.ekfac, ng.diagonal), (ng.kfac, ng.hessian_free)])
def test_two_optimizers_share_a_model(first: Any, second: Any, reduction: str):
    criterion, model = nn.CrossEntropyLoss(reduction=reduction), net()
    owned = parts(model).values()
    opts = [build(model, criterion, params=part) for build, part in zip((first, second), owned, strict=True)]
    losses, rows = train(model, *opts, steps=6), len(X) if reduction == "sum" else 1
    assert losses[-1] < 0.95 * losses[0]
    assert opts[0].state_report().loss == pytest.approx(losses[-1] / rows)
    for part, opt in zip(owned, opts, strict=True):
        report = opt.state_report()
        assert (report.failures, report.step) == (0, 6)
        assert report.gradient == pytest.approx(float(flat_gradient(part).norm()) / rows, rel=1e-9)
        opt.detach()
    assert count_hooks(model) == 0


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_a_parameter_that_was_frozen_is_trained_once_it_is_not(recipe: Any):
    model = net()
    body = model.get_submodule("0").requires_grad_(False)
    opt, before = recipe(model, CE, params=list(model.parameters())), flat(body)
    train(model, opt)
    assert torch.equal(flat(body), before)
    body.requires_grad_(True)
    train(model, opt, steps=1)
    assert not torch.equal(flat(body), before)
    assert {row.structure for row in opt.report()} != {"not read yet"}


# entries of a gradient that a hook or a mask sets to zero stay, or a sentence says that the metric moves them


MASKS = {
    "rows": lambda g: torch.cat([torch.zeros_like(g[:1]), g[1:]]),
    "columns": lambda g: torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:]], 1),
    "entries": lambda g: g * (torch.arange(g.numel()).reshape(g.shape) % 3 > 0),
    "all": torch.zeros_like,
}


@pytest.mark.parametrize(
    ("recipe", "how"),
    cross(FIRST[:1], [*FIRST[1:], ng.ekfac, ng.diagonal, ng.natgrad_cg], product(["hook", "after backward"], MASKS)),
)
def test_entries_that_a_mask_freezes_stay_or_are_named(recipe: Any, how: tuple[str, str]) -> None:
    """Adam leaves them; a metric that ties them to others moves them, and says so."""
    way, mask = how
    model, hold = net(), MASKS[mask]
    weight = model.get_submodule("2").weight
    if way == "hook":
        weight.register_hook(hold)
    opt, before = recipe(model, CE), weight.detach().clone()

    def run() -> None:
        for _ in range(4):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            if way != "hook":
                weight.grad = hold(weight.grad)
            opt.step()

    told = collect_warnings(run)
    moved = (weight.detach() - before)[hold(torch.ones_like(weight)) == 0]
    assert all("['2.weight'] is zero in entries" in text for text in told)
    assert len(told) == 1 if bool(moved.any()) else len(told) <= 1


# pruning and parametrisations put on in the middle of a run give parameters new names: training goes on


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
CHANGED = [ng.kfac, ng.ekfac, ng.diagonal, ng.online_ng, ng.hessian_free, ng.natgrad_cg]
every = pytest.mark.parametrize("recipe", CHANGED)


def step_by_hand(opt: Any, model: nn.Module) -> None:
    """As loops do that clear the model's gradients, and not the optimizer's."""
    model.zero_grad()
    opt.loss(model(X), Y).backward()
    opt.step()


def list_rows(opt: Any) -> list[tuple[str, str]]:
    return sorted((row.parameter, row.structure) for row in opt.report())


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return float(CE(model(X), Y))


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        (recipe, how)
        for recipes in (CHANGED[:1], CHANGED[1:])
        for recipe, how in pair(recipes, product(CHANGES, [step_by_hand, iterate]))
    ],
)
def test_training_goes_on_with_what_an_optimizer_built_now_would_give(recipe, how):
    """Entries that were cut do not move."""
    change, step = how
    model = net()
    opt = recipe(model, CE)
    step(opt, model)
    weight = model[0].weight
    CHANGES[change](model[0])
    assert any(p is weight for p in model.parameters())
    before, first = weight.detach().clone(), loss_of(model)
    for _ in range(4):
        step(opt, model)
    assert loss_of(model) < first
    moved = weight.detach() != before
    assert bool(moved.any())
    assert change != "prune" or not bool(moved[model[0].weight_mask == 0].any())
    CHANGES[change]((twin := net())[0])
    fresh = recipe(twin, CE)
    step(fresh, twin)
    assert list_rows(opt) == list_rows(fresh)


@every
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


@every
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


@every
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
    told = collect_warnings(lambda: [step_by_hand(opt, model) for _ in range(2)])
    assert len([text for text in told if "0.weight" in text and "no longer the model's" in text]) == 1
    assert torch.equal(weight, before)
    if change == "replaced":
        assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), new, strict=True))


def iterate_residuals(opt: Any, model: nn.Module) -> None:
    opt.step(inside=X)


@pytest.mark.parametrize(
    ("build", "act"),
    [
        (lambda m: ng.kfac(m, CE), iterate),
        (lambda m: ng.hessian_free(m, CE), iterate),
        (lambda m: ng.residuals(m, {"inside": lambda u, x: u(x) - 1}), iterate_residuals),
    ],
    ids=["blocks", "products", "residuals"],
)
def test_what_was_unfrozen_and_not_added_is_named(build: Callable[[nn.Module], Any], act: Callable[..., Any]):
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    opt, before = build(model), flat(model[0])  # type: ignore[index]
    assert not collect_warnings(lambda: act(opt, model))
    model[0].requires_grad_(True)  # type: ignore[index]
    with pytest.warns(UserWarning, match=r"\['0.bias', '0.weight'\] were frozen when the optimizer was built"):
        act(opt, model)
    assert torch.equal(flat(model[0]), before)  # type: ignore[index]
    opt.add_param_group({"params": model[0].parameters()})  # type: ignore[index]
    assert not collect_warnings(lambda: act(opt, model))
    assert not torch.equal(flat(model[0]), before)  # type: ignore[index]
