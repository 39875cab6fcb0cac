"""Errors at the door, and nothing has changed after one."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Assembled, draw, mlp
from optim_models import CE, X, Y, flat, iterate, kind, net, same, snapshot
from torch import Tensor, nn

import natgrad as ng

NAN = math.nan


def fisher(model: nn.Module) -> ng.Metric:
    return ng.fisher(model, CE)


# at construction


@dataclass(frozen=True)
class Door:
    """A way to build an optimizer wrongly, the error's type, and what its message must hold."""

    build: Callable[[nn.Module], Any]
    error: type[Exception]
    message: str


def optimizer(**choices: Any) -> Callable[[nn.Module], Any]:
    """NaturalGradient with one wrong choice."""
    return lambda model: ng.NaturalGradient(model, fisher(model), **choices)


def freeze_model(model: nn.Module) -> Any:
    metric = fisher(model)
    return ng.NaturalGradient(model.requires_grad_(False), metric)


def halfway_to_meta(model: nn.Module) -> Any:
    model[2].to("meta")
    return ng.NaturalGradient(model, fisher(model))


DOORS = {
    "negative lr": Door(optimizer(lr=-0.1), ValueError, "lr is -0.1, expected"),
    "lr not a number": Door(optimizer(lr=NAN), ValueError, "lr is nan, expected"),
    "infinite lr": Door(optimizer(lr=math.inf), ValueError, "lr is inf, expected"),
    "negative lr in a group": Door(
        lambda m: ng.NaturalGradient(m, fisher(m), params=[{"params": m.parameters(), "lr": -1.0}]),
        ValueError,
        "lr is -1.0, expected",
    ),
    "negative weight decay": Door(optimizer(weight_decay=-1.0), ValueError, "weight_decay is -1.0, expected"),
    "negative damping": Door(optimizer(damping=-1e-3), ValueError, r"damping is -0.001, expected .* damping"),
    "infinite damping": Door(optimizer(damping=math.inf), ValueError, r"damping is inf, expected .* damping"),
    "warm start above one": Door(optimizer(warm_start=1.5), ValueError, "warm_start is 1.5, expected"),
    "negative warm start": Door(optimizer(warm_start=-0.5), ValueError, "warm_start is -0.5, expected"),
    "unknown policy": Door(optimizer(on_trouble="stop"), ValueError, "on_trouble is 'stop'"),
    "metric class": Door(
        lambda m: ng.NaturalGradient(m, ng.metrics.Fisher), TypeError, "metric is .*expected a natgrad Metric"
    ),
    "metric is a criterion": Door(lambda m: ng.NaturalGradient(m, CE), TypeError, "metric is CrossEntropyLoss"),
    "no metric": Door(lambda m: ng.NaturalGradient(m, None), TypeError, "metric is None, expected"),
    "metric function": Door(lambda m: ng.NaturalGradient(m, ng.fisher), TypeError, "metric is .*expected"),
    "rule class": Door(optimizer(rule=ng.LineSearch), TypeError, "rule is .*did you forget the parentheses"),
    "solver class": Door(optimizer(solver=ng.CG), TypeError, "solver is .*did you forget the parentheses"),
    "unknown structure": Door(optimizer(structure="dens"), ValueError, "structure is 'dens', .* mean 'dense'"),
    "unknown loss": Door(lambda m: ng.kfac(m, "cros_entropy"), ValueError, "criterion is .* mean 'cross_entropy'"),
    "a model without parameters": Door(lambda m: ng.kfac(nn.Tanh(), CE), ValueError, "it has no parameters at all"),
    "model class": Door(
        lambda m: ng.NaturalGradient(nn.Linear, fisher(m)), TypeError, "params is type, expected a dict of tensors"
    ),
    "list of parameters": Door(
        lambda m: ng.NaturalGradient(list(m.parameters()), fisher(m)), TypeError, "params is list, expected a dict"
    ),
    "no trainable parameters": Door(freeze_model, ValueError, "model has no trainable parameters.*unfreeze"),
    "a dict of constants": Door(
        lambda m: ng.NaturalGradient({"w": torch.ones(2)}, fisher(m)), ValueError, r"call .requires_grad_\(\)"
    ),
    "an empty dict": Door(lambda m: ng.NaturalGradient({}, fisher(m)), ValueError, "params is empty"),
    "parameters of another model": Door(
        optimizer(params=list(mlp(3, 4, 3).parameters())),
        ValueError,
        "params holds tensors .* not parameters of the model",
    ),
    "mixed devices": Door(halfway_to_meta, ValueError, r"several devices.*model.to\(device\)"),
    "lazy parameters": Door(
        lambda m: ng.NaturalGradient(nn.LazyLinear(2), fisher(m)), ValueError, "lazy: run one forward"
    ),
    "AdamW's betas": Door(lambda m: ng.kfac(m, CE, betas=(0.9, 0.99)), TypeError, r"betas\[0\] is momentum="),
    "hessian_free: negative lr": Door(lambda m: ng.hessian_free(m, CE, lr=-1.0), ValueError, "lr is -1.0"),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_wrong_choice_is_refused_at_the_door(name: str) -> None:
    door, model = DOORS[name], net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules announce themselves
        with pytest.raises(door.error, match=f"(?s){door.message}"):
            door.build(model)
    assert not model._forward_pre_hooks


def test_added_parameters_are_checked_before_they_are_added() -> None:
    model = net()
    opt = ng.NaturalGradient(model, fisher(model), params=list(model[2].parameters()))
    before = snapshot(opt)
    for group, message in (
        ({"params": [torch.ones(2, requires_grad=True)]}, "not parameters of the model"),
        ({"params": list(model[0].parameters()), "lr": -1.0}, "lr is -1.0"),
        ({"params": list(model[0].parameters()), "weight_decay": NAN}, "weight_decay is nan"),
        ({"params": list(model[2].parameters())}, "more than one parameter group"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.add_param_group(group)
        assert same(snapshot(opt), before)
    iterate(opt, model, X, Y)


# at loss and step


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in an iteration."""

    act: Callable[[nn.Module, ng.NaturalGradient], Any]
    error: type[Exception]
    message: str


def ordinary(x: Any = X, y: Any = Y) -> Callable[[nn.Module, ng.NaturalGradient], Any]:
    return lambda model, opt: iterate(opt, model, x, y)


def with_gradient(value: float) -> Callable[[nn.Module, ng.NaturalGradient], Any]:
    def act(model: nn.Module, opt: ng.NaturalGradient) -> None:
        opt.zero_grad()
        opt.loss(model(X), Y).backward()
        model[2].weight.grad[0, 0] = value
        opt.step()

    return act


def gradients_without_forward(model: nn.Module, opt: ng.NaturalGradient) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


def forward_in_evaluation_mode(model: nn.Module, opt: ng.NaturalGradient) -> None:
    model.eval()
    try:
        iterate(opt, model, X, Y)
    finally:
        model.train()


def inputs_changed_in_place(model: nn.Module, opt: ng.NaturalGradient) -> None:
    x = X.clone()
    opt.zero_grad()
    opt.loss(model(x), Y).backward()
    x.mul_(2.0)
    opt.step()


def observing(inputs: Any) -> Callable[[nn.Module, ng.NaturalGradient], Any]:
    def act(model: nn.Module, opt: ng.NaturalGradient) -> None:
        opt.observe(inputs)
        iterate(opt, model, X, Y)

    return act


TROUBLES = {
    "gradient not a number": Trouble(with_gradient(NAN), ValueError, "gradient of '2.weight' is not finite"),
    "infinite gradient": Trouble(with_gradient(math.inf), ValueError, "gradient of '2.weight' is not finite"),
    "inputs not a number": Trouble(ordinary(X * NAN), ValueError, "not finite"),
    "observed inputs not a number": Trouble(
        observing(X * NAN), ValueError, "outputs are not finite.*NaN in the inputs"
    ),
    "observed inputs of a wrong width": Trouble(observing(draw(4, 5)), RuntimeError, "shapes cannot be multiplied"),
    "observed nothing": Trouble(observing(X[:0]), ValueError, "empty batch; give at least one example"),
    "observed inputs elsewhere": Trouble(observing(X.to("meta")), ValueError, "inputs lie on .*meta.*move both to one"),
    "empty batch": Trouble(ordinary(X[:0], Y[:0]), ValueError, "empty"),
    "class out of range": Trouble(ordinary(y=Y + 1), ValueError, "targets range from 1 to 3, expected class numbers"),
    "no forward": Trouble(gradients_without_forward, ValueError, r"no inputs for the metric.*call model.train\(\)"),
    "forward in evaluation mode": Trouble(forward_in_evaluation_mode, ValueError, r"call model.train\(\)"),
    "inputs changed in place": Trouble(inputs_changed_in_place, ValueError, "changed in place.*copy them"),
}

BUILDS = {
    "rate": lambda m: ng.NaturalGradient(m, fisher(m), lr=0.1, on_trouble="raise"),
    "momentum": lambda m: ng.NaturalGradient(
        m, fisher(m), lr=0.1, structure=ng.Dense(0.9), rule=ng.Momentum(), on_trouble="raise"
    ),
    "sampled": lambda m: ng.NaturalGradient(m, ng.sampled_fisher(m, CE), lr=0.1, on_trouble="raise"),
    "hessian_free": lambda m: ng.hessian_free(m, CE, on_trouble="raise"),
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", TROUBLES)
def test_after_an_error_nothing_has_changed_and_training_goes_on(name: str, build: str) -> None:
    trouble, model = TROUBLES[name], net()
    opt = BUILDS[build](model)
    iterate(opt, model, X, Y)  # so that there is a state to spoil
    before, report = snapshot(opt), opt.state_report()
    with pytest.raises(trouble.error, match=f"(?s){trouble.message}"):
        trouble.act(model, opt)
    assert same(snapshot(opt), before)
    assert opt.state_report() == report
    twin = net()
    twin.load_state_dict(model.state_dict())
    spared = BUILDS[build](twin)
    spared.load_state_dict(opt.state_dict())
    iterate(opt, model, X, Y)
    iterate(spared, twin, X, Y)
    assert torch.equal(flat(model), flat(twin))  # no trace of the failure


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"damping": ng.LevenbergMarquardt()}, r"LevenbergMarquardt compares the loss .*optimizer.loss\(outputs"),
        (
            {"rule": ng.TrustRegion(0.1, backtracks=5)},
            r"TrustRegion\(radius=0.1, backtracks=5.*optimizer.step\(closure\)",
        ),
        ({"rule": ng.LineSearch()}, r"LineSearch\(.*re-evaluates the loss: call optimizer.step\(closure\)"),
    ],
)
def test_a_choice_that_needs_the_loss_says_how_to_give_it(choices: dict[str, Any], message: str) -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.sampled_fisher(model, CE), **choices)
    before = snapshot(opt)
    CE(model(X), Y).backward()
    with pytest.raises(ValueError, match=message):
        opt.step()
    assert same(snapshot(opt), before)
    opt.zero_grad()
    opt.loss(model(X), Y).backward()
    opt.step()
    assert opt.state_report().step == 1


def test_the_empirical_metric_asks_for_targets() -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.empirical_fisher(model, CE))
    CE(model(X), Y).backward()
    with pytest.raises(ValueError, match=r"targets is None.*optimizer.loss\(outputs, targets\)"):
        opt.step()
    opt.observe(X)
    with pytest.raises(ValueError, match=r"targets is None"):
        opt.step()


def test_a_metric_without_a_criterion_has_no_loss() -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.divergence(ng.kl(model, ng.Categorical())))
    with pytest.raises(TypeError, match="DivergenceMetric has no criterion; compute your loss yourself"):
        opt.loss(model(X), Y)


def test_a_model_that_returns_its_loss_is_refused() -> None:

    model = Assembled(lambda m, x: CE(m.inner(x), Y), inner=net())
    opt = ng.NaturalGradient(model, fisher(model))
    before = snapshot(opt)
    model(X).backward()
    with pytest.raises(ValueError, match=r"outputs are a scalar.*not the loss"):
        opt.step()
    assert same(snapshot(opt), before)


def test_a_metric_of_a_model_with_other_names_is_refused() -> None:
    model, other = net(), nn.ModuleDict({"layer": nn.Linear(3, 3)}).double()
    opt = ng.NaturalGradient(model, fisher(other))
    CE(model(X), Y).backward()
    with pytest.raises(ValueError, match="which the model lacks"):
        opt.step()


class Overflow(ng.Metric):
    """A metric whose matrix is not finite."""

    def at(self, params, inputs, *, random=None):
        return ng.operators.DenseOperator(torch.full((31, 31), NAN, dtype=torch.float64))


@pytest.mark.parametrize("solver", [ng.Direct(), ng.CG(), ng.SampleSpace(), ng.Auto()], ids=kind)
@pytest.mark.parametrize("rule", [ng.Rate(), ng.Momentum(), ng.TrustRegion(0.1)], ids=kind)
def test_a_metric_that_is_not_finite_neither_moves_parameters_nor_poisons_state(
    solver: ng.Solver, rule: ng.Rule
) -> None:
    # contract 4: either an error at the door, or a step that is skipped and counted
    model = net()
    opt = ng.NaturalGradient(model, Overflow(), solver=solver, rule=rule, lr=0.1)
    before = flat(model)
    for k in range(2):
        opt.zero_grad()
        CE(model(X), Y).backward()
        try:
            opt.step()
            assert opt.state_report().failures == k + 1
        except ValueError as error:
            assert "not finite" in str(error)  # noqa: PT017
    assert torch.equal(flat(model), before)
    assert all(bool(torch.isfinite(v).all()) for state in opt._by_parameter().values() for v in state.values())
    opt.metric = fisher(model)  # the trouble is over
    for _ in range(2):
        iterate(opt, model, X, Y)
    assert bool(torch.isfinite(flat(model)).all())
    assert not torch.equal(flat(model), before)


def test_the_function_refuses_a_metric_and_a_gradient_that_are_not_finite() -> None:
    G, g = ng.operators.DenseOperator(torch.eye(3).double()), torch.ones(3).double()
    with pytest.raises(ValueError, match="operator is not finite, or"):
        ng.natural_gradient(ng.operators.DenseOperator(NAN * torch.eye(3).double()), g)
    with pytest.raises(ValueError, match=r"(rhs|gradient) is not finite"):
        ng.natural_gradient(G, g * NAN)


# what people type wrongly in their first training loop is said at once


MSE = nn.MSELoss()
RECIPE: Any = ng.kfac
OPTIMISERS = [ng.kfac, ng.hessian_free]


@pytest.mark.parametrize("build", OPTIMISERS)
def test_a_step_without_backward_is_said(build: Any):
    model = net()
    opt = build(model, CE)
    before = [p.detach().clone() for p in model.parameters()]
    opt.loss(model(X), Y)
    with pytest.warns(UserWarning, match=r"this step does nothing.*loss\.backward\(\) before optimizer\.step\(\)"):
        opt.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    opt.step()  # no loss, no gradient: as in torch, nothing to say


@pytest.mark.parametrize("build", OPTIMISERS)
@pytest.mark.parametrize("criterion", [CE, MSE])
def test_targets_in_place_of_outputs_are_said(build: Any, criterion: nn.Module):
    model = net()
    opt = build(model, criterion)
    outputs = model(X)
    targets = Y if criterion is CE else torch.zeros_like(outputs)
    with pytest.raises(ValueError, match=r"outputs first: call optimizer\.loss\(outputs, targets\)"):
        opt.loss(targets, outputs)


@pytest.mark.parametrize("given", [(), (net(),), (net().parameters(),)])
def test_a_missing_criterion_is_shown_in_its_place(given: tuple[Any, ...]):
    missing = "'criterion'" if given else "'model' and 'criterion'"
    with pytest.raises(TypeError, match=re.escape(f"kfac() lacks {missing}, expected kfac(model, criterion)")):
        RECIPE(*given, lr=0.1)


def test_parameters_in_place_of_the_model_are_said():
    with pytest.raises(TypeError, match=r"give the model itself, not model\.parameters\(\)"):
        RECIPE(net().parameters(), CE)


@pytest.mark.parametrize(
    ("criterion", "targets", "words"),
    [
        (CE, Y.int(), r"targets are torch\.int32, expected torch\.int64; convert them with targets\.long\(\)"),
        (nn.NLLLoss(), Y, "outputs are not log-probabilities.*CrossEntropyLoss"),
    ],
)
def test_outputs_and_targets_are_those_of_the_criterion(criterion: nn.Module, targets: Tensor, words: str):
    model = net()
    with pytest.raises(ValueError, match=words):
        ng.kfac(model, criterion).loss(model(X), targets)


def test_no_distant_keyword_is_proposed():
    with pytest.raises(TypeError, match="'quux'; it takes criterion, "):
        RECIPE(net(), CE, quux=3)
