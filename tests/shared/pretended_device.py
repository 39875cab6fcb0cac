"""An accelerator that is not there: tensors that say they lie on another device, and refuse to meet those of the CPU.

As on a real one, scalars of the CPU, indices and the source of a copy may meet them. What they hold lies on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

PLACE = torch.device("meta")  # the one device without a driver that autograd knows
MEETS_ALL = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_local_scalar_dense", "_foreach_copy_"}


class Distant(Tensor):
    """A tensor of the pretended device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Distant:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        distant = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=PLACE, **layout)
        distant.held = held
        return distant

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Distant:
        return Distant(self.held.new_tensor(data, **kwargs))

    def __getitem__(self, key: Any) -> Tensor:
        # torch makes a tensor of a list on the device itself, out of reach
        return super().__getitem__(torch.tensor(key) if isinstance(key, list) else key)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carry_out(func, args, kwargs or {})


def list_leaves(tree: Any) -> Iterator[Any]:
    """What lies in nested tuples, lists and dicts."""
    if isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from list_leaves(part)
    else:
        yield tree


def carry_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on what the tensors hold; RuntimeError where devices meet that may not."""
    name = func._schema.name.split("::")[1]
    tensors = [each for each in list_leaves((args, kwargs)) if isinstance(each, Tensor)]
    distant = [each for each in tensors if isinstance(each, Distant)]
    assert all(isinstance(each, Distant) or each.device != PLACE for each in tensors), f"{name} takes an empty tensor"
    near = [each for each in tensors if not isinstance(each, Distant) and each.dim() > 0]
    if distant and near and name not in MEETS_ALL:
        raise RuntimeError(f"{name} meets tensors of the CPU {[tuple(each.shape) for each in near]} on another device")
    wanted = kwargs.get("device")
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    held = tree_map(lambda each: each.held if isinstance(each, Distant) else each, (args, kwargs))
    result = func(*held[0], **held[1])
    known = {id(each.held): each for each in distant}
    stays = bool(distant) if wanted is None else torch.device(wanted) == PLACE
    assert all(each.device != PLACE for each in list_leaves(result) if isinstance(each, Tensor)), f"{name} got lost"

    def wrap(each: Any) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, Distant):
            return each
        return known[id(each)] if id(each) in known else Distant(each) if stays else each

    return tree_map(wrap, result)


class Watch(TorchDispatchMode):
    """Operations that make or take tensors of the pretended device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        leaves = list_leaves((args, kwargs))
        if any(isinstance(each, Distant) for each in leaves) or (wanted is not None and torch.device(wanted) == PLACE):
            return carry_out(func, args, kwargs)
        return func(*args, **kwargs)


class DistantGenerator(torch._C.Generator):
    """A generator that says it lies on the device that was asked for."""

    def __new__(cls, device: Any = "cpu") -> DistantGenerator:
        generator = super().__new__(cls, device="cpu")
        generator.asked = torch.device(device)
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        return self.asked


class Driver:
    """What torch asks the module of a device for."""

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


@contextmanager
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it `device=PLACE` is a device that holds numbers."""

    def near(device: Any) -> Any:
        return "cpu" if torch.device(device or "cpu") == PLACE else device

    def replace(owner: Any, name: str, make: Any) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    def make_distant(plain: Any) -> Any:
        def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None or torch.device(device) != PLACE or isinstance(data, Tensor):
                return plain(data, *args, **({} if device is None else {"device": device}), **kwargs)
            return Distant(plain(data, *args, **kwargs))

        return tensor

    for name in ("tensor", "as_tensor", "arange", "eye"):  # which write into what they made
        replace(torch, name, make_distant)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        replace(torch, name, lambda plain: lambda device="cpu": plain(near(device)))
    replace(torch.autocast, "__init__", lambda plain: lambda self, kind, *a, **k: plain(self, near(kind), *a, **k))
    monkeypatch.setattr(torch, "Generator", DistantGenerator)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Driver)
    monkeypatch.setattr("natgrad.optim.checks.check_numbers_there", lambda params: None)
    with Watch():
        yield
    monkeypatch.undo()


def move_away(model: nn.Module) -> nn.Module:
    """The model on the pretended device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(Distant(parameter.detach().clone())))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, Distant(buffer.clone()))
    return model
