"""The metric's diagonal, and its blocks per unit."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.layers import Layer, Seen, layer_bias_rows, layer_squares, layer_units
from natgrad.operators import DiagonalOperator, Operator, QuasiDiagonal, Units
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics


@dataclass(frozen=True)
class Diagonal(Layerwise):
    """The metric's diagonal: the second moments of the examples' gradients. Memory: one number per parameter.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.

    Example:
        >>> opt = ng.StructuredNaturalGradient(nn.Linear(4, 3), nn.CrossEntropyLoss(), ng.Diagonal(0.95))
        >>> opt.structure
        Diagonal(decay=0.95, estimate=Sampled(samples=1), seed=0)
    """

    sums = adds = True

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        return accumulate_statistics(before, {"squares": layer_squares(seen)}, decay)

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        return DiagonalOperator(totals["squares"].reshape(-1) / weight)


@dataclass(frozen=True)
class UnitWise(Layerwise):
    """One block per unit: an output's weights and its bias.

    Memory per unit of d parameters: d^2 numbers, or 2 d. For an embedding a unit is a token.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.
        largest: Units with at most this many parameters get their whole block. Larger ones get a quasi-diagonal block:
            the diagonal and the bias's row, at the cost of a diagonal. Without a bias that is the diagonal.

    Reference:
        Le Roux et al. 2008; Ollivier 2015.

    Example:
        >>> opt = ng.StructuredNaturalGradient(nn.Linear(4, 3), nn.CrossEntropyLoss(), ng.UnitWise(0.95, largest=32))
        >>> opt.structure
        UnitWise(decay=0.95, estimate=Sampled(samples=1), seed=0, largest=32)
    """

    sums = adds = True
    symmetric = frozenset({"blocks"})
    largest: int = 64

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        if seen.layer.layout.matrix_shape[2] <= self.largest:
            fresh = {"blocks": layer_units(seen)}
        else:
            rows = {} if seen.layer.layout.bias is None else {"rows": layer_bias_rows(seen)}
            fresh = {"squares": layer_squares(seen)} | rows
        return accumulate_statistics(before, fresh, decay)

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "blocks" in totals:
            return Units(totals["blocks"] / weight)
        if "rows" not in totals:
            return DiagonalOperator(totals["squares"].reshape(-1) / weight)
        square, row = (totals[key].flatten(0, 1) / weight for key in ("squares", "rows"))
        return QuasiDiagonal(square, row[:, :-1])

    def inverted_sizes(self, layer: Layer) -> list[tuple[int, int]]:
        groups, outputs, columns = layer.layout.matrix_shape
        return [(groups * outputs, columns)] if columns <= self.largest else []
