"""Errors at the door, and nothing has changed after one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Assembled, assert_close, mlp, pair
from optim_models import CE, X, Y, count_hooks, flat, iterate, kind, net, same, snapshot
from torch import Tensor, nn

import natgrad as ng

NAN = math.nan


def fisher(model: nn.Module) -> ng.Metric:
    return ng.fisher(model, CE)


# at construction


def flat_choice(**choices: Any) -> Callable[[nn.Module], Any]:
    """`ng.NaturalGradient` with one wrong choice."""
    return lambda model: ng.NaturalGradient(model, fisher(model), **choices)


def kfac_choice(**choices: Any) -> Callable[[nn.Module], Any]:
    return lambda model: ng.kfac(model, CE, **choices)


RECIPE: Any = ng.kfac  # of which the type checker does not know the arguments
WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {  # how to build it, and the words of a ValueError
    "negative lr": (flat_choice(lr=-0.1), "lr is -0.1, expected"),
    "lr not a number": (flat_choice(lr=NAN), "lr is nan, expected"),
    "infinite lr": (flat_choice(lr=math.inf), "lr is inf, expected"),
    "negative lr in a group": (
        lambda m: ng.NaturalGradient(m, fisher(m), params=[{"params": m.parameters(), "lr": -1.0}]),
        "lr is -1.0, expected",
    ),
    "negative weight decay": (flat_choice(weight_decay=-1.0), "weight_decay is -1.0, expected"),
    "negative damping": (flat_choice(damping=-1e-3), r"damping is -0.001, expected .* damping"),
    "infinite damping": (flat_choice(damping=math.inf), r"damping is inf, expected .* damping"),
    "warm start above one": (flat_choice(warm_start=1.5), "warm_start is 1.5, expected"),
    "negative warm start": (flat_choice(warm_start=-0.5), "warm_start is -0.5, expected"),
    "unknown policy": (flat_choice(on_trouble="stop"), "on_trouble is 'stop'"),
    "unknown structure": (flat_choice(structure="dens"), "structure is 'dens', .* mean 'dense'"),
    "unknown loss": (lambda m: ng.kfac(m, "cros_entropy"), "criterion is .* mean 'cross_entropy'"),
    "a model without parameters": (lambda m: ng.kfac(nn.Tanh(), CE), "it has no parameters at all"),
    "no trainable parameters": (
        lambda m: ng.NaturalGradient(m.requires_grad_(False), ng.fisher(net(), CE)),
        "model has no trainable parameters.*unfreeze",
    ),
    "a dict of constants": (
        lambda m: ng.NaturalGradient({"w": torch.ones(2)}, fisher(m)), r"call .requires_grad_\(\)",
    ),
    "an empty dict": (lambda m: ng.NaturalGradient({}, fisher(m)), "params is empty"),
    "parameters of another model": (
        flat_choice(params=list(mlp(3, 4, 3).parameters())), "params holds tensors .* not parameters of the model",
    ),
    "parameters of another model, by name": (
        kfac_choice(params=mlp(3, 4, 3).named_parameters()), "not parameters of the model",
    ),
    "a group of a stranger": (
        lambda m: ng.kfac(m, CE).add_param_group({"params": nn.Parameter(X)}), "not parameters of the model",
    ),
    "mixed devices": (lambda m: m[2].to("meta") and flat_choice()(m), r"several devices.*model.to\(device\)"),
    "no numbers": (lambda m: ng.kfac(m.to("meta"), CE), "lie on the meta device"),
    "no numbers, flat": (lambda m: ng.hessian_free(m.to("meta"), CE), "lie on the meta device"),
    "lazy parameters": (lambda m: ng.NaturalGradient(nn.LazyLinear(2), fisher(m)), "lazy: run one forward"),
    "lazy parameters of layers": (lambda m: ng.kfac(nn.LazyLinear(2), CE), "lazy: run one forward"),
    "hessian_free: negative lr": (lambda m: ng.hessian_free(m, CE, lr=-1.0), "lr is -1.0"),
    "kfac: negative lr": (kfac_choice(lr=-1.0), "lr is -1.0"),
    "momentum of one": (kfac_choice(momentum=1.0), "momentum is 1"),
    "no damping": (kfac_choice(damping=0.0), "damping is 0"),
    "no radius": (kfac_choice(max_kl=0.0), "max_kl is 0"),
    "an interval of half a step": (kfac_choice(update_every=0.5), "update_every is 0.5"),
    "another optimizer's state": (lambda m: ng.kfac(m, CE).load_state_dict({"state": {}}), "not saved by"),
    "a metric that is not finite": (
        lambda m: ng.natural_gradient(ng.operators.DenseOperator(NAN * torch.eye(3)), torch.ones(3)),
        "operator is not finite, or",
    ),
    "a gradient that is not finite": (
        lambda m: ng.natural_gradient(ng.operators.DenseOperator(torch.eye(3)), NAN * torch.ones(3)),
        r"(rhs|gradient) is not finite",
    ),
}  # fmt: skip
OF_A_WRONG_TYPE: dict[str, tuple[Callable[[nn.Module], Any], str]] = {  # the same with a TypeError
    "metric class": (lambda m: ng.NaturalGradient(m, ng.metrics.Fisher), "metric is .*expected a natgrad Metric"),
    "metric is a criterion": (lambda m: ng.NaturalGradient(m, CE), "metric is CrossEntropyLoss"),
    "no metric": (lambda m: ng.NaturalGradient(m, None), "metric is None, expected"),
    "metric function": (lambda m: ng.NaturalGradient(m, ng.fisher), "metric is .*expected"),
    "rule class": (flat_choice(rule=ng.LineSearch), "rule is .*did you forget the parentheses"),
    "solver class": (flat_choice(solver=ng.CG), "solver is .*did you forget the parentheses"),
    "model class": (lambda m: ng.NaturalGradient(nn.Linear, fisher(m)), "params is type, expected a dict of tensors"),
    "list of parameters": (
        lambda m: ng.NaturalGradient(list(m.parameters()), fisher(m)), "params is list, expected a dict",
    ),
    "a list of numbers": (kfac_choice(params=[1.0]), ""),
    "AdamW's betas": (kfac_choice(betas=(0.9, 0.99)), r"betas\[0\] is momentum="),
    "no distant keyword": (kfac_choice(quux=3), "'quux'; it takes criterion, "),
    "no criterion": (lambda m: RECIPE(m, lr=0.1), r"kfac\(\) lacks 'criterion', expected kfac\(model, criterion\)"),
    "parameters without a criterion": (lambda m: RECIPE(m.parameters(), lr=0.1), r"kfac\(\) lacks 'criterion'"),
    "neither": (lambda m: RECIPE(lr=0.1), r"kfac\(\) lacks 'model' and 'criterion', expected kfac\(model, criterion\)"),
    "parameters": (lambda m: RECIPE(m.parameters(), CE), r"give the model itself, not model\.parameters\(\)"),
    "no module": (lambda m: RECIPE({"w": X}, CE), "model is dict"),
    "no likelihood": (lambda m: ng.kfac(m, nn.MultiMarginLoss()), "not a likelihood"),
    "a structure of the whole": (lambda m: ng.StructuredNaturalGradient(m, CE, ng.Dense()), "blocks per layer"),
}  # fmt: skip
DOORS = [(build, ValueError, words) for build, words in WRONG.values()]
DOORS += [(build, TypeError, words) for build, words in OF_A_WRONG_TYPE.values()]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(("build", "error", "words"), DOORS, ids=[*WRONG, *OF_A_WRONG_TYPE])
def test_a_wrong_choice_is_refused_at_the_door(build: Any, error: type[Exception], words: str) -> None:
    model = net()
    with pytest.raises(error, match=f"(?s){words}"):
        build(model)
    assert count_hooks(model) == 0


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


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_a_wrong_number_in_a_group_is_refused_at_the_next_step(recipe: Any) -> None:
    """Then nothing has changed: with the number from before, in whatever form, the same step is taken."""
    (model, twin), opts = (net(), net()), list[Any]()
    for each in (model, twin):
        opts.append(recipe(each, CE))
        iterate(opts[-1], each)
        opts[-1].zero_grad()
        opts[-1].loss(each(X), Y).backward()
    group, limits = opts[0].param_groups[0], {"momentum": 1.0, "damping": 0.0, "max_kl": 0.0, "kl_share": 0.0}
    for key in opts[0]._live.settings:
        right = group[key]
        for wrong in (-1.0, NAN, "0.1", None, torch.ones(2), limits.get(key, math.inf)):
            group[key] = wrong
            with pytest.raises((ValueError, TypeError), match=rf"(?s){key} is .*, expected"):
                opts[0].step()
        group[key] = torch.tensor(right, dtype=torch.float64)
    group["weight_decay"] = -2e-18  # as schedules end that fall to zero
    for opt in opts:
        opt.step()
    assert_close(flat(model), flat(twin), 1e-12)


# at loss and step


def ordinary(x: Any = X, y: Any = Y) -> Callable[[nn.Module, ng.NaturalGradient], Any]:
    return lambda model, opt: iterate(opt, model, x, y)


def with_gradient(value: float) -> Callable[[nn.Module, ng.NaturalGradient], Any]:
    def act(model: nn.Module, opt: ng.NaturalGradient) -> None:
        opt.zero_grad()
        opt.loss(model(X), Y).backward()
        model[2].weight.grad[0, 0] = value
        opt.step()

    return act


def observing(inputs: Any) -> Callable[[nn.Module, ng.NaturalGradient], Any]:
    def act(model: nn.Module, opt: ng.NaturalGradient) -> None:
        opt.observe(inputs)
        iterate(opt, model, X, Y)

    return act


def step_without_forward(model: nn.Module, opt: ng.NaturalGradient) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


def evaluate_forward(model: nn.Module, opt: ng.NaturalGradient) -> None:
    model.eval()
    try:
        iterate(opt, model, X, Y)
    finally:
        model.train()


def change_inputs(model: nn.Module, opt: ng.NaturalGradient) -> None:
    x = X.clone()
    opt.zero_grad()
    opt.loss(model(x), Y).backward()
    x.mul_(2.0)
    opt.step()


TROUBLES: dict[str, tuple[Callable[[nn.Module, ng.NaturalGradient], Any], str]] = {  # and the words of a ValueError
    "gradient not a number": (with_gradient(NAN), "gradient of '2.weight' is not finite"),
    "infinite gradient": (with_gradient(math.inf), "gradient of '2.weight' is not finite"),
    "inputs not a number": (ordinary(X * NAN), "not finite"),
    "observed inputs not a number": (observing(X * NAN), "outputs are not finite.*NaN in the inputs"),
    "observed nothing": (observing(X[:0]), "empty batch; give at least one example"),
    "observed inputs elsewhere": (observing(X.to("meta")), "inputs lie on .*meta.*move both to one"),
    "empty batch": (ordinary(X[:0], Y[:0]), "empty"),
    "class out of range": (ordinary(y=Y + 1), "targets range from 1 to 3, expected class numbers"),
    "no forward": (step_without_forward, r"no inputs for the metric.*call model.train\(\)"),
    "forward in evaluation mode": (evaluate_forward, r"call model.train\(\)"),
    "inputs changed in place": (change_inputs, "changed in place.*copy them"),
}

BUILDS = {
    "rate": lambda m: ng.NaturalGradient(m, fisher(m), lr=0.1, on_trouble="raise"),
    "momentum": lambda m: ng.NaturalGradient(
        m, fisher(m), lr=0.1, structure=ng.Dense(0.9), rule=ng.Momentum(), on_trouble="raise"
    ),
    "sampled": lambda m: ng.NaturalGradient(m, ng.sampled_fisher(m, CE), lr=0.1, on_trouble="raise"),
    "hessian_free": lambda m: ng.hessian_free(m, CE, on_trouble="raise"),
}


@pytest.mark.parametrize(
    ("name", "build"),
    [*((name, "momentum") for name in TROUBLES), *pair([*TROUBLES][::2], ["rate", "sampled", "hessian_free"])],
)
def test_after_an_error_nothing_has_changed_and_training_goes_on(name: str, build: str) -> None:
    (act, words), model, twin = TROUBLES[name], net(), net()
    opt, spared = BUILDS[build](model), BUILDS[build](twin)
    iterate(opt, model, X, Y)  # so that there is a state to spoil
    before, report = snapshot(opt), opt.state_report()
    with pytest.raises(ValueError, match=f"(?s){words}"):
        act(model, opt)
    assert same(snapshot(opt), before)
    assert opt.state_report() == report
    twin.load_state_dict(model.state_dict())
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


def test_what_a_metric_lacks_is_asked_for_and_nothing_moves() -> None:
    model, other = net(), nn.ModuleDict({"layer": nn.Linear(3, 3)}).double()
    before = flat(model)
    empirical = ng.NaturalGradient(model, ng.empirical_fisher(model, CE))
    CE(model(X), Y).backward()
    with pytest.raises(ValueError, match=r"targets is None.*optimizer.loss\(outputs, targets\)"):
        empirical.step()
    empirical.observe(X)
    with pytest.raises(ValueError, match=r"targets is None"):
        empirical.step()
    divergence = ng.NaturalGradient(model, ng.divergence(ng.kl(model, ng.Categorical())))
    with pytest.raises(TypeError, match="DivergenceMetric has no criterion; compute your loss yourself"):
        divergence.loss(model(X), Y)
    strange = ng.NaturalGradient(model, fisher(other))
    CE(model(X), Y).backward()
    with pytest.raises(ValueError, match="which the model lacks"):
        strange.step()
    layers = ng.kfac(model, CE)
    with pytest.raises(ValueError, match=r"optimizer\.loss\(outputs, targets\)"):
        layers.step()
    params = {name: torch.ones(3, dtype=X.dtype, requires_grad=True) for name in "ab"}
    joint = ng.NaturalGradient(params, ng.empirical_fisher(lambda p, x: p["a"] @ x + p["b"] @ x, params))
    joint.observe(X)
    params["a"].sum().backward()
    with pytest.raises(ValueError, match=r"params \['b'\] have no gradient, and the metric's function reads them"):
        joint.step()
    assert torch.equal(flat(model), before)


def test_a_model_that_returns_its_loss_is_refused() -> None:

    model = Assembled(lambda m, x: CE(m.inner(x), Y), inner=net())
    opt = ng.NaturalGradient(model, fisher(model))
    before = snapshot(opt)
    model(X).backward()
    with pytest.raises(ValueError, match=r"outputs are a scalar.*not the loss"):
        opt.step()
    assert same(snapshot(opt), before)


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


# what people type wrongly in their first training loop is said at once


@pytest.mark.parametrize("build", [ng.kfac, ng.hessian_free])
def test_a_step_without_backward_is_said(build: Any):
    model = net()
    opt, before = build(model, CE), flat(model)
    opt.loss(model(X), Y)
    with pytest.warns(UserWarning, match=r"this step does nothing.*loss\.backward\(\) before optimizer\.step\(\)"):
        opt.step()
    assert torch.equal(flat(model), before)
    opt.step()  # no loss, no gradient: as in torch, nothing to say


@pytest.mark.parametrize("build", [ng.kfac, ng.hessian_free])
@pytest.mark.parametrize("criterion", [CE, nn.MSELoss()])
def test_targets_in_place_of_outputs_are_said(build: Any, criterion: nn.Module):
    model = net()
    opt = build(model, criterion)
    outputs = model(X)
    targets = Y if criterion is CE else torch.zeros_like(outputs)
    with pytest.raises(ValueError, match=r"outputs first: call optimizer\.loss\(outputs, targets\)"):
        opt.loss(targets, outputs)


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


class Cauchy(ng.Likelihood):
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().log1p().sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return outputs + torch.empty_like(outputs).cauchy_(generator=generator)


def test_targets_of_a_likelihood_of_ones_own_have_the_shape_that_it_draws():
    model = net()
    opt = ng.kfac(model, Cauchy())
    opt.loss(model(X)[:, :1], X[:, :1])
    with pytest.raises(ValueError, match=rf"targets has shape \({len(X)},\), expected \({len(X)}, 1\) as Cauchy draws"):
        opt.loss(model(X)[:, :1], X[:, 0])
