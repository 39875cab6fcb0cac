"""Kronecker factors of one pass of a layer: S of the derivatives on the left, A of the inputs on the right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.ground.linalg import KroneckerEigen
from natgrad.layers.kinds import Layer
from natgrad.layers.moments import (
    Mixed,
    Seen,
    diagonal_moment,
    input_moment,
    layer_units,
    output_moment,
    rotated_squares,
    token_moment,
    token_squares,
    total,
    turn_into_basis,
)
from natgrad.layers.pieces import Room, cut, diagonal_like

AddUp = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def layer_factors(seen: Seen, reduce: bool, room: Room, add_up: AddUp = dict) -> dict[str, Tensor]:
    """K-FAC's factors of one pass, S = E[delta delta^T] on the left and A = E[a a^T] on the right; or exact blocks.

    Args:
        seen: What the pass recorded of the layer.
        reduce: True to take positions together: means of inputs, sums of derivatives.
        room: How large a factor may be; a larger one is cut into blocks.
        add_up: Sums over all processes of a few numbers, by name.

    Returns:
        "left" and "right", shape (G, n, n); for one group (n, n), its diagonal (n,), or its blocks: (k, 1, s, s) on the
        left, (1, m, t, t) on the right. "blocks", shape (G, d, d), of a layer with one output per group. "counts" too
        where experts saw different shares of the positions.
    """
    if isinstance(seen, Mixed):
        return mixed_factors([layer_factors(part, reduce, room) for part in seen.parts], seen.share, add_up)
    if seen.single:
        return {"blocks": layer_units(seen)}
    if seen.by_token:
        rows = seen.layer.layout.outputs
        right = total([factor(deltas.unsqueeze(2), room, 0, rows) for deltas in seen.deltas])
        return layer_inputs(seen, reduce, room, right.dtype) | {"right": right}
    columns = seen.layer.layout.matrix_shape[2]
    # K-FAC-reduce of Eschenhagen et al. 2023: exact for a deep linear network whose loss sees the mean over positions
    deltas = [d.sum(1, keepdim=True) if reduce and not seen.pooled else d for d in seen.deltas]
    return {"left": total([factor(d, room, 1, columns) for d in deltas])} | layer_inputs(seen, reduce, room)


def layer_inputs(seen: Seen, reduce: bool, room: Room, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The part of `layer_factors` that takes no derivatives: A = E[a a^T] on the right, of tokens on the left.

    Args:
        seen: What the pass recorded of the layer, which has more than one output per group and is not `Mixed`.
        reduce: As for `layer_factors`.
        room: As for `layer_factors`.
        dtype: Of the frequencies of tokens; None for float32.
    """
    a = seen.activations
    if seen.by_token:  # the table's rows are tokens: the frequencies stand on the left
        counts = token_moment(a, seen.layer.layout.outputs, seen.padding, dtype or torch.float32, seen.weights)
        return {"left": seen.share * counts}
    reduce = reduce and not seen.pooled
    a = a.mean(1, keepdim=True) if reduce else a
    if seen.weights is not None:
        a = a * seen.weights.to(a).sqrt().view(-1, 1, 1, 1)
    outputs = seen.layer.layout.matrix_shape[1]
    if a.shape[2] == 1 and room.pieces(a.shape[3], a.element_size(), outputs) > 1:
        right = factor(a, room, 0, outputs) * (seen.share / (a.shape[0] * a.shape[1]))
    else:
        right = input_moment(a, seen.share)
    if seen.counts is None:
        return {"right": right}
    if seen.layer.is_routed:  # experts: another share of positions in every pass
        return {"right": right, "counts": seen.share * seen.counts / seen.activations.shape[1]}
    mean = (seen.activations.shape[1] / seen.counts).view(-1, 1, 1)  # over a group's own positions alone
    return {"right": right * (mean.square() if reduce else mean)}


def mixed_factors(parts: list[dict[str, Tensor]], share: float, add_up: AddUp = dict) -> dict[str, Tensor]:
    """One Kronecker product for a sum of several: the one with the same partial traces.

    L = sum_p L_p tr R_p and R = sum_p R_p tr L_p, over the sum's trace: exact where all parts agree in one factor. The
    traces are those of all processes, so that their sums of L and R are those of one process.
    """
    own = torch.stack([torch.stack([trace(part["left"]), trace(part["right"])]) for part in parts])
    sums = add_up({"traces": own, "share": own.new_tensor(share)})
    lefts, rights = sums["traces"].unbind(1)
    left = add_factors([part["left"] * rights[i] for i, part in enumerate(parts)])
    right = add_factors([part["right"] * lefts[i] for i, part in enumerate(parts)])
    total_trace = lefts @ rights
    return {"left": left / sums["share"], "right": right * sums["share"] / torch.where(total_trace > 0, total_trace, 1)}


def add_factors(parts: list[Tensor]) -> Tensor:
    """The sum of factors, some of which may be diagonals (n,)."""
    matrix = next((part for part in parts if part.dim() > 1), None)
    if matrix is None:
        return total(parts)
    return total([diagonal_like(part, matrix) if part.dim() == 1 else part for part in parts])


def trace(factor: Tensor) -> Tensor:
    """tr of (n, n), of its blocks, or of the diagonal (n,)."""
    return factor.sum() if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1).sum()


def factor(deltas: Tensor, room: Room, axis: int, other: int) -> Tensor:
    """The deltas' second moment, or blocks of it or its diagonal where that is too large.

    axis: 1 for left factors (k, 1, s, s), 0 for right ones (1, m, t, t). other: rows of the layer's other factor.
    """
    size = deltas.shape[3]
    pieces = room.pieces(size, deltas.element_size(), other) if deltas.shape[2] == 1 else 1
    if pieces == 1:
        return output_moment(deltas)
    return diagonal_moment(deltas) if pieces == size else output_moment(cut(deltas, pieces)).unsqueeze(axis)


def layer_spectrum(seen: Seen, eigen: KroneckerEigen) -> Tensor:
    """The pass's diagonal in a Kronecker eigenbasis: EKFAC's corrected eigenvalues.

    Args:
        seen: What the pass recorded of the layer.
        eigen: The basis.

    Returns:
        Shape (G, o, d), or (rows, e) for a table by token.
    """
    if seen.by_token:
        rows = seen.layer.layout.outputs
        turns = [turn_into_basis(deltas.unsqueeze(2), eigen.right_vectors).squeeze(2) for deltas in seen.deltas]
        return total([token_squares(seen.activations, deltas, rows, seen.padding) for deltas in turns])
    return total([rotated_squares(seen.activations, deltas, eigen) for deltas in seen.deltas])


def factor_sizes(layer: Layer, room: Room) -> list[tuple[int, int]]:
    """(count, n) of the (n, n) matrices that are inverted: factors, pieces of factors, or exact blocks.

    Args:
        layer: The layer.
        room: How large a factor may be.
    """
    groups, outputs, columns = layer.layout.matrix_shape
    if groups > 1 and outputs == 1:
        return [(groups, columns)]
    sizes = []
    for size in (columns,) if layer.by_token else (outputs, columns):
        pieces = room.pieces(size, 4, outputs + columns - size) if groups == 1 else 1
        sizes.append((groups * pieces, -(-size // pieces)))
    return sizes
