"""Metrics against their definitions: enumeration of labels, quadrature, divergences, per-example gradients."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from models import (
    CASES,
    F64,
    X3,
    Assembled,
    Tied,
    affine,
    assert_close,
    build_seeded,
    draw,
    mlp,
    pair,
    reference_metric,
)
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import Entrywise, as_criterion
from natgrad.ground.pure import Call
from natgrad.ground.spaces import Space, trainable
from natgrad.metrics import covariance, divergence, empirical_fisher, fisher, gauss_newton, kl, sampled_fisher
from natgrad.solvers import Direct
from natgrad.testing import check_metric, check_operator


@pytest.mark.parametrize("name", CASES)
def test_every_model_has_a_sound_fisher(name):
    case = CASES[name]
    model, params = case.make()
    expected = reference_metric(case, model, params)
    draws = name == "dropout"  # masks differ between the copies of a batch taken twice
    check_metric(fisher(model, case.family), params, case.inputs, reference=expected, draws=draws)


def label_expectation(
    model: Any, params: dict[str, Tensor], x: Tensor, family: ng.Likelihood, labels: list[Tensor]
) -> Tensor:
    """mean over x of sum_t p(t|x) g g^T, g the gradient of log p(t|x), one example and one label at a time."""
    size = Space(params).size
    total = torch.zeros(size, size, dtype=F64)
    for example, label in itertools.product(x.split(1), labels):
        nll = family.nll(model(example), label).squeeze()
        g = Space(params).flatten(dict(zip(params, torch.autograd.grad(nll, list(params.values())), strict=True)))
        total += (-nll.detach()).exp() * torch.outer(g, g) / len(x)
    return total


LABELS: dict[str, tuple[ng.Likelihood, list[Tensor]]] = {
    "Categorical": (ng.Categorical(), [torch.tensor([c]) for c in range(3)]),
    "Bernoulli": (ng.Bernoulli(), [torch.tensor([bits], dtype=F64) for bits in itertools.product((0, 1), repeat=3)]),
}


@pytest.mark.parametrize("name", LABELS)
def test_fisher_is_expected_outer_product_of_scores(name):
    family, labels = LABELS[name]
    model = mlp(3, 2, 3)
    params = dict(trainable(model))
    expected = label_expectation(model, params, X3, family, labels)
    assert_close(fisher(model, family).at(params, X3).dense(), expected, 1e-13)


CANONICAL = {
    "Categorical": (ng.Categorical(), lambda r, t: nn.functional.cross_entropy(r, t), torch.tensor([0, 2, 1, 2])),
    "Bernoulli": (
        ng.Bernoulli(),
        lambda r, t: nn.functional.binary_cross_entropy_with_logits(r, t, reduction="none").sum(1).mean(),
        torch.tensor([[0, 1, 1], [1, 1, 0], [0.0, 0, 0], [1, 0, 1]], dtype=F64),
    ),
    "Poisson": (ng.Poisson(), lambda r, t: (r.exp() - r * t).sum(1).mean(), draw(4, 3, seed=1).exp().round()),
    "Gaussian": (ng.Gaussian(0.5), lambda r, t: ((r - t) / 0.5).square().sum(1).mean() / 2, draw(4, 3, seed=1)),
}


@pytest.mark.parametrize("name", CANONICAL)
def test_fisher_is_gauss_newton_for_canonical_links(name):
    family, loss, targets = CANONICAL[name]
    model = mlp(3, 2, 3)
    params = dict(trainable(model))
    exact = fisher(model, family).at(params, X3).dense()
    assert_close(gauss_newton(model, loss).at(params, (X3, targets)).dense(), exact, 1e-12)
    assert_close(gauss_newton(model, family).at(params, (X3, targets)).dense(), exact, 1e-15)
    assert_close(gauss_newton(model, family).at(params, (X3, None)).dense(), exact, 1e-15)


SMOOTH = {
    "Categorical": (lambda: mlp(3, 3, 3), ng.Categorical()),
    "Bernoulli": (lambda: mlp(3, 3, 2), ng.Bernoulli()),
    "Gaussian": (lambda: mlp(3, 3, 2), ng.Gaussian(0.6)),
    "Poisson": (lambda: mlp(3, 3, 2), ng.Poisson()),
    "Gaussian, log variance": (lambda: mlp(3, 3, 4), ng.HeteroscedasticGaussian()),
    "tied": (lambda: build_seeded(Tied), ng.Categorical()),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_kl_is_half_the_quadratic_form_with_an_error_of_slope_three(name):
    build, family = SMOOTH[name]
    model = build()
    params = {n: p.detach() for n, p in trainable(model).items()}
    space, operator = Space(params), fisher(model, family).at(params, X3)
    theta, d = space.flatten(params), draw(space.size, seed=3)
    half = float(d @ (operator @ d)) / 2

    def error(s: float) -> float:
        moved = space.unflatten(theta + s * d)
        return abs(float(kl(model, family)(params, moved, X3)) - s**2 * half)

    steps = [1e-2, 5e-3, 2.5e-3]
    slopes = [math.log2(error(a) / error(b)) for a, b in itertools.pairwise(steps)]
    assert all(abs(slope - 3) < 0.1 for slope in slopes), slopes  # 3 in the limit; s is finite here


def test_any_divergence_gives_its_metric():
    """Of 1/2 |f(theta) - f(phi)|^2, averaged: E[J^T J]. A factor on the divergence is one on the metric."""

    def squared_difference(params, other, x):
        return 3 * (affine(params, x) - affine(other, x)).square().sum(1).mean() / 2

    params = {"w": draw(3, 2), "b": draw(2, seed=1)}
    check_metric(divergence(squared_difference), params, X3, reference=3 * fisher(affine, ng.Gaussian()).at(params, X3))


def test_sampled_fisher_is_unbiased_within_its_standard_error():
    model = mlp(2, 2, 3)
    params, x = dict(trainable(model)), draw(3, 2)
    exact = fisher(model, ng.Categorical()).at(params, x).dense()
    metric = sampled_fisher(model, ng.Categorical(), samples=2, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([metric.at(params, x).dense() for _ in range(100)])
    error = (draws.mean(0) - exact).abs() / (draws.std(0) / 100**0.5 + 1e-15)
    assert error.max() <= 4.5  # 225 entries, normal in the limit


def test_sampled_fisher_draws_from_its_own_generator():
    model = mlp(3, 2, 3)
    params = dict(trainable(model))

    def metric(seed: int):
        return sampled_fisher(model, ng.Categorical(), generator=torch.Generator().manual_seed(seed))

    state, first = torch.get_rng_state(), metric(1)
    a, b = first.at(params, X3), first.at(params, X3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.dense(), metric(1).at(params, X3).dense())
    assert not torch.equal(a.dense(), b.dense())
    assert torch.equal(a.dense(), a.dense())  # a fixed matrix once drawn
    check_metric(first, params, X3, draws=True)


EMPIRICAL = {
    "Categorical": (ng.Categorical(), torch.tensor([0, 2, 1, 2])),
    "Bernoulli": (ng.Bernoulli(), (draw(4, 3, seed=1) > 0).double()),
    "Gaussian": (ng.Gaussian(0.4), draw(4, 3, seed=1)),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 2])),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), (draw(4, 3, seed=1) > 0).double()),
    "MSELoss": (nn.MSELoss(), draw(4, 3, seed=1)),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), draw(4, 3, seed=1).exp().round()),
    "L1Loss": (nn.L1Loss(), draw(4, 3, seed=1)),
    "HuberLoss": (nn.HuberLoss(delta=0.5), draw(4, 3, seed=1)),
}


def error_temperature(name: str, outputs: Tensor, targets: Tensor) -> float:
    """Of a density as wide as the errors, E[z rho'(z)], and 1 at least."""
    if name not in ("L1Loss", "HuberLoss"):
        return 1.0
    sizes = (outputs - targets).detach().abs()
    return max(1.0, float((sizes if name == "L1Loss" else sizes * sizes.clamp(max=0.5)).mean()))


@pytest.mark.parametrize("name", EMPIRICAL)
def test_empirical_fisher_is_the_mean_outer_product_of_example_gradients(name):
    loss, targets = EMPIRICAL[name]
    model = mlp(3, 2, 3)
    params = dict(trainable(model))
    value = (lambda r, t: loss.nll(r, t).mean()) if isinstance(loss, ng.Likelihood) else loss
    gradients = []
    for x, t in zip(X3.split(1), targets.split(1), strict=True):
        found = torch.autograd.grad(value(model(x), t), list(params.values()))
        gradients.append(torch.cat([g.reshape(-1) for g in found]))
    # of a mean over the entries of an example, in its unit: as the Fisher is
    unit = as_criterion(loss).nats(model(X3).detach()) / error_temperature(name, model(X3), targets)
    expected = unit * sum(torch.outer(g, g) for g in gradients) / len(X3)
    check_metric(empirical_fisher(model, loss), params, (X3, targets), reference=expected)


def log_probabilities(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, outputs), nn.LogSoftmax(dim=-1)).double()


