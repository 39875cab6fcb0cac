"""Environments of every kind as one: several at a time, transitions that never cross a reset, faults named."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from natgrad.policy.gymnasium_import import import_gymnasium


class Unknown(Exception):
    """An attribute that is no plain value: a simulator, a window, a process."""


def capture_state(env: Any) -> Any | None:
    """Attributes of an environment and of those that it wraps, readable with weights_only=True, or None."""
    # Numbers, texts, arrays, random generators, and containers of them; spaces, functions and specifications are what
    # the environment was built with and are left alone. Anything else may hold state that cannot be read: then None.
    try:
        return encode_value(env)
    except Unknown:
        return None


def encode_value(value: Any) -> Any:
    """A value as plain values and tensors, tagged. Unknown for what cannot be."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**62 else {"int": str(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return encode_array(value)
    if isinstance(value, np.random.Generator):
        return {"generator": encode_value(value.bit_generator.state)}
    if isinstance(value, (list, tuple, deque)):
        return {type(value).__name__: [encode_value(one) for one in value], "maxlen": getattr(value, "maxlen", None)}
    if isinstance(value, dict):
        return {"dict": [(encode_value(key), encode_value(one)) for key, one in value.items() if not is_static(one)]}
    if isinstance(value, torch.Tensor):
        return {"tensor": value.detach().clone()}
    if isinstance(value, (import_gymnasium().Env, import_gymnasium().vector.VectorEnv)):
        attributes = {name: encode_value(one) for name, one in vars(value).items() if not is_static(one)}
        return {"env": type(value).__qualname__, "attributes": attributes}
    raise Unknown(type(value).__name__)


def encode_array(value: Any) -> dict[str, Any]:
    """An array or a NumPy number, with its dtype."""
    if value.dtype.kind not in "biufSU":
        raise Unknown(str(value.dtype))
    kind = "array" if isinstance(value, np.ndarray) else "number"
    # bytes: torch lacks some of NumPy's dtypes
    flat = np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy()
    return {kind: torch.from_numpy(flat), "dtype": value.dtype.str, "shape": list(np.shape(value))}


def decode_value(value: Any) -> Any:
    """The inverse of `encoded`, environments excepted."""
    if not isinstance(value, dict):
        return value
    if "int" in value:
        return int(value["int"])
    if "array" in value or "number" in value:
        raw = value["array" if "array" in value else "number"].numpy().tobytes()
        found = np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return found if "array" in value else found[()]
    if "generator" in value:
        state = decode_value(value["generator"])
        bits = getattr(np.random, state["bit_generator"])()
        bits.state = state
        return np.random.Generator(bits)
    if "dict" in value:
        return {decode_value(key): decode_value(one) for key, one in value["dict"]}
    if "tensor" in value:
        return value["tensor"].clone()
    if "deque" in value:
        return deque((decode_value(one) for one in value["deque"]), value["maxlen"])
    return tuple(map(decode_value, value["tuple"])) if "tuple" in value else list(map(decode_value, value["list"]))


def restore_state(env: Any, state: Any) -> bool:
    """Put captured attributes back; False, and nothing done, where the environment is built otherwise."""
    if not fits_state(env, state):
        return False
    for name, one in state["attributes"].items():
        held = vars(env).get(name)
        if is_environment(one):
            restore_state(held, one)
        elif isinstance(one, dict) and any(map(is_environment, one.get("list", []))):
            assert isinstance(held, list)
            for inner, saved in zip(held, one["list"], strict=True):
                restore_state(inner, saved)
        else:
            setattr(env, name, decode_value(one))
    return True


def fits_state(env: Any, state: Any) -> bool:
    """Whether an environment has the classes, wrappers included, of the one that was captured."""
    if not is_environment(state) or type(env).__qualname__ != state["env"]:
        return False
    for name, one in state["attributes"].items():
        held = vars(env).get(name)
        if is_environment(one) and not fits_state(held, one):
            return False
        if isinstance(one, dict) and any(map(is_environment, one.get("list", []))):
            same = isinstance(held, list) and len(held) == len(one["list"])
            if not same or not all(fits_state(a, b) for a, b in zip(held, one["list"], strict=True)):
                return False
    return True


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


# Environments of every kind as one: several at a time, transitions that never cross a reset, faults named

