"""Closures, evaluated again where a choice needs the loss and nothing else gives it."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, cross, draw, pair
from optim_models import CE, Closure, X, Y, build, flat, flat_gradient, iterate, move_copy, net
from torch import Tensor, nn

import natgrad as ng


def test_a_closure_is_evaluated_once_where_nothing_needs_the_loss() -> None:
    expected, model = move_copy(net(), CE, X, Y), net()
    opt = build(model, rule=ng.Rate())
    closure = Closure(opt, lambda: CE(model(X), Y))
    value = opt.step(closure)
    assert [float(value.detach())] == closure.values
    assert_close(flat(model), expected, 1e-12)


@pytest.mark.parametrize(
    ("reduction", "own_loss"), [("mean", True), ("mean", False), ("sum", True)]
)  # sums need opt.loss
def test_closure_and_loop_take_the_same_steps(reduction: str, own_loss: bool) -> None:
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    choices = {"rule": ng.LineSearch(), "damping": ng.LevenbergMarquardt(start=0.1), "lr": 1.9}
    looped, closed = net(), net()
    first, second = build(looped, criterion, **choices), build(closed, criterion, **choices)
    loss = second.loss if own_loss else criterion
    closure = Closure(second, lambda: loss(closed(X), Y))
    for _ in range(4):
        iterate(first, looped, X, Y)
        second.step(closure)
    assert_close(flat(closed), flat(looped), 1e-11)
    assert second.state_report().ratio == pytest.approx(first.state_report().ratio, rel=1e-8)
    assert (len(closure.values) == 4) is own_loss  # a replay makes re-evaluation unnecessary


def test_reevaluated_closures_put_everything_back() -> None:
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)))
    twin = copy.deepcopy(model)
    before = flat(model)
    state = torch.get_rng_state()
    CE(twin(X), Y).backward()
    after_one_call = torch.get_rng_state()
    torch.set_rng_state(state)

    class Nowhere(ng.Rule):
        """Looks at three points and stays."""

        needs_loss = True

        def step(self, model, loss_at, memory):
            values = [loss_at(model.proposal.scale_by(s).vector) for s in (0.0, 1.0, 0.5)]
            assert values[0] == model.loss
            assert values[1] != model.loss
            return model.nothing(), memory

    opt = build(model, rule=Nowhere())
    closure = Closure(opt, lambda: CE(model(X), Y))
    opt.step(closure)
    assert len(closure.values) == 5  # the user's, the same again, and three points
    assert torch.equal(torch.get_rng_state(), after_one_call)
    assert torch.equal(flat(model), before)
    assert torch.equal(flat_gradient(model), flat_gradient(twin))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


def test_a_closure_may_return_a_number() -> None:
    found = []
    for convert in (float, torch.Tensor.detach, lambda value: value):
        model = net()
        opt = build(model, rule=ng.LineSearch(), lr=20.0)

        def closure(opt=opt, model=model, convert=convert) -> Tensor | float:
            opt.zero_grad()
            value = CE(model(X), Y)
            value.backward()
            return convert(value.detach()) if convert is float else convert(value)

        opt.step(closure)
        found.append(flat(model))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_what_is_no_closure_of_a_loss_is_told_so_and_moves_nothing() -> None:
    model = net()
    opt = build(model, rule=ng.LineSearch())
    before = flat(model)
    with pytest.raises(ValueError, match=r"closure returned None, expected the loss"):
        opt.step(lambda: CE(model(X), Y).backward())
    with pytest.raises(TypeError, match=r"closure is Tensor, expected a function .*without calling it"):
        opt.step(CE(model(X), Y))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"outputs is a single number, expected the logits"):
        opt.loss(CE(model(X), Y), Y)
    opt.zero_grad()
    with pytest.warns(UserWarning, match=r"this step does nothing.*loss.backward\(\)"):
        opt.step(lambda: CE(model(X), Y))
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize(
    "criterion", [CE, torch.nn.NLLLoss(), torch.nn.functional.cross_entropy], ids=["CE", "NLL", "function"]
)
def test_outputs_without_classes_are_told_so(criterion: Any) -> None:
    """What an argmax gave, or one score per example."""
    model = net()
    for recipe in (ng.kfac, ng.hessian_free):
        opt = recipe(model, criterion)
        for outputs in (model(X).argmax(1), model(X)[:, 0]):
            with pytest.raises(ValueError, match=r"outputs has shape \(8,\), expected the logits of every class"):
                opt.loss(outputs, Y)


# a loss that does not go backward changes no step, whatever it is of


CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "judged": {"damping": ng.LevenbergMarquardt()},
    "searched": {"rule": ng.LineSearch()},
    "measured": {"rule": ng.rules.MeasuredLength()},
}
OTHERS = [ng.ekfac, ng.diagonal, ng.online_ng, ng.tonga, ng.unitwise]
PAIRS = [(recipe, choice) for recipe in (ng.kfac, ng.hessian_free) for choice in CHOICES]
PAIRS += [(ng.natgrad_cg, "judged"), *pair(OTHERS, ["default", "measured"])]
LOOKS = "after", "after, in evaluation mode", "before, without gradients"


@cache
def train_looking(recipe: Any, choice: str, looks: str, micro: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    model = net()
    opt = recipe(model, CE, **CHOICES[choice])
    for k in range(6 if choice == "judged" else 3):  # it looks at every fifth
        opt.zero_grad()
        other, labels = draw(12, X.shape[1], seed=50 + k), Y.roll(1).repeat(2)[:12]
        if looks == "before, without gradients":
            with torch.no_grad():
                opt.loss(model(other), labels)
        for part in (slice(0, 5), slice(5, None)) if micro else (slice(None),):
            opt.loss(model(X[part]), Y[part]).backward()
        if looks == "after":
            opt.loss(model(other), labels)
            opt.loss(model(2 * other), labels)
        if looks == "after, in evaluation mode":
            opt.loss(model.eval()(other), labels)
            model.train()
        opt.step()
    return flat(model), copy.deepcopy(opt.state_dict()["state"])


@pytest.mark.parametrize(
    ("both", "looks"), cross(PAIRS[:2], PAIRS[2:], LOOKS), ids=lambda part: getattr(part, "__name__", part)
)
def test_a_loss_that_is_only_looked_at_changes_nothing(both: tuple[Any, str], looks: str) -> None:
    recipe, choice = both
    micro = choice not in ("judged", "searched")  # which compare one loss with itself
    expected = train_looking(recipe, choice, "", micro)
    found = train_looking(recipe, choice, looks, micro)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()


def test_micro_batches_that_went_backward_hold_no_averages_of_before() -> None:
    """A hundred of them would hold as many copies of all factors."""
    model = net()
    opt = ng.kfac(model, CE)
    for _ in range(5):
        opt.loss(model(X), Y).backward()
    assert len(opt._flow.pending.losses) == 1
    opt.step()
    assert opt._flow.pending.losses == []
