"""The drop-in optimizer in training loops as they are written: several losses, checkpointing, scaling, clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import CASES, assert_close, build_seeded
from optim_models import CE, X, Y, flat, net
from torch import Tensor, nn

import natgrad as ng

EXACT = ng.ExactLabels()
FREE: dict[str, Any] = {"momentum": 0.0, "max_kl": math.inf, "kl_share": math.inf}


def test_several_losses_of_one_pass_are_read_in_that_pass():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.trunk(x))
            return self.left(h), self.right(h)

    model = build_seeded(Heads)
    opt, passes = ng.kfac(model, CE), []
    model.register_forward_hook(lambda *_: passes.append(1))
    left, right = model(X)
    loss = opt.loss(left, Y) + opt.loss(right, Y % 2)
    loss.backward()
    assert not opt._reader.taps.calls  # the backward pass frees what it no longer needs
    opt.step()
    assert len(passes) == 1
    assert {row.structure for row in opt.report()} == {"Kronecker"}
    assert opt.state_report().loss == pytest.approx(float(loss.detach()) / 2)


def test_checkpointed_layers_are_not_heard_again_in_the_backward_pass():
    model = CASES["checkpointed"].make()[0]
    opt = ng.kfac(model, CE)
    for _ in range(2):  # micro-batches
        (opt.loss(model(X), Y % 2) / 2).backward()
        assert not opt._reader.taps.calls
    opt.step()
    assert opt.state_report().failures == 0


def test_parameters_that_only_another_loss_reaches_are_named():
    model = CASES["not reached"].make()[0]
    opt = ng.kfac(model, CE)
    loss = opt.loss(model(X), Y % 2)
    (loss + model.unused(X).square().mean()).backward()
    with pytest.warns(UserWarning, match="unused.bias"):
        opt.step()


def test_gradient_scaling_skips_a_step_that_overflowed():
    model = net().float()
    opt, scaler = ng.kfac(model, CE), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in (X, X * math.inf, X):
        kept = flat(model)
        opt.zero_grad()
        loss = opt.loss(model(x.float()), Y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert torch.equal(kept, flat(model)) == (x is not X)
    assert scaler.get_scale() == 512.0
    assert opt.state_report().loss == float(loss.detach())  # the lost step's loss is not averaged in


@pytest.mark.parametrize("bound", [math.inf, 1e-3])
def test_clipping_acts_on_the_gradient_before_the_bound_on_the_step(bound: float):
    def step(scale: float, norm: float = math.inf) -> tuple[Tensor, float]:
        model = net()
        opt, start = (
            ng.kfac(model, CE, estimate=EXACT, momentum=0.0, rule=ng.MeasuredLength(bound, math.inf)),
            flat(model),
        )
        opt.loss(model(X), Y).backward()
        for p in model.parameters():
            p.grad = scale * p.grad  # type: ignore[operator]
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        opt.step()
        return flat(model) - start, opt.state_report().gradient

    whole, norm = step(1.0)
    for share in (0.5, 1e-3):
        clipped, seen = step(1.0, share * norm)
        assert seen == pytest.approx(share * norm, rel=1e-4)
        assert_close(clipped, step(100.0, share * norm)[0], 1e-4)  # whatever the gradient was
        assert float(clipped.norm()) <= float(whole.norm()) * (1 + 1e-9)
        if bound == math.inf:
            assert_close(clipped, share * whole, 1e-4)
