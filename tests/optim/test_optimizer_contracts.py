"""The scale is right out of the box, and the metric is that of the user's own pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import TOKENS, Assembled, Sequence, assert_close, batch_norm, build_seeded, draw, pair
from optim_models import (
    CE,
    X,
    Y,
    assert_step,
    build,
    dropout_net,
    fisher_step,
    flat,
    flat_gradient,
    global_random_state_is_untouched,
    iterate,
    mean_gradient,
    move_copy,
    net,
)
from torch import nn

import natgrad as ng

BITS = (draw(8, 3, seed=11) > 0).double()
CRITERIA = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss, Y),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, BITS),
    "MSELoss": (nn.MSELoss, draw(8, 3, seed=12)),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, BITS * 2),
    "L1Loss": (nn.L1Loss, draw(8, 3, seed=12)),
    "SmoothL1Loss": (nn.SmoothL1Loss, draw(8, 3, seed=12)),
    "HuberLoss": (nn.HuberLoss, draw(8, 3, seed=12)),
}
RULES = {"rate": ng.Rate(), "trust region": ng.TrustRegion(0.01), "line search": ng.LineSearch()}


# the scale is right out of the box


def build_classes() -> nn.Module:
    """Logits with the class axis second, as torch's criteria want them: (b, t) -> (b, 5, t)."""
    return Assembled(lambda m, tokens: m.inner(tokens).movedim(-1, 1), inner=Sequence())


@pytest.mark.parametrize(("kind", "rule"), pair(CRITERIA, RULES))
def test_reduction_and_repeated_examples_do_not_change_the_step(kind: str, rule: str) -> None:
    make, targets = CRITERIA[kind]
    once = move_copy(net(), make(), X, targets, rule=RULES[rule])
    twice = X.repeat(2, 1), targets.repeat(2, *[1] * (targets.dim() - 1))
    assert_close(move_copy(net(), make(reduction="sum"), X, targets, rule=RULES[rule]), once, 1e-11)
    for reduction in ("mean", "sum"):
        assert_close(move_copy(net(), make(reduction=reduction), *twice, rule=RULES[rule]), once, 1e-11)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_repeated_positions_do_not_change_the_step(reduction: str, rule: str) -> None:
    criterion, labels, model = nn.CrossEntropyLoss(reduction=reduction), TOKENS.flip(0), build_seeded(build_classes)
    once = move_copy(model, criterion, TOKENS, labels, rule=RULES[rule])
    twice = move_copy(model, criterion, TOKENS.repeat(1, 2), labels.repeat(1, 2), rule=RULES[rule])
    assert_close(twice, once, 1e-11)


def test_ignored_targets_do_not_count() -> None:
    criterion, model = nn.CrossEntropyLoss(ignore_index=-1), net()
    padded = torch.cat([X, draw(4, 3, seed=2)]), torch.cat([Y, torch.full((4,), -1)])
    opt = ng.NaturalGradient(model, ng.gauss_newton(model, criterion), lr=0.5, damping=0.1)
    iterate(opt, model, *padded)
    assert_close(flat(model), move_copy(net(), CE, X, Y), 1e-11)


@pytest.mark.parametrize("zero_before_loss", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_that_was_skipped_leaves_no_trace(reduction: str, zero_before_loss: bool) -> None:
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    expected, model = move_copy(net(), criterion, X, Y), net()
    opt, scaler = build(model, criterion), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for x in (X * 1e308 * 10, X):  # the first batch overflows: the scaler skips its step
        if zero_before_loss:
            opt.zero_grad()
        loss = scaler.scale(opt.loss(model(x), Y))
        if not zero_before_loss:
            opt.zero_grad()
        loss.backward()
        scaler.step(opt)
        scaler.update()
    assert opt.state_report().step == 1
    assert_close(flat(model), expected, 1e-11)


def test_a_sum_over_micro_batches_of_any_size_has_the_sum_of_their_counts() -> None:
    model, before = net(), flat(net())
    opt = build(model, nn.CrossEntropyLoss(reduction="sum"), lr=1.0)
    expected = fisher_step(model, X[5:], ng.Categorical(), mean_gradient(model, X, Y), 0.1)
    for part in (slice(0, 5), slice(5, 8)):
        opt.loss(model(X[part]), Y[part]).backward()
    opt.step()  # the metric is that of the last micro-batch
    assert_step(model, before, -expected, 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_gradients_of_equal_batches_are_one_batch(reduction: str) -> None:
    criterion, parts = nn.CrossEntropyLoss(reduction=reduction), 4
    expected, model = move_copy(net(), criterion, X, Y), net()
    opt = build(model, criterion)
    for _ in range(parts):
        loss = opt.loss(model(X), Y)
        (loss / parts if reduction == "mean" else loss).backward()
    opt.step()
    assert_close(flat(model), expected, 1e-11)


# one forward: the user's own


def test_batch_norm_statistics_are_updated_once() -> None:
    model = build_seeded(lambda: batch_norm(True))
    twin = copy.deepcopy(model)
    iterate(build(model, rule=ng.LineSearch(), lr=100.0), model, X, Y % 2)
    twin(X)
    for (name, mine), (_, theirs) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_batch_norm_in_training_mode_has_the_metric_of_its_training_mode() -> None:
    model = build_seeded(lambda: batch_norm(True))
    matrix = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), X).dense()
    g, before = mean_gradient(model, X, Y % 2), flat(model)
    iterate(build(model, lr=1.0), model, X, Y % 2)
    assert_step(model, before, -torch.linalg.solve(matrix + 0.1 * torch.eye(len(g)).to(g), g), 1e-9)