Array = np.ndarray
PATIENCE = 1000
"""Steps without the end of any episode, after which environments without a time limit are taken for endless."""


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
    successors: Array  # the observations after the step and before any reset, shape (n, ...)
    following: Array  # the observations that the next action is taken on, shape (n, ...)
    valid: Array  # False where nothing happened but a reset (vector environments in NEXT_STEP mode), shape (n,)

    @property
    def is_over(self) -> Array:
        """Whether the episode is over, (n,)."""
        return self.terminated | self.truncated


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


class Environments:
    """n environments in step."""

    def __init__(self, env: Any, max_episode_steps: float | None = None) -> None:
        gym = import_gymnasium()
        env = make_environment(env)
        self.vector: Any = env if isinstance(env, gym.vector.VectorEnv) else None
        self.singles: list[Any] = [] if self.vector is not None else list_environments(env)
        self.count = self.vector.num_envs if self.vector is not None else len(self.singles)
        source = self.vector if self.vector is not None else self.singles[0]
        prefix = "single_" if self.vector is not None else ""
        self.observation_space = getattr(source, f"{prefix}observation_space")
        self.action_space = getattr(source, f"{prefix}action_space")
        self.encode, self.shape, self.scalable = choose_encoder(self.observation_space)
        self.mode = read_autoreset(self.vector)
        self.limit = math.inf if max_episode_steps is None else max_episode_steps
        self.patient = max_episode_steps is not None or has_limit(self.vector, self.singles)
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
                found = self._reset(seed)
            self.observations = self._encode(found)
        return self.observations

    def step(self, actions: Array) -> Stepped:
        """Act in every environment; resets those whose episode ended."""
        with name_faults("step", self.steps):
            stepped = self._vector_step(actions) if self.vector is not None else self._single_steps(actions)
        self.steps += 1
        if not np.isfinite(stepped.rewards).all():
            raise EnvironmentFault(f"the environment returned the reward {stepped.rewards} at step {self.steps}")
        self.returns += stepped.rewards * stepped.valid
        self.lengths += stepped.valid
        for i in np.flatnonzero(stepped.is_over):
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

    def shares_any(self, other: Environments) -> bool:
        """Whether some environment is in both."""
        mine, theirs = ([one.vector, *one.singles] for one in (self, other))
        return any(a is b for a in mine for b in theirs if a is not None)

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call."""
        found, self.finished = self.finished, []
        return found

    def state_dict(self) -> dict[str, Any]:
        """The episodes under way, and the environments' own state where it can be read."""
        if self.observations is None:
            return {"inner": None}
        inner = [capture_state(env) for env in ([self.vector] if self.vector is not None else self.singles)]
        return {
            "inner": None if any(one is None for one in inner) else inner,
            "observations": encode_value(self.observations),
            "returns": torch.tensor(self.returns),
            "lengths": torch.tensor(self.lengths),
            "resetting": torch.tensor(self.resetting),
            "steps": self.steps,
            "patient": self.patient,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these episodes where the environments could be read and are built alike, else begin anew."""
        self.begin_anew()
        envs = [self.vector] if self.vector is not None else self.singles
        inner = state["inner"]
        if inner is None or len(inner) != len(envs) or not all(map(fits_state, envs, inner)):
            return
        for env, one in zip(envs, inner, strict=True):
            restore_state(env, one)
        self.observations = decode_value(state["observations"])
        self.returns, self.lengths = state["returns"].numpy().copy(), state["lengths"].numpy().copy()
        self.resetting = state["resetting"].numpy().copy()
        self.steps, self.patient = state["steps"], state["patient"]

    def _reset(self, seed: int) -> Any:
        if self.vector is not None:
            return self.vector.reset(seed=seed)[0]
        return stack_observations([read_reset(env.reset(seed=seed + i)) for i, env in enumerate(self.singles)])

    def _single_steps(self, actions: Array) -> Stepped:
        found = [read_step(env.step(take_action(actions, i))) for i, env in enumerate(self.singles)]
        successors = self._encode(stack_observations([one[0] for one in found]))
        rewards = np.array([as_reward(one[1]) for one in found])
        terminated = np.array([bool(one[2]) for one in found])
        truncated = self._truncate(np.array([bool(one[3]) for one in found]), np.ones(self.count, dtype=bool))
        ended = terminated | truncated
        following = successors
        if ended.any():
            following = successors.copy()
            for i in np.flatnonzero(ended):
                following[i] = self._encode(stack_observations([read_reset(self.singles[i].reset())]))[0]
        return Stepped(rewards, terminated, truncated, successors, following, np.ones(self.count, dtype=bool))

    def _vector_step(self, actions: Array) -> Stepped:
        raw, rewards, terminated, truncated, infos = self.vector.step(actions)
        valid = ~self.resetting
        rewards, terminated = np.array(rewards, dtype=np.float64), np.asarray(terminated, dtype=bool) & valid
        given = np.asarray(truncated, dtype=bool) & valid
        truncated = self._truncate(given, valid)
        successors = self._encode(raw)
        following = successors
        if self.mode == "SAME_STEP" and (terminated | given).any():
            following, successors = successors, successors.copy()
            for i in np.flatnonzero(terminated | given):
                successors[i] = self._encode(stack_observations([find_final_observation(infos, i)]))[0]
        overdue = (truncated & ~given & ~terminated) | ((terminated | given) & (self.mode == "DISABLED"))
        if overdue.any():
            following = following.copy()
            fresh = self._encode(self.vector.reset(options={"reset_mask": overdue})[0])
            following[overdue] = fresh[overdue]
        self.resetting = (terminated | given) & (self.mode == "NEXT_STEP")
        return Stepped(rewards, terminated, truncated, successors, following, valid)

    def _truncate(self, truncated: Array, valid: Array) -> Array:
        return truncated | ((self.lengths + 1 >= self.limit) & valid)

    def _encode(self, raw: Any) -> Array:
        found = self.encode(raw)
        if found.shape[1:] != self.shape:
            raise EnvironmentFault(
                f"the environment returned an observation of shape {found.shape[1:]}, expected {self.shape} as its "
                "observation space says"
            )
        if not np.isfinite(found).all():
            raise EnvironmentFault(f"the environment returned an observation that is not finite at step {self.steps}")
        return found


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
    gym = import_gymnasium()
    given = list(env) if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    if not given:
        raise ValueError("env is an empty sequence, expected at least one environment")
    found = []
    for one in given:
        one = make_environment(one)
        if not isinstance(one, gym.Env):
            raise TypeError(
                f"env is {type(one).__name__}, expected a gymnasium environment (or gymnasium.vector's, a registered "
                "name, or a sequence of environments)"
            )
        found.append(one)
    if len({id(one) for one in found}) < len(found):
        raise ValueError("env holds the same environment twice: each needs a state of its own")
    spaces = {(repr(one.observation_space), repr(one.action_space)) for one in found}
    if len(spaces) > 1:
        raise ValueError(f"env holds environments of different spaces, expected equal ones: {sorted(spaces)}")
    return found


def make_environment(env: Any) -> Any:
    """An environment where a registered name or a function that makes one was given; else what was given."""
    gym = import_gymnasium()
    if isinstance(env, str):
        return gym.make(env)
    made = isinstance(env, (gym.Env, gym.vector.VectorEnv))
    return env() if callable(env) and not made else env


def read_autoreset(vector: Any) -> str:
    """The name of a vector environment's autoreset mode; NEXT_STEP, gymnasium's default, where it does not say."""
    if vector is None:
        return ""
    mode = vector.metadata.get("autoreset_mode", "NEXT_STEP")
    name = str(getattr(mode, "name", mode)).upper()
    return {"NEXTSTEP": "NEXT_STEP", "SAMESTEP": "SAME_STEP"}.get(name, name)


def find_final_observation(infos: dict[str, Any], index: Any) -> Any:
    """The last observation of an episode that was reset within the step."""
    for key in ("final_obs", "final_observation"):
        if key in infos and infos[key][index] is not None:
            return infos[key][index]
    raise EnvironmentFault("a vector environment in SAME_STEP mode gave no final_obs for an episode that ended")


def has_limit(vector: Any, envs: list[Any]) -> bool:
    """Whether a time limit is known: in a specification or in a wrapper."""
    if vector is not None:
        envs = [vector, *getattr(vector, "envs", [])]
    return any(find_limit(env) is not None for env in envs)


def find_limit(env: Any) -> int | None:
    """The time limit of an environment, searched through its wrappers."""
    while env is not None:
        spec = getattr(env, "spec", None)
        for found in (getattr(spec, "max_episode_steps", None), vars(env).get("_max_episode_steps")):
            if found is not None:
                return found
        env = vars(env).get("env")
    return None


def choose_encoder(space: Any) -> tuple[Callable[[Any], Array], tuple[int, ...], bool]:
    """How observations become floating-point arrays, the shape of one, and whether scaling them makes sense."""
    # Box as it is, bytes from 0 to 255 (images, memory) as shares from 0 to 1, discrete ones one-hot, bits as numbers.
    # Always in an array of their own: an environment may write the next observation into the one that it returned. A
    # single number is a row of one. ValueError for other spaces.
    kind = type(space).__name__
    if kind in ("Box", "MultiBinary") and 0 in space.shape:
        raise ValueError(f"the observation space {space} holds no number, expected one at least: a constant will do")
    if kind == "Box" and space.shape == ():
        share = np.float32(255) if holds_bytes(space) else 1
        dtype = np.float32 if holds_bytes(space) else None
        scalable = bool(np.issubdtype(space.dtype, np.floating))
        return lambda raw: np.array(raw, dtype=dtype).reshape(-1, 1) / share, (1,), scalable
    if kind == "Box" and holds_bytes(space):
        return lambda raw: np.asarray(raw, dtype=np.float32) / np.float32(255), space.shape, False
    if kind == "Box":
        return np.array, space.shape, bool(np.issubdtype(space.dtype, np.floating))
    if kind == "Discrete":
        size, start = int(space.n), int(space.start)
        return lambda raw: one_hot(np.asarray(raw) - start, size), (size,), False
    if kind == "MultiDiscrete":
        sizes, begin = space.nvec.reshape(-1), space.start.reshape(-1)
        return lambda raw: many_hot(np.asarray(raw), sizes, begin), (int(sizes.sum()),), False
    if kind == "MultiBinary":
        return lambda raw: np.array(raw, dtype=np.float32), space.shape, False
    raise ValueError(
        f"the observation space is {space}, expected Box, Discrete, MultiDiscrete or MultiBinary; wrap the environment "
        "in gymnasium.wrappers.FlattenObservation"
    )


def holds_bytes(space: Any) -> bool:
    """Whether the entries of a Box are whole numbers from 0 to 255."""
    whole = np.issubdtype(space.dtype, np.integer)
    return bool(whole and (np.asarray(space.low) == 0).all() and (np.asarray(space.high) == 255).all())


def read_reset(found: Any) -> Any:
    """A copy of the observation that reset() returned. EnvironmentFault unless that is (observation, info)."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise EnvironmentFault(
            f"the environment's reset() returned {type(found).__name__}, expected (observation, info) as gymnasium says"
        )
    return np.array(found[0])


