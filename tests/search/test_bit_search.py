"""Search over bits: what the independent model and random fields find."""

from __future__ import annotations

import pytest
import torch
from black_boxes import list_discrete
from models import pair
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import CGA, PBIL, BitSearch


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
    blocks = [tuple(range(k, k + 5)) for k in range(0, 20, 5)]
    given = run(ng.MarkovSearch(20, blocks, seed=0), traps, -20, 1300)
    assert given.best.fun == -20
    assert run(ng.BernoulliSearch(20, seed=0), traps, -20, 1300).best.fun > -20


def test_cliques_are_learned():
    search = run(ng.MarkovSearch(10, popsize=100, seed=0), traps, -10, 4000)
    assert search.best.fun == -10
    assert search.cliques == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]


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


# Functions that are hard on independent bits: unequal weights, and order.


def weigh_bits(weights: Tensor):
    return (lambda X: -(X @ weights)), -float(weights.clamp(min=0).sum())


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


# Starting again.


WAYS = 3, "IPOP", "BIPOP"
RESTARTED = {
    **list_discrete(8, seed=1, popsize=10),
    "gaussian": lambda: ng.GaussianSearch([0.1] * 8, 0.1, seed=1, popsize=10, bounds=(0, 1), integers=range(8)),
}


@pytest.mark.parametrize(("name", "restarts"), [("gaussian", way) for way in WAYS] + pair([*RESTARTED][:-1], WAYS))
def test_a_given_search_starts_again_with_another_population(name: str, restarts, tmp_path):
    def flat(X: Tensor) -> Tensor:  # every run ends soon
        return torch.zeros(len(X))

    settings = {"maxfevals": 600, "restarts": restarts, "checkpoint_every": 7}
    seen: list[int] = []
    result = ng.minimize(flat, RESTARTED[name](), callback=lambda s: seen.append(s.popsize), **settings)
    assert result.nfev <= 600
    assert max(result.history["run"]) >= 1
    if name != "bits, CGA":  # whose population is in its update
        assert max(seen) > seen[0]
    for budget in (350, 600):
        parts = ng.minimize(flat, RESTARTED[name](), checkpoint=tmp_path / "parts", **settings | {"maxfevals": budget})
    assert (parts.nfev, parts.nit, parts.fun) == (result.nfev, result.nit, result.fun)
