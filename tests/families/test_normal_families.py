"""Normal families: the lectures' closed forms, sparse precisions, what stays accurate, and errors at the door."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw, tensor
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import DiagonalNormal, FixedCovarianceNormal, FixedMeanNormal, SparseNormal

GENERATOR = torch.Generator().manual_seed(0)


def graph(d: int) -> list[tuple[int, int]]:
    """A cycle with a few chords, beyond what elimination gives for nothing."""
    pairs = [*((i, (i + 1) % d) for i in range(d)), *((i, (i + d // 2) % d) for i in range(0, d // 2, 2))]
    return sorted({(min(e), max(e)) for e in pairs if e[0] != e[1]})


def sparse_theta(family: SparseNormal) -> Tensor:
    d = family.d
    off = 0.3 * draw(len(family.pairs.edges), seed=2)
    precision = family.pairs.unpack(torch.cat([torch.zeros(d, dtype=F64), off]))
    precision = precision + torch.diag(precision.abs().sum(1) + 0.1 + draw(d).abs())
    return family.from_mean_precision(draw(d), precision)


# The lectures' entries one by one, with their misprints mended; (k, l) are those of T = (x; x_k^2; 2 x_k x_l).


def test_the_diagonal_family_is_the_full_one_without_pairs():
    full, diagonal = ng.MultivariateNormal(3), DiagonalNormal(3)
    theta = diagonal.from_mean_std(draw(3), draw(3, seed=4).exp())
    whole = torch.cat([theta, torch.zeros(3, dtype=F64)])
    part = ng.SubModel(full, range(6), base=tensor([0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0]))
    assert_close(diagonal.log_partition(theta), full.log_partition(whole))
    assert_close(diagonal.expectation(theta), full.expectation(whole)[:6])
    assert_close(diagonal.fisher(theta).dense(), part.covariance(theta))
    operator = diagonal.fisher(theta)
    inverse = operator.inverse(0.0)
    assert inverse is not None
    assert_close(inverse.dense(), torch.linalg.inv(operator.dense()), rtol=1e-9, atol=1e-9)
    for found, given in zip(diagonal.mean_std(theta), (draw(3), draw(3, seed=4).exp()), strict=True):
        assert_close(found, given)


@pytest.mark.parametrize("d", [2, 5, 12, 30])
def test_a_sparse_precision_comes_back(d):
    family = SparseNormal(d, graph(d))
    theta = sparse_theta(family)
    found = family.natural(family.expectation(theta))
    assert_close(found, theta, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "family",
    [ng.MultivariateNormal(2), DiagonalNormal(2), SparseNormal(2, []), FixedMeanNormal(torch.zeros(2)), ng.Normal()],
    ids=repr,
)
def test_single_precision_stays_single(family):
    x = torch.randn(200, family.d, generator=GENERATOR)
    theta = family.mle(x)
    found = [
        theta,
        family.expectation(theta),
        family.entropy(theta),
        family.log_prob(theta, x),
        family.covariance(theta),
    ]
    assert all(value.dtype == torch.float32 for value in found)
    assert family.fisher(theta).dtype == torch.float32
    assert_close(family.expectation(theta), family.statistics(x).mean(0), rtol=1e-4, atol=1e-4)


FULL, SPARSE = ng.MultivariateNormal(2), SparseNormal(3, [(0, 1)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FULL.from_mean_covariance(torch.zeros(2), tensor([[1.0, 0.5], [0.0, 1.0]])), ("symmetric", "A.mT")),
        (lambda: FULL.from_mean_covariance(torch.zeros(2), torch.nan * torch.eye(2)), ("positive definite",)),
        (lambda: FULL.from_mean_covariance(torch.nan * torch.zeros(2), torch.eye(2)), ("mean", "not finite")),
        (lambda: FULL.statistics(draw(5, 3)), ("(5, 3)", "(..., 2)")),
        (lambda: FULL.natural(tensor([1.0, 0.0, 0.5, 1.0, 0.0])), ("positive definite",)),
        (lambda: FULL.natural(tensor([torch.inf, 0.0, 0.5, 1.0, 0.0])), ("not finite",)),
        (lambda: SparseNormal(3, [(0, 3)]), ("(0, 3)", "0 to 2")),
        (lambda: SparseNormal(3, [(0, 1), (1, 0)]), ("a pair twice",)),
        (lambda: SPARSE.from_mean_precision(torch.zeros(3), torch.eye(3) + 0.1), ("beside the edges",)),
        (lambda: SPARSE.from_mean_precision(torch.zeros(3), -torch.eye(3)), ("precision is not positive definite",)),
        (lambda: SPARSE.natural(tensor([1.0, 0, 0, 1, 1, 1, 0])), ("variances <= 0",)),
        (lambda: SPARSE.natural(tensor([0.0, 0, 0, 1, 1, 1, 2.5])), ("eta is not reached",)),
        (lambda: FixedMeanNormal(torch.zeros(2, 2)), ("(d,)", "torch.zeros(d)")),
        (lambda: FixedMeanNormal(torch.zeros(2)).expectation(torch.ones(3)), ("outside", "positive definite")),
        (lambda: FixedCovarianceNormal(torch.ones(2, 2)), ("positive definite",)),
        (lambda: FixedCovarianceNormal(torch.ones(2)), ("(2,)", "(d, d)")),
        (lambda: DiagonalNormal(2).natural(tensor([1.0, 0.0, 1.0, 1.0])), ("variances <= 0",)),
        (lambda: DiagonalNormal(2).expectation(torch.ones(4)), ("outside", "negative")),
        (lambda: ng.Normal().from_mean_std(torch.tensor(0.0), torch.tensor(-1.0)), ("std > 0",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_covariance_off_the_graph_is_completed():
    """theta of Sigma: its entries on the graph are kept, the precision is zero off it."""
    family = FixedMeanNormal(torch.zeros(3, dtype=F64), [(0, 1), (1, 2)])
    given = tensor([[2.0, 0.5, 0.1], [0.5, 1.5, -0.4], [0.1, -0.4, 1.0]])
    theta = family.from_covariance(given)
    found = family.mean_covariance(theta)[1]
    kept = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    assert_close(found[kept], given[kept])
    assert_close(family.precision(theta)[0, 2], tensor(0.0))
    assert abs(float(found[0, 2]) - 0.5 * -0.4 / 1.5) < 1e-12  # conditional independence given the middle


CHAIN_FREE = [0, 1, 2, 3, 4, 5, 6, 8]
CHAIN = ng.SubModel(ng.MultivariateNormal(3), CHAIN_FREE, base=tensor([0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0]))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_newton_refuses_moments_on_the_edge_and_beyond(size):
    x = size * draw(3)
    edge = CHAIN.statistics(x)  # one point: no spread
    for eta in (edge, edge - 1e-6 * tensor([0.0, 0, 0, 1, 1, 1, 0, 0])):
        with pytest.raises(ValueError, match="not reached"):
            CHAIN.natural(eta)
