"""Listening to layers: what goes into each, and the place in the graph where the derivative of its output arrives.

A tap changes nothing in the pass. It keeps the layer's input, which autograd keeps anyway, and the gradient edge of the
output: `torch.autograd.grad` to that edge gives the derivative at the layer's own output even where an in-place
activation has overwritten it, computes no weight gradient on the way, and leaves every `.grad` and every hook on
parameters alone. Inside compiled graphs the taps are fused ones.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from natgrad.ground.graph_nodes import notes_of, walk
from natgrad.ground.pure import Hook, is_evaluating, is_transformed, refuse_jagged, run_alone, version_of
from natgrad.ground.whole_tensors import any_split, gather_whole, is_split
from natgrad.layers.kinds import Layer

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
        """Put the dummy where the model is: one tensor elsewhere would keep a graph from being captured whole."""
        self.dummy = make_dummy(device)

    @contextmanager
    def recording(self) -> Generator[list[Record]]:
        """Inside, backward passes append (place, input, derivative at the output) per call of a layer."""
        records: list[Record] = []
        try:
            self.records = records
            yield records
        finally:
            self.records = None


def make_dummy(device: torch.device | None = None) -> Tensor:
    """A number that a backward pass leaves no gradient at: the compiler takes no plain tensor whose is a `DTensor`."""
    dummy = torch.zeros((), device=device, requires_grad=True)
    dummy.register_post_accumulate_grad_hook(lambda tensor: setattr(tensor, "grad", None))
    return dummy


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


# Listening to layers: what goes into each, and the place in the graph where the derivative of its output arrives


@dataclass(frozen=True)
class Place:
    """Where the examples run in a call's input and output: a dimension, or the rows of the first one."""

    axis: int = 0  # where it holds more than the examples, an example's positions lie together in it
    fast: bool = False  # the first dimension runs over positions, and within each over examples, (t b, ...)

    def spread(self, numbers: Tensor, like: Tensor) -> Tensor:
        """One number per example (b,), where the example runs in `like`."""
        times = like.shape[self.axis] // len(numbers)
        spread = numbers.repeat(times) if self.fast else numbers.repeat_interleave(times)
        return spread.view([-1 if i == self.axis else 1 for i in range(like.dim())])


@dataclass(frozen=True)
class Tap:
    """One call of a module: its input, and where the derivative of its output arrives.

    Args:
        layer: The module's.
        inputs: The call's first argument.
        edge: Where the derivative arrives; None in a compiled graph.
        dtype: Of the output.
        version: Of the input, to notice a later change.
        place: Of the examples, where it was looked for; None: by the shapes.
        size: The output's shape; None in a compiled graph, and of a product with a matrix.
    """

    layer: Layer
    inputs: Tensor
    edge: GradientEdge | None
    dtype: torch.dtype
    version: int
    place: Place | None = None
    size: torch.Size | None = None

    @staticmethod
    def of(layer: Layer, inputs: Tensor, output: Tensor) -> Tap:
        """The tap of one call that just returned.

        Args:
            layer: The module's.
            inputs: The call's first argument.
            output: What it returned, with a graph.
        """
        edge = get_gradient_edge(output)
        return Tap(layer, inputs.detach(), edge, output.dtype, version_of(inputs), size=output.shape)

    def gather(self) -> Tap:
        """The same with the whole input, where processes hold it in parts."""
        if not is_split(self.inputs) or not self.intact:
            return self
        inputs = gather_whole(self.inputs)
        return replace(self, inputs=inputs, version=version_of(inputs))

    @property
    def intact(self) -> bool:
        """True if the input still is what the layer saw."""
        return version_of(self.inputs) == self.version


