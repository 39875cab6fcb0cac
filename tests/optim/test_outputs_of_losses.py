"""A loss of something made of the model's outputs is solved as what it is, or refused; never as another problem."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import F64, Assembled, assert_close, draw
from optim_models import Closure
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.spaces import Space, trainable
from natgrad.optim.objective import replay_losses

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
X, X2, Y = draw(8, 3), draw(8, 3, seed=1), torch.arange(8) % 3
MASK = torch.tensor([True, False, True, True, False, True, True, True])

Case = tuple[Callable[[nn.Module], Tensor], nn.Module, Tensor]


def watch_backward(outputs: Tensor) -> Tensor:
    """As a model gives them that has a full backward hook."""
    part = nn.Identity()
    part.register_full_backward_hook(lambda *_: None)
    watched: Tensor = part(outputs)
    return watched


AFFINE: dict[str, Case] = {
    "temperature": (lambda m: m(X) / 0.3, CE, Y),
    "scaled": (lambda m: 2.5 * m(X) + 1, CE, Y),
    "minus": (lambda m: -m(X), CE, Y),
    "difference": (lambda m: m(X) - m(X2), CE, Y),
    "sum of two": (lambda m: m(X) + 0.5 * m(X2), CE, Y),
    "one pass twice": (lambda m: (lambda r: r - r.flip(0))(m(X)), MSE, draw(8, 3, seed=4)),
    "mask": (lambda m: m(X)[MASK], CE, Y[MASK]),
    "index": (lambda m: m(X)[[3, 3, 1]], CE, Y[[3, 3, 1]]),
    "flatten": (lambda m: m(X.view(2, 4, 3)).flatten(0, 1), CE, Y),
    "transpose": (lambda m: m(X.view(2, 4, 3)).transpose(1, 2), CE, Y.view(2, 4)),
    "permute": (lambda m: m(X.view(2, 2, 2, 3)).permute(0, 3, 1, 2), CE, Y.view(2, 2, 2)),
    "select": (lambda m: m(X)[:, 1], MSE, draw(8, seed=5)),
    "slice": (lambda m: m(X)[:, :2], CE, Y % 2),
    "squeeze": (lambda m: m(X)[:, :1].squeeze(-1), MSE, draw(8, seed=5)),
    "gather": (lambda m: m(X).gather(1, Y[:, None]).squeeze(1), MSE, draw(8, seed=5)),
    "action mask": (lambda m: m(X).masked_fill(Y[:, None] + 1 == torch.arange(3), -30.0), CE, Y),
    "mean": (lambda m: m(X.view(2, 4, 3)).mean(1), CE, Y[:2]),
    "stacked": (lambda m: torch.cat([m(X), m(X2)]), CE, torch.cat([Y, Y])),
    "matrix": (lambda m: m(X) @ draw(3, 4, seed=6), CE, Y),
    "weighted": (lambda m: m(X) * draw(8, 1, seed=7), CE, Y),
    "offset": (lambda m: m(X) + draw(8, 3, seed=7), CE, Y),
    "in place": (lambda m: m(X).div_(0.3), CE, Y),
    "residual": (lambda m: X + m(X), MSE, draw(8, 3, seed=5)),
    "watched": (lambda m: watch_backward(m(X)), CE, Y),
}
NONLINEAR: dict[str, Case] = {
    "bounded": (lambda m: 3 * torch.tanh(m(X)), CE, Y),
    "log-softmax": (lambda m: m(X).log_softmax(1), nn.NLLLoss(), Y),
    "squares": (lambda m: m(X) * m(X2), MSE, draw(8, 3, seed=5)),
    "rates": (lambda m: (0.5 * m(X)).exp(), MSE, draw(8, 3, seed=5).abs()),
}
CASES = AFFINE | NONLINEAR


def pair(names: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    """Every name and every other at least once, in turn; the whole product is minutes of the same facts."""
    names, others = list(names), list(others)
    count = max(len(names), len(others))
    return [(names[i % len(names)], others[i % len(others)]) for i in range(count)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def flat(model: nn.Module) -> Tensor:
    return Space(trainable(model)).flatten(trainable(model)).detach().clone()


def exact(make: Callable[[nn.Module], Tensor], loss: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
    """The Gauss-Newton matrix and the gradient of a loss of anything, by definition."""
    model = net()
    space = Space(trainable(model))

    def outputs(vector: Tensor) -> Tensor:
        state = space.unflatten(vector)
        return make(lambda x: torch.func.functional_call(model, state, (x,)))  # type: ignore[arg-type]

    at = flat(model)
    jacobian = torch.autograd.functional.jacobian(outputs, at)
    given = outputs(at).detach()
    inner = torch.autograd.functional.hessian(lambda r: loss(r, y), given)
    jacobian, inner = jacobian.reshape(-1, len(at)), inner.reshape(given.numel(), -1)
    return jacobian.mT @ inner @ jacobian, torch.autograd.functional.jacobian(lambda v: loss(outputs(v), y), at)


SOLVED: dict[str, tuple[Callable[..., Any], Any]] = {
    "fisher": (ng.fisher, None),
    "gauss_newton": (ng.gauss_newton, ng.CG(rtol=1e-12)),
    "sample space": (ng.fisher, ng.SampleSpace()),
}


@pytest.mark.parametrize(("name", "solved"), pair(AFFINE, SOLVED) + pair(NONLINEAR, SOLVED))
def test_a_step_is_that_of_the_loss_that_was_told(name, solved):
    make, loss, y = CASES[name]
    G, g = exact(lambda m: m(X), CE, Y) if name == "log-softmax" else exact(make, loss, y)
    expected = -torch.linalg.solve(G + 0.1 * torch.eye(len(g), dtype=F64), g)
    metric, solver = SOLVED[solved]
    model = net()
    before = flat(model)
    damping = ng.Constant(0.1, per="loss")
    opt = ng.NaturalGradient(model, metric(model, loss), damping=damping, solver=solver)
    opt.loss(make(model), y).backward()
    opt.step()
    assert_close(flat(model) - before, expected, rtol=1e-7)


@pytest.mark.parametrize("name", AFFINE)
def test_a_trial_loss_is_the_loss_that_was_told_at_other_parameters(name):
    make, loss, y = AFFINE[name]
    model = net()
    opt = ng.hessian_free(model, loss)
    value = opt.loss(make(model), y)
    value.backward()
    params = dict(trainable(model))
    space = Space(params)
    objective = replay_losses(model, opt.criterion, opt._live.recall, params, space)
    assert objective.before == float(value.detach())
    step = draw(space.size, seed=9)
    found, slope = objective.gradient(step)
    moved = net()
    with torch.no_grad():
        for key, part in space.unflatten(step).items():
            dict(moved.named_parameters())[key].add_(part)
    there = loss(make(moved), y)
    slopes = dict(zip(space, torch.autograd.grad(there, list(moved.parameters())), strict=True))
    assert found == pytest.approx(float(there.detach()), rel=1e-9)
    assert objective(1.0 * step) == pytest.approx(float(there.detach()), rel=1e-9)
    assert_close(slope, space.flatten(slopes), rtol=1e-8)


OPTIMISERS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "hessian_free": ng.hessian_free,
    "krylov_subspace": lambda m, loss: ng.krylov_subspace(m, loss, dimension=4, steps=3, damping=0.1),
    "natgrad_cg": lambda m, loss: ng.natgrad_cg(m, loss, damping=ng.LevenbergMarquardt()),
    "line search": lambda m, loss: ng.NaturalGradient(m, ng.fisher(m, loss), rule=ng.LineSearch(), damping=0.1),
    "kfac": lambda m, loss: ng.kfac(m, loss, damping=ng.LevenbergMarquardt(start=0.1, per="block"), update_every=1),
}


@pytest.mark.parametrize(("name", "optimiser"), pair(AFFINE, OPTIMISERS) + pair(NONLINEAR, OPTIMISERS))
def test_no_loss_is_replaced_by_another_in_silence(name, optimiser):
    make, loss, y = CASES[name]
    model = net()
    opt, losses = OPTIMISERS[optimiser](model, loss), []

    closure = Closure(opt, lambda: opt.loss(make(model), y))

    if name in NONLINEAR:
        for _ in range(5 if optimiser == "kfac" else 1):  # one step in five is judged there
            closure()
            before = flat(model)
            if opt.state_report().step == (4 if optimiser == "kfac" else 0):
                with pytest.raises(ValueError, match="nonlinear function of the model's outputs"):
                    opt.step()
                assert torch.equal(before, flat(model))
            else:
                opt.step()
    for _ in range(8):
        if name in NONLINEAR:
            value = opt.step(closure)
        else:
            value = closure()
            opt.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0]
    assert opt.state_report().failures == 0


def test_what_cannot_be_followed_is_refused_and_nothing_moves():

    def with_a_parameter(m: Any) -> Tensor:
        return m(X) + m.head.bias

    def past_the_head(m: Any) -> Tensor:
        m(X)
        return m.head(m.body(X2).tanh())

    def another_copy(m: Any) -> Tensor:
        return m(X).detach() @ m.head.weight[:, :3]

    for make in (with_a_parameter, past_the_head, another_copy):
        for build in (ng.hessian_free, ng.natgrad_cg, ng.krylov_subspace):
            torch.manual_seed(0)
            model = Assembled(
                lambda m, x: m.head(m.body(x).tanh()), body=nn.Linear(3, 4), head=nn.Linear(4, 3)
            ).double()
            opt = build(model, CE)
            opt.loss(make(model), Y).backward()
            before = flat(model)
            with pytest.raises(ValueError, match="outputs=lambda out"):
                opt.step()
            assert torch.equal(before, flat(model))


def test_a_function_known_on_its_own_batch_is_not_taken_for_other_data():
    def build(**kwargs: Any) -> tuple[nn.Module, Any]:
        model = net()
        return model, ng.NaturalGradient(model, ng.gauss_newton(model, CE), rule=ng.LineSearch(), damping=0.1, **kwargs)

    for way in ("observe", "search_on", "metric_batch", "search_batch"):
        model, opt = build(**({way: 4} if "batch" in way else {}))
        if way == "observe":
            opt.observe(X2, Y)
        if way == "search_on":
            opt.search_on(X2, Y)
        opt.loss(model(X) / 0.3, Y).backward()
        with pytest.raises(ValueError, match="on its own batch alone"):
            opt.step()
    for way in ("observe", "search_on", "metric_batch", "search_batch"):  # what the model itself knows is taken
        model = net()
        metric = ng.gauss_newton(model, CE, outputs=lambda out: out / 0.3)
        opt = ng.NaturalGradient(
            model, metric, rule=ng.LineSearch(), damping=0.1, **({way: 4} if "batch" in way else {})
        )
        if way == "observe":
            opt.observe(X2, Y)
        if way == "search_on":
            opt.search_on(X2, Y)
        value = opt.loss(model(X), Y)
        assert float(value.detach()) == pytest.approx(float(CE(model(X) / 0.3, Y).detach()))
        value.backward()
        opt.step()


# what a model returns


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor | None = None


class Model(OrderedDict):  # as in transformers: a mapping with attributes
    def __getattr__(self, key: str) -> Any:
        return self[key] if key in self else super().__getattribute__(key)


RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda h, r: {"hidden": h, "logits": r}, lambda out: out["logits"]),
    "tuple": (lambda h, r: (h, r), lambda out: out[1]),
    "nested": (lambda h, r: {"a": (h, {"b": r})}, lambda out: out["a"][1]["b"]),
    "dataclass": (lambda h, r: Output(h, r), lambda out: out.logits),
    "model output": (lambda h, r: Model(hidden=h, logits=r), lambda out: out.logits),
    "namespace": (lambda h, r: SimpleNamespace(hidden=h, logits=r), lambda out: out.logits),
    "alone in a tuple": (lambda h, r: (r,), lambda out: out[0]),
    "alone in a dict": (lambda h, r: {"sample": r}, lambda out: out["sample"]),
}


class Net(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.wrap = nn.Linear(3, 4), nn.Linear(4, 3), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.wrap(hidden, self.head(hidden))


def returning(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(RETURNED[kind][0]).double()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Net(lambda hidden, logits: logits).double()


METRICS = {
    "fisher": ng.fisher,
    "sampled": ng.sampled_fisher,
    "empirical": ng.empirical_fisher,
    "gauss_newton": ng.gauss_newton,
    "hessian": ng.hessian,
    "covariance": ng.covariance,
}


@pytest.mark.parametrize(("kind", "metric"), pair(RETURNED, METRICS))
def test_metrics_take_what_outputs_selects(kind, metric):
    model, reference, make = returning(kind), plain(), METRICS[metric]
    data = X if metric in ("fisher", "sampled") else (X, Y)
    found = make(model, CE, outputs=RETURNED[kind][1]).at(trainable(model), data).dense()
    assert_close(found, make(reference, CE).at(trainable(reference), data).dense())


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "selected"])
@pytest.mark.parametrize(
    ("kind", "optimiser"), pair(RETURNED, ["hessian_free", "kfac", "krylov_subspace", "natgrad_cg"])
)
def test_optimisers_take_what_outputs_selects(optimiser, kind, whole):
    kwargs = (
        {"damping": ng.LevenbergMarquardt(start=0.1, per="block"), "update_every": 1} if optimiser == "kfac" else {}
    )
    models, ends = (returning(kind), plain()), []
    for model in models:
        select = RETURNED[kind][1] if model is models[0] else None
        opt = getattr(ng, optimiser)(model, CE, outputs=select, **kwargs)
        for _ in range(3):
            opt.zero_grad()
            outputs = model(X)
            outputs = outputs if whole or select is None else select(outputs)
            opt.loss(outputs, Y).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            outputs = model(X2)
            ends.append(float(opt.loss(outputs if whole or select is None else select(outputs), Y)))
    assert ends[0] == pytest.approx(ends[1], rel=1e-7)


@pytest.mark.parametrize(
    ("kind", "optimiser", "whole"),
    [(kind, optimiser, True) for kind in ("dataclass", "model output") for optimiser in ("kfac", "hessian_free")]
    + [
        (*both, False)
        for both in pair([kind for kind in RETURNED if kind != "namespace"], ["natgrad_cg", "hessian_free"])
    ],
)
def test_a_record_s_logits_and_a_field_that_the_user_picks_need_no_selector(optimiser, kind, whole):
    ends = []
    for model, pick in ((returning(kind), RETURNED[kind][1]), (plain(), lambda out: out)):
        opt = getattr(ng, optimiser)(model, CE)
        for _ in range(3):
            opt.zero_grad()
            opt.loss(model(X) if whole else pick(model(X)), Y).backward()
            opt.step()
        with torch.no_grad():
            opt.loss(model(X) if whole else pick(model(X)), Y)  # to look at
        ends.append(flat(model))
    assert_close(ends[0], ends[1], rtol=1e-7)


@pytest.mark.parametrize("kind", RETURNED)
def test_outputs_that_nothing_selects_from_name_the_selector(kind):
    """An attribute `logits` is what a model's output calls what counts: a loss takes it by itself."""
    model = returning(kind)
    for build in (ng.hessian_free, ng.kfac):
        if hasattr(model(X), "logits"):
            assert_close(build(model, CE).loss(model(X), Y).detach(), CE(model(X).logits, Y).detach(), rtol=1e-12)
            continue
        with pytest.raises(ValueError, match="outputs=lambda out"):
            build(model, CE).loss(model(X), Y)
    with pytest.raises(ValueError, match=r"outputs=lambda out|outputs are"):
        ng.fisher(model, CE).at(trainable(model), X)


