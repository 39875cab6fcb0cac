"""Regressions in units of their own: bounds count in the size of the errors, and the last layers may grow as large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_state import state_of
from models import Assembled, assert_close, cross, draw, mlp
from optim_models import flat, train_batches
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import Huber, Laplace, as_criterion
from natgrad.optim.state import ErrorSize, trace_reshapes
from natgrad.rules import ErrorScale, SpectralDescent

MSE = nn.MSELoss()


def draw_single(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).float()


def dense(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def build_around(run: Callable[[Tensor], Tensor]) -> nn.Module:
    """Something of a network's outputs."""
    return Assembled(lambda m, x: run(m.net(x)), net=dense())


def targets(x: Tensor) -> Tensor:
    return torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def test_spectral_steps_of_the_last_layer_are_as_long_as_the_errors_are_large() -> None:
    moved = list[Tensor]()
    for scale in (1.0, 1e3):
        x, model = draw_single(64, 4), dense()
        start = [p.detach().clone() for p in model.parameters()]
        train_batches(ng.kfac(model, MSE, rule=SpectralDescent(kl_share=1e6)), model, [(x, scale * (targets(x) + 3))])
        moved.append(torch.stack([(p.detach() - q).norm() for p, q in zip(model.parameters(), start, strict=True)]))
    hidden, last = (moved[1] / moved[0]).split(2)
    torch.testing.assert_close(hidden, torch.ones(2), atol=0.2, rtol=0)
    assert bool((last > 300).all())


@pytest.mark.parametrize(
    ("model", "names", "entries", "criterion"),
    [
        (dense(), ("2.weight", "2.bias"), 1, nn.L1Loss()),
        (dense(), ("2.weight", "2.bias"), 1, nn.HuberLoss(delta=2.0)),
        (dense(), ("2.weight", "2.bias"), 1, MSE),
        (dense(3), ("2.weight", "2.bias"), 1, MSE),
        (dense(3), ("2.weight", "2.bias"), 3, ng.Gaussian()),
        (build_around(lambda out: out.squeeze(-1).view(-1, 1)), ("net.2.weight", "net.2.bias"), 1, MSE),
        (build_around(lambda out: out / 2), (), 1, MSE),
    ],
)
def test_layers_whose_outputs_are_the_models_are_found(
    model: nn.Module, names: tuple[str, ...], entries: int, criterion: Any
) -> None:
    opt = ng.kfac(model, criterion)
    x = draw_single(8, 4)
    train_batches(opt, model, [(x, draw_single(*model(x).shape))])
    found = state_of(opt).hearing.errors
    assert found == ErrorSize(names, entries, opt.criterion.errors)
    assert ErrorSize.load(found.save(), opt.criterion) == found


def test_only_regressions_have_errors_with_a_size() -> None:
    model = dense(3)
    opt = ng.kfac(model, nn.CrossEntropyLoss())
    train_batches(opt, model, [(draw_single(8, 4), torch.arange(8) % 3)])
    assert state_of(opt).hearing.errors is None
    assert trace_reshapes(draw_single(2)) == []


def test_size_of_errors_is_in_two_standard_deviations_and_at_least_one() -> None:
    family = as_criterion(MSE).family
    errors = 100 * draw_single(50, 1)
    nll = float(family.nll(errors, torch.zeros(50, 1)).mean() - family.nll(errors[:1], errors[:1]))
    width = 0.5**0.5  # of the Gaussian that MSELoss stands for
    assert ErrorSize((), 1).scale(nll).size == pytest.approx(float(errors.square().mean().sqrt()) / width / 2)
    assert ErrorSize((), 3).scale(3 * nll) == ErrorSize((), 1).scale(nll)  # of three outputs
    for loss in (0.0, 1e-3, -5.0, float("nan"), float("inf")):
        assert ErrorSize(("a",), 1).scale(loss) == ErrorScale(1.0, ("a",), squares=True)


@pytest.mark.parametrize("family", [Laplace(0.5), Huber(0.3), Huber(3.0, 2.0), ng.Gaussian(2.0)], ids=repr)
def test_an_error_is_told_by_what_it_adds_to_the_loss(family: Any) -> None:
    """In units of 1 / sqrt(Fisher), where squares end and beyond."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    for error in (0.1, 1.0, 40.0):
        nats = float(family.nll(zero + error, zero) - family.nll(zero, zero))
        expected = error * float(family.curvature(zero)) ** 0.5
        assert family.error_of(nats) == pytest.approx(expected, rel=1e-9)


def test_bound_that_was_asked_for_is_in_nats() -> None:
    x, model = draw_single(64, 4), dense()
    opt = ng.kfac(model, MSE, max_kl=0.5)
    for _ in range(8):
        train_batches(opt, model, [(x, 1e3 * targets(x))])
        assert opt.state_report().kl <= 0.5


# losses of absolute errors and of class probabilities train under every recipe, in units of their own too


LOSSES: list[nn.Module] = [nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(delta=0.5)]
LOSSES += [nn.KLDivLoss(reduction=reduction) for reduction in ("batchmean", "sum", "mean")]
ROWS = draw(64, 4)
SMOOTH = torch.sin(ROWS @ draw(4, 2, seed=1))


def train_falling(recipe: Any, model: nn.Module, criterion: Any, targets: Tensor, steps: int) -> list[float]:
    """The losses of some steps on all data, with a falling rate."""
    opt = recipe(model, criterion)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / steps)
    losses = []
    for _ in range(steps):
        losses += train_batches(opt, model, [(ROWS, targets)])
        schedule.step()
    return losses


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(
    ("recipe", "criterion"),
    cross([ng.kfac], [ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng], LOSSES),
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_errors_and_divergences_fall_under_every_recipe(recipe: Any, criterion: nn.Module):
    distils = isinstance(criterion, nn.KLDivLoss)
    model = mlp(4, 16, 2)
    model = nn.Sequential(model, nn.LogSoftmax(dim=-1)) if distils else model
    targets, steps = ((3 * SMOOTH).softmax(1), 40) if distils else (SMOOTH, 20)
    losses = train_falling(recipe, model, criterion, targets, steps)
    assert losses[-1] < (0.2 if distils else 0.5) * losses[0]


def test_a_divergence_takes_the_steps_of_soft_cross_entropy():
    """Same gradient and metric; without a bound that is a share of the loss, the same steps."""
    logits, soft, targets = mlp(4, 16, 2), nn.Sequential(mlp(4, 16, 2), nn.LogSoftmax(dim=-1)), (3 * SMOOTH).softmax(1)
    criteria = (nn.CrossEntropyLoss(), nn.KLDivLoss(reduction="batchmean"))
    for model, criterion in zip((logits, soft), criteria, strict=True):
        train_falling(partial(ng.natgrad_cg, rule=ng.Rate()), model, criterion, targets, 5)
    assert_close(flat(logits), flat(soft), 1e-7)
