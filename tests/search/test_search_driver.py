"""`minimize` around searches of every kind: pools, resuming, odd objectives, and arguments as people write them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from black_boxes import list_discrete, one_value, rosenbrock, sphere
from torch import Tensor

import natgrad as ng
from natgrad.search import BIPOP, PBIL, CategoricalSearch, NoiseHandling, ProductSearch, Separable, Tolerances


def zeros(X: Tensor) -> Tensor:
    """How many entries are not zero."""
    return (X != 0).sum(1).to(torch.float64)


class LaterPool:
    """As little as Dask's client offers: submit, and futures with result()."""

    def submit(self, fn, *args):
        return SimpleNamespace(result=lambda: fn(*args))


# Pools.


@pytest.mark.parametrize("pool", [ThreadPoolExecutor(2), LaterPool()])
@pytest.mark.parametrize("vectorized", [True, False])
def test_any_pool_gives_the_same_search(pool, vectorized: bool):
    f = sphere if vectorized else one_value
    here = ng.minimize(f, [1.0, 2.0], 1.0, seed=3, maxfevals=120, vectorized=vectorized)
    there = ng.minimize(f, [1.0, 2.0], 1.0, seed=3, maxfevals=120, vectorized=vectorized, executor=pool)
    assert torch.equal(here.x, there.x)
    assert here.nfev == there.nfev


# Searches that are given.


SEARCHES = {
    "gaussian": lambda: ng.GaussianSearch([1.0, 2.0], 1.0, seed=1, model=Separable()),
    **list_discrete(8, seed=1, popsize=6),
    "product": lambda: ProductSearch(
        ng.GaussianSearch([1.0, 2.0], 1.0, 12, seed=1), CategoricalSearch([3, 3], 12, seed=2, update=PBIL(0.2, 3))
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_given_search_is_driven(name: str):
    f = zeros if name not in ("gaussian", "product") else lambda X: sphere(X[:, :2]) + zeros(X[:, 2:])
    seen = []
    result = ng.minimize(f, SEARCHES[name](), ftarget=1e-3, maxfevals=3000, callback=lambda s: seen.append(s.nit))
    assert result.success
    assert result.message.startswith("ftarget")
    assert len(seen) == result.nit == len(result.history)
    assert float(f(result.x.unsqueeze(0))) == result.fun == result.history["best"][-1]


def sphere_elsewhere(X: Tensor) -> Tensor:
    return sphere(X + 0.3 * torch.arange(X.shape[1]))


def rough(X: Tensor) -> Tensor:
    return sphere(X) + 3 * (1 - torch.cos(6 * X)).sum(1)


def wavy(X: Tensor) -> Tensor:
    """It looks like noise, and repeats."""
    return sphere(X) + torch.sin(1e4 * X).sum(1)


ROUGH = {"seed": 5, "bounds": (-4.0, 4.0), "tolerances": Tolerances(tolfun=1e-6), "checkpoint_every": 7}
RESUMED: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable[[], tuple[Any, ...]], dict[str, Any], tuple[int, ...]]
] = {
    **{name: (sphere_elsewhere, lambda name=name: (SEARCHES[name](),), {}, (96, 240)) for name in SEARCHES},
    "one run": (rough, lambda: ([3.0, 2.0], 0.5), ROUGH, (300, 1700)),
    "BIPOP": (rough, lambda: ([3.0, 2.0], 0.5), ROUGH | {"restarts": BIPOP(3)}, (300, 1700)),
    "noise": (wavy, lambda: ([2.0] * 3, 1.0), {"seed": 1, "noise": NoiseHandling(most=4)}, (400, 900)),
    "surrogate": (
        rosenbrock,
        lambda: ([0.0] * 3, 0.5),
        {"seed": 3, "surrogate": True, "checkpoint_every": 2},
        (60, 120),
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_search_is_the_uninterrupted_one(name: str, tmp_path):
    f, start, settings, budgets = RESUMED[name]
    whole = ng.minimize(f, *start(), maxfevals=budgets[-1], **settings)
    for budget in budgets:
        parts = ng.minimize(f, *start(), maxfevals=budget, checkpoint=tmp_path / "search", **settings)
    assert torch.equal(parts.x, whole.x)
    assert (parts.fun, parts.nfev, parts.nit, parts.message) == (whole.fun, whole.nfev, whole.nit, whole.message)
    assert parts.history.state_dict() == whole.history.state_dict()


@pytest.mark.parametrize("name", SEARCHES)
def test_a_state_that_lost_a_part_is_refused_and_changes_nothing(name: str):
    search, other = SEARCHES[name](), SEARCHES[name]()
    other.tell(X := other.ask(), X.double().sum(1))
    before, later = search.ask(), other.state_dict()
    search = SEARCHES[name]()
    for part in later:
        with pytest.raises(ValueError, match=part):
            search.load_state_dict({key: value for key, value in later.items() if key != part})
    assert search.nfev == 0
    assert torch.equal(search.ask(), before)


OTHERS = {
    "x0": {"x0": [0.0, 1.0]},
    "sigma0": {"sigma0": 1.0},
    "seed": {"seed": 2},
    "bounds": {"bounds": (-0.5, 0.5)},
    "integers": {"integers": [1]},
    "model": {"model": Separable()},
    "popsize": {"popsize": 12},
    "noise": {"noise": True},
    "surrogate": {"surrogate": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_problem_is_refused(name: str, tmp_path):
    call = {"x0": [0.0, 0.0], "sigma0": 0.5, "seed": 1, "checkpoint": tmp_path / "search", "vectorized": True}
    first = ng.minimize(sphere, **call, maxfevals=60)
    with pytest.raises(ValueError, match=f"the checkpoint differs in {name}=: .*delete the file"):
        ng.minimize(sphere, **call | OTHERS[name])
    same = call | {"x0": torch.zeros(2), "sigma0": torch.tensor(0.5), "tolerances": Tolerances(tolx=1e-3)}
    assert ng.minimize(sphere, **same, maxfevals=120).nfev > first.nfev


CHANGED = {
    "bounds": (ng.GaussianSearch, ([0.0], 1.0), {"bounds": (0, 1)}, {"bounds": (0, 2)}),
    "cliques": (ng.MarkovSearch, (3,), {"cliques": [(0, 1)]}, {"cliques": [(1, 2)]}),
    "margin": (ng.BernoulliSearch, (3,), {}, {"margin": 0.1}),
    "sizes": (CategoricalSearch, (), {"sizes": (2, 3)}, {"sizes": (3, 2)}),
    "update": (CategoricalSearch, ((2, 3),), {"update": PBIL(0.1)}, {"update": PBIL(0.2)}),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("kind", ["alone", "part"])
def test_a_state_is_refused_by_a_search_with_another_argument(name: str, kind: str):
    build, arguments, before, after = CHANGED[name]
    wrap = ProductSearch if kind == "part" else lambda search: search
    state = wrap(build(*arguments, seed=1, **before)).state_dict()
    with pytest.raises(ValueError, match=f"differs in {name}"):
        wrap(build(*arguments, seed=1, **after)).load_state_dict(state)
    wrap(build(*arguments, seed=2, **before)).load_state_dict(state)  # the state has the draws


# Odd objectives.


def test_an_objective_may_not_change_the_candidates():
    def careless(X: Tensor) -> Tensor:
        values = sphere(X)
        X.zero_()
        return values

    assert torch.equal(
        ng.minimize(careless, [1.0, 2.0], 1.0, seed=0, maxfevals=60).x,
        ng.minimize(sphere, [1.0, 2.0], 1.0, seed=0, maxfevals=60).x,
    )
