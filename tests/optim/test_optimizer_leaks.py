"""Hooks come off, nothing of a batch outlives its step, and models travel."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import draw
from optim_models import (
    CE,
    Closure,
    X,
    Y,
    build,
    flat,
    iterate,
    net,
)
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())


def test_detach_takes_the_hook_off() -> None:
    model = net()
    opt = build(model)
    assert hooks(model) == 1
    opt.detach()
    opt.detach()
    assert hooks(model) == 0
    opt.loss(model(X), Y).backward()
    with pytest.raises(ValueError, match=r"no inputs for the metric.*optimizer.observe\(inputs\)"):
        opt.step()
    opt.observe(X)
    opt.step()


@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_an_optimizer_may_die_while_a_pass_goes_through_the_hooks(recipe: Any) -> None:
    model, held = net(), dict[str, Any]()

    def drop(module: nn.Module, args: Any) -> None:  # as the collector may, at any allocation
        held.clear()
        gc.collect()

    model.register_forward_pre_hook(drop)
    held["opt"] = recipe(model, CE)
    model(X)
    assert not held
    assert hooks(model) == 1


def test_hooks_come_off_when_optimizers_die() -> None:
    model = net()
    for _ in range(100):
        opt = build(model, rule=ng.LineSearch())
        iterate(opt, model, X, Y)
    assert hooks(model) == 1  # dropped ones are gone without the collector's help: no reference cycle
    del opt
    gc.collect()
    assert hooks(model) == 0


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


class Watched(nn.Module):
    """A network that hands out weak references to what its graphs hold; its own attributes a step leaves alone."""

    def __init__(self, record: Callable[[Any], None]) -> None:
        super().__init__()
        self.layers, self.record = net(), record

    def forward(self, x: Tensor) -> Tensor:
        mark = Mark()
        self.record(weakref.ref(mark))
        return Marked.apply(self.layers(x), mark)


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
    model = Watched(alive.append)
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


def test_no_gradient_means_no_step() -> None:
    model = net()
    opt, before = build(model, weight_decay=0.1), flat(net())
    model(X)
    assert opt.step() is None
    assert torch.equal(flat(model), before)
    assert opt.state_report().step == 0


@pytest.mark.parametrize("travel", ["deepcopy", "pickle", "torch.save"])
def test_a_model_travels_while_an_optimizer_is_attached(travel: str) -> None:
    model = net()
    keys = list(net().state_dict())
    opt = build(model)
    iterate(opt, model, X, Y)
    if travel == "deepcopy":
        twin = copy.deepcopy(model)
    elif travel == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert list(model.state_dict()) == keys
    assert list(twin.state_dict()) == keys
    assert torch.equal(flat(twin), flat(model))
    # the copy trains on its own, and tells nothing to the first one's optimizer
    opt.zero_grad()
    opt.loss(model(X), Y).backward()
    twin(draw(5, 3, seed=8))
    opt.step()
    own = build(twin)
    iterate(own, twin, X, Y)
    assert own.state_report().step == 1


# an optimizer that is pickled with the model that it listens to goes on there as it would have gone on here


WAYS = {
    "all": lambda part: None,
    "a generator": lambda part: part.parameters(),
    "groups": lambda part: [
        {"params": [p for p in part.parameters() if p.dim() > 1]},
        {"params": [p for p in part.parameters() if p.dim() == 1], "weight_decay": 0.1, "lr": 0.5},
    ],
}
KINDS = {
    **{recipe.__name__: recipe for recipe in (ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng, ng.tonga)},
    **{recipe.__name__: recipe for recipe in (ng.hessian_free, ng.natgrad_cg, ng.krylov_subspace)},
    "sampled": lambda model, loss, **options: ng.NaturalGradient(model, ng.sampled_fisher(model, loss), **options),
}


def take_steps(model: nn.Module, opt: Any, steps: int = 3) -> None:
    for _ in range(steps):
        iterate(opt, model, X, Y)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_takes_the_same_steps_and_the_first_one_hears_nothing_of_it(kind: str, way: str) -> None:
    model = net()
    opt = KINDS[kind](model, CE, params=WAYS[way](model))
    take_steps(model, opt)
    other, again = pickle.loads(pickle.dumps((model, opt)))
    assert again.model is other
    take_steps(other, again)
    assert not torch.equal(flat(other), flat(model))
    take_steps(model, opt)
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
@pytest.mark.parametrize(
    "travel", [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_criteria_travel(loss: str, travel: Any) -> None:
    outputs = net()(X).detach()
    made = ng.families.as_criterion(LOSSES[loss])
    other = travel(made)
    assert torch.equal(other.value(outputs, Y), made.value(outputs, Y))
    assert other.scale(outputs, Y) == made.scale(outputs, Y)
    assert other.family == made.family


def test_an_optimizer_is_not_copied_without_its_model() -> None:
    opt = ng.kfac(net(), CE)
    for action in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="state_dict"):
            action(opt)
