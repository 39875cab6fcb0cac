"""Bit searches where most of the space tells nothing: hidden prefixes, and draws that have no value."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable

import pytest
import torch
from models import pair
from torch import Tensor

import natgrad as ng

SEARCHES: dict[str, Callable[..., ng.BernoulliSearch | ng.MarkovSearch]] = {
    "Bernoulli": ng.BernoulliSearch,
    "Markov": ng.MarkovSearch,
}


def hidden_ones(n: int, seed: int) -> Callable[[Tensor], Tensor]:
    """How many bits of a hidden string are right, in a hidden order, before the first wrong one."""
    generator = torch.Generator().manual_seed(seed)
    order, wanted = torch.randperm(n, generator=generator), torch.randint(2, (n,), generator=generator)
    return lambda X: -(wanted == X)[:, order].double().cumprod(1).sum(1)


def knapsack(n: int, seed: int, empty: float) -> Callable[[Tensor], Tensor]:
    """Of weights up to .3 of all: some hundredths of uniform draws or less have a value."""
    generator = torch.Generator().manual_seed(seed)
    weights, prices = torch.randint(5, 50, (2, n), generator=generator).double()
    most = 0.3 * float(weights.sum())
    return lambda X: torch.where(X @ weights > most, empty, -(X @ prices))


def climb_alone(f: Callable[[Tensor], Tensor], n: int, seed: int, evaluations: int) -> float:
    """A (1+1)-EA, which takes each bit's change with the chance 1 / n."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(2, (1, n), generator=generator).double()
    value = float(f(x).nan_to_num(math.inf))
    for _ in range(evaluations - 1):
        child = torch.where(torch.rand(1, n, generator=generator) < 1 / n, 1 - x, x)
        found = float(f(child).nan_to_num(math.inf))
        x, value = (child, found) if found <= value else (x, value)
    return value


@pytest.mark.parametrize(("kind", "seed"), pair(SEARCHES, range(2)))
def test_a_hidden_prefix_is_found(kind: str, seed: int):
    """A (1+1)-EA needs 0.86 n^2, 1375 evaluations on average."""
    search = SEARCHES[kind](40, seed=seed)
    result = ng.minimize(hidden_ones(40, seed), search, ftarget=-40, maxfevals=3000, vectorized=True)
    assert result.fun == -40


@pytest.mark.parametrize(("kind", "empty"), pair(SEARCHES, [math.nan, 1e10]))
def test_draws_without_a_value_end_no_search(kind: str, empty: float):
    """Within 5 % of a (1+1)-EA that walks freely where nothing has a value."""
    found, alone = list[float](), list[float]()
    for seed in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            search = SEARCHES[kind](30, seed=seed)
            result = ng.minimize(knapsack(30, seed, empty), search, maxfevals=1000, vectorized=True)
        assert result.nfev > 500
        found.append(result.fun)
        alone.append(climb_alone(knapsack(30, seed, 1e10), 30, seed, 1000))
    assert statistics.mean(found) < 0.95 * statistics.mean(alone)
