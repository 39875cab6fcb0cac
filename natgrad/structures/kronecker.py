"""Kronecker factors per layer: K-FAC, and its eigenvalue correction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from natgrad.ground.constants import TINY
from natgrad.ground.exchanges import Sums
from natgrad.ground.linalg import KroneckerEigen, eigh
from natgrad.layers import Layer, Room, Seen, factor_sizes, layer_factors, layer_inputs, layer_spectrum
from natgrad.operators import KroneckerOperator, Operator, Spectral, Tiled, Units
from natgrad.structures.base import accumulate_total
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics

PART = 8
"""One in so many eigenvectors, those of the largest eigenvalues, is looked at first."""
SIDES = ("left", "right")
FEWEST = 1024
"""Rows of a pass that factors are taken from, if there are as many."""


class FactorPair(Layerwise):
    """What structures of two factors have in common: how large a factor is, and what its inputs' second moment is."""

    reduce: bool
    largest: int
    budget: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.room  # checks its numbers

    @cached_property
    def room(self) -> Room:
        """How large a factor may be."""
        return Room(self.largest, self.budget)

    def inputs(self, layer: Layer, totals: Statistics, weight: float) -> tuple[Tensor, bool] | None:
        return average_inputs(layer, totals, weight)

    def kind(self, totals: Statistics) -> str:
        return super().kind(totals) + describe_cuts(totals)

    def inverted_sizes(self, layer: Layer) -> list[tuple[int, int]]:
        return factor_sizes(layer, self.room)


@dataclass(frozen=True)
class Kronecker(FactorPair):
    """S (x) A per layer (K-FAC): S = E[delta delta^T] of the output derivatives, A = E[a a^T] of the inputs.

    Exact for one example, and where inputs and derivatives are independent. An embedding's A is diagonal: token
    frequencies. Norms and depthwise convolutions, with one output per group, get their exact blocks. Memory: the
    factors.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.
        reduce: True to take the positions of a sequence or image together (means of inputs, sums of derivatives), for
            losses that see their mean, instead of one by one.
        factored: True for K-FAC's own damped inverse, with pi, instead of the exact one.
        largest: A factor with more rows keeps as few equal blocks of its diagonal as fit; 1 keeps the diagonal. One of
            more than 2048 rows, and of more than ten times the other's, has blocks of at most 256.
        budget: Likewise for a factor of more bytes.
        rows: An optimiser takes the factors of a pass from so many rows (examples times positions) for each row of the
            larger factor, and from 1024 at the least, where the pass has half as many again. Default: from all.

    Raises:
        ValueError: For a largest or a budget that no row fits, or rows that are not > 0.

    Reference:
        Martens & Grosse 2015; convolutions: Grosse & Martens 2016; shared weights: Eschenhagen et al. 2023.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(20, 4), torch.randint(3, (20,))
        >>> opt = ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), ng.Kronecker(0.95, factored=True))
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
        >>> opt.report()[0].parameter, opt.report()[0].structure
        ('weight', 'Kronecker')
    """

    sums = adds = True
    symmetric = frozenset({"left", "right", "blocks"})
    reduce: bool = False
    factored: bool = False
    largest: int = 8192
    budget: int = 2**28
    rows: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rows > 0:
            raise ValueError(f"rows is {self.rows}, expected a number > 0; math.inf for all rows of a pass")

    def rows_needed(self, layer: Layer) -> float:
        return math.inf if self.reduce else max(FEWEST, self.rows * max(layer.layout.matrix_shape[1:]))

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        if not seen.deltas:
            return accumulate_inputs(seen, before, decay, self.reduce, self.room)
        return accumulate_statistics(before, layer_factors(seen, self.reduce, self.room), decay)

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "blocks" in totals:
            return Units(totals["blocks"] / weight)
        left, right = average_factors(layer, totals, weight)
        if is_cut(totals):
            return Tiled.kronecker(left, right, layer.layout.matrix_shape[1:], factored=self.factored)
        return KroneckerOperator(left, right, factored=self.factored)


