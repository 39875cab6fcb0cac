"""Noisy objectives: as many evaluations as the ranking needs."""

from __future__ import annotations

import re

import pytest
import torch
from black_boxes import sphere
from torch import Tensor

import natgrad as ng
from natgrad.search import Repeated
from natgrad.search.noise import measure_place_change


def noisy(f, deviation: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda X: f(X) + deviation * torch.randn(len(X), generator=generator, dtype=torch.float64)


def stretched_bowl(X: Tensor) -> Tensor:
    return (X.square() * 100.0 ** torch.linspace(0, 1, X.shape[1])).sum(1)


def test_the_change_of_places_by_hand():
    """First values 1, 2, 3, 4, the first again as 5: from place 1 to 5 of 5, a change of 3 between its values.

    The limits: quantile .1 of |1..4 - 1| = 0..3 is .3; of |1..4 - (5 - 1)| = 3..0 is .3.
    """
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    found = measure_place_change(values, torch.tensor([5.0], dtype=torch.float64), 0.2)
    assert found == pytest.approx(2 * 3 - 0.3 - 0.3)


def test_without_noise_points_are_evaluated_once():
    repeated = Repeated(sphere, vectorized=True)
    search = ng.GaussianSearch([3.0, 1.0, 2.0], 1.0, seed=0)
    for _ in range(30):
        X = search.ask()
        F = repeated(X)
        torch.testing.assert_close(F, sphere(X))
        search.tell(X, F)
        assert repeated.evaluations == 1
    assert repeated.nfev == 30 * (7 + 2)


def test_noise_handling_comes_nearer_than_going_on():
    """Five dimensions, noise of standard deviation 1: mean value of the results over four seeds."""
    f = stretched_bowl
    settings = {"maxfevals": 5000, "vectorized": True}
    start = torch.full((5,), 3.0)
    with_it, without = (
        [
            float(f(ng.minimize(noisy(f, 1.0, seed), start, 1.0, seed=seed, noise=on, **settings).x.unsqueeze(0)))
            for seed in range(4)
        ]
        for on in (True, False)
    )
    assert sum(with_it) < 0.8 * sum(without)


def test_the_message_counts_as_the_result_does():
    result = ng.minimize(noisy(sphere, 1.0, 0), torch.ones(3), 1.0, noise=True, maxfevals=4000, seed=0)
    assert result.message.startswith("maxfevals")
    assert set(re.findall(r"(\d+) evaluations", result.message)) <= {str(result.nfev)}
