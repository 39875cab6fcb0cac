"""Recurrent modules in products that the graph shows, instead of one fused kernel that hides them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from natgrad.layers.kinds import type_of

# their flags() also sets the precision of products, and warns where it cannot
LIBRARIES: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)


class Unroll:
    """Forward hooks of one recurrent module: before and after a pass. Those of a copied or pickled model do nothing.

    oneDNN runs an LSTM in float32, and cuDNN every recurrent module on a GPU, as one node of the graph. Without them
    torch takes one product with each matrix and step, to the same numbers up to round-off: what goes into a product
    and the derivative at it can then be read (`natgrad.layers.traced`).

    Args:
        owner: Its `listens()` says whether the next pass is read; the hooks do not keep it alive. None: no pass is.
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.flags: list[list[bool]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Do without the fused kernels, in passes that are listened to."""
        owner = None if self.owner is None else self.owner()
        if owner is None or torch.compiler.is_compiling() or not torch.is_grad_enabled() or not owner.listens():
            return
        if torch.backends.flags_frozen():  # torch.backends.disable_global_flags() was called
            return
        self.flags.append([library.enabled for library in LIBRARIES])
        for library in LIBRARIES:
            library.enabled = False

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take them again, after an exception too."""
        if self.flags:
            for library, enabled in zip(LIBRARIES, self.flags.pop(), strict=True):
                library.enabled = enabled

    def __reduce__(self) -> tuple[type[Unroll], tuple[()]]:
        return Unroll, ()


def unroll_recurrence(modules: Iterable[nn.Module], owner: Any) -> list[RemovableHandle]:
    """Run the recurrent ones among the modules in products, in the passes that `owner.listens()` to.

    Args:
        modules: Any; others than `nn.RNN`, `nn.LSTM` and `nn.GRU` are left alone, and so are their subclasses.
        owner: An object with a method `listens()`.

    Returns:
        Handles, whose `remove()` takes the hooks off.
    """
    handles = []
    for module in dict.fromkeys(modules):
        if type_of(module) in (nn.RNN, nn.LSTM, nn.GRU):
            hook = Unroll(owner)
            handles.append(module.register_forward_pre_hook(hook.before))
            handles.append(module.register_forward_hook(hook.after, always_call=True))
    return handles
