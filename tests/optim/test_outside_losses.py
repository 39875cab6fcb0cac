"""Losses that did not go through `opt.loss`: they are found, and steps along them stay bounded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Assembled, draw, mlp, pair
from optim_models import BLOCK_RECIPES, CE, LOOKING, Closure, collect_warnings, flat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import natgrad as ng
from natgrad.optim.state import OwnGradients

K = 4


def build_vae() -> nn.Module:
    """Outputs, and the mean and the logarithm of the variance that they were drawn from."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mean, log_variance = m.encoder(x).chunk(2, dim=1)
        return m.decoder(mean + (log_variance / 2).exp() * torch.randn_like(mean)), (mean, log_variance)

    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 2 * K))
    return Assembled(run, encoder=encoder, decoder=nn.Sequential(nn.Linear(K, 24), nn.Tanh(), nn.Linear(24, 16)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))


def divergence(opt: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, posterior = model(x)
    return opt.loss(logits, x) + ng.GaussianPosterior().nll(posterior).mean() / 16


def squares(strength: float) -> Callable[..., Tensor]:
    def whole(opt: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return opt.loss(model(x), y) + strength / 2 * sum(p.square().sum() for p in model.parameters())

    return whole


def train(opt: Any, model: nn.Module, whole: Callable[..., Tensor], steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(512, 3, generator=generator) @ torch.randn(3, 16, generator=generator) > 0).float()
    losses = []
    for _ in range(steps):
        x = data[torch.randint(0, 512, (128,), generator=generator)]
        opt.zero_grad()
        loss = whole(opt, model, x, (x[:, 0] + x[:, 5]).long())
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:a large part of the gradient")
@pytest.mark.parametrize(
    ("recipe", "rate"), [*((recipe, 1.0) for recipe in BLOCK_RECIPES), (ng.kfac, 0.03), (ng.online_ng, 0.03)]
)
def test_every_structure_is_bounded_at_every_rate(recipe, rate):
    model = build_vae()
    losses = torch.tensor(train(recipe(model, nn.BCEWithLogitsLoss(), lr=rate), model, divergence, 24))
    assert losses.max() < 1.2 * losses[0]
    assert losses[-10:].mean() < losses[0]


@pytest.mark.filterwarnings("ignore:a large part of the gradient")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_curvature_of_a_penalty_on_squares_is_found(reduction):
    model = net()
    opt = ng.kfac(model, nn.CrossEntropyLoss(reduction=reduction), lr=0.1)
    train(opt, model, squares(0.2 if reduction == "mean" else 128 * 0.2), 40)
    assert set(opt._live.state.outside.levels) == {name for name, _ in model.named_parameters()}
    assert list(opt._live.state.outside.levels.values()) == pytest.approx([0.2] * 4, rel=0.1)


@pytest.mark.filterwarnings("ignore:a large part of the gradient")
def test_only_the_blocks_that_are_reached_are_damped_until_the_loss_ends():
    model = net()
    opt = ng.kfac(model, CE, update_every=1, lr=0.1)
    train(opt, model, lambda opt, m, x, y: opt.loss(m(x), y) + m[0].weight.square().sum(), 5)
    assert set(opt._live.state.outside.levels) == {"0.weight", "0.bias"}
    train(opt, model, ALONE["one loss"], 2)
    assert opt._live.state.outside.levels == {}


def test_it_is_said_once_and_names_what_to_do():
    model = net()
    opt = ng.kfac(model, CE, update_every=1)
    texts = collect_warnings(lambda: train(opt, model, squares(1.0), 5))
    (said,) = [text for text in texts if "large part of the gradient" in text]
    assert all(word in said for word in ("ng.Heads", "0.weight", "l2="))


def micro(opt: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.loss(model(x[:32]), y[:32]).mul(0.25).backward()
    return 0.75 * opt.loss(model(x[32:]), y[32:])


def looked_at(opt: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.loss(model(x.flip(1)), y)
    return opt.loss(model(x), y)


def add_evaluated_loss(opt: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    part = opt.loss(model(x.flip(1)), y)
    model.train()
    return part + opt.loss(model(x), y)


ALONE: dict[str, Callable[..., Tensor]] = {
    "one loss": lambda opt, model, x, y: opt.loss(model(x), y),
    "two": lambda opt, model, x, y: opt.loss(model(x), y) + 0.3 * opt.loss(model(x.flip(1)), y),
    "a function of the outputs": lambda opt, model, x, y: opt.loss(model(x) / 0.3 - model(x.flip(1)), y),
    "another model's": lambda opt, model, x, y: opt.loss(model(x), y) + cross_entropy(x[:, :3], y),
    "micro-batches": micro,
    "looked at": looked_at,
    "in evaluation mode": add_evaluated_loss,
}


@pytest.mark.parametrize(
    ("name", "reduction"), [*((name, "mean") for name in ALONE), ("one loss", "sum"), ("micro-batches", "sum")]
)
def test_where_all_goes_through_the_loss_no_step_changes(name, reduction, monkeypatch):
    ends = []
    for deaf in (False, True):
        if deaf:
            monkeypatch.setattr(OwnGradients, "listen", lambda *args: None)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.ReLU(), nn.Linear(24, 3))
        opt = ng.kfac(model, nn.CrossEntropyLoss(reduction=reduction), update_every=1)
        train(opt, model, ALONE[name], 3)
        assert opt._live.state.outside.levels == {}
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_clipping_by_the_norm_is_no_other_loss():
    model = net().double()
    opt = ng.kfac(model, CE, update_every=1)
    for seed in range(3):
        opt.zero_grad()
        (1024 * opt.loss(model(draw(40, 16, seed=seed)), torch.arange(40) % 3)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()
        assert opt._live.state.outside.levels == {}


# the number that is judged is the number that went backward: penalties beside `opt.loss`, and what closures return


POINTS = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
T = (POINTS[:, :1] > 0).double()
BITS = nn.BCEWithLogitsLoss()
OUTSIDE = "did not come from optimizer.loss"


def slopes(model: nn.Module) -> Tensor:
    """Ten times how far the outputs' slopes in the inputs are from 1, as in adversarial training."""
    inputs = (POINTS + 0.1).requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return 10 * (slope.norm(dim=1) - 1).square().mean()


def sizes(model: nn.Module) -> Tensor:
    return 3 * sum(p.square().sum() for p in model.parameters())


def away(model: nn.Module) -> Tensor:
    """A pull of the first layer alone."""
    return 5 * (model[0].weight - 1).square().sum()


PENALTIES = {"slopes": slopes, "sizes": sizes, "one layer": away}


def train_judged(
    recipe: str, penalty: Callable[[nn.Module], Tensor], closed: bool, steps: int = 12
) -> tuple[Any, list[float]]:
    model = mlp(4, 8, 1)
    opt, values = LOOKING[recipe](model, BITS), list[float]()

    closure = Closure(opt, lambda: opt.loss(model(POINTS), T) + penalty(model))

    for _ in range(steps):
        value = opt.step(closure) if closed else closure()
        values.append(float(value.detach()))
        if not closed:
            opt.step()
    return opt, values


@pytest.mark.parametrize(
    ("recipe", "name"), [*pair(LOOKING, PENALTIES), *(("hessian_free", name) for name in list(PENALTIES)[1:])]
)
def test_what_a_closure_returns_is_what_falls(recipe: str, name: str):
    penalty = PENALTIES[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not come from")  # where the metric is told of it
        opt, values = train_judged(recipe, penalty, closed=True)
    assert values[-1] < 0.7 * values[0]
    assert max(values) < 1.5 * values[0]
    if recipe == "hessian_free":
        assert opt.state_report().loss == pytest.approx(values[-1])


@pytest.mark.parametrize(("recipe", "penalty"), pair(LOOKING, PENALTIES.values()))
def test_a_penalty_beside_the_loss_is_named_and_held(recipe: str, penalty: Any):
    with pytest.warns(UserWarning, match=OUTSIDE):
        _, values = train_judged(recipe, penalty, closed=False)
    assert values[-1] < 0.8 * values[0]
    assert max(values) < 10 * values[0]  # the curvature is known from the second step on


def test_a_closure_may_return_the_last_of_several_losses():
    """Their gradients are all of it: the sum is judged, and nothing is asked again."""
    model, calls = mlp(4, 8, 1), []
    opt = ng.hessian_free(model, BITS)

    def closure() -> Tensor:
        calls.append(1)
        opt.zero_grad()
        for part in (slice(0, 10), slice(10, 40)):
            value = opt.loss(model(POINTS[part]), T[part]) * (len(POINTS[part]) / 40)
            value.backward()
        return value

    for _ in range(4):
        opt.step(closure)
    assert len(calls) == 4
    assert opt.state_report().loss == pytest.approx(float(BITS(model(POINTS), T).detach()), rel=0.5)
