"""Likelihoods: score, Fisher form, root, KL and sampling speak of one distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor

import natgrad as ng
from natgrad.families import as_criterion
from natgrad.ground.linalg import symmetrise
from natgrad.testing import check_family

X = draw(3, 4)


class Sampled(ng.Likelihood):
    """A user's own likelihood with the two methods that it must have."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets - outputs).square().sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return outputs + 0.5**0.5 * torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)


FAMILIES: dict[str, tuple[ng.Likelihood, Any]] = {
    "Gaussian": (ng.Gaussian(), X),
    "Gaussian, small std": (ng.Gaussian(0.01), X),
    "Gaussian on images": (ng.Gaussian(2.0), draw(2, 2, 3)),
    "Bernoulli": (ng.Bernoulli(), X),
    "Bernoulli, one output": (ng.Bernoulli(), X[:, 0]),
    "Poisson": (ng.Poisson(), X),
    "Categorical": (ng.Categorical(), X),
    "Categorical, two classes": (ng.Categorical(), X[:, :2]),
    "Categorical over positions": (ng.Categorical(), draw(2, 3, 4)),
    "Categorical, classes second": (ng.Categorical(dim=1), draw(2, 4, 3)),
    "Gaussian, log variance": (ng.HeteroscedasticGaussian(), (X, draw(3, 4, seed=1))),
    "Gaussian, log variance, one tensor": (ng.HeteroscedasticGaussian(), X),
    "Gaussian, variance": (ng.HeteroscedasticGaussian(log_variance=False), (X, draw(3, 4, seed=1).exp())),
    "Gaussian, one variance for several means": (ng.HeteroscedasticGaussian(), (X, draw(3, 1, seed=1))),
    "Gaussian, diagonal": (ng.DiagonalGaussian(), X),
    "Gaussian, diagonal, a tuple": (ng.DiagonalGaussian(), (X, draw(3, 4, seed=1))),
    "heads in one tensor": (ng.Heads((ng.Categorical(), 3), (ng.Bernoulli(), 1)), X),
    "two heads": (ng.Heads((ng.Categorical(), 4), (ng.Gaussian(0.5), 2)), (X, draw(3, 2, seed=1))),
    "three heads": (ng.Heads((ng.Bernoulli(), 4), (ng.Poisson(), 1), (ng.Bernoulli(), 2)), (X, X[:, :1], X[:, 2:])),
    "targets that may be missing": (ng.Masked(ng.Gaussian(0.5)), X),
    "heads that may be missing": (
        ng.Heads((ng.Masked(ng.Categorical()), 4), (ng.Masked(ng.HeteroscedasticGaussian()), 2)),
        (X, draw(3, 2, seed=1)),
    ),
    "CrossEntropyLoss": (as_criterion(torch.nn.CrossEntropyLoss()).family, draw(2, 4, 3)),
    "BCEWithLogitsLoss": (as_criterion(torch.nn.BCEWithLogitsLoss()).family, X),
    "BCELoss": (as_criterion(torch.nn.BCELoss()).family, X.sigmoid()),
    "MSELoss": (as_criterion(torch.nn.MSELoss()).family, X),
    "GaussianNLLLoss": (as_criterion(torch.nn.GaussianNLLLoss()).family, (X, draw(3, 4, seed=1).exp())),
    "PoissonNLLLoss": (as_criterion(torch.nn.PoissonNLLLoss()).family, X),
    "PoissonNLLLoss of rates": (as_criterion(torch.nn.PoissonNLLLoss(log_input=False, eps=1e-12)).family, X.exp()),
    "a user's own": (Sampled(), X),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_sound(name):
    family, outputs = FAMILIES[name]
    check_family(family, outputs, samples=5000)


@pytest.mark.parametrize("log_variance", [True, False])
def test_gaussian_form_in_its_variance_is_that_of_quadrature(log_variance):
    family = ng.HeteroscedasticGaussian(log_variance)
    mean, spread = torch.tensor([[0.3]], dtype=F64), torch.tensor([[0.7]], dtype=F64)
    sd = (spread / 2).exp() if log_variance else spread.sqrt()
    grid = torch.linspace(-14, 14, 4001, dtype=F64)  # the trapezoid rule is exact to round-off on a Gaussian
    targets = mean + sd * grid.unsqueeze(1)
    scores = family.score((mean.expand(4001, 1), spread.expand(4001, 1)), targets)
    weight = (-grid.square() / 2).exp() / (2 * math.pi) ** 0.5 * (grid[1] - grid[0])
    expected = torch.einsum("t,tm,tn->mn", weight, scores, scores)
    assert_close(family.fisher(torch.cat([mean, spread], dim=1))[0], expected, 1e-12)


def test_parts_of_dicts_go_by_the_names_of_the_outputs():
    heads, outputs, weight = ng.Heads((ng.Gaussian(), 4), (ng.Gaussian(), 4)), {"a": X, "b": -X}, draw(3, seed=1).exp()
    targets, turned = (X + 1, X - 2), {"b": X - 2, "a": X + 1}
    assert_close(heads.nll(outputs, turned), heads.nll(outputs, targets))
    by_order, by_name = (
        heads.weigh(outputs, *pair, None) for pair in ((targets, (weight, None)), (turned, {"b": None, "a": weight}))
    )
    torch.testing.assert_close(by_name, by_order)


SATURATED = {"Bernoulli": ng.Bernoulli(), "Categorical": ng.Categorical()}


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


def test_class_probabilities_as_targets_average_the_log_likelihoods():
    weights = draw(3, 4, seed=2).softmax(1)
    single = torch.stack([ng.Categorical().nll(X, torch.full((3,), c)) for c in range(4)], dim=1)
    assert_close(ng.Categorical().nll(X, weights), (weights * single).sum(1), 1e-14)


def test_a_missing_form_says_what_to_do():
    with pytest.raises(NotImplementedError, match="sampled_fisher"):
        Sampled().fisher(X)


class Wrong(ng.Likelihood):
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
