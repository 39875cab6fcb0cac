"""The drop-in optimizer layer by layer: checkpoints, copies, leaks, what it tells and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import blocks_of
from models import CASES
from optim_models import CE, X, Y, net
from torch import nn

import natgrad as ng


def iterate(opt: Any, model: nn.Module, x: Any = X, y: Any = Y) -> None:
    """The ordinary loop's body."""
    opt.zero_grad()
    opt.loss(model(x), y).backward()
    opt.step()


# checkpoints, copies, leaks


# what it tells, what it refuses


def test_the_report_says_what_each_parameter_gets():
    model = CASES["bare parameter"].make()[0]
    opt = ng.kfac(model, CE, momentum=0.9)
    assert {row.structure for row in opt.report()} == {"not read yet"}
    iterate(opt, model, X, Y % 2)
    rows = {row.parameter: row for row in opt.report()}
    assert rows["layer.weight"].structure == "Kronecker"
    assert rows["scale"].structure == "Diagonal"
    # two factors, their inverses and the mean of the gradient; the bias has its mean alone
    assert rows["layer.weight"].memory == 2 * (2 * 2 + 4 * 4) + 6
    assert rows["layer.bias"].memory == 2
    assert "Kronecker" in str(opt.report())


def optimizer() -> Any:
    return ng.kfac(net(), CE)


def door(**choices: Any) -> Callable[[], Any]:
    return lambda: ng.kfac(net(), CE, **choices)


BAD = {
    "no module": (lambda: ng.kfac({"w": X}, CE), TypeError, "model is dict"),  # type: ignore[arg-type]
    "no likelihood": (lambda: ng.kfac(net(), nn.MultiMarginLoss()), TypeError, "not a likelihood"),
    "a structure of the whole": (
        lambda: ng.StructuredNaturalGradient(net(), CE, ng.Dense()),
        TypeError,
        "blocks per layer",
    ),
    "a negative rate": (door(lr=-1.0), ValueError, "lr is -1.0"),
    "momentum of one": (door(momentum=1.0), ValueError, "momentum is 1"),
    "no damping": (door(damping=0.0), ValueError, "damping is 0"),
    "no radius": (door(max_kl=0.0), ValueError, "max_kl is 0"),
    "an interval of half a step": (door(update_every=0.5), ValueError, "update_every is 0.5"),
    "no statistics": (lambda: step_without_loss(), ValueError, "optimizer.loss(outputs, targets)"),
    "another optimizer's state": (
        lambda: ng.kfac(net(), CE).load_state_dict({"state": {}}),
        ValueError,
        "not saved by",
    ),
    "a stranger": (
        lambda: ng.kfac(net(), CE).add_param_group({"params": nn.Parameter(X)}),
        ValueError,
        "not parameters",
    ),
}


def step_without_loss() -> None:
    model = net()
    opt = ng.kfac(model, CE)
    CE(model(X), Y).backward()
    opt.step()


@pytest.mark.parametrize("case", BAD)
def test_errors_at_the_door(case: str):
    build, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        build()
    assert words in str(caught.value)


def test_a_reading_whose_moments_would_overflow_is_refused_as_a_whole():
    model = net().float()
    opt = ng.kfac(model, CE, 1e-3, update_every=1)
    iterate(opt, model, X.float())
    before = {block.key: block.weight for block in blocks_of(opt)}
    assert any(before.values())
    opt.loss(model(1e17 * X.float()), Y)  # finite, and so are the factors: their running sums might not stay so
    assert opt.state_report().failures == 1
    assert {block.key: block.weight for block in blocks_of(opt)} == before


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise])
def test_new_statistics_leave_the_inverse_of_the_old_ones_alone(recipe: Any):
    model = net()
    opt = recipe(model, CE, 1e-3)
    iterate(opt, model)
    inverses = [copy.deepcopy(block.inverse.dense()) for block in blocks_of(opt)]
    opt._reader.taps.armed = True
    opt.loss(model(2 * X), Y)  # read into the same storage; nothing is inverted before a step
    for block, before in zip(blocks_of(opt), inverses, strict=True):
        assert torch.equal(block.inverse.dense(), before)
