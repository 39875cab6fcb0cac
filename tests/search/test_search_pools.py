"""Executors that lose points, and functions that cannot be sent to them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import warnings
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from black_boxes import one_value, sphere
from torch import Tensor

import natgrad as ng
from natgrad.search import workers

SETTINGS = {"seed": 3, "maxfevals": 96, "vectorized": False}


class FailingPool:
    """Calls f where it is asked for the result, but loses the points whose number, from 0, `loses` says.

    error: what a lost future raises.   at_submit: raised by submit() already.
    """

    def __init__(self, loses, error: BaseException, at_submit: bool = False) -> None:
        self.loses, self.error, self.at_submit, self.count = loses, error, at_submit, 0

    def submit(self, fn, *args):
        lost, self.count = self.loses(self.count), self.count + 1
        if lost and self.at_submit:
            raise self.error
        return self.Future(fn, args, self.error if lost else None)

    class Future:
        def __init__(self, fn, args, error) -> None:
            self.fn, self.args, self.error = fn, args, error

        def result(self):
            if self.error is not None:
                raise self.error
            return self.fn(*self.args)


LOSES = {"all": lambda k: True, "the first": lambda k: k == 0, "now and then": lambda k: k % 7 == 3}
ERRORS = [
    BrokenExecutor("a worker died"),
    CancelledError(),
    BrokenProcessPool("terminated abruptly"),
    ConnectionResetError("reset by peer"),
    EOFError(),
]


@pytest.mark.parametrize(
    ("loses", "error", "at_submit"),
    [(loses, ERRORS[(i + k) % 5], bool(k % 2)) for i, loses in enumerate(LOSES) for k in range(3)],
    ids=str,
)
def test_lost_points_are_evaluated_elsewhere(loses: str, error: BaseException, at_submit: bool):
    """The search is the one without an executor, every point is evaluated once, and the loss is said once."""
    calls = []
    here = ng.minimize(one_value, [1.0, 2.0], 1.0, **SETTINGS)
    with pytest.warns(RuntimeWarning, match="the executor lost") as caught:
        there = ng.minimize(
            lambda x: (calls.append(1), one_value(x))[1],
            [1.0, 2.0],
            1.0,
            executor=FailingPool(LOSES[loses], error, at_submit),
            **SETTINGS,
        )
    assert len(caught) == 1
    assert torch.equal(here.x, there.x)
    assert len(calls) == there.nfev == here.nfev
    assert there.failures == 0


def test_an_answer_that_does_not_come_is_asked_for_once_more():
    with pytest.warns(RuntimeWarning, match="TimeoutError"):
        once = ng.minimize(
            one_value, [1.0, 2.0], 1.0, executor=FailingPool(LOSES["now and then"], TimeoutError()), **SETTINGS
        )
    assert once.failures == 0
    with pytest.warns(RuntimeWarning, match="TimeoutError"):
        never = ng.minimize(one_value, [1.0, 2.0], 1.0, executor=FailingPool(LOSES["all"], TimeoutError()), **SETTINGS)
    assert never.failures == never.nfev  # evaluated here, such a point might hang for ever


class DeafPool:
    """A client whose connection is reset: what it has is lost, and what comes then is never answered."""

    def __init__(self, until: int) -> None:
        self.until, self.count = until, 0

    def submit(self, fn, *args):
        self.count += 1
        future: Future[Any] = Future()
        if self.count < self.until:
            future.set_result(fn(*args))
        elif self.count == self.until:
            future.set_exception(ConnectionResetError("reset by peer"))
        return future


@pytest.mark.parametrize("settings", [{}, {"ahead": 2}, {"timeout": 60.0}], ids=str)
def test_a_pool_whose_connection_is_reset_ends_no_search_and_holds_up_none(settings, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def count_call(x: Tensor) -> float:
        calls.append(1)
        return one_value(x)

    monkeypatch.setattr(workers, "PATIENCE", 0.05)
    with pytest.warns(RuntimeWarning, match="lost 1 points .ConnectionResetError: reset by peer"):
        there = ng.minimize(count_call, [1.0, 2.0], 1.0, popsize=6, executor=DeafPool(12), **settings, **SETTINGS)
    assert there.failures == 0
    assert there.nfev == len(calls)
    assert there.fun < 1e-3


def test_workers_that_answer_no_more_within_the_timeout_end_the_search():
    with pytest.warns(RuntimeWarning, match="no worker answered"):
        result = ng.minimize(
            one_value, [1.0, 2.0], 1.0, popsize=6, seed=0, vectorized=False, executor=DeafPool(-12), timeout=0.005
        )
    assert result.message.startswith("failed: no worker answered 20 times in a row")


def test_a_straggler_is_late_though_others_answer(monkeypatch: pytest.MonkeyPatch):
    """Points begin in their order: one is late `timeout` seconds after a later one was answered, not after the last."""
    now = [0.0]
    monkeypatch.setattr(workers, "monotonic", lambda: now[0])
    flight, futures = workers.PointsInFlight(1.5), [Future[float]() for _ in range(9)]
    for number in range(1, 9):
        flight.add(number, futures[number])

    def answer_next(number: int) -> None:
        now[0] += 0.6
        futures[number].set_result(0.0)
        assert flight.take_next() == [(number, futures[number])]

    for number in (1, 3, 4):  # the second one hangs, known to run since 1.2
        answer_next(number)
    assert flight.find_late()[0] == []
    for number in (5, 6):
        answer_next(number)
    assert flight.take_next() == [(2, None)]
    assert flight.find_late() == ([], pytest.approx(1.5))
    now[0] += 2.0
    assert flight.take_next() == [(7, None), (8, None)]  # nobody answers


def test_a_connection_that_f_loses_is_a_failed_evaluation():
    calls = []

    def lonely(x: Tensor) -> float:
        calls.append(1)
        raise ConnectionResetError("the licence server")

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.warns(RuntimeWarning, match="f raised ConnectionResetError: the licence"),
    ):
        result = ng.minimize(lonely, [1.0], 1.0, executor=pool, **SETTINGS)
    assert len(calls) == result.nfev == result.failures


# Processes.


class OddError(Exception):
    """Cannot be read from a pickle."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{code} at {place}")