@dataclass(frozen=True)
class EigenKronecker(FactorPair):
    """K-FAC's eigenbasis with the metric's own diagonal in it (EKFAC): closer to the metric in Frobenius norm, always.

    The diagonal is that of the examples' own gradients, exact for shared weights too. With a running average, earlier
    diagonals move to the new basis as the diagonal of what they were. Memory: the factors, their eigenvectors and one
    number per parameter.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.
        reduce: As in `Kronecker`.
        largest: As in `Kronecker`.
        stale: A share in [0, 1). A factor's eigenvectors are kept from the last update while V^T M V is off its
            diagonal by at most this share of its norm, which one product measures; 0 takes an eigendecomposition at
            every update.
        budget: As in `Kronecker`, in bytes.

    Raises:
        ValueError: For a largest or a budget that no row fits, or `stale` outside of [0, 1).

    Reference:
        George et al. 2018.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(20, 4), torch.randint(3, (20,))
        >>> opt = ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), ng.EigenKronecker(0.95))
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
        >>> opt.state_report().status
        'stepped'
    """

    sums = True
    reduce: bool = False
    largest: int = 8192
    stale: float = 0.0
    budget: int = 2**28

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stale < 1:
            raise ValueError(f"stale is {self.stale}, expected a share in [0, 1)")

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        if not seen.deltas:
            return accumulate_inputs(seen, before, decay, self.reduce, self.room)
        if seen.single:
            return accumulate_statistics(before, seen.sums.total(layer_factors(seen, self.reduce, self.room)), decay)
        before = before if before is not None and "spectrum" in before else None  # else of inputs alone
        totals = accumulate_statistics(before, seen.sums.total(layer_factors(seen, self.reduce, self.room)), decay)
        vectors = {side: self._vectors(side, totals, before, seen.sums) for side in ("left", "right")}
        bases = {f"{side}_vectors": basis for side, basis in vectors.items() if basis is not None}
        eigen = basis_of(totals | bases)
        spectrum = seen.sums.total({"spectrum": correct_eigenvalues(seen, eigen)})["spectrum"]
        if before is not None:
            # by value: with several processes, eigenvectors that were kept come from their owner as a copy
            same = self.stale > 0 and all(torch.equal(before[key], basis) for key, basis in bases.items())
            past = before["spectrum"] if same else move_spectrum(before["spectrum"], basis_of(before), eigen)
            spectrum = accumulate_total(past, spectrum, decay)
        return totals | {"spectrum": spectrum} | bases

    def needs_past(self, seen: Seen) -> bool:
        return False  # the owner alone finds eigenvectors and moves the past's diagonal; others send sums of the pass

    def _vectors(self, side: str, totals: Statistics, before: Statistics | None, sums: Sums) -> Tensor | None:
        """A factor's eigenvectors, the last ones where they still fit; None for a diagonal."""
        if totals[side].dim() == 1:
            return None
        old = None if before is None else before.get(f"{side}_vectors")

        def find() -> Tensor:
            usable = old is not None and self.stale and fits(totals[side], old, self.stale)
            return old if usable and old is not None else eigh(totals[side])[1]

        return sums.solve_once(find, totals[side])

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "blocks" in totals:
            return Units(totals["blocks"] / weight)
        if "spectrum" not in totals:
            return KroneckerOperator(*average_factors(layer, totals, weight))
        spectral = Spectral(basis_of(totals | find_eigenvalues(totals)), totals["spectrum"] / weight)
        if not is_cut(totals):
            return spectral
        return Tiled.spectral(spectral, layer.layout.matrix_shape[1:])


def accumulate_inputs(seen: Seen, before: Statistics | None, decay: float, reduce: bool, room: Room) -> Statistics:
    """The totals of a layer's inputs alone, after a pass that tells nothing of derivatives: these are forgotten."""
    past = None if before is None else before.get("left")
    # tokens have no dtype, and another process may not know the past's
    fresh = seen.sums.total(layer_inputs(seen, reduce, room, torch.float64))
    if "left" in fresh:
        dtype = torch.float32 if past is None else past.dtype
        fresh = {key: total.to(dtype) for key, total in fresh.items()}
    return accumulate_statistics(before, fresh, decay)


