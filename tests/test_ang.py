"""ng.ang: the paper's step, its invariance, its bound, and the two-layer model off its plateau."""

from __future__ import annotations

import io
import math

import pytest
import torch
from models import F64, assert_close, draw
from optim_models import CE, Y, iterate, net
from torch import Tensor

import natgrad as ng
from natgrad.applications import TwoLayer
from natgrad.rules import Quadratic, Step
from natgrad.spaces import Params

METHODS = [ng.Averaged(), ng.Woodbury(), ng.FirstOrder()]
MODEL = TwoLayer()


def start(seed: int = 0, size: int = 3) -> dict[str, Tensor]:
    params = {"W": 0.5 * draw(size, size, seed=seed), "V": 0.3 * draw(size, size, seed=seed + 1)}
    return {name: p.requires_grad_() for name, p in params.items()}


def flat(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in params.values()])


def train(opt: ng.NaturalGradient, log_p: object, params: dict[str, Tensor], steps: range) -> None:
    for t in steps:
        opt.zero_grad()
        ng.score_matching_loss(log_p, params, draw(10, len(params["W"]), seed=t)).backward()
        opt.step()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_step_is_the_inverse_of_the_average_times_the_gradient(method: ng.Update) -> None:
    params, x = start(), draw(10, 3)
    opt = ng.ang(params, ng.score_metric(MODEL), lr=1e-3, method=method, rule=ng.Rate())
    at = {name: p.detach().clone() for name, p in params.items()}
    gradient, metric = ng.Space(at).flatten(MODEL.gradient(at, x)), ng.score_metric(MODEL).at(at, x).dense()
    train(opt, MODEL, params, range(1))
    kept = {"Woodbury": 1 / 31, "FirstOrder": 1 / 101}.get(type(method).__name__)
    eye = torch.eye(18, dtype=F64)
    average = metric + eye / 11 if kept is None else (1 - kept) * eye + kept * metric
    expected = torch.linalg.solve(average, gradient)
    # eq. 4 is right to first order only: the second is below eps^2 lambda_max^2
    tolerance = 1e-10 if not isinstance(method, ng.FirstOrder) else (kept or 0) ** 2 * float(metric.norm()) ** 2
    assert_close((flat(at) - flat(params)) / 1e-3, expected, tolerance)


def test_the_undamped_step_does_not_change_under_reparametrisation() -> None:
    """theta = A xi: the step in xi, mapped by A, is the step in theta. V is fixed: its scale is that of W's rows."""
    first, turn, x = start(), draw(9, 9, seed=5) + 3 * torch.eye(9, dtype=F64), draw(30, 3)

    def plain(params: Params, x: Tensor) -> Tensor:
        return MODEL.log_p({"W": params["theta"].view(3, 3), "V": first["V"].detach()}, x)

    def turned(params: Params, x: Tensor) -> Tensor:
        return plain({"theta": turn @ params["xi"]}, x)

    method, steps, W = ng.Averaged(damping=1e-14, decay=1e-14), [], first["W"].detach().flatten()
    theta, xi = {"theta": W.clone().requires_grad_()}, {"xi": torch.linalg.solve(turn, W).requires_grad_()}
    for log_p, params in ((plain, theta), (turned, xi)):
        opt = ng.ang(params, ng.score_metric(log_p), lr=0.1, method=method, rule=ng.Rate())
        before = flat(params)
        ng.score_matching_loss(log_p, params, x).backward()
        opt.step()
        steps.append(flat(params) - before)
    assert_close(turn @ steps[1], steps[0], 1e-7)  # G's condition number times the damping


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_saved_and_continued_is_never_having_stopped(method: ng.Update) -> None:
    params = start()
    opt = ng.ang(params, ng.score_metric(MODEL), method=method)
    train(opt, MODEL, params, range(5))
    file = io.BytesIO()
    torch.save((params, opt.state_dict()), file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    other = {name: p.detach().clone().requires_grad_() for name, p in values.items()}
    again = ng.ang(other, ng.score_metric(MODEL), method=method)
    again.load_state_dict(state)
    train(again, MODEL, other, range(5, 12))
    del again  # one optimiser at a time hears the losses
    train(opt, MODEL, params, range(5, 12))
    assert torch.equal(flat(params), flat(other))


@pytest.mark.parametrize(("examples", "seen"), [(1, 1), (40, 40), (40, 6000), (40, 12_000)])
def test_the_bound_grows_with_the_batch_and_falls_after_a_while(examples: int, seen: int) -> None:
    metric = ng.operators.Dense(torch.diag(torch.tensor([4.0, 1.0], dtype=F64)))
    d = torch.tensor([30.0, -10.0], dtype=F64)
    model = Quadratic(d, metric, 0.0, Step(d, metric @ d))
    with pytest.raises(ValueError, match="counts examples: use structure="):
        ng.OnlineRadius().step(model, None, {})
    metric.counts = {"examples": examples, "seen": seen}
    step, _ = ng.OnlineRadius(bound=0.16, hold=6000).step(model, None, {})
    expected = 0.16 * math.sqrt(examples) * min(1.0, 6000 / seen)
    assert math.sqrt(float(step.vector @ step.image)) == pytest.approx(expected)
    assert_close(step.vector / step.vector.norm(), d / d.norm())
    free, _ = ng.OnlineRadius(bound=1e6).step(model, None, {})
    assert torch.equal(free.vector, d)


@pytest.mark.parametrize("wrong", [{"bound": 0.0}, {"bound": math.inf}, {"hold": 0.0}, {"hold": math.nan}])
def test_bounds_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        ng.OnlineRadius(**wrong)


def test_works_with_a_fisher_metric_and_a_module() -> None:
    model = net()
    opt, x = ng.ang(model, ng.fisher(model, CE)), draw(8, 3)
    losses = []
    for _ in range(30):
        iterate(opt, model, x, Y)
        losses.append(float(CE(model(x), Y).detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert opt.state_report().counts["seen"] == 240


def test_leaves_the_plateau_where_gradient_descent_stays() -> None:
    """Four variables in two subspaces with a common scale each: 60 steps of 40 examples, nothing tuned."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(2000, 2, 1, generator=generator, dtype=F64)
    data = (scales * torch.randn(2000, 2, 2, generator=generator, dtype=F64)).flatten(1)
    params = {"W": 0.3 * draw(4, 4, seed=3), "V": 0.3 * draw(4, 4, seed=4)}
    params = {name: p.requires_grad_() for name, p in params.items()}
    density = TwoLayer()
    first = float(density.loss({n: p.detach() for n, p in params.items()}, data))
    descent = {name: p.detach().clone() for name, p in params.items()}
    opt = ng.ang(params, ng.score_metric(density))
    for t in range(60):
        x = data[torch.randint(2000, (40,), generator=torch.Generator().manual_seed(t))]
        opt.zero_grad()
        ng.score_matching_loss(density, params, x).backward()
        opt.step()
        gradient = density.gradient(descent, x)
        descent = {name: p - 1e-2 * gradient[name] for name, p in descent.items()}
    ours, theirs = (float(density.loss({n: p.detach() for n, p in q.items()}, data)) for q in (params, descent))
    assert ours < theirs < first
    assert ours < 1.1 * theirs  # both are negative
