"""Objectives for the tests of searches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import natgrad as ng
from natgrad.search import (
    CGA,
    PBIL,
    XNES,
    CategoricalSearch,
    Full,
    GaussianModel,
    LowRank,
    Search,
    Separable,
    SparsePrecision,
)

MODELS: dict[str, GaussianModel] = {
    "full": Full(),
    "separable": Separable(),
    "sparse": SparsePrecision([(0, 1)]),
    "xnes": XNES(),
    "low rank": LowRank(),
}


def list_discrete(n: int, seed: int, popsize: int | None = None) -> dict[str, Callable[[], Search]]:
    """How to build every kind of search of n bits or of three categories."""
    size, sizes = {"popsize": popsize, "seed": seed}, (3, 2, 4)
    return {
        "bits": lambda: ng.BernoulliSearch(n, **size),
        "bits by ranks": lambda: ng.BernoulliSearch(n, **size, update=PBIL(0.3, 3)),
        "bits, CGA": lambda: ng.BernoulliSearch(n, seed=seed, update=CGA(4)),
        "fields": lambda: ng.MarkovSearch(n, **size),
        "known fields": lambda: ng.MarkovSearch(n, [(0, 1), (2, 3)], **size),
        "categories": lambda: CategoricalSearch(sizes, **size),
        "categories by ranks": lambda: CategoricalSearch(sizes, **size, update=PBIL(0.3, 3)),
    }


def sphere(X: Tensor) -> Tensor:
    return X.square().sum(-1)


def ellipsoid(X: Tensor) -> Tensor:
    d = X.shape[-1]
    return (X.square() * 1e6 ** (torch.arange(d, dtype=X.dtype) / (d - 1))).sum(-1)


def rosenbrock(X: Tensor) -> Tensor:
    return (100 * (X[..., 1:] - X[..., :-1].square()).square() + (1 - X[..., :-1]).square()).sum(-1)


def one_value(x: Tensor) -> float:
    """The sphere at one point, at module level so that processes can be sent it."""
    return float(x.square().sum())
