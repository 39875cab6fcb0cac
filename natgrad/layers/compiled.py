"""Listening inside a compiled graph: a tap that is part of the graph, and tells what passed when a backward reaches it.

A compiled region has one node in autograd's graph, so that no edge leads to a layer within. There the output of a
layer goes through an identity whose backward hands the layer's input and the derivative at its output to a custom
operator, which the compiler does not look into. That operator's result is the (zero) gradient of a dummy argument:
asking autograd for the dummy's gradient runs the region's backward and nothing else; no `.grad` and no hook is touched.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Record = tuple[int, Tensor, Tensor]


class Recorder:
    """What the taps of one model's compiled regions recorded during `recording()`.

    Attributes:
        number: Its name in the graphs, which hold constants only.
        dummy: 0-dimensional, the argument that all taps share.
        records: One per call of a layer; None outside of `recording()`.
    """

    def __init__(self) -> None:
        self.number = next(NUMBERS)
        self.dummy = make_dummy()
        self.records: list[Record] | None = None
        RECORDERS[self.number] = self
        if "torch.distributed.tensor" in sys.modules:
            hear_whole_tensors()

    def move(self, device: torch.device) -> None:
        """Put the dummy where the model is: one tensor elsewhere would keep a graph from being captured whole.

        Args:
            device: The model's.
        """
        self.dummy = make_dummy(device)

    @contextmanager
    def recording(self) -> Generator[list[Record]]:
        """Inside, backward passes append (place, input, derivative at the output) per call of a layer."""
        found: list[Record] = []
        try:
            self.records = found
            yield found
        finally:
            self.records = None


def make_dummy(device: torch.device | None = None) -> Tensor:
    """A number that a backward pass leaves no gradient at.

    That gradient is a `DTensor` where the layers are in parts, and the compiler takes no plain tensor with such a one.
    """
    dummy = torch.zeros((), device=device, requires_grad=True)
    dummy.register_post_accumulate_grad_hook(forget_gradient)
    return dummy


def forget_gradient(tensor: Tensor) -> None:
    """Hook after a gradient was accumulated."""
    tensor.grad = None


NUMBERS = itertools.count()
RECORDERS: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()


@torch.library.custom_op("natgrad::heard", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def hear_delta(inputs: Tensor, delta: Tensor, dummy: Tensor, number: int, place: int) -> Tensor:
    """The dummy's gradient, 0; on the way, copies for the recorder, since compiled code reuses its memory."""
    recorder = RECORDERS.get(number)
    if recorder is not None and recorder.records is not None:
        recorder.records.append((place, inputs.detach().clone(), delta.detach().clone()))
    return torch.zeros_like(dummy)


@hear_delta.register_fake
def _(inputs: Tensor, delta: Tensor, dummy: Tensor, number: int, place: int) -> Tensor:
    return torch.empty_like(dummy)


@cache
def hear_whole_tensors() -> None:
    """Let torch put tensors that lie in parts over several processes together before `heard` gets them."""
    from torch.distributed.tensor import Replicate  # seconds, and for models in parts alone
    from torch.distributed.tensor.experimental import register_sharding

    def place_parts(inputs: Any, delta: Any, dummy: Any, number: int, place: int) -> Any:
        return [([Replicate()], [Replicate(), Replicate(), Replicate(), None, None])]

    register: Any = register_sharding(torch.ops.natgrad.heard.default)
    register(place_parts)


class Fused(torch.autograd.Function):
    """y -> y, whose backward calls `heard`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, dummy: Tensor, number: int, place: int) -> Tensor:
        ctx.save_for_backward(inputs, dummy)
        ctx.number, ctx.place = number, place
        return output.clone()  # a view could not be overwritten by an in-place activation; the compiler drops the copy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, dummy = ctx.saved_tensors
        return gradients[0], None, hear_delta(inputs, gradients[0], dummy, ctx.number, ctx.place), None, None


def tap_output(output: Tensor, inputs: Tensor, recorder: Recorder, place: int) -> Tensor:
    """The output of a layer, tapped.

    Args:
        output: Of the layer.
        inputs: Of the layer.
        recorder: Of the model.
        place: The layer's number among the recorder's.
    """
    return Fused.apply(output, inputs, recorder.dummy, recorder.number, place)  # type: ignore[return-value]
