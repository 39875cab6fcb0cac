"""Targets that are missing and weights of examples: loss, gradient, metric and step are those of what is there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from engine_state import blocks_of, metric_of
from models import assert_close, build_seeded, cross, draw, mlp, pair
from optim_models import flat, flat_gradient, iterate, train_batches
from process_ranks import assert_joined, needs_gloo, run_ranks, take_part, wrap_model
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import natgrad as ng
from natgrad.ground.spaces import trainable
from natgrad.rules import MeasuredLength, SpectralDescent

X = draw(6, 3)
LABELS = torch.tensor([0, 2, 1, 1, 2, 0])
GAPS = torch.tensor([0, -100, 1, -100, -100, 0])  # three labels
NUMBERS = draw(6, 2, seed=1)
BROKEN = NUMBERS.masked_fill(torch.tensor([[0, 0], [1, 1], [1, 0], [0, 0], [0, 0], [0, 1]]).bool(), torch.nan)
BITS = (draw(6, 5, seed=2) > 0).double().masked_fill(draw(6, 5, seed=3) > 0.3, torch.nan)
W = torch.tensor([1.0, 0.0, 2.5, 0.5, 3.0, 1.0], dtype=torch.float64)
NONE = torch.full((6,), -100)
CLASSES, MASKED_CLASSES = (ng.Categorical(), 3), (ng.Masked(ng.Categorical()), 3)
REALS, MASKED_REALS = (ng.Gaussian(0.5), 2), (ng.Masked(ng.Gaussian(0.5)), 2)

EXACT: Any = {"estimate": ng.ExactLabels()}


def count_numbers(outputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """-log N(t; r, 1/4) of what is there: the mean over it, times two numbers in a row."""
    there = ~targets.isnan() * (torch.ones(6, 1) if weight is None else weight.unsqueeze(1))
    entries = 2 * (outputs - targets.nan_to_num()).square() + math.log(0.5 * math.sqrt(2 * math.pi))
    return 2 * (entries * there).sum() / there.sum()


def count_classes(outputs: Tensor, weight: Tensor, labels: Tensor = LABELS) -> Tensor:
    """The weighted mean of the labels that are there."""
    each, weight = functional.cross_entropy(outputs, labels, reduction="none"), weight * (labels >= 0)
    return (each * weight).sum() / weight.sum()


def count_bits(outputs: Tensor) -> Tensor:
    """The mean over the bits that are there, times five bits in a row."""
    there = ~BITS.isnan()
    return 5 * functional.binary_cross_entropy_with_logits(outputs[there], BITS[there])


@dataclass(frozen=True)
class Scene:
    """A criterion, what `opt.loss` is given, and the loss by definition, of outputs (6, 5)."""

    criterion: Any
    targets: Any
    loss: Callable[[Tensor], Tensor]
    weight: Any = None


def heads(
    labels: Tensor, numbers: Tensor, weights: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Callable[[Tensor], Tensor]:
    """The sum of both heads' losses."""
    ones, (first, second) = torch.ones(6, dtype=torch.float64), weights
    return lambda out: (
        count_classes(out[:, :3], ones if first is None else first, labels) + count_numbers(out[:, 3:], numbers, second)
    )


MASKED, GIVEN = ng.Heads(MASKED_CLASSES, MASKED_REALS), ng.Heads(CLASSES, REALS)
SHIFTED = ng.Heads((ng.Masked(ng.Categorical(), -1), 3), REALS)
DATA = {
    "labels of a head": Scene(ng.Heads(MASKED_CLASSES, REALS), (GAPS, NUMBERS), heads(GAPS, NUMBERS)),
    "numbers of a head": Scene(ng.Heads(CLASSES, MASKED_REALS), (LABELS, BROKEN), heads(LABELS, BROKEN)),
    "of both heads": Scene(MASKED, (GAPS, BROKEN), heads(GAPS, BROKEN)),
    "all labels of a head": Scene(MASKED, (NONE, BROKEN), lambda out: count_numbers(out[:, 3:], BROKEN)),
    "nothing": Scene(MASKED, (LABELS, NUMBERS), heads(LABELS, NUMBERS)),
    "another ignore_index": Scene(SHIFTED, (GAPS.clamp(min=-1), NUMBERS), heads(GAPS, NUMBERS)),
    "one likelihood": Scene(ng.Masked(ng.Bernoulli()), BITS, count_bits),
    "weights": Scene(ng.Categorical(), LABELS, lambda out: count_classes(out, W), W),
    "weights of all heads": Scene(ng.Heads(CLASSES, MASKED_REALS), (LABELS, BROKEN), heads(LABELS, BROKEN, (W, W)), W),
    "weights of a head": Scene(
        ng.Heads(MASKED_CLASSES, REALS), (GAPS, NUMBERS), heads(GAPS, NUMBERS, (W, None)), (W, None)
    ),
    "a mask as weights": Scene(GIVEN, (LABELS, NUMBERS), heads(GAPS, NUMBERS), (GAPS >= 0, None)),
}


