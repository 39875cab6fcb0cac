"""`maximize=True`: the step goes the other way, as in torch.optim, and what judges a step wants a higher loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import F64, draw, mlp
from optim_models import Closure, flat, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import SpectralProgress


def build_model() -> tuple[nn.Module, Tensor, Tensor]:
    return mlp(4, 5, 3), draw(32, 4), torch.arange(32) % 3


def take_step(recipe: Any, loss: str, parts: int = 1, **options: Any) -> Tensor:
    """How a first step moves the parameters."""
    model, x, y = build_model()
    targets, before = y if "cross" in loss else torch.sin(x[:, :3]), flat(model)
    opt = recipe(model, loss, **options)
    for a, b in zip(x.chunk(parts), targets.chunk(parts), strict=True):
        (opt.loss(model(a), b) / (1 if "sum" in loss else parts)).backward()
    opt.step()
    return flat(model) - before


PLAIN: list[tuple[Any, dict[str, Any]]] = [
    (ng.kfac, {"rule": ng.Momentum(0.0)}),
    (ng.kfac, {"rule": SpectralProgress(kl_share=float("inf")), "estimate": ng.structures.ExactLabels()}),
    (ng.ekfac, {"rule": ng.Momentum(0.0)}),
    (ng.tonga, {"rule": ng.Momentum(0.0)}),
    (ng.natgrad_cg, {"rule": ng.Rate()}),
    (ng.natgrad_cg, {"rule": ng.TrustRegion(0.01)}),
]


@pytest.mark.parametrize(("loss", "parts"), [("cross_entropy", 4), ("mse(reduction='sum')", 1)])
@pytest.mark.parametrize(("recipe", "options"), PLAIN, ids=lambda part: str(getattr(part, "__name__", part))[:30])
def test_a_step_that_looks_at_no_loss_is_turned_round(recipe: Any, options: dict[str, Any], loss: str, parts: int):
    down, up = (take_step(recipe, loss, parts, maximize=maximize, **options) for maximize in (False, True))
    assert bool(down.any())
    torch.testing.assert_close(down, -up, rtol=1e-9, atol=1e-12)


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
    opt = recipe(model, loss, maximize=True, **options)
    losses = train(opt, model, 4, x, y if "cross" in loss else torch.sin(x[:, :3]))
    assert losses == sorted(losses)
    assert losses[-1] > losses[0]
    assert opt.state_report().failures == 0


@pytest.mark.parametrize("closed", [False, True])
def test_an_objective_of_one_s_own_rises_with_and_without_a_closure(closed: bool):
    def log_density(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.distributions.Normal(params["mean"], params["log_std"].exp()).log_prob(x).sum()

    data = 3 + 2 * draw(100, 1)
    params = {name: torch.zeros((), dtype=F64, requires_grad=True) for name in ("mean", "log_std")}
    opt = ng.NaturalGradient(params, ng.score_metric(log_density), lr=0.5, damping=0.1, maximize=True)
    closure = Closure(opt, lambda: log_density(params, data) / len(data))
    for _ in range(40):
        opt.observe(data)
        if closed:
            opt.step(closure)
        else:
            closure()
            opt.step()
    assert abs(float(params["mean"].detach() - data.mean())) < 1e-3
    assert abs(float(params["log_std"].detach().exp() - data.std(correction=0))) < 1e-3


def test_weight_decay_still_shrinks():
    model, x, y = build_model()
    opt = ng.kfac(model, "cross_entropy", lr=0.5, weight_decay=0.1, maximize=True, rule=ng.Momentum(0.0))
    before = flat(model)
    (0 * opt.loss(model(x), y)).backward()
    opt.step()
    torch.testing.assert_close(flat(model), 0.95 * before)


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
