"""A step on another device: nothing of the CPU meets its tensors, and it is the step of the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pretended_device import Distant, move_away, pretend_device
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import spectral_descent

STEPS = {"kfac": 6, "Levenberg-Marquardt": 6}  # as many as two of its readings take; 2 of every other
OPTIMISERS: dict[str, Any] = {
    "kfac": ng.kfac,
    "ekfac, exact labels": lambda model, loss: ng.ekfac(model, loss, estimate="exact_labels"),
    "unitwise, trust region": lambda model, loss: ng.unitwise(model, loss, rule=ng.TrustRegion(0.01)),
    "diagonal, measured length": lambda model, loss: ng.diagonal(model, loss, rule="measured_length"),
    "tonga": ng.tonga,
    "spectral": lambda model, loss: ng.kfac(model, loss, rule="spectral"),
    "Levenberg-Marquardt": lambda model, loss: ng.kfac(model, loss, damping="levenberg_marquardt"),
    "hessian_free": ng.hessian_free,
    "dense": lambda model, loss: ng.NaturalGradient(model, ng.fisher(model, ng.likelihood(loss)), structure="dense"),
}


def draw_convolutions() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(16, 3), nn.LayerNorm(3)).double()


def train(model: nn.Module, make: Any, batches: list[tuple[Tensor, Tensor]]) -> tuple[Any, list[float]]:
    """The optimiser after a step for each batch, and the losses."""
    loss = nn.CrossEntropyLoss()
    optimiser, losses = make(model, loss), list[float]()
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimiser.zero_grad()
            value = optimiser.loss(model(x), y)
            value.backward()
            return value

        losses.append(float(optimiser.step(closure).detach()))
    return optimiser, losses


@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_on_another_device_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(6, 2, 6, 6, generator=generator).double(), torch.randint(3, (6,), generator=generator))
        for _ in range(STEPS.get(name, 2))
    ]
    # on a CPU one inverse takes the place of five iterations of a polar factor
    monkeypatch.setattr(spectral_descent, "polish_by_resolvent", lambda x: spectral_descent.polish(x / 1.01, 5))
    near, far = draw_convolutions(), draw_convolutions()
    _, expected = train(near, OPTIMISERS[name], batches)
    with pretend_device(monkeypatch):
        away = [(Distant(x), Distant(y)) for x, y in batches]
        optimiser, losses = train(move_away(far), OPTIMISERS[name], away)
        optimiser.report(), optimiser.state_report(), optimiser.explain()
        optimiser.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    assert losses == pytest.approx(expected, rel=1e-6)
