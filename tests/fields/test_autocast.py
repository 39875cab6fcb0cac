"""What is computed here is not rounded by the autocast that holds where it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import draw, mlp
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import (
    Expectation,
    FixedCovarianceNormal,
    FixedMeanNormal,
    MeanCholesky,
    MeanCovariance,
    Natural,
    SparseNormal,
    Wishart,
    convert_covector,
    convert_vector,
)
from natgrad.geometry import (
    Location,
    Manifold,
    PositiveDefinite,
    Wasserstein,
    e_projection,
    fisher_rao,
    kl_ball,
    m_projection,
    tilt,
)
from natgrad.operators import BlockOperator, DenseOperator, KroneckerOperator, LowRankOperator, Operator
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


Doors = dict[str, tuple[Any, dict[str, Any]]]
INNER = {"mv", "mm", "invert", "guess"}  # what solvers and `natural` call: a user's door to products is G @ v
LONG = {"estimate", "estimate_log_partition", "fit"}  # chains, and sums over examples


def of_family(
    family: ng.ExponentialFamily, theta: Tensor, other: Tensor, **usual: Tensor
) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    given = {"theta": theta, "other": other, "eta": family.expectation(theta), "x": family.sample(theta, 40), "n": 5}
    return family, given | {"count": 5, "outputs": theta.repeat(3, 1)} | usual


def at_point(manifold: Manifold, point: Tensor, other: Tensor, speed: Tensor) -> tuple[Any, dict[str, Any]]:
    names = ("tangent", "vector", "first", "second", "gradient")
    return manifold, {"point": point, "other": other, "t": 0.3} | dict.fromkeys(names, 0.1 * speed)


def in_coordinates(kind: Any) -> tuple[Any, dict[str, Any]]:
    family = ng.MultivariateNormal(3)
    coordinates = kind(family)
    vectors = dict.fromkeys(("vector", "covector", "gradient"), GRADIENT)
    return coordinates, {"theta": THETA, "xi": coordinates.of(THETA), "mean": X[0], "covariance": SPD} | vectors


def of_network(metric: ng.Metric, data: Any = X) -> tuple[Any, dict[str, Any]]:
    return metric.at(ng.trainable(NET), data), {}


def of_structure(structure: Any) -> tuple[Any, dict[str, Any]]:
    metric = ng.fisher(NET, ng.Categorical())
    return structure.update(None, metric, ng.trainable(NET), X)[0], {}


EXACT, LABELS = ng.ExactLabels(), torch.arange(50) % 2
PACKED = torch.cat([SPD.diagonal(), SPD[0, 1:], SPD[1, 2:]])
ELSEWHERE = torch.cat([OTHER.diagonal(), OTHER[0, 1:], OTHER[1, 2:]])
KNOWN_MEAN, KNOWN_COVARIANCE, CHAIN = (
    FixedMeanNormal(X[0]),
    FixedCovarianceNormal(SPD),
    SparseNormal(3, [(0, 1), (1, 2)]),
)
AT, THERE = KNOWN_MEAN.from_covariance(SPD), KNOWN_MEAN.from_covariance(OTHER)
MATRICES, FREE = Wishart(3), [0, 1, 2, 3, 4, 5, 6, 8]
PART = ng.SubModel(NORMAL, FREE, THETA.index_fill(0, torch.tensor([7]), 0.0))
DOORS: Doors = {
    "normals": of_family(NORMAL, THETA, NEXT, mean=X[0], covariance=SPD),
    "normals on a graph": of_family(CHAIN, THETA[FREE], NEXT[FREE]),
    "normals of a known mean": of_family(KNOWN_MEAN, AT, THERE, covariance=SPD),
    "normals of a known covariance": of_family(KNOWN_COVARIANCE, X[0], X[1]),
    "matrices": of_family(MATRICES, *(MATRICES.from_degrees_scale(torch.tensor(5.0), part) for part in (SPD, OTHER))),
    "fields": of_family(FIELD, INSIDE, -INSIDE),
    "a part": of_family(PART, THETA[FREE], NEXT[FREE]),
    "gamma": of_family(ng.Gamma(), torch.tensor([1.0, -2.0]), torch.tensor([2.0, -1.0])),
    "mean and covariance": in_coordinates(MeanCovariance),
    "mean and factor": in_coordinates(MeanCholesky),
    "expectations": in_coordinates(Expectation),
    "covariances": at_point(PositiveDefinite(), SPD, OTHER, OTHER),
    "covariances in theta": at_point(fisher_rao(KNOWN_MEAN), AT, THERE, AT),
    "transport": at_point(Wasserstein(3), torch.cat([X[0], PACKED]), torch.cat([X[1], ELSEWHERE]), GRADIENT),
    "means": at_point(Location(SPD), X[0], X[1], X[2]),
    "a manifold without closed forms": (
        fisher_rao(ng.Gamma()),
        {"point": torch.tensor([1.0, -2.0]), "first": LOGITS[:2], "second": LOGITS[1:]},
    ),
    "low rank": (LowRankOperator(NUMBERS.mT @ NUMBERS[:, :2]), {}),
    "Kronecker": (KroneckerOperator(SPD, OTHER), {}),
    "blocks": (BlockOperator([DenseOperator(SPD), LowRankOperator(X.mT)]), {}),
    "network": of_network(ng.fisher(NET, ng.Categorical())),
    "network, its data": of_network(ng.covariance(NET, ng.Categorical(), centred=True), (X, LABELS)),
    "network, a part at a time": of_network(ng.fisher(NET, ng.Categorical(), chunk_size=20)),
    "network, Hessian": of_network(ng.hessian(NET, nn.CrossEntropyLoss()), (X, LABELS)),
    "layers": of_structure(ng.Kronecker(estimate=EXACT)),
    "layers' eigenbases": of_structure(ng.EigenKronecker(estimate=EXACT)),
    "units": of_structure(ng.UnitWise(estimate=EXACT)),
    "layers of low rank": of_structure(ng.structures.OnlineLowRank(estimate=EXACT)),
}


def list_doors(thing: Any, given: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The public methods whose arguments are known."""
    for name, method in inspect.getmembers(thing, inspect.ismethod):
        if not name.startswith("_") and name not in INNER | LONG and method.__self__ is thing:
            needed = [p.name for p in inspect.signature(method).parameters.values() if p.default is p.empty]
            if set(needed) <= set(given):
                yield name, lambda method=method, needed=needed: method(*(given[each] for each in needed))


def read_numbers(call: Callable[[], Any]) -> list[Tensor] | str:
    """What a call returns, an operator as its matrix; what it says where it refuses."""
    torch.manual_seed(1)
    try:
        result = call()
    except (ValueError, NotImplementedError, TypeError) as error:
        return str(error)
    parts = result if isinstance(result, tuple | list) else [result]
    return [
        part.dense() if isinstance(part, Operator) else part for part in parts if isinstance(part, Tensor | Operator)
    ]


@pytest.mark.parametrize("name", DOORS)
def test_autocast_rounds_nothing_behind_a_public_method(name: str) -> None:
    rounded = list[str]()
    for method, call in list_doors(*DOORS[name]):
        expected = read_numbers(call)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = read_numbers(call)
        try:
            if isinstance(expected, str):
                assert result == expected
            else:
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        except (AssertionError, TypeError) as error:
            rounded.append(f"{method}: {error}")
    assert not rounded, "\n".join(rounded)
