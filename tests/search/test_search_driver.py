"""`minimize` around searches of every kind: pools, resuming, odd objectives, and arguments as people write them."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from black_boxes import one_value, sphere
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import (
    BIPOP,
    IPOP,
    PBIL,
    CategoricalSearch,
    Full,
    ProductSearch,
    Separable,
    Tolerances,
)


def zeros(X: Tensor) -> Tensor:
    """How many entries are not zero."""
    return (X != 0).sum(1).to(torch.float64)


class LaterPool:
    """As little as Dask's client offers: submit, and futures with result()."""

    class Future:
        def __init__(self, fn, args) -> None:
            self.fn, self.args = fn, args

        def result(self):
            return self.fn(*self.args)

    def submit(self, fn, *args):
        return self.Future(fn, args)


# Pools.


@pytest.mark.parametrize("pool", [ThreadPoolExecutor(2), LaterPool()])
@pytest.mark.parametrize("vectorized", [True, False])
def test_any_pool_gives_the_same_search(pool, vectorized: bool):
    f = sphere if vectorized else one_value
    here = ng.minimize(f, [1.0, 2.0], 1.0, seed=3, maxfevals=120, vectorized=vectorized)
    there = ng.minimize(f, [1.0, 2.0], 1.0, seed=3, maxfevals=120, vectorized=vectorized, executor=pool)
    assert torch.equal(here.x, there.x)
    assert here.nfev == there.nfev


def test_processes_evaluate_points():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = ng.minimize(one_value, [1.0, 2.0], 1.0, seed=3, maxfevals=30, vectorized=False, executor=pool)
    assert torch.equal(there.x, ng.minimize(sphere, [1.0, 2.0], 1.0, seed=3, maxfevals=30).x)


# Searches that are given.


