"""Steps of a variational q that cannot run away, kinks that second derivatives miss, and when a fit has converged."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from models import F64, draw
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.variational import Draws, GaussHermite, Projected, Sobol, variational
from natgrad.variational.targets import is_batched

INPUTS, WEIGHTS = draw(60, 4, seed=1), torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64)
SIGNS = (INPUTS @ WEIGHTS + 0.5 * draw(60, seed=2)).sign()


@pytest.mark.parametrize(
    ("scale", "d", "diagonal"), [(10.0, 1, False), (0.1, 3, False), (0.1, 1, True), (10.0, 3, True)]
)
def test_a_laplace_density_gets_its_best_normal(scale, d, diagonal):
    """E|x| = s sqrt(2 / pi): the bound is largest at s = sqrt(pi / 2) / scale. Second derivatives are zero."""
    q = variational(lambda z: -scale * z.abs().sum(-1), d, diagonal=diagonal)
    assert q.fit(100).converged
    deviations = q.covariance.diagonal().sqrt()
    assert float((deviations * scale / math.sqrt(math.pi / 2) - 1).abs().max()) < 0.05
    assert float(q.mean.abs().max()) * scale < 0.1


@pytest.mark.parametrize(
    ("log_joint", "batched"),
    [
        (lambda z: z.sum(-1), True),
        (lambda z: z.sum(-1, keepdim=True), True),
        (lambda z: (z.sum(-1) - 1).log(), True),  # NaN at the start
        (lambda z: z.sum(), False),
        (lambda z: z.sum(-1) / len(z), False),  # rows of it are another function
        (lambda z: (z @ z) + z[0], False),
    ],
)
def test_whether_a_log_joint_takes_rows_is_found_by_its_values(log_joint, batched):
    assert is_batched(log_joint, torch.zeros(3, dtype=F64)) is batched


KINKED: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "hinge and a normal prior": (
        4,
        lambda z: -torch.relu(1 - SIGNS * (z @ INPUTS.mT)).sum(-1) - 0.005 * z.square().sum(-1),
    ),
    "largest entry": (3, lambda z: -2 * z.abs().max(-1).values - 0.05 * z.square().sum(-1)),
    "piecewise linear net": (
        3,
        lambda z: -torch.relu(torch.relu(z @ INPUTS[:3, :3]) @ INPUTS[3:6, :3].abs()).sum(-1) - 0.1 * z.abs().sum(-1),
    ),
    "absolute errors": (4, lambda z: -(z @ INPUTS.mT - INPUTS @ WEIGHTS - SIGNS).abs().sum(-1)),
}


def best_bound(log_joint: Callable[[Tensor], Tensor], d: int, start: ng.variational.Variational) -> float:
    """The bound after 150 steps of Adam on mean and Cholesky factor, over 256 points; no second derivatives."""
    z, weights = Sobol(256, seed=5).at(d, 0)
    mean, root = start.mean.clone().requires_grad_(), torch.linalg.cholesky(start.covariance).requires_grad_()
    adam = torch.optim.Adam([mean, root], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 150)
    bound = torch.zeros(())
    for _ in range(150):
        lower = root.tril()
        bound = weights @ log_joint(mean + z @ lower.mT) + lower.diagonal().abs().log().sum()
        adam.zero_grad()
        (-bound).backward()
        adam.step()
        schedule.step()
    return float(bound.detach()) + d / 2 * (1 + math.log(2 * math.pi))


@pytest.mark.parametrize("name", KINKED)
def test_kinks_count_like_curvature(name):
    d, log_joint = KINKED[name]
    q = variational(log_joint, d)
    q.fit(40)
    z, weights = Sobol(256, seed=5).at(d, 0)
    root = q.root()
    found = float(weights @ log_joint(q.mean + z @ root.mT) + q.entropy(root))
    assert found > best_bound(log_joint, d, q) - 0.3


def test_smooth_densities_keep_their_second_derivatives():
    """Price's form: exact for a quartic over points that have the normal's second moments only."""
    points = Sobol(256)
    q = variational(lambda z: -z.square().square().sum(-1), 3, lr=1e-9, points=points)
    found = q.target.moments(q.mean, q.root(), 0, ())
    z, weights = points.at(3, 0)
    assert torch.allclose(found.hessian, torch.diag(-12 * (weights @ z.square())), atol=1e-9)


def test_without_second_derivatives_in_torch_gradients_serve():
    q = variational(lambda z: -functional.hardsigmoid(z).square().sum(-1) - z.square().sum(-1), 2)
    assert q.fit(60).converged


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_projected_hinge_is_the_hinge_written_out(diagonal):
    precision = 0.01
    projected = Projected(INPUTS, lambda f: -torch.relu(1 - SIGNS * f), precision=precision, order=64)

    def write_log_joint(z: Tensor) -> Tensor:
        prior = 0.5 * (4 * math.log(precision / (2 * math.pi)) - precision * z.square().sum(-1))
        return -torch.relu(1 - SIGNS * (z @ INPUTS.mT)).sum(-1) + prior

    q = [
        variational(projected, 4, diagonal=diagonal),
        variational(write_log_joint, 4, diagonal=diagonal, points=Sobol(256)),
    ]
    bounds = [one.fit(40)[-1] for one in q]
    assert bounds[0] == pytest.approx(bounds[1], abs=0.1)
    assert float((q[0].covariance.diagonal() / q[1].covariance.diagonal()).log().abs().max()) < 0.2


@pytest.mark.parametrize(
    ("correlation", "lr", "d"),
    [(0.5, 0.3, 2), (0.5, 1.0, 8), (0.5, 3.0, 8), (0.999, 0.3, 8), (0.999, 1.0, 2), (0.999, 1.0, 8), (0.999, 3.0, 2)],
)
def test_a_diagonal_q_of_correlated_variables_does_not_run_away(correlation, lr, d):
    precision = correlation * torch.ones(d, d, dtype=F64) + (1 - correlation) * torch.eye(d, dtype=F64)
    q = variational(lambda z: -0.5 * ((z - 1) @ precision * (z - 1)).sum(-1), d, diagonal=True, lr=lr, covariance=0.1)
    distance = [float((q.mean - 1) @ precision @ (q.mean - 1))]
    for _ in range(30):
        q.step()
        distance.append(float((q.mean - 1) @ precision @ (q.mean - 1)))
    assert max(after - before for before, after in pairwise(distance)) < 1e-9
    assert distance[-1] < 0.3 * distance[0]


def test_a_diagonal_q_of_a_network_fits_a_regression():
    """13 correlated inputs, 50 hidden units, batches: the mean ran away by 1e4 deviations without a guard."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=generator) @ torch.randn(3, 13, generator=generator)
    x = (x + 0.3 * torch.randn(300, 13, generator=generator)) / 2
    y = torch.tanh(x[:, :1]) + 0.5 * x[:, 1:2] + 0.1 * torch.randn(300, 1, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 50), nn.Tanh(), nn.Linear(50, 1))
    q = variational(net, criterion=ng.Gaussian(0.25), data_size=300, diagonal=True, lr=1.0)
    for _ in range(60):
        rows = torch.randint(0, 300, (64,), generator=generator)
        q.step(x[rows], y[rows])
    error = (q.predict(x, samples=10, generator=generator).mean(0) - y).square().mean().sqrt()
    assert float(error) < 0.6 * float(y.std())


