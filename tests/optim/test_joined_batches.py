"""However a batch is split over four processes, the steps are those of one process with all of its examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from models import Assembled, build_seeded, draw
from optim_models import flat
from process_ranks import assert_joined, count_ranks, needs_gloo, run_ranks, take_part, wrap_model
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import MeasuredLength, SpectralDescent, SpectralProgress

pytestmark = needs_gloo

X = draw(160, 6)
Y = X[:, :4].argmax(1)
MASKED = torch.where(torch.arange(160) < 120, Y, -100)  # no target counts on the last of four equal parts
SILENT = torch.full_like(Y, -100)
EVEN, UNEVEN, EMPTY = (40, 40, 40, 40), (90, 49, 20, 1), (70, 60, 30, 0)
WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
SUMMED, MEAN = nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss()
WEIGHTED = nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")
IGNORING = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2)
WEIGHTLESS = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64))
ONE_CLASS = torch.where(torch.arange(160) < 120, Y, 1)  # on the last of four equal parts


def build_net() -> nn.Module:
    """(b, 6) -> four logits: a convolution, a norm, a bare parameter and a linear layer."""
    return Assembled(
        lambda m, x: m.out((m.norm(m.conv(x.unsqueeze(1)).flatten(1)) * m.scale).tanh()),
        conv=nn.Conv1d(1, 2, 3),
        norm=nn.LayerNorm(8),
        out=nn.Linear(8, 4),
        scale=nn.Parameter(torch.linspace(0.5, 1.5, 8)),
    )


def build_tied() -> nn.Module:
    """(b, 5) tokens -> logits of the next, by the table that looks tokens up."""
    return Assembled(
        lambda m, tokens: nn.functional.linear(m.mix(m.table(tokens)).tanh(), m.table.weight),
        table=nn.Embedding(7, 4),
        mix=nn.Linear(4, 4),
    )


def train(
    recipe: Callable[..., Any],
    splits: Sequence[Sequence[int]],
    steps: int = 6,
    criterion: nn.Module = SUMMED,
    weighted: bool = False,
    targets: Tensor = Y,
    silent: int = -1,
    **options: Any,
) -> dict[str, Any]:
    """Steps on the whole data, split in another way at each. weighted: True where the loop weights means by rows.

    silent: the step at which no target counts.
    """
    model = build_seeded(build_net)
    outer = wrap_model(model)
    y = nn.functional.one_hot(Y, 4).to(X) if isinstance(criterion, nn.MSELoss) else targets
    opt = recipe(outer, criterion, estimate=ng.ExactLabels(), **options)
    for step in range(steps):
        own = take_part(splits[step % len(splits)])
        opt.zero_grad()
        loss = opt.loss(outer(X[own]), (SILENT if step == silent else y)[own])
        (loss * len(X[own]) * count_ranks() / len(X) if weighted else loss).backward()
        opt.step()
    report = opt.state_report()
    return {"flat": flat(model), "loss": report.loss, "kl": report.kl, "failures": report.failures}


def train_tied(recipe: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """One matrix in two roles. At the second step a process has no examples, and statistics of neither."""
    model, tokens = build_seeded(build_tied), (3 * X[:, :5]).long() % 7
    outer = wrap_model(model)
    opt = recipe(outer, SUMMED, estimate=ng.ExactLabels(), **options)
    for step in range(3):
        own = tokens[take_part((EVEN, EMPTY)[step % 2])]
        opt.zero_grad()
        opt.loss(outer(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
        opt.step()
    return {"flat": flat(model), "kl": opt.state_report().kl}


def train_in_micro_batches(
    recipe: Callable[..., Any], targets: Sequence[Tensor] = (Y, Y), criterion: nn.Module = MEAN, **options: Any
) -> dict[str, Any]:
    """Two means a step, over parts that are unequal in another way each; the first is not averaged by itself."""
    model = build_seeded(build_net)
    outer = wrap_model(model)
    opt = recipe(outer, criterion, **options)
    for step in range(4):
        opt.zero_grad()
        for i, split in enumerate((UNEVEN, EMPTY if step % 2 else EVEN)):
            own = take_part(split)
            with outer.no_sync() if outer is not model and i == 0 else nullcontext():
                (opt.loss(outer(X[own] + i), targets[i][own]) / 2).backward()
        opt.step()
    report = opt.state_report()
    return {"flat": flat(model), "loss": report.loss, "failures": report.failures}


def train_with_penalty() -> dict[str, Any]:
    """A penalty that `opt.loss` does not know of: how its curvature is measured does not depend on the split either."""
    model: Any = build_seeded(build_net)
    outer = wrap_model(model)
    opt = ng.kfac(outer, MEAN, estimate=ng.ExactLabels(), momentum=0.0)
    own = take_part(EVEN)
    for _ in range(6):
        opt.zero_grad()
        (opt.loss(outer(X[own]), Y[own]) + 3 * model.out.weight.square().sum()).backward()
        opt.step()
    return {"flat": flat(model), "levels": sorted(opt._live.state.outside.levels)}


EXACT: dict[str, Any] = {"estimate": ng.ExactLabels(), "measure": False}
TIGHT = ng.CG(rtol=1e-14, max_steps=200)
JUDGED: dict[str, Any] = {"damping": ng.LevenbergMarquardt(0.1, per="block"), "rule": MeasuredLength()}
FEW = SpectralDescent(enough=200.0, renewed=200.0)  # all rows are few: directions are kept for some steps
SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "kfac, equal parts": partial(train, ng.kfac, [EVEN], momentum=0.0),
    "kfac, an empty batch": partial(train, ng.kfac, [UNEVEN, EMPTY], rule=MeasuredLength()),
    "class weights": partial(train, ng.kfac, [UNEVEN], criterion=WEIGHTED, rule=MeasuredLength()),
    "means": partial(train, ng.kfac, [UNEVEN, EMPTY], criterion=MEAN),
    "means, weighted by the loop": partial(train, ng.kfac, [UNEVEN, EMPTY], criterion=MEAN, weighted=True),
    "means over classes": partial(train, ng.ekfac, [UNEVEN, EMPTY], criterion=IGNORING),
    "means of squares": partial(train, ng.unitwise, [UNEVEN, EMPTY], criterion=nn.MSELoss()),
    "no target counts": partial(train, ng.kfac, [EVEN, UNEVEN], criterion=MEAN, targets=MASKED),
    "a class that does not count": partial(train, ng.kfac, [EVEN], criterion=WEIGHTLESS, targets=ONE_CLASS),
    "a class that does not count, by products": partial(
        train_in_micro_batches, ng.hessian_free, (Y, ONE_CLASS), criterion=WEIGHTLESS, solver=TIGHT
    ),
    "no target counts, judged": partial(train, ng.ekfac, [EVEN], criterion=MEAN, targets=MASKED, **JUDGED),
    "no target counts in a sum": partial(train, ng.unitwise, [EVEN, UNEVEN], targets=MASKED),
    "means, judged": partial(train, ng.kfac, [UNEVEN, EMPTY], criterion=IGNORING, **JUDGED),
    "judged": partial(train, ng.kfac, [EMPTY], **JUDGED),
    "means in micro-batches": partial(train_in_micro_batches, ng.kfac, **EXACT),
    "means in micro-batches, ekfac": partial(train_in_micro_batches, ng.ekfac, **EXACT),
    "targets of some": partial(train_in_micro_batches, ng.kfac, (Y, MASKED), **EXACT),
    "targets of one micro-batch": partial(train_in_micro_batches, ng.kfac, (Y, SILENT), **EXACT),
    "targets of one micro-batch, by products": partial(
        train_in_micro_batches, ng.hessian_free, (Y, SILENT), solver=TIGHT
    ),
    "a batch without targets": partial(train, ng.kfac, [EVEN], criterion=MEAN, silent=3),
    "no target counts, a tight bound": partial(train, ng.kfac, [EVEN], criterion=MEAN, targets=MASKED, max_kl=1e-4),
    "steps in shares": partial(train, ng.kfac, [UNEVEN, EMPTY], rule=SpectralProgress(few=1.0), momentum=0.5),
    "kept directions": partial(train, ng.kfac, [UNEVEN, EMPTY], rule=FEW, momentum=0.5),
    "kept directions, ekfac by owners": partial(train, ng.ekfac, [UNEVEN], rule=FEW, momentum=0.5, share="memory"),
    "outside loss": train_with_penalty,
    "a tied table": partial(train_tied, ng.kfac, share="memory"),
    "a tied table, ekfac": partial(train_tied, ng.ekfac),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 4, tmp_path_factory)


@pytest.mark.filterwarnings("ignore:a large part of the gradient")
@pytest.mark.parametrize("scene", SCENES)
def test_four_processes_step_as_one_with_all_examples(four: list[dict[str, Any]], scene: str):
    assert_joined([rank[scene] for rank in four], SCENES[scene]())
