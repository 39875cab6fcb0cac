"""A step is safe whatever the network: nearly dead layers, wild batches, losses of any size, a bound that holds.

Every optimizer runs with its defaults, except for what the fact is about.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from optim_models import BLOCK_RECIPES
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng

RECIPES: dict[str, Callable[..., Any]] = {recipe.__name__: recipe for recipe in BLOCK_RECIPES}
MATRIX_FREE: dict[str, Callable[..., Any]] = {"hessian_free": ng.hessian_free, "natgrad_cg": ng.natgrad_cg}
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
Batch = tuple[Tensor, Tensor]
# What does not hold yet: (optimizer, what happens to it).
OPEN = {(name, event) for name in MATRIX_FREE for event in ("large row, values", "large targets")}
OPEN |= {(name, event) for name in MATRIX_FREE for event in ("labels ignored",)}
OPEN |= {("hessian_free", "1e+06"), ("natgrad_cg", "1e-06")}
pytestmark = pytest.mark.filterwarnings("ignore:a large part of the gradient")


def cases(names: Iterable[str], events: Iterable[str]) -> list[tuple[str, str]]:
    """All pairs but the open ones."""
    return [(name, event) for name in names for event in events if (name, event) not in OPEN]


def batches(data: Batch, size: int, steps: int, seed: int = 0) -> list[Batch]:
    """Random rows of the data, copies, drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    picked = [torch.randint(len(data[0]), (size,), generator=generator) for _ in range(steps)]
    return [(data[0][rows].clone(), data[1][rows].clone()) for rows in picked]


