"""What is solved for: networks and physical coefficients, under names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.spaces import Params, split_complex_parameters


class Unknowns(nn.Module):
    """Several networks and coefficients as one module, whose parameters an optimizer trains.

    Args:
        parts: Name -> a module, or a parameter.
    """

    def __init__(self, parts: Mapping[str, nn.Module | nn.Parameter]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def read_unknowns(given: Any) -> tuple[nn.Module, Mapping[str, nn.Module | nn.Parameter]]:
    """The module whose parameters are trained, and the unknowns in the order of a term's arguments, by name.

    The name is what the unknown's parameters start with: "" for a module alone. Complex parameters of modules become
    their real and imaginary parts, in place.
    """
    if isinstance(given, nn.Module) and not isinstance(given, (nn.ModuleDict, nn.ModuleList)):
        check_precision("net", given)
        split_complex_parameters(given)
        return given, {"": given}
    if isinstance(given, (nn.ModuleList, Sequence)) and not isinstance(given, str):
        given = {f"unknown{i}": part for i, part in enumerate(given)}
    if not isinstance(given, (Mapping, nn.ModuleDict)):
        raise TypeError(
            f"net is {type(given).__name__}, expected a torch.nn.Module, or several unknowns: a list or a dict of "
            'modules and of parameters, {"u": net, "k": nn.Parameter(torch.tensor(1.0))}'
        )
    parts = dict(given.items())
    if not parts:
        raise ValueError("net is empty, expected at least one torch.nn.Module")
    for name, part in parts.items():
        check_unknown(name, part)
    for part in parts.values():
        if isinstance(part, nn.Module):
            split_complex_parameters(part)
    return Unknowns(parts), parts


def check_unknown(name: Any, part: Any) -> None:
    """TypeError or ValueError unless an unknown is a module or a parameter under a usable name."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"net has an unknown called {name!r}, expected a name such as 'u'")
    if not isinstance(part, (nn.Module, nn.Parameter)):
        hint = "; wrap a number: nn.Parameter(torch.tensor(1.0))" if isinstance(part, (Tensor, float, int)) else ""
        raise TypeError(f"net[{name!r}] is {type(part).__name__}, expected a module or a parameter{hint}")
    if isinstance(part, nn.Parameter) and part.is_complex():
        raise ValueError(
            f"net[{name!r}] is a parameter of {part.dtype}, expected a real one: give two, its real and its imaginary "
            "part, and write torch.complex(a, b) in the terms"
        )
    check_precision(f"net[{name!r}]", part)


def check_precision(name: str, part: nn.Module | nn.Parameter) -> None:
    """ValueError for parameters in half precision, which has no linear algebra of its own."""
    for p in part.parameters() if isinstance(part, nn.Module) else [part]:
        if p.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"{name} is {p.dtype}, expected double precision, or single: call {name}.double()")


def params_of(params: Params, name: str) -> dict[str, Tensor]:
    """Those of one unknown, by their names within it."""
    start = f"{name}." if name else ""
    return {key.removeprefix(start): p for key, p in params.items() if key.startswith(start)}
