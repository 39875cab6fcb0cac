"""Search over categories and over variables of different kinds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import CGA, PBIL, CategoricalSearch, ProductSearch, natural_slope

SIZES = (3, 2, 4)


def all_points() -> Tensor:
    return torch.cartesian_prod(*(torch.arange(size) for size in SIZES)).to(torch.float64)


def table(X: Tensor) -> Tensor:
    """A value per category, added up: in the span of the statistics. Least at (1, 0, 3)."""
    scores = ([2.0, 0.0, 1.0], [0.0, 3.0], [4.0, 2.0, 1.0, 0.5])
    return sum(torch.tensor(s, dtype=torch.float64)[X[:, i].long()] for i, s in enumerate(scores))


def test_the_slope_is_the_natural_gradient():
    """Changes of E_p[f] along theta - s b: the derivative is minus the variance of b T, which no other slope beats."""
    search = CategoricalSearch(SIZES, seed=0)
    search.theta = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = all_points()
    T, f = search.statistics(points), torch.randn(24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    p = torch.softmax(T @ search.theta, 0)
    b = natural_slope(T, f, p, ridges=(0.0,)).value
    fisher = (T.T * p) @ T - torch.outer(T.T @ p, T.T @ p)
    gradient = (T.T * p) @ f - (T.T @ p) * (p @ f)
    assert_close(fisher @ b, gradient)
    assert_close(b, torch.linalg.pinv(fisher, atol=1e-10) @ gradient)  # the shortest, as columns add up to one


def test_pbil_moves_the_probabilities_by_the_natural_gradient():
    search = CategoricalSearch((3,), popsize=8, seed=0, update=PBIL(0.3, best=2), margin=0.01)
    X = search.ask()
    F = X[:, 0] + 0.01 * torch.arange(8)
    search.tell(X, F)
    best = torch.nn.functional.one_hot(X[F.argsort()[:2], 0].long(), 3).double().mean(0)
    assert_close(search.probabilities[0], 0.7 / 3 + 0.3 * best)


@pytest.mark.parametrize("update", [None, PBIL(1.0, 1), CGA(0.01)])
def test_no_probability_dies_whatever_the_update(update):
    search = CategoricalSearch(SIZES, popsize=12, seed=0, update=update)
    generator = torch.Generator().manual_seed(0)
    scales = [1.0, 0.0, 1e200, math.inf, math.nan]
    for k in range(40):
        X = search.ask()
        assert bool(((X >= 0) & (torch.tensor(SIZES) > X)).all())
        search.tell(X, scales[k % 5] * torch.randn(12, generator=generator))
        for size, p in zip(SIZES, search.probabilities, strict=True):
            assert_close(p.sum(), torch.ones((), dtype=torch.float64))
            assert float(p.min()) >= min(1 / (3 * (size - 1)), 1 / (2 * size)) - 1e-9


# Products.


def centred_bowl(X: Tensor) -> Tensor:
    """Real columns 0-2, integers to rank in column 3, categories in the last two; least, 0, at (0, 0, 0, 2, 1, 1)."""
    return X[:, :3].square().sum(1) + (X[:, 3] - 2).square() + (X[:, 4:] != 1).sum(1)


def test_reals_integers_and_categories_are_found_together():
    real = ng.GaussianSearch([1.0, 2.0, -1.0, 7.0], 1.0, 16, seed=0, integers=[3])
    kinds = CategoricalSearch([3, 4], 16, seed=0, update=PBIL(0.1, 4))
    result = ng.minimize(centred_bowl, ProductSearch(real, kinds), ftarget=1e-6, maxfevals=8000)
    assert result.success
    assert result.x[3:].tolist() == [2, 1, 1]


def test_the_parts_of_a_product_move_as_they_would_alone():
    joint = ProductSearch(
        ng.GaussianSearch([1.0, 1.0], 1.0, 10, seed=0), CategoricalSearch([3], 10, 1, update=PBIL(0.1, 2))
    )
    alone = ng.GaussianSearch([1.0, 1.0], 1.0, 10, seed=0), CategoricalSearch([3], 10, 1, update=PBIL(0.1, 2))
    for _ in range(5):
        X = joint.ask()
        parts = [part.ask() for part in alone]
        assert torch.equal(X, torch.cat(parts, 1))
        F = X.square().sum(1)
        joint.tell(X, F)
        for part, own in zip(alone, parts, strict=True):
            part.tell(own, F)
    assert torch.equal(joint.parts[0].mean, alone[0].mean)
    assert torch.equal(joint.parts[1].theta, alone[1].theta)
    assert set(joint.measures()) >= {"sigma", "explained"}
    assert joint.stop() is None
