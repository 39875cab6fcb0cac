"""The inner state of an environment as plain values, where its attributes are plain, so that episodes can go on."""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

import numpy as np
import torch

from natgrad.applications.policy.gymnasium_import import import_gymnasium


class Unknown(Exception):
    """An attribute that is no plain value: a simulator, a window, a process."""


def capture_state(env: Any) -> Any | None:
    """Attributes of an environment and of those that it wraps, readable with weights_only=True, or None.

    Numbers, texts, arrays, random generators, and containers of them; spaces, functions and specifications are what the
    environment was built with and are left alone. Anything else may hold state that cannot be read: then None.
    """
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
