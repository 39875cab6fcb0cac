"""No update leaves the domain, at any step size; and a sparse precision keeps to its graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import (
    PBIL,
    XNES,
    Full,
    GaussianModel,
    LowRank,
    ProductSearch,
    Ranking,
    Search,
    Separable,
    SparsePrecision,
)

D = 5
RATES = (1e-6, 1.0, 1e3, 1e8)
MADE = {
    "full": lambda rate: Full(rate=rate),
    "separable": lambda rate: Separable(rate=rate),
    "chain": lambda rate: SparsePrecision([(i, i + 1) for i in range(D - 1)], rate=rate),
    "star": lambda rate: SparsePrecision([(0, i) for i in range(1, D)], rate=rate),
    "complete": lambda rate: SparsePrecision([(i, j) for i in range(D) for j in range(i)], rate=rate),
    "xnes": lambda rate: XNES(rate_mean=rate, rate=rate),
    "low rank": lambda rate: LowRank(),
}


def root(model: GaussianModel, state) -> Tensor:
    """A, (d, d)."""
    return model.steps(state, torch.eye(D, dtype=torch.float64)).T


def hostile(kind: str, normals: Tensor, generator: torch.Generator) -> Tensor:
    """Values (popsize,) that push one way: to a line, to a point, outwards, or nowhere."""
    return {
        "line": normals[:, 1:].square().sum(1),
        "point": normals.square().sum(1),
        "out": -normals.square().sum(1),
        "noise": torch.randn(len(normals), generator=generator, dtype=torch.float64),
    }[kind]


KINDS = ("line", "point", "out", "noise")
PUSHED = [("full", rate, kind) for rate in RATES for kind in KINDS] + [("low rank", 1.0, kind) for kind in KINDS]
PUSHED += [
    (name, rate, KINDS[(i + k) % 4])
    for k, name in enumerate(sorted(MADE.keys() - {"full", "low rank"}))
    for i, rate in enumerate(RATES)
]


@pytest.mark.parametrize(("name", "rate", "kind"), sorted(PUSHED))
def test_the_covariance_stays_positive_and_finite(name: str, rate: float, kind: str):
    model = MADE[name](rate)
    generator = torch.Generator().manual_seed(0)
    for popsize in (2, 30):
        state = model.start(torch.zeros(D, dtype=torch.float64), 1.0, popsize)
        for _ in range(15):
            normals = torch.randn(popsize, D, generator=generator, dtype=torch.float64)
            steps = model.steps(state, normals)
            values = hostile(kind, steps if kind == "line" else normals, generator)
            ranking = Ranking.of(values)
            state = model.advance(state, normals[ranking.order], steps[ranking.order], ranking)
            A = root(model, state)
            assert bool(torch.isfinite(A).all())
            assert 0 < state["sigma"] < math.inf
            sizes = torch.linalg.svdvals(A)
            assert float(sizes[-1]) > 0
            if float(sizes[0] / sizes[-1]) > 1e6:  # beyond that A^-1 A is round-off: what stop() is for
                break
            z = torch.randn(3, D, generator=generator, dtype=torch.float64)
            assert_close(model.whiten(state, model.steps(state, z)), z, rtol=1e-6, atol=1e-6)


# What is told lies within the domain.

BOX: dict[str, Any] = {"bounds": (-1.0, [2.0, 3.0, 4.0]), "integers": [2]}


def test_points_and_bounds_are_taken_as_lists_of_other_libraries_have_them():
    pairs = list(zip((-1.0, None), (None, 3.0), (-1, 4), strict=True))  # SciPy's, turned
    limits = ([-1.0, -torch.inf, -1.0], [torch.inf, 3.0, 4.0])
    one, other = (ng.GaussianSearch([0.0, 0.0, 1.0], 0.5, seed=0, bounds=bounds) for bounds in (pairs, limits))
    X = one.ask()
    one.tell(list(X), [x.sum() for x in X])
    other.tell(other.ask(), X.sum(1))
    assert torch.equal(one.ask(), other.ask())


def tell_instead(search: Search, point: list[float], value: float = -100.0) -> None:
    """One generation, whose first point is another one, and the best."""
    X = search.ask()
    X[0] = torch.tensor(point, dtype=X.dtype)
    search.tell(X, torch.cat([torch.tensor([value]), torch.arange(1.0, len(X))]))


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ([-1.5, 0.0, 0.0], r"X\[0, 0\] is -1.5, expected a number within the bounds \[-1, 2\] of variable 0"),
        ([0.0, 3.001, 0.0], r"X\[0, 1\] is 3.001, expected a number within the bounds \[-1, 3\] of variable 1"),
        ([0.0, 0.0, 0.5], r"X\[0, 2\] is 0.5, expected an integer within the bounds \[-1, 4\] of variable 2"),
        ([0.0, 0.0, 5.0], r"X\[0, 2\] is 5, expected an integer"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_points_out_of_the_domain_are_refused_and_nothing_is_changed(point: list[float], words: str, joined: bool):
    def make() -> Search:
        reals = ng.GaussianSearch([0.0, 0.0, 1.0], 0.5, popsize=8, seed=0, **BOX)
        bits = ng.BernoulliSearch(2, popsize=8, seed=0, update=PBIL(0.3))
        return ProductSearch(reals, bits) if joined else reals

    search, other = make(), make()
    with pytest.raises(ValueError, match=words):
        tell_instead(search, [*point, 1.0, 0.0] if joined else point)
    assert search.best.fun == torch.inf
    assert (search.nfev, search.nit) == (0, 0)
    other.ask()
    for one in (search, other):
        X = one.ask()
        one.tell(X, X.sum(1))
    assert torch.equal(search.ask(), other.ask())
