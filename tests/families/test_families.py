"""Likelihoods: score, Fisher form, root, KL and sampling speak of one distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor

from natgrad.families import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Gaussian,
    Heads,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    as_criterion,
)
from natgrad.ground.linalg import symmetrise
from natgrad.testing import check_family

X = draw(3, 4)


@dataclass(frozen=True)
class Laplace(Likelihood):
    """A user's own likelihood: exp(-|t - r|) / 2 per entry, with the exact form but without KL."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((targets - outputs).abs() + math.log(2)).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        u = torch.rand(outputs.shape, generator=generator, dtype=outputs.dtype) - 0.5
        return outputs - u.sign() * (1 - 2 * u.abs()).log()

    def fisher(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(torch.ones_like(rows))


class Sampled(Likelihood):
    """A user's own likelihood with the two methods that it must have."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets - outputs).square().sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return outputs + 0.5**0.5 * torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)


FAMILIES: dict[str, tuple[Likelihood, Any]] = {
    "Gaussian": (Gaussian(), X),
    "Gaussian, small std": (Gaussian(0.01), X),
    "Gaussian on images": (Gaussian(2.0), draw(2, 2, 3)),
    "Bernoulli": (Bernoulli(), X),
    "Bernoulli, one output": (Bernoulli(), X[:, 0]),
    "Poisson": (Poisson(), X),
    "Categorical": (Categorical(), X),
    "Categorical, two classes": (Categorical(), X[:, :2]),
    "Categorical over positions": (Categorical(), draw(2, 3, 4)),
    "Categorical, classes second": (Categorical(dim=1), draw(2, 4, 3)),
    "Gaussian, log variance": (HeteroscedasticGaussian(), (X, draw(3, 4, seed=1))),
    "Gaussian, log variance, one tensor": (HeteroscedasticGaussian(), X),
    "Gaussian, variance": (HeteroscedasticGaussian(log_variance=False), (X, draw(3, 4, seed=1).exp())),
    "Gaussian, one variance for several means": (HeteroscedasticGaussian(), (X, draw(3, 1, seed=1))),
    "Gaussian, diagonal": (DiagonalGaussian(), X),
    "Gaussian, diagonal, a tuple": (DiagonalGaussian(), (X, draw(3, 4, seed=1))),
    "heads in one tensor": (Heads((Categorical(), 3), (Bernoulli(), 1)), X),
    "two heads": (Heads((Categorical(), 4), (Gaussian(0.5), 2)), (X, draw(3, 2, seed=1))),
    "three heads": (Heads((Bernoulli(), 4), (Poisson(), 1), (Bernoulli(), 2)), (X, X[:, :1], X[:, 2:])),
    "CrossEntropyLoss": (as_criterion(torch.nn.CrossEntropyLoss()).family, draw(2, 4, 3)),
    "BCEWithLogitsLoss": (as_criterion(torch.nn.BCEWithLogitsLoss()).family, X),
    "MSELoss": (as_criterion(torch.nn.MSELoss()).family, X),
    "GaussianNLLLoss": (as_criterion(torch.nn.GaussianNLLLoss()).family, (X, draw(3, 4, seed=1).exp())),
    "PoissonNLLLoss": (as_criterion(torch.nn.PoissonNLLLoss()).family, X),
    "PoissonNLLLoss of rates": (as_criterion(torch.nn.PoissonNLLLoss(log_input=False, eps=1e-12)).family, X.exp()),
    "a user's own": (Sampled(), X),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_sound(name):
    family, outputs = FAMILIES[name]
    check_family(family, outputs)


def enumerate_scores(nll_of: Any, targets: list[Tensor], rows: Tensor) -> Tensor:
    """sum_t p(t) s s^T over a list of possible targets, one row at a time."""
    total = torch.zeros(rows.shape[0], rows.shape[1], rows.shape[1], dtype=F64)
    for target in targets:
        point = rows.clone().requires_grad_()
        nll = nll_of(point, target)
        (gradient,) = torch.autograd.grad(nll.sum(), point)
        total += (-nll.detach()).exp().view(-1, 1, 1) * gradient.unsqueeze(1) * gradient.unsqueeze(2)
    return total


def test_categorical_form_is_the_enumerated_one():
    classes = [torch.full((3,), c) for c in range(4)]
    assert_close(Categorical().fisher(X), enumerate_scores(Categorical().nll, classes, X), 1e-14)


def test_bernoulli_form_is_the_enumerated_one():
    bits = [torch.tensor([a, b], dtype=F64).expand(3, 2) for a in (0, 1) for b in (0, 1)]
    assert_close(Bernoulli().fisher(X[:, :2]), enumerate_scores(Bernoulli().nll, bits, X[:, :2]), 1e-14)


def test_poisson_form_is_the_enumerated_one():
    counts = [torch.full((3, 1), float(c), dtype=F64) for c in range(120)]
    assert_close(Poisson().fisher(X[:, :1]), enumerate_scores(Poisson().nll, counts, X[:, :1]), 1e-13)


@pytest.mark.parametrize("log_variance", [True, False])
def test_gaussian_form_in_its_variance_is_that_of_quadrature(log_variance):
    family = HeteroscedasticGaussian(log_variance)
    mean, spread = torch.tensor([[0.3]], dtype=F64), torch.tensor([[0.7]], dtype=F64)
    sd = (spread / 2).exp() if log_variance else spread.sqrt()
    grid = torch.linspace(-14, 14, 4001, dtype=F64)  # the trapezoid rule is exact to round-off on a Gaussian
    targets = mean + sd * grid.unsqueeze(1)
    scores = family.score((mean.expand(4001, 1), spread.expand(4001, 1)), targets)
    weight = (-grid.square() / 2).exp() / (2 * math.pi) ** 0.5 * (grid[1] - grid[0])
    expected = torch.einsum("t,tm,tn->mn", weight, scores, scores)
    assert_close(family.fisher(torch.cat([mean, spread], dim=1))[0], expected, 1e-12)


SATURATED = {"Bernoulli": Bernoulli(), "Categorical": Categorical()}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", SATURATED)
def test_forms_stay_finite_where_probabilities_underflow(name, dtype):
    family = SATURATED[name]
    rows = torch.tensor([[200.0, -200.0, 0.0], [20.0, -20.0, 3.0]], dtype=dtype)
    for found in (
        family.fisher(rows),
        family.root(rows),
        family.mv(rows, torch.ones_like(rows)),
        family.kl(rows, -rows),
    ):
        assert torch.isfinite(found).all()
    assert (symmetrise(family.fisher(rows)).diagonal(dim1=1, dim2=2) >= 0).all()


def test_bernoulli_curvature_keeps_its_digits_in_float32():
    r = torch.tensor([[-30.0, 30.0]])
    expected = torch.exp(torch.tensor(-30.0, dtype=F64))
    assert_close(Bernoulli().curvature(r).double(), expected.expand(1, 2), 1e-6)  # float32


def test_a_two_class_categorical_is_a_bernoulli_on_the_difference():
    logits = X[:, :2]
    difference = logits[:, 1:] - logits[:, :1]
    jacobian = torch.tensor([[-1.0, 1.0]], dtype=F64)
    assert_close(Categorical().fisher(logits), jacobian.mT @ Bernoulli().fisher(difference) @ jacobian, 1e-14)


def test_class_probabilities_as_targets_average_the_log_likelihoods():
    weights = draw(3, 4, seed=2).softmax(1)
    single = torch.stack([Categorical().nll(X, torch.full((3,), c)) for c in range(4)], dim=1)
    assert_close(Categorical().nll(X, weights), (weights * single).sum(1), 1e-14)


def test_heads_are_independent():
    family, outputs = FAMILIES["two heads"]
    form = family.fisher(family.rows(outputs))
    assert_close(form[:, :4, :4], Categorical().fisher(X), 1e-15)
    assert not form[:, :4, 4:].any()
    targets = (torch.tensor([0, 1, 2]), draw(3, 2, seed=5))
    parts = Categorical().nll(X, targets[0]) + Gaussian(0.5).nll(outputs[1], targets[1])
    assert_close(family.nll(outputs, targets), parts, 1e-15)


def test_a_missing_form_says_what_to_do():
    with pytest.raises(NotImplementedError, match="sampled_fisher"):
        Sampled().fisher(X)


def test_a_likelihood_without_kl_is_checked_for_the_rest():
    check_family(Laplace(), X)


class Wrong(Likelihood):
    """A unit Gaussian that lies in one place."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    def _factor(self, where: str) -> float:
        return 1.5 if self.lie == where else 1.0

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._factor("nll") * (targets - outputs).square().sum(1) / 2

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        generator = None if self.lie == "global" else generator
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)
        return outputs + 0.1 * (self.lie == "bias") + self._factor("sample") * noise

    def fisher(self, rows: Tensor) -> Tensor:
        return self._factor("fisher") * torch.diag_embed(torch.ones_like(rows))

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return self._factor("mv") * tangents

    def root(self, outputs: Tensor) -> Tensor:
        return self._factor("root") * torch.diag_embed(torch.ones_like(outputs))

    def score(self, outputs: Any, targets: Any) -> Tensor:
        return self._factor("score") * super().score(outputs, targets)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return self._factor("kl") * (outputs - other).square().sum(1) / 2


LIES = {
    "nll": r"E\[score score\^T\]",
    "sample": r"E\[score score\^T\]",
    "bias": r"E\[score\]",
    "fisher": "family.mv|root",
    "mv": "family.mv",
    "root": "root",
    "score": "family.score",
    "kl": "kl",
    "global": "draws differently|global random state",
}


def test_the_honest_one_passes():
    check_family(Wrong("nowhere"), X)


@pytest.mark.parametrize("lie", LIES)
def test_check_family_finds_each_lie(lie):
    with pytest.raises(AssertionError, match=LIES[lie]):
        check_family(Wrong(lie), X)


def test_one_log_std_for_all_examples_is_that_of_each():
    log_std, target = draw(4, seed=1), draw(3, 4, seed=2)
    shared, written_out = (X, log_std), torch.cat([X, log_std.expand(3, 4)], dim=1)
    family = DiagonalGaussian()
    assert_close(family.nll(shared, target), family.nll(written_out, target))
    assert_close(family.score(shared, target), family.score(written_out, target))
    normal = torch.distributions.Normal(X, log_std.exp())
    assert_close(family.nll(shared, target), -normal.log_prob(target).sum(1))
