"""Kronecker factors that are never written down: tracked as low rank plus scaled identity (Kaldi's online metric)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import check_integer
from natgrad.layers import Layer, Seen, layer_squares, layer_units
from natgrad.operators import DiagonalOperator, Operator, SpikedKronecker, Units
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics
from natgrad.structures.low_rank_tracking import Tracked, first, track_rows
from natgrad.structures.running_average import exchange_sums, sums_are_whole


@dataclass(frozen=True)
class OnlineLowRank(Layerwise):
    """S (x) A per layer as in K-FAC, each factor a low rank plus a multiple of the identity.

    A is the second moment of the inputs with a 1 appended, S that of the output derivatives. The first batch is
    iterated
    upon three times; later ones once. Norms and depthwise convolutions get their exact blocks, embeddings the diagonal.
    Memory: rank * (size + 1) + 1 numbers per side. Neither factor is ever formed.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.
        rank_in: The rank of A at most; never above half its size, rounded up.
        rank_out: The rank of S at most, likewise.
        gradient: True to learn the factors from the rows and columns of the batch's gradient instead of from the
            examples (as the 2020 report's runs did), A then divided by its trace. With drawn labels the gradient's
            second moment is the Fisher, with `ng.Empirical()` it holds the mean gradient too.
        factored: True to smooth each factor (Kaldi's alpha is sqrt(damping)) instead of damping their product exactly.

    Raises:
        ValueError: For a rank below 1.

    Reference:
        Povey et al. 2015.

    Example:
        >>> model, x, y = nn.Linear(40, 30), torch.randn(20, 40), torch.randn(20, 30)
        >>> opt = ng.StructuredNaturalGradient(model, nn.MSELoss(), ng.OnlineLowRank(0.95, rank_in=5, rank_out=5))
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
        >>> opt.state_report().status
        'stepped'
    """

    sums = True
    compares = False
    rank_in: int = 20
    rank_out: int = 80
    gradient: bool = False
    factored: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank_in", "rank_out"):
            rank = getattr(self, name)
            check_integer(name, rank)

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        if seen.by_token:
            return accumulate_statistics(before, {"squares": layer_squares(seen)}, decay)
        if seen.single:
            return accumulate_statistics(before, {"blocks": layer_units(seen)}, decay)
        if not self.gradient:
            return self._sides(*example_rows(seen), before, decay)
        left, right = gradient_rows(seen)
        with sums_are_whole():  # the gradient is that of all processes already
            return self._sides(left, right, before, decay)

    def needs_past(self, seen: Seen) -> bool:
        return not (seen.by_token or seen.single)  # the basis that rows are looked at in

    def _sides(self, left: Tensor, right: Tensor, before: Statistics | None, decay: float) -> Statistics:
        return side("left", left, self.rank_out, before, decay) | side("right", right, self.rank_in, before, decay)

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "squares" in totals:
            return DiagonalOperator(totals["squares"].reshape(-1) / weight)
        if "blocks" in totals:
            return Units(totals["blocks"] / weight)
        left, right = side_of(totals, "left"), side_of(totals, "right")
        scale: float | Tensor = 1 / weight
        if self.gradient:  # both sides have the gradient's square as trace, which the product must have once
            scale = torch.where(right.trace() > 0, 1 / right.trace(), 0).unsqueeze(-1)
        return SpikedKronecker(left.spikes(1 / weight), right.spikes(scale), factored=self.factored)

    def kind(self, totals: Statistics) -> str:
        return "Diagonal" if "squares" in totals else "UnitWise" if "blocks" in totals else super().kind(totals)


def example_rows(seen: Seen) -> tuple[Tensor, Tensor]:
    """Rows (N, o) of all derivatives and (N, d) of all inputs, whose second moments are K-FAC's S and A.

    N counts examples, positions (and cotangents); with groups, (G, N, o) and (G, N, d).
    """
    a = seen.activations
    left = torch.cat([flat_rows(deltas) for deltas in seen.deltas], dim=-2)
    return left, (seen.share / (a.shape[0] * a.shape[1])) ** 0.5 * flat_rows(a)


def flat_rows(tensor: Tensor) -> Tensor:
    """(b, t, G, d) -> (G, b t, d), without the groups where there is one."""
    found = tensor.flatten(0, 1).transpose(0, 1)
    return found[0] if len(found) == 1 else found


def gradient_rows(seen: Seen) -> tuple[Tensor, Tensor]:
    """The columns and the rows of the layer's matrix in J^T c, for every cotangent c: (N, o) and (N, d)."""
    matrices = [torch.einsum("btgo,btgd->god", deltas, seen.activations) for deltas in seen.deltas]
    matrices = list(exchange_sums({str(i): matrix for i, matrix in enumerate(matrices)}).values())
    left, right = (torch.cat(parts, dim=-2) for parts in ([m.mT for m in matrices], matrices))
    return (left[0], right[0]) if len(left) == 1 else (left, right)


def side(name: str, rows: Tensor, rank: int, before: Statistics | None, decay: float) -> Statistics:
    """One factor's running total after these rows."""
    rank = min(rank, (rows.shape[-1] + 1) // 2)
    if before is None or f"{name}_basis" not in before:
        found = first(rows, rank)
    else:
        found = track_rows(side_of(before, name), rows, decay)
    return {f"{name}_basis": found.basis, f"{name}_values": found.values, f"{name}_rest": found.rest}


def side_of(totals: Statistics, name: str) -> Tracked:
    """One factor from a layer's totals."""
    return Tracked(totals[f"{name}_basis"], totals[f"{name}_values"], totals[f"{name}_rest"])
