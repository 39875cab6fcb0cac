"""Reduction='sum' takes the steps of 'mean', however the loop is written, and clears gradients as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import change_state
from models import assert_close, build_seeded, cross, draw
from optim_models import BLOCK_RECIPES, Closure, X, Y, flat, net
from torch import Tensor, nn

import natgrad as ng

OTHER, LABELS = draw(24, 3, seed=5), torch.arange(24) % 3


class Loop:
    """An optimizer in a loop, and its loss in units of the mean or of the sum."""

    def __init__(self, recipe: Any, reduction: str = "mean", criterion: Any = None) -> None:
        self.model, self.mean = net(), reduction == "mean"
        self.opt = recipe(self.model, criterion or nn.CrossEntropyLoss(reduction=reduction))

    def loss(self, x: Tensor = X, y: Tensor = Y) -> Tensor:
        return self.opt.loss(self.model(x), y)

    def step(self, x: Tensor = X, y: Tensor = Y) -> None:
        self.opt.zero_grad()
        self.loss(x, y).backward()
        self.opt.step()


def skip(clear: Callable[[Loop], Any]) -> Callable[[Loop], None]:
    """A batch goes backward and is thrown away."""

    def act(loop: Loop) -> None:
        loop.loss(OTHER, LABELS).backward()
        clear(loop)
        loop.loss().backward()
        loop.opt.step()

    return act


def clear_between_loss_and_backward(loop: Loop) -> None:
    loop.loss(OTHER, LABELS).backward()
    loss = loop.loss()
    loop.model.zero_grad()
    loss.backward()
    loop.opt.step()


def differentiate(loop: Loop, when: str) -> None:
    """The gradient is looked at besides, and added to none that is there."""
    if when == "beside zeros":
        loop.loss(OTHER, LABELS).backward()
        loop.model.zero_grad(set_to_none=False)
    loss, params = loop.loss(), list(loop.model.parameters())
    if when != "last":
        torch.autograd.grad(loss, params, retain_graph=True)
    loss.backward(retain_graph=True)
    if when == "last":
        torch.autograd.grad(loss, params)
    loop.opt.step()


def penalise(loop: Loop) -> None:
    loop.loss(OTHER, LABELS).backward()
    loop.model.zero_grad()
    loss = loop.loss()
    (loss + 0.1 * (1 if loop.mean else len(X)) * loop.model[0].weight.square().sum()).backward()
    loop.opt.step()


def accumulate(loop: Loop) -> None:
    for x, y in zip(X.split(2), Y.split(2), strict=True):
        (loop.loss(x, y) / (4 if loop.mean else 1)).backward()
    loop.opt.step()


def add_losses_of_one_pass(loop: Loop) -> None:
    outputs = loop.model(X)
    first, second = loop.opt.loss(outputs, Y), loop.opt.loss(outputs, Y.flip(0))
    ((first + second) / (2 if loop.mean else 1)).backward()
    loop.opt.step()


def clear_by_hand(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.grad = None


def scale(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(loop.loss()).backward()
    scaler.step(loop.opt)
    scaler.update()


def in_evaluation(act: Callable[[Loop], Any]) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        loop.model.eval()
        act(loop)
        loop.model.train()

    return run


ANYWHERE: dict[str, Callable[[Loop], Any]] = {
    "training": lambda loop: loop.step(OTHER, LABELS),
    "an evaluation between": in_evaluation(lambda loop: loop.loss(OTHER, LABELS)),
    "a skipped batch, cleared by the model": skip(lambda loop: loop.model.zero_grad()),
    "a skipped batch, zeroed by the model": skip(lambda loop: loop.model.zero_grad(set_to_none=False)),
    "a skipped batch, cleared by the optimizer": skip(lambda loop: loop.opt.zero_grad()),
    "a skipped batch, cleared by hand": skip(clear_by_hand),
    "cleared between loss and backward": clear_between_loss_and_backward,
    **{
        f"differentiated {when}": (lambda loop, when=when: differentiate(loop, when))
        for when in ("first", "last", "beside zeros")
    },
    "a penalty after a skipped batch": penalise,
    "a gradient scaler": scale,
    "a closure": lambda loop: loop.opt.step(Closure(loop.opt, loop.loss)),
}
BY_LAYERS = ANYWHERE | {
    "evaluation mode": in_evaluation(lambda loop: loop.step()),
    "micro-batches": accumulate,
    "micro-batches after a skipped batch": lambda loop: (
        loop.loss(OTHER, LABELS).backward(),
        loop.model.zero_grad(set_to_none=False),
        accumulate(loop),
    ),
    "two losses of one pass": add_losses_of_one_pass,
}
CASES = cross([ng.kfac], BLOCK_RECIPES[1:], BY_LAYERS) + cross([ng.hessian_free], [ng.natgrad_cg], list(ANYWHERE)[::2])


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_a_sum_takes_the_steps_of_a_mean(recipe: Any, name: str):
    ends = []
    for reduction in ("mean", "sum"):
        loop = Loop(recipe, reduction)
        loop.step()
        loop.opt.zero_grad()
        BY_LAYERS[name](loop)
        loop.step()
        ends.append((flat(loop.model), loop.opt.state_report()))
    (means, told), (sums, also_told) = ends
    assert_close(sums, means, 1e-7)
    assert also_told.gradient == pytest.approx(told.gradient, rel=1e-7)
    assert also_told.step == told.step
    assert also_told.failures == told.failures == 0


IGNORED, LAST, WEIGHTS = torch.full_like(LABELS, -100), torch.full_like(LABELS, 2), torch.tensor([1.0, 3.0, 0.0])
SILENT: dict[str, tuple[Any, Tensor]] = {
    "ignored": (nn.CrossEntropyLoss(), IGNORED),
    "ignored in a sum": (nn.CrossEntropyLoss(reduction="sum"), IGNORED),
    "empty": (nn.CrossEntropyLoss(), IGNORED[:0]),
    "empty, of a sum": (nn.CrossEntropyLoss(reduction="sum"), IGNORED[:0]),
    "a class that does not count": (nn.CrossEntropyLoss(weight=WEIGHTS.double()), LAST),
    "classes that do not count, some ignored": (
        nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=0),
        torch.tensor([0, 2] * 12),
    ),
    "a smoothed class that does not count": (nn.CrossEntropyLoss(weight=WEIGHTS.double(), label_smoothing=0.1), LAST),
    "smoothed classes, some ignored": (
        nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=0, label_smoothing=0.1),
        torch.tensor([0, 2] * 12),
    ),
    "eight bits": (nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=255), LAST.byte()),
    "missing": (ng.Masked(ng.Categorical()), IGNORED),
}


@pytest.mark.parametrize(
    ("recipe", "silent"), cross([ng.kfac], [ng.hessian_free, *BLOCK_RECIPES[1:], ng.natgrad_cg], SILENT)
)
def test_a_micro_batch_without_targets_adds_nothing(recipe: Any, silent: str):
    criterion, targets = SILENT[silent]
    nothing, ends = (OTHER[: len(targets)], targets), []
    for parts in ([(X, Y)], [nothing, (X, Y)], [(X, Y), nothing]):
        loop = Loop(recipe, criterion=criterion)
        for _ in range(2):
            loop.opt.zero_grad()
            for x, y in parts:
                loop.loss(x, y).backward()
            loop.opt.step()
        ends.append((flat(loop.model), loop.opt.state_report()))
    for end, told in ends[1:]:
        assert_close(end, ends[0][0], 1e-12)
        assert told.loss == pytest.approx(ends[0][1].loss, rel=1e-12)
        assert told.failures == 0


@pytest.mark.parametrize("recipe", [ng.kfac, ng.unitwise, ng.diagonal])
def test_parts_of_a_sum_weigh_as_the_targets_that_count_in_them(recipe: Any):
    """The step weighs as its rows beside those before it, which had other targets."""
    targets, ends = torch.cat([Y[:2], IGNORED[:2], Y[4:]]), []
    for sizes in ([len(X)], [3, len(X) - 3], [len(X) - 3, 3]):
        model = net()
        opt = recipe(
            model, nn.CrossEntropyLoss(reduction="sum"), estimate=ng.ExactLabels(), rule=ng.Rate(), measure=False
        )
        for step in range(2):
            opt.zero_grad()
            for x, y in zip((X + step).split(sizes), targets.roll(step).split(sizes), strict=True):
                opt.loss(model(x), y).backward()
            opt.step()
        ends.append(flat(model))
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-10)


class Two(nn.Module):
    """(b, 3) -> three logits by the first head, or by the second one, which shifts a bare parameter besides."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh()) + head * self.shift


