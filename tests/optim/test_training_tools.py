"""What training tools do with an optimizer: they wrap it, step it by empty closures, and log what it tells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import CASES, Assembled, assert_close, draw
from optim_models import CE, X, Y, flat, iterate, net
from torch import Tensor, nn

import natgrad as ng
from natgrad.callbacks import count_labels
from natgrad.families.known_losses import TokenCrossEntropy
from natgrad.optim import StateReport


class Holder:
    """As Lightning's wrapper: attributes are those of the optimizer, methods would be bound to the wrapper."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Held", (Holder, type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_a_wrapper_and_an_empty_closure_train_as_the_optimizer_does(recipe):
    ends = []
    for wrap, closures in ((Holder, ()), (lambda opt: opt, ()), (lambda opt: opt, (lambda: None,))):
        model = net()
        opt = recipe(model, CE)
        held = wrap(opt)
        for _ in range(4):
            held.zero_grad()
            held.loss(model(X), Y).backward()
            held.step(*closures)
        ends.append(flat(model))
        assert held.state_report() == opt.state_report()
        assert held.state_report().step == 4
        assert isinstance(held, type(opt))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], ends[1])


def test_a_report_tells_what_applies():
    opt = ng.kfac(model := net(), CE)
    iterate(opt, model)
    told, text = opt.state_report(), str(opt.state_report())
    assert "nan" not in text
    assert "None" not in text
    known = {"step", "loss", "kl", "rate", "gradient", "failures", "status", "damping", "excess"}
    assert known == set(told.list_known())
    assert all(math.isfinite(value) for value in told.numbers().values())
    assert "<td>kl</td>" in told._repr_html_()
    assert "Kronecker</td>" in opt.report()._repr_html_()
    flat_opt = ng.natgrad_cg(other := net(), CE)
    iterate(flat_opt, other)
    assert {"solver_steps", "residual"} <= set(flat_opt.state_report().list_known())
    assert StateReport(counts={"seen": 3}).list_known()["seen"] == 3
    assert "refused" in StateReport(ratio=0.5).list_known()


def test_collected_numbers_come_from_behind_wrappers():
    opt = ng.kfac(model := net(), CE)
    iterate(opt, model)
    found = ng.callbacks.collect_numbers(Holder(opt), "run/")
    assert found == {f"run/{name}": value for name, value in opt.state_report().numbers().items()}
    with pytest.raises(TypeError, match="optimizer is SGD, expected one of natgrad's"):
        ng.callbacks.collect_numbers(torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("ignored", [False, True])
def test_accumulated_losses_of_the_trainer_are_the_mean_over_all_labels(ignored):
    """Parts of different size: the gradient and the step are those of the whole."""
    model, whole = net(), net()
    labels = torch.tensor([0, -100, 2, -100, -100, 2, 0, 1]) if ignored else Y
    opt, other = (ng.kfac(m, CE, momentum=0.0) for m in (model, whole))
    loss = ng.callbacks.trainer_loss(opt)
    counted = (labels != -100).sum()
    total = sum(loss(model(X[part]), labels[part], num_items_in_batch=counted) for part in (slice(0, 5), slice(5, 8)))
    total.backward()
    value = ng.callbacks.trainer_loss(other)(whole(X), labels)
    value.backward()
    assert_close(total.detach(), value.detach(), rtol=1e-12)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(p.grad, q.grad, rtol=1e-12)


def test_the_labels_of_a_shifted_loss_are_counted_where_they_count():
    labels = torch.tensor([[1, 2, -100], [0, 1, 2]])
    assert int(count_labels(TokenCrossEntropy(shift=True).criterion(), None, labels)) == 3
    assert count_labels(ng.families.as_criterion(nn.MSELoss()), None, draw(3, 2)) == 6


# the drop-in optimizer in training loops as they are written: several losses, checkpointing, scaling, clipping


def test_several_losses_of_one_pass_are_read_in_that_pass():
    parts = {"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 3), "right": nn.Linear(4, 2)}
    model = Assembled(lambda m, x: (m.left(h := torch.tanh(m.trunk(x))), m.right(h)), **parts).double()
    opt, passes = ng.kfac(model, CE), []
    model.register_forward_hook(lambda *_: passes.append(1))
    left, right = model(X)
    loss = opt.loss(left, Y) + opt.loss(right, Y % 2)
    loss.backward()
    assert not opt._flow.reader.taps.find_calls(loss)  # the backward pass frees what it no longer needs
    opt.step()
    assert len(passes) == 1
    assert {row.structure for row in opt.report()} == {"Kronecker"}
    assert opt.state_report().loss == pytest.approx(float(loss.detach()) / 2)


def test_checkpointed_layers_are_not_heard_again_in_the_backward_pass():
    model = CASES["checkpointed"].make()[0]
    opt = ng.kfac(model, CE)
    for _ in range(2):  # micro-batches
        loss = opt.loss(model(X), Y % 2) / 2
        loss.backward()
        assert not opt._flow.reader.taps.find_calls(loss)
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
        model, start = net(), flat(net())
        rule = ng.MeasuredLength(bound, math.inf)
        opt = ng.kfac(model, CE, estimate=ng.ExactLabels(), momentum=0.0, rule=rule)
        (scale * opt.loss(model(X), Y)).backward()
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
