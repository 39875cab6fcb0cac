"""No run goes on for long without learning and without a word."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from models import Assembled, cross
from optim_models import CE, X, Y, collect_warnings, flat, iterate, net, train
from torch import nn

import natgrad as ng
from natgrad.ground.constants import STOP, WARN
from natgrad.optim.blocks import Averages


def warn_in(opt: Any, model: nn.Module, act: Any, steps: int) -> list[str]:
    """The warnings of so many steps."""
    return collect_warnings(lambda: [act(opt, model) for _ in range(steps)])


def in_evaluation(opt: Any, model: nn.Module) -> None:
    model.eval()
    iterate(opt, model)


def plain_criterion(opt: Any, model: nn.Module) -> None:
    opt.zero_grad()
    CE(model(X), Y).backward()
    opt.step()


def looked_at_without_gradients(opt: Any, model: nn.Module) -> None:
    opt.zero_grad()
    with torch.no_grad():
        opt.loss(model(X), Y)
    CE(model(X), Y).backward()
    opt.step()


ACTS = in_evaluation, plain_criterion, looked_at_without_gradients


@pytest.mark.parametrize(("recipe", "act"), cross([ng.kfac], [ng.online_ng, ng.diagonal], ACTS))
def test_steps_on_old_statistics_warn_once_and_then_raise(recipe: Any, act: Any):
    model = net()
    opt = recipe(model, CE, lr=0.1)
    iterate(opt, model)
    assert warn_in(opt, model, act, WARN - 1) == []
    (text,) = warn_in(opt, model, act, STOP - WARN)
    for remedy in ("model.train()", "optimizer.loss", "train_in_eval=True"):
        assert remedy in text
    kept = flat(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"statistics of the last 25 steps were due and not read"):
            act(opt, model)
    assert torch.equal(flat(model), kept)
    model.train()
    iterate(opt, model)  # read again: all is well
    assert not torch.equal(flat(model), kept)
    assert warn_in(opt, model, act, WARN - 1) == []


@pytest.mark.parametrize("recipe", [ng.kfac, ng.online_ng])
def test_statistics_that_can_never_be_used_warn_once_and_then_raise(recipe: Any, monkeypatch: pytest.MonkeyPatch):
    model = net()
    opt = recipe(model, CE, lr=0.1)
    iterate(opt, model)
    taken = Averages.take
    monkeypatch.setattr(Averages, "take", lambda self, update, reading: update.fail())
    assert warn_in(opt, model, iterate, WARN - 1) == []
    (text,) = warn_in(opt, model, iterate, STOP - WARN)
    assert "could not be used" in text
    with pytest.raises(RuntimeError, match=r"statistics of the last 25 steps were due and could not be used"):
        iterate(opt, model)
    monkeypatch.setattr(Averages, "take", taken)
    kept = flat(model)
    iterate(opt, model)
    assert not torch.equal(flat(model), kept)
    assert warn_in(opt, model, iterate, WARN) == []


def lower_another_loss(opt: Any, model: nn.Module) -> None:
    opt.zero_grad()
    outputs = model(X)
    opt.loss(outputs, outputs.detach())  # for the metric alone: it is 0 wherever the parameters are
    outputs[:, 0].mean().backward()
    opt.step()


@pytest.mark.parametrize("recipe", [ng.kfac, ng.tonga, ng.hessian_free])
def test_steps_that_a_loss_of_nothing_holds_are_told_once(recipe: Any):
    model = net()
    opt, kept = recipe(model, nn.MSELoss()), flat(model)
    assert warn_in(opt, model, lower_another_loss, STOP - 1) == []
    (text,) = warn_in(opt, model, lower_another_loss, 5)
    assert "none of the last 25 steps moved anything" in text
    assert "another loss than optimizer.loss computed" in text
    torch.testing.assert_close(flat(model), kept, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.unitwise, ng.tonga])
def test_a_data_set_that_is_fitted_exactly_says_nothing(recipe: Any):
    model = net()
    opt, targets = recipe(model, nn.MSELoss()), model(X).detach()
    assert warn_in(opt, model, lambda o, m: iterate(o, m, X, targets), STOP + 1) == []


def test_statistics_that_are_not_due_are_not_late():
    model = net()
    opt = ng.kfac(model, CE, lr=0.01)
    for step in range(40):  # the interval grows to several steps: as many may be taken with another loss
        assert warn_in(opt, model, iterate if opt._flow.reader.taps.armed else plain_criterion, 1) == [], step
    assert opt._live.state.guard.late == 0


@pytest.mark.parametrize("other", [in_evaluation, plain_criterion])
def test_steps_on_another_loss_in_turn_with_ours_say_nothing(other: Any):
    model = net()
    opt = ng.kfac(model, CE, lr=0.1)
    for _ in range(STOP // (WARN - 1) + 2):
        model.train()
        iterate(opt, model)
        assert warn_in(opt, model, other, WARN - 1) == []


@pytest.mark.parametrize("recipe", [ng.kfac, ng.online_ng, ng.hessian_free])
def test_training_in_evaluation_mode_on_purpose_is_training_without_dropout(recipe: Any):
    parts = {"norm": nn.BatchNorm1d(3).double(), "drop": nn.Dropout(0.5), "net": net()}
    model = Assembled(lambda m, x: m.net(m.drop(m.norm(x))), **parts)
    other = copy.deepcopy(model)
    buffers = other.norm.running_mean.clone()
    for part in (model.norm, model.drop):  # the two layers alone in evaluation mode
        part.eval()
    train(recipe(model, CE), model, 3)
    opt = recipe(other.eval(), CE, train_in_eval=True)
    losses = train(opt, other, 3)
    assert torch.equal(flat(other), flat(model))
    assert torch.equal(other.norm.running_mean, buffers)
    assert losses[-1] < losses[0]
    assert opt.state_report().failures == 0


def test_evaluation_under_no_grad_stays_out_of_training_in_evaluation_mode():
    ends = []
    for evaluate in (False, True):
        model = net().eval()
        opt = ng.kfac(model, CE, train_in_eval=True)
        for _ in range(4):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            if evaluate:
                with torch.no_grad():
                    opt.loss(model(3 * X), Y)
            opt.step()
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_without_any_statistics_the_way_to_train_in_evaluation_mode_is_named():
    for recipe in (ng.kfac, ng.hessian_free):
        model = net().eval()
        opt = recipe(model, CE)
        with pytest.raises(ValueError, match="train_in_eval=True"):
            iterate(opt, model)


@pytest.mark.parametrize(("recipe", "bad"), [(ng.kfac, math.nan), (ng.online_ng, math.inf)])
def test_a_dead_run_warns_and_then_raises(recipe: Any, bad: float):
    def act(opt: Any, model: nn.Module) -> None:
        iterate(opt, model, X * bad, Y)

    model = net()
    opt = recipe(model, CE, lr=0.1)
    iterate(opt, model)
    assert warn_in(opt, model, act, WARN - 1) == []
    iterate(opt, model)  # one good step: the count begins anew
    kept = flat(model)
    assert warn_in(opt, model, act, WARN - 1) == []
    (text,) = warn_in(opt, model, act, STOP - WARN)
    assert "not finite" in text
    with pytest.raises(RuntimeError, match="the last 25 steps were skipped"):
        act(opt, model)
    assert torch.equal(flat(model), kept)
    assert opt.state_report().failures == WARN - 1 + STOP


def test_a_dead_run_without_blocks_warns_and_then_raises(monkeypatch: pytest.MonkeyPatch):
    model = net()
    opt = ng.natgrad_cg(model, CE)
    monkeypatch.setattr("natgrad.optim.flat_step.moves_finitely", lambda point, step: False)
    kept = flat(model)
    (text,) = warn_in(opt, model, iterate, STOP - 1)
    assert "not finite" in text
    with pytest.raises(RuntimeError, match="the last 25 steps were skipped"):
        iterate(opt, model)
    assert torch.equal(flat(model), kept)
    monkeypatch.undo()
    iterate(opt, model)
    assert not torch.equal(flat(model), kept)


@pytest.mark.parametrize("rate", [1e38, 1e30])
def test_a_finite_step_that_overflows_the_parameters_is_not_taken(rate: float):
    model = net().float()
    with torch.no_grad():
        model[2].bias.fill_(3e38)
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=rate, damping=1e-6, rule=ng.Rate())
    kept = flat(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(X.float())
    model[2].bias.grad = torch.full((3,), -1.0)
    model[2].bias.grad[0] = -2.0
    opt.step()
    assert bool(flat(model).isfinite().all())
    assert torch.equal(flat(model), kept) == (opt.state_report().failures == 1)


def test_a_search_that_finds_no_step_says_so_once(monkeypatch: pytest.MonkeyPatch):
    """At a minimum that is as it should be, and no error follows."""
    model = net()
    opt = ng.krylov_subspace(model, CE, dimension=3, steps=3)
    monkeypatch.setattr(type(opt.rule), "step", lambda self, model, loss_at, memory: (model.nothing(), memory))
    kept = flat(model)
    (text,) = warn_in(opt, model, iterate, 2 * STOP)
    assert "none of the last 25 steps moved anything" in text
    assert torch.equal(flat(model), kept)
    assert "changed no parameter" in opt.explain()
    monkeypatch.undo()
    iterate(opt, model)
    monkeypatch.setattr(type(opt.rule), "step", lambda self, model, loss_at, memory: (model.nothing(), memory))
    assert len(warn_in(opt, model, iterate, STOP)) == 1  # counted anew


def test_a_step_too_long_for_its_numbers_is_skipped_and_not_taken_for_none(monkeypatch: pytest.MonkeyPatch):
    """A step whose length in the metric overflows is cut to zero: nothing is learnt, and it must be said."""
    model = net()
    opt = ng.kfac(model, CE)
    iterate(opt, model)
    monkeypatch.setattr("natgrad.rules.quadratic.BlockStep.known_form", lambda step: torch.tensor(math.nan))
    kept = flat(model)
    (text,) = warn_in(opt, model, iterate, WARN)
    assert "not finite" in text
    assert torch.equal(flat(model), kept)


def test_the_counts_survive_a_checkpoint():
    model = net()
    opt = ng.kfac(model, CE)
    iterate(opt, model)
    warn_in(opt, model, plain_criterion, STOP - 1)
    other = ng.kfac(model, CE)
    other.load_state_dict(opt.state_dict())
    with pytest.raises(RuntimeError, match="due and not read"):
        plain_criterion(other, model)
