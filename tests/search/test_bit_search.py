"""Search over bits: what the independent model and random fields find."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import CGA, PBIL, BitSearch, CategoricalSearch, natural_slope
from natgrad.search.bits import Climb
from natgrad.search.markov import join_pairs
from natgrad.search.relaxation import shrink_slope

BLOCKS = [range(5 * i, 5 * i + 5) for i in range(4)]


def onemax(X: Tensor) -> Tensor:
    return -X.sum(1)


def traps(X: Tensor) -> Tensor:
    ones = X.reshape(len(X), -1, 5).sum(2)
    return -torch.where(ones == 5, 5.0, 4 - ones).sum(1)


def run(search: BitSearch, f, target: float, budget: int) -> BitSearch:
    while search.best.fun > target and not search.stop() and search.nfev < budget:
        X = search.ask()
        search.tell(X, f(X))
    return search


# What they find.


def test_onemax_is_solved_soon_after_there_are_more_draws_than_bits():
    search = run(ng.BernoulliSearch(100, seed=0), onemax, -100, 700)
    assert search.best.fun == -100


@pytest.mark.parametrize("update", [PBIL(0.2, best=3), CGA()])
def test_pbil_and_cga_solve_onemax(update: PBIL | CGA):
    search = run(ng.BernoulliSearch(30, seed=0, update=update), onemax, -30, 3000)
    assert search.best.fun == -30


def test_pbil_moves_the_means_by_the_natural_gradient():
    search = ng.BernoulliSearch(5, popsize=8, seed=0, update=PBIL(0.3, best=2))
    X = search.ask()
    F = X @ torch.arange(1.0, 6.0, dtype=torch.float64) + 0.01 * torch.arange(8)
    search.tell(X, F)
    expected = 0.7 * 0.5 + 0.3 * X[F.argsort()[:2]].mean(0)
    assert_close(search.probabilities, expected.clamp(0.2, 0.8))


def test_cga_moves_by_one_over_the_population():
    search = ng.BernoulliSearch(4, seed=0, update=CGA(10))
    X = search.ask()
    F = onemax(X) + torch.tensor([0.0, 0.5])
    search.tell(X, F)
    order = F.argsort()
    assert_close(search.probabilities, 0.5 + (X[order[0]] - X[order[1]]) / 10)


def test_traps_need_their_cliques():
    given = run(ng.MarkovSearch(20, BLOCKS, seed=0), traps, -20, 1300)
    assert given.best.fun == -20
    assert run(ng.BernoulliSearch(20, seed=0), traps, -20, 1300).best.fun > -20


def test_cliques_are_learned():
    search = run(ng.MarkovSearch(10, popsize=100, seed=0), traps, -10, 4000)
    assert search.best.fun == -10
    assert search.cliques == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]


def test_parities_are_found_with_their_cliques_and_not_learned():
    """No pair of bits correlates with the value: the statistics stay single bits and explain nothing."""

    def parities(X: Tensor) -> Tensor:
        return -(X.reshape(len(X), -1, 4).sum(2) % 2 == 0).sum(1).to(torch.float64)

    groups = [range(4 * i, 4 * i + 4) for i in range(8)]
    assert run(ng.MarkovSearch(32, groups, seed=0), parities, -8, 600).best.fun == -8
    learned = run(ng.MarkovSearch(32, seed=0), parities, -math.inf, 600)
    assert not learned.settled
    assert learned.slope.explained < 0.1


def test_a_cut_is_found_in_the_complete_pairwise_field():
    edges = [(i, j) for i, j in combinations(range(10), 2) if (i * j + i + j) % 3]

    def cut(X: Tensor) -> Tensor:
        return -sum((X[:, i] - X[:, j]).abs() for i, j in edges)

    best = float(cut(((torch.arange(2**10).unsqueeze(1) >> torch.arange(10)) & 1).double()).min())
    assert run(ng.MarkovSearch(10, combinations(range(10), 2), seed=0), cut, best, 300).best.fun == best


def test_pairs_are_joined_to_groups():
    assert join_pairs(6, [(0, 3), (1, 2), (2, 3)], largest=2) == {(0, 3), (1, 2), (2, 3)}
    assert (0, 1, 2, 3) in join_pairs(6, [(0, 3), (1, 2), (2, 3)], largest=4)


@pytest.mark.parametrize("make", [lambda: ng.BernoulliSearch(6, seed=0), lambda: ng.MarkovSearch(6, seed=0)])
def test_no_update_leaves_the_domain(make):
    """On noise, constants, infinities and huge values."""
    search = make()
    generator = torch.Generator().manual_seed(0)
    scales = [1.0, 0.0, 1e200, math.inf, math.nan]
    for k in range(25):
        X = search.ask()
        assert bool(((X == 0) | (X == 1)).all())
        search.tell(X, scales[k % 5] * torch.randn(len(X), generator=generator))
        assert bool(torch.isfinite(search.theta).all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ng.BernoulliSearch(10, seed=3),
        lambda: ng.BernoulliSearch(10, seed=3, update=PBIL()),
        lambda: ng.MarkovSearch(10, seed=3),
    ],
)
def test_a_resumed_search_is_the_uninterrupted_one(make):
    whole, first = make(), make()
    run(whole, traps, -math.inf, 600)
    run(first, traps, -math.inf, 300)
    second = make()
    second.load_state_dict(first.state_dict())
    run(second, traps, -math.inf, 600)
    assert torch.equal(whole.theta, second.theta)
    assert torch.equal(whole.ask(), second.ask())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ng.BernoulliSearch(6, seed=0),
        lambda: ng.BernoulliSearch(6, seed=0, update=CGA()),
        lambda: ng.MarkovSearch(6, [(0, 1)], seed=0),
        lambda: ng.MarkovSearch(6, seed=0),
    ],
)
def test_without_a_target_it_ends(make):
    result = ng.minimize(onemax, make())
    assert result.fun == -6
    assert result.success
    assert result.message.startswith("converged")
    assert result.nfev < 4000


WRONG = {
    "n": (lambda: ng.BernoulliSearch(0), "n is 0"),
    "popsize": (lambda: ng.MarkovSearch(4, popsize=1), "popsize is 1"),
    "margin": (lambda: ng.BernoulliSearch(4, margin=0.7), "margin is 0.7"),
    "rate": (lambda: PBIL(rate=2.0), "rate is 2.0"),
    "best": (lambda: PBIL(best=0), "best is 0"),
    "population": (lambda: CGA(-1.0), "population is -1"),
    "cliques flat": (lambda: ng.MarkovSearch(4, [0, 1]), "cliques has 0, expected groups"),
    "cliques a word": (lambda: ng.MarkovSearch(4, "all"), "cliques has 'a', expected groups"),
    "half a bit": (lambda: ng.MarkovSearch(4, [(0.5, 1)]), r"cliques has \(0.5, 1\), expected groups"),
    "clique beyond": (lambda: ng.MarkovSearch(4, [(0, 4)]), r"cliques has \(0, 4\)"),
    "clique too large": (lambda: ng.MarkovSearch(20, [range(13)]), "2\\^13 products"),
    "largest": (lambda: ng.MarkovSearch(4, largest=1), "largest is 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case: str):
    call, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_bits_are_bits():
    search = ng.BernoulliSearch(4, seed=0)
    X = search.ask()
    with pytest.raises(ValueError, match="other than 0 and 1"):
        search.tell(X / 2, onemax(X))


# Functions that are hard on independent bits: unequal weights, and order.


def weigh_bits(weights: Tensor):
    return (lambda X: -(X @ weights)), -float(weights.clamp(min=0).sum())


def leading_ones(X: Tensor) -> Tensor:
    return -X.cumprod(1).sum(1)


WEIGHTS = {
    "one to n": lambda n: torch.arange(1, n + 1, dtype=torch.float64),
    "powers of two": lambda n: 2.0 ** torch.arange(min(n, 32), dtype=torch.float64),
    "signs and sizes": lambda n: (
        torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).exp()
        * (2.0 * (torch.arange(n) % 3 > 0) - 1)
    ),
    "one that dwarfs the others": lambda n: torch.cat([torch.full((1,), 1e6), torch.ones(n - 1)]).double(),
}


@pytest.mark.parametrize("make", [ng.BernoulliSearch, ng.MarkovSearch])
@pytest.mark.parametrize("n", [24, 64])
@pytest.mark.parametrize("name", WEIGHTS)
def test_linear_functions_are_solved_whatever_their_weights(name: str, n: int, make):
    """They lie in the span of the statistics; a light bit's parameter must not be held back by a heavy one's limit."""
    weights = WEIGHTS[name](n)
    if make is ng.MarkovSearch and n > 24:
        pytest.skip("the same statistics, learned in seconds")
    f, target = weigh_bits(weights)
    for seed in range(2):
        assert ng.minimize(f, make(len(weights), seed=seed), ftarget=target + 1e-9, maxfevals=2000).success


@pytest.mark.parametrize("unit", [1e-15, 1e-9, 1.0, 1e200])
def test_the_unit_of_the_values_does_not_matter(unit: float):
    searches = [ng.BernoulliSearch(12, seed=0), ng.BernoulliSearch(12, seed=0)]
    for _ in range(8):
        for search, scale in zip(searches, (1.0, unit), strict=True):
            X = search.ask()
            search.tell(X, scale * onemax(X))
    assert searches[0].best.fun == -12
    assert torch.equal(*(search.best.x for search in searches))


def test_a_coefficient_that_may_be_noise_hardly_moves():
    """Against many fits to noise alone, and exactly in the span."""
    generator = torch.Generator().manual_seed(0)
    T = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    weights = torch.full((200,), 1 / 200, dtype=torch.float64)
    exact = natural_slope(T, T[:, 0] - 3 * T[:, 1], weights)
    assert_close(shrink_slope(exact, T, T[:, 0] - 3 * T[:, 1], weights), exact.value)
    f = 2 * T[:, 0] + torch.randn(200, generator=generator, dtype=torch.float64)
    slope = natural_slope(T, f, weights)
    kept = shrink_slope(slope, T, f, weights) / slope.value
    assert float(kept[0]) > 0.99  # 28 standard errors
    error = f.sub(T @ slope.value).var() / 200
    t = slope.value.square() / error
    assert_close(kept, t / (1 + t), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_leading_ones_are_found(seed: int):
    """Where a bit matters only once those before it are right, the regression is left for children of the best."""
    result = ng.minimize(leading_ones, ng.BernoulliSearch(24, seed=seed), ftarget=-24, maxfevals=1500)
    assert result.success


def run_past_the_regression(f, seed: int = 0) -> ng.BernoulliSearch:
    """A search of 24 bits for 900 evaluations, of which the regression has the first 300 or so, in its climb."""
    search = run(ng.BernoulliSearch(24, seed=seed), f, -math.inf, 900)
    while search._seconds_turn:  # a stuck climb shares with what is tried elsewhere
        X = search.ask()
        search.tell(X, f(X))
    return search


def test_no_child_repeats_the_best_point():
    """Which the means lie at, up to the margin."""
    search = run_past_the_regression(lambda X: leading_ones(X).clamp(min=-12))
    parent = search.probabilities.round()
    assert_close((search.probabilities - parent).abs(), torch.full((24,), 1 / 24, dtype=torch.float64))
    assert float(leading_ones(parent.unsqueeze(0))) <= -12
    flips = torch.cat([(search.ask() - parent).abs().sum(1) for _ in range(120)])
    assert float(flips.min()) == 1
    assert float(flips.max()) > 6  # a long tail, since nothing better came for long


def test_the_point_at_which_the_regression_is_least_is_a_candidate():
    """For a linear f it is the minimum, in the first generation after the first slope."""
    weights = 1.5 ** torch.arange(24, dtype=torch.float64) * torch.where(torch.arange(24) % 3 > 0, 1.0, -1.0)
    search = ng.BernoulliSearch(24, seed=0)
    while search.slope is None:
        X = search.ask()
        search.tell(X, X @ weights)
    X = search.ask()
    assert torch.equal(X[0], (weights < 0).to(torch.float64))
    drawn = search.archive
    search.tell(X, X @ weights)
    assert search.archive <= drawn + len(X) - 1  # p did not draw it


def twin_valleys(X: Tensor) -> Tensor:
    """Down to all zeros from one half of the points, to all ones, which is better by 1, from the other."""
    ones = X.sum(1)
    return torch.minimum(ones, X.shape[1] - ones - 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_second_climb_finds_the_other_valley(seed: int):
    """Without a restart. Heavy tails reach all 30 bits once in thousands of children."""
    search = run(ng.BernoulliSearch(30, seed=seed), twin_valleys, -1.0, 2900)
    assert search.best.fun == -1
    assert search.stop() is None


@pytest.mark.parametrize("cut", [40, 70, 150, 400])
def test_a_search_goes_on_bit_for_bit_in_every_phase(cut: int):
    """Regression, climb, and both again once the climb is stuck: blocks of three bits that are worst at two ones."""

    def blocks(X: Tensor) -> Tensor:
        ones = X.reshape(len(X), 6, 3).sum(2)
        return torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64)[ones.long()].prod(1) - X.sum(1)

    def step(search: ng.BernoulliSearch, times: int) -> None:
        for _ in range(times):
            X = search.ask()
            search.tell(X, blocks(X))

    search, other = ng.BernoulliSearch(18, seed=2), ng.BernoulliSearch(18, seed=2)
    step(search, cut)
    other.load_state_dict(search.state_dict())
    step(search, 60)
    step(other, 60)
    assert torch.equal(search.ask(), other.ask())
    assert (search.nfev, search.best.fun) == (other.nfev, other.best.fun)


def test_a_climb_drifts_and_counts_its_waits():
    climb = Climb(torch.zeros(6, dtype=torch.float64))
    points = torch.eye(6, dtype=torch.float64)
    climb.accept(points[:4], torch.tensor([2.0, 1.0, 1.0, 3.0]))
    assert torch.equal(climb.parent, points[2])  # of equal ones the last
    climb.accept(points[4:5], torch.tensor([1.0]))
    assert torch.equal(climb.parent, points[4])
    assert climb.since == 1
    climb.accept(points[5:], torch.tensor([1.5]))
    climb.accept(points[:1], torch.tensor([0.0]))
    assert (climb.value, climb.since, climb.gap) == (0.0, 0, 4)


def test_where_the_best_point_has_another_value_the_means_move_slowly():
    generator = torch.Generator().manual_seed(0)

    def noisy(X: Tensor) -> Tensor:
        return -X.sum(1) + 6 * torch.randn(len(X), generator=generator, dtype=torch.float64)

    search = run_past_the_regression(noisy)
    before = search.probabilities
    X = search.ask()
    search.tell(X, noisy(X))
    kept = (
        (search.probabilities >= 0.7 * before - 1e-9) & (1 - search.probabilities >= 0.7 * (1 - before) - 1e-9)
    ).all()
    assert bool(kept)  # a rate of .3
    assert float(run(search, noisy, -math.inf, 2400).probabilities.sum()) > 20


# Starting again.


def two_valleys(X: Tensor) -> Tensor:
    """Down to all zeros from nearly everywhere, the minimum at all ones: a trap of all bits."""
    ones = X.sum(1)
    return torch.where(ones == X.shape[1], -20.0, ones)


RESTARTED = {
    "bernoulli": lambda: ng.BernoulliSearch(8, seed=1, popsize=10),
    "pbil": lambda: ng.BernoulliSearch(8, seed=1, popsize=10, update=PBIL(0.5, 3)),
    "cga": lambda: ng.BernoulliSearch(8, seed=1, update=CGA(4)),
    "markov": lambda: ng.MarkovSearch(8, seed=1, popsize=10),
    "markov, cliques given": lambda: ng.MarkovSearch(8, [(0, 1), (2, 3)], seed=1, popsize=10),
    "categories": lambda: CategoricalSearch([2] * 8, seed=1, popsize=10),
    "gaussian": lambda: ng.GaussianSearch([0.1] * 8, 0.1, seed=1, popsize=10, bounds=(0, 1), integers=range(8)),
}


@pytest.mark.parametrize("restarts", [3, "IPOP", "BIPOP"])
@pytest.mark.parametrize("name", RESTARTED)
def test_a_given_search_starts_again_with_another_population(name: str, restarts, tmp_path):
    def flat(X: Tensor) -> Tensor:  # every run ends soon
        return torch.zeros(len(X))

    settings = {"maxfevals": 900, "restarts": restarts, "checkpoint_every": 7}
    seen: list[int] = []
    result = ng.minimize(flat, RESTARTED[name](), callback=lambda s: seen.append(s.popsize), **settings)
    assert result.nfev <= 900
    assert max(result.history["run"]) >= 1
    if name != "cga":  # whose population is in its update
        assert max(seen) > seen[0]
    for budget in (500, 900):
        parts = ng.minimize(flat, RESTARTED[name](), checkpoint=tmp_path / "parts", **settings | {"maxfevals": budget})
    assert (parts.nfev, parts.nit, parts.fun) == (result.nfev, result.nit, result.fun)


@pytest.mark.parametrize("name", ["bernoulli", "pbil", "cga", "markov", "categories"])
def test_a_budget_and_a_target_keep_a_search_of_bits_going(name: str):
    """After runs that ended at all zeros, all values being equal there."""
    result = ng.minimize(two_valleys, RESTARTED[name](), ftarget=-20, maxfevals=6000)
    assert result.success
    ended = ng.minimize(two_valleys, RESTARTED[name](), ftarget=-21, maxfevals=500)
    assert ended.message.startswith("maxfevals")
    once = ng.minimize(two_valleys, RESTARTED[name](), ftarget=-21, maxfevals=500, restarts=0)
    assert max(once.history["run"]) == 0


def test_restarts_draw_anew_and_are_the_same_for_the_same_seed():
    first, again = RESTARTED["bernoulli"](), RESTARTED["bernoulli"]()
    points = [search.renew(20, run).ask() for search in (first, again) for run in (1, 2)]
    assert torch.equal(points[0], points[2])
    assert torch.equal(points[1], points[3])
    assert not torch.equal(points[0], points[1])
