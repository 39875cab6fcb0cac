"""Environments, batches and checkpoints of policies: no transition across a reset, GAE, moments, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import F64
from torch import nn

import natgrad as ng

gym = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from policy_worlds import Bandit, Clock, Corridor, Walk, small  # noqa: E402

from natgrad import policy as pg  # noqa: E402
from natgrad.policy.actor import Actor  # noqa: E402
from natgrad.policy.advantage import RewardScale, estimate_advantages  # noqa: E402
from natgrad.policy.environments import Environments  # noqa: E402
from natgrad.policy.heads import choose_head  # noqa: E402
from natgrad.policy.rollout import ObservationScale, collect_steps  # noqa: E402

MODES = {
    "list": lambda makers: [make() for make in makers],
    **{mode.name: (lambda makers, mode=mode: SyncVectorEnv(makers, autoreset_mode=mode)) for mode in AutoresetMode},
}


def batch_of(env: Any, size: int, value: Any, limit: float | None = None) -> pg.Rollout:
    """A batch without scaling, in float64, by a policy of zeros."""
    worlds = Environments(env, limit)
    policy = nn.Linear(2, 2, dtype=F64)
    actor = Actor(policy, choose_head(worlds.action_space), torch.zeros(worlds.shape, dtype=F64))
    kept = collect_steps(
        actor, worlds, ObservationScale(worlds.shape, False), size, 0, torch.Generator().manual_seed(0)
    )
    return estimate_advantages(kept, value, RewardScale(worlds.count, 0.9, False), 0.9, 0.8, worlds.take_episodes())


def by_plain_loop(episode: int, length: int, truncated: bool, cut: int | None, value: Any) -> list[float]:
    """GAE of one of Clock's episodes of `length` steps of which `cut` fell into the batch."""
    steps = length if cut is None else cut
    found, carried = [], 0.0
    for t in reversed(range(steps)):
        last = t == length - 1
        v = float(value(torch.tensor([[episode, t]], dtype=F64)))
        after = 0.0 if last and not truncated else float(value(torch.tensor([[episode, t + 1]], dtype=F64)))
        delta = 2.0 + t + 0.9 * after - v
        carried = delta + (0.0 if last or t == steps - 1 else 0.9 * 0.8 * carried)
        found.append(carried)
    return found[::-1]


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gae_is_that_of_a_plain_loop_in_every_autoreset_mode(mode: str, truncates: bool):
    def value(states: torch.Tensor) -> torch.Tensor:
        return (states * torch.tensor([0.7, 1.3], dtype=F64)).sum(1).sin()

    makers = [lambda: Clock((3, 5, 2), truncates), lambda: Clock((4,), truncates)]
    batch = batch_of(MODES[mode](makers), 22, value)
    assert not bool(((batch.states[:, 1] == 5) | (batch.states[:, 0] < 0)).any())  # nothing acted on a last state
    lengths = {0: (3, 5, 2), 1: (4,)}
    rows = list(zip(batch.states.tolist(), batch.advantages.tolist(), batch.returns.tolist(), strict=True))
    seen = [(tuple(map(int, s)), a) for s, a, _ in rows]
    # the two environments' episodes have the same names: split them by their order within a time step
    of: dict[tuple[int, int], list[float]] = {}
    for name, advantage in seen:
        of.setdefault(name, []).append(advantage)
    expected: dict[tuple[int, int], list[float]] = {}
    steps = {}
    for which, kinds in lengths.items():
        steps[which] = count_steps(batch, mode, kinds, which)
        place, episode = 0, 0
        while place < steps[which]:
            length = kinds[episode % len(kinds)]
            cut = None if place + length <= steps[which] else steps[which] - place
            for t, one in enumerate(by_plain_loop(episode, length, truncates, cut, value)):
                expected.setdefault((episode, t), []).append(one)
            place, episode = place + length, episode + 1
    assert sum(steps.values()) == len(batch)
    assert of.keys() == expected.keys()
    for name, found in of.items():
        assert sorted(found) == pytest.approx(sorted(expected[name]), rel=1e-12)