@pytest.mark.parametrize("draws_before", [0, 3])
def test_dropout_masks_of_the_metric_are_those_of_the_pass(draws_before: int) -> None:
    model = dropout_net()
    torch.rand(draws_before)
    state = torch.get_rng_state()
    g = mean_gradient(model, X, Y)
    torch.set_rng_state(state)
    matrix = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), X).dense()
    torch.set_rng_state(state)
    before, opt = flat(model), build(model, lr=1.0)
    loss = opt.loss(model(X), Y)
    loss.backward()
    torch.rand(7)  # other draws in between do not matter
    opt.step()
    assert_step(model, before, -torch.linalg.solve(matrix + 0.1 * torch.eye(len(g)).to(g), g), 1e-9)


def test_the_replayed_loss_is_that_of_the_pass() -> None:
    # a step of length zero has no change to offer: every trial loss equals the loss before
    model, seen = dropout_net(), []

    class Spy(ng.Rule):
        def step(self, model, loss_at, memory):
            seen.append((model.loss, loss_at(model.nothing().vector)))
            return model.nothing(), memory

    iterate(build(model, rule=Spy()), model, X, Y)
    assert seen[0][0] == seen[0][1]


@pytest.mark.parametrize("rule", [ng.Rate(), ng.LineSearch(), ng.TrustRegion(0.1, backtracks=3)], ids=repr)
def test_a_step_leaves_the_global_random_state_and_the_gradients_alone(rule: ng.Rule) -> None:
    model = dropout_net()
    opt = build(model, rule=rule, damping=ng.LevenbergMarquardt())
    opt.loss(model(X), Y).backward()
    g = flat_gradient(model)
    identities = [id(p.grad) for p in model.parameters()]
    assert global_random_state_is_untouched(opt.step)
    assert torch.equal(flat_gradient(model), g)
    assert [id(p.grad) for p in model.parameters()] == identities


def test_sampled_labels_come_from_the_private_generator() -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.sampled_fisher(model, CE, samples=2), lr=0.1)
    opt.loss(model(X), Y).backward()
    before = opt.metric.generator.get_state()
    assert global_random_state_is_untouched(opt.step)
    assert not torch.equal(opt.metric.generator.get_state(), before)


@pytest.mark.parametrize(
    "make", [dropout_net, lambda: build_seeded(lambda: batch_norm(True))], ids=["dropout", "batch norm"]
)
def test_the_mode_of_the_pass_counts_not_that_of_the_step(make: Any) -> None:
    found = []
    for evaluated in (False, True):
        torch.manual_seed(1)
        model = make()
        opt = build(model, rule=ng.LineSearch())
        opt.loss(model(X), Y % 2).backward()
        if evaluated:
            model.eval()
            model(draw(5, 3, seed=8))
        opt.step()
        assert model.training is not evaluated
        found.append(flat(model))
    assert torch.equal(*found)


def test_a_frozen_batch_norm_inside_a_training_model_stays_frozen() -> None:
    model = build_seeded(lambda: batch_norm(True))
    model[1].eval()
    statistics = {name: b.clone() for name, b in model.named_buffers()}
    iterate(build(model, rule=ng.LineSearch()), model, X, Y % 2)
    assert model.training
    assert not model[1].training
    assert all(torch.equal(b, statistics[name]) for name, b in model.named_buffers())


def test_of_several_forwards_the_last_counts_and_a_metric_in_between_is_none() -> None:
    expected, model = move_copy(net(), CE, X, Y), net()
    opt = build(model)
    model(draw(5, 3, seed=8))
    opt.loss(model(X), Y).backward()
    ng.fisher(model, CE).at(ng.trainable(model), draw(5, 3, seed=8)).dense()  # somebody looks at the geometry elsewhere
    opt.step()
    assert_close(flat(model), expected, 1e-12)
