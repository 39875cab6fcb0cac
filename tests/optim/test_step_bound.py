"""How far a step moves the model: 1/2 d^T F d on the step's own batch, by plain automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models import Assembled, Sequence, cross, draw, mlp, pair
from optim_models import BLOCK_RECIPES, X, Y, net, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import ErrorScale, LayerFacts, Quadratic, RunFacts, Step
from natgrad.rules.quadratic import FlatStep, hold_kl

RECIPES: dict[str, Callable[..., Any]] = {recipe.__name__: recipe for recipe in BLOCK_RECIPES}
CE = nn.CrossEntropyLoss()


def moved_nats(model: nn.Module, outputs: Tensor, step: dict[str, Tensor], criterion: nn.Module) -> float:
    """1/2 d^T F d per example, from the outputs of the step's own pass. step: by name.

    J d by two backward passes: u^T J is linear in u, and its derivative along d is J d.
    """
    parameters = dict(model.named_parameters())
    u = torch.zeros_like(outputs, requires_grad=True)
    back = torch.autograd.grad(outputs, list(parameters.values()), u, create_graph=True)
    inner = sum((g * step[name]).sum() for name, g in zip(parameters, back, strict=True))
    (change,) = torch.autograd.grad(inner, u)  # J d
    outputs = outputs.detach()
    if isinstance(criterion, nn.CrossEntropyLoss):
        p, change = outputs.movedim(1, -1).softmax(-1), change.movedim(1, -1)
        form = (p * change.square()).sum(-1) - (p * change).sum(-1).square()
        return float(form.sum() / (2 * form.numel()))  # an event is a place, such as a token
    if isinstance(criterion, nn.BCEWithLogitsLoss):
        form = outputs.sigmoid() * (1 - outputs.sigmoid()) * change.square()
    else:  # nn.MSELoss: N(outputs, 1/2)
        form = 2 * change.square()
    return float(form.sum() / (2 * len(outputs)))


@cache
def rows() -> tuple[Tensor, Tensor]:
    """Standard normal rows (512, 36), and three classes that a linear rule gives in most cases."""
    x = draw(512, 36, seed=1).float()
    logits = x @ draw(36, 3, seed=2).float()
    return x, (logits + 3 * draw(512, 3, seed=3)).argmax(1)


def values() -> tuple[Tensor, Tensor]:
    """Two smooth functions of the rows with noise."""
    x = rows()[0]
    return x, torch.tanh(x[:, :2] + x[:, 2:4]) + 0.5 * draw(512, 2, seed=2).float()


def coins() -> tuple[Tensor, Tensor]:
    """Signs, as their own targets."""
    x = (rows()[0][:, :4] @ draw(4, 12, seed=2).float() > 0).float()
    return x, x


def tokens() -> tuple[Tensor, Tensor]:
    """Symbols, and at every place the one before."""
    x = torch.randint(5, (512, 6), generator=torch.Generator().manual_seed(2))
    return x, (x.roll(1, 1) + x) % 5


def read_tokens() -> nn.Module:
    """Logits as (b, classes, t)."""
    return Assembled(lambda m, x: m.inner(x).mT, inner=Sequence())


def see_images() -> nn.Module:
    """A convolution with batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)
    )


Case = tuple[Callable[[], nn.Module], nn.Module, Callable[[], tuple[Tensor, Tensor]]]
CASES: dict[str, Case] = {
    "classes": (lambda: mlp(36, 16, 16, 3).float(), CE, rows),
    "values": (lambda: mlp(36, 16, 16, 2).float(), nn.MSELoss(), values),
    "coins": (lambda: mlp(12, 16, 3, 16, 12).float(), nn.BCEWithLogitsLoss(), coins),
    "images": (see_images, CE, lambda: (rows()[0].view(-1, 1, 6, 6), rows()[1])),
    "tokens": (read_tokens, CE, tokens),
}


@cache
def nats_of_steps(recipe: Callable[..., Any], case: str, seed: int, steps: int, **choices: Any) -> Tensor:
    """1/2 d^T F d of every step of 32 rows, (steps,)."""
    build, criterion, data = CASES[case]
    torch.manual_seed(seed)
    (x, y), model, twin = data(), build(), build().double()
    opt, found, generator = recipe(model, criterion, **choices), [], torch.Generator().manual_seed(seed)
    for _ in range(steps):
        picked = torch.randint(len(x), (32,), generator=generator)
        twin.load_state_dict(model.state_dict())  # which no optimizer listens to
        outputs = twin(x[picked].double() if x.is_floating_point() else x[picked])
        opt.zero_grad()
        opt.loss(model(x[picked]), y[picked]).backward()
        opt.step()
        before = dict(twin.named_parameters())
        step = {name: p.detach().double() - before[name].detach() for name, p in model.named_parameters()}
        found.append(moved_nats(twin, outputs, step, criterion))
    return torch.tensor(found)


def test_the_measure_is_the_definition():
    model, x = mlp(3, 4, 3), draw(5, 3)
    step = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    matrix = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), x).dense()
    vector = torch.cat([d.flatten() for d in step.values()])
    assert moved_nats(model, model(x), step, CE) == pytest.approx(float(vector @ matrix @ vector / 2), rel=1e-10)


# What does not hold yet: (optimizer, network).
OPEN = {("diagonal", "coins"), ("unitwise", "classes"), ("unitwise", "coins"), ("tonga", "coins")}


