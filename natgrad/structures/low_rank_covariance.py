"""TONGA's metric: a low-rank running second moment of gradients, one per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import eigh, safe_cutoff
from natgrad.layers import Layer, Seen
from natgrad.operators import DiagonalOperator, Operator, Spiked
from natgrad.structures.diagonal import layer_squares
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics


@dataclass(frozen=True)
class LowRankCovariance(Layerwise):
    """Per layer U U^T, U the `rank` leading directions of the examples' gradients.

    A running average: with b new gradients the (rank + b) vectors sqrt(decay) U, g_1, ..., g_b are turned by the
    eigenvectors of their Gram matrix, and the longest kept. Not centred. Directions that are left out count as much as
    the last one that is kept, so that the operator is exact while fewer than `rank` directions were ever seen, and
    nowhere above the metric's leading eigenvalues after. Relative damping refers to the mean of the kept eigenvalues.
    Of a batch with more than 2 rank examples the gradients are added up in 2 rank groups, each times a random sign of
    its own: their second moment stays right on average, at the cost of one gradient.
    Embeddings get the diagonal. Memory: rank * n numbers for n parameters.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.
        rank: The number of directions per layer.

    Raises:
        ValueError: For a rank below 1.

    Reference:
        Le Roux, Manzagol & Bengio 2008.

    Example:
        >>> opt = ng.StructuredNaturalGradient(nn.Linear(4, 3), nn.MSELoss(), ng.LowRankCovariance(0.95, rank=8))
        >>> opt.structure
        LowRankCovariance(decay=0.95, estimate=Sampled(samples=1), seed=0, rank=8)
    """

    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("rank", self.rank)

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        if seen.by_token:
            return accumulate_statistics(before, {"squares": layer_squares(seen)}, decay)
        eigen = before if before is not None and "vectors" in before else None
        for i, deltas in enumerate(seen.deltas):
            fresh = torch.stack(group_gradients(seen.activations, deltas, 2 * self.rank)).flatten(1)
            if eigen is not None:
                past = (eigen["values"] * (1.0 if i else decay)).sqrt().unsqueeze(1) * eigen["vectors"]
                fresh = torch.cat([past, fresh])
            values, vectors = leading(fresh, min(self.rank, fresh.shape[1]))
            eigen = {"values": values, "vectors": vectors}
        assert eigen is not None
        return eigen

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "squares" in totals:
            return DiagonalOperator(totals["squares"].reshape(-1) / weight)
        return spike_values(totals["values"] / weight, totals["vectors"], self.rank)

    def kind(self, totals: Statistics) -> str:
        return "Diagonal" if "squares" in totals else super().kind(totals)


def group_gradients(a: Tensor, deltas: Tensor, count: int) -> list[Tensor]:
    """Gradients (G, o, d) of at most `count` groups of examples, each example with a sign of its own.

    sum over groups of E[h h^T] = sum over examples of g g^T, exactly so for groups of one.
    """
    if len(deltas) > count:
        signs = torch.randint(0, 2, (len(deltas),), generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
        deltas = deltas * signs.to(deltas).view(-1, 1, 1, 1)
    pairs = zip(deltas.tensor_split(min(count, len(deltas))), a.tensor_split(min(count, len(deltas))), strict=True)
    return [flat(d).mT @ flat(x) for d, x in pairs]


def flat(tensor: Tensor) -> Tensor:
    """(b, t, G, d) -> (G, b t, d)."""
    return tensor.flatten(0, 1).transpose(0, 1)


def leading(vectors: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Leading eigenvalues of X^T X (rank,), largest first, and eigenvectors (rank, n), for X (m, n); m where m < rank.

    By the Gram matrix X X^T = Q C Q^T: V = C^-1/2 Q^T X, in O(m^2 n). What is round-off beside the largest is zero,
    with vectors of zero.
    """
    values, turn = eigh((vectors @ vectors.mT).double())
    values, turn = values.flip(0)[:rank], turn.flip(1)[:, :rank]
    mask = values > 10 * safe_cutoff(len(vectors), vectors.dtype) * values[:1]
    scale = torch.where(mask, values.clamp(min=0).rsqrt(), 0)
    return torch.where(mask, values, 0).to(vectors.dtype), (turn * scale).mT.to(vectors.dtype) @ vectors


def spike_values(values: Tensor, vectors: Tensor, rank: int) -> Spiked:
    """V diag(values) V^T, with the rank-th value for everything beside V's rows: none while there are fewer."""
    last = values.min() if len(values) == rank < vectors.shape[1] else values.new_zeros(())
    spectrum = torch.cat([values, last.unsqueeze(0)]).unsqueeze(1)
    return Spiked(vectors.mT, vectors.new_zeros(1, 0), spectrum, values.mean())
