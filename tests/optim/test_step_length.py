"""How long a step is: trust region, line search, Levenberg-Marquardt damping."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import Assembled, assert_close, draw, mlp, pair
from optim_models import CE, Closure, X, Y, flat, iterate, net
from optim_models import train as train_net
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng

T = draw(8, 2, seed=5)
MSE = nn.MSELoss()


def true_kl(model: nn.Module, twin: nn.Module, x: Tensor) -> float:
    """KL between the old and the new outputs, nats per example."""
    with torch.no_grad():
        return float(ng.Categorical().kl(twin(x), model(x)).mean())


def test_a_trust_region_moves_its_radius_in_nats() -> None:
    errors = []
    for radius in (1e-4, 1e-6, 1e-8):
        model = net()
        twin = copy.deepcopy(model)
        opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=100.0, damping=0.01, rule=ng.TrustRegion(radius))
        iterate(opt, model, X, Y)
        assert opt.state_report().kl == pytest.approx(radius, rel=1e-10)
        errors.append(abs(true_kl(model, twin, X) / radius - 1))
    # KL is quadratic up to a third-order term: a hundredth of the radius, a tenth of the error
    assert errors[0] < 0.02
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.2)


@pytest.mark.parametrize(
    ("reduction", "own_loss"), [("mean", True), ("mean", False), ("sum", True)]
)  # sums need opt.loss
def test_the_kl_of_an_entrywise_mean_is_in_nats_per_example(own_loss: bool, reduction: str) -> None:
    # MSELoss averages over entries; nats are those of N(outputs, 1/2), summed over the entries of an example
    model, criterion = mlp(3, 4, 2), nn.MSELoss(reduction=reduction)
    twin = copy.deepcopy(model)
    opt = ng.NaturalGradient(model, ng.fisher(model, criterion), lr=1.0, damping=0.01, rule=ng.TrustRegion(1e-7))
    loss = opt.loss(model(X), T) if own_loss else criterion(model(X), T)
    loss.backward()
    opt.step()
    with torch.no_grad():
        kl = float((model(X) - twin(X)).square().sum(1).mean())  # |d|^2 / (2 * 1/2)
    assert opt.state_report().kl == pytest.approx(1e-7, rel=1e-10)
    assert kl == pytest.approx(1e-7, rel=1e-2)


def build_cliff() -> nn.Module:
    """Outputs that are not a number beyond w = 1, as behind a logarithm."""
    return Assembled(
        lambda m, x: x * m.w / (1 - m.w).sqrt() * (1 - m.w).sqrt(),
        w=nn.Parameter(torch.tensor([0.0], dtype=torch.float64)),
    )


def test_a_line_search_steps_back_from_a_cliff() -> None:
    model = build_cliff()
    x = torch.ones(2, 1).double()
    opt = ng.NaturalGradient(model, ng.fisher(model, MSE), lr=1.0, damping=0.0, rule=ng.LineSearch())
    iterate(opt, model, x, 3 * x)  # the full step leads to w = 3, half of it to 1.5, a quarter to 0.75
    assert float(model.w.detach()) == pytest.approx(0.75, rel=1e-12)
    assert opt.state_report().rate == pytest.approx(0.25, rel=1e-12)


def test_a_step_that_ends_in_nan_is_rejected_and_raises_the_damping() -> None:
    model = build_cliff()
    x = torch.ones(2, 1).double()
    opt = ng.NaturalGradient(
        model, ng.fisher(model, MSE), lr=1.0, damping=ng.LevenbergMarquardt(start=0.01), rule=ng.Rate()
    )
    iterate(opt, model, x, 3 * x)
    told = opt.state_report()
    assert float(model.w.detach()) == 0.0
    assert math.isnan(told.ratio)
    assert told.kl == 0.0
    for _ in range(40):
        iterate(opt, model, x, 3 * x)
    assert 0.0 < float(model.w.detach()) < 1.0  # once the damping is high enough, it moves


@pytest.mark.parametrize("lr", [0.1, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("linear_model", [True, False])
def test_on_a_quadratic_the_ratio_is_one_or_one_minus_half_the_rate(lr: float, linear_model: bool) -> None:
    # linear model, squared loss, exact solve, no damping; eq. 30 predicts by the slope alone
    model = mlp(3, 2)
    opt = ng.NaturalGradient(
        model,
        ng.fisher(model, MSE),
        lr=lr,
        solver=ng.Direct(),
        damping=ng.LevenbergMarquardt(start=0.0, floor=0.0, linear_model=linear_model),
    )
    iterate(opt, model, X, T)
    assert opt.state_report().ratio == pytest.approx(1 - lr / 2 if linear_model else 1.0, rel=1e-10)


@pytest.mark.parametrize("start", [1e-4, 1e8])
def test_levenberg_marquardt_recovers_from_absurd_starts(start: float) -> None:
    model = net()
    damping = ng.LevenbergMarquardt(start=start, raise_by=10.0, lower_by=0.1)
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=1.0, damping=damping, rule=ng.LineSearch())
    losses = train_net(opt, model, 26)
    assert losses[-1] < 0.1 * losses[0]
    assert opt.state_report().damping < 1e3


# `ng.NaturalGradient` with its defaults: no step raises its batch's loss, where the Fisher vanishes far out too


class Waiting(ng.Likelihood):
    """Exponential waiting times with the logarithm of their mean as output: Fisher information 1 everywhere."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs + targets * (-outputs).exp()).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return outputs.exp() * torch.empty_like(outputs).exponential_(generator=generator)

    def fisher(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(torch.ones_like(rows))


def toss(eta: Tensor, noise: torch.Generator) -> Tensor:
    return (eta + 2 * torch.randn(eta.shape, dtype=eta.dtype, generator=noise) > 3).to(eta.dtype)


DRAWS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "counts": lambda eta, noise: torch.poisson(eta.clamp(max=6).exp(), generator=noise),
    "variances": lambda eta, noise: 10 * eta + torch.randn(eta.shape, dtype=eta.dtype, generator=noise),
    "waiting times": lambda eta, noise: eta.exp() * torch.empty_like(eta).exponential_(generator=noise),
    "bits": toss,
}
PROBLEMS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {  # a criterion, and the link before it
    "counts, log rates": (nn.PoissonNLLLoss(), lambda outputs: outputs),
    "counts behind an exponential": (nn.PoissonNLLLoss(log_input=False), torch.exp),
    "counts behind softplus": (nn.PoissonNLLLoss(log_input=False), functional.softplus),
    "variances behind an exponential": (nn.GaussianNLLLoss(), torch.exp),
    "variances behind softplus": (nn.GaussianNLLLoss(), functional.softplus),
    "waiting times": (Waiting(), lambda outputs: outputs),
    "bits that are nearly certain": (nn.BCEWithLogitsLoss(), lambda outputs: 8 * outputs),
}


