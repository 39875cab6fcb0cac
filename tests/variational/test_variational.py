"""Natural-gradient variational inference: exact where a problem is conjugate, inside the cone everywhere."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import F64, assert_close
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.variational import Draws, GaussHermite, Projected, Sobol, Variational, inducing, variational

G = torch.Generator().manual_seed(0)
A = torch.randn(30, 4, dtype=F64, generator=G)
Y = A @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64) + 0.3 * torch.randn(30, dtype=F64, generator=G)
NOISE = 0.3
POSTERIOR = A.mT @ A / NOISE**2 + 2 * torch.eye(4, dtype=F64)
CENTRE = torch.linalg.solve(POSTERIOR, A.mT @ Y / NOISE**2)


def normal(x: Tensor, variance: float) -> Tensor:
    """log N(x; 0, variance), entry by entry."""
    return -0.5 * (x.square() / variance + math.log(2 * math.pi * variance))


def regression(z: Tensor) -> Tensor:
    """log p(y, z) of rows z (s, 4), prior precision 2."""
    return normal(Y - z @ A.mT, NOISE**2).sum(-1) + normal(z, 0.5).sum(-1)


def one_at_a_time(z: Tensor) -> Tensor:
    return regression(z.unsqueeze(0)).squeeze(0)


def noisy(f: Tensor) -> Tensor:
    return normal(Y - f, NOISE**2)


CONJUGATE: dict[str, Any] = {
    "a function of rows": regression,
    "a function of one z": one_at_a_time,
    "projected": Projected(A, noisy, precision=2.0),
}


@pytest.mark.parametrize("name", CONJUGATE)
def test_a_conjugate_problem_is_solved_in_one_step(name):
    start = torch.randn(4, dtype=F64, generator=torch.Generator().manual_seed(1))
    q = variational(CONJUGATE[name], start, covariance=0.7 * torch.eye(4, dtype=F64) + 0.2, lr=1.0)
    q.step()
    assert_close(q.mean, CENTRE, rtol=1e-9)
    assert_close(q.precision, POSTERIOR, rtol=1e-9)
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(30, dtype=F64), NOISE**2 * torch.eye(30, dtype=F64) + A @ A.mT / 2
    ).log_prob(Y)
    assert q.elbo() == pytest.approx(float(evidence), rel=1e-9)  # the bound is tight there
    assert len(q.fit(10)) <= 2


def test_a_diagonal_q_ends_at_the_posterior_s_mean_and_conditional_precisions():
    q = variational(regression, 4, diagonal=True, lr=0.5)
    q.fit(200, tolerance=1e-13)
    assert_close(q.precision, POSTERIOR.diagonal(), rtol=1e-6)
    assert_close(q.mean, CENTRE, rtol=1e-4)
    assert q.covariance.shape == (4, 4)


def quartic(z: Tensor) -> Tensor:
    """Not Gaussian, of degree four: a grid's expectations are exact."""
    return -0.3 * z.square().sum(-1) ** 2 - 0.5 * (z[..., 0] - 1) ** 2 + 0.2 * z[..., 0] * z[..., 1]


def test_a_step_is_the_natural_gradient_of_the_bound():
    """theta + lr I_theta^-1 grad ELBO, the bound by autodiff through the family's own coordinates."""
    family = ng.MultivariateNormal(2)
    mean, covariance = torch.tensor([0.2, -0.1], dtype=F64), torch.tensor([[0.3, 0.05], [0.05, 0.2]], dtype=F64)
    q = variational(quartic, mean, covariance=covariance, lr=0.1, points=GaussHermite(6))
    theta = q.theta.requires_grad_()
    mu, sigma = family.mean_covariance(theta)
    z, weights = GaussHermite(6).at(2, 0)
    bound = weights @ quartic(mu + z @ torch.linalg.cholesky(sigma).mT) + family.entropy(theta)
    (gradient,) = torch.autograd.grad(bound, theta)
    expected = theta + 0.1 * ng.natural_gradient(family.fisher(theta.detach()), gradient).value
    assert q.step() == pytest.approx(bound.item(), rel=1e-10)
    assert_close(q.theta, expected.detach(), rtol=1e-8)


