"""Workers that are never idle, answers that never come, and Ray's tasks."""

from __future__ import annotations

import sys
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from black_boxes import one_value

import natgrad as ng
from natgrad.search import RayPool

SETTINGS: dict[str, Any] = {"seed": 3, "vectorized": False}


class Waiting:
    """Answers nothing before `count` points wait, and then the last of them.

    silent: numbers of points that are never answered.   lost: numbers of points whose worker dies.
    running: points run from the beginning, so that none can be cancelled.
    """

    def __init__(
        self, count: int, silent: tuple[int, ...] = (), lost: tuple[int, ...] = (), running: bool = False
    ) -> None:
        self.count, self.silent, self.lost, self.running = count, silent, lost, running
        self.waiting: list[tuple[Future[Any], Any, Any]] = []
        self.number = 0

    def submit(self, fn: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.number += 1
        if self.running:
            future.set_running_or_notify_cancel()
        if self.number in self.lost:
            future.set_exception(BrokenExecutor("a worker died"))
        elif self.number not in self.silent:
            self.waiting.append((future, fn, args))
        while len(self.waiting) >= self.count:
            last, fn, args = self.waiting.pop()
            if not last.cancelled():
                last.set_result(fn(*args))
        return future


def test_workers_have_points_beyond_the_generation():
    """With 4 ahead, workers that answer only while a fifth point waits bring the search to its end."""
    pool = Waiting(5)
    result = ng.minimize(one_value, [1.0, 2.0], 1.0, popsize=6, executor=pool, ahead=4, ftarget=1e-8, **SETTINGS)
    assert len(pool.waiting) == 4
    assert result.success
    assert result.failures == 0
    assert result.nit * 6 <= pool.number


@pytest.mark.parametrize("ahead", [0, 1])
def test_stragglers_are_cut(ahead: int):
    with pytest.warns(RuntimeWarning, match="no worker answered"):
        result = ng.minimize(
            one_value,
            [1.0, 2.0],
            1.0,
            executor=Waiting(1, silent=(4, 20, 21)),
            timeout=0.05,
            ahead=ahead,
            maxfevals=200,
            **SETTINGS,
        )
    assert 1 <= result.failures <= 3
    assert result.fun < 1e-3


@pytest.mark.parametrize("vectorized", [None, False, True])
@pytest.mark.parametrize("restarts", [None, 2])
def test_every_call_of_f_counts_and_the_budget_holds(vectorized: bool | None, restarts: int | None):
    calls = []

    def f(X: Any) -> Any:
        calls.append(1)
        return X.square().sum(-1)

    with ThreadPoolExecutor(2) as pool:
        result = ng.minimize(
            f,
            [1.0, 2.0, -1.0],
            1.0,
            executor=pool,
            ahead=3,
            maxfevals=150,
            restarts=restarts,
            tolerances=ng.search.Tolerances(tolfun=1e-1),
            seed=1,
            vectorized=vectorized,
        )
    assert len(calls) == result.nfev <= 150
    assert result.failures == 0


@pytest.mark.parametrize("budget", range(80, 92))
def test_points_that_run_while_a_search_starts_again_are_within_the_budget(budget: int):
    """Those of the last run are given up and counted; the next run has as many of its own."""
    pool, short = Waiting(5, running=True), ng.search.Tolerances(maxiter=3)
    settings = {"popsize": 6, "executor": pool, "ahead": 4, "restarts": 8, "tolerances": short}
    result = ng.minimize(one_value, [1.0, 2.0], 1.0, maxfevals=budget, **settings, **SETTINGS)
    assert pool.number == result.nfev <= budget


# Ray: a stand-in with the part of its interface that is used.


class TaskError(Exception):
    """As ray.exceptions.RayTaskError."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """Runs a task where it is called for; every `dies`-th is lost with its worker."""

    exceptions = SimpleNamespace(RayTaskError=TaskError)

    def __init__(self, dies: int = 0) -> None:
        self.dies, self.tasks, self.puts, self.chosen = dies, 0, 0, {}

    def is_initialized(self) -> bool:
        return True

    def put(self, thing: Any) -> Any:
        self.puts += 1
        return ("kept", thing)

    def remote(self, function: Any) -> Any:
        def call(reference: Any, *args: Any) -> Any:
            self.tasks += 1
            future: Future[Any] = Future()
            if self.dies and self.tasks % self.dies == 0:
                future.set_exception(RuntimeError("WorkerCrashedError"))
                return SimpleNamespace(future=lambda: future)
            try:
                future.set_result(function(reference[1], *args))
            except Exception as error:  # noqa: BLE001 as Ray wraps it
                future.set_exception(TaskError(error))
            return SimpleNamespace(future=lambda: future)

        def options(**chosen: Any) -> Any:
            self.chosen = chosen
            return SimpleNamespace(remote=call)

        return SimpleNamespace(options=options)


def test_ray_evaluates_points(monkeypatch: pytest.MonkeyPatch):
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    here = ng.minimize(one_value, [1.0, 2.0], 1.0, maxfevals=96, **SETTINGS)
    there = ng.minimize(one_value, [1.0, 2.0], 1.0, maxfevals=96, executor=RayPool(num_cpus=2), **SETTINGS)
    assert torch.equal(here.x, there.x)
    assert (ray.tasks, ray.puts) == (there.nfev, 1)  # the function is sent once
    assert ray.chosen == {"max_retries": 0, "num_cpus": 2}


def test_without_ray_the_pool_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="pip install ray"):
        RayPool()
