"""Kronecker factors per layer: K-FAC, and its eigenvalue correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.layers.kinds import EmbeddingLayer, Layer
from natgrad.layers.moments import (
    Mixed,
    Seen,
    diagonal_moment,
    input_moment,
    output_moment,
    reduce_positions,
    rotated_squares,
    token_moment,
    token_squares,
    total,
    turn_into_basis,
    unit_blocks,
)
from natgrad.layers.pieces import Room, cut, diagonal_like
from natgrad.linalg import KroneckerEigen, eigh
from natgrad.operators import KroneckerOperator, Operator, Spectral, Tiled, Units
from natgrad.operators.kronecker_pieces import cut_tiles, grid_of
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics
from natgrad.structures.process_sums import exchange_sums, solve_once

PART = 8
"""One in so many eigenvectors, those of the largest eigenvalues, is looked at first."""
SIDES = ("left", "right")


@dataclass(frozen=True)
class Kronecker(Layerwise):
    """S (x) A per layer (K-FAC): S = E[delta delta^T] of the output derivatives, A = E[a a^T] of the inputs.

    Exact for one example, and where inputs and derivatives are independent. An embedding's A is diagonal: token
    frequencies. Norms and depthwise convolutions, with one output per group, get their exact blocks. Memory: the
    factors.

    Arguments that are not listed here are those of `Layerwise`.

    Args:
        reduce: True to take the positions of a sequence or image together (means of inputs, sums of derivatives), for
            losses that see their mean, instead of one by one.
        factored: True for K-FAC's own damped inverse, with pi, instead of the exact one.
        largest: A factor with more rows keeps as few equal blocks of its diagonal as fit; 1 keeps the diagonal.
        budget: Likewise for a factor of more bytes.

    Raises:
        ValueError: For a largest or a budget that no row fits.

    Reference:
        Martens & Grosse 2015; convolutions: Grosse & Martens 2016; shared weights: Eschenhagen et al. 2023.
    """

    sums = True
    reduce: bool = False
    factored: bool = False
    largest: int = 8192
    budget: int = 2**28

    def __post_init__(self) -> None:
        super().__post_init__()
        Room(self.largest, self.budget)

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        return accumulate_statistics(before, factors(seen, self.reduce, Room(self.largest, self.budget)), decay)

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "blocks" in totals:
            return Units(totals["blocks"] / weight)
        left, right = totals["left"] / weight, totals["right"] / weight
        if "counts" in totals:  # the mean over an expert's own positions
            share = totals["counts"].view(-1, 1, 1)
            right = totals["right"] / torch.where(share > 0, share, 1)
        if is_cut(totals):
            return Tiled.kronecker(left, right, layer.layout.matrix_shape[1:], factored=self.factored)
        return KroneckerOperator(left, right, factored=self.factored)

    def kind(self, totals: Statistics) -> str:
        return super().kind(totals) + blocks_of(totals)

    def inverted_sizes(self, layer: Layer) -> list[tuple[int, int]]:
        return factor_sizes(layer, Room(self.largest, self.budget))


@dataclass(frozen=True)
class EigenKronecker(Layerwise):
    """K-FAC's eigenbasis with the metric's own diagonal in it (EKFAC): closer to the metric in Frobenius norm, always.

    The diagonal is that of the examples' own gradients, exact for shared weights too. With a running average, earlier
    diagonals move to the new basis as the diagonal of what they were. Memory: the factors, their eigenvectors and one
    number per parameter.

    Arguments that are not listed here are those of `Layerwise`.

    Args:
        reduce: As in `Kronecker`.
        largest: As in `Kronecker`.
        stale: A share in [0, 1). A factor's eigenvectors are kept from the last update while V^T M V is off its
            diagonal by at most this share of its norm, which one product tells; 0 takes an eigendecomposition at every
            update.
        budget: As in `Kronecker`, in bytes.

    Raises:
        ValueError: For a largest or a budget that no row fits, or `stale` outside of [0, 1).

    Reference:
        George et al. 2018.
    """

    sums = True
    reduce: bool = False
    largest: int = 8192
    stale: float = 0.0
    budget: int = 2**28

    def __post_init__(self) -> None:
        super().__post_init__()
        Room(self.largest, self.budget)
        if not 0 <= self.stale < 1:
            raise ValueError(f"stale is {self.stale}, expected a share in [0, 1)")

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        room = Room(self.largest, self.budget)
        if seen.single:
            return accumulate_statistics(before, factors(seen, self.reduce, room), decay)
        moments = None if before is None else {side: before[side] for side in ("left", "right")}
        fresh = {side: moment for side, moment in factors(seen, self.reduce, room).items() if side in SIDES}
        totals = accumulate_statistics(moments, fresh, decay)
        vectors = {side: self._vectors(side, totals, before) for side in ("left", "right")}
        kept = {f"{side}_vectors": basis for side, basis in vectors.items() if basis is not None}
        eigen = basis_of(totals | kept)
        spectrum = exchange_sums({"spectrum": correct_eigenvalues(seen, eigen)})["spectrum"]
        if before is not None:
            same = all(before[key] is basis for key, basis in kept.items())
            past = before["spectrum"] if same else move_spectrum(before["spectrum"], basis_of(before), eigen)
            spectrum = spectrum + decay * past
        return totals | {"spectrum": spectrum} | kept

    def _vectors(self, side: str, totals: Statistics, before: Statistics | None) -> Tensor | None:
        """A factor's eigenvectors, the last ones where they still fit; None for a diagonal."""
        if totals[side].dim() == 1:
            return None
        old = None if before is None else before.get(f"{side}_vectors")

        def find() -> Tensor:
            kept = old is not None and self.stale and fits(totals[side], old, self.stale)
            return old if kept and old is not None else eigh(totals[side])[1]

        return solve_once(find, totals[side])

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "blocks" in totals:
            return Units(totals["blocks"] / weight)
        found = Spectral(basis_of(totals), totals["spectrum"] / weight)
        if not is_cut(totals):
            return found
        return Tiled(found, grid_of(tuple(found.spectrum.shape)), layer.layout.matrix_shape[1:])

    def kind(self, totals: Statistics) -> str:
        return super().kind(totals) + blocks_of(totals)

    def inverted_sizes(self, layer: Layer) -> list[tuple[int, int]]:
        return factor_sizes(layer, Room(self.largest, self.budget))


