"""A step is safe whatever the network: nearly dead layers, losses of any size.

Every optimizer runs with its defaults, except for what the fact is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from optim_models import BLOCK_RECIPES
from torch import Tensor, nn

import natgrad as ng

RECIPES: dict[str, Callable[..., Any]] = {recipe.__name__: recipe for recipe in BLOCK_RECIPES}
MATRIX_FREE: dict[str, Callable[..., Any]] = {"hessian_free": ng.hessian_free, "natgrad_cg": ng.natgrad_cg}
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
Batch = tuple[Tensor, Tensor]
# What does not hold yet: (optimizer, what happens to it).
OPEN = {("hessian_free", "1e+06"), ("natgrad_cg", "1e-06")}
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


def met_targets(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    """Targets that the model meets: a loss of exactly zero."""
    with torch.no_grad():
        return x, model(x)


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
