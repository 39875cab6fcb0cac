"""Listening to layers: what goes into each, and the place in the graph where the derivative of its output arrives.

A tap changes nothing in the pass. It keeps the layer's input, which autograd keeps anyway, and the gradient edge of the
output: `torch.autograd.grad` to that edge gives the derivative at the layer's own output even where an in-place
activation has overwritten it, computes no weight gradient on the way, and leaves every `.grad` and every hook on
parameters alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from natgrad.pure import is_evaluating
from natgrad.structures.layers import Layer
from natgrad.structures.statistics import Seen


@dataclass(frozen=True)
class Tap:
    """One call of a module: its input, and where the derivative of its output arrives.

    dtype: of the output.   version: of the input, to notice a later change.
    """

    layer: Layer
    inputs: Tensor
    edge: GradientEdge
    dtype: torch.dtype
    version: int

    @staticmethod
    def of(layer: Layer, inputs: Tensor, output: Tensor) -> Tap:
        """The tap of one call that just returned `output`."""
        version = 0 if inputs.is_inference() else inputs._version
        return Tap(layer, inputs.detach(), get_gradient_edge(output), output.dtype, version)

    @property
    def intact(self) -> bool:
        """Whether the input still is what the layer saw."""
        return self.inputs.is_inference() or self.inputs._version == self.version


class Taps:
    """The calls of known modules, while `armed`, in passes that build a graph and are the user's own."""

    def __init__(self) -> None:
        self.armed = False
        self.calls: list[Tap] = []

    def take(self) -> list[Tap]:
        """The calls so far, which are forgotten here: nothing holds a graph afterwards."""
        calls, self.calls = self.calls, []
        return calls


class Tapped:
    """Forward hook of one module. A copied or pickled model carries a deaf one."""

    def __init__(self, taps: Taps | None = None, layer: Layer | None = None) -> None:
        self.taps = None if taps is None else weakref.ref(taps)
        self.layer = None if layer is None else weakref.ref(layer)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        taps = None if self.taps is None else self.taps()
        layer = None if self.layer is None else self.layer()
        if taps is None or layer is None or not taps.armed or is_evaluating():
            return
        if isinstance(output, Tensor) and output.requires_grad and args and isinstance(args[0], Tensor):
            taps.calls.append(Tap.of(layer, args[0], output))

    def __reduce__(self) -> tuple[type[Tapped], tuple[()]]:
        return Tapped, ()


def tap(taps: Taps, layers: Mapping[nn.Module, Layer]) -> list[RemovableHandle]:
    """Listen to the modules; returns the handles whose remove() takes the hooks off. Somebody must hold the layers."""
    return [module.register_forward_hook(Tapped(taps, layer)) for module, layer in layers.items()]


def derivatives(
    outputs: Tensor,
    taps: Sequence[Tap],
    cotangents: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> tuple[list[list[Tensor | None]], list[list[Tensor | None]]]:
    """Per cotangent on the outputs: the derivatives at every tap, and at the leaves. The graph is kept.

    None where the outputs do not depend on it: a pass that did not lead to them, a branch that was not used.
    """
    at_taps, at_leaves = [], []
    for cotangent in cotangents:
        wanted = [*(call.edge for call in taps), *leaves]
        found: Sequence[Tensor | None] = ()
        if wanted:
            found = torch.autograd.grad(outputs, wanted, cotangent, retain_graph=True, allow_unused=True)
        at_taps.append(list(found[: len(taps)]))
        at_leaves.append(list(found[len(taps) :]))
    return at_taps, at_leaves


def passes(
    taps: Sequence[Tap],
    deltas: Sequence[Sequence[Tensor | None]],
    dtype: torch.dtype | None = None,
    examples: int | None = None,
) -> list[Seen]:
    """The layers' passes, all calls of a module as one. Layers whose calls do not fit together are left out.

    deltas: per cotangent and tap; calls without one are left out.   dtype: of the result, default the widest of float32
    and the deltas' own.   examples: of the outputs, if known: calls that have as many together are parts of a batch.
    """
    calls: dict[Layer, list[tuple[Tap, list[Tensor]]]] = {}
    for i, call in enumerate(taps):
        reached = [delta for found in deltas if (delta := found[i]) is not None]
        if reached:
            calls.setdefault(call.layer, []).append((call, reached))
    found = [merged(layer, of_layer, dtype, examples) for layer, of_layer in calls.items()]
    return [seen for seen in found if seen is not None]


def merged(
    layer: Layer, calls: list[tuple[Tap, list[Tensor]]], dtype: torch.dtype | None, examples: int | None
) -> Seen | None:
    """All calls of one module as one pass: more positions of the same examples, or more examples.

    None where they do not fit together, or where an input was overwritten since.
    """
    sizes = [len(call.inputs) if layer.batched(call.inputs) else 0 for call, _ in calls]
    along = 0 if len(calls) > 1 and sum(sizes) == examples else 1
    if 0 in sizes or not all(call.intact for call, _ in calls) or (along and len(set(sizes)) > 1):
        return None
    dtype = torch.promote_types(torch.float32, calls[0][1][0].dtype) if dtype is None else dtype
    inputs = (call.inputs.to(dtype) if call.inputs.is_floating_point() else call.inputs for call, _ in calls)
    activations = joined([layer.activations(x) for x in inputs], along)
    columns = zip(*([layer.deltas(delta.to(dtype)) for delta in deltas] for _, deltas in calls), strict=True)
    found = [joined(list(parts), along) for parts in columns]
    fits = found[0].shape[:2] == activations.shape[:2]  # not so for output_size=... of a transposed convolution
    return Seen(layer, activations, found) if fits else None


def joined(parts: list[Tensor], along: int) -> Tensor:
    """Side by side; no copy for one call."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=along)