def count_steps(batch: pg.Rollout, mode: str, kinds: tuple[int, ...], which: int) -> int:
    """Actions of one environment until both have made `len(batch)`: resets take a step of their own in NEXT_STEP."""
    acts: list[list[int]] = []
    for own in ((3, 5, 2), (4,)):
        line: list[int] = []
        for episode in range(20):
            line += [1] * own[episode % len(own)] + ([0] if mode == "NEXT_STEP" else [])
        acts.append(line)
    total = np.cumsum(np.array(list(zip(*acts, strict=False))).sum(1))
    times = int(np.flatnonzero(total >= 22)[0]) + 1
    return sum(acts[which][:times])


@pytest.mark.parametrize("mode", MODES)
def test_episodes_count_their_own_steps(mode: str):
    makers = [lambda: Clock((3, 5, 2)), lambda: Clock((4,))]
    batch = batch_of(MODES[mode](makers), 40, lambda s: s[:, 0])
    assert {(e.length, e.ret) for e in batch.episodes} == {
        (n, sum(1.0 + t for t in range(1, n + 1))) for n in (2, 3, 4, 5)
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_time_limit_truncates_and_bootstraps(mode: str):
    def value(states: torch.Tensor) -> torch.Tensor:
        return 10 * states[:, 1]

    batch = batch_of(MODES[mode]([lambda: Clock((1000,))]), 12, value, limit=4)
    assert {e.length for e in batch.episodes} == {4}
    assert batch.states[:, 1].tolist() == [0, 1, 2, 3] * 3
    last = batch.advantages[3]
    assert float(last) == pytest.approx(1 + 4 + 0.9 * 40 - 30)


def test_gae_function():
    rng = np.random.default_rng(0)
    rewards, values, following = (rng.normal(size=(6, 2)) for _ in range(3))
    ended, terminated = rng.random((6, 2)) < 0.4, rng.random((6, 2)) < 0.5
    terminated &= ended
    found = pg.gae(rewards, values, following, terminated, ended, 0.9, 0.7)
    numbers = pg.gae(rewards, values, following, terminated.astype(int), ended.astype(float), 0.9, 0.7)
    assert np.array_equal(numbers, found)
    for i in range(2):
        for t in range(6):
            expected, weight = 0.0, 1.0
            for k in range(t, 6):
                alive = 0.0 if terminated[k, i] else 1.0
                expected += weight * (rewards[k, i] + 0.9 * alive * following[k, i] - values[k, i])
                weight *= 0.9 * 0.7
                if ended[k, i]:
                    break
            assert found[t, i] == pytest.approx(expected)


def test_running_moments_are_numpys():
    rng = np.random.default_rng(0)
    data = rng.normal(3, 5, (57, 4)) * 10.0 ** np.arange(4)
    moments = pg.RunningMoments((4,))
    for part in np.split(data, [1, 2, 9, 9, 40]):
        moments.update(part)
    np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, data.var(0), rtol=1e-12)
    again = pg.RunningMoments((4,))
    again.load_state_dict(moments.state_dict())
    np.testing.assert_array_equal(again.std, moments.std)


class Side(gym.Env):
    """One step per episode: which side the first number lies on pays 1, in units of one's own."""

    action_space = spaces.Discrete(2)

    def __init__(self, unit: float, reward_unit: float, offset: float) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.unit, self.reward_unit, self.offset = unit, reward_unit, offset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self.unit * self.place, {}

    def step(self, action: Any) -> Any:
        reward = self.offset + float((self.place[0] > 0) == bool(action))
        return self.unit * self.place, self.reward_unit * reward, True, False, {}


def learn_side(unit: float, reward_unit: float, offset: float = 0.0, updates: int = 10) -> tuple[ng.TRPO, float]:
    """The learner after some updates, and the share of states in which it takes the right side."""
    agent = ng.TRPO(None, Side(unit, reward_unit, offset), batch=256, seed=0)
    agent.learn(updates * 256)
    places = np.random.default_rng(0).normal(size=(400, 2))
    return agent, float((agent.predict(unit * places)[0] == (places[:, 0] > 0)).mean())


