"""Operators are those of one point: neither parameters that move on nor copies and pickles change a product."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import F64, X3, draw, mlp, pair
from torch import Tensor, nn
from torch.distributions import Normal

import natgrad as ng
from natgrad.families import FixedMeanNormal, MeanCovariance, MeanStd, Wishart, fisher_in
from natgrad.operators import Operator

Built = tuple[Operator, list[Tensor]]
BITS = (X3 > 0).double()
NORMAL = ng.MultivariateNormal(2)
THETA = NORMAL.from_mean_covariance(draw(2), torch.tensor([[1.0, 0.25], [0.25, 2.0]], dtype=F64))


def at_model(metric: Any, inputs: Any = X3) -> Built:
    of = getattr(metric, "moment", metric)
    params = ng.trainable(of.model if hasattr(of, "model") else of.log_p)
    return metric.at(params, inputs), list(params.values())


def at_estimate(choose: Callable[..., Any], function: Callable[..., Any]) -> Built:
    b = draw(2)
    return choose(function, b).at(b, (draw(9, 2), draw(9, seed=1))), [b]


def at_theta(operator_of: Callable[[Tensor], Operator], theta: Tensor) -> Built:
    own = theta.clone()
    return operator_of(own), [own]


def regression(b: Tensor, x: Tensor) -> Normal:
    return Normal(x @ b, 1.0)


def log_likelihood(b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return Normal(x @ b, 1.0).log_prob(y)


def energy() -> nn.Module:
    return mlp(3, 4, 1)


def curve(xi: Tensor) -> Tensor:
    return torch.cat([xi, -xi.exp()])


BUILDERS: dict[str, Callable[[], Built]] = {
    "Fisher": lambda: at_model(ng.fisher(mlp(3, 4, 2), ng.Categorical())),
    "Fisher, chunks": lambda: at_model(ng.fisher(mlp(3, 4, 2), ng.Categorical(), chunk_size=2)),
    "sampled Fisher, chunks": lambda: at_model(ng.sampled_fisher(mlp(3, 4, 2), ng.Categorical(), chunk_size=2)),
    "centred covariance": lambda: at_model(
        ng.covariance(mlp(3, 4, 2), nn.MSELoss(), centred=True), (X3, draw(len(X3), 2))
    ),
    "score": lambda: at_model(ng.score_metric(energy())),
    "score, slices": lambda: at_model(ng.score_metric(energy(), slices=2)),
    "score, chunks": lambda: at_model(ng.score_metric(energy(), chunk_size=2)),
    "score, chunks and masks": lambda: at_model(ng.score_metric(energy(), mask=X3 > 0, chunk_size=2)),
    "ratio": lambda: at_model(ng.ratio_metric(energy()), BITS),
    "ratio, chunks": lambda: at_model(ng.ratio_metric(energy(), chunk_size=2), BITS),
    "transport": lambda: at_model(ng.transport_metric(mlp(3, 2, 2), basis=10)),
    "expected information": lambda: at_estimate(ng.fisher, regression),
    "sampled information": lambda: at_estimate(ng.sampled_fisher, regression),
    "empirical information": lambda: at_estimate(ng.empirical_fisher, log_likelihood),
    "observed information": lambda: at_estimate(ng.observed_fisher, log_likelihood),
    "family, a matrix": lambda: at_theta(ng.Gamma().fisher, torch.tensor([1.0, -2.0], dtype=F64)),
    "family, products": lambda: at_theta(NORMAL.fisher, THETA),
    "family, products by functions": lambda: at_theta(FixedMeanNormal(torch.zeros(2)).fisher, THETA[2:]),
    "Wishart": lambda: at_theta(Wishart(2).fisher, torch.tensor([2.0, -1.0, -1.0, 0.25], dtype=F64)),
    "classes": lambda: at_theta(ng.Categorical(4).fisher, draw(4)),
    "family, inverse": lambda: at_theta(NORMAL.fisher_expectation, NORMAL.expectation(THETA)),
    "field, products": lambda: at_theta(ng.Ising(3).fisher, draw(6)),
    "mean and covariance": lambda: at_theta(MeanCovariance(NORMAL).fisher, MeanCovariance(NORMAL).of(THETA)),
    "mean and deviation": lambda: at_theta(MeanStd(ng.Normal()).fisher, draw(2).exp()),
    "a curve": lambda: at_theta(lambda xi: fisher_in(ng.Normal(), curve, xi), draw(1)),
    "Wasserstein": lambda: at_theta(ng.geometry.Wasserstein(2).metric, torch.tensor([0, 0, 1, 2, 0.5], dtype=F64)),
}


def pickle_and_load(operator: Operator) -> Operator:
    return pickle.loads(pickle.dumps(operator))


@pytest.mark.parametrize(("name", "copy_of"), pair(BUILDERS, [copy.deepcopy, pickle_and_load]))
def test_a_copy_has_the_same_products(name: str, copy_of: Callable[[Operator], Operator]) -> None:
    operator, _ = BUILDERS[name]()
    vector, twin = draw(operator.size), copy_of(operator)
    torch.testing.assert_close(twin @ vector, operator @ vector, rtol=1e-12, atol=0)
    assert twin.facts == operator.facts
    inverse, back = operator.inverse(0.0), twin.inverse(0.0)
    assert (inverse is None) == (back is None)
    if inverse is not None and back is not None:
        torch.testing.assert_close(copy_of(inverse) @ vector, back @ vector, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", BUILDERS)
def test_an_operator_stays_where_it_was_taken(name: str) -> None:
    """Its graphs may be built anew at each product, and its tensors must not be the caller's own."""
    operator, point = BUILDERS[name]()
    vector = draw(operator.size)
    before = operator @ vector
    with torch.no_grad():
        for tensor in point:
            tensor.mul_(1.5).sub_(0.25)
    torch.testing.assert_close(operator @ vector, before, rtol=1e-12, atol=0)


class Counting(nn.Module):
    """A model whose outputs depend on what it keeps: a number, a list, an array of random bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = mlp(3, 2)
        self.calls, self.seen = 1, [1.0]
        self.source = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(torch.rand((), generator=self.source)))
        return self.linear(x) * self.calls * sum(self.seen)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle_and_load])
def test_a_copy_replays_what_the_model_kept_when_the_operator_was_taken(copy_of: Any) -> None:
    model = Counting()
    operator = ng.fisher(model, ng.Gaussian()).at(ng.trainable(model), X3)
    vector = draw(operator.size)
    expected = operator @ vector
    model(X3)  # moves on
    twin = copy_of(operator)
    torch.testing.assert_close(twin @ vector, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(operator @ vector, expected, rtol=1e-12, atol=0)
    assert (model.calls, len(model.seen)) == (2, 2)
