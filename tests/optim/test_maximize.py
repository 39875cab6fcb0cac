"""`maximize=True`: the step goes the other way, as in torch.optim, and what judges a step wants a higher loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import SpectralProgress

F64 = torch.float64


def build_model(seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(F64)
    return model, torch.randn(32, 4, dtype=F64), torch.arange(32) % 3


def take_step(recipe: Any, loss: str, parts: int = 1, **options: Any) -> list[Tensor]:
    """How a first step moves the parameters."""
    model, x, y = build_model()
    targets = y if "cross" in loss else torch.sin(x[:, :3])
    before = [p.detach().clone() for p in model.parameters()]
    opt = recipe(model, loss, **options)
    opt.zero_grad()
    for a, b in zip(x.chunk(parts), targets.chunk(parts), strict=True):
        (opt.loss(model(a), b) / (1 if "sum" in loss else parts)).backward()
    opt.step()
    return [p.detach() - start for p, start in zip(model.parameters(), before, strict=True)]


PLAIN: list[tuple[Any, dict[str, Any]]] = [
    (ng.kfac, {"rule": ng.Momentum(0.0)}),
    (ng.kfac, {"rule": SpectralProgress(kl_share=float("inf")), "estimate": ng.structures.ExactLabels()}),
    (ng.ekfac, {"rule": ng.Momentum(0.0)}),
    (ng.tonga, {"rule": ng.Momentum(0.0)}),
    (ng.natgrad_cg, {"rule": ng.Rate()}),
    (ng.natgrad_cg, {"rule": ng.TrustRegion(0.01)}),
]


@pytest.mark.parametrize("parts", [1, 4], ids=["one batch", "four parts"])
@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy(reduction='sum')", "mse", "mse(reduction='sum')"])
@pytest.mark.parametrize(("recipe", "options"), PLAIN, ids=lambda part: str(getattr(part, "__name__", part))[:30])
def test_a_step_that_looks_at_no_loss_is_turned_round(recipe: Any, options: dict[str, Any], loss: str, parts: int):
    down, up = (take_step(recipe, loss, parts, maximize=maximize, **options) for maximize in (False, True))
    assert any(bool(move.any()) for move in down)
    for there, back in zip(down, up, strict=True):
        torch.testing.assert_close(there, -back, rtol=1e-9, atol=1e-12)


JUDGED: list[tuple[Any, dict[str, Any]]] = [
    (ng.kfac, {}),
    (ng.kfac, {"rule": ng.LineSearch()}),
    (ng.kfac, {"damping": ng.LevenbergMarquardt()}),
    (ng.hessian_free, {}),
    (ng.krylov_subspace, {"dimension": 3, "steps": 2}),
    (ng.natgrad_cg, {}),
]


@pytest.mark.parametrize("loss", ["cross_entropy", "mse(reduction='sum')"])
@pytest.mark.parametrize(("recipe", "options"), JUDGED, ids=lambda part: str(getattr(part, "__name__", part))[:30])
def test_the_loss_rises_at_every_step(recipe: Any, options: dict[str, Any], loss: str):
    model, x, y = build_model()
    targets = y if "cross" in loss else torch.sin(x[:, :3])
    opt, losses = recipe(model, loss, maximize=True, **options), list[float]()
    for _ in range(4):
        opt.zero_grad()
        value = opt.loss(model(x), targets)
        value.backward()
        opt.step()
        losses.append(float(value.detach()))
    assert losses == sorted(losses)
    assert losses[-1] > losses[0]
    assert opt.state_report().failures == 0


def test_an_objective_of_one_s_own_rises_with_and_without_a_closure():
    def log_density(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.distributions.Normal(params["mean"], params["log_std"].exp()).log_prob(x).sum()

    data = 3 + 2 * torch.randn(500, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    for with_closure in (False, True):
        params = {name: torch.zeros((), dtype=F64, requires_grad=True) for name in ("mean", "log_std")}
        metric = ng.score_metric(log_density)
        opt = ng.NaturalGradient(params, metric, lr=0.5, damping=0.1, maximize=True)

        def rise(opt: Any = opt, params: dict[str, Tensor] = params) -> Tensor:
            opt.zero_grad()
            value = log_density(params, data) / len(data)
            value.backward()
            return value

        for _ in range(200):
            opt.observe(data)
            if with_closure:
                opt.step(rise)
            else:
                rise()
                opt.step()
        assert abs(float(params["mean"].detach() - data.mean())) < 1e-3
        assert abs(float(params["log_std"].detach().exp() - data.std(correction=0))) < 1e-3


def test_weight_decay_still_shrinks():
    model, x, y = build_model()
    opt = ng.kfac(model, "cross_entropy", lr=0.5, weight_decay=0.1, maximize=True, rule=ng.Momentum(0.0))
    before = [p.detach().clone() for p in model.parameters()]
    (0 * opt.loss(model(x), y)).backward()
    opt.step()
    for p, start in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), 0.95 * start)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda m: ng.kfac(m, ng.LogDensity(), maximize=True), ValueError, "minus the mean of log p"),
        (
            lambda m: ng.NaturalGradient(m, ng.hessian(m, nn.CrossEntropyLoss()), maximize=True),
            ValueError,
            "up or down: take a metric that is positive",
        ),
        (lambda m: ng.kfac(m, "cross_entropy", maximize="yes"), TypeError, "expected True or False"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(build: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build(build_model()[0])
