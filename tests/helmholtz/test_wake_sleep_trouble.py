"""Settings of natural wake-sleep, its damping, and that no trainer ever writes a weight that is not finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helmholtz_models import data, machine
from models import F64, assert_close
from torch import Tensor

import natgrad as ng
from natgrad.helmholtz import Classic
from natgrad.operators import DiagonalOperator, Operator, SharedRows, Units

WRONG: dict[str, float] = {"NaN": math.nan, "infinite": math.inf, "huge": torch.finfo(F64).max, "zero": 0.0}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "SGD": None,
    "momentum": lambda params: torch.optim.SGD(params, 10.0, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, 0.1),
}


def is_finite(trainer: Any) -> bool:
    """True if the machine and the optimizer's state are."""
    kept = [t for numbers in trainer.optimizer.state.values() for t in numbers.values() if isinstance(t, Tensor)]
    return all(bool(torch.isfinite(t).all()) for t in (*trainer.machine.parameters(), *kept))


@pytest.mark.parametrize(
    ("name", "optimizer", "radius"),
    [(name, each, (math.inf, 0.03)[(i + k) % 2]) for i, name in enumerate(WRONG) for k, each in enumerate(OPTIMIZERS)],
)
def test_no_inverse_makes_a_weight_that_is_not_finite(name: str, radius: float, optimizer: str, monkeypatch: Any):
    def lie(self: Operator, damping: float = 0.0) -> Operator:
        return DiagonalOperator(torch.full((self.size,), WRONG[name], dtype=self.dtype))

    for kind in (SharedRows, Units):
        monkeypatch.setattr(kind, "inverse", lie)
    trainer = ng.NaturalWakeSleep(machine(), 10.0, radius=radius, refresh=1, optimizer=OPTIMIZERS[optimizer])
    for _ in range(4):
        trainer.step(data("bits"))
        assert is_finite(trainer)
    if name in ("NaN", "infinite"):
        assert trainer.failures == 4  # taken with the plain gradient: there was no inverse yet


@pytest.mark.parametrize("kind", [ng.WakeSleep, ng.NaturalWakeSleep])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_overflows_is_taken_back_with_the_optimizers_state(kind: Any, optimizer: str):
    trainer = kind(machine(), 0.1, optimizer=OPTIMIZERS[optimizer])
    trainer.step(data("bits"))
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e308
    before = copy.deepcopy((trainer.machine.state_dict(), trainer.optimizer.state_dict()["state"]))
    with torch.no_grad():
        for p in trainer.machine.parameters():
            p.mul_(0).sub_(1e308) if p.requires_grad else None  # the next step goes beyond the largest number, or not
    held = copy.deepcopy(trainer.machine.state_dict())
    trainer.step(data("bits"))
    assert is_finite(trainer)
    if trainer.failures:
        assert all(torch.equal(a, b) for a, b in zip(held.values(), trainer.machine.state_dict().values(), strict=True))
        state = trainer.optimizer.state_dict()["state"]
        assert state.keys() == before[1].keys()
        assert all(torch.equal(state[i][k], v) for i in state for k, v in before[1][i].items() if isinstance(v, Tensor))


class Ruined(Classic):
    """Lessons whose residuals are not numbers."""

    def lesson(self, *args: Any) -> Any:
        found = super().lesson(*args)
        found.generation[0].residuals.fill_(math.nan)
        return found


@pytest.mark.parametrize("kind", [ng.WakeSleep, ng.NaturalWakeSleep])
def test_trouble_is_counted_or_raised(kind: Any):
    trainer = kind(machine(), algorithm=Ruined())
    before = copy.deepcopy(trainer.machine.state_dict())
    for _ in range(4):
        trainer.step(data("bits"))
    with pytest.warns(UserWarning, match="the last 5 steps were skipped"):
        trainer.step(data("bits"))
    assert trainer.failures == trainer.steps == 5
    assert all(torch.equal(a, b) for a, b in zip(before.values(), trainer.machine.state_dict().values(), strict=True))
    other = kind(machine(), algorithm=Ruined())
    other.load_state_dict(trainer.state_dict())
    assert other.failures == 5
    for _ in range(19):
        other.step(data("bits"))
    with pytest.raises(RuntimeError, match="the last 25 steps"):
        other.step(data("bits"))
    with pytest.raises(ValueError, match="a direction is not finite; nothing was changed"):
        kind(machine(), algorithm=Ruined(), on_trouble="raise").step(data("bits"))
    with pytest.raises(ValueError, match="on_trouble is 'stop'"):
        kind(machine(), on_trouble="stop")


@torch.no_grad()
def test_a_relative_damping_is_a_share_of_the_mean_eigenvalue_of_all_layers():
    x = data("bits")
    reference = ng.NaturalWakeSleep(machine(), seed=3)
    reference.step(x)
    layers = reference.blocks.layers.values()
    blocks = [kept.operator(kept.state) for kept in layers]
    mean = sum(float(b.trace()) for b in blocks) / sum(b.size for b in blocks)
    relative, constant = (
        ng.NaturalWakeSleep(machine(), seed=3, damping=damping) for damping in (ng.Relative(0.5), 0.5 * mean)
    )
    relative.step(x)
    constant.step(x)
    for one, other in zip(relative.machine.parameters(), constant.machine.parameters(), strict=True):
        assert_close(one, other)
    assert all(kept.level == pytest.approx(0.5 * mean) for kept in relative.blocks.layers.values())
    resumed = ng.NaturalWakeSleep(copy.deepcopy(relative.machine), seed=3, damping=ng.Relative(0.5))
    resumed.load_state_dict(relative.state_dict())
    for _ in range(3):
        assert relative.step(x) == resumed.step(x)
    assert ng.NaturalWakeSleep(machine(), damping=ng.Constant(0.2)).step(x) == ng.NaturalWakeSleep(
        machine(), damping=0.2
    ).step(x)
    with pytest.raises(ValueError, match=r"damping is LevenbergMarquardt.*wake-sleep has none"):
        ng.NaturalWakeSleep(machine(), damping=ng.LevenbergMarquardt())