def factor_sizes(layer: Layer, room: Room) -> list[tuple[int, int]]:
    """(count, n) of the (n, n) matrices that are inverted: factors, pieces of factors, or exact blocks."""
    groups, outputs, columns = layer.layout.matrix_shape
    if groups > 1 and outputs == 1:
        return [(groups, columns)]
    found = []
    for size in (columns,) if isinstance(layer, EmbeddingLayer) else (outputs, columns):
        pieces = room.pieces(size, 4) if groups == 1 else 1
        found.append((groups * pieces, -(-size // pieces)))
    return found


def is_cut(totals: Statistics) -> bool:
    """Whether a factor is block-diagonal: (k, 1, s, s) on the left, (1, m, t, t) on the right."""
    return any(totals[side].dim() == 4 for side in SIDES if side in totals)


def blocks_of(totals: Statistics) -> str:
    """What to say of factors that are cut."""
    cut_sides = [side for side in SIDES if side in totals and totals[side].dim() == 4]
    cuts = [f"{side} in {totals[side].shape[:2].numel()} blocks" for side in cut_sides]
    return f" ({', '.join(cuts)})" if cuts else ""


def fits(factor: Tensor, vectors: Tensor, stale: float) -> bool:
    """Whether the misfit is at most `stale`. Of some eigenvectors alone it is an upper bound.

    The largest eigenvalues come last, and mostly hold nearly all of the norm: then a part of the product tells.
    """
    largest = vectors[..., -max(1, vectors.shape[-1] // PART) :]
    return bool(misfit(factor, largest) <= stale) or bool(misfit(factor, vectors) <= stale)


def misfit(factor: Tensor, vectors: Tensor) -> Tensor:
    """|off-diagonal part of V^T M V| / |M| for M (..., n, n), the largest over the blocks, by one product."""
    found = (vectors * (factor @ vectors)).sum(-2).square().sum(-1)
    whole = factor.square().sum((-2, -1))
    return (1 - torch.where(whole > 0, found / whole, 1)).clamp(min=0).sqrt().max()


def factors(seen: Seen, reduce: bool, room: Room) -> Statistics:
    """left S and right A of one pass, or exact blocks.

    (G, n, n); for one group (n, n), its diagonal (n,), or its blocks: (k, 1, s, s) on the left, (1, m, t, t) on the
    right.
    """
    if isinstance(seen, Mixed):
        return mixed_factors([factors(part, reduce, room) for part in seen.parts], seen.share)
    if seen.single:
        return {"blocks": total([unit_blocks(seen.activations, deltas) for deltas in seen.deltas])}
    if seen.by_token:  # the table's rows are tokens: the frequencies stand on the left
        moment = total([factor(deltas.unsqueeze(2), room, 0) for deltas in seen.deltas])
        counts = token_moment(seen.activations, seen.layer.layout.outputs, seen.padding, moment.dtype)
        return {"left": seen.share * counts, "right": moment}
    reduce = reduce and not seen.pooled
    pairs = [reduce_positions(seen.activations, d) if reduce else (seen.activations, d) for d in seen.deltas]
    a = pairs[0][0]
    if a.shape[2] == 1 and room.pieces(a.shape[3], a.element_size()) > 1:
        right = factor(a, room, 0) * (seen.share / (a.shape[0] * a.shape[1]))
    else:
        right = input_moment(a, seen.share)
    left = total([factor(deltas, room, 1) for _, deltas in pairs])
    if seen.layer.is_routed and seen.counts is not None:  # experts: another share of positions in every pass
        return {"left": left, "right": right, "counts": seen.share * seen.counts / seen.activations.shape[1]}
    if seen.counts is not None:
        mean = (seen.activations.shape[1] / seen.counts).view(-1, 1, 1)  # over a group's own positions alone
        right = right * (mean.square() if reduce else mean)
    return {"left": left, "right": right}


def mixed_factors(parts: list[Statistics], share: float) -> Statistics:
    """One Kronecker product for a sum of several: the one with the same partial traces.

    L = sum_p L_p tr R_p and R = sum_p R_p tr L_p, over the sum's trace: exact where all parts agree in one factor.
    """
    left, right = (
        add_factors([part[side] * trace(part[other]) for part in parts])
        for side, other in (("left", "right"), ("right", "left"))
    )
    whole = trace(left)
    return {"left": left / share, "right": right * share / torch.where(whole > 0, whole, 1)}


def add_factors(parts: list[Tensor]) -> Tensor:
    """The sum of factors, some of which may be diagonals (n,)."""
    whole = next((part for part in parts if part.dim() > 1), None)
    if whole is None:
        return total(parts)
    return total([diagonal_like(part, whole) if part.dim() == 1 else part for part in parts])


def trace(factor: Tensor) -> Tensor:
    """tr of (n, n), of its blocks, or of the diagonal (n,)."""
    return factor.sum() if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1).sum()


def factor(deltas: Tensor, room: Room, axis: int) -> Tensor:
    """The deltas' second moment, or blocks of it or its diagonal where that is too large.

    axis: 1 for left factors (k, 1, s, s), 0 for right ones (1, m, t, t).
    """
    size = deltas.shape[3]
    pieces = room.pieces(size, deltas.element_size()) if deltas.shape[2] == 1 else 1
    if pieces == 1:
        return output_moment(deltas)
    return diagonal_moment(deltas) if pieces == size else output_moment(cut(deltas, pieces)).unsqueeze(axis)


def correct_eigenvalues(seen: Seen, eigen: KroneckerEigen) -> Tensor:
    """The pass's diagonal in a Kronecker eigenbasis, in the shape of the eigenvalues."""
    shape = eigen.values().shape
    if seen.by_token:
        rows = seen.layer.layout.outputs
        turns = [turn_into_basis(deltas.unsqueeze(2), eigen.right_vectors).squeeze(2) for deltas in seen.deltas]
        found = [token_squares(seen.activations, deltas, rows, seen.padding) for deltas in turns]
    else:
        found = [rotated_squares(seen.activations, deltas, eigen) for deltas in seen.deltas]
    if len(shape) < 4:
        return total(found).reshape(shape)
    return cut_tiles(total(found).flatten(0, -2), grid_of(tuple(shape)))


def move_spectrum(spectrum: Tensor, old: KroneckerEigen, new: KroneckerEigen) -> Tensor:
    """The diagonal, in the new basis, of the operator with this spectrum in the old one."""
    if new.left_vectors is not None and old.left_vectors is not None:
        spectrum = (new.left_vectors.mT @ old.left_vectors).square() @ spectrum
    if new.right_vectors is not None and old.right_vectors is not None:
        spectrum = spectrum @ (old.right_vectors.mT @ new.right_vectors).square()
    return spectrum


def basis_of(totals: Statistics) -> KroneckerEigen:
    """The eigenbasis in an EKFAC layer's totals; the factors' diagonals stand for their eigenvalues' shape."""
    sides = []
    for side in ("left", "right"):
        factor = totals[side]
        values = factor if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1)
        sides += [values, totals.get(f"{side}_vectors")]
    return KroneckerEigen(*sides)