SHOWN = [(name, case) for name, case in cross(["kfac"], [n for n in RECIPES if n != "kfac"], CASES)]


@pytest.mark.parametrize(("name", "case"), [pair for pair in SHOWN if pair not in OPEN])
def test_no_step_moves_far_by_default(name: str, case: str) -> None:
    limit = {"classes": 1.0, "images": 1.0, "tokens": 1.0, "values": 2.0, "coins": 4.0}[case]
    assert float(nats_of_steps(RECIPES[name], case, 0, 12).max()) < limit


@pytest.mark.parametrize("case", CASES)
def test_a_tight_bound_on_the_kl_means_short_steps(case: str) -> None:
    """And none beyond it on its own batch."""
    narrow = float(nats_of_steps(ng.kfac, case, 0, 12, max_kl=1e-3).max())
    assert 0 < narrow <= 1e-3
    assert narrow < float(nats_of_steps(ng.kfac, case, 0, 12).max())


@pytest.mark.parametrize(("name", "case"), pair(RECIPES, ["coins", "images"]))
def test_every_optimizer_keeps_the_bound_on_its_own_batch(name: str, case: str) -> None:
    assert float(nats_of_steps(RECIPES[name], case, 1, 12, max_kl=1e-2).max()) <= 1e-2


@pytest.mark.parametrize("seed", range(3))
def test_the_slope_tells_the_least_that_a_step_moves(seed: int) -> None:
    """(g . d)^2 <= 2 loss d^T G d for squared errors, by Cauchy and Schwarz; equal where J d goes along the errors."""
    torch.manual_seed(seed)
    model, (x, y) = nn.Linear(4, 2).double(), (torch.randn(9, 4).double(), torch.randn(9, 2).double())
    metric, loss = ng.fisher(model, nn.MSELoss()).at(ng.trainable(model), x), nn.MSELoss()(model(x), y)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    for step in (torch.randn_like(gradient), -torch.linalg.solve(metric.dense(), gradient)):
        proposal, errors = FlatStep(step, metric.mv(step)), ErrorScale(squares=True)
        quadratic = Quadratic(
            gradient, metric, 0.0, proposal, 2.0, max(loss.detach(), torch.tensor(0.5)), RunFacts(errors=errors)
        )
        assert 0 < float(quadratic.least_kl(proposal)) <= float(quadratic.kl(proposal)) * (1 + 1e-12)


def test_a_step_whose_slope_is_steep_is_measured_though_its_estimate_is_small() -> None:
    """The blocks may know nothing of what a batch is sensitive to: a step of 36,000 nats was taken for one of .005."""
    gradient, step = torch.tensor([3.0, 0.0]), torch.tensor([-2.0, 1.0])
    proposal, asked = FlatStep(step, 1e-6 * step), list[Step]()

    def exact(found: Step) -> Step:
        asked.append(found)
        return FlatStep(step, 100.0 * step)

    steep = Quadratic(gradient, None, 0.0, proposal, loss=1.0, layers=LayerFacts(exact=exact, doubt=5.0))
    assert float(steep.kl(hold_kl(steep, proposal, 1.0))) == pytest.approx(0.98)
    assert len(asked) == 1
    flat = Quadratic(0.01 * gradient, None, 0.0, proposal, loss=1.0, layers=LayerFacts(exact=exact, doubt=5.0))
    assert hold_kl(flat, proposal, 1.0) is proposal
    unknown = replace(steep, layers=LayerFacts(exact=lambda _: None, doubt=5.0))  # 1/2 (3 * 2)^2 * 5 nats at most
    assert float(hold_kl(unknown, proposal, 1.0).vector.norm() / step.norm()) == pytest.approx((0.98 / 90) ** 0.5)


@pytest.mark.parametrize("take", [lambda out: out[:, :3], lambda out: torch.tanh(out)[:, :3]])
def test_a_loss_on_a_part_of_the_outputs_keeps_the_bound(take: Callable[[Tensor], Tensor]) -> None:
    """Which part is read off the graph; a nonlinear function of the outputs is not known, and steps are shorter."""
    (x, y), most = rows(), 1e-3
    model, twin = mlp(36, 16, 5).float(), mlp(36, 16, 5).float()
    opt = ng.kfac(model, CE, max_kl=most)
    for start in range(0, 256, 32):
        twin.load_state_dict(model.state_dict())
        opt.zero_grad()
        opt.loss(take(model(x[start:][:32])), y[start:][:32]).backward()
        opt.step()
        before = dict(twin.named_parameters())
        step = {name: p.detach() - before[name].detach() for name, p in model.named_parameters()}
        assert 0 < moved_nats(twin, take(twin(x[start:][:32])), step, CE) < most


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_one_head_takes_the_steps_of_its_likelihood(recipe: Any):
    """The bound of both is a share of the loss, which cannot be negative; here it is far from one nat."""
    runs = list[list[float]]()
    for family in (ng.Categorical(), ng.Heads((ng.Categorical(), 3))):
        heads = isinstance(family, ng.Heads)
        inner = net()
        model = Assembled(lambda m, x, heads=heads: [20 * m.inner(x)] if heads else 20 * m.inner(x), inner=inner)
        runs.append(train(recipe(model, family, rule=ng.MeasuredLength()), model, 6, X, [Y] if heads else Y))
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
