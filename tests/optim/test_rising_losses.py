"""Natural steps that raise the loss by more than chance end in spectral ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim_models import train_batches
from process_ranks import run_ranks
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.optim.state import Noise
from natgrad.optim.step import RISES, follow_loss, follow_signal


def follow_losses(losses: list[float], rows: int, step: int = 0, **known: int) -> int:
    """The step at which losses, one a step, turn a rule; -1 for never."""
    noise = Noise(**known)
    for at, loss in enumerate(losses, step):
        noise = follow_loss(noise, at, torch.tensor(loss), lambda: float(rows))
    assert noise.rose in (-1, noise.turned)
    return noise.rose


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
    assert follow_signal(Noise(turned=6, rose=6), 7, [1.0, 1.0, 0.05], 0.26).turned == 6


def make_batches(part: slice) -> list[tuple[Tensor, Tensor]]:
    """Five batches, and two with the least likely labels: they stand for a step that went too far."""
    x = torch.randn(16384, 5, generator=torch.Generator().manual_seed(0))
    best, worst = x[:, :3].argmax(1), x[:, :3].argmin(1)
    return [(x[part], labels[part]) for labels in (best,) * 5 + (worst,) * 2]


def build_model() -> nn.Linear:
    """Every label is equally likely."""
    model = nn.Linear(5, 3)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def test_natural_steps_end_where_one_raises_the_loss() -> None:
    batches = make_batches(slice(None))
    opt = ng.kfac(model := build_model(), nn.CrossEntropyLoss())
    train_batches(opt, model, batches[:5])
    assert opt._state.noise.rose == -1
    train_batches(opt, model, batches[5:])
    assert opt._state.noise.turned == opt._state.noise.rose == 5
    assert "had raised the loss before step 5" in opt.explain()


def turn_on_unequal_parts() -> dict[str, Any]:
    batches = make_batches((slice(0, 4000), slice(4000, None))[distributed.get_rank()])
    model = DistributedDataParallel(build_model())
    opt = ng.kfac(model, nn.CrossEntropyLoss())
    train_batches(opt, model, batches)
    return {key: getattr(opt._state.noise, key) for key in ("turned", "rose", "loss")}


SCENES = {"unequal parts": turn_on_unequal_parts}


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)
def test_processes_turn_together_by_the_rows_of_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (found["unequal parts"] for found in run_ranks(__name__, 2, tmp_path_factory))
    assert first == second
    assert first["turned"] == first["rose"] == 5
