"""What a pass records of the layers: which explain the gradients of their parameters, and with which activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import list_numbers, measure_norm
from natgrad.layers.examples import Examples, find_examples
from natgrad.layers.experts import ExpertProduct, collect_experts
from natgrad.layers.kinds import TRANSPOSED, ConvolutionLayer, Layer, NormLayer, known_layers, pad_as, patches_at
from natgrad.layers.moments import Mixed, Seen, combine, spread_rows
from natgrad.layers.taps import Place, Tap, derivatives, record_calls
from natgrad.layers.traced import Traced, TracedProduct, find_products

IMAGES = 32
"""Examples that a convolution's patches are made of at the least: neighbouring patches tell much the same."""
GATHERED = 3
"""Times as many patches that `unfold` makes in the time of one that is gathered by itself."""
convolve: Any = torch.convolution


class SeenImages(Seen):
    """One call of a convolution. Its gradient and its scores along a step are convolutions too: no patches are made."""

    inputs: Tensor  # what it saw, (b, channels, ...)
    derivatives: list[Tensor]  # per cotangent, at its output, (b, outputs, ...), whose size is `size`

    def __init__(
        self,
        layer: Layer,
        inputs: Tensor,
        derivatives: Sequence[Tensor],
        size: Sequence[int],
        share: float = 1.0,
        times: float = 1.0,
    ) -> None:
        self.layer, self.inputs, self.derivatives = layer, inputs, list(derivatives)
        self.share, self.times, self.size = share, times, tuple(size)
        self.counts, self.skip, self.pooled, self.cotangents = None, None, False, 1

    @staticmethod
    def fits(layer: ConvolutionLayer, inputs: Tensor, derivatives: Sequence[Tensor], examples: int | None) -> bool:
        """True if a call of a convolution can be followed without patches: one image per example, the usual size."""
        counts = {len(inputs), *map(len, derivatives)} | (set() if examples is None else {examples})
        return len(counts) == 1 and (
            not isinstance(layer.module, TRANSPOSED) or has_usual_size(layer.module, inputs, derivatives[0].shape)
        )

    @cached_property
    def activations(self) -> Tensor:  # type: ignore[override]
        return self.layer.activations(self.inputs)

    @cached_property
    def deltas(self) -> list[Tensor]:  # type: ignore[override]
        return [self.layer.deltas(each) for each in self.derivatives]

    @property
    def positions(self) -> float:
        return float(len(self.inputs) * prod(self.size))

    @property
    def by_token(self) -> bool:
        return False

    @property
    def examples(self) -> int:
        return len(self.inputs)

    def bound_inputs(self) -> Tensor:
        padded = self._arguments()[0]
        taps = prod(self.layer.module.kernel_size)  # an entry is in no more patches than that
        ones = padded.new_tensor(self.positions).sqrt()
        return torch.hypot(taps**0.5 * measure_norm(padded), ones)

    def count_times(self, share: float, weight: float = 1.0, times: float = 1.0) -> SeenImages:
        factor, known = (share * weight) ** 0.5, (share * self.share, times * self.times)
        return SeenImages(self.layer, self.inputs, [factor * d for d in self.derivatives], self.size, *known)

    def thin(self, rows: float) -> Seen:
        """The same pass with some patches, of all images where few are wanted, else of enough images."""
        count, t = int(self.positions), prod(self.size)
        images = min(self.examples, max(IMAGES, 2 * rows / max(t, 1)))
        if not self.single and GATHERED * rows < images * t:
            return self._pick_patches(spread_rows(count, rows, self.inputs.device), t)
        chosen = self
        if self.examples >= 1.5 * images:
            places = spread_rows(self.examples, images, self.inputs.device)
            factor = (self.examples / len(places)) ** 0.5
            derivatives = [factor * d[places] for d in self.derivatives]
            known = derivatives, self.size, self.share, self.times * factor**2
            chosen = SeenImages(self.layer, self.inputs[places], *known)
        return Seen(self.layer, chosen.activations, chosen.deltas, self.share, times=chosen.times).thin(rows)

    def _pick_patches(self, rows: Tensor, t: int) -> Seen:
        """Patches by their numbers in examples times positions, of which an example has t."""
        groups, factor = self.layer.layout.groups, (self.examples * t / len(rows)) ** 0.5
        patches = patches_at(self.layer.module, self.inputs, rows).unflatten(1, (groups, -1))
        deltas = [factor * d.flatten(2)[rows // t, :, rows % t].unflatten(1, (groups, -1)) for d in self.derivatives]
        a, times = self.layer.with_bias(patches).unsqueeze(1), self.times * factor**2
        return Seen(self.layer, a, [d.unsqueeze(1) for d in deltas], self.share, times=times)

    def take(self, kept: slice, factor: float) -> SeenImages:
        return SeenImages(
            self.layer, self.inputs[kept].clone(), [factor * d[kept] for d in self.derivatives], self.size
        )

    def weigh(self, weights: Tensor) -> Seen:
        return Seen(self.layer, self.activations, self.deltas, self.share, times=self.times).weigh(weights)

    def only(self, which: slice) -> SeenImages:
        return SeenImages(self.layer, self.inputs, self.derivatives[which], self.size, self.share, self.times)

    def gradient(self, count: int = 1) -> Tensor:
        layout, first = self.layer.layout, combine(self.derivatives[:count])
        gradients = dict[str, Tensor]()
        if layout.weight is not None:
            inputs, options = self._arguments()
            weight = inputs.new_empty(1).expand(layout.shape)  # its shape is all that counts
            backward: Any = torch.ops.aten.convolution_backward
            gradients[layout.weight] = backward(first, inputs, weight, None, *options, [False, True, False])[1]
        if layout.bias is not None:
            gradients[layout.bias] = first.flatten(2).sum((0, 2))
        return layout.join(gradients)

    def slopes(self, matrix: Tensor, examples: int) -> Tensor:
        layout = self.layer.layout
        parts = layout.split(matrix)
        slopes = torch.zeros(len(self.derivatives), examples, dtype=matrix.dtype, device=matrix.device)
        if layout.weight is not None:
            inputs, options = self._arguments()
            image = convolve(inputs, parts[layout.weight], None, *options)
            slopes += torch.stack([(image * each).reshape(examples, -1).sum(1) for each in self.derivatives])
        if layout.bias is not None:
            sums = torch.stack([each.flatten(2).sum(2) for each in self.derivatives])
            slopes += (sums @ parts[layout.bias].reshape(-1)).reshape(len(sums), examples, -1).sum(2)
        return slopes

    def _arguments(self) -> tuple[Tensor, tuple[Any, ...]]:
        """The inputs and, as torch has them, stride, padding, dilation, transposed, output padding and groups."""
        module: Any = self.layer.module
        if isinstance(module, TRANSPOSED):
            padding, transposed, inputs = (module.padding, module.output_padding), True, self.inputs
        else:
            none = [0] * len(module.kernel_size)
            padding, transposed, inputs = (none, none), False, pad_as(module, self.inputs)
        return inputs, (module.stride, padding[0], module.dilation, transposed, padding[1], module.groups)


def has_usual_size(module: Any, inputs: Tensor, outputs: Sequence[int]) -> bool:
    """True if a transposed convolution was asked for no `output_size`, and the inputs are what a plain one returns."""
    options = zip(
        module.kernel_size, module.stride, module.padding, module.dilation, module.output_padding, strict=True
    )
    for (kernel, stride, padding, dilation, more), before, after in zip(
        options, inputs.shape[2:], outputs[2:], strict=True
    ):
        reach = dilation * (kernel - 1) + 1 - 2 * padding
        if after != (before - 1) * stride + reach + more or (after - reach) // stride + 1 != before:
            return False
    return True


# Taps and the derivatives at them -> what every layer saw: all calls of a module, all products with a matrix

Calls = Sequence[tuple[Tap, list[Tensor]]]
Products = Sequence[tuple[TracedProduct, list[Tensor]]]


def collect_passes(
    taps: Sequence[Tap],
    deltas: Sequence[Sequence[Tensor | None]],
    dtype: torch.dtype | None = None,
    examples: int | None = None,
) -> list[Seen]:
    """The layers' passes, all calls of a module as one. Layers whose calls do not fit together are left out."""
    calls, passes = dict[Layer, list[tuple[Tap, list[Tensor]]]](), list[Seen]()
    for i, call in enumerate(taps):
        reached = [delta for row in deltas if (delta := row[i]) is not None]
        if reached and call.inputs.numel():
            calls.setdefault(call.layer, []).append((call, reached))
    for layer, of_layer in calls.items():
        if (seen := merge_calls(layer, of_layer, dtype, examples)) is not None:
            passes.append(seen)
    return passes


def merge_calls(layer: Layer, calls: Calls, dtype: torch.dtype | None, examples: int | None) -> Seen | None:
    """All calls of one module as one pass: more positions of the same examples, or more examples."""
    if not all(call.intact for call, _ in calls):
        return None
    dtype = torch.promote_types(torch.float32, calls[0][1][0].dtype) if dtype is None else dtype
    calls = [(call, [delta.to(dtype) for delta in deltas]) for call, deltas in calls]
    if isinstance(calls[0][0], ExpertProduct):
        return collect_experts(layer, calls, dtype)
    if isinstance(layer, Traced):
        return traced_pass(layer, [(call, d) for call, d in calls if isinstance(call, TracedProduct)], dtype, examples)
    if not all(layer.has_examples(call.inputs) for call, _ in calls):
        return None
    if isinstance(layer, ConvolutionLayer) and len(calls) == 1 and calls[0][0].place in (None, Place()):
        inputs, deltas = calls[0][0].inputs.to(dtype), calls[0][1]
        if SeenImages.fits(layer, inputs, deltas, examples):
            return SeenImages(layer, inputs, deltas, deltas[0].shape[2:])
    norm = isinstance(layer, NormLayer) and layer.layout.groups > 1
    lay = layer.normalise if isinstance(layer, NormLayer) and norm else layer.activations
    each, columns = list[Tensor](), list[list[Tensor]]()
    for call, deltas in calls:
        each.append(arrange_call(layer, lay, numbers(call.inputs, dtype), examples, call.place))
        columns.append([arrange_call(layer, layer.deltas, delta, examples, call.place) for delta in deltas])
    sizes = list(map(len, each))
    along = 0 if len(calls) > 1 and sum(sizes) == examples else 1
    if along and len(set(sizes)) > 1:
        return None
    activations = join_parts(each, along)
    joint_deltas = [join_parts(list(parts), along) for parts in zip(*columns, strict=True)]
    if joint_deltas[0].shape[:2] != activations.shape[:2]:  # output_size=... of a transposed convolution
        return None
    if norm and activations.shape[1] > len(joint_deltas):
        return sum_positions(layer, activations, joint_deltas)
    return Seen(layer, layer.with_bias(activations) if norm else activations, joint_deltas)


def collect_inputs(taps: Sequence[Tap]) -> list[Seen]:
    """What went into the layers, without derivatives. Rows stand for themselves: no example is told from another.

    Without layers of one output per group, whose blocks are exact, and matrices that are used in several ways.

    Args:
        taps: The calls of layers and the products with matrices.
    """
    calls = dict[Layer, list[Tap]]()
    for call in taps:
        calls.setdefault(call.layer, []).append(call)
    return [seen for layer, of_layer in calls.items() if (seen := lay_inputs(layer, of_layer)) is not None]


def lay_inputs(layer: Layer, calls: Sequence[Tap]) -> Seen | None:
    """All inputs of one layer as rows; None where they are not told apart from other uses, or were overwritten."""
    groups, outputs, _ = layer.layout.matrix_shape
    dtype = torch.promote_types(torch.float32, calls[0].dtype)
    if (groups > 1 and outputs == 1) or not all(call.intact and call.inputs.numel() for call in calls):
        return None
    inputs = [numbers(call.inputs, dtype) for call in calls]
    if isinstance(layer, Traced):
        if not all(
            isinstance(call, TracedProduct) and not call.turned and call.piece == (0, layer.layout.all_outputs)
            for call in calls
        ):
            return None
        rows = layer.activations(torch.cat(inputs).unsqueeze(1).unsqueeze(1))
        return Seen(layer, rows.expand(-1, -1, groups, -1), [])
    if not all(layer.has_examples(each) for each in inputs):
        return None
    size = calls[0].size
    if isinstance(layer, ConvolutionLayer) and len(calls) == 1 and size is not None:
        usual = not isinstance(layer.module, TRANSPOSED) or has_usual_size(layer.module, inputs[0], size)
        return SeenImages(layer, inputs[0], [], size[2:]) if usual else None
    return Seen(layer, torch.cat([layer.activations(each).flatten(0, 1) for each in inputs]).unsqueeze(1), [])


def sum_positions(layer: Layer, normalised: Tensor, deltas: list[Tensor]) -> Seen:
    """A norm's pass with its scores in the place of positions (b, t, G, 1), one per cotangent: all its blocks need.

    For 256 images of 32 x 28 x 28 that takes a tenth of the time that blocks from 784 positions take.
    """
    layout = layer.layout
    columns = [[normalised * d] * (layout.weight is not None) + [d] * (layout.bias is not None) for d in deltas]
    scores = torch.stack([torch.cat([column.sum(1) for column in each], dim=-1) for each in columns], dim=1)
    chosen = torch.eye(len(deltas), dtype=scores.dtype, device=scores.device).view(len(deltas), 1, -1, 1, 1)
    units = [row.expand(len(scores), -1, layout.groups, 1) for row in chosen]
    return Seen(layer, scores, units)


def arrange_call(
    layer: Layer, lay: Callable[[Tensor], Tensor], tensor: Tensor, examples: int | None, place: Place | None = None
) -> Tensor:
    """A call's input or derivative in the layer's layout, examples first.

    Without a place, the number of examples decides, where the outputs tell it: positions may come before examples,
    (t, b, d), or be flattened with them, (b t, d).
    """
    if place is not None and examples is not None:
        rows = lay(tensor.movedim(place.axis, 0))
        if place.fast:
            return rows.unflatten(0, (-1, examples)).transpose(0, 1).flatten(1, 2)
        return rows.reshape(examples, -1, *rows.shape[2:])
    features = layer.features(tensor)
    if features is not None and tensor.dim() - features > 1 and tensor.shape[0] != examples == tensor.shape[1]:
        tensor = tensor.transpose(0, 1)
    rows = lay(tensor)
    if examples is None or examples < 2 or len(rows) % examples:
        return rows
    return rows.reshape(examples, -1, *rows.shape[2:])


def numbers(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs in the dtype; tokens as they are."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def join_parts(parts: list[Tensor], along: int) -> Tensor:
    """Side by side; no copy for one call."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=along)


def traced_pass(layer: Traced, calls: Products, dtype: torch.dtype, examples: int | None) -> Seen | None:
    """All products with a matrix as one pass: a part for y = W x, one for y = x W, one for look-ups."""
    fold = Fold.of(layer, calls, examples)
    kinds: dict[tuple[bool, bool, int | None], list[tuple[TracedProduct, list[Tensor]]]] = {}
    for call, deltas in calls:
        kinds.setdefault((call.turned, call.inputs.is_floating_point(), call.padding), []).append((call, deltas))
    parts: list[Seen | None] = []
    for (turned, dense, _), of_kind in kinds.items():
        if turned and layer.layout.groups > 1:
            return None
        part = straight_part if not turned else turned_part if dense else token_part
        parts.append(part(layer, of_kind, fold, dtype))
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return known[0] if len(known) == 1 else Mixed(layer, known)


@dataclass(frozen=True)
class Fold:
    """How rows (R, d) become (b, t, d), and the dimension in which calls are joined."""

    positions_first: bool  # rows run over positions, then over examples
    examples: int | None  # b; None for rows that are an example each
    along: int = 1  # the dimension in which calls are joined
    pooled: bool = False  # examples cannot be told apart: b = 1

    @staticmethod
    def of(layer: Traced, calls: Products, examples: int | None) -> Fold:
        """By the number of examples: each has as many rows in every product, or every product holds some of them."""
        counts = [call.rows(deltas[0]) for call, deltas in calls]
        if any(call.loose for call, _ in calls):
            return Fold(layer.positions_first, 1, 1, True)
        if examples is not None and all(n and n % examples == 0 for n in counts):
            return Fold(layer.positions_first, examples)
        if sum(counts) == examples and all(call.piece == (0, layer.layout.all_outputs) for call, _ in calls):
            return Fold(layer.positions_first, None, 0)
        return Fold(layer.positions_first, 1, 1, True)

    def __call__(self, rows: Tensor, call: TracedProduct) -> Tensor:
        """(R, ...) -> (b, t, ...)."""
        if self.examples is None:
            return rows.unsqueeze(1)
        b, t, shape = self.examples, len(rows) // self.examples, call.shape
        if call.place is not None:
            return rows.unflatten(0, (t, b)).transpose(0, 1) if call.place.fast else rows.unflatten(0, (b, t))
        batch_second = len(shape) > 1 and shape[0] != b and shape[1] == b and shape[0] * b == len(rows)
        if self.positions_first or batch_second:
            return rows.unflatten(0, (t, b)).transpose(0, 1)
        return rows.unflatten(0, (b, t))


def straight_part(layer: Traced, calls: Products, fold: Fold, dtype: torch.dtype) -> Seen | None:
    """y = W x. A product with some of the matrix's groups only counts for those."""
    groups, outputs, _ = layer.layout.matrix_shape
    if groups > 1 and any(row % outputs for call, _ in calls for row in call.piece):
        return None
    a = join_parts([fold(call.inputs.to(dtype), call) for call, _ in calls], fold.along)
    a, counts = layer.activations(a.unsqueeze(2)).expand(-1, -1, groups, -1), None
    if groups > 1 and any(call.piece != (0, groups * outputs) for call, _ in calls):
        part = [[call.piece[0] <= g * outputs < call.piece[1] for g in range(groups)] for call, _ in calls]
        lengths = torch.tensor([call.rows(deltas[0]) // len(a) for call, deltas in calls])
        mask = torch.tensor(part).repeat_interleave(lengths, dim=0).to(a)
        a, counts = a * mask.unsqueeze(-1), mask.sum(0)
    deltas = [
        delta.unflatten(-1, (groups, outputs)) for delta in gather_derivatives(calls, fold, layer.layout.all_outputs)
    ]
    return Seen(layer, a, deltas, counts=counts, pooled=fold.pooled)


def turned_part(layer: Traced, calls: Products, fold: Fold, dtype: torch.dtype) -> Seen:
    """y = x W: the inputs meet the rows of the matrix and the derivatives its columns; cotangents are more examples.

    A bias, added where the matrix is used as y = W x, has no part in it: its column is zero.
    """
    rows = layer.layout.all_outputs
    inputs = join_parts(
        [pad_rows(fold(call.inputs.to(dtype), call), call.piece, rows) for call, _ in calls], fold.along
    )
    deltas = gather_derivatives(calls, fold)
    left, right = inputs.repeat(len(deltas), 1, 1).unsqueeze(2), torch.cat(deltas).unsqueeze(2)
    right = right if layer.layout.bias is None else functional.pad(right, (0, 1))
    return Seen(layer, right, [left], pooled=fold.pooled, cotangents=len(deltas))


def token_part(layer: Traced, calls: Products, fold: Fold, dtype: torch.dtype) -> Seen:
    """Look-ups in the matrix by token."""
    tokens = join_parts([fold(call.inputs.reshape(-1), call) for call, _ in calls], fold.along)
    return Seen(layer, tokens, gather_derivatives(calls, fold), pooled=fold.pooled, skip=calls[0][0].padding)


def gather_derivatives(calls: Products, fold: Fold, rows: int | None = None) -> list[Tensor]:
    """Per cotangent, the derivatives at all products, (b, t, o); with zeros up to so many rows of the matrix."""

    def lay(delta: Tensor, call: TracedProduct) -> Tensor:
        derivative = fold(call.lay(delta), call)
        return derivative if rows is None else pad_rows(derivative, call.piece, rows)

    columns = zip(*(deltas for _, deltas in calls), strict=True)
    each = ([lay(delta, call) for (call, _), delta in zip(calls, column, strict=True)] for column in columns)
    return [join_parts(parts, fold.along) for parts in each]


def pad_rows(part: Tensor, piece: tuple[int, int], rows: int) -> Tensor:
    """Some of the matrix's rows as all of them, zeros elsewhere; no copy for all."""
    start, stop = piece
    return part if stop - start == rows else functional.pad(part, (start, rows - stop))


# What a pass records of the layers: which explain the gradients of their parameters, and with which activations


@dataclass(frozen=True)
class Heard:
    """What one pass gave.

    Args:
        layers: Those that explain their parameters' gradients, with activations and deltas.
        squares: Of the parameters that no layer holds, by name: the sum over examples of their squared scores, in the
            parameters' shapes. Empty where nobody asked.
        answers: By layer, whether it explains its parameters' gradients; of those that could be judged.
        sure: True if every layer was judged by a gradient that is not zero, which explains anything.
    """

    layers: list[Seen]
    squares: dict[str, Tensor] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)
    sure: bool = True

    @property
    def held_names(self) -> set[str]:
        """The names of the parameters that the layers hold."""
        return {name for seen in self.layers for name in seen.layer.layout.names}


@dataclass(frozen=True)
class Pass:
    """A pass with the derivatives at all its taps.

    Args:
        outputs: (R, m), with a graph, which is kept.
        taps: The calls of layers and the products with matrices in it.
        examples: Which entries of the outputs are whose.
        cotangents: (R, m) each.
        deltas: Per cotangent, the derivatives at the taps; None where it did not arrive.
        params: The leaves of the graph, by name.
        gradients: Of the watched parameters by name, those of the first cotangents' `combine`.
        dtype: Of the activations and deltas; default the widest of float32 and the deltas' own.
        eps: Of the coarsest dtype on the way (autocast), if that is not the layers' own.
        judged: How many cotangents these are: one may be of a row alone that a parameter does not move.
        weights: How many times each example counts, (examples,), with mean one over all of a batch; None: once.
    """

    outputs: Tensor
    taps: Sequence[Tap]
    examples: Examples
    cotangents: Sequence[Tensor]
    deltas: Sequence[Sequence[Tensor | None]]
    params: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    dtype: torch.dtype | None = None
    eps: float = 0.0
    judged: int = 1
    weights: Tensor | None = None

    def collect_layers(self) -> list[Seen]:
        """All layers that the taps tell of."""
        return collect_passes(self.taps, self.deltas, self.dtype, self.examples.count)

    def collect_products(self, spare: Sequence[Traced]) -> list[Seen]:
        """What the graph's products with these matrices tell.

        Args:
            spare: The matrices.
        """
        if not spare:
            return []
        products = list[Tap](find_products(self.outputs, spare, self.params))
        products = find_examples(self.outputs, products, [self.examples], strict=False)[1]
        deltas = derivatives(self.outputs, products, self.cotangents)[0]
        return collect_passes(products, deltas, self.dtype, self.examples.count)

    def judge(self, layers: Sequence[Seen]) -> list[bool | None]:
        """Of each layer whether it gives its parameters' whole gradient; None where that cannot be told.

        By one read of the device.

        Args:
            layers: Their passes.
        """
        gaps, tolerances = list[Tensor](), list[float | None]()
        for seen in layers:
            gradient = seen.gradient(self.judged)
            reached = {name: g for name in seen.layer.layout.names if (g := self.gradients.get(name)) is not None}
            tolerances.append(max(self.eps, torch.finfo(gradient.dtype).eps) ** 0.5 if reached else None)
            if reached:
                parts = seen.layer.layout.split(torch.zeros_like(gradient))  # the bias of an energy moves no score
                parts |= {name: g.to_dense().to(gradient.dtype) for name, g in reached.items()}
                expected = seen.layer.layout.join(parts)
                gaps.append(torch.stack([measure_norm(expected), measure_norm(gradient - expected)]))
        table = torch.stack([gap.to(gaps[0].device, torch.float64) for gap in gaps]).flatten() if gaps else None
        numbers = iter([] if table is None else list_numbers(table))
        answers = list[bool | None]()
        for tolerance in tolerances:
            if tolerance is None:
                answers.append(False)
                continue
            size, gap = next(numbers), next(numbers)
            finite = math.isfinite(size) and math.isfinite(gap)
            answers.append(gap <= tolerance * size if finite and max(size, gap) > 0 else None)
        return answers


def hear(
    one: Pass,
    asks: Callable[[Layer], bool],
    *,
    takes: Callable[[Seen], bool] = lambda seen: True,
    silent: Iterable[Layer] = (),
    spare: Callable[[Mapping[str, bool]], Sequence[Traced]] = lambda answers: (),
) -> Heard:
    """The layers that explain their parameters' gradients in a pass.

    A parameter may be used outside of its layer too: then the layer's activations and deltas are not all there is to
    its gradient, and the products with its matrix in the graph are looked at instead.

    Args:
        one: The pass.
        asks: True for a layer that is judged; the others are trusted.
        takes: True for a layer whose pass is of use to the caller at all.
        silent: Layers that do not explain a gradient that is not zero unless the taps told of them.
        spare: The matrices to look for in the graph, given the answers so far.

    Returns:
        The layers, without squares.
    """
    seen = one.collect_layers()
    asked = [each for each in seen if asks(each.layer)]
    judged = dict(zip(asked, one.judge(asked), strict=True))
    answers = {each.key: judged.get(each, True) is not False and takes(each) for each in seen}
    with_calls = {each.layer.layout.names for each in seen}
    for layer in silent:
        reached = [g for name in layer.layout.names if (g := one.gradients.get(name)) is not None]
        if layer.layout.names not in with_calls and any(bool(g.to_dense().any()) for g in reached):
            answers[layer.key] = False
    more = one.collect_products(spare(answers))
    answers |= {each.key: answer is True and takes(each) for each, answer in zip(more, one.judge(more), strict=True)}
    layers = [each for each in [*seen, *more] if answers[each.key]]
    layers = layers if one.weights is None else [each.weigh(one.weights) for each in layers]
    return Heard(layers, {}, answers, None not in judged.values())


def is_asking(readings: int) -> bool:
    """True if layers are judged afresh: at readings 0, 2, 4, 8, 16, and at every 32nd.

    A second use of a weight may be hidden at first, by a gate or a head that starts at zero.

    Args:
        readings: The number of readings before this one.
    """
    return readings % 32 == 0 or (readings > 1 and readings & (readings - 1) == 0)


@dataclass(frozen=True)
class Recording:
    """A forward pass with its layers' calls.

    Args:
        outputs: (R, m), with a graph.
        taps: The calls in it.
    """

    outputs: Tensor
    taps: Sequence[Tap]


def record_pass(model: nn.Module, space: Space, run: Callable[[], Tensor]) -> Recording:
    """A forward pass that is listened to.

    Args:
        model: The module.
        space: Of the parameters.
        run: The pass, which gives the outputs (R, m).
    """
    with record_calls(known_layers(model, space)) as taps, torch.enable_grad():
        return Recording(run(), taps)


def hear_rows(recording: Recording, dtype: torch.dtype, cotangents: Sequence[Tensor], batch: int) -> list[Seen]:
    """What a pass records of the layers, one delta per cotangent. The graph is kept.

    Args:
        recording: The pass.
        dtype: Of the activations and deltas.
        cotangents: On the outputs, (R, m) each.
        batch: The number of examples.

    Returns:
        The layers whose inputs and derivatives fit together; no embeddings, whose rows are better not written out.
    """
    deltas = derivatives(recording.outputs, recording.taps, cotangents)[0]
    for column in range(len(recording.taps)):
        like = next((row[column] for row in deltas if row[column] is not None), None)
        for row in deltas:  # zeros where a cotangent's derivative does not arrive at a tap that others' reach
            if row[column] is None and like is not None:
                row[column] = torch.zeros_like(like)
    return [seen for seen in collect_passes(recording.taps, deltas, dtype, batch) if not seen.by_token]