def mean_and_variance(outputs: int) -> Any:
    def build_net() -> nn.Module:
        return Assembled(
            lambda m, x: (m.mean(x), m.scale(x).exp()), mean=nn.Linear(3, outputs), scale=nn.Linear(3, outputs)
        )

    return build_net().double()


def one_variance(outputs: int) -> nn.Module:
    """Of all outputs together, without an axis for them."""
    return Assembled(
        lambda m, x: (m.mean(x), m.scale(x).exp().squeeze(-1)), mean=nn.Linear(3, outputs), scale=nn.Linear(3, 1)
    ).double()


def bits_and_spread(outputs: int) -> nn.Module:
    """A bit, and normals with a spread that is the same for all examples."""
    return Assembled(
        lambda m, x: (m.bit(x), (m.mean(x), m.log_std)),
        **{"bit": nn.Linear(3, 1), "mean": nn.Linear(3, outputs), "log_std": nn.Parameter(torch.zeros(outputs))},
    ).double()


LOSSES: dict[str, tuple[Any, Any]] = {
    "squares": (nn.MSELoss, None),
    "sizes": (nn.L1Loss, None),
    "Huber": (partial(nn.HuberLoss, delta=0.7), None),
    "smooth": (partial(nn.SmoothL1Loss, beta=0.5), None),
    "bits": (nn.BCEWithLogitsLoss, None),
    "weighted bits": (partial(nn.BCEWithLogitsLoss, weight=torch.tensor([0.5, 3.0, 1.0, 0.1])), None),
    "counts": (nn.PoissonNLLLoss, None),
    "variances": (nn.GaussianNLLLoss, mean_and_variance),
    "one variance, or more": (partial(nn.GaussianNLLLoss, eps=0.7), one_variance),
    "a bit and a spread": (
        lambda reduction: ng.Heads((ng.Bernoulli(), 1), (ng.DiagonalGaussian(), 8)),
        bits_and_spread,
    ),
    "a function of one tensor": (
        lambda reduction: ng.likelihood(
            lambda outputs, targets: ng.HeteroscedasticGaussian().nll(outputs.chunk(2, -1), targets).mean(),
            ng.HeteroscedasticGaussian(),
        ),
        lambda outputs: nn.Linear(3, outputs).double(),
    ),
    "classes": (nn.CrossEntropyLoss, None),
    "log-probabilities": (nn.NLLLoss, log_probabilities),
    "distillation": (nn.KLDivLoss, log_probabilities),
}
SCALES = [*pair(LOSSES, ["mean", "sum", "sum"]), ("distillation", "batchmean")]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("name", "reduction"), SCALES)
def test_moments_of_gradients_are_the_fisher_where_targets_are_the_models_own(name: str, reduction: str):
    """E_t U = F, matrix by matrix, whatever the loss is a mean over: so a step is as long with either metric."""
    make, build = LOSSES[name]
    torch.manual_seed(0)
    model = (build or (lambda outputs: nn.Linear(3, outputs).double()))(4)
    criterion, generator = as_criterion(make(reduction=reduction)), torch.Generator().manual_seed(1)
    x = torch.randn(10_000, 3, dtype=F64, generator=generator)
    with torch.no_grad():
        outputs = model(x)
        family = criterion.family.family if isinstance(criterion.family, Entrywise) else criterion.family
        targets = family.sample(outputs, generator)
        if name == "distillation":
            targets = nn.functional.one_hot(targets, 4).double()
    params = trainable(model)
    data = (x, targets)
    exact = gauss_newton(model, criterion).at(params, data)
    for metric in (empirical_fisher(model, criterion), covariance(model, criterion)):
        found = metric.at(params, data)
        assert found.nats == exact.nats
        assert (found.dense() - exact.dense()).norm() < 0.1 * exact.dense().norm()


