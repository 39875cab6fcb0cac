"""A loss of something made of the model's outputs is solved as what it is, or refused; never as another problem."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import F64, Assembled, assert_close, build_seeded, draw, mlp, pair
from optim_models import FREE_RECIPES, LOOKING, Closure, flat, is_finite
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


def net() -> nn.Module:
    return mlp(3, 4, 3)


def add_step(model: nn.Module, step: Tensor) -> nn.Module:
    """The model at other parameters."""
    nn.utils.vector_to_parameters(flat(model) + step, model.parameters())
    return model


def slopes_of(loss: Tensor, model: nn.Module) -> Tensor:
    """The gradient of a loss, (n,)."""
    return torch.cat([slope.reshape(-1) for slope in torch.autograd.grad(loss, list(model.parameters()))])


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


@pytest.mark.parametrize("name", [*AFFINE, "two losses"])
def test_a_trial_loss_is_the_loss_that_was_told_at_other_parameters(name):
    """Of several losses, their sum."""
    make, loss, y = AFFINE["temperature" if name == "two losses" else name]

    def evaluate(model: nn.Module, loss: Any) -> Tensor:
        more = 0.5 * loss(model(X2), y.flip(0)) if name == "two losses" else 0.0
        return loss(make(model), y) + more

    model, moved = net(), net()
    opt = ng.hessian_free(model, loss)
    value = evaluate(model, opt.loss)
    value.backward()
    params = dict(trainable(model))
    objective = replay_losses(model, opt.criterion, opt._live.record, params, Space(params))
    assert objective.before == pytest.approx(float(value.detach()), rel=1e-12)
    step = draw(Space(params).size, seed=9)
    found, slope = objective.gradient(step)
    there = evaluate(add_step(moved, step), loss)
    assert found == pytest.approx(float(there.detach()), rel=1e-9)
    assert objective(1.0 * step) == pytest.approx(float(there.detach()), rel=1e-9)
    assert_close(slope, slopes_of(there, moved), rtol=1e-8)


@pytest.mark.parametrize(("name", "optimiser"), pair([*AFFINE][::3], LOOKING) + pair(NONLINEAR, LOOKING))
def test_no_loss_is_replaced_by_another_in_silence(name, optimiser):
    """A nonlinear function of the outputs is refused without a closure, which tells its value again."""
    make, loss, y = CASES[name]
    model = net()
    opt, losses = LOOKING[optimiser](model, loss), []
    closure = Closure(opt, lambda: opt.loss(make(model), y))
    if name in NONLINEAR:
        closure()
        before = flat(model)
        with pytest.raises(ValueError, match="nonlinear function of the model's outputs"):
            opt.step()
        assert torch.equal(before, flat(model))
    for _ in range(4):
        value = opt.step(closure) if name in NONLINEAR else closure()
        if name not in NONLINEAR:
            opt.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0]
    assert opt.state_report().failures == 0


UNKNOWN: dict[str, Callable[[Any], Tensor]] = {
    "with a parameter": lambda m: m(X) + m[2].bias,
    "past the head": lambda m: (m(X), m[2](m[0](X2).tanh()))[1],
    "another copy": lambda m: m(X).detach() @ m[2].weight[:, :3],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_followed_is_refused_and_nothing_moves(name):
    for build in FREE_RECIPES:
        model = net()
        opt = build(model, CE)
        opt.loss(UNKNOWN[name](model), Y).backward()
        before = flat(model)
        with pytest.raises(ValueError, match="outputs=lambda out"):
            opt.step()
        assert torch.equal(before, flat(model))


@pytest.mark.parametrize("way", ["observe", "search_on", "metric_batch", "search_batch"])
def test_a_function_known_on_its_own_batch_is_not_taken_for_other_data(way):
    """What the model itself knows is taken."""
    for select in (None, lambda out: out / 0.3):
        model = net()
        metric = ng.gauss_newton(model, CE, outputs=select)
        options = {way: 4} if "batch" in way else {}
        opt = ng.NaturalGradient(model, metric, rule=ng.LineSearch(), damping=0.1, **options)
        if not options:
            getattr(opt, way)(X2, Y)
        value = opt.loss(model(X) / 0.3 if select is None else model(X), Y)
        assert float(value.detach()) == pytest.approx(float(CE(model(X) / 0.3, Y).detach()))
        value.backward()
        if select is None:
            with pytest.raises(ValueError, match="on its own batch alone"):
                opt.step()
        else:
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


def returning(kind: str = "") -> nn.Module:
    """A network that returns its hidden features and its logits in some way, or its logits alone."""
    wrap = RETURNED[kind][0] if kind else lambda hidden, logits: logits
    body, head = nn.Linear(3, 4), nn.Linear(4, 3)
    return Assembled(lambda m, x: wrap(h := m.body(x).tanh(), m.head(h)), body=body, head=head)


def build_pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """Such a network, and the same that returns its logits."""
    return build_seeded(lambda: returning(kind)), build_seeded(returning)


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
    (model, reference), make = build_pair(kind), METRICS[metric]
    data = X if metric in ("fisher", "sampled") else (X, Y)
    found = make(model, CE, outputs=RETURNED[kind][1]).at(trainable(model), data).dense()
    assert_close(found, make(reference, CE).at(trainable(reference), data).dense())


SELECTED = [(*both, True, True) for both in pair(RETURNED, ["hessian_free", "kfac", "krylov_subspace", "natgrad_cg"])]
SELECTED += [(*both, True, False) for both in pair([*RETURNED][::4], ["kfac", "natgrad_cg"])]
SELECTED += [(kind, name, False, True) for kind in ("dataclass", "model output") for name in ("kfac", "hessian_free")]
SELECTED += [(*both, False, False) for both in pair([*[*RETURNED][1::3], "dict"], ["natgrad_cg", "kfac"])]


@pytest.mark.parametrize(("kind", "optimiser", "told", "whole"), SELECTED)
def test_optimisers_take_what_outputs_selects(kind, optimiser, told, whole):
    """told: with outputs=. A record's logits, and a field that the user picks, need no selector."""
    ends, losses = [], []
    for model, select in zip(build_pair(kind), (RETURNED[kind][1], None), strict=True):
        opt = getattr(ng, optimiser)(model, CE, **({"outputs": select} if told else {}))
        pick = (lambda out: out) if whole or select is None else select
        for _ in range(2):
            opt.zero_grad()
            opt.loss(pick(model(X)), Y).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            losses.append(float(opt.loss(pick(model(X2)), Y)))  # to look at
        ends.append(flat(model))
    assert_close(ends[0], ends[1], rtol=1e-7)
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)