@pytest.mark.parametrize("structure", [ng.Kronecker, ng.UnitWise, ng.Diagonal])
def test_the_order_of_micro_batches_that_use_other_parameters_does_not_matter(structure: Any):
    """The past counts less in each block once a step, whichever part of the batch is the first to use it."""
    exact, ends = structure(0.5, estimate=ng.ExactLabels()), []
    for order in ((0, 1), (1, 0)):
        model = build_seeded(Two)
        opt = ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), exact, update_every=1, measure=False)
        for _ in range(4):
            opt.zero_grad()
            for head in order:
                (opt.loss(model(X, head), Y) / 2).backward()
            opt.step()
        ends.append(flat(model))
    assert_close(ends[1], ends[0], 1e-9)


class Routed(nn.Module):
    """(b, 3) -> (b, 3): a row goes through one of two layers, by the sign of its first entry."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        outputs = x.new_zeros(len(x), 3)
        for rows, expert in zip((x[:, 0] > 0, x[:, 0] <= 0), self.experts, strict=True):
            if rows.any():
                outputs[rows] = expert(x[rows])
        return outputs


@pytest.mark.parametrize("structure", [ng.Kronecker, ng.EigenKronecker, ng.UnitWise, ng.Diagonal])
@pytest.mark.parametrize("few", [0, 2, 5])
def test_parts_that_do_not_use_a_layer_count_as_the_batch_has_them(structure: Any, few: int):
    x, ends = X[:6].clone(), []
    x[:, 0] = x[:, 0].abs() + 0.1
    x[few, 0] = -1.0  # the only row of its layer
    for parts in (1, 2, 3):
        model = build_seeded(Routed)
        exact = structure(0.5, estimate=ng.ExactLabels())
        opt = ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), exact, rule=ng.Rate(), measure=False)
        for a, b in zip(x.chunk(parts), Y[:6].chunk(parts), strict=True):
            (opt.loss(model(a), b) / parts).backward()
        opt.step()
        ends.append(flat(model.experts[1]))
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-10)


class Ragged(nn.Module):
    """(b, 6) -> (b, 3): two tokens of a row, of which one without its mark is left out, summed up after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 3)
        rows, tokens = ((x[:, :, 0] > 0) | (torch.arange(2) == 0)).nonzero(as_tuple=True)
        return x.new_zeros(len(x), 3).index_add(0, rows, self.layer(x[rows, tokens]).tanh())