def test_empirical_fisher_passes_over_ignored_targets():
    model = mlp(3, 2, 3)
    params = dict(trainable(model))
    for ignored in (-1, 1):
        loss = nn.CrossEntropyLoss(ignore_index=ignored)
        targets = torch.tensor([0, ignored, 2, ignored])
        kept = empirical_fisher(model, nn.CrossEntropyLoss()).at(params, (X3[::2], targets[::2])).dense()
        found = empirical_fisher(model, loss).at(params, (X3, targets)).dense()
        # parallel to that of the examples that count, whichever number the mean divides by
        assert_close(found / found.trace(), kept / kept.trace(), 1e-12)


def reparametrise_model(matrix: Tensor, space: Space):
    """The model as a function of xi with theta = A xi."""
    model = mlp(2, 2, 2)

    def function(params, x):
        theta = space.unflatten(matrix @ params["xi"])
        return torch.func.functional_call(model, theta, (x,))

    return model, function


@pytest.mark.parametrize("seed", range(3))
def test_the_undamped_step_is_invariant_under_linear_reparametrisation(seed):
    """Where G is invertible, A d_xi = d_theta for every invertible A."""
    model = mlp(2, 2, 2)
    params = {n: p.detach().requires_grad_() for n, p in trainable(model).items()}
    space, x, targets = Space(params), draw(40, 2, seed=5), draw(40, 2, seed=6)
    matrix = draw(space.size, space.size, seed=seed)
    _, function = reparametrise_model(matrix, space)
    theta = space.flatten(params).detach()
    xi = {"xi": torch.linalg.solve(matrix, theta).requires_grad_()}

    def step(f, parameters, here: Space) -> Tensor:
        loss = ng.Gaussian().nll(f(parameters, x), targets).mean()
        g = torch.autograd.grad(loss, list(parameters.values()))
        operator = fisher(f, ng.Gaussian()).at(parameters, x)
        return Direct().solve(operator, here.flatten(dict(zip(parameters, g, strict=True)))).value

    d_theta = step(lambda p, x: torch.func.functional_call(model, p, (x,)), params, space)
    d_xi = step(function, xi, Space(xi))
    condition = float(torch.linalg.cond(matrix)) ** 2
    assert_close(matrix @ d_xi, d_theta, 1e-12 * condition * 10)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("name", ["mlp", "conv2d", "plain function"])