@dataclass(frozen=True)
class MatrixProduct(Tap):
    """A product with a matrix, found in the graph of a pass.

    Arguments that are not listed here are those of `Tap`.

    Args:
        turned: True for y = x W: the matrix's rows meet the inputs, as in a look-up.
        columns: True if inputs and derivatives have their rows along the last dimension.
        loose: True if it is not known which example a row comes from.
    """

    turned: bool = False
    columns: bool = False
    loose: bool = False

    def lay(self, delta: Tensor) -> Tensor:
        """A derivative at the product as rows, (R, o).

        Args:
            delta: In the product's shape.
        """
        return (delta.mT if self.columns else delta).flatten(0, -2)

    def turn(self, layer: Any) -> MatrixProduct | None:
        """The product as the matrix the other way round sees it; None where it has no such form.

        Args:
            layer: That matrix.
        """
        return replace(self, layer=layer, turned=not self.turned)


@dataclass
class Note:
    """What the graph of a layer's output keeps of the call.

    Args:
        place: The layer's number. The layer itself would keep its module, and with it the graphs of what that holds.
        order: The call's number among all.
        inputs: Its first argument, detached; None once a loss of the pass went backward.
        version: Of the input, to notice a later change.
        output: The output's number at its node.
        dtype: Of the output.
        size: Its shape.
    """

    place: int
    order: int
    inputs: Tensor | None
    version: int
    output: int
    dtype: torch.dtype
    size: torch.Size


