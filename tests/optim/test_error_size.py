"""Regressions in units of their own: bounds count in the size of the errors, and the last layers may grow as large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_state import state_of
from optim_models import train_batches
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import Huber, Laplace, as_criterion
from natgrad.optim.state import ErrorSize, trace_reshapes
from natgrad.rules import ErrorScale, SpectralDescent

MSE = nn.MSELoss()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def targets(x: Tensor) -> Tensor:
    return torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_targets_in_any_unit_are_learnt(scale: float) -> None:
    x, model = draw(128, 4), dense()
    y = scale * (targets(x) + 3)
    losses = train_batches(ng.kfac(model, MSE), model, [(x, y)] * 40)
    assert losses[-1] < 0.5 * float(y.var())  # the mean alone leaves all of it


def test_spectral_steps_of_the_last_layer_are_as_long_as_the_errors_are_large() -> None:
    moved = list[Tensor]()
    for scale in (1.0, 1e3):
        x, model = draw(64, 4), dense()
        start = [p.detach().clone() for p in model.parameters()]
        train_batches(ng.kfac(model, MSE, rule=SpectralDescent(kl_share=1e6)), model, [(x, scale * (targets(x) + 3))])
        moved.append(torch.stack([(p.detach() - q).norm() for p, q in zip(model.parameters(), start, strict=True)]))
    hidden, last = (moved[1] / moved[0]).split(2)
    torch.testing.assert_close(hidden, torch.ones(2), atol=0.2, rtol=0)
    assert bool((last > 300).all())


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1).view(-1, 1)


class Halved(Squeezed):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / 2


@pytest.mark.parametrize(
    ("model", "names", "entries", "criterion"),
    [
        (dense(), ("2.weight", "2.bias"), 1, nn.L1Loss()),
        (dense(), ("2.weight", "2.bias"), 1, nn.HuberLoss(delta=2.0)),
        (dense(), ("2.weight", "2.bias"), 1, MSE),
        (dense(3), ("2.weight", "2.bias"), 1, MSE),
        (dense(3), ("2.weight", "2.bias"), 3, ng.Gaussian()),
        (Squeezed(), ("net.2.weight", "net.2.bias"), 1, MSE),
        (Halved(), (), 1, MSE),
    ],
)
def test_layers_whose_outputs_are_the_models_are_found(
    model: nn.Module, names: tuple[str, ...], entries: int, criterion: Any
) -> None:
    opt = ng.kfac(model, criterion)
    x = draw(8, 4)
    train_batches(opt, model, [(x, draw(*model(x).shape))])
    found = state_of(opt).hearing.errors
    assert found == ErrorSize(names, entries, opt.criterion.errors)
    assert ErrorSize.load(found.save(), opt.criterion) == found


def test_only_regressions_have_errors_with_a_size() -> None:
    model = dense(3)
    opt = ng.kfac(model, nn.CrossEntropyLoss())
    train_batches(opt, model, [(draw(8, 4), torch.arange(8) % 3)])
    assert state_of(opt).hearing.errors is None
    assert trace_reshapes(draw(2)) == []


def test_size_of_errors_is_in_two_standard_deviations_and_at_least_one() -> None:
    family = as_criterion(MSE).family
    errors = 100 * draw(50, 1)
    nll = float(family.nll(errors, torch.zeros(50, 1)).mean() - family.nll(errors[:1], errors[:1]))
    width = 0.5**0.5  # of the Gaussian that MSELoss stands for
    assert ErrorSize((), 1).scale(nll).size == pytest.approx(float(errors.square().mean().sqrt()) / width / 2)
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
    x, model = draw(64, 4), dense()
    opt = ng.kfac(model, MSE, max_kl=0.5)
    for _ in range(8):
        train_batches(opt, model, [(x, 1e3 * targets(x))])
        assert opt.state_report().kl <= 0.5


def test_resumed_run_knows_the_size_of_errors() -> None:
    x = draw(64, 4)
    y = 1e3 * (targets(x) + 3)
    model = dense()
    opt = ng.kfac(model, MSE, update_every=20)
    train_batches(opt, model, [(x, y)] * 12)
    twin = dense()
    twin.load_state_dict(model.state_dict())
    other = ng.kfac(twin, MSE, update_every=20)
    other.load_state_dict(opt.state_dict())
    assert train_batches(opt, model, [(x, y)] * 3) == train_batches(other, twin, [(x, y)] * 3)
