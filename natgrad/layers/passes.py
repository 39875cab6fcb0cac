"""Taps and the derivatives at them -> what every layer saw: all calls of a module, all products with a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.layers.experts import ExpertProduct, collect_experts
from natgrad.layers.kinds import ConvolutionLayer, Layer, NormLayer
from natgrad.layers.moments import Mixed, Seen
from natgrad.layers.seen_images import SeenImages
from natgrad.layers.taps import Place, Tap
from natgrad.layers.traced import Traced, TracedProduct

Calls = Sequence[tuple[Tap, list[Tensor]]]
Products = Sequence[tuple[TracedProduct, list[Tensor]]]


def collect_passes(
    taps: Sequence[Tap],
    deltas: Sequence[Sequence[Tensor | None]],
    dtype: torch.dtype | None = None,
    examples: int | None = None,
) -> list[Seen]:
    """The layers' passes, all calls of a module as one. Layers whose calls do not fit together are left out.

    Args:
        taps: The calls.
        deltas: Per cotangent and tap, the derivative there; calls without one are left out, and so are those without
            a row (an expert that no token went to): they tell as little as no call at all.
        dtype: Of the result. Default: the widest of float32 and the deltas' own.
        examples: Of the outputs, if known: calls that have as many together are parts of a batch.
    """
    calls: dict[Layer, list[tuple[Tap, list[Tensor]]]] = {}
    for i, call in enumerate(taps):
        reached = [delta for found in deltas if (delta := found[i]) is not None]
        if reached and call.inputs.numel():
            calls.setdefault(call.layer, []).append((call, reached))
    found = [merge_calls(layer, of_layer, dtype, examples) for layer, of_layer in calls.items()]
    return [seen for seen in found if seen is not None]


def merge_calls(layer: Layer, calls: Calls, dtype: torch.dtype | None, examples: int | None) -> Seen | None:
    """All calls of one module as one pass: more positions of the same examples, or more examples.

    Args:
        layer: The module's.
        calls: Each with its deltas, one per cotangent.
        dtype: As in `collect_passes`.
        examples: As in `collect_passes`.

    Returns:
        None where the calls do not fit together, or where an input was overwritten since.
    """
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
            return SeenImages(layer, inputs, deltas)
    norm = isinstance(layer, NormLayer) and layer.layout.groups > 1
    lay = layer.normalise if isinstance(layer, NormLayer) and norm else layer.activations
    each = [arrange_call(layer, lay, numbers(call.inputs, dtype), examples, call.place) for call, _ in calls]
    sizes = [len(activations) for activations in each]
    along = 0 if len(calls) > 1 and sum(sizes) == examples else 1
    if along and len(set(sizes)) > 1:
        return None
    activations = join_parts(each, along)
    laid_out = ([arrange_call(layer, layer.deltas, d, examples, call.place) for d in deltas] for call, deltas in calls)
    columns = zip(*laid_out, strict=True)
    found = [join_parts(list(parts), along) for parts in columns]
    fits = found[0].shape[:2] == activations.shape[:2]  # not so for output_size=... of a transposed convolution
    if not fits:
        return None
    if norm and activations.shape[1] > len(found):
        return sum_positions(layer, activations, found)
    return Seen(layer, layer.with_bias(activations) if norm else activations, found)


def sum_positions(layer: Layer, normalised: Tensor, deltas: list[Tensor]) -> Seen:
    """A norm's pass with its scores in the place of positions, one per cotangent: its blocks need no more of it.

    For 256 images of 32 x 28 x 28 that takes a tenth of the time that blocks from 784 positions take.

    Args:
        layer: A norm of several channels, with more positions than cotangents.
        normalised: Its input before scale and shift, (b, t, G, 1).
        deltas: Per cotangent, (b, t, G, 1).
    """
    layout = layer.layout
    columns = [[normalised * d] * (layout.weight is not None) + [d] * (layout.bias is not None) for d in deltas]
    scores = torch.stack([torch.cat([column.sum(1) for column in each], dim=-1) for each in columns], dim=1)
    chosen = torch.eye(len(deltas), dtype=scores.dtype, device=scores.device).view(len(deltas), 1, -1, 1, 1)
    found = [row.expand(len(scores), -1, layout.groups, 1) for row in chosen]
    return Seen(layer, scores, found)


def arrange_call(
    layer: Layer, lay: Callable[[Tensor], Tensor], tensor: Tensor, examples: int | None, place: Place | None = None
) -> Tensor:
    """A call's input or derivative in the layer's layout, examples first.

    Without a place, the number of examples decides, where the outputs tell it: positions may come before examples,
    (t, b, d), or be flattened with them, (b t, d).

    Args:
        layer: The call's.
        lay: The layer's `activations` or `deltas`.
        tensor: The input or the derivative.
        examples: Their number, if known.
        place: Where the examples run, if known.
    """
    if place is not None and examples is not None:
        found = lay(tensor.movedim(place.axis, 0))
        if place.fast:
            return found.unflatten(0, (-1, examples)).transpose(0, 1).flatten(1, 2)
        return found.reshape(examples, -1, *found.shape[2:])
    features = layer.features(tensor)
    if features is not None and tensor.dim() - features > 1 and tensor.shape[0] != examples == tensor.shape[1]:
        tensor = tensor.transpose(0, 1)
    found = lay(tensor)
    if examples is None or examples < 2 or len(found) % examples:
        return found
    return found.reshape(examples, -1, *found.shape[2:])


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
    """How rows (R, d) become (b, t, d), and the dimension in which calls are joined.

    Args:
        positions_first: True if rows run over positions, then over examples.
        examples: b; None for rows that are an example each.
        along: The dimension in which calls are joined.
        pooled: True if examples cannot be told apart: b = 1.
    """

    positions_first: bool
    examples: int | None
    along: int = 1
    pooled: bool = False

    @staticmethod
    def of(layer: Traced, calls: Products, examples: int | None) -> Fold:
        """By the number of examples: each has as many rows in every product, or every product holds some of them."""
        counts = [call.rows(deltas[0]) for call, deltas in calls]
        if any(call.loose for call, _ in calls):
            return Fold(layer.positions_first, 1, 1, True)
        if examples is not None and all(n and n % examples == 0 for n in counts):
            return Fold(layer.positions_first, examples)
        if sum(counts) == examples and all(call.piece == (0, layer.layout.shape[0]) for call, _ in calls):
            return Fold(layer.positions_first, None, 0)
        return Fold(layer.positions_first, 1, 1, True)

    def __call__(self, rows: Tensor, call: TracedProduct) -> Tensor:
        """(R, ...) -> (b, t, ...)."""
        if self.examples is None:
            return rows.unsqueeze(1)
        b, t, shape = self.examples, len(rows) // self.examples, call.shape
        if call.place is not None:
            return rows.unflatten(0, (t, b)).transpose(0, 1) if call.place.fast else rows.unflatten(0, (b, t))
        told = len(shape) > 1 and shape[0] != b and shape[1] == b and shape[0] * b == len(rows)
        if self.positions_first or told:
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
    found = [delta.unflatten(-1, (groups, outputs)) for delta in gather_derivatives(calls, fold, layer.layout.shape[0])]
    return Seen(layer, a, found, counts=counts, pooled=fold.pooled)


def turned_part(layer: Traced, calls: Products, fold: Fold, dtype: torch.dtype) -> Seen:
    """y = x W: the inputs meet the rows of the matrix and the derivatives its columns; cotangents are more examples.

    A bias, added where the matrix is used as y = W x, has no part in it: its column is zero.
    """
    rows = layer.layout.shape[0]
    inputs = join_parts(
        [pad_rows(fold(call.inputs.to(dtype), call), call.piece, rows) for call, _ in calls], fold.along
    )
    found = gather_derivatives(calls, fold)
    left, right = inputs.repeat(len(found), 1, 1).unsqueeze(2), torch.cat(found).unsqueeze(2)
    right = right if layer.layout.bias is None else functional.pad(right, (0, 1))
    return Seen(layer, right, [left], pooled=fold.pooled, cotangents=len(found))


def token_part(layer: Traced, calls: Products, fold: Fold, dtype: torch.dtype) -> Seen:
    """Look-ups in the matrix by token."""
    tokens = join_parts([fold(call.inputs.reshape(-1), call) for call, _ in calls], fold.along)
    return Seen(layer, tokens, gather_derivatives(calls, fold), pooled=fold.pooled, skip=calls[0][0].padding)


def gather_derivatives(calls: Products, fold: Fold, rows: int | None = None) -> list[Tensor]:
    """Per cotangent, the derivatives at all products, (b, t, o).

    Args:
        calls: The products, each with its deltas.
        fold: How rows become examples and positions.
        rows: Pad to so many outputs. Default: no padding.
    """
    columns = zip(*(deltas for _, deltas in calls), strict=True)
    return [
        join_parts(
            [lay_derivative(delta, call, fold, rows) for (call, _), delta in zip(calls, column, strict=True)],
            fold.along,
        )
        for column in columns
    ]


def lay_derivative(delta: Tensor, call: TracedProduct, fold: Fold, rows: int | None) -> Tensor:
    """The derivative at one product."""
    found = fold(delta.mT if call.columns else delta.flatten(0, -2), call)
    return found if rows is None else pad_rows(found, call.piece, rows)


def pad_rows(part: Tensor, piece: tuple[int, int], rows: int) -> Tensor:
    """Some of the matrix's rows as all of them, zeros elsewhere; no copy for all."""
    start, stop = piece
    return part if stop - start == rows else functional.pad(part, (start, rows - stop))