def test_chunks_of_the_batch_give_the_same_metric(name, size):
    case = CASES[name]
    model, params = case.make()
    whole = fisher(model, case.family).at(params, case.inputs)
    parts = fisher(model, case.family, chunk_size=size).at(params, case.inputs)
    vector = draw(whole.size)
    assert_close(parts @ vector, whole @ vector, 1e-13)
    assert_close(parts.diagonal(), whole.diagonal(), 1e-13)
    assert_close(parts.dense(), whole.dense(), 1e-13)


class Two(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, flip: bool = False) -> tuple[Tensor, Tensor]:
        """(b, 3), (b, 2) -> (b, 2), (b, 2)."""
        a, b = self.left(x), torch.tanh(self.right(y)) + self.left(x)
        return (b, a) if flip else (a, b)


def test_inputs_may_be_tuples_dicts_and_calls():
    model, x, y = build_seeded(Two), X3, draw(4, 2, seed=1)
    params = dict(trainable(model))
    family = ng.Heads((ng.Categorical(), 2), (ng.Gaussian(0.5), 2))
    expected = fisher(model, family).at(params, (x, y)).dense()
    check_metric(fisher(model, family), params, (x, y), reference=expected)
    check_metric(fisher(model, family), params, {"x": x, "y": y}, reference=expected)
    check_metric(fisher(model, family), params, Call((x,), {"y": y}), reference=expected)
    flipped = ng.Heads((ng.Gaussian(0.5), 2), (ng.Categorical(), 2))
    check_metric(fisher(model, flipped), params, Call((x, y), {"flip": True}), reference=expected)
    chunked = fisher(model, family, chunk_size=3).at(params, {"x": x, "y": y})
    assert_close(chunked.dense(), expected, 1e-13)


