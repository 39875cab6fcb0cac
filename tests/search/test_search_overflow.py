"""No search ever holds a parameter that is not finite, whatever its directions and its objective are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from black_boxes import MODELS, list_discrete
from torch import Tensor

import natgrad as ng
from natgrad.ground.pure import leaves
from natgrad.search import CategoricalSearch, ProductSearch, Search

DISCRETE = list_discrete(6, seed=0)


def gaussian(name: str) -> ng.GaussianSearch:
    return ng.GaussianSearch(torch.ones(3, dtype=torch.float64), 1.0, seed=0, model=MODELS[name])


def numbers(search: Search) -> list[Tensor]:
    """The search's parameters."""
    if isinstance(search, ProductSearch):
        return [part for one in search.parts for part in numbers(one)]
    if isinstance(search, ng.GaussianSearch):
        return [torch.tensor(search.sigma, dtype=torch.float64), *leaves(dict(search.state))]
    return [search.theta]


def advance(search: Search, value: Callable[[Tensor], Tensor], generations: int) -> None:
    for _ in range(generations):
        X = search.ask()
        assert bool(X.isfinite().all())
        search.tell(X, value(X))
        assert all(bool(part.isfinite().all()) for part in numbers(search))


def squares(X: Tensor) -> Tensor:
    return X.double().square().sum(1) + X[:, 0]


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e308])
@pytest.mark.parametrize("name", MODELS)
def test_a_gaussian_that_would_not_be_finite_is_not_taken(name: str, factor: float, monkeypatch: pytest.MonkeyPatch):
    search = gaussian(name)
    advance(search, squares, 3)
    kind, before = type(MODELS[name]), search.state
    plain = kind.advance

    def spoil_numbers(self: Any, *arguments: Any) -> Any:
        state = plain(self, *arguments)
        return state | {"mean": (state["mean"] + 1) * factor, "sigma": state["sigma"] * factor}

    with monkeypatch.context() as patch:
        patch.setattr(kind, "advance", spoil_numbers)
        advance(search, squares, 2)
    assert search.state is before
    assert str(search.stop()).startswith("overflow")
    advance(search, squares, 2)
    assert search.stop() is None


@pytest.mark.parametrize("value", [lambda X: -X[:, 0], lambda X: 0 * X[:, 0]], ids=["without end", "flat"])
@pytest.mark.parametrize("name", MODELS)
def test_a_search_that_runs_off_ends_with_a_reason(name: str, value: Callable[[Tensor], Tensor]):
    search = gaussian(name)
    edge = torch.finfo(search.mean.dtype).max * 1e-6
    search.load_state_dict(search.state_dict() | {"state": dict(search.state) | {"sigma": edge}})
    while search.stop() is None and search.nit < 200:
        advance(search, value, 1)
    assert search.stop() is not None
    again = gaussian(name)
    again.load_state_dict(search.state_dict())
    assert again.stop() == search.stop()
    advance(search, value, 40)  # for who does not ask


@pytest.mark.parametrize("name", [*MODELS, *DISCRETE, "product"])
def test_no_value_of_the_objective_makes_a_search_infinite(name: str):
    build = DISCRETE | {
        "product": lambda: ProductSearch(gaussian("full"), CategoricalSearch((3, 2), popsize=7, seed=0))
    }
    search = gaussian(name) if name in MODELS else build[name]()
    for k in range(30):
        scale = (1.0, math.inf, math.nan, -math.inf, 1e308)[k % 5]
        advance(search, lambda X, scale=scale: squares(X) * scale, 1)
