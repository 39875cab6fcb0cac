"""The inner state of an environment as plain values, where its attributes are plain, so that episodes can go on."""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

import numpy as np
import torch

from natgrad.applications.policy.gymnasium_import import gymnasium


class Unknown(Exception):
    """An attribute that is no plain value: a simulator, a window, a process."""


def captured(env: Any) -> Any | None:
    """Attributes of an environment and of those that it wraps, readable with weights_only=True, or None.

    Numbers, texts, arrays, random generators, and containers of them; spaces, functions and specifications are what the
    environment was built with and are left alone. Anything else may hold state that cannot be read: then None.
    """
    try:
        return encoded(env)
    except Unknown:
        return None


def encoded(value: Any) -> Any:
    """A value as plain values and tensors, tagged. Unknown for what cannot be."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**62 else {"int": str(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return encoded_array(value)
    if isinstance(value, np.random.Generator):
        return {"generator": encoded(value.bit_generator.state)}
    if isinstance(value, (list, tuple, deque)):
        return {type(value).__name__: [encoded(one) for one in value], "maxlen": getattr(value, "maxlen", None)}
    if isinstance(value, dict):
        return {"dict": [(encoded(key), encoded(one)) for key, one in value.items() if not static(one)]}
    if isinstance(value, torch.Tensor):
        return {"tensor": value.detach().clone()}
    if isinstance(value, (gymnasium().Env, gymnasium().vector.VectorEnv)):
        attributes = {name: encoded(one) for name, one in vars(value).items() if not static(one)}
        return {"env": type(value).__qualname__, "attributes": attributes}
    raise Unknown(type(value).__name__)


def encoded_array(value: Any) -> dict[str, Any]:
    """An array or a NumPy number, with its dtype."""
    if value.dtype.kind not in "biufSU":
        raise Unknown(str(value.dtype))
    kind = "array" if isinstance(value, np.ndarray) else "number"
    # bytes: torch lacks some of NumPy's dtypes
    flat = np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy()
    return {kind: torch.from_numpy(flat), "dtype": value.dtype.str, "shape": list(np.shape(value))}


def decoded(value: Any) -> Any:
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
        state = decoded(value["generator"])
        bits = getattr(np.random, state["bit_generator"])()
        bits.state = state
        return np.random.Generator(bits)
    if "dict" in value:
        return {decoded(key): decoded(one) for key, one in value["dict"]}
    if "tensor" in value:
        return value["tensor"].clone()
    if "deque" in value:
        return deque((decoded(one) for one in value["deque"]), value["maxlen"])
    return tuple(map(decoded, value["tuple"])) if "tuple" in value else list(map(decoded, value["list"]))


def restored(env: Any, state: Any) -> bool:
    """Put captured attributes back; False, and nothing done, where the environment is built otherwise."""
    if not matches(env, state):
        return False
    for name, one in state["attributes"].items():
        held = vars(env).get(name)
        if is_environment(one):
            restored(held, one)
        elif isinstance(one, dict) and any(map(is_environment, one.get("list", []))):
            assert isinstance(held, list)
            for inner, saved in zip(held, one["list"], strict=True):
                restored(inner, saved)
        else:
            setattr(env, name, decoded(one))
    return True


def matches(env: Any, state: Any) -> bool:
    """Whether an environment has the classes, wrappers included, of the one that was captured."""
    if not is_environment(state) or type(env).__qualname__ != state["env"]:
        return False
    for name, one in state["attributes"].items():
        held = vars(env).get(name)
        if is_environment(one) and not matches(held, one):
            return False
        if isinstance(one, dict) and any(map(is_environment, one.get("list", []))):
            same = isinstance(held, list) and len(held) == len(one["list"])
            if not same or not all(matches(a, b) for a, b in zip(held, one["list"], strict=True)):
                return False
    return True


def is_environment(value: Any) -> bool:
    """Whether a captured value is that of an environment."""
    return isinstance(value, dict) and "env" in value and "attributes" in value


def static(value: Any) -> bool:
    """What an environment was built with and does not change."""
    if isinstance(value, (list, tuple)) and value and all(map(static, value)):
        return True
    kinds = (gymnasium().Space, ModuleType, type, np.dtype)
    return (
        isinstance(value, kinds)
        or (callable(value) and not hasattr(value, "step"))
        or type(value).__module__.startswith("gymnasium.envs.registration")
        or type(value).__name__ == "AutoresetMode"
    )