def test_fit_takes_the_rate_back_up():
    """A bad start costs one halving each; the rate then rises, so that the end is as fast as from a good one."""
    q = variational(
        lambda z: -(0.5 * z).cosh().log().sum(-1) * 4 - 0.05 * z.square().sum(-1), [30.0, -40.0], covariance=1e-3
    )
    rates = []
    advance = q.advance

    def watch_rate(batch: tuple[()]) -> tuple[float, float]:
        rates.append(q.lr)
        return advance(batch)

    q.advance = watch_rate  # type: ignore[method-assign]
    assert q.fit(100).converged
    assert rates[-1] == q.lr == 1.0


def test_converged_says_whether_anything_was_left():
    hard = lambda z: -0.1 * z.square().square().sum(-1) - (z - 3).cosh().log().sum(-1)  # noqa: E731
    short = variational(hard, 2)
    bounds = short.fit(2)
    assert not bounds.converged
    assert bounds.gap > 1e-3
    bounds = short.fit(100)
    assert bounds.converged
    assert bounds.gap < 1e-6
    assert len(short.fit(100)) == 1  # nothing to do
    easy = variational(lambda z: -0.5 * z.square().sum(-1), 3, covariance=2.0)
    assert easy.fit(50).converged


def test_converged_is_not_claimed_below_the_noise():
    """Draws of one z with different log p at each step: the bounds differ by a nat from step to step."""
    noisy = lambda z: -0.1 * z.square().square().sum(-1)  # noqa: E731
    q = variational(noisy, 3, lr=0.1, points=Draws(4))
    assert not q.fit(60).converged  # 1e-6 nats cannot be told apart
    settled = q.fit(300, tolerance=3.0)
    assert settled.converged
    assert len(settled) < 300


def test_a_grid_and_points_agree_on_a_kink():
    bounds = [
        variational(lambda z: -2 * z.abs().sum(-1), 2, points=points).fit(60)[-1]
        for points in (GaussHermite(64), Sobol(2048))
    ]
    assert bounds[0] == pytest.approx(bounds[1], abs=0.02)


SINGLE = {
    "normal": lambda f: ng.variational(f, 2),
    "diagonal": lambda f: ng.variational(f, 2, diagonal=True),
    "draws": lambda f: ng.variational(f, 2, points=Draws(16)),
    "low rank": lambda f: ng.variational_low_rank(f, 2, rank=1),
    "mixture": lambda f: ng.variational_mixture(f, torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=F64)),
    "projected": lambda f: ng.variational(Projected(torch.eye(2, dtype=F64), lambda z: f(z.unsqueeze(-1))), 2),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_a_log_p_in_single_precision_serves(kind: str):
    def log_p(z: Tensor) -> Tensor:  # as where a network in single precision stands inside
        return -0.5 * (z.float() - 1).square().sum(-1)

    single, double = SINGLE[kind](log_p), SINGLE[kind](lambda z: -0.5 * (z - 1).square().sum(-1))
    for _ in range(3):
        single.step()
        double.step()
    assert single.elbo() == pytest.approx(double.elbo(), abs=1e-4)