def test_units_of_observations_and_rewards_do_not_matter():
    agent, _ = learn_side(1.0, 1.0, updates=3)
    for unit, reward_unit in ((2.0**-30, 2.0**40), (2.0**30, 2.0**-40)):
        again, _ = learn_side(unit, reward_unit, updates=3)
        for p, q in zip(agent.policy.parameters(), again.policy.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("offset", [-100.0, 100.0])
def test_rewards_that_differ_little_are_told_apart(offset: float):
    _, share = learn_side(1.0, 1.0, offset)
    assert share > 0.9


def test_entries_that_never_change_are_not_blown_up():
    moments = pg.RunningMoments((3,))
    moments.update(np.tile([0.0, 0.1, 1e9], (57, 1)))
    np.testing.assert_array_equal(moments.std, 1.0)


ENVS = {
    "one": Walk,
    "several": lambda: [Walk(7), Walk(9)],
    "Pendulum": lambda: gym.make("Pendulum-v1", max_episode_steps=30),
    "FrozenLake": lambda: gym.make("FrozenLake-v1"),
    **{mode.name: (lambda mode=mode: SyncVectorEnv([Walk, Walk], autoreset_mode=mode)) for mode in AutoresetMode},
    "CartPole, vectorised": lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"),
}
KINDS = {
    "adaptive": {},
    "K-FAC": {"structure": ng.Kronecker(0.9), "solver": ng.Direct()},
    "few states": {"metric_batch": 9},
}


@pytest.mark.parametrize(
    ("name", "choices"),
    [*((name, "adaptive") for name in ENVS if name != "one"), ("one", "K-FAC"), ("one", "few states")],
)
def test_a_checkpoint_goes_on_bit_for_bit(name: str, choices: str, tmp_path):
    straight, first, again = (small(ENVS[name](), **KINDS[choices]) for _ in range(3))
    straight.learn(64 * 2)
    first.learn(64)
    first.predict(first.worlds.observation_space.sample(), deterministic=False)
    first.save(tmp_path / "policy.pt")
    torch.load(tmp_path / "policy.pt", weights_only=True)
    assert again.load(tmp_path / "policy.pt") is again
    again.learn(64)
    first.learn(64)
    for other in (first, again):
        assert all(
            torch.equal(a, b) for a, b in zip(straight.actor.parameters(), other.actor.parameters(), strict=True)
        )
        assert all(torch.equal(a, b) for a, b in zip(straight.critic.params, other.critic.params, strict=True))
        names = [n for n in straight.history.names if n != "seconds"]
        assert [straight.history[n] for n in names] == [other.history[n] for n in names]


def parameters(agent: Any) -> list[torch.Tensor]:
    tensors = [*agent.actor.parameters(), *agent.critic.params, torch.tensor(agent.scale.moments.mean)]
    return [t.detach().clone() for t in tensors]


FAULTS = {
    "raise": "raised OSError: the simulator is gone",
    "nan": "observation that is not finite",
    "reward": "the reward",
    "shape": r"observation of shape \(3,\), expected \(2,\)",
}


@pytest.fixture(scope="module")
def honest() -> Any:
    """An agent after two updates without a fault."""
    agent = small(Walk())
    agent.learn(64 * 2)
    return agent


@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_that_fails_leaves_all_as_before_the_update(fault: str, honest: Any):
    agent = small(Walk(fault=fault, at=64 * 2 + 30))
    with pytest.raises(pg.EnvironmentFault, match=FAULTS[fault]):
        agent.learn(64 * 4)
    assert len(agent.history) == 2
    assert agent.steps == 128
    assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(honest), strict=True))
    agent.learn(64)  # the fault is over: new episodes begin
    assert len(agent.history) == 3


