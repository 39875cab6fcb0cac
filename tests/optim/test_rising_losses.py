"""Natural steps that raise the loss by more than chance end in spectral ones."""

from __future__ import annotations

import math

import pytest
import torch
from optim_models import train_batches
from torch import nn

import natgrad as ng
from natgrad.optim.schedule import RISES, follow_loss, follow_signal, start_clock


def follow_losses(losses: list[float], rows: int, step: int = 0, **known: int) -> int:
    """The step at which losses, one a step, turn a rule; -1 for never."""
    clock = start_clock() | known
    for clock["step"], loss in enumerate(losses, step):
        follow_loss(clock, torch.tensor(loss), lambda: float(rows))
    assert clock["rose"] in (-1, clock["turned"])
    return clock["rose"]


@pytest.mark.parametrize("rows", [32, 2048])
def test_a_loss_that_rises_by_more_than_chance_turns_the_first_steps(rows: int) -> None:
    error = math.sqrt(2 * (1 + 1) / rows)  # of the difference of two losses near 1
    assert follow_losses([1.0, 1.0 + 0.7 * RISES * error], rows) == -1
    assert follow_losses([1.0, 0.9, 0.9 + 4 * RISES * error], rows) == 2
    assert follow_losses([1.0 + 4 * RISES * error, 1.0], rows) == -1  # it fell
    assert follow_losses([1.0, 1.0 + 4 * RISES * error], rows, step=9) == -1  # the share of signal decides by then
    assert follow_losses([1.0, 1.0 + 4 * RISES * error], rows, returns=1) == -1
    assert follow_losses([1.0, math.nan, 1.0, math.inf, 1.0], rows) == -1


def test_losses_of_one_model_do_not_turn_it_by_chance() -> None:
    """Squares of normal errors, 32 rows a batch: a hundred runs of ten steps that learn nothing."""
    turned = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        losses = torch.randn(10, 32, generator=generator).square().mean(1).tolist()
        turned += follow_losses(losses, 32) >= 0
    assert turned <= 5


def test_a_loss_that_rose_is_not_taken_back_by_signal_that_shows() -> None:
    clock = start_clock() | {"step": 7, "turned": 6, "rose": 6}
    assert not follow_signal(clock, [1.0, 1.0, 0.05], 0.26)


def test_natural_steps_end_where_one_raises_the_loss() -> None:
    """Labels that change stand for a step that went too far."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    opt = ng.kfac(model, nn.CrossEntropyLoss())
    x = torch.randn(2048, 5)
    y = x[:, :3].argmax(1)
    train_batches(opt, model, [(x, y)] * 5)
    assert opt._clock["rose"] == -1
    train_batches(opt, model, [(x, (y + 1) % 3)] * 2)
    assert opt._clock["turned"] == opt._clock["rose"] == 5
    assert "had raised the loss before step 5" in opt.explain()