class Slots(Routed):
    """The same layers as one parameter: as many slots for each as the fuller one needs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([torch.stack([expert.weight for expert in self.experts])])

    def forward(self, x: Tensor) -> Tensor:
        routes = [(x[:, 0] > 0).nonzero()[:, 0], (x[:, 0] <= 0).nonzero()[:, 0]]
        slots = nn.utils.rnn.pad_sequence([x[route] for route in routes], batch_first=True) @ self.experts[0].mT
        rows = torch.cat([part[: len(route)] for part, route in zip(slots, routes, strict=True)])
        return rows[torch.cat(routes).argsort()]


@pytest.mark.parametrize("build", [Routed, Ragged, Slots])
def test_inputs_count_by_their_positions_in_whatever_part_they_are(build: Any):
    ends = []
    for sizes in ([8], [2, 6], [5, 3]):
        model = build_seeded(build)
        opt = ng.kfac(model, nn.CrossEntropyLoss(reduction="sum"), estimate=ng.Empirical(), rule=ng.Rate())
        for seed in range(2):
            x = draw(8, 6 if build is Ragged else 3, seed=seed)
            x = x[x[:, -3].argsort()]  # the first parts have other shares than the last
            opt.zero_grad()
            for a, b in zip(x.split(sizes), LABELS[:8].split(sizes), strict=True):
                opt.loss(model(a), b).backward()
            opt.step()
        assert {row.structure for row in opt.report()} == {"Kronecker"}
        ends.append(flat(model))
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-10)


def test_gradients_that_are_zero_by_themselves_were_not_cleared():
    model = nn.Linear(3, 1).double()
    opt = ng.kfac(model, nn.MSELoss(reduction="sum"))
    opt.loss(model(OTHER), model(OTHER).detach()).backward()  # fitted exactly
    opt.loss(model(X), X[:, :1]).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / (len(OTHER) + len(X))
    opt.step()
    assert opt.state_report().gradient == pytest.approx(float(expected.norm()), rel=1e-12)


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_a_bad_batch_counts_once(recipe: Any):
    loop = Loop(recipe, "mean")
    loop.step()
    for count in range(1, 3):
        loop.step(X * float("inf"))
        assert loop.opt.state_report().failures == count
        loop.opt.zero_grad()
        for x in (X, X * float("nan"), X * float("nan")):  # micro-batches
            loop.loss(x).backward()
        loop.opt.step()
        change_state(loop.opt, "guard", failures=loop.opt._live.state.guard.failures - 1)
        assert loop.opt.state_report().failures == count