def average_factors(layer: Layer, totals: Statistics, weight: float) -> list[Tensor]:
    """S on the left and A on the right, for tokens A on the left; S is white where inputs alone are known."""
    groups, outputs, columns = layer.layout.matrix_shape
    factors = list[Tensor]()
    for side, size in (("left", outputs), ("right", columns)):
        if side in totals:
            factors.append(average_side(side, layer, totals, weight))
        else:
            ones = torch.diag_embed(next(iter(totals.values())).new_ones(size))
            factors.append(ones.expand(groups, size, size) if groups > 1 else ones)
    return factors


def average_side(side: str, layer: Layer, totals: Statistics, weight: float) -> Tensor:
    """One factor: that of the inputs over its own positions, that of the derivatives over all rows of the loss."""
    if side != ("left" if layer.by_token else "right") or "counts" not in totals:  # as in older checkpoints
        return totals[side] / weight
    counts = totals["counts"].clamp(min=TINY)  # nothing was added up where nothing was counted
    return totals[side] / (counts.view(-1, 1, 1) if totals[side].dim() == 3 else counts)


def average_inputs(layer: Layer, totals: Statistics, weight: float) -> tuple[Tensor, bool] | None:
    """A, shape (n, n) or (groups, n, n), of factors that are cut its diagonal (n,), and whether of tokens (n,)."""
    if "blocks" in totals:
        return None
    left, right = totals.get("left"), totals.get("right")
    if left is not None and (right is None or (left.dim() == 1 and (layer.by_token or right.dim() > 1))):
        return average_side("left", layer, totals, weight), True
    moment = average_side("right", layer, totals, weight)
    if moment.dim() == 4:
        return moment.diagonal(dim1=-2, dim2=-1).flatten()[: layer.layout.matrix_shape[2]], False
    return moment, False


def is_cut(totals: Statistics) -> bool:
    """Whether a factor is block-diagonal: (k, 1, s, s) on the left, (1, m, t, t) on the right."""
    return any(totals[side].dim() == 4 for side in SIDES if side in totals)


def describe_cuts(totals: Statistics) -> str:
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
    diagonal = (vectors * (factor @ vectors)).sum(-2).square().sum(-1)
    squares = factor.square().sum((-2, -1))
    return (1 - torch.where(squares > 0, diagonal / squares, 1)).clamp(min=0).sqrt().max()


def correct_eigenvalues(seen: Seen, eigen: KroneckerEigen) -> Tensor:
    """The pass's diagonal in a Kronecker eigenbasis, in the shape of the eigenvalues."""
    shape, spectrum = tuple(eigen.values().shape), layer_spectrum(seen, eigen)
    return spectrum.reshape(shape) if len(shape) < 4 else Tiled.cut_matrix(spectrum.flatten(0, -2), shape)


def move_spectrum(spectrum: Tensor, old: KroneckerEigen, new: KroneckerEigen) -> Tensor:
    """The diagonal, in the new basis, of the operator with this spectrum in the old one."""
    if new.left_vectors is not None and old.left_vectors is not None:
        spectrum = (new.left_vectors.mT @ old.left_vectors).square() @ spectrum
    if new.right_vectors is not None and old.right_vectors is not None:
        spectrum = spectrum @ (old.right_vectors.mT @ new.right_vectors).square()
    return spectrum


def find_eigenvalues(totals: Statistics) -> Statistics:
    """The diagonals V^T M V of an EKFAC layer's factors in their eigenvectors, by the factor's side: "left_values"."""
    values = dict[str, Tensor]()
    for side in SIDES:
        if (vectors := totals.get(f"{side}_vectors")) is not None:
            values[f"{side}_values"] = (vectors * (totals[side] @ vectors)).sum(-2)
    return values


def basis_of(totals: Statistics) -> KroneckerEigen:
    """The eigenbasis in an EKFAC layer's totals; without eigenvalues the factors' diagonals stand for their shape."""
    sides = []
    for side in SIDES:
        factor = totals[side]
        values = totals.get(f"{side}_values", factor if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1))
        sides += [values, totals.get(f"{side}_vectors")]
    return KroneckerEigen(*sides)