@pytest.mark.parametrize("kind", RETURNED)
def test_outputs_that_nothing_selects_from_name_the_selector(kind):
    """An attribute `logits` is what a model's output calls what counts: a loss takes it by itself."""
    model = build_pair(kind)[0]
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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_one_pass_add_up_in_the_metric(reduction):
    def build_two() -> nn.Module:
        parts = {name: nn.Linear(3, 3) for name in ("body", "a", "b")}
        return Assembled(lambda m, x: (m.a(h := m.body(x).tanh()), m.b(h)), **parts)

    model = build_seeded(build_two)
    parts = [ng.fisher(model, CE, outputs=lambda out, i=i: out[i]).at(trainable(model), X).dense() for i in (0, 1)]
    a, b = model(X)
    G, g = parts[0] + parts[1], slopes_of(CE(a, Y) + CE(b, Y.flip(0)), model)
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


@pytest.mark.parametrize("name", ["hessian_free", "kfac, judged"])
def test_noise_in_the_model_raises_no_false_alarm(name):
    for make in (lambda m: m(X.float()), lambda m: m(X.float()) / 0.5, lambda m: m(X.float()) - m(X2.float())):
        for autocast in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
            opt = LOOKING[name](model, CE)
            for _ in range(2):
                opt.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    value = opt.loss(make(model), Y)
                value.backward()
                opt.step()
            assert is_finite(model)
