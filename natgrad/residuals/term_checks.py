"""What a term may not do, told before the first step: its networks, and the parameters that it uses past them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.ground.pure import leaves, run_detached
from natgrad.ground.spaces import Params

CLOSE = 1e-3
"""How far a network's values for one point and for two may differ, relative: above round-off in single precision."""


class CallWatch(TorchFunctionMode):
    """Inside, notes what torch functions are given that a term has from elsewhere than its arguments.

    Attributes:
        seen: Every `nn.Parameter` that requires a gradient, by identity.
        differentiates: True after a call of `torch.autograd.grad`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, nn.Parameter] = {}
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.differentiates |= func is torch.autograd.grad
        for one in leaves((args, kwargs)):
            if isinstance(one, nn.Parameter) and one.requires_grad:
                self.seen[id(one)] = one
        return func(*args, **(kwargs or {}))


def check_captured(
    name: str, seen: Mapping[int, nn.Parameter], unknowns: Mapping[str, nn.Module | nn.Parameter], trained: Params
) -> None:
    """Tell of parameters that a term uses by itself, and not as one of its arguments: they have no derivative."""
    advice = (
        "make it an unknown of its own, ng.residuals({'u': net, 'k': k}, {'inside': lambda u, k, x: ...}) with k = "
        "nn.Parameter(torch.tensor(1.0))"
    )
    known = {id(p): key for key, p in trained.items()}
    for number, parameter in seen.items():
        if number in known:
            raise ValueError(
                f"term {name!r} uses the parameter {known[number]!r} by itself, and not as one of its arguments: its "
                f"derivative would be missing; {advice}"
            )
        if number not in {id(p) for part in unknowns.values() for p in list_parameters(part)}:
            warnings.warn(
                f"natgrad: term {name!r} uses a parameter of shape {tuple(parameter.shape)} that is not trained: "
                f"{advice}; for a fixed number, .requires_grad_(False)",
                stacklevel=2,
            )
            return


def list_parameters(part: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    """The parameters of an unknown."""
    return list(part.parameters()) if isinstance(part, nn.Module) else [part]


def find_aliases(unknowns: Mapping[str, nn.Module | nn.Parameter]) -> dict[str, str]:
    """Full name -> the first full name of the same parameter, where unknowns share one."""
    first, found = dict[int, str](), dict[str, str]()
    for name, part in unknowns.items():
        own = part.named_parameters(name) if isinstance(part, nn.Module) else [(name, part)]
        for full, p in own:
            if first.setdefault(id(p), full) != full:
                found[full] = first[id(p)]
    return found


def check_independence(name: str, evaluate: Callable[[Tensor], Tensor], points: Tensor) -> None:
    """ValueError if a network's value at one point depends on the others in its batch, or on chance.

    points: (b, d).
    """
    two = points[:2]
    together = run_detached(lambda: evaluate(two))
    apart = torch.cat([run_detached(lambda one=one: evaluate(one)) for one in two.split(1)])
    size = together.abs().max()
    if len(together) == len(apart) and bool((together - apart).abs().max() > CLOSE * size):
        raise ValueError(
            f"the network{f' {name!r}' * bool(name)} gives {together.reshape(-1)[:4].tolist()} for two points at once "
            f"and {apart.reshape(-1)[:4].tolist()} for one after the other: a value may depend on its own point alone, "
            "and not on the rest of the batch or on chance"
        )


def flatten_residual(name: str, residual: Any, dtype: torch.dtype) -> Tensor:
    """What a term returned, as real numbers (m,). TypeError for anything but tensors."""
    parts = list(residual.values()) if isinstance(residual, Mapping) else residual
    parts = parts if isinstance(parts, (tuple, list)) else [parts]
    numbers = [isinstance(one, (int, float)) for one in parts]
    if not all(isinstance(one, Tensor) or number for one, number in zip(parts, numbers, strict=True)) or all(numbers):
        raise TypeError(
            f"term {name!r} returned {type(residual).__name__}, expected a tensor: the residual at one point; or a "
            "tuple, list or dict of tensors"
        )
    device = next(one.device for one in parts if isinstance(one, Tensor))
    tensors = [one if isinstance(one, Tensor) else torch.full((1,), one, device=device, dtype=dtype) for one in parts]
    real = [(torch.view_as_real(one) if one.is_complex() else one).reshape(-1).to(dtype) for one in tensors]
    return real[0] if len(real) == 1 else torch.cat(real)


def describe(point: tuple[Tensor, ...]) -> str:
    """A point as a reader of an error message likes it."""
    parts = [", ".join(f"{float(number):.6g}" for number in t.reshape(-1)[:12]) for t in point]
    return "; ".join(f"({part}{', ...' if t.numel() > 12 else ''})" for part, t in zip(parts, point, strict=True))