def mixture(z: Tensor) -> Tensor:
    """Two modes: its Hessian is indefinite between them."""
    d = z.shape[-1]
    modes = torch.stack([-2 * (z - 2).square().sum(-1), -2 * (z + 1.5).square().sum(-1)])
    return modes.logsumexp(0) - d


CONES = [(lr, False, target) for lr in (0.1, 1.0, 2.0) for target in (mixture, quartic, "regression")]
CONES += [(lr, True, target) for lr, target in ((2.0, mixture), (0.1, quartic), (1.0, "regression"))]


@pytest.mark.parametrize(("lr", "diagonal", "target"), CONES)
def test_no_rate_leaves_the_cone(lr, diagonal, target):
    function, d = (regression, 4) if target == "regression" else (target, 3)
    q = variational(function, torch.full((d,), 0.3, dtype=F64), diagonal=diagonal, lr=lr)
    for _ in range(25):
        q.step()
        values = q.precision if diagonal else torch.linalg.eigvalsh(q.precision)
        assert bool((values > 0).all())
        assert bool(torch.isfinite(q.mean).all())


def sparse_classification() -> Projected:
    """Bernoulli labels of a Gaussian process on a line, 15 inducing points."""
    g = torch.Generator().manual_seed(3)
    x = 6 * torch.rand(120, dtype=F64, generator=g)
    labels = torch.where((2 * x).sin() + 0.4 * torch.randn(120, dtype=F64, generator=g) > 0, 1.0, -1.0).to(F64)
    places = torch.linspace(0, 6, 15, dtype=F64)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return 2 * torch.exp(-0.5 * (a.unsqueeze(1) - b).square() / 0.7**2)

    kmm = kernel(places, places) + 1e-6 * torch.eye(15, dtype=F64)
    rows, variance = inducing(kmm, kernel(places, x), torch.full((120,), 2.0, dtype=F64))
    return Projected(rows, lambda f: -functional.softplus(-labels * f), variance)


