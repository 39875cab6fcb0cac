"""Integer and mixed variables."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import XNES, Separable


def mixed_bowl(X: Tensor) -> Tensor:
    return (X[:, :2] - torch.tensor([3.0, -2.0])).square().sum(1) + 10 * (X[:, 2:] - 0.7).square().sum(1)


def test_a_mixed_minimum_is_found():
    bounds = ([-10, -10, -5, -5], [10, 10, 5, 5])
    result = ng.minimize(
        mixed_bowl, torch.zeros(4), 1.0, integers=[0, 1], bounds=bounds, ftarget=1e-8, maxfevals=4000, seed=0
    )
    assert result.success
    assert result.x[:2].tolist() == [3.0, -2.0]


@pytest.mark.parametrize("model", [None, Separable(), XNES()])
def test_every_candidate_is_an_integer_within_bounds(model):
    search = ng.GaussianSearch([0.2, 1.0], 3.0, seed=0, bounds=(-1.5, 2.7), integers=[True, False], model=model)
    for _ in range(30):
        X = search.ask()
        assert {str(x) for x in X[:, 0].tolist()} <= {"-1.0", "0.0", "1.0", "2.0"}  # no -0.0
        assert bool(((X >= -1.5) & (X <= 2.7)).all())
        search.tell(X, X.square().sum(1))


# What integers find.


def stepped_ellipsoid(X: Tensor) -> Tensor:
    """An ellipsoid of condition 1000 with its minimum, 0, at (0, 1, 2, ...)."""
    d = X.shape[1]
    return ((X - torch.arange(d)).square() * 1000.0 ** torch.linspace(0, 1, d)).sum(1)


@pytest.mark.parametrize("model", [None, Separable()])
@pytest.mark.parametrize("d", [3, 8])
def test_an_ellipsoid_of_integers_is_minimised(d: int, model):
    settings = {"bounds": (-20, 20), "ftarget": 0, "seed": 0, "model": model, "maxfevals": 5000}
    assert ng.minimize(stepped_ellipsoid, [7.0] * d, 2.0, integers=range(d), **settings).success


def test_the_distribution_moves_by_the_integers_that_were_evaluated():
    """A draw of .6 was evaluated at 1: its step is the one to 1. What stays at the centre's integer keeps its own."""
    search = ng.GaussianSearch([0.0, 0.2], 1.0, popsize=50, seed=0, integers=[0])
    X = search.ask()
    _, normals, steps = search._asked
    z, y = search._measure_rounded_steps(X, normals, steps)
    moved = X[:, 0] != 0
    assert bool(moved.any())
    assert_close(search.sigma * search.state["stretch"][0] * y[moved, 0], X[moved, 0])
    assert_close(y[~moved], steps[~moved])
    assert_close(y[:, 1], steps[:, 1])
    assert_close(search.model.steps(search.state, z), y)


@pytest.mark.parametrize("why", ["stagnation", "tolx", "tolfun", "precision"])
def test_a_search_of_integers_that_stalls_asks_for_the_neighbours_of_its_best_point(why: str):
    def build() -> ng.GaussianSearch:
        search = ng.GaussianSearch([0.0, 0.0], 1.0, popsize=4, seed=0, integers=range(2), bounds=(-1, 3))
        search._monitor._find_reason = lambda *_: f"{why}: the search goes nowhere"
        return search

    search = build()
    search.tell(torch.tensor([[0.0, -1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert search.stop() is None
    again = build()
    again.load_state_dict(search.state_dict())
    X = again.ask()
    assert X[:3].tolist() == [[-1.0, -1.0], [1.0, -1.0], [0.0, 0.0]]  # (0, -2) lies beyond a bound
    again.tell(X, torch.tensor([1.0, 0.5, 1.0, 1.0]))  # a better one: its neighbours are next
    X = again.ask()
    assert again.stop() is None
    assert X[:3].tolist() == [[0.0, -1.0], [2.0, -1.0], [1.0, 0.0]]
    again.tell(X, torch.ones(4))
    assert str(again.stop()).startswith("converged: every integer point next to the best one")
