"""Hooks come off, nothing of a batch outlives its step, and models travel."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Assembled, draw, pair
from optim_models import (
    BLOCK_RECIPES,
    CE,
    RECIPES,
    Closure,
    X,
    Y,
    build,
    count_hooks,
    flat,
    iterate,
    net,
    pass_through_file,
    train,
)
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.ground.chains import read_chain


def test_detach_takes_the_hook_off() -> None:
    model = net()
    opt = build(model)
    assert count_hooks(model) == 1
    opt.detach()
    opt.detach()
    assert count_hooks(model) == 0
    opt.loss(model(X), Y).backward()
    with pytest.raises(ValueError, match=r"no inputs for the metric.*optimizer.observe\(inputs\)"):
        opt.step()
    opt.observe(X)
    opt.step()


@pytest.mark.parametrize("within", ["the hooks", "the layers"])
@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_an_optimizer_may_die_while_a_pass_goes_through(within: str, recipe: Any) -> None:
    model, held = net(), dict[str, Any]()

    def drop(module: nn.Module, args: Any) -> None:  # as the collector may, at any allocation
        held.clear()
        gc.collect()

    (model if within == "the hooks" else model[0]).register_forward_pre_hook(drop)
    held["opt"] = recipe(model, CE)
    rows = X.clone()
    given = weakref.ref(rows)
    model(rows)
    assert not held
    assert count_hooks(model) == 1
    del rows
    assert given() is None


def test_hooks_come_off_when_optimizers_die() -> None:
    model = net()
    for _ in range(10):
        opt = build(model, rule=ng.LineSearch())
        iterate(opt, model, X, Y)
    assert count_hooks(model) == 1  # dropped ones are gone without the collector's help: no reference cycle
    del opt
    gc.collect()
    assert count_hooks(model) == 0


class Mark:
    """Something that a graph holds."""


class Marked(torch.autograd.Function):
    """The identity, whose graph node holds a mark."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def build_watched(record: Callable[[Any], None]) -> nn.Module:
    """A network that hands out weak references to what its graphs hold; its own attributes a step leaves alone."""

    def run(m: Any, x: Tensor) -> Tensor:
        mark = Mark()
        record(weakref.ref(mark))
        return Marked.apply(m.layers(x), mark)

    return Assembled(run, layers=net())


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.unitwise, ng.hessian_free])
def test_a_pass_that_has_no_loss_goes_with_what_it_returned(recipe: Any) -> None:
    alive = list[Any]()

    def run(m: Any, x: Tensor) -> Tensor:  # layers before and after what the graph holds
        mark = Mark()
        alive.append(weakref.ref(mark))
        return m.layers(Marked.apply(m.first(x), mark))

    model = Assembled(run, first=nn.Linear(X.shape[1], X.shape[1]).to(X), layers=net())
    opt = recipe(model, CE)
    for _ in range(3):  # as an agent acts, whose gradients come later
        outputs = model(X)
    assert [ref() is None for ref in alive] == [True, True, False]
    opt.loss(outputs, Y).backward()
    opt.step()


FORGETFUL = {
    "plain": {},
    "momentum": {"rule": ng.Momentum()},
    "averaged": {"structure": ng.Dense(0.9), "rule": ng.LineSearch()},
    "truncated Newton": {"damping": ng.LevenbergMarquardt(), "warm_start": 0.95, "solver": ng.CG()},
}


@pytest.mark.parametrize("way", ["loop", "closure", "closure with opt.loss", "observed"])
@pytest.mark.parametrize("choices", FORGETFUL)
def test_nothing_of_a_batch_outlives_its_step(choices: str, way: str) -> None:
    alive = list[Any]()
    model = build_watched(alive.append)
    opt = build(model, **FORGETFUL[choices])

    def one_step() -> list[Any]:
        x, y = X.clone(), Y.clone()
        compute = {"closure": CE}.get(way, opt.loss)
        closure = Closure(opt, lambda: compute(model(x), y))
        if way == "observed":
            opt.observe(x, y)
        if way.startswith("closure"):
            opt.step(closure)
        else:
            closure()
            opt.step()
        return [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage()), *map(weakref.ref, (x, y))]

    batch = one_step()
    assert len(alive) >= 2  # the user's pass, and the metric's
    assert [r() for r in (*batch, *alive)] == [None] * (4 + len(alive))  # at once, without a collector