def test_a_frozen_parameter_is_left_out_of_the_metric():
    model = mlp(3, 2, 2)
    whole = fisher(model, ng.Bernoulli()).at(trainable(model), X3).dense()
    indices = Space(trainable(model)).indices(["0.weight", "2.bias"])
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    assert_close(fisher(model, ng.Bernoulli()).at(trainable(model), X3).dense(), whole[indices][:, indices], 1e-14)


@pytest.mark.parametrize("centred", [False, True])
def test_covariance_is_a_sound_operator_and_metric(centred):
    model, x, t = mlp(3, 4, 2), draw(5, 3), torch.tensor([0, 1, 1, 0, 1])
    metric = ng.covariance(model, nn.CrossEntropyLoss(), centred=centred)
    check_operator(metric.at(ng.trainable(model), (x, t)))
    check_metric(metric, ng.trainable(model), (x, t))


def mean_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is no likelihood."""
    return (outputs - targets).cosh().mean()


Y3 = torch.arange(len(X3)) % 3

COPIED: dict[str, tuple[Any, Any]] = {
    "Fisher": (fisher(mlp(3, 4, 3), nn.CrossEntropyLoss()), X3),
    "Fisher, dropout": (fisher(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).double(), ng.Gaussian()), X3),
    "sampled Fisher": (sampled_fisher(mlp(3, 4, 3), nn.CrossEntropyLoss()), X3),
    "empirical Fisher": (empirical_fisher(mlp(3, 4, 3), nn.CrossEntropyLoss()), (X3, Y3)),
    "Hessian": (ng.hessian(mlp(3, 4, 3), nn.CrossEntropyLoss()), (X3, Y3)),
    "Hessian of a plain loss": (ng.hessian(mlp(3, 4, 2), mean_cosh), (X3, draw(len(X3), 2))),
    "Gauss-Newton of a plain loss": (gauss_newton(mlp(3, 4, 2), mean_cosh), (X3, draw(len(X3), 2))),
}


@pytest.mark.parametrize(
    ("name", "copy_of"), pair(COPIED, [copy.deepcopy, lambda operator: pickle.loads(pickle.dumps(operator))])
)
def test_a_copy_of_a_metric_at_a_point_gives_the_same_products(name: str, copy_of: Any) -> None:
    """Copies have graphs of their own: autograd's is neither copied nor pickled with a tensor."""
    metric, data = COPIED[name]
    params = trainable(metric.model)
    for used in (False, True):
        operator = metric.at(params, data)
        vector = draw(operator.size)
        if used:
            operator @ vector
        twin = copy_of(operator)
        assert twin.nats == operator.nats
        torch.testing.assert_close(twin @ vector, operator @ vector, rtol=0, atol=0)
        torch.testing.assert_close(twin.diagonal(), operator.diagonal(), rtol=0, atol=0)
        if hasattr(operator, "linearization"):  # backward first
            fresh, known = copy_of(operator).linearization, operator.linearization
            weights = draw(*fresh.outputs.shape)
            torch.testing.assert_close(fresh.vjp(weights), known.vjp(weights), rtol=0, atol=0)