def read_step(found: Any) -> Any:
    """What step() returned, with a copy of the observation. EnvironmentFault unless that is gymnasium's five values."""
    if not isinstance(found, (tuple, list)) or len(found) != 5:
        came = f"{len(found)} values" if isinstance(found, (tuple, list)) else type(found).__name__
        raise EnvironmentFault(
            f"the environment's step() returned {came}, expected (observation, reward, terminated, truncated, info)"
        )
    return np.array(found[0]), *found[1:]


def as_reward(given: Any) -> float:
    """A number, or an array of one. EnvironmentFault for anything else."""
    try:
        return float(np.asarray(given).reshape(()).item())
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"the environment returned the reward {given!r}, expected a number") from error


def take_action(actions: Array, i: int) -> Any:
    """Action i. A real one of shape () stays an array: a NumPy scalar is no member of its space."""
    return np.asarray(actions[i]) if actions.dtype.kind == "f" else actions[i]


def stack_observations(observations: list[Any]) -> Array:
    """Observations of single environments as one array."""
    return np.stack([np.asarray(one) for one in observations])


def one_hot(numbers: Array, size: int) -> Array:
    """(n,) -> (n, size)."""
    return np.eye(size, dtype=np.float32)[numbers]


def many_hot(numbers: Array, sizes: Array, begin: Array) -> Array:
    """(n, ...) -> one-hot columns side by side."""
    flat = numbers.reshape(len(numbers), -1) - begin
    return np.concatenate([one_hot(flat[:, k], int(size)) for k, size in enumerate(sizes)], axis=1)
