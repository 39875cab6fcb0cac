"""`ng.NaturalGradient` with its defaults: no step raises its batch's loss, where the Fisher vanishes far out too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import assert_close
from optim_models import flat
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng


class Linked(nn.Module):
    """Outputs behind a link: of one parameter per example, or of a mean and a variance."""

    def __init__(self, link: Callable[[Tensor], Tensor], width: int, wide: bool, pair: bool) -> None:
        super().__init__()
        outputs = 1 + pair
        self.body = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, outputs)) if wide else None
        self.body = self.body or nn.Linear(5, outputs)
        self.link, self.pair = link, pair
        self.double()

    def forward(self, x: Tensor) -> Any:
        outputs = self.body(x)
        if not self.pair:
            return self.link(outputs)
        mean, spread = outputs.chunk(2, -1)
        return mean, self.link(spread)


class Waiting(ng.Likelihood):
    """Exponential waiting times with the logarithm of their mean as output: Fisher information 1 everywhere."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs + targets * (-outputs).exp()).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return outputs.exp() * torch.empty_like(outputs).exponential_(generator=generator)

    def fisher(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(torch.ones_like(rows))


class Amounts(ng.Likelihood):
    """Gamma of shape 3 with its rate as output: Fisher information 3 / rate^2, which vanishes for large rates."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets * outputs - 3 * outputs.log()).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch._standard_gamma(torch.full_like(outputs, 3.0), generator=generator) / outputs

    def fisher(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(3 / rows.square())


def count(x: Tensor, eta: Tensor, noise: torch.Generator) -> Tensor:
    return torch.poisson(eta.clamp(max=6).exp(), generator=noise)


def measure(x: Tensor, eta: Tensor, noise: torch.Generator) -> Tensor:
    return 10 * eta + torch.randn(eta.shape, dtype=eta.dtype, generator=noise)


def wait(x: Tensor, eta: Tensor, noise: torch.Generator) -> Tensor:
    return eta.exp() * torch.empty_like(eta).exponential_(generator=noise)


def toss(x: Tensor, eta: Tensor, noise: torch.Generator) -> Tensor:
    return (eta + 2 * torch.randn(eta.shape, dtype=eta.dtype, generator=noise) > 3).to(eta.dtype)


def same(outputs: Tensor) -> Tensor:
    return outputs


PROBLEMS: dict[str, tuple[Any, Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "counts, log rates": (nn.PoissonNLLLoss(), same, count),
    "counts behind an exponential": (nn.PoissonNLLLoss(log_input=False), torch.exp, count),
    "counts behind softplus": (nn.PoissonNLLLoss(log_input=False), functional.softplus, count),
    "variances behind an exponential": (nn.GaussianNLLLoss(), torch.exp, measure),
    "variances behind softplus": (nn.GaussianNLLLoss(), functional.softplus, measure),
    "waiting times": (Waiting(), same, wait),
    "amounts behind an exponential": (Amounts(), torch.exp, wait),
    "amounts behind softplus": (Amounts(), functional.softplus, wait),
    "bits that are nearly certain": (nn.BCEWithLogitsLoss(), lambda outputs: 8 * outputs, toss),
}


def train(name: str, wide: bool, seed: int, closed: bool, own: bool, steps: int = 10) -> tuple[list[float], Any]:
    """The losses at the steps, and the optimizer."""
    criterion, link, draw = PROBLEMS[name]
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(100, 5, dtype=torch.float64, generator=generator)
    targets = draw(x, 0.5 * x[:, :1] - x[:, 1:2] / 3 + 2, generator)
    torch.manual_seed(seed)
    model = Linked(link, 8, wide, isinstance(criterion, nn.GaussianNLLLoss))
    opt = ng.NaturalGradient(model, ng.fisher(model, criterion))
    value = opt.loss if own else opt.criterion.value
    losses = list[float]()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = value(model(x), targets)
        loss.backward()
        return loss

    for _ in range(steps):
        loss = opt.step(closure) if closed else closure()
        losses.append(float(loss.detach()))
        if not closed:
            opt.step()
    return losses, opt


@pytest.mark.parametrize("wide", [False, True], ids=["linear", "network"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_step_raises_the_loss_of_its_batch(name: str, wide: bool):
    for seed in range(2):
        losses, opt = train(name, wide, seed, closed=False, own=True)
        assert all(after <= before + 1e-5 * abs(before) for before, after in pairwise(losses))
        assert losses[-1] < losses[0]
        assert opt.state_report().failures == 0


@pytest.mark.parametrize("name", ["counts, log rates", "variances behind softplus"])
def test_a_closure_tells_the_loss_as_well(name: str):
    losses, _ = train(name, False, 1, closed=True, own=False)
    assert all(after <= before + 1e-5 * abs(before) for before, after in pairwise(losses))


@pytest.mark.parametrize("name", ["counts, log rates", "counts behind an exponential", "bits that are nearly certain"])
def test_a_loss_of_ones_own_is_followed_by_the_divergence_of_the_outputs(name: str):
    """-log p(theta + d) = -log p(theta) + g . d + KL(theta, theta + d) for linear natural parameters."""
    losses, _ = train(name, False, 1, closed=False, own=False)
    assert max(losses) == losses[0]


def test_the_divergence_of_counts_with_their_rates_as_outputs_is_its_integral():
    family = ng.families.as_criterion(nn.PoissonNLLLoss(log_input=False)).family
    first, second = (torch.tensor([[rate]], dtype=torch.float64) for rate in (1.7, 0.4))
    counts = torch.arange(60, dtype=torch.float64)
    log_p, log_q = (counts * rate.log() - rate - torch.lgamma(counts + 1) for rate in (first, second))
    assert_close(family.kl(first, second), (log_p.exp() * (log_p - log_q)).sum(1), rtol=1e-7)


def test_least_squares_take_the_whole_step_however_far_they_are():
    """A quadratic loss is solved in one step: nothing is halved."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 2).double(), torch.randn(30, 5, dtype=torch.float64)
    targets = 1e3 * torch.randn(30, 2, dtype=torch.float64)
    opt = ng.NaturalGradient(model, ng.fisher(model, nn.MSELoss()), damping=0.0)
    opt.loss(model(x), targets).backward()
    opt.step()
    ones = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], dim=1)
    best = torch.linalg.lstsq(ones, targets).solution.mT
    assert_close(flat(model), torch.cat([best[:, :5].reshape(-1), best[:, 5]]), rtol=1e-9)
    assert opt.state_report().rate == pytest.approx(1.0)