@pytest.mark.parametrize("build", [ng.hessian_free, ng.kfac, ng.fisher, ng.hessian, ng.gauss_newton])
def test_a_selector_that_is_no_function_is_refused(build):
    with pytest.raises(TypeError, match=r"lambda out: out\.logits"):
        build(net(), CE, outputs="logits")


# several passes and losses


def test_trial_losses_of_several_losses_are_their_sum():
    def tasks(model: nn.Module, opt: Any) -> Tensor:
        return opt.loss(model(X), Y) + 0.5 * opt.loss(model(X2) / 0.3, Y.flip(0))

    model = net()
    opt = ng.hessian_free(model, CE)
    value = tasks(model, opt)
    value.backward()
    params = dict(trainable(model))
    objective = replay_losses(model, opt.criterion, opt._live.recall, params, Space(params))
    assert objective.before == pytest.approx(float(value.detach()))
    step = draw(Space(params).size, seed=3)
    moved = net()
    nn.utils.vector_to_parameters(flat(model) + step, moved.parameters())
    there = CE(moved(X), Y) + 0.5 * CE(moved(X2) / 0.3, Y.flip(0))
    assert objective(step) == pytest.approx(float(there.detach()))
    slopes = Space(params).flatten(dict(zip(params, torch.autograd.grad(there, list(moved.parameters())), strict=True)))
    assert_close(objective.gradient(step)[1], slopes, rtol=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_one_pass_add_up_in_the_metric(reduction):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).tanh()
            return self.a(hidden), self.b(hidden)

    torch.manual_seed(0)
    model = Two().double()
    parts = [ng.fisher(model, CE, outputs=lambda out, i=i: out[i]).at(trainable(model), X).dense() for i in (0, 1)]
    space = Space(trainable(model))
    a, b = model(X)
    slopes = torch.autograd.grad(CE(a, Y) + CE(b, Y.flip(0)), list(model.parameters()))
    g = space.flatten(dict(zip(space, slopes, strict=True)))
    G = parts[0] + parts[1]
    if reduction == "sum":  # in units of the mean over all rows that were summed
        G, g = G / 2, g / 2
    loss = nn.CrossEntropyLoss(reduction=reduction)
    opt = ng.NaturalGradient(model, ng.fisher(model, loss), damping=0.1)
    before = flat(model)
    a, b = model(X)
    (opt.loss(a, Y) + opt.loss(b, Y.flip(0))).backward()
    opt.step()
    expected = -torch.linalg.solve(G + 0.1 * torch.eye(len(g), dtype=F64), g)
    assert_close(flat(model) - before, expected, rtol=1e-8)


def test_losses_under_a_gradient_scaler_are_not_guessed_apart():
    model = net()
    opt = ng.hessian_free(model, CE)
    (1024 * opt.loss(model(X), Y) + 1024 * opt.loss(model(X2), Y)).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        opt.step()


# no false alarm, no leak


@pytest.mark.parametrize("build", [ng.hessian_free, ng.kfac], ids=["hessian_free", "kfac"])
def test_noise_in_the_model_raises_no_false_alarm(build):
    def noisy() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))

    kwargs = {} if build is ng.hessian_free else {"damping": ng.LevenbergMarquardt(start=0.1, per="block")}
    for make in (lambda m: m(X.float()), lambda m: m(X.float()) / 0.5, lambda m: m(X.float()) - m(X2.float())):
        for autocast in (False, True):
            model = noisy()
            opt = build(model, CE, **kwargs)
            for _ in range(3):
                opt.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    value = opt.loss(make(model), Y)
                value.backward()
                opt.step()
            assert bool(flat(model).isfinite().all())
