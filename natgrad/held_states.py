"""What a model keeps besides parameters: buffers, states and counters in attributes, generators of its own."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

INTERNAL = frozenset(vars(nn.Module()))
"""What torch keeps in every module: parameters, hooks, the mode."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LARGEST = 2**22  # entries of a tensor that is copied
LONGEST = 1000  # entries of a container that are looked into
MOST = 10_000  # values that are looked at in all
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Parameter})
FOREIGN = ("torch", "natgrad")
GONE: Any = object()


@dataclass(frozen=True, eq=False)
class HeldState:
    """The attributes of all modules of a model as they are at a time, with what can change inside of them.

    Values are kept by reference, and the contents of lists, dicts, sets, arrays, tensors, generators and of objects of
    the model's own package as copies. Large tensors, long containers and objects of other packages are not copied.

    Args:
        model: The model.
        attributes: The `__dict__` of each module and object, with its entries.
        contents: What takes back what can change in place.
        buffers: Copies by name; those of batch norms, whose outputs in training do not depend on them, are left out.
        tensors: Those in attributes, by `id`.
        copies: The copies of tensors by `id`, with their owner and its version: the next capture takes them over where
            nothing was written since.
        writes: How often the parameters were written to.
    """

    model: nn.Module
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[Callable[[], None]]
    buffers: Mapping[str, Tensor]
    tensors: set[int]
    copies: Mapping[int, tuple[Tensor, int, Tensor]]
    writes: int

    @staticmethod
    def capture(model: nn.Module, last: HeldState | None = None) -> HeldState:
        """The state now."""
        search = AttributeWalk({} if last is None else last.copies)
        buffers, named = dict[str, Tensor](), list_modules(model)
        for _, module in named:
            search.look_into(vars(module), INTERNAL, type(module).__module__.partition(".")[0])
        tensors = set(search.copies)
        for path, module in named:
            held: dict[str, Tensor | None] = vars(module)["_buffers"]
            for name, buffer in held.items() if held and not isinstance(module, BATCH_NORMS) else ():
                copied = None if buffer is None else search.copy(buffer)
                if copied is not None:
                    buffers[f"{path}.{name}" if path else name] = copied
        return HeldState(
            model, search.attributes, search.contents, buffers, tensors, search.copies, count_writes(named)
        )

    def put_back(self, now: HeldState) -> None:
        """Take all attributes, and what is inside of them, back to this state; buffers stay as they are."""
        for live, saved in self.attributes:
            for key in live.keys() - saved.keys() - INTERNAL:
                del live[key]
            for key, value in saved.items():
                if live.get(key, GONE) is not value:
                    live[key] = value
        for restore in self.contents:
            restore()
        for key in self.tensors:
            tensor, version, saved = self.copies[key]
            same = key in now.copies and now.copies[key][2] is saved and version_of(tensor) == version
            if not same and tensor.shape == saved.shape:
                tensor.data.copy_(saved)

    def put_back_buffers(self) -> None:
        """Take the buffers back too, in place."""
        for name, buffer in self.model.named_buffers():
            if name in self.buffers and buffer.shape == self.buffers[name].shape:
                buffer.data.copy_(self.buffers[name])


class AttributeWalk:
    """Looks through attributes for what can change.

    Args:
        known: Copies of an earlier search.
    """

    def __init__(self, known: Mapping[int, tuple[Tensor, int, Tensor]]) -> None:
        self.known = known
        self.attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.contents: list[Callable[[], None]] = []
        self.copies = dict[int, tuple[Tensor, int, Tensor]]()
        self.seen = set[int]()

    def look_into(self, live: dict[str, Any], without: frozenset[str], package: str) -> None:
        """Note the entries of a `__dict__`, and look at each."""
        saved = {key: live[key] for key in live.keys() - without}
        self.attributes.append((live, saved))
        for value in saved.values():
            if type(value) not in PLAIN:
                self.look_at(value, package)

    def look_at(self, value: Any, package: str) -> None:
        """Note how a value, and what it holds, comes back to what it is now."""
        if id(value) in self.seen or len(self.seen) > MOST:
            return
        self.seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.requires_grad:  # neither a parameter nor what a pass computed
                self.copy(value)
        elif isinstance(value, (list, dict, set, deque, tuple)):
            self._look_at_container(value, package)
        elif (restore := generator_state(value)) is not None:
            self.contents.append(restore)
        elif type(value).__module__.partition(".")[0] == package not in FOREIGN and hasattr(value, "__dict__"):
            own = cast("dict[str, Any]", vars(value))
            self.look_into(own, INTERNAL if isinstance(value, nn.Module) else frozenset(), package)

    def _look_at_container(self, value: Any, package: str) -> None:
        if not isinstance(value, tuple):
            self.contents.append(contents_of(value))
        container: Any = cast("Any", value)
        if len(container) <= LONGEST:
            for entry in container.values() if hasattr(container, "values") else container:
                if type(entry) not in PLAIN:
                    self.look_at(entry, package)

    def copy(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds; None for one that is too large, or not a plain one."""
        if tensor.numel() > LARGEST or tensor.layout != torch.strided or tensor.is_meta:
            return None
        version = version_of(tensor)
        owner, before, saved = self.known.get(id(tensor), (None, -1, tensor))
        if owner is not tensor or before != version or tensor.is_inference():
            saved = tensor.detach().clone()
        self.copies[id(tensor)] = tensor, version, saved
        return saved


def list_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules with their names, each once: `named_modules` takes three times as long, and every pass asks."""
    found, seen = [("", model)], {id(model)}
    for path, module in found:  # which grows
        children: Mapping[str, nn.Module | None] = vars(module)["_modules"]
        for name, child in children.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append((f"{path}.{name}" if path else name, child))
    return found


def count_writes(modules: Iterable[tuple[str, nn.Module]]) -> int:
    """How often the parameters of these modules were written to."""
    return sum(version_of(p) for _, module in modules for p in vars(module)["_parameters"].values() if p is not None)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def contents_of(value: Any) -> Callable[[], None]:
    """What takes a list, dict, set or deque back to its entries of now, where they are others by then."""
    saved: Any = value.copy()
    named, joined = hasattr(value, "items"), hasattr(value, "update")

    def restore() -> None:
        pairs: Any = ((saved.get(k, GONE), v) for k, v in value.items()) if named else zip(value, saved, strict=False)
        if len(value) == len(saved) and all(a is b for a, b in pairs):
            return
        value.clear()
        (value.update if joined else value.extend)(saved)

    return restore


def generator_state(value: Any) -> Callable[[], None] | None:
    """What takes a source of random numbers, or an array, back to what it is now; None for any other object."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: cast("None", value.set_state(state))
    if isinstance(value, random.Random):
        inner = value.getstate()
        return lambda: value.setstate(inner)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return partial_set(bits, bits.state)
    if isinstance(value, numpy.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, numpy.ndarray) and value.size <= LARGEST:
        saved = value.copy()
        return lambda: numpy.copyto(value, saved)
    return None


def partial_set(bits: Any, state: Any) -> Callable[[], None]:
    """What sets the state of a bit generator of NumPy."""

    def restore() -> None:
        bits.state = state

    return restore
