"""Integer and mixed variables."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.applications.search import LowRank, Separable
from natgrad.applications.search.margin import with_margin


def phi(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def test_other_integers_keep_their_chance():
    mean = torch.tensor([0.0, 0.3, 2.9, -0.49, 1.0], dtype=torch.float64)
    deviation = torch.tensor([1e-3, 0.1, 1e-9, 0.02, 3.0], dtype=torch.float64)
    far = torch.full_like(mean, math.inf)
    m, s = with_margin(mean, deviation, -far, far, 0.01)
    mode = mean.round()
    assert bool((phi((mode - 0.5 - m) / s) >= 0.005 - 1e-9).all())
    assert bool((phi((m - mode - 0.5) / s) >= 0.005 - 1e-9).all())
    assert_close(m.round(), mode)
    assert_close((m[4], s[4]), (mean[4], deviation[4]))  # has enough already


def test_at_a_bound_the_other_side_keeps_its_chance():
    mean, deviation = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.01, 0.01], dtype=torch.float64)
    m, s = with_margin(mean, deviation, torch.zeros_like(mean), torch.ones_like(mean), 0.02)
    assert_close(s, deviation)
    assert_close(phi((m[0] - 0.5) / s[0]), torch.tensor(0.02, dtype=torch.float64))
    assert_close(phi((0.5 - m[1]) / s[1]), torch.tensor(0.02, dtype=torch.float64))


def mixed(X: Tensor) -> Tensor:
    return (X[:, :2] - torch.tensor([3.0, -2.0])).square().sum(1) + 10 * (X[:, 2:] - 0.7).square().sum(1)


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_minimum_is_found(seed: int):
    bounds = ([-10, -10, -5, -5], [10, 10, 5, 5])
    result = ng.minimize(
        mixed, torch.zeros(4), 1.0, integers=[0, 1], bounds=bounds, ftarget=1e-8, maxfevals=4000, seed=seed
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
