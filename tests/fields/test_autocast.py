"""Products, solves, projections and fits are not rounded by the autocast that holds where they are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import draw, mlp
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import MeanCovariance, Natural, convert_covector, convert_vector
from natgrad.geometry import (
    e_projection,
    kl_ball,
    m_projection,
    tilt,
)
from natgrad.operators import DenseOperator, KroneckerOperator, LowRankOperator, Operator
from natgrad.solvers import CG, Direct, MinresQLP, SampleSpace

NORMAL, FIELD = ng.MultivariateNormal(3), ng.Ising(4)
NUMBERS = draw(50, 4).float()
X = NUMBERS[:, :3]
SPD = (X.mT @ X) / 9
OTHER = SPD + torch.eye(3)
THETA, NEXT = NORMAL.from_mean_covariance(X[0], SPD), NORMAL.from_mean_covariance(X[1], OTHER)
SIGNS = torch.where(NUMBERS > 0, 1.0, -1.0)
NET = mlp(3, 4, 2).float()
INSIDE, GRADIENT = 0.3 * draw(10).float(), draw(9).float()
LOGITS = torch.tensor([0.3, -0.7, 0.1])


def at_net() -> Operator:
    return ng.fisher(NET, ng.Categorical()).at(ng.trainable(NET), X)


def solve(solver: ng.Solver, operator: Operator) -> Tensor:
    return solver.solve(operator, draw(operator.size, seed=2).float(), damping=0.1).value


def multiply(operator: Operator) -> Tensor:
    return operator @ draw(operator.size, seed=2).float()


CALLS: dict[str, Callable[[], Tensor]] = {
    "product, dense": lambda: multiply(DenseOperator(SPD)),
    "product, root": lambda: multiply(LowRankOperator(X.mT)),
    "product, Kronecker": lambda: multiply(KroneckerOperator(SPD, OTHER)),
    "products": lambda: KroneckerOperator(SPD, OTHER) @ X[:27, :2].repeat(1, 1)[:9].contiguous(),
    "product, net": lambda: multiply(at_net()),
    "product, net's score": lambda: multiply(ng.score_metric(mlp(3, 4, 1).float()).at(*score_place())),
    "CG": lambda: solve(CG(), at_net()),
    "MINRES": lambda: solve(MinresQLP(), at_net()),
    "direct": lambda: solve(Direct(), at_net()),
    "sample space": lambda: solve(SampleSpace(), at_net()),
    "natural gradient": lambda: ng.natural_gradient(at_net(), draw(at_net().size).float(), damping=0.1).value,
    "a vector": lambda: convert_vector(THETA, GRADIENT, Natural(NORMAL), MeanCovariance(NORMAL)),
    "a covector": lambda: convert_covector(THETA, GRADIENT, Natural(NORMAL), MeanCovariance(NORMAL)),
    "gradient of a mean": lambda: ng.natural_gradient_of_mean(NORMAL, THETA, X.square().sum(1).sin(), X),
    "gradient of a mean, by Fisher": lambda: ng.natural_gradient_of_mean(
        NORMAL, THETA, X.square().sum(1).sin(), X, method="fisher"
    ),
    "m-projection": lambda: m_projection(ng.SubModel(FIELD, range(4)), INSIDE),
    "e-projection": lambda: e_projection(ng.SubModel(FIELD, range(4)), INSIDE),
    "tilt": lambda: tilt(FIELD, INSIDE, [0, 1], torch.tensor([0.1, 0.2])),
    "ball": lambda: kl_ball(ng.Gamma(), torch.tensor([1.0, -2.0]), 0.1),
    "scores' fit": lambda: torch.cat(list(ng.GaussMarkov(3, [(0, 1), (1, 2)]).fit(X - X.mean(0)).values())),
}


def score_place() -> tuple[dict[str, nn.Parameter], Tensor]:
    return ng.trainable(mlp(3, 4, 1).float()), X


@pytest.mark.parametrize("name", CALLS)
def test_autocast_rounds_nothing_of_ours(name: str) -> None:
    expected = CALLS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = CALLS[name]()
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)