def raise_on_the_left(x: Tensor) -> float:
    if float(x[0]) < 0.5:
        raise OddError(3, "the left")
    return one_value(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exceptions_that_cannot_be_sent_break_no_pool():
    settings = {"seed": 0, "maxfevals": 30, "vectorized": False}
    with forking_pool() as pool:
        with pytest.warns(RuntimeWarning, match="f raised OddError: 3 at the left") as caught:
            result = ng.minimize(raise_on_the_left, [1.0, 1.0], 0.5, executor=pool, **settings)
        assert pool.submit(int).result() == 0
    assert len([one for one in caught if one.category is RuntimeWarning]) == 1
    assert 0 < result.failures < 30


def forking_pool(workers: int = 1) -> ProcessPoolExecutor:
    if not hasattr(os, "fork"):
        pytest.skip("processes are not forked here")
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))


def die_once(flag: Path, x: Tensor) -> float:
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return one_value(x)


def die_on_the_left(x: Tensor) -> float:
    if float(x[0]) < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    return one_value(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of later Pythons, about fork beside threads
def test_a_killed_worker_costs_no_point(tmp_path: Path):
    here = ng.minimize(one_value, [1.0, 2.0], 1.0, **SETTINGS)
    with forking_pool() as pool, pytest.warns(RuntimeWarning, match="the executor lost"):
        there = ng.minimize(functools.partial(die_once, tmp_path / "flag"), [1.0, 2.0], 1.0, executor=pool, **SETTINGS)
    assert torch.equal(here.x, there.x)
    assert (here.nfev, here.failures) == (there.nfev, there.failures)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_points_that_kill_their_process_have_no_value_and_harm_nobody_else():
    with forking_pool() as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ng.minimize(die_on_the_left, [1.0, 1.0], 0.5, seed=0, maxfevals=30, vectorized=False, executor=pool)
    assert 0 < result.failures < 30
    assert float(result.x[0]) >= 0.5
    assert result.fun == one_value(result.x)


# What cannot be sent.


class Holder:
    """A function that holds a lock, which no pickle can carry."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, x: Tensor) -> float:
        return one_value(x)


def local_function():
    def f(x: Tensor) -> float:
        return one_value(x)

    return f


UNSENDABLE = {
    "a lambda": lambda: lambda x: 1.0,
    "a local function": local_function,
    "a partial of a lambda": lambda: functools.partial(lambda a, x: a, 1.0),
    "an object with a lock": Holder,
}


class RefusingPool(FailingPool):
    """As pools of other packages do: the future raises what pickling raised."""

    def __init__(self) -> None:
        super().__init__(LOSES["all"], AttributeError("Can't pickle local object"))


@pytest.mark.parametrize("pool", [forking_pool, RefusingPool])
@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_cannot_be_pickled_is_an_error_at_once(name: str, pool):
    with pytest.raises(TypeError, match=r"f cannot be pickled.*ThreadPoolExecutor"):
        ng.minimize(UNSENDABLE[name](), [1.0, 2.0], 1.0, executor=pool(), **SETTINGS)


# Pools that remember.


class RememberingPool:
    """As Dask's client: unless `pure` is False, a point that was evaluated before gets its old value."""

    def __init__(self) -> None:
        self.known: dict[tuple[float, ...], object] = {}

    def submit(self, fn, x, *, pure: bool = True):
        key = tuple(x.reshape(-1).tolist())
        value = self.known[key] if pure and key in self.known else fn(x)
        self.known[key] = value
        return FailingPool.Future(lambda: value, (), None)


class KeywordPool:
    """As the executor that Dask's client gives: it remembers by the arguments, and does not say how to prevent that."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}

    def submit(self, fn, *args, **kwargs):
        key = repr([getattr(arg, "tolist", lambda arg=arg: arg)() for arg in args])
        if key not in self.known:
            self.known[key] = fn(*args, **kwargs)
        return FailingPool.Future(lambda: self.known[key], (), None)


@pytest.mark.parametrize("pool", [RememberingPool, KeywordPool])
def test_repeated_evaluations_are_made_afresh(pool: type[Any]):
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> float:
        return float(sphere(x) + 3 * torch.randn((), generator=generator, dtype=torch.float64))

    result = ng.minimize(noisy, [3.0, 3.0], 1.0, seed=0, noise=True, vectorized=False, maxfevals=600, executor=pool())
    assert max(result.history["evaluations"]) > 1  # the noise was seen
