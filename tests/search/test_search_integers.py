"""Integer and mixed variables."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import LowRank, Separable
from natgrad.search.gaussian import keep_integer_margin, move_repeats


def phi(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def test_other_integers_keep_their_chance():
    mean = torch.tensor([0.0, 0.3, 2.9, -0.49, 1.0], dtype=torch.float64)
    deviation = torch.tensor([1e-3, 0.1, 1e-9, 0.02, 3.0], dtype=torch.float64)
    far = torch.full_like(mean, math.inf)
    m, s = keep_integer_margin(mean, deviation, -far, far, 0.01)
    mode = mean.round()
    assert bool((phi((mode - 0.5 - m) / s) >= 0.005 - 1e-9).all())
    assert bool((phi((m - mode - 0.5) / s) >= 0.005 - 1e-9).all())
    assert_close(m.round(), mode)
    assert_close((m[4], s[4]), (mean[4], deviation[4]))  # has enough already


def test_at_a_bound_the_other_side_keeps_its_chance():
    mean, deviation = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.01, 0.01], dtype=torch.float64)
    m, s = keep_integer_margin(mean, deviation, torch.zeros_like(mean), torch.ones_like(mean), 0.02)
    assert_close(s, deviation)
    assert_close(phi((m[0] - 0.5) / s[0]), torch.tensor(0.02, dtype=torch.float64))
    assert_close(phi((0.5 - m[1]) / s[1]), torch.tensor(0.02, dtype=torch.float64))


def mixed_bowl(X: Tensor) -> Tensor:
    return (X[:, :2] - torch.tensor([3.0, -2.0])).square().sum(1) + 10 * (X[:, 2:] - 0.7).square().sum(1)


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_minimum_is_found(seed: int):
    bounds = ([-10, -10, -5, -5], [10, 10, 5, 5])
    result = ng.minimize(
        mixed_bowl, torch.zeros(4), 1.0, integers=[0, 1], bounds=bounds, ftarget=1e-8, maxfevals=4000, seed=seed
    )
    assert result.success
    assert result.x[:2].tolist() == [3.0, -2.0]


def test_every_candidate_is_an_integer_within_bounds():
    search = ng.GaussianSearch([0.2, 1.0], 3.0, seed=0, bounds=(-1.5, 2.7), integers=[True, False], model=Separable())
    for _ in range(30):
        X = search.ask()
        assert set(X[:, 0].tolist()) <= {-1.0, 0.0, 1.0, 2.0}
        assert bool(((X >= -1.5) & (X <= 2.7)).all())
        search.tell(X, X.square().sum(1))


WRONG = {
    "indices": (lambda: ng.GaussianSearch([0.0, 0.0], 1.0, integers=[2]), "expected indices below 2"),
    "mask": (lambda: ng.GaussianSearch([0.0, 0.0], 1.0, integers=[True]), "integers is a mask of shape"),
    "numbers": (lambda: ng.GaussianSearch([0.0, 0.0], 1.0, integers=[0.5]), "expected indices of variables or a mask"),
    "no integer": (lambda: ng.GaussianSearch([0.5], 1.0, bounds=(0.2, 0.8), integers=[0]), "no integer lies within"),
    "model": (lambda: ng.GaussianSearch([0.5], 1.0, integers=[0], model=LowRank()), "does not know its variances"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case: str):
    call, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        call()


# What integers find.


def stepped_ellipsoid(X: Tensor) -> Tensor:
    """An ellipsoid of condition 1000 with its minimum, 0, at (0, 1, 2, ...)."""
    d = X.shape[1]
    return ((X - torch.arange(d)).square() * 1000.0 ** torch.linspace(0, 1, d)).sum(1)


@pytest.mark.parametrize("model", [None, Separable()])
@pytest.mark.parametrize("d", [3, 8])
def test_an_ellipsoid_of_integers_is_minimised(d: int, model):
    for seed in range(2):
        settings = {"bounds": (-20, 20), "ftarget": 0, "seed": seed, "model": model, "maxfevals": 5000}
        result = ng.minimize(stepped_ellipsoid, [7.0] * d, 2.0, integers=range(d), **settings)
        assert result.success


def test_most_runs_find_the_integer_minimum_at_the_end_of_a_valley():
    """Rosenbrock's function on integers: each variable is stuck until its neighbour moves; 9 is at the origin."""

    def valley(X: Tensor) -> Tensor:
        return (100 * (X[:, 1:] - X[:, :-1] ** 2) ** 2 + (1 - X[:, :-1]) ** 2).sum(1)

    found = [
        ng.minimize(
            valley, [3.0] * 10, 2.0, integers=range(10), bounds=(-10, 10), ftarget=0, seed=seed, maxfevals=2000
        ).fun
        for seed in range(4)
    ]
    assert sum(fun == 0 for fun in found) >= 2
    assert sum(fun <= 9 for fun in found) >= 3


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