def train_density(x: Tensor) -> tuple[Tensor, ...]:
    """The loss of a step of `ng.ang`."""
    params = {"precision": torch.ones(x.shape[1], dtype=x.dtype, requires_grad=True)}

    def log_p(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return -0.5 * (params["precision"] * x * x).sum()

    opt = ng.ang(params, ng.score_metric(log_p))
    loss = ng.score_matching_loss(log_p, params, x)
    loss.backward()
    opt.step()
    return (loss,)


@pytest.mark.parametrize("recipe", [*RECIPES, None])
def test_a_loss_that_a_user_keeps_keeps_nothing_of_its_batch(recipe: Any) -> None:
    x, y = X.clone(), Y.clone()
    if recipe is None:
        kept = train_density(x)
        outputs = x
    else:
        model = net()
        opt = recipe(model, CE)
        outputs = model(x)
        kept = ((CE if recipe is ng.natgrad_cg else opt.loss)(outputs, y),)
        kept[0].backward()
        opt.step()
    batch = [weakref.ref(t.untyped_storage()) for t in (x, y, outputs)]
    del x, y, outputs
    assert [ref() for ref in batch] == [None] * 3
    assert kept[0].grad_fn is not None


@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_a_batch_without_a_step_goes_with_its_gradients(recipe: Any) -> None:
    model, batches = net(), list[Any]()
    opt = recipe(model, CE)
    for _ in range(3):  # as another optimizer takes the steps
        x = X.clone()
        opt.zero_grad()
        opt.loss(model(x), Y).backward()
        batches.append(weakref.ref(x.untyped_storage()))
    assert batches[0]() is None


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_what_is_told_of_the_last_steps_holds_none_of_their_directions(recipe: Any) -> None:
    model = net()
    opt = recipe(model, CE)
    counts = list[int]()
    for _ in range(4):
        iterate(opt, model, X, Y)
        counts.append(sum(isinstance(each, Tensor) and each.numel() > 8 for each in gc.get_objects()))
    assert counts[3] <= counts[1]


def test_no_gradient_means_no_step() -> None:
    model = net()
    opt, before = build(model, weight_decay=0.1), flat(net())
    model(X)
    assert opt.step() is None
    assert torch.equal(flat(model), before)
    assert opt.state_report().step == 0


TRAVELS: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "torch.save": lambda made: pass_through_file(made, weights_only=False),
}


@pytest.mark.parametrize("travel", TRAVELS)
def test_a_model_travels_while_an_optimizer_is_attached(travel: str) -> None:
    """The copy trains on its own, and tells nothing to the first one's optimizer."""
    model = net()
    opt = build(model)
    iterate(opt, model, X, Y)
    twin = TRAVELS[travel](model)
    assert list(model.state_dict()) == list(twin.state_dict()) == list(net().state_dict())
    assert torch.equal(flat(twin), flat(model))
    opt.zero_grad()
    opt.loss(model(X), Y).backward()
    twin(draw(5, 3, seed=8))
    opt.step()
    own = build(twin)
    iterate(own, twin, X, Y)
    assert own.state_report().step == 1


def test_the_file_of_a_model_that_is_listened_to_is_read_without_natgrad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrent, perceptron, broken_off = nn.RNN(3, 3).double(), net(), net()
    opts = [
        ng.kfac(recurrent, CE, outputs=lambda out: out[0]),
        ng.kfac(perceptron, CE),
        ng.hessian_free(broken_off, CE),
    ]
    iterate(opts[1], perceptron, X, Y)
    with pytest.raises(RuntimeError):
        broken_off(X[:, :2])
    models = [recurrent, perceptron, broken_off]
    assert all(map(count_hooks, models))
    expected = [copy.deepcopy(model)(X) for model in models]
    torch.save(models, tmp_path / "models.pt")
    for name in [name for name in sys.modules if name.partition(".")[0] == "natgrad"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it is an error
    for model, outputs in zip(torch.load(tmp_path / "models.pt", weights_only=False), expected, strict=True):
        torch.testing.assert_close(model(X), outputs)


def test_copies_of_hooks_change_nothing_that_natgrad_sees() -> None:
    energy = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).double()
    opt = ng.kfac(energy, nn.MSELoss())
    assert count_hooks(energy) > 0
    assert read_chain(energy) is not None
    assert read_chain(copy.deepcopy(energy)) is not None
    opt.detach()


# an optimizer that is pickled with the model that it listens to goes on there as it would have gone on here


WAYS = {
    "all": lambda part: part.parameters(),
    "groups": lambda part: [
        {"params": [p for p in part.parameters() if p.dim() > 1]},
        {"params": [p for p in part.parameters() if p.dim() == 1], "weight_decay": 0.1, "lr": 0.5},
    ],
}
KINDS: dict[str, Any] = {recipe.__name__: recipe for recipe in RECIPES} | {
    "sampled": lambda model, loss, **options: ng.NaturalGradient(model, ng.sampled_fisher(model, loss), **options)
}


@pytest.mark.parametrize(("kind", "way"), [*pair(KINDS, WAYS), ("hessian_free", list(WAYS)[-1])])
def test_a_copy_takes_the_same_steps_and_the_first_one_hears_nothing_of_it(kind: str, way: str) -> None:
    model = net()
    opt = KINDS[kind](model, CE, params=WAYS[way](model))
    train(opt, model, 3)
    other, again = TRAVELS["pickle"]((model, opt))
    assert again.model is other
    train(again, other, 3)
    assert not torch.equal(flat(other), flat(model))
    train(opt, model, 3)
    assert torch.equal(flat(other), flat(model))
    assert again.state_report() == opt.state_report()


LOSSES = {
    "module": nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"),
    "function": functional.cross_entropy,
    "partial": functools.partial(functional.cross_entropy, label_smoothing=0.1),
    "likelihood": ng.Categorical(),
    "wrapped": ng.likelihood(functional.cross_entropy, ng.Categorical()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_criteria_travel(loss: str) -> None:
    outputs = net()(X).detach()
    made = ng.families.as_criterion(LOSSES[loss])
    for travel in ("deepcopy", "pickle"):
        other = TRAVELS[travel](made)
        assert torch.equal(other.value(outputs, Y), made.value(outputs, Y))
        assert other.scale(outputs, Y) == made.scale(outputs, Y)
        assert other.family == made.family


def test_an_optimizer_is_not_copied_without_its_model() -> None:
    opt = ng.kfac(net(), CE)
    for action in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="state_dict"):
            action(opt)