def test_projected_agrees_with_the_log_joint_written_out():
    target = sparse_classification()
    plain = Projected(target.rows, target.log_likelihood)

    def write_log_joint(z: Tensor) -> Tensor:
        return target.log_likelihood(z @ target.rows.mT).sum(-1) + normal(z, 1.0).sum(-1)

    start = torch.linspace(-1, 1, 15, dtype=F64)
    q = [
        variational(write_log_joint, start, covariance=0.05, points=Sobol(4096)),
        variational(plain, start, covariance=0.05),
    ]
    bounds = [one.step() for one in q]
    assert bounds[0] == pytest.approx(bounds[1], abs=0.02)
    assert_close(q[0].mean, q[1].mean, rtol=2e-2)
    assert_close(q[0].precision, q[1].precision, rtol=2e-2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def test_a_linear_network_s_posterior_is_exact_in_one_step():
    model, x = nn.Linear(4, 1, bias=False).double(), A
    q = variational(model, criterion=ng.Gaussian(std=NOISE), data_size=30, prior_precision=2.0, points=Draws(2))
    q.step(x, Y.unsqueeze(1))
    assert_close(q.mean, CENTRE, rtol=1e-8)
    assert_close(q.precision, POSTERIOR, rtol=1e-8)


class Named(nn.Linear):
    """Outputs by name."""

    def forward(self, input: Tensor) -> Any:
        out = super().forward(input)
        return {"size": out[:, :1], "kind": out[:, 1:]}


def test_a_network_with_several_outputs_predicts_each():
    heads = ng.Heads((ng.Gaussian(), 1), (ng.Categorical(), 2))
    q = variational(Named(4, 3).double(), criterion=heads, data_size=30, lr=0.1)
    q.step(A, {"kind": torch.arange(30) % 2, "size": Y.unsqueeze(1)})
    named = q.predict(A, samples=5, generator=torch.Generator().manual_seed(0))
    z = q.sample(5, generator=torch.Generator().manual_seed(0))
    expected = A @ z[:, :12].view(5, 3, 4).mT + z[:, 12:].unsqueeze(1)
    assert_close(torch.cat([named["size"], named["kind"]], 2), expected)
    with pytest.raises(ValueError, match="are a dict, expected one tensor"):
        variational(Named(4, 3).double(), criterion=nn.CrossEntropyLoss(), data_size=30).step(A, torch.arange(30) % 2)


LABELS, SOME, SHARES = torch.arange(30) % 3, torch.arange(30) % 4 - 1, torch.tensor([1.0, 5.0, 0.1], dtype=F64)
BITS = (LABELS == 1).double().unsqueeze(1).expand(30, 3)
COUNTED = {
    "ignored": (nn.CrossEntropyLoss(ignore_index=-1), SOME, {"ignore_index": -1}),
    "weighted": (nn.CrossEntropyLoss(SHARES), LABELS, {"weight": SHARES}),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"), LABELS, {"label_smoothing": 0.2}),
    "missing": (ng.Masked(ng.Categorical(), -1), SOME, {"ignore_index": -1}),
    "none": (nn.CrossEntropyLoss(), torch.full((30,), -100), {}),
    "bits": (nn.BCEWithLogitsLoss(SHARES, pos_weight=SHARES), BITS, {"weight": SHARES, "pos_weight": SHARES}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_network_counts_targets_as_its_criterion_does(name):
    criterion, targets, options = COUNTED[name]
    loss = functional.cross_entropy if targets.dim() == 1 else functional.binary_cross_entropy_with_logits
    q = variational(nn.Linear(4, 3, bias=False).double(), criterion=criterion, data_size=60)

    def log_joint(z: Tensor) -> Tensor:
        prior = 0.5 * z.square().sum() + 6 * math.log(2 * math.pi)
        return -2 * loss(A @ z.view(3, 4).mT, targets, reduction="sum", **options) - prior

    hessian = torch.func.hessian(log_joint)(q.mean)
    for root, bend in ((torch.zeros(12), hessian.diagonal()), (torch.zeros(12, 12), hessian)):
        moments = q.target.moments(q.mean, root.double(), 0, (A, targets))
        assert_close(moments.value, log_joint(q.mean))
        assert_close(moments.gradient, torch.func.grad(log_joint)(q.mean))
        assert_close(moments.hessian, bend)


@pytest.mark.parametrize("points", [Sobol(), Sobol(1000, fresh=True), GaussHermite(5), Draws(4)], ids=repr)
def test_points_have_the_moments_of_a_standard_normal(points):
    z, weights = points.at(3, 7)
    assert float(weights.sum()) == pytest.approx(1)
    assert_close(weights @ z, torch.zeros(3, dtype=F64), scale=1.0)
    if not isinstance(points, Draws):
        assert_close(torch.einsum("s,si,sj->ij", weights, z, z), torch.eye(3, dtype=F64))


def test_neither_step_nor_fit_lowers_the_bound_where_unguarded_steps_diverge():
    """A diagonal q of a correlated posterior: at rate 1 each entry moves as if it were alone, and together too far."""
    precision = 0.9 * torch.ones(5, 5, dtype=F64) + 0.1 * torch.eye(5, dtype=F64)

    def correlated_normal(z: Tensor) -> Tensor:
        return -0.5 * ((z - 1) @ precision * (z - 1)).sum(-1)

    plain = variational(correlated_normal, 5, diagonal=True)
    bounds = [plain.step() for _ in range(20)]  # by -4e6 nats without a guard
    assert all(after > before - 1e-6 for before, after in pairwise(bounds[1:]))
    q = variational(correlated_normal, 5, diagonal=True)
    bounds = q.fit(200)
    assert all(after > before - 1e-6 for before, after in pairwise(bounds))
    assert_close(q.mean, torch.ones(5, dtype=F64), rtol=1e-2)
    assert_close(q.precision, precision.diagonal(), rtol=1e-8)
    assert q.lr == 1.0
    short = variational(correlated_normal, 5, diagonal=True)
    (bound,) = short.fit(1)
    assert short.elbo() >= bound - 1e-6  # the last step too


def half_line(z: Tensor) -> Tensor:
    return z.log().sum(-1)


def unfreeze_later() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    q = variational(model, criterion=nn.CrossEntropyLoss(), data_size=3)
    model.requires_grad_(True)
    q.step(A[:3, :3], torch.tensor([0, 1, 2]))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "lr": (lambda: variational(regression, 4, lr=0.0), ValueError, "lr is"),
    "start": (lambda: variational(regression), ValueError, "start is None"),
    "start's kind": (lambda: variational(regression, torch.zeros(2, 2)), ValueError, "start is"),
    "covariance": (
        lambda: variational(regression, 4, covariance=-torch.eye(4)),
        ValueError,
        "is not positive definite",
    ),
    "its shape": (lambda: variational(regression, 4, covariance=torch.eye(3)), ValueError, "covariance has shape"),
    "its sign": (lambda: variational(regression, 4, covariance=0.0), ValueError, "covariance has entries"),
    "target": (lambda: variational(3, 4), TypeError, "target is int"),
    "its value": (lambda: variational(lambda z: z, 4), ValueError, "log_joint returned"),
    "a number": (lambda: variational(lambda z: 3.0, 4), ValueError, "log_joint returned float.*expected a tensor"),  # pyright: ignore
    "an array": (lambda: variational(lambda z: z.numpy().sum(-1), 4), ValueError, "log_joint returned float64"),
    "its dtype": (lambda: variational(regression, torch.zeros(4)), ValueError, "fails for z .*float32.*of your data"),
    "words": (lambda: variational(regression, ["a"]), ValueError, "start is"),  # pyright: ignore
    "points": (lambda: variational(regression, 4, points=3), TypeError, "points is 3"),  # pyright: ignore
    "a grid too large": (lambda: variational(regression, 4, points=GaussHermite(40)).step(), ValueError, "use Sobol"),
    "criterion": (lambda: variational(net()), ValueError, "criterion is None"),
    "data_size": (lambda: variational(net(), criterion=nn.CrossEntropyLoss()), ValueError, "data_size is None"),
    "no batch": (
        lambda: variational(net(), criterion=nn.CrossEntropyLoss(), data_size=3).step(),
        TypeError,
        "expected inputs and targets",
    ),
    "unfrozen since": (unfreeze_later, ValueError, r"q was made without 0\.bias, which came or were unfrozen since"),
    "a batch": (lambda: variational(regression, 4).step(A), TypeError, "step takes no data"),
    "variance": (lambda: Projected(A, noisy, variance=-1.0), ValueError, "variance has negative"),
    "log_likelihood": (lambda: variational(Projected(A, lambda f: f.sum()), 4).step(), ValueError, "log_likelihood"),
    "targets in a column": (
        lambda: variational(Projected(A, lambda f: -f.sub(A[:, :1]).square()), 4).step(),
        ValueError,
        rf"log_likelihood fails for f \(32, {len(A)}\).*targets have the shape \({len(A)},\)",
    ),
    "as many nodes as targets in a column": (
        lambda: variational(Projected(A, lambda f: -f.sub(A[:, :1]).square(), order=len(A)), 4).step(),
        ValueError,
        rf"log_likelihood fails for f \({len(A)}, {len(A)}\).*targets have the shape \({len(A)},\)",
    ),
    "kmm": (lambda: inducing(-torch.eye(2), torch.ones(2, 3), torch.ones(3)), ValueError, "kmm is not"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()


def test_a_log_joint_that_is_not_finite_leaves_q_as_it_was():
    q = variational(half_line, torch.ones(2, dtype=F64))
    mean, precision = q.mean.clone(), q.precision.clone()
    with pytest.raises(ValueError, match="not finite near z"):
        q.step()
    assert isinstance(q, Variational)
    assert torch.equal(q.mean, mean)
    assert torch.equal(q.precision, precision)
