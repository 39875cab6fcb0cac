"""Errors at the door name the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from black_boxes import one_value, sphere

import natgrad as ng
from natgrad.search import (
    CGA,
    IPOP,
    PBIL,
    CategoricalSearch,
    Full,
    LowRank,
    NoiseHandling,
    ProductSearch,
    SparsePrecision,
    Tolerances,
)


def at(x0: Any, sigma0: Any = 1.0, **settings: Any) -> Callable[[], Any]:
    return lambda: ng.GaussianSearch(x0, sigma0, **settings)


def least(x0: Any = (0.0,), sigma0: Any = 1.0, f: Any = sphere, **settings: Any) -> Callable[[], Any]:
    return lambda: ng.minimize(f, x0, sigma0, **settings)


class Deaf:
    """An executor that answers nothing."""

    def submit(self, fn: Any, *args: Any) -> Any:
        raise AssertionError("nothing is to be submitted")


MUTE = SimpleNamespace(submit=lambda fn, x: SimpleNamespace(result=lambda: 1.0))  # whose futures tell no end
HERE = {"f": one_value, "vectorized": False}
VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "x0 not finite": (at([0.0, math.nan]), r"x0\[1\] is nan"),
    "x0 infinite": (least([math.inf]), r"x0\[0\] is inf"),
    "x0 a number": (at(1.0), "x0 has shape"),
    "x0 a table": (least([[0.0], [1.0]]), "x0 has shape"),
    "x0 empty": (least([]), "x0 has shape"),
    "x0 outside": (at([2.0], bounds=(0.0, 1.0)), "outside its bounds"),
    "sigma0 missing": (least(sigma0=None), "sigma0 is missing"),
    "sigma0 negative": (at([0.0], -1.0), "sigma0 is -1"),
    "sigma0 zero": (least(sigma0=0.0), "sigma0 is 0"),
    "sigma0 infinite": (least(sigma0=math.inf), "sigma0 is inf"),
    "sigma0's shape": (at([0.0, 0.0], [1.0, 1.0, 1.0]), "sigma0 has shape"),
    "popsize 1": (at([0.0], popsize=1), "popsize is 1, expected an integer >= 2"),
    "popsize 2.5": (at([0.0], popsize=2.5), "popsize is 2.5"),
    "popsize bool": (least(popsize=True), "popsize is True"),
    "popsize of bits": (lambda: ng.MarkovSearch(4, popsize=1), "popsize is 1"),
    "popsize of categories": (lambda: CategoricalSearch([3], popsize=1), "popsize is 1"),
    "bounds inverted": (at([0.0], bounds=(1.0, -1.0)), "bounds are inverted"),
    "bounds' shape": (at([0.0], bounds=([0.0, 1.0], 2.0)), "bounds: lower has"),
    "bounds a triple": (at([0.0], bounds=(0, 1, 2)), "expected a pair"),
    "bounds as SciPy's": (at([0.0, 0.0], bounds=[(0, 1), (-1, 1)]), "one per variable as in SciPy"),
    "bounds a dict": (least(bounds={0: 1, 1: 2}), "expected a pair"),
    "bounds NaN": (least(bounds=(math.nan, 1)), "NaN is no bound"),
    "integers beyond": (at([0.0, 0.0], integers=[2]), "expected indices below 2"),
    "integers' mask": (at([0.0, 0.0], integers=[True]), "integers is a mask of shape"),
    "a mask of numbers": (at([0.0] * 4, integers=[1, 0, 1, 0]), r"names a variable twice.*a mask of 4 booleans"),
    "an integer twice": (at([0.0] * 4, integers=[3, -1]), "names a variable twice"),
    "half an integer": (at([0.0, 0.0], integers=[0.5]), "expected indices below 2 or a mask"),
    "no integer": (at([0.5], bounds=(0.2, 0.8), integers=[0]), "no integer lies within"),
    "integers' model": (at([0.5], integers=[0], model=LowRank()), "does not know its variances"),
    "seed": (at([2.0], seed=0.5), "seed is 0.5"),
    "tolerance": (lambda: Tolerances(tolx=-1.0), "tolx is -1"),
    "directions": (lambda: LowRank(0), "directions is 0"),
    "edge to itself": (lambda: SparsePrecision([(1, 1)]), r"edges has \(1, 1\)"),
    "edge beyond": (at([0.0, 0.0], model=SparsePrecision([(0, 2)])), "edges name variable 2"),
    "rate": (lambda: Full(rate=-1.0), "rate is -1"),
    "too small to ask": (least(popsize=6, maxfevals=6), r"maxfevals is 6, expected at least 10.*vectorized=True or"),
    "maxfevals": (least(maxfevals=1), "maxfevals is 1"),
    "maxfevals' kind": (least(maxfevals="9"), "maxfevals is '9'"),
    "maxfevals negative": (least(maxfevals=-1), "maxfevals is -1"),
    "maxfevals NaN": (least(maxfevals=math.nan), "maxfevals is nan"),
    "ftarget NaN": (least(ftarget=math.nan), "ftarget is nan"),
    "ftarget's kind": (least(ftarget="0"), "ftarget is '0'"),
    "restarts": (least(restarts=-1), "restarts is -1"),
    "restarts, a word": (least(restarts="often"), "restarts is 'often'"),
    "times": (lambda: IPOP(-1), "times is -1"),
    "factor": (lambda: IPOP(factor=0.5), "factor is 0.5"),
    "share": (lambda: NoiseHandling(share=0.0), "share is 0"),
    "threshold": (lambda: NoiseHandling(threshold=2.0), "threshold is 2"),
    "growth": (lambda: NoiseHandling(growth=1.0), "growth is 1"),
    "most": (lambda: NoiseHandling(most=0), "most is 0"),
    "a surrogate with noise": (least(surrogate=True, noise=True), "noise=True and surrogate=True are given: only one"),
    "a surrogate of bits": (least(ng.BernoulliSearch(5, seed=0), None, surrogate=True), "BernoulliSearch"),
    "timeout alone": (least(timeout=1.0, **HERE), "timeout is given without an executor"),
    "ahead alone": (least(ahead=2, **HERE), "ahead is given without an executor"),
    "timeout zero": (least(executor=Deaf(), timeout=0.0, **HERE), "timeout is 0.0, expected a number in .*: seconds"),
    "timeout's kind": (least(executor=Deaf(), timeout="1", **HERE), "timeout is '1'"),
    "timeout NaN": (least(executor=Deaf(), timeout=math.nan, **HERE), "timeout is nan"),
    "ahead negative": (least(executor=Deaf(), ahead=-1, **HERE), "ahead is -1"),
    "ahead with noise": (least(executor=Deaf(), ahead=2, noise=True, **HERE), "noise=True and ahead=2 are given"),
    "n": (lambda: ng.BernoulliSearch(0), "n is 0"),
    "margin": (lambda: ng.BernoulliSearch(4, margin=0.7), "margin is 0.7"),
    "rate of PBIL": (lambda: PBIL(rate=2.0), "rate is 2.0"),
    "best": (lambda: PBIL(best=0), "best is 0"),
    "population": (lambda: CGA(-1.0), "population is -1"),
    "cliques flat": (lambda: ng.MarkovSearch(4, [0, 1]), "cliques has 0, expected groups"),
    "cliques a word": (lambda: ng.MarkovSearch(4, "all"), "cliques has 'a', expected groups"),
    "half a bit": (lambda: ng.MarkovSearch(4, [(0.5, 1)]), r"cliques has \(0.5, 1\), expected groups"),
    "clique beyond": (lambda: ng.MarkovSearch(4, [(0, 4)]), r"cliques has \(0, 4\)"),
    "clique too large": (lambda: ng.MarkovSearch(20, [range(13)]), "2\\^13 products"),
    "largest": (lambda: ng.MarkovSearch(4, largest=1), "largest is 1"),
    "sizes": (lambda: CategoricalSearch(3), "sizes is 3"),
    "no sizes": (lambda: CategoricalSearch([]), "sizes is empty"),
    "one value": (lambda: CategoricalSearch([3, 1]), "sizes is 1, expected an integer >= 2"),
    "margin of categories": (lambda: CategoricalSearch([3, 4], margin=0.3), "margin is 0.3"),
    "popsizes": (lambda: ProductSearch(CategoricalSearch([3], 4), CategoricalSearch([3], 6)), r"popsizes \[4, 6\]"),
}
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "x0 words": (at("start"), "x0 is str"),
    "sigma0 text": (least(sigma0="1"), "sigma0 is str, expected numbers"),
    "f": (least(f=3), "f is int"),
    "vectorized": (least(vectorized="no"), "vectorized is 'no'"),
    "executor": (least(executor=3), "executor is int"),
    "an executor without submit": (least(executor=object(), **HERE), r"for Ray, ng.search.RayPool\(\)"),
    "futures that tell no end": (least(executor=MUTE, ahead=1, **HERE), "need futures that tell when they are done"),
    "callback": (least(callback=3), "callback is int"),
    "noise": (least(noise="much"), "noise is 'much'"),
    "surrogate": (least(surrogate="yes"), "QuadraticSurrogate"),
    "model a search": (least(model=ng.BernoulliSearch(2)), "a search is given as x0"),
    "parts": (lambda: ProductSearch(3), "expected searches"),
    "no parts": (lambda: ProductSearch(), "expected searches"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_does_not_fit_is_named(name: str):
    call, words = VALUES[name]
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_of_thing_is_named(name: str):
    call, words = KINDS[name]
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"popsize": 10}, "popsize is"),
        ({"seed": 1}, "seed is"),
        ({"sigma0": 1.0}, "sigma0 is"),
        ({"bounds": (0, 1)}, "bounds is"),
    ],
)
def test_a_given_search_takes_no_second_settings(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=f"{words} given beside a BernoulliSearch"):
        ng.minimize(sphere, ng.BernoulliSearch(4, seed=0), **settings)


def test_tell_checks_shapes():
    search = ng.GaussianSearch([0.0, 0.0], 1.0, popsize=4, seed=0)
    X = search.ask()
    for points, values, words in (
        (X[:3], sphere(X[:3]), r"X has shape \(3, 2\), expected \(4, 2\)"),
        (X[:, :1], sphere(X), "X has shape"),
        (X, sphere(X)[:2], "F has shape"),
        (X * math.inf, sphere(X), "not finite"),
        (None, sphere(X), "X is NoneType"),
        (X, None, "F is NoneType"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            search.tell(points, values)
    search.tell(X.tolist(), sphere(X).tolist())  # lists are welcome
    assert search.nfev == 4