def define(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its gradient and G = J^T H J by definition: H is the loss's Hessian in all outputs."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def outputs_at(vector: Tensor) -> Tensor:
        parts = vector.split([p.numel() for p in params.values()])
        named = {name: part.view_as(p) for (name, p), part in zip(params.items(), parts, strict=True)}
        return functional_call(model, named, (x,)).reshape(-1)

    theta = torch.cat([p.reshape(-1) for p in params.values()])
    outputs, jacobian = outputs_at(theta), torch.autograd.functional.jacobian(outputs_at, theta)
    of_outputs = lambda flat: loss(flat.view(len(x), -1))  # noqa: E731
    slope = torch.autograd.functional.jacobian(of_outputs, outputs)
    hessian = torch.autograd.functional.hessian(of_outputs, outputs)
    return of_outputs(outputs), jacobian.mT @ slope, jacobian.mT @ hessian @ jacobian


@pytest.mark.parametrize(("recipe", "name"), cross([ng.kfac], [ng.ekfac, ng.hessian_free, ng.online_ng], DATA))
def test_loss_and_gradient_are_those_of_what_is_there(recipe: Any, name: str):
    scene, model = DATA[name], mlp(3, 4, 5)
    value, gradient, _ = define(model, X, scene.loss)
    opt = recipe(model, scene.criterion)
    loss = opt.loss(model(X), scene.targets, weight=scene.weight)
    loss.backward()
    assert_close(loss.detach(), value, 1e-13)
    assert_close(flat_gradient(model), gradient, 1e-12)
    opt.step()
    assert opt.state_report().loss == pytest.approx(float(value), rel=1e-12)
    with torch.no_grad():
        assert_close(opt.loss(model(X), scene.targets, weight=scene.weight), scene.loss(model(X)), 1e-13)


FLAT: dict[str, Callable[..., Any]] = {
    metric.__name__: lambda m, c, metric=metric, **o: ng.NaturalGradient(m, metric(m, c), solver=ng.Direct(), **o)
    for metric in (ng.fisher, ng.gauss_newton)
} | {"hessian_free": partial(ng.hessian_free, solver=ng.CG(1e-13, 500))}


@pytest.mark.parametrize(("build", "name"), [*(("gauss_newton", name) for name in DATA), *pair(FLAT, DATA)])
def test_the_flat_step_is_that_of_the_weighted_metric(build: str, name: str):
    scene, model = DATA[name], mlp(3, 4, 5)
    before, (_, gradient, dense) = flat(model), define(model, X, scene.loss)
    opt = FLAT[build](model, scene.criterion, lr=1.0, damping=ng.Constant(0.1), rule=ng.Rate())
    opt.loss(model(X), scene.targets, weight=scene.weight).backward()
    opt.step()
    expected = -torch.linalg.solve(dense + 0.1 * torch.eye(len(dense)).to(dense), gradient)
    assert_close(flat(model) - before, expected, 1e-8)


@pytest.mark.parametrize("name", [name for name, scene in DATA.items() if scene.weight is None])
def test_a_metric_of_data_with_gaps_is_the_definition(name: str):
    scene, model = DATA[name], mlp(3, 4, 5)
    dense = define(model, X, scene.loss)[2]
    metric = ng.gauss_newton(model, scene.criterion).at(trainable(model), (X, scene.targets))
    assert_close(metric.dense(), dense, 1e-12)
    assert_close(metric @ flat(model), dense @ flat(model), 1e-12)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_a_block_is_the_weighted_metric_where_factors_are_exact(recipe: Any, name: str):
    # one input for all rows: the mean of a Kronecker product is the product of the means
    scene, layer = DATA[name], build_seeded(partial(nn.Linear, 3, 5, bias=False))
    x = X[:1].expand(6, 3)
    dense = define(layer, x, scene.loss)[2]
    opt = recipe(layer, scene.criterion, **EXACT)
    opt.loss(layer(x), scene.targets, weight=scene.weight).backward()
    (block,) = blocks_of(opt)
    assert_close(metric_of(opt, block).dense(), dense, 1e-9)


@pytest.mark.parametrize("name", DATA)
def test_a_diagonal_is_that_of_the_weighted_metric(name: str):
    scene, model = DATA[name], mlp(3, 4, 5)
    expected = define(model, X, scene.loss)[2].diagonal()
    opt = ng.diagonal(model, scene.criterion, **EXACT)
    opt.loss(model(X), scene.targets, weight=scene.weight).backward()
    found = {}
    for block in blocks_of(opt):
        matrix = metric_of(opt, block).diagonal().view(block.layout.matrix_shape)[0]
        found |= {block.layout.names[0]: matrix[:, : matrix.shape[1] - (len(block.layout.names) > 1)]}
    sizes = [p.numel() for p in model.parameters()]
    parts = dict(zip(trainable(model), expected.split(sizes), strict=True))
    for key, matrix in found.items():
        assert_close(matrix.reshape(-1), parts[key], 1e-10)


@pytest.mark.parametrize("name", DATA)
def test_a_measured_step_ends_at_the_minimum_of_the_weighted_model(name: str):
    scene, layer = DATA[name], build_seeded(partial(nn.Linear, 3, 5))
    before, (_, gradient, dense) = flat(layer), define(layer, X, scene.loss)
    rule = MeasuredLength(math.inf, math.inf)
    opt = ng.kfac(layer, scene.criterion, damping=1e-3, rule=rule, **EXACT)
    opt.loss(layer(X), scene.targets, weight=scene.weight).backward()
    opt.step()
    step = flat(layer) - before
    if opt.state_report().rate < 1:  # at 1, the step is the damped one of the blocks
        assert_close(-step @ gradient, step @ dense @ step, 1e-7)
    assert step @ dense @ step <= -step @ gradient * (1 + 1e-7)


def test_positions_may_be_missing_in_a_part_of_the_batch():
    model, x = build_seeded(partial(nn.Linear, 3, 5)), draw(6, 4, 3)
    labels, criterion = torch.where(x[..., 0] > 0, x.argmax(2), -100), ng.Masked(ng.Categorical())
    own = ng.kfac(model, criterion).loss(model(x), labels, weight=W)
    each = functional.cross_entropy(model(x).movedim(2, 1), labels, reduction="none") * W.unsqueeze(1)
    assert_close(own.detach(), (each.sum() / ((labels >= 0) * W.unsqueeze(1)).sum()).detach(), 1e-13)
    opt = ng.hessian_free(model, criterion, metric_batch=2, search_batch=3)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        losses.append(opt.loss(model(x), labels, weight=W))
        losses[-1].backward()
        opt.step()
    assert losses[-1].item() < losses[0].item()
    assert opt.state_report().failures == 0


@pytest.mark.parametrize(
    "criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), ng.Masked(ng.Categorical())]
)
def test_parts_are_drawn_again_as_a_whole_where_no_target_of_theirs_counts(criterion: Any):
    model, x = build_seeded(partial(nn.Linear, 3, 4)), draw(40, 3)
    labels = torch.where(torch.arange(40) % 20 == 0, 1, -100)
    opt = ng.hessian_free(model, criterion, metric_batch=3, search_batch=3)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        losses.append(opt.loss(model(x), labels))
        losses[-1].backward()
        opt.step()
    assert losses[-1].item() < 0.5 * losses[0].item()
    assert opt.state_report().failures == 0


def test_an_empirical_metric_is_of_the_scores_that_are_there():
    scene, model = DATA["of both heads"], mlp(3, 4, 5)
    metric = ng.empirical_fisher(model, scene.criterion).at(trainable(model), (X, scene.targets))
    there = ~BROKEN.isnan()
    shares = torch.cat([(GAPS >= 0).double().unsqueeze(1).expand(6, 3) / 3, 2 * there.double() / there.sum()], 1)
    outputs = model(X)
    heads = [(outputs[:, :3].softmax(1) - functional.one_hot(GAPS.clamp(min=0), 3)), 4 * (outputs[:, 3:] - NUMBERS)]
    scores = torch.cat(heads, 1) * shares.sqrt()
    rows = [torch.autograd.grad(outputs[i], list(model.parameters()), scores[i], retain_graph=True) for i in range(6)]
    root = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    assert_close(metric.dense(), root.mT @ root, 1e-12)


def test_heads_may_take_turns_and_a_batch_without_any_target_is_left_out():
    model, nothing = mlp(3, 4, 5), torch.full((6, 2), torch.nan, dtype=torch.float64)
    opt, before = ng.kfac(model, MASKED), flat(model)
    iterate(opt, model, X, (NONE, nothing))
    assert torch.equal(flat(model), before)
    assert opt.state_report().failures == 1
    start = MASKED.nll(model(X), (LABELS, NUMBERS)).mean().item()
    train_batches(opt, model, [(X, (LABELS, nothing)), (X, (NONE, NUMBERS))] * 20)
    assert MASKED.nll(model(X), (LABELS, NUMBERS)).mean().item() < start - 0.5


def tell(criterion: Any, targets: Any, weight: Any = None) -> Callable[[], Any]:
    return lambda: ng.kfac(model := mlp(3, 5), criterion).loss(model(X), targets, weight=weight)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a weight per output": (
        tell(ng.Categorical(), LABELS, torch.ones(6, 5)),
        ValueError,
        r"weight has shape \(6, 5\), expected \(6,\)",
    ),
    "a negative weight": (tell(ng.Categorical(), LABELS, -W), ValueError, "weight has entries down to -3"),
    "a list": (tell(ng.Categorical(), LABELS, [1.0] * 6), TypeError, "weight is list"),
    "weights of a loss of torch": (
        tell(nn.CrossEntropyLoss(), LABELS, W),
        ValueError,
        r"ng.Categorical\(\) for nn.CrossEntropyLoss",
    ),
    "a function of one's own": (
        lambda: ng.likelihood(functional.cross_entropy, ng.Masked(ng.Categorical())),
        ValueError,
        "give the optimizer the likelihood itself",
    ),
    "a part of a row": (
        lambda: ng.Masked(ng.DiagonalGaussian()).nll(draw(6, 4), BROKEN),
        ValueError,
        "missing in a part of a row",
    ),
    "a loss of torch": (lambda: ng.Masked(nn.CrossEntropyLoss()), TypeError, "ignore_index="),  # type: ignore[arg-type]
    "a gap where none may be": (
        tell(ng.Heads(CLASSES, MASKED_REALS), (GAPS, BROKEN)),
        ValueError,
        "class numbers from 0 to 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_weighted_is_refused(name: str):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


class Pooled(nn.Module):
    """A sequence (b, t, d) to logits (b, 3) by its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.last = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.each(x).tanh().mean(1))


COUNTED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP": (lambda: mlp(3, 4, 3), draw(24, 3, seed=5)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
        draw(24, 2, 5, 5, seed=6),
    ),
    "sequences": (Pooled, draw(24, 5, 3, seed=7)),
}
TIMES = torch.tensor([1, 3, 0, 2]).repeat(6)
KINDS = torch.tensor([0, 2, 1, 1, 2, 0]).repeat(4)


LOW_RANK = ng.OnlineLowRank(0.95, rank_in=2, rank_out=2, **EXACT)
FACTORS: dict[str, Callable[..., Any]] = {
    "kfac": partial(ng.kfac, **EXACT),
    "ekfac": partial(ng.ekfac, **EXACT),
    "low rank": lambda model, criterion, **options: ng.StructuredNaturalGradient(model, criterion, LOW_RANK, **options),
}


@pytest.mark.parametrize("rule", [SpectralDescent(), MeasuredLength(), ng.Rate()])
@pytest.mark.parametrize(("recipe", "name"), pair(FACTORS, COUNTED))
def test_a_weight_of_n_is_n_examples_and_an_ignored_row_is_none(recipe: str, name: str, rule: Any):
    build, x = COUNTED[name]

    def train(x: Tensor, criterion: Any, targets: Tensor, **options: Any) -> Tensor:
        model = build_seeded(lambda: build().double())
        opt = FACTORS[recipe](model, criterion, lr=0.1, rule=rule)
        for _ in range(4):
            opt.zero_grad()
            opt.loss(model(x), targets, **options).backward()
            opt.step()
        return flat(model)

    weighed = train(x, ng.Categorical(), KINDS, weight=TIMES.double())
    assert_close(weighed, train(x.repeat_interleave(TIMES, 0), ng.Categorical(), KINDS.repeat_interleave(TIMES)), 1e-9)
    ignored = train(x, nn.CrossEntropyLoss(), KINDS.masked_fill(TIMES != 1, -100))
    assert_close(ignored, train(x[TIMES == 1], nn.CrossEntropyLoss(), KINDS[TIMES == 1]), 1e-9)


# Several processes: the labels of a head may all be on one of them, and the errors of one may be larger

ROWS = draw(40, 3, seed=4)
MANY = torch.where(torch.arange(40) % 3 == 0, ROWS.argmax(1), -100)
MANY[20:] = -100  # no label on the second half
WIDE = (ROWS[:, :2] * 2).masked_fill(torch.arange(40).unsqueeze(1) % 4 > 1, torch.nan)
WIDE[:8] = torch.nan
SHARE = 1 + torch.arange(40, dtype=torch.float64) % 5
PARTS = ((20, 20), (28, 12), (40, 0), (8, 32))


FAR = 100.0 * torch.cat([ROWS[:8] + ROWS[:8].sign(), ROWS[8:].tanh()]) @ torch.eye(3, 5, dtype=torch.float64)


def train_jointly(
    recipe: Callable[..., Any], weighted: bool = False, criterion: Any = None, **options: Any
) -> dict[str, Any]:
    """Steps on all rows, cut in another way at each."""
    model = mlp(3, 4, 5)
    outer = wrap_model(model)
    opt = recipe(outer, criterion or MASKED, **options)
    for sizes in PARTS:
        own = take_part(sizes)
        opt.zero_grad()
        targets = FAR[own] if criterion else (MANY[own], WIDE[own])
        loss = opt.loss(outer(ROWS[own]), targets, weight=SHARE[own] if weighted else None)
        loss.backward()
        opt.step()
    report = opt.state_report()
    return {"flat": flat(model), "loss": report.loss, "kl": report.kl}


JUDGED: Any = {"damping": ng.LevenbergMarquardt(0.1, per="block"), "rule": MeasuredLength()}
SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "kfac": partial(train_jointly, ng.kfac, **EXACT),
    "kfac, judged": partial(train_jointly, ng.kfac, **EXACT, **JUDGED),
    "ekfac, weights": partial(train_jointly, ng.ekfac, weighted=True, **EXACT),
    "unitwise, weights, judged": partial(train_jointly, ng.unitwise, weighted=True, **EXACT, **JUDGED),
    "CG": partial(train_jointly, ng.hessian_free, solver=ng.CG(1e-13, 500)),
    "CG, weights": partial(train_jointly, ng.hessian_free, weighted=True, solver=ng.CG(1e-13, 500)),
    "kfac, sizes of errors": partial(train_jointly, ng.kfac, criterion=nn.L1Loss(), **EXACT),
    "kfac, Huber, judged": partial(train_jointly, ng.kfac, criterion=nn.HuberLoss(delta=2.0), **EXACT, **JUDGED),
    "kfac, summed": partial(train_jointly, ng.kfac, criterion=nn.SmoothL1Loss(reduction="sum"), **EXACT),
    "CG, sizes of errors": partial(train_jointly, ng.hessian_free, criterion=nn.L1Loss(), solver=ng.CG(1e-13, 500)),
}


@needs_gloo
@pytest.mark.parametrize("name", SCENES)
def test_two_processes_step_as_one_with_all_rows(tmp_path_factory: pytest.TempPathFactory, name: str):
    two = run_ranks(__name__, 2, tmp_path_factory)
    assert_joined([rank[name] for rank in two], SCENES[name](), 1e-8)
