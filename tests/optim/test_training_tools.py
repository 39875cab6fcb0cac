"""What training tools do with an optimizer: they wrap it, step it by empty closures, and log what it tells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import assert_close, draw
from optim_models import CE, X, Y, flat, net
from torch import nn

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


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_a_wrapper_that_derives_from_the_optimizer_trains_as_it_does(recipe):
    ends = []
    for wrap in (Holder, lambda opt: opt):
        model = net()
        opt = recipe(model, CE)
        held = wrap(opt)
        for _ in range(4):
            held.zero_grad()
            held.loss(model(X), Y).backward()
            held.step()
        ends.append(flat(model))
        assert held.state_report() == opt.state_report()
        assert held.state_report().step == 4
        assert isinstance(held, type(opt))
    assert_close(ends[0], ends[1], rtol=0)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_an_empty_closure_after_a_loss_is_a_step_without_one(recipe):
    ends = []
    for closures in ((), (lambda: None,)):
        model = net()
        opt = recipe(model, CE)
        for _ in range(3):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            opt.step(*closures)
        ends.append(flat(model))
    assert_close(ends[0], ends[1], rtol=0)


def test_a_report_tells_what_applies():
    opt = ng.kfac(model := net(), CE)
    opt.loss(model(X), Y).backward()
    opt.step()
    told = opt.state_report()
    text = str(told)
    assert "nan" not in text
    assert "None" not in text
    assert {"solver_steps", "residual", "ratio", "refused", "counts"}.isdisjoint(told.list_known())
    assert {"step", "loss", "kl", "rate", "gradient", "failures", "status", "damping", "excess"} == set(
        told.list_known()
    )
    assert all(math.isfinite(value) for value in told.numbers().values())
    assert "<td>kl</td>" in told._repr_html_()
    assert "Kronecker</td>" in opt.report()._repr_html_()


def test_a_report_of_a_solver_tells_its_steps_and_its_counts():
    opt = ng.natgrad_cg(model := net(), CE)
    opt.loss(model(X), Y).backward()
    opt.step()
    assert {"solver_steps", "residual"} <= set(opt.state_report().list_known())
    assert StateReport(counts={"seen": 3}).list_known()["seen"] == 3
    assert "refused" in StateReport(ratio=0.5).list_known()


def test_collected_numbers_come_from_behind_wrappers():
    opt = ng.kfac(model := net(), CE)
    opt.loss(model(X), Y).backward()
    opt.step()
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