def iterate(opt: Any, criterion: nn.Module, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """One step; the loss before it."""
    opt.zero_grad()
    outputs = model(x)
    loss = opt.loss(outputs, y) if hasattr(opt, "loss") else criterion(outputs, y)
    loss.backward()
    opt.step()
    return float(loss.detach())


def adam(model: nn.Module, criterion: nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    """The usual one."""
    return torch.optim.Adam(model.parameters(), lr=rate)


def all_finite(model: nn.Module) -> bool:
    """Whether every parameter and buffer is finite."""
    return all(bool(t.isfinite().all()) for t in model.state_dict().values())


# A hidden layer of any size.


@pytest.mark.parametrize(("name", "factor"), cases(RECIPES, ["1e-20", "1e-10", "1e+03"]))
def test_no_scale_of_a_hidden_layer_makes_a_step_wild(name: str, factor: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(float(factor))
    opt = RECIPES[name](model, CE)
    losses = [iterate(opt, CE, model, x, y) for x, y in batches(noisy_classes(), 32, 40)]
    assert all_finite(model)
    assert max(losses) < 2 * losses[0]
    assert sum(losses[-5:]) / 5 < losses[0]


@pytest.mark.parametrize("criterion", [CE, nn.BCEWithLogitsLoss()], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "tonga"])  # its metric is the gradients'
def test_a_network_that_is_sure_and_wrong_learns(name: str, criterion: nn.Module) -> None:
    """Its Fisher information is zero to 1e-37 while the gradient is 1e5: a natural step has no end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(1e6)
    x = torch.randn(64, 10)
    classes = x @ torch.randn(10, 4)
    y = classes.argmax(1) if criterion is CE else (classes > 0).float()
    opt = RECIPES[name](model, criterion)
    losses = [iterate(opt, criterion, model, x, y) for _ in range(16)]
    assert losses[-1] < 0.1 * losses[0]


# One wild batch.


@cache
def noisy_classes(many: int = 512) -> Batch:
    """Rows (n, 8) with three classes that a linear rule gives in most cases."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(many, 8, generator=generator)
    logits = 2 * x @ torch.randn(8, 3, generator=generator)
    return x, (logits + 2 * torch.randn(many, 3, generator=generator)).argmax(1)


@cache
def noisy_values(many: int = 512) -> Batch:
    """Rows (n, 8) with two values, a smooth function and noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(many, 8, generator=generator)
    y = torch.tanh(x @ torch.randn(8, 2, generator=generator)) + 0.5 * torch.randn(many, 2, generator=generator)
    return x, y


def dense(activation: type[nn.Module], outputs: int) -> nn.Module:
    """Two hidden layers of 32."""
    return nn.Sequential(nn.Linear(8, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, outputs))


def net_with_norm() -> nn.Module:
    """With batch norm."""
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def leave_batch(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    """Nothing happens."""
    return x, y


def large_row(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    """One row of 64 times 1e4."""
    x[7] *= 1e4
    return x, y


def large_targets(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    """Targets times 1e6."""
    return x, 1e6 * y


def met_targets(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    """Targets that the model meets: a loss of exactly zero."""
    with torch.no_grad():
        return x, model(x)


def ignored_labels(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    """No label counts."""
    return x, torch.full_like(y, CE.ignore_index)


Base = tuple[Callable[[], nn.Module], nn.Module, Callable[[], Batch]]
BASES: dict[str, Base] = {
    "tanh, classes": (lambda: dense(nn.Tanh, 3), CE, noisy_classes),
    "relu, classes": (lambda: dense(nn.ReLU, 3), CE, noisy_classes),
    "batch norm": (net_with_norm, CE, noisy_classes),
    "relu, values": (lambda: dense(nn.ReLU, 2), MSE, noisy_values),
    "tanh, values": (lambda: dense(nn.Tanh, 2), MSE, noisy_values),
}
EVENTS: dict[str, tuple[str, Callable[..., Batch]]] = {
    "large row, tanh": ("tanh, classes", large_row),
    "large row, relu": ("relu, classes", large_row),
    "large row, batch norm": ("batch norm", large_row),
    "large row, values": ("relu, values", large_row),
    "large targets": ("tanh, values", large_targets),
    "loss of zero": ("tanh, values", met_targets),
    "labels ignored": ("tanh, classes", ignored_labels),
}


@cache
def train_first_half(recipe: Callable[..., Any], base: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """States of the model and of the optimizer after half of the steps on batches of 64, at a falling rate."""
    build, criterion, data = BASES[base]
    torch.manual_seed(0)
    model = build()
    opt = recipe(model, criterion)
    full = [group["lr"] for group in opt.param_groups]
    for step, (x, y) in enumerate(batches(data(), 64, steps + 1)[: steps // 2]):
        set_rates(opt, full, 1 - step / (steps + 1))
        iterate(opt, criterion, model, x, y)
    return model.state_dict(), opt.state_dict()


def set_rates(opt: Any, full: list[float], part: float) -> None:
    """Every group gets a part of its full rate."""
    for group, rate in zip(opt.param_groups, full, strict=True):
        group["lr"] = part * rate


def train_second_half(
    recipe: Callable[..., Any], base: str, steps: int, event: Callable[..., Batch] = leave_batch
) -> float:
    """The loss on all rows after the other half; its first batch may be a wild one."""
    build, criterion, data = BASES[base]
    model = build()
    opt = recipe(model, criterion)
    full = [group["lr"] for group in opt.param_groups]
    half = copy.deepcopy(train_first_half(recipe, base, steps))
    model.load_state_dict(half[0])
    opt.load_state_dict(half[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch that is skipped may say so
        for step, (x, y) in list(enumerate(batches(data(), 64, steps + 1)))[steps // 2 :]:
            set_rates(opt, full, 1 - step / (steps + 1))
            change = event if step == steps // 2 else leave_batch
            iterate(opt, criterion, model, *change(model, x, y))
    assert all_finite(model)
    x, y = data()
    with torch.no_grad():
        # batch norm's running averages heard the wild batch: that is the model's, not the step's
        return float(criterion(model.train()(x), y))


@cache
def train_without_event(recipe: Callable[..., Any], base: str, steps: int) -> float:
    """The same without the wild batch."""
    return train_second_half(recipe, base, steps)


@pytest.mark.parametrize(("name", "event"), cases(RECIPES, EVENTS))
def test_forty_steps_after_a_wild_batch_the_run_is_where_it_would_be(name: str, event: str) -> None:
    base, change = EVENTS[event]
    after = train_second_half(RECIPES[name], base, 80, change)
    assert after < 1.2 * train_without_event(RECIPES[name], base, 80)


SOLVED = ["large row, tanh", "large targets", "loss of zero", "labels ignored"]


@pytest.mark.parametrize(("name", "event"), cases(MATRIX_FREE, SOLVED))
def test_ten_steps_after_a_wild_batch_a_solver_is_where_it_would_be(name: str, event: str) -> None:
    base, change = EVENTS[event]
    after = train_second_half(MATRIX_FREE[name], base, 20, change)
    assert after < 1.2 * train_without_event(MATRIX_FREE[name], base, 20)


# Losses of any size, from the first step on.


@pytest.mark.parametrize(("name", "scale"), cases([*RECIPES, *MATRIX_FREE], ["1e+06"]))
def test_targets_a_million_times_larger_are_learnt(name: str, scale: str) -> None:
    model = learn_targets(name, float(scale))
    x, y = noisy_values()
    with torch.no_grad():
        assert float(MSE(model(x), 1e6 * y)) < 1.05 * float(MSE(0 * y, 1e6 * y))


@pytest.mark.parametrize(("name", "scale"), cases([*RECIPES, *MATRIX_FREE], ["1e-06"]))
def test_targets_a_million_times_smaller_are_learnt(name: str, scale: str) -> None:
    model = learn_targets(name, float(scale))
    torch.manual_seed(0)
    start, (x, y) = dense(nn.Tanh, 2), noisy_values()
    with torch.no_grad():
        assert float(MSE(model(x), 1e-6 * y)) < 0.02 * float(MSE(start(x), 1e-6 * y))


def learn_targets(name: str, scale: float) -> nn.Module:
    """The model after some steps on targets of that size."""
    torch.manual_seed(0)
    model = dense(nn.Tanh, 2)
    opt = (RECIPES | MATRIX_FREE)[name](model, MSE)
    for x, y in batches(noisy_values(), 64, 80 if name in RECIPES else 20):
        iterate(opt, MSE, model, x, scale * y)
    assert all_finite(model)
    return model


@pytest.mark.parametrize("name", [*RECIPES, *MATRIX_FREE])
def test_a_model_without_any_error_stays_where_it_is(name: str) -> None:
    torch.manual_seed(0)
    model = dense(nn.Tanh, 2)
    before = [p.detach().clone() for p in model.parameters()]
    opt = (RECIPES | MATRIX_FREE)[name](model, MSE)
    for x, y in batches(noisy_values(), 64, 10):
        assert iterate(opt, MSE, model, *met_targets(model, x, y)) == 0
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_labels_that_are_all_ignored_leave_the_model_alone(name: str) -> None:
    torch.manual_seed(0)
    model = dense(nn.Tanh, 3)
    opt = RECIPES[name](model, CE)
    first = batches(noisy_classes(), 64, 1)[0]
    iterate(opt, CE, model, *first)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(noisy_classes(), 64, 3):
            iterate(opt, CE, model, *ignored_labels(model, x, y))
    assert all_finite(model)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


# A loss partly outside of the metric.


class VAE(nn.Module):
    """Coins (b, 16) -> logits, and the posterior's (means, log variances)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        return self.decoder(mean + (log_variance / 2).exp() * noise), mean, log_variance


def train_vae(recipe: Callable[..., Any], rate: float, steps: int = 80) -> Tensor:
    """Negative bounds per pixel, (steps,)."""
    torch.manual_seed(0)
    model, losses = VAE(), []
    opt = recipe(model, nn.BCEWithLogitsLoss(), rate)
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(512, 3, generator=generator) @ torch.randn(3, 16, generator=generator) > 0).float()
    for x, _ in batches((data, data), 128, steps):
        opt.zero_grad()
        logits, mean, log_variance = model(x)
        inside = opt.loss(logits, x) if hasattr(opt, "loss") else functional.binary_cross_entropy_with_logits(logits, x)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        loss = inside + divergence / 16
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert all_finite(model)
    return torch.tensor(losses)


@cache
def adams_vae() -> float:
    """The mean of Adam's last ten."""
    return float(train_vae(lambda model, criterion, rate: adam(model, criterion, 3e-3), 0.0)[-10:].mean())


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_partly_outside_of_the_metric_falls_at_every_rate(name: str, rate: float) -> None:
    losses = train_vae(RECIPES[name], rate)
    assert bool(losses.isfinite().all())
    assert losses.max() < 1.2 * losses[0]
    assert losses[-10:].mean() < losses[0]
    if rate == 1.0:
        assert losses[-10:].mean() < 1.1 * adams_vae()