def test_every_second_repeat_of_the_centre_is_moved_within_bounds():
    centre, integer = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([True, True, False])
    lower, upper = torch.tensor([0.0, 0.0, -9.0]), torch.tensor([3.0, torch.inf, 9.0])
    points = centre.repeat(4001, 1)
    points[-1, 1] = 5.0  # no repeat
    generator = torch.Generator().manual_seed(0)
    found = move_repeats(points, centre, integer, lower, upper, generator)
    assert torch.equal(found[::2], points[::2])
    assert bool(((found >= lower) & (found <= upper)).all())
    step = found[1::2] - centre
    assert bool(((step != 0).sum(1) <= 1).all())
    assert bool((step[:, 2] == 0).all())
    up = step[:, 1][step[:, 1] > 0]
    shares = torch.stack([(up == k).double().mean() for k in (1, 2, 3)])
    assert_close(shares, torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64), atol=0.08, rtol=0)


def test_nothing_is_drawn_where_no_candidate_repeats_the_centre():
    centre, generator = torch.zeros(2), torch.Generator().manual_seed(0)
    points, before = torch.tensor([[0.0, 0.3], [0.0, 0.0], [1.0, 0.0]]), generator.get_state()
    integer, bounds = torch.tensor([True, False]), torch.full((2,), torch.inf)
    assert move_repeats(points, centre, integer, -bounds, bounds, generator) is points
    assert torch.equal(generator.get_state(), before)


def test_most_runs_find_a_minimum_two_steps_away():
    def far(X: Tensor) -> Tensor:
        return torch.where(X % 2 == 0, X.abs(), 20.0).sum(1)

    found = 0
    for seed in range(4):
        result = ng.minimize(
            far, [4.0] * 3, 1.0, integers=range(3), bounds=(-10, 10), ftarget=0.5, seed=seed, maxfevals=1500
        )
        found += result.x.tolist() == [0.0] * 3
    assert found >= 2


def test_a_search_of_integers_ends_with_success_where_no_neighbour_is_better():
    """A valley of integers: the deviations need not shrink to nothing, so that no tolerance tells it from a stall."""

    def valley(X: Tensor) -> Tensor:
        return 100 * (X[:, 1] - X[:, 0] ** 2) ** 2 + (1 - X[:, 0]) ** 2

    result = ng.minimize(valley, [0.0, 0.0], 2.0, integers=range(2), seed=1)
    assert result.fun == 0
    assert result.success, result.message


def test_a_search_of_integers_that_stalls_asks_for_the_neighbours_of_its_best_point():
    def build() -> ng.GaussianSearch:
        search = ng.GaussianSearch([0.0, 0.0], 1.0, popsize=4, seed=0, integers=range(2), bounds=(-1, 3))
        search._monitor._find_reason = lambda *_: "stagnation: neither the best nor the median value got better"
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


def test_with_a_surrogate_the_neighbours_have_true_values():
    seen = []

    def f(X: Tensor) -> Tensor:
        seen.extend(X.tolist())
        return (X - 1).square().sum(1)

    search = ng.GaussianSearch([0.0, 0.0], 1.0, seed=1, integers=range(2))
    usual = search._monitor._find_reason
    late = "stagnation: neither the best nor the median value got better"
    search._monitor._find_reason = lambda *now: late if search.nit >= 10 else usual(*now)
    result = ng.minimize(f, search, surrogate=True, vectorized=True, maxfevals=5000)
    assert result.success, result.message
    assert result.x.tolist() == [1.0, 1.0]
    assert all(point in seen for point in ([0.0, 1.0], [2.0, 1.0], [1.0, 0.0], [1.0, 2.0]))
    assert result.nfev == len(seen)


@pytest.mark.parametrize("seed", range(3))
def test_reals_beside_bits_come_to_the_minimum(seed):
    """A flip is a step of many deviations of the reals, which would never settle if it counted in full."""
    lower = torch.cat([torch.zeros(12), torch.full((3,), -5.0)])
    upper = torch.cat([torch.ones(12), torch.full((3,), 5.0)])
    best = torch.cat([(torch.arange(12) % 2).double(), torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)])
    result = ng.minimize(
        lambda X: (X - best).square().sum(1),
        (lower + upper) / 2,
        (upper - lower) / 4,
        bounds=(lower, upper),
        integers=range(12),
        ftarget=1e-10,
        maxfevals=6000,
        seed=seed,
        vectorized=True,
    )
    assert result.success
