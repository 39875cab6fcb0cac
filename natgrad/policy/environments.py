"""Environments of every kind as one: several at a time, transitions that never cross a reset, faults named."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from natgrad.ground.states import Stateful

Array = np.ndarray
PATIENCE = 1000
"""Steps without the end of any episode, after which environments without a time limit are taken for endless."""


ANSWERS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}
FINAL = ("final_obs", "final_observation")
"""Where gymnasium's versions have the last observation of an episode that was reset within the step."""


class EnvironmentFault(RuntimeError, ValueError):
    """An environment raised, returned what is not finite or of another shape, or never ends.

    The agent is as it was before the current update; the next call of `learn` begins new episodes.
    """


@dataclass(frozen=True)
class Stepped:
    """One step of n environments."""

    rewards: Array  # as they came, shape (n,)
    terminated: Array  # True where the task ended the episode, shape (n,)
    truncated: Array  # True where a time limit ended the episode, shape (n,)
    over: Array  # True where either did, shape (n,)
    successors: Array  # the observations after the step and before any reset, shape (n, ...)
    following: Array  # the observations that the next action is taken on, shape (n, ...)
    valid: Array  # False where nothing happened but a reset (vector environments in NEXT_STEP mode), shape (n,)


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    Attributes:
        ret: The sum of its rewards as they came.
        length: Its steps.
        index: Which environment it was in.
        terminated: True if the task ended it, False if a time limit did.
    """

    ret: float
    length: int
    index: int = 0
    terminated: bool = True


class Environments(Stateful):
    """n environments in step, of whatever kind, cut after `max_episode_steps` where that is said."""

    STATE = ("returns", "lengths", "resetting", "steps", "patient")

    def __init__(self, env: Any, max_episode_steps: float | None = None) -> None:
        env = make_environment(env)
        joined = isinstance(env, import_gymnasium().vector.VectorEnv)
        self.envs: list[Any] = [env] if joined else list_environments(env)
        self.vector: Any = env if joined else EnvironmentList(self.envs)
        self.count = self.vector.num_envs
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        self.encode, self.shape, self.scalable = choose_encoder(self.observation_space)
        mode = self.vector.metadata.get("autoreset_mode", "NEXT_STEP")  # the default
        self.mode = str(getattr(mode, "name", mode)).upper().replace("_", "")  # a name or a member
        self.limit = math.inf if max_episode_steps is None else max_episode_steps
        limited = any(map(has_limit, [*self.envs, *getattr(self.vector, "envs", [])]))
        self.patient = max_episode_steps is not None or limited
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the episodes under way: the next `start` resets every environment."""
        self.observations: Array | None = None
        self.returns, self.lengths = np.zeros(self.count), np.zeros(self.count, dtype=np.int64)
        self.resetting = np.zeros(self.count, dtype=bool)  # NEXT_STEP: the next step resets these
        self.steps = 0
        self.finished: list[Episode] = []

    def start(self, seed: int) -> Array:
        """The observations to act on, (n, ...); resets with this seed what was not begun."""
        if self.observations is None:
            self.begin_anew()
            with name_faults("reset", self.steps):
                raw = self.vector.reset(seed=seed)[0]
            self.observations = self._encode(raw)
        return self.observations

    def step(self, actions: Array) -> Stepped:
        """Act in every environment; resets those whose episode ended."""
        with name_faults("step", self.steps):
            stepped = self._advance(actions)
        self.steps += 1
        if not np.isfinite(stepped.rewards).all():
            raise EnvironmentFault(f"the environment returned the reward {stepped.rewards} at step {self.steps}")
        self.returns += stepped.rewards * stepped.valid
        self.lengths += stepped.valid
        for i in np.flatnonzero(stepped.over):
            over = bool(stepped.terminated[i])
            self.finished.append(Episode(float(self.returns[i]), int(self.lengths[i]), int(i), over))
            self.returns[i], self.lengths[i], self.patient = 0.0, 0, True
        if not self.patient and self.steps >= PATIENCE:
            raise EnvironmentFault(
                f"no episode ended in {self.steps} steps: does the environment end? Pass max_episode_steps=500, say, "
                "to cut episodes, or max_episode_steps=math.inf for a task without an end"
            )
        self.observations = stepped.following
        return stepped

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call."""
        episodes, self.finished = self.finished, []
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """The episodes under way, and the environments' own state where it can be read."""
        if self.observations is None:
            return {"inner": None}
        try:
            inner = [encode_value(env) for env in self.envs]
        except Unknown:
            inner = None
        return super().state_dict() | {"inner": inner, "observations": encode_value(self.observations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these episodes where the environments could be read and are built alike, else begin anew."""
        self.begin_anew()
        owners = match_states(self.envs, state["inner"])
        if owners is None:
            return
        for env, attributes in owners:
            for name, value in attributes.items():
                setattr(env, name, decode_value(value))
        super().load_state_dict(state)
        self.observations = decode_value(state["observations"])

    def _advance(self, actions: Array) -> Stepped:
        raw, rewards, terminated, cut, infos = self.vector.step(actions)
        valid = ~self.resetting
        rewards, terminated = np.array(rewards, dtype=np.float64), np.asarray(terminated, dtype=bool) & valid
        cut = np.asarray(cut, dtype=bool) & valid
        truncated, ended = cut | ((self.lengths + 1 >= self.limit) & valid), terminated | cut
        over = ended | truncated
        successors = following = self._encode(raw)
        if self.mode == "NEXTSTEP":
            self.resetting = ended
        elif self.mode == "SAMESTEP" and ended.any():
            following, successors = successors, successors.copy()
            for i in np.flatnonzero(ended):
                last = next((infos[k][i] for k in FINAL if k in infos and infos[k][i] is not None), None)
                if last is None:
                    raise EnvironmentFault(
                        "a vector environment in SAME_STEP mode gave no final_obs for an episode that ended"
                    )
                successors[i] = self._encode(np.asarray(last)[None])[0]
        if over.any() and (overdue := over if self.mode == "DISABLED" else truncated & ~ended).any():
            following = following.copy()
            fresh = self._encode(self.vector.reset(options={"reset_mask": overdue})[0])
            following[overdue] = fresh[overdue]
        return Stepped(rewards, terminated, truncated, over, successors, following, valid)

    def _encode(self, raw: Any) -> Array:
        rows = self.encode(raw)
        if rows.shape[1:] != self.shape:
            raise EnvironmentFault(
                f"the environment returned an observation of shape {rows.shape[1:]}, expected {self.shape} as its "
                "observation space says"
            )
        if not np.isfinite(rows).all():
            raise EnvironmentFault(f"the environment returned an observation that is not finite at step {self.steps}")
        return rows


class EnvironmentList:
    """Single environments as one of gymnasium's vector environments, which resets those that it is told to."""

    def __init__(self, envs: list[Any]) -> None:
        self.metadata = {"autoreset_mode": "DISABLED"}
        self.members, self.num_envs = envs, len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.seen: list[Array] = [np.empty(0)] * len(envs)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        """The observations (n, ...) after a reset of all, each with a seed of its own, or of a part without one."""
        for i, env in enumerate(self.members):
            if options is None:
                self.seen[i] = read_answer("reset", env.reset(seed=None if seed is None else seed + i))[0]
            elif options["reset_mask"][i]:
                self.seen[i] = read_answer("reset", env.reset())[0]
        return np.stack(self.seen), {}

    def step(self, actions: Array) -> tuple[Any, ...]:
        """What gymnasium says, each (n, ...)."""
        answers = [read_answer("step", env.step(take_action(actions, i))) for i, env in enumerate(self.members)]
        self.seen, rewards, terminated, truncated, _ = map(list, zip(*answers, strict=True))
        ends = [list(map(bool, end)) for end in (terminated, truncated)]
        return np.stack(self.seen), list(map(as_reward, rewards)), *ends, {}


@contextmanager
def name_faults(where: str, step: int) -> Any:
    """Exceptions of the environment's own as EnvironmentFault, the cause kept."""
    try:
        yield
    except EnvironmentFault:
        raise
    except Exception as error:
        raise EnvironmentFault(
            f"the environment's {where} raised {type(error).__name__}: {error} (after {step} steps of this run); the "
            "policy is as it was before the current update"
        ) from error


def list_environments(env: Any) -> list[Any]:
    """Single environments, made where they are names or functions. TypeError for anything else."""
    given = list(env) if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    if not given:
        raise ValueError("env is an empty sequence, expected at least one environment")
    envs = list(map(make_environment, given))
    for each in envs:
        if not isinstance(each, import_gymnasium().Env):
            raise TypeError(
                f"env is {type(each).__name__}, expected a gymnasium environment (or gymnasium.vector's, a registered "
                "name, or a sequence of environments)"
            )
    if len(set(map(id, envs))) < len(envs):
        raise ValueError("env holds the same environment twice: each needs a state of its own")
    spaces = {(repr(each.observation_space), repr(each.action_space)) for each in envs}
    if len(spaces) > 1:
        raise ValueError(f"env holds environments of different spaces, expected equal ones: {sorted(spaces)}")
    return envs


def make_environment(env: Any) -> Any:
    """An environment where a registered name or a function that makes one was given; else what was given."""
    gym = import_gymnasium()
    if isinstance(env, str):
        return gym.make(env)
    if isinstance(env, nn.Module):
        raise TypeError(f"env is {type(env).__name__}, a network, expected an environment: TRPO(policy, env)")
    return env() if callable(env) and not isinstance(env, (gym.Env, gym.vector.VectorEnv)) else env


def has_limit(env: Any) -> bool:
    """Whether a time limit is known: in a specification, or in a wrapper or what it wraps."""
    while env is not None:
        spec = getattr(env, "spec", None)
        if getattr(spec, "max_episode_steps", None) is not None or vars(env).get("_max_episode_steps") is not None:
            return True
        env = vars(env).get("env")
    return False


def choose_encoder(space: Any) -> tuple[Callable[[Any], Array], tuple[int, ...], bool]:
    """How observations become floating-point arrays, the shape of one, and whether scaling them makes sense."""
    # Box as it is, bytes from 0 to 255 (images, memory) as shares from 0 to 1, discrete ones one-hot, bits as numbers.
    # Always in an array of their own: an environment may write the next observation into the one that it returned. A
    # single number is a row of one.
    kind = type(space).__name__
    if kind in ("Box", "MultiBinary") and 0 in space.shape:
        raise ValueError(f"the observation space {space} holds no number, expected one at least: a constant will do")
    if kind == "Box":
        integral = np.issubdtype(space.dtype, np.integer)
        bytewise = bool(integral and (np.asarray(space.low) == 0).all() and (np.asarray(space.high) == 255).all())
        encode = partial(encode_box, space=space, bytewise=bytewise)
        return encode, space.shape or (1,), bool(np.issubdtype(space.dtype, np.floating))
    if kind in ("Discrete", "MultiDiscrete"):
        return partial(encode_choices, space=space), (int(import_gymnasium().spaces.flatdim(space)),), False
    if kind == "MultiBinary":
        return partial(np.array, dtype=np.float32), space.shape, False
    raise ValueError(
        f"the observation space is {space}, expected Box, Discrete, MultiDiscrete or MultiBinary; wrap the environment "
        "in gymnasium.wrappers.FlattenObservation"
    )


def encode_box(raw: Any, space: Any, bytewise: bool) -> Array:
    """Numbers as they are; bytes as shares."""
    numbers = np.array(raw, dtype=np.float32 if bytewise else None)
    numbers = numbers if space.shape else numbers.reshape(-1, 1)
    return numbers / np.float32(255) if bytewise else numbers


def encode_choices(raw: Any, space: Any) -> Array:
    """One-hot rows."""
    flatten = import_gymnasium().spaces.flatten
    return np.stack([flatten(space, row) for row in np.asarray(raw)]).astype(np.float32)


def read_answer(call: str, answer: Any) -> Any:
    """What a call returned, with a copy of the observation. EnvironmentFault unless it has gymnasium's values."""
    if not isinstance(answer, (tuple, list)) or len(answer) != len(ANSWERS[call]):
        came = f"{len(answer)} values" if isinstance(answer, (tuple, list)) else type(answer).__name__
        raise EnvironmentFault(
            f"the environment's {call}() returned {came}, expected ({', '.join(ANSWERS[call])}) as gymnasium says"
        )
    return np.array(answer[0]), *answer[1:]


def as_reward(reward: Any) -> float:
    """A number, or an array of one. EnvironmentFault for anything else."""
    try:
        return float(np.asarray(reward).reshape(()).item())
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"the environment returned the reward {reward!r}, expected a number") from error


def take_action(actions: Array, i: int) -> Any:
    """Action i. A real one of shape () stays an array: a NumPy scalar is no member of its space."""
    return np.asarray(actions[i]) if actions.dtype.kind == "f" else actions[i]


def import_gymnasium() -> Any:
    """The package. ImportError with what to install where it is missing."""
    try:
        import gymnasium  # an extra: only where an environment is asked for
        import gymnasium.vector
    except ImportError as error:
        raise ImportError("policies need gymnasium: pip install gymnasium") from error
    return gymnasium


# The state of environments for a checkpoint, where it can be read


class Unknown(Exception):
    """An attribute that is no plain value: a simulator, a window, a process."""


def encode_value(value: Any) -> Any:
    """A value as plain values and tensors, tagged, readable with weights_only=True. Unknown for what cannot be."""
    # Numbers, texts, arrays, random generators, and containers of them. Spaces, functions and specifications are what
    # an environment was built with and are left alone; anything else may hold state that cannot be read.
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**62 else {"int": str(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufSU":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        # bytes: torch lacks some of NumPy's dtypes
        flat = np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy()
        return {kind: torch.from_numpy(flat), "dtype": value.dtype.str, "shape": list(np.shape(value))}
    if isinstance(value, np.random.Generator):
        return {"generator": encode_value(value.bit_generator.state)}
    if isinstance(value, (list, tuple, deque)):
        return {type(value).__name__: list(map(encode_value, value)), "maxlen": getattr(value, "maxlen", None)}
    if isinstance(value, dict):
        return {"dict": [(encode_value(key), encode_value(x)) for key, x in value.items() if not is_static(x)]}
    if isinstance(value, torch.Tensor):
        return {"tensor": value.detach().clone()}
    if isinstance(value, (import_gymnasium().Env, import_gymnasium().vector.VectorEnv)):
        attributes = {name: encode_value(x) for name, x in vars(value).items() if not is_static(x)}
        return {"env": type(value).__qualname__, "attributes": attributes}
    raise Unknown(type(value).__name__)


def decode_value(value: Any) -> Any:
    """The inverse of `encode_value`, environments excepted."""
    if not isinstance(value, dict):
        return value
    tag, inner = next(iter(value.items()))
    if tag in ("array", "number"):
        array = np.frombuffer(inner.numpy().tobytes(), dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array if tag == "array" else array[()]
    if tag == "generator":
        state = decode_value(inner)
        bits = getattr(np.random, state["bit_generator"])()
        bits.state = state
        return np.random.Generator(bits)
    if tag == "dict":
        return {decode_value(key): decode_value(entry) for key, entry in inner}
    if tag == "deque":
        return deque(map(decode_value, inner), value["maxlen"])
    if tag in ("tuple", "list"):
        return (tuple if tag == "tuple" else list)(map(decode_value, inner))
    return int(inner) if tag == "int" else inner.clone()


def match_states(envs: Any, states: Any) -> list[tuple[Any, dict[str, Any]]] | None:
    """Environments, inner ones too, with the plain attributes that each gets back; None if they are built otherwise."""
    if not isinstance(envs, list) or not isinstance(states, list) or len(envs) != len(states):
        return None
    owners: list[tuple[Any, dict[str, Any]]] = []
    for env, state in zip(envs, states, strict=True):
        if not is_environment(state) or type(env).__qualname__ != state["env"]:
            return None
        plain: dict[str, Any] = {}
        owners.append((env, plain))
        for name, value in state["attributes"].items():
            held = vars(env).get(name)
            if is_environment(value):
                inner = match_states([held], [value])
            elif isinstance(value, dict) and any(map(is_environment, value.get("list", []))):
                inner = match_states(held, value["list"])
            else:
                plain[name], inner = value, []
            if inner is None:
                return None
            owners += inner
    return owners


def is_environment(value: Any) -> bool:
    """Whether a captured value is that of an environment."""
    return isinstance(value, dict) and "env" in value and "attributes" in value


def is_static(value: Any) -> bool:
    """What an environment was built with and does not change."""
    if isinstance(value, (list, tuple)) and value and all(map(is_static, value)):
        return True
    kinds = (import_gymnasium().Space, ModuleType, type, np.dtype)
    return (
        isinstance(value, kinds)
        or (callable(value) and not hasattr(value, "step"))
        or type(value).__module__.startswith("gymnasium.envs.registration")
        or type(value).__name__ == "AutoresetMode"
    )
