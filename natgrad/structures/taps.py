"""Listening to layers: what goes into each, and the place in the graph where the derivative of its output arrives.

A tap changes nothing in the pass. It keeps the layer's input, which autograd keeps anyway, and the gradient edge of the
output: `torch.autograd.grad` to that edge gives the derivative at the layer's own output even where an in-place
activation has overwritten it, computes no weight gradient on the way, and leaves every `.grad` and every hook on
parameters alone. Inside compiled graphs the taps are fused ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from natgrad.pure import is_evaluating
from natgrad.structures.fused import Record, Recorder, fused
from natgrad.structures.layers import Layer
from natgrad.structures.statistics import Seen


@dataclass(frozen=True)
class Tap:
    """One call of a module: its input, and where the derivative of its output arrives.

    edge: None in a compiled graph.   dtype: of the output.   version: of the input, to notice a later change.
    """

    layer: Layer
    inputs: Tensor
    edge: GradientEdge | None
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
    """The calls of known modules, while `armed`, in passes that build a graph and are the user's own.

    paused: until the model is called the next time; calls outside of compiled graphs are not heard.   recorder: of the
    calls inside compiled graphs.   places: the layers by their numbers there.
    """

    def __init__(self) -> None:
        self.armed = False
        self.paused = False
        self.calls: list[Tap] = []
        self.recorder = Recorder()
        self.places: list[Layer] = []

    def take(self) -> list[Tap]:
        """The calls so far, which are forgotten here: nothing holds a graph afterwards."""
        calls, self.calls = self.calls, []
        return calls

    def pause(self, until_called: bool) -> list[Tap]:
        """The calls so far. until_called: kept, for another loss of the same pass, until the model is called again, or
        the backward pass of a loss begins (`Release`).

        Layers that run again in a backward pass, checkpointed ones, are not heard meanwhile: their graphs may go.
        """
        self.paused = until_called
        return list(self.calls) if until_called else self.take()

    def resume(self) -> None:
        """A new pass begins."""
        if self.paused:
            self.calls.clear()
        self.paused = False


class Tapped:
    """Forward hook of one module. A copied or pickled model carries a deaf one."""

    def __init__(self, taps: Taps | None = None, layer: Layer | None = None, place: int = 0) -> None:
        self.taps = None if taps is None else weakref.ref(taps)
        self.layer = None if layer is None else weakref.ref(layer)
        self.place = place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if not (isinstance(output, Tensor) and output.requires_grad and args and isinstance(args[0], Tensor)):
            return None
        taps = None if self.taps is None else self.taps()
        if taps is None or not taps.armed:
            return None
        if torch.compiler.is_compiling():  # the compiler guards on what was asked above: two graphs, armed and not
            return None if torch.compiler.is_exporting() else fused(output, args[0], taps.recorder, self.place)
        layer = None if self.layer is None else self.layer()
        if layer is not None and not taps.paused and not is_evaluating():
            taps.calls.append(Tap.of(layer, args[0], output))
        return None

    def __reduce__(self) -> tuple[type[Tapped], tuple[()]]:
        return Tapped, ()


def tap(taps: Taps, layers: Mapping[nn.Module, Layer]) -> list[RemovableHandle]:
    """Listen to the modules; returns the handles whose remove() takes the hooks off. Somebody must hold the layers."""
    taps.places = list(layers.values())
    for p in itertools.islice(itertools.chain.from_iterable(module.parameters() for module in layers), 1):
        taps.recorder.move(p.device)
    hooks = [Tapped(taps, layer, place) for place, layer in enumerate(taps.places)]
    return [module.register_forward_hook(hook) for module, hook in zip(layers, hooks, strict=True)]


class Resume:
    """Forward pre-hook of the model: a new pass begins. A copied or pickled model carries one that does nothing."""

    def __init__(self, taps: Taps | None = None) -> None:
        self.taps = None if taps is None else weakref.ref(taps)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        taps = None if self.taps is None else self.taps()
        if taps is not None and not is_evaluating():
            taps.resume()

    def __reduce__(self) -> tuple[type[Resume], tuple[()]]:
        return Resume, ()


def resume(model: nn.Module, taps: Taps) -> RemovableHandle:
    """Go on listening, after a pause, when the model is called; returns the handle that takes the hook off."""
    return model.register_forward_pre_hook(Resume(taps))


class Release:
    """Tensor hook of a loss: its backward begins, and frees what the calls so far would hold."""

    def __init__(self, taps: Taps) -> None:
        self.taps = weakref.ref(taps)

    def __call__(self, gradient: Tensor) -> None:
        taps = self.taps()
        if taps is not None and taps.paused:
            taps.calls.clear()


def reached(
    outputs: Tensor, taps: Taps, calls: Sequence[Tap], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Tap], list[list[Tensor | None]], list[list[Tensor | None]]]:
    """`derivatives` at these calls and at those in compiled graphs: all calls, what arrived there and at the leaves."""
    everywhere, at_calls, at_leaves = list(calls), [], []
    for cotangent in cotangents:
        with taps.recorder.recording() as records:
            found, slopes = derivatives(outputs, calls, [cotangent], [*leaves, taps.recorder.dummy])
        if not at_calls:
            everywhere += [recorded(taps, record) for record in records]
        at_calls.append([*found[0], *(delta for _, _, delta in records)])
        at_leaves.append(slopes[0][:-1])
    return everywhere, at_calls, at_leaves


def recorded(taps: Taps, record: Record) -> Tap:
    """The tap of a call in a compiled graph. Its input is a copy."""
    place, inputs, delta = record
    return Tap(taps.places[place], inputs, None, delta.dtype, inputs._version)


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
        wanted: list[Any] = [*(call.edge for call in taps), *leaves]
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