class Elsewhere(Walk):
    """step() and reset() as another library has them."""

    def __init__(self, step: Any = lambda found: found, reset: Any = lambda found: found) -> None:
        super().__init__()
        self.after, self.first = step, reset

    def reset(self, **choices: Any):
        return self.first(super().reset(**choices))

    def step(self, action):
        return self.after(super().step(action))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Elsewhere(lambda f: (*f[:2], f[2], {"TimeLimit.truncated": False})), r"step\(\) returned 4 values, expected"),
        (Elsewhere(reset=lambda f: f[0]), r"reset\(\) returned ndarray, expected \(observation, info\)"),
        (Elsewhere(lambda f: (f[0], None, *f[2:])), "reward None, expected a number"),
        (Elsewhere(lambda f: (f[0], np.ones(2), *f[2:])), r"reward array\(.*expected a number"),
    ],
)
def test_what_is_not_gymnasium_s_is_told(env: Any, words: str):
    agent = small(env, nn.Linear(2, 1))
    with pytest.raises(pg.EnvironmentFault, match=words):
        agent.learn(64)
    assert agent.updates == 0


class Wrong(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.shape = nn.Parameter(torch.zeros(1)), shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(len(x), *self.shape)


class Remembering(nn.Linear):
    """Rows that grow with every call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


WALK = Walk()
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "radius": (lambda: small(radius=0.0), ValueError, "radius is 0.0, expected a finite number > 0"),
    "radius below zero": (lambda: small(radius=-1.0, kind=ng.NaturalPolicyGradient), ValueError, "radius is -1.0"),
    "rate": (lambda: small(lr=0.0, kind=ng.NaturalPolicyGradient), ValueError, "lr is 0.0"),
    "two lengths": (lambda: small(lr=0.1, radius=0.1, kind=ng.NaturalPolicyGradient), TypeError, "lr and radius"),
    "two, theirs": (lambda: small(lr=0.1, target_kl=0.1, kind=ng.NaturalPolicyGradient), TypeError, "lr and target_kl"),
    "width": (lambda: small(policy=nn.Linear(2, 3)), ValueError, r"policy returned a tensor \(.*3\).*expected rows"),
    "three dimensions": (lambda: small(policy=Wrong((1, 1))), ValueError, "policy returned"),
    "memory": (lambda: small(policy=Remembering(2, 1)), ValueError, "past observations, gymnasium.*FrameStackObs"),
    "input width": (lambda: small(policy=nn.Linear(3, 1)), ValueError, "module Linear failed on states of shape"),
    "critic": (lambda: small(critic=nn.Linear(2, 2)), ValueError, "critic returned"),
    "no parameters": (lambda: small(policy=nn.Tanh()), ValueError, "no parameter"),
    "frozen": (lambda: small(Bandit(), policy=nn.Linear(2, 3).requires_grad_(False)), ValueError, "no trainable"),
    "no module": (lambda: small(policy=lambda x: x), TypeError, "torch.nn.Module"),
    "no environment": (lambda: small(env=3), TypeError, "env is int"),
    "no environments": (lambda: small(env=[]), ValueError, "empty"),
    "twice": (lambda: small(env=[WALK, WALK]), ValueError, "same environment twice"),
    "unequal": (lambda: small(env=[Walk(), Bandit()]), ValueError, "different spaces"),
    "action space": (lambda: small(Walk(action=spaces.Text(3))), ValueError, "Text.*expected one of Discrete"),
    "integer box": (lambda: small(Walk(action=spaces.Box(0, 3, (2,), np.int64))), ValueError, "integers"),
    "head": (lambda: small(Bandit(), head=pg.GaussianHead()), ValueError, "Box actions.*Discrete"),
    "head class": (lambda: small(head=pg.SquashedGaussianHead), TypeError, "parentheses"),
    "unbounded": (
        lambda: small(Walk(action=spaces.Box(-np.inf, np.inf, (1,))), head=pg.SquashedGaussianHead()),
        ValueError,
        "not bounded",
    ),
    "batch": (lambda: small(batch=1), ValueError, "batch is 1, expected an integer >= 2"),
    "gamma": (lambda: small(gamma=1.5), ValueError, r"gamma is 1.5, expected a number in \[0, 1\]"),
    "solver": (lambda: small(solver=ng.CG), TypeError, "solver is"),
    "structure": (lambda: small(structure=ng.Kronecker), TypeError, "structure is"),
    "damping": (lambda: small(damping=-1.0), ValueError, "damping is -1.0"),
    "backtrack": (lambda: small(backtrack=1.0), ValueError, "backtrack is 1.0"),
    "seed": (lambda: small(seed=-1), ValueError, "seed is -1"),
    "limit": (lambda: small(max_episode_steps=0), ValueError, "max_episode_steps is 0"),
    "steps": (lambda: small().learn(0), ValueError, "total_steps is 0"),
    "half a step": (lambda: small().learn(64.5), ValueError, "total_steps is 64.5"),
    "callback": (lambda: small().learn(64, callback=3), TypeError, "callback is int"),
    "a network as the environment": (lambda: small(nn.Linear(2, 2)), TypeError, "env is Linear, a network"),
    "episodes by another name": (lambda: small().evaluate(Walk(), n_eval_episodes=2), TypeError, "episodes"),
    "radius's kind": (lambda: small(radius="1"), ValueError, "radius is '1', expected a finite number > 0"),
    "gamma's kind": (lambda: small(gamma=None), ValueError, "gamma is None"),
    "entropy weight": (lambda: small(entropy_weight="1"), ValueError, "entropy_weight is '1'"),
    "batch's kind": (lambda: small(batch=64.0), ValueError, "batch is 64.0, expected an integer"),
    "a recurrent policy": (lambda: small(Bandit(), nn.LSTM(2, 3)), ValueError, "policy returned"),
    "observation": (lambda: small().predict(np.zeros(3)), ValueError, r"observation has shape \(3,\), expected \(2,\)"),
    "what reset returns": (lambda: small().predict(Walk().reset()), TypeError, r"env.reset\(\) returns"),
    "a log of evaluations": (
        lambda: pg.EvalCallback("CartPole-v1", log_path="logs"),
        TypeError,
        "callback.history has",
    ),
    "a monitor": (lambda: pg.make_vec_env("CartPole-v1", monitor_dir="logs"), TypeError, "agent.history has"),
    "steps by another name": (lambda: small().num_timesteps, AttributeError, "'num_timesteps': write agent.steps"),
    "another environment": (
        lambda: setattr(small(), "env", Corridor()),
        AttributeError,
        "env cannot be set: build another",
    ),
    "an attribute of nobody's": (lambda: small().wings, AttributeError, "no attribute 'wings'$"),
    "NaN": (lambda: small().predict(np.array([np.nan, 0])), ValueError, "not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_at_the_door(name: str):
    make, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        make()


def test_a_policy_may_be_undefined_at_the_state_of_zeros():
    turn = nn.Module()
    turn.forward = lambda x: x / x.norm(dim=1, keepdim=True)  # type: ignore[method-assign]
    assert small(policy=nn.Sequential(turn, nn.Linear(2, 1)), normalize_observations=False).learn(64)["kl"]


def test_a_dict_of_parts_is_seen_and_acted_through_the_wrappers_that_the_errors_name():
    class Parts(Corridor):
        def __init__(self) -> None:
            super().__init__(5)
            self.observation_space = spaces.Dict({"place": spaces.Box(-1, 1, (2,)), "kind": spaces.Discrete(3)})
            self.action_space = spaces.Dict({"left": spaces.Discrete(2), "right": spaces.Discrete(2)})

        def reset(self, **choices: Any):
            super().reset(**choices)
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), *super().step(int(action["right"] > action["left"]))[1:]

    seen = gym.wrappers.FlattenObservation(Parts())
    with pytest.raises(ValueError, match=r"action space is Dict.*wrappers\.TransformAction\(env, function, space\)"):
        small(seen)
    pair = lambda a: {"left": a[0], "right": a[1]}  # noqa: E731
    agent = small(gym.wrappers.TransformAction(seen, pair, spaces.MultiDiscrete([2, 2])), batch=16)
    assert agent.learn(16)["steps"] == [16]
