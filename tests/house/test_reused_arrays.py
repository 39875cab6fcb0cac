"""Whoever hands over an array may write into it afterwards: what is kept for later is a copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from models import draw, mlp
from optim_models import flat
from torch import Tensor, nn

import natgrad as ng
from natgrad import search as s

# optimisers and metrics

CE = nn.CrossEntropyLoss()
OPTIMISERS: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda net: ng.kfac(net, CE, lr=0.1),
    "kfac, measured": lambda net: ng.kfac(net, CE, lr=0.1, max_kl=0.01),
    "unitwise": lambda net: ng.unitwise(net, CE, lr=0.1),
    "hessian_free": lambda net: ng.hessian_free(net, CE),
    "natgrad_cg": lambda net: ng.natgrad_cg(net, CE, lr=0.1),
}


def train(recipe: Callable[[nn.Module], Any], share: Callable[[np.ndarray], Tensor]) -> Tensor:
    """The parameters after three steps, the arrays of a batch overwritten before each step."""
    net = mlp(3, 4, 3)
    opt, rng = recipe(net), np.random.default_rng(1)
    inputs, targets = np.zeros((8, 3)), np.zeros(8, dtype=np.int64)
    for _ in range(3):
        inputs[:], targets[:] = rng.normal(size=(8, 3)), rng.integers(3, size=8)
        opt.zero_grad()
        opt.loss(net(share(inputs)), share(targets)).backward()
        inputs[:], targets[:] = 100.0, 0
        opt.step()
    return flat(net)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_step_is_that_of_the_batch_though_its_arrays_were_overwritten(name: str) -> None:
    assert torch.equal(train(OPTIMISERS[name], torch.from_numpy), train(OPTIMISERS[name], torch.tensor))


@pytest.mark.parametrize("build", [ng.fisher, ng.empirical_fisher, ng.gauss_newton, ng.hessian])
def test_operator_stays_that_of_its_inputs(build: Any) -> None:
    net = mlp(3, 4, 3)
    metric, params, inputs, targets = build(net, CE), ng.trainable(net), draw(5, 3), torch.arange(5) % 3
    data = (inputs, targets) if metric.needs_targets else inputs
    want, operator = metric.at(params, data).dense(), metric.at(params, data)
    inputs.zero_(), targets.zero_()
    assert torch.equal(operator.dense(), want)


# searches

SEARCHES: dict[str, Callable[[list[np.ndarray]], s.Search]] = {
    "GaussianSearch": lambda a: ng.GaussianSearch(a[0], a[1], seed=0, bounds=(a[2], a[3])),
    "with integers": lambda a: ng.GaussianSearch(a[0], a[1], seed=0, bounds=(a[2], a[3]), integers=a[4]),
    "BernoulliSearch": lambda a: ng.BernoulliSearch(8, seed=0),
    "CategoricalSearch": lambda a: s.CategoricalSearch([3, 2, 4], seed=0),
    "MarkovSearch": lambda a: ng.MarkovSearch(8, seed=0),
}


def search_arguments() -> list[np.ndarray]:
    numbers = ([0.5, 0.2, 0.1], [0.5, 1.0, 2.0], [-3.0, -3.0, -3.0], [5.0, 5.0, 5.0])
    return [*map(np.array, numbers), np.array([True, False, False])]


def drive(build: Callable[[list[np.ndarray]], s.Search], reuse: bool) -> tuple[Tensor, float, Tensor]:
    """The best point, its value and the first candidates of a restart; reuse: all arrays are written over."""
    arguments = search_arguments()
    search = build(arguments)
    for array in arguments if reuse else ():
        array[:] = 7
    for _ in range(10):
        asked = search.ask()
        points, values = asked.numpy().copy(), (asked - 1).square().sum(1).numpy()
        search.tell(points, values)  # type: ignore[arg-type]
        if reuse:
            points[:], values[:], asked[:] = 0.0, -5.0, 3.0
    return search.best.x, search.best.fun, search.renew(search.popsize, 1).ask()


@pytest.mark.parametrize("name", SEARCHES)
def test_search_keeps_what_it_was_told(name: str) -> None:
    fresh, reused = (drive(SEARCHES[name], reuse) for reuse in (False, True))
    assert torch.equal(fresh[0], reused[0])
    assert fresh[1] == reused[1]
    assert torch.equal(fresh[2], reused[2])


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("vectorized", [None, True, False])
def test_minimize_takes_an_f_that_returns_one_array(vectorized: bool | None, pooled: bool) -> None:
    results = []
    for reuse in (False, True):
        arguments, answer = search_arguments(), np.zeros(100)

        def f(x: Tensor, arguments: Any = arguments, answer: Any = answer, reuse: bool = reuse) -> Any:
            count = 1 if x.dim() == 1 else len(x)
            values = (x - 1).square().sum(-1).numpy().reshape(count)
            if not reuse:
                return values.copy()
            for array in arguments:
                array[:] = 7
            answer[:count] = values
            x.zero_()
            return answer[:count]

        settings = {"bounds": (arguments[2], arguments[3]), "integers": arguments[4], "vectorized": vectorized}
        with ThreadPoolExecutor(1) as pool:
            settings |= {"executor": pool if pooled else None, "restarts": 2, "maxfevals": 60}
            results.append(ng.minimize(f, arguments[0], arguments[1], seed=0, **settings))
    fresh, reused = results
    assert torch.equal(fresh.x, reused.x)
    assert (fresh.fun, fresh.nfev) == (reused.fun, reused.nfev)


# environments


class Clock(gym.Env[Any, Any]):
    """Tells the time; all of its kind write it into one array."""

    observation_space, action_space = spaces.Box(-100, 100, (1,), np.float32), spaces.Discrete(2)
    shared = np.zeros(1, np.float32)

    def __init__(self, start: float = 0.0, reuse: bool = True) -> None:
        self.start, self.reuse, self.time = start, reuse, 0.0

    def look(self) -> np.ndarray:
        if not self.reuse:
            return np.array([self.time], np.float32)
        self.shared[0] = self.time
        return self.shared

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = self.start
        return self.look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.look(), self.time, self.time >= self.start + 6, False, {}


WORLDS: dict[str, Callable[[bool], Any]] = {
    "SyncVectorEnv": lambda reuse: gym.vector.SyncVectorEnv([lambda: Clock(reuse=False)] * 2, copy=not reuse),
    "two environments, one array": lambda reuse: [Clock(0.0, reuse), Clock(10.0, reuse)],
}


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", WORLDS)
def test_batch_holds_each_step_of_environments_that_reuse_arrays(name: str, normalised: bool) -> None:
    batches = []
    for reuse in (False, True):
        agent = ng.TRPO(None, WORLDS[name](reuse), batch=24, seed=0, normalize_observations=normalised)
        agent.learn(24)
        assert agent.rollout is not None
        batches.append((agent.rollout.states, agent.rollout.advantages, agent.rollout.returns))
    for fresh, reused in zip(*batches, strict=True):
        assert torch.equal(fresh, reused)