class Taps:
    """The calls of known modules, while `armed`, in passes that build a graph.

    The graph keeps them, and nothing else does: they go with what the pass returned, and those that led to a loss are
    found from there.

    Attributes:
        armed: True while calls are recorded.
        recorder: Of the calls inside compiled graphs.
        places: The layers by their numbers.
    """

    def __init__(self) -> None:
        self.armed = False
        self.recorder = Recorder()
        self.number([])
        self._order = itertools.count()

    def number(self, layers: Iterable[Layer]) -> None:
        """Give the layers their numbers. Calls of others are forgotten.

        Args:
            layers: In their order.
        """
        self.places, self._key = list(layers), object()

    def listens(self) -> bool:
        """True if the calls of the pass under way are recorded."""
        return self.armed and not is_evaluating()

    def note(self, place: int, inputs: Tensor, output: Tensor) -> None:
        """Record a call that just returned.

        Args:
            place: The layer's number.
            inputs: The call's first argument.
            output: What it returned, with a graph.
        """
        edge = get_gradient_edge(output)
        note = Note(
            place, next(self._order), inputs.detach(), version_of(inputs), edge.output_nr, output.dtype, output.shape
        )
        notes_of(edge.node).setdefault(self._key, []).append(note)

    def find_calls(self, outputs: Tensor) -> list[Tap]:
        """The calls that led to these outputs, in their order; none if a loss of one of them went backward.

        Args:
            outputs: With a graph.
        """
        calls = list[Tap]()
        for note, node in self._find_notes(outputs):
            if note.inputs is None:
                return []
            edge, layer = GradientEdge(node, note.output), self.places[note.place]
            calls.append(Tap(layer, note.inputs, edge, note.dtype, note.version, size=note.size))
        return calls

    def _find_notes(self, outputs: Tensor) -> list[tuple[Note, Node]]:
        places = [(note, node) for node in walk([outputs.grad_fn]) for note in notes_of(node).get(self._key, ())]
        return sorted(places, key=lambda place: place[0].order)

    def release_with(self, loss: Tensor) -> None:
        """Free the inputs of the calls that led to a loss when its backward pass begins.

        Another loss of the same pass may be read until then.

        Args:
            loss: Of the pass.
        """
        notes = [note for note, _ in self._find_notes(loss)]

        def release(gradient: Tensor) -> None:
            for note in notes:
                note.inputs = None

        loss.register_hook(release)

    def reach(
        self, outputs: Tensor, calls: Sequence[Tap], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> tuple[list[Tap], list[list[Tensor | None]], list[list[Tensor | None]]]:
        """`derivatives` at these calls and at those in compiled graphs.

        Args:
            outputs: (R, m), with a graph.
            calls: Calls in it.
            cotangents: (R, m) each.
            leaves: Other tensors of the graph.

        Returns:
            All calls, and per cotangent what arrived at them and at the leaves.
        """
        everywhere, at_calls, at_leaves = list(calls), list[list[Tensor | None]](), list[list[Tensor | None]]()
        for cotangent in cotangents:
            with self.recorder.recording() as records:
                deltas, slopes = derivatives(outputs, calls, [cotangent], [*leaves, self.recorder.dummy])
            if not at_calls:
                for place, inputs, delta in records:  # in compiled graphs, where the input is a copy
                    everywhere.append(Tap(self.places[place], inputs, None, delta.dtype, inputs._version))
            at_calls.append([*deltas[0], *(delta for _, _, delta in records)])
            at_leaves.append(slopes[0][:-1])
        return everywhere, at_calls, at_leaves


class Tapped(Hook):
    """Forward hook of one module, the layer number `place` of the taps."""

    def __init__(self, taps: Taps, place: int) -> None:
        self.taps, self.place = weakref.ref(taps), place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if not (isinstance(output, Tensor) and output.requires_grad and args and isinstance(args[0], Tensor)):
            return None
        taps = self.taps()
        if taps is None or not taps.armed:
            return None
        if torch.compiler.is_compiling():  # the compiler guards on what was asked above: two graphs, armed and not
            if torch.compiler.is_exporting():
                return None
            recorder = taps.recorder
            return Fused.apply(output, args[0], recorder.dummy, recorder.number, self.place)  # type: ignore[return-value]
        if taps.listens() and not is_transformed((args[0], output)):
            refuse_jagged([args[0]], f"the input of the layer of {taps.places[self.place].layout.names[0]!r}")
            taps.note(self.place, args[0], output)
        return None


def tap(taps: Taps, layers: Mapping[nn.Module, Layer]) -> list[RemovableHandle]:
    """Record the modules' calls. The hooks do not keep the taps alive: the caller must hold them."""
    taps.number(layers.values())
    for p in itertools.islice(itertools.chain.from_iterable(module.parameters() for module in layers), 1):
        taps.recorder.move(p.device)
    # tensor parallelism hands on a part of what came out, by a hook of its own
    return [
        module.register_forward_hook(Tapped(taps, place), prepend=any_split(module.parameters(recurse=False)))
        for place, module in enumerate(layers)
    ]


@contextmanager
def record_calls(layers: Mapping[nn.Module, Layer]) -> Generator[list[Tap]]:
    """Inside, every call of these modules that has a graph is appended to the list that it gives.

    Args:
        layers: Each module's layer.
    """
    taps = list[Tap]()

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            taps.append(Tap.of(layers[module], args[0], output))

    with run_alone():
        handles = [module.register_forward_hook(hook) for module in layers]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


def derivatives(
    outputs: Tensor,
    taps: Sequence[Tap],
    cotangents: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> tuple[list[list[Tensor | None]], list[list[Tensor | None]]]:
    """The derivatives at every tap, and at the leaves, per cotangent on the outputs. The graph is kept.

    Args:
        outputs: (R, m), with a graph.
        taps: Calls in it.
        cotangents: (R, m) each.
        leaves: Other tensors of the graph.

    Returns:
        Two lists of lists. None where the outputs do not depend on it: a pass that did not lead to them, a branch that
            was not used.
    """
    at_taps, at_leaves = [], []
    for cotangent in cotangents:
        wanted: list[Any] = [*(call.edge for call in taps), *leaves]
        slopes: Sequence[Tensor | None] = ()
        if wanted:
            slopes = torch.autograd.grad(outputs, wanted, cotangent, retain_graph=True, allow_unused=True)
        gradients = [None if slope is None else gather_whole(slope) for slope in slopes]
        at_taps.append(gradients[: len(taps)])
        at_leaves.append(gradients[len(taps) :])
    return at_taps, at_leaves