SEARCHES = {
    "gaussian": lambda: ng.GaussianSearch([1.0, 2.0], 1.0, seed=1, model=Separable()),
    "bits": lambda: ng.BernoulliSearch(8, popsize=6, seed=1),
    "pbil": lambda: ng.BernoulliSearch(8, popsize=6, seed=1, update=PBIL(0.2, 2)),
    "markov": lambda: ng.MarkovSearch(8, [(0, 1), (2, 3)], popsize=6, seed=1),
    "categories": lambda: CategoricalSearch([3, 2, 4], popsize=6, seed=1),
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


@pytest.mark.parametrize("name", SEARCHES)
def test_a_given_search_resumes_bit_for_bit(name: str, tmp_path):
    def f(X: Tensor) -> Tensor:
        return sphere(X + 0.3 * torch.arange(X.shape[1]))

    whole = ng.minimize(f, SEARCHES[name](), maxfevals=240, checkpoint=tmp_path / "whole")
    for budget in (96, 240):
        parts = ng.minimize(f, SEARCHES[name](), maxfevals=budget, checkpoint=tmp_path / "parts")
    assert torch.equal(parts.x, whole.x)
    assert (parts.nfev, parts.nit, parts.message) == (whole.nfev, whole.nit, whole.message)
    assert parts.history.state_dict() == whole.history.state_dict()


def test_a_given_search_takes_no_second_settings():
    search = ng.BernoulliSearch(4, seed=0)
    for settings, word in (
        ({"popsize": 10}, "popsize is given"),
        ({"seed": 1}, "seed is given"),
        ({"sigma0": 1.0}, "sigma0 is given"),
        ({"bounds": (0, 1)}, "bounds is given"),
    ):
        with pytest.raises(ValueError, match=word):
            ng.minimize(zeros, search, **settings)


# Arguments as people write them.


@pytest.mark.parametrize("x0", [[1, 2], (1.0, 2.0), np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([1.0, 2.0])])
def test_a_start_may_be_any_array(x0):
    result = ng.minimize(sphere, x0, 1, seed=np.int64(4), popsize=np.int32(7), maxfevals=1e2)
    assert result.x.dtype == torch.float64
    assert torch.equal(result.x, ng.minimize(sphere, [1.0, 2.0], 1.0, seed=4, popsize=7, maxfevals=98).x)


@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_bounds_may_be_an_array(make):
    bounds = make([[-1.0, 0.5], [3.0, 2.0]])
    result = ng.minimize(sphere, [1.0, 1.0], 1.0, bounds=bounds, seed=0, maxfevals=400)
    assert_close(result.x, torch.tensor([0.0, 0.5], dtype=torch.float64), atol=1e-3, rtol=0)


def test_values_may_be_any_array():
    search = ng.GaussianSearch(np.ones(3), 1.0, popsize=5, seed=0)
    for make in (lambda v: v.numpy(), lambda v: v.tolist(), lambda v: v.float(), lambda v: list(v.unbind())):
        X = search.ask()
        search.tell(X.numpy(), make(sphere(X)))
    assert search.nfev == 20


@pytest.mark.parametrize(("name", "rule"), [("IPOP", IPOP()), ("bipop", BIPOP()), (2, IPOP(2))])
def test_restarts_have_names(name, rule):
    def rough(X: Tensor) -> Tensor:
        return sphere(X) + 3 * (1 - torch.cos(6 * X)).sum(1)

    settings = {"seed": 0, "maxfevals": 1500, "tolerances": Tolerances(tolfun=1e-3)}
    one, other = (ng.minimize(rough, [3.0, 3.0], 0.3, restarts=r, **settings) for r in (name, rule))
    assert max(one.history["run"]) >= 1
    assert one.history["best"] == other.history["best"]


@pytest.mark.parametrize("model", [Full(), Separable(), ng.search.XNES()])
def test_one_variable(model):
    result = ng.minimize(sphere, [3.0], 1.0, model=model, ftarget=1e-8, maxfevals=2000, seed=0)
    assert result.success


# Odd objectives.


def test_a_target_that_is_met_exactly_is_met():
    result = ng.minimize(lambda X: torch.full((len(X),), 2.0), [1.0, 1.0], 1.0, ftarget=2.0, seed=0)
    assert result.success
    assert result.nit == 1


def test_a_constant_objective_ends_without_success():
    result = ng.minimize(lambda X: torch.zeros(len(X)), [1.0, 1.0], 1.0, seed=0)
    assert not result.success
    assert result.message.startswith("flat")
    assert result.fun == 0


@pytest.mark.parametrize("worst", [math.inf, 1e308, math.nan])
def test_infinite_values_are_ranked_last(worst: float):
    def walled_sphere(X: Tensor) -> Tensor:
        return torch.where(X[:, 0] < 0.5, worst, sphere(X))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ng.minimize(walled_sphere, [2.0, 2.0], 1.0, seed=0, maxfevals=800)
    assert 0.25 <= result.fun < 0.2501


def test_minus_infinity_is_the_best_value():
    result = ng.minimize(lambda X: torch.where(X[:, 0] < 0, -math.inf, sphere(X)), [2.0], 1.0, ftarget=-1e9, seed=0)
    assert result.success
    assert result.fun == -math.inf
    assert float(result.x[0]) < 0


def test_an_objective_may_not_change_the_candidates():
    def careless(X: Tensor) -> Tensor:
        values = sphere(X)
        X.zero_()
        return values

    assert torch.equal(
        ng.minimize(careless, [1.0, 2.0], 1.0, seed=0, maxfevals=60).x,
        ng.minimize(sphere, [1.0, 2.0], 1.0, seed=0, maxfevals=60).x,
    )


def test_gradients_are_not_kept():
    weight = torch.ones(2, requires_grad=True)
    result = ng.minimize(lambda X: (X.float() * weight).square().sum(1), torch.ones(2, requires_grad=True), 1.0, seed=0)
    assert not result.x.requires_grad
    assert result.success


WRONG = {
    "sigma0 missing": (lambda: ng.minimize(sphere, [0.0]), ValueError, "sigma0 is missing"),
    "sigma0 text": (lambda: ng.minimize(sphere, [0.0], "1"), TypeError, "sigma0 is str, expected numbers"),
    "sigma0 zero": (lambda: ng.minimize(sphere, [0.0], 0.0), ValueError, "sigma0 is 0"),
    "sigma0 infinite": (lambda: ng.minimize(sphere, [0.0], math.inf), ValueError, "sigma0 is inf"),
    "ftarget NaN": (lambda: ng.minimize(sphere, [0.0], 1.0, ftarget=math.nan), ValueError, "ftarget is NaN"),
    "ftarget's kind": (lambda: ng.minimize(sphere, [0.0], 1.0, ftarget="0"), ValueError, "ftarget is '0'"),
    "maxfevals' kind": (lambda: ng.minimize(sphere, [0.0], 1.0, maxfevals="9"), ValueError, "maxfevals is '9'"),
    "maxfevals negative": (lambda: ng.minimize(sphere, [0.0], 1.0, maxfevals=-1), ValueError, "maxfevals is -1"),
    "maxfevals NaN": (lambda: ng.minimize(sphere, [0.0], 1.0, maxfevals=math.nan), ValueError, "maxfevals is nan"),
    "callback": (lambda: ng.minimize(sphere, [0.0], 1.0, callback=3), TypeError, "callback is int"),
    "restarts word": (lambda: ng.minimize(sphere, [0.0], 1.0, restarts="often"), ValueError, "restarts is 'often'"),
    "times": (lambda: IPOP(-1), ValueError, "times is -1"),
    "factor": (lambda: IPOP(factor=0.5), ValueError, "factor is 0.5"),
    "model a search": (
        lambda: ng.minimize(sphere, [0.0], 1.0, model=ng.BernoulliSearch(2)),
        TypeError,
        "a search is given as x0",
    ),
    "noise": (lambda: ng.minimize(sphere, [0.0], 1.0, noise="much"), TypeError, "noise is 'much'"),
    "x0 a table": (lambda: ng.minimize(sphere, [[0.0], [1.0]], 1.0), ValueError, "x0 has shape"),
    "x0 empty": (lambda: ng.minimize(sphere, [], 1.0), ValueError, "x0 has shape"),
    "x0 infinite": (lambda: ng.minimize(sphere, [math.inf], 1.0), ValueError, r"x0\[0\] is inf"),
    "popsize bool": (lambda: ng.minimize(sphere, [0.0], 1.0, popsize=True), ValueError, "popsize is True"),
    "bounds a dict": (lambda: ng.minimize(sphere, [0.0], 1.0, bounds={0: 1, 1: 2}), ValueError, "expected a pair"),
    "bounds NaN": (lambda: ng.minimize(sphere, [0.0], 1.0, bounds=(math.nan, 1)), ValueError, "NaN is no bound"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case: str):
    call, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        call()