def build_linked(link: Callable[[Tensor], Tensor], wide: bool, pair: bool) -> nn.Module:
    """Outputs behind a link: of one parameter per example, or of a mean and a variance."""

    def run(m: Any, x: Tensor) -> Any:
        outputs = m.body(x)
        return (outputs[:, :1], link(outputs[:, 1:])) if pair else link(outputs)

    return Assembled(run, body=mlp(5, 8, 1 + pair) if wide else mlp(5, 1 + pair))


def train(name: str, wide: bool, seed: int, closed: bool, own: bool, steps: int = 10) -> tuple[list[float], Any]:
    """The losses at the steps, and the optimizer."""
    criterion, link = PROBLEMS[name]
    generator = torch.Generator().manual_seed(seed)
    x = 2 * draw(60, 5, seed=seed)
    (sample,) = [sample for kind, sample in DRAWS.items() if name.startswith(kind)]
    targets = sample(0.5 * x[:, :1] - x[:, 1:2] / 3 + 2, generator)
    model = build_linked(link, wide, isinstance(criterion, nn.GaussianNLLLoss))
    opt = ng.NaturalGradient(model, ng.fisher(model, criterion))
    value = opt.loss if own else opt.criterion.value
    losses = list[float]()
    closure = Closure(opt, lambda: value(model(x), targets))
    for _ in range(steps):
        loss = opt.step(closure) if closed else closure()
        losses.append(float(loss.detach()))
        if not closed:
            opt.step()
    return losses, opt


@pytest.mark.parametrize(("name", "wide"), pair(PROBLEMS, [True, False]))
def test_no_step_raises_the_loss_of_its_batch(name: str, wide: bool):
    losses, opt = train(name, wide, int(wide), closed=False, own=True)
    assert all(after <= before + 1e-5 * abs(before) for before, after in pairwise(losses))
    assert losses[-1] < losses[0]
    assert opt.state_report().failures == 0


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("counts, log rates", True),
        ("variances behind softplus", True),
        ("counts, log rates", False),
        ("counts behind an exponential", False),
        ("bits that are nearly certain", False),
    ],
)
def test_a_loss_of_ones_own_is_told_by_a_closure_or_followed_by_the_divergence_of_the_outputs(name: str, closed: bool):
    """-log p(theta + d) = -log p(theta) + g . d + KL(theta, theta + d) for linear natural parameters."""
    losses, _ = train(name, False, 1, closed=closed, own=False)
    assert max(losses) == losses[0]
    assert not closed or all(after <= before + 1e-5 * abs(before) for before, after in pairwise(losses))


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
