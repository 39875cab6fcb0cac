"""Targets of other dtypes than the outputs: as torch takes them, or an error that says how to convert them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(12) % 3
BITS = torch.arange(36).reshape(12, 3) % 2
KINDS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64)
LOSSES: dict[str, tuple[Any, Tensor]] = {
    "classes": (nn.CrossEntropyLoss(), CLASSES),
    "weighted classes": (nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1, 2]), label_smoothing=0.1), CLASSES),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=2), CLASSES),
    "log-probabilities": (nn.NLLLoss(), CLASSES),
    "Categorical": (ng.Categorical(), CLASSES),
    "bits": (nn.BCEWithLogitsLoss(), BITS),
    "weighted bits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3])), BITS),
    "Bernoulli": (ng.Bernoulli(), BITS),
    "squares": (nn.MSELoss(), BITS),
    "Gaussian": (ng.Gaussian(), BITS),
    "absolute": (nn.L1Loss(), BITS),
    "Huber's": (nn.HuberLoss(), BITS),
    "a function": (partial(nn.functional.huber_loss, delta=0.5), BITS),
    "smooth": (nn.SmoothL1Loss(beta=0.5), BITS),
    "Huber": (ng.families.Huber(), BITS),
    "counts": (nn.PoissonNLLLoss(), BITS),
}


def step(recipe: Any, criterion: Any, targets: Tensor) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))
    optimizer = recipe(model, criterion)
    optimizer.loss(model(X), targets).backward()
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("recipe", "name"), [*((ng.kfac, name) for name in LOSSES), *((ng.hessian_free, name) for name in [*LOSSES][::5])]
)
def test_targets_of_any_dtype_give_the_same_step_or_an_error_that_converts_them(recipe: Any, name: str) -> None:
    criterion, targets = LOSSES[name]
    plain = step(recipe, criterion, targets if targets.dim() == 1 else targets.float())
    for kind in KINDS:
        try:
            other = step(recipe, criterion, targets.to(kind))
        except ValueError as error:
            assert "convert them with targets" in str(error)  # noqa: PT017
        else:
            torch.testing.assert_close(other, plain)
