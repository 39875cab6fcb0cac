"""TONGA's metric: a low-rank running second moment of gradients, one per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.linalg import eigh, safe_cutoff
from natgrad.operators import Diagonal, Operator, Spiked
from natgrad.structures.diagonal import layer_squares
from natgrad.structures.layers import Layer
from natgrad.structures.layerwise import Layerwise, Statistics, accumulated
from natgrad.structures.statistics import Seen


@dataclass(frozen=True)
class LowRankCovariance(Layerwise):
    """Per layer U U^T, U the `rank` leading directions of the examples' gradients (Le Roux, Manzagol & Bengio 2008).

    A running average: with b new gradients the (rank + b) vectors sqrt(decay) U, g_1, ..., g_b are turned by the
    eigenvectors of their Gram matrix, and the longest kept. Not centred. Directions that are left out count as much as
    the last one that is kept, so that the operator is exact while fewer than `rank` directions were ever seen, and
    nowhere above the metric's leading eigenvalues after. Relative damping refers to the mean of the kept eigenvalues.
    Of a batch with more than 2 rank examples the gradients are added up in 2 rank groups, each times a random sign of
    its own: their second moment stays right on average, at the cost of one gradient.
    Embeddings get the diagonal. Memory: rank * n numbers for n parameters. ValueError for a rank below 1.
    """

    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is {self.rank}, expected an integer >= 1")

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        if seen.by_token:
            return accumulated(before, {"squares": layer_squares(seen)}, decay)
        kept = [decay**0.5 * before["root"]] if before is not None and "root" in before else []
        for deltas in seen.deltas:
            fresh = torch.stack(grouped(seen.activations, deltas, 2 * self.rank)).flatten(1)
            kept = [leading(torch.cat([*kept, fresh]), min(self.rank, fresh.shape[1]))]
        return {"root": kept[0]}

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        if "squares" in totals:
            return Diagonal(totals["squares"].reshape(-1) / weight)
        return spiked(totals["root"], self.rank, weight)

    def kind(self, totals: Statistics) -> str:
        return "Diagonal" if "squares" in totals else super().kind(totals)


def grouped(a: Tensor, deltas: Tensor, count: int) -> list[Tensor]:
    """Gradients (G, o, d) of at most `count` groups of examples, each example with a sign of its own.

    sum over groups of E[h h^T] = sum over examples of g g^T, exactly so for groups of one.
    """
    if len(deltas) > count:
        signs = torch.randint(0, 2, (len(deltas),), generator=torch.Generator().manual_seed(0)) * 2 - 1
        deltas = deltas * signs.to(deltas).view(-1, 1, 1, 1)
    pairs = zip(deltas.tensor_split(min(count, len(deltas))), a.tensor_split(min(count, len(deltas))), strict=True)
    return [flat(d).mT @ flat(x) for d, x in pairs]


def flat(tensor: Tensor) -> Tensor:
    """(b, t, G, d) -> (G, b t, d)."""
    return tensor.flatten(0, 1).transpose(0, 1)


def leading(vectors: Tensor, rank: int) -> Tensor:
    """Orthogonal rows U (rank, n) with U^T U the best approximation of X^T X, X (m, n), longest first.

    Fewer rows where X has fewer. By the Gram matrix X X^T = Q C Q^T, U = Q^T X, in O(m^2 n).
    """
    gram = (vectors @ vectors.mT).double()
    turn = eigh(gram)[1].flip(-1)[:, :rank]
    return turn.mT.to(vectors.dtype) @ vectors


def spiked(root: Tensor, rank: int, weight: float) -> Spiked:
    """U^T U / weight by its eigenvectors, with the rank-th eigenvalue for everything beside them.

    Rows that are round-off beside the longest count as left out.
    """
    squares = root.square().sum(1)
    kept = squares > 10 * safe_cutoff(len(root), root.dtype) * squares.max()
    last = torch.where(kept, squares, 0).min() if len(root) == rank < root.shape[1] else squares.new_zeros(())
    vectors = torch.where(kept, squares.rsqrt(), 0).unsqueeze(1) * torch.where(kept.unsqueeze(1), root, 0)
    spectrum = torch.cat([torch.where(kept, squares, last), last.unsqueeze(0)]) / weight
    return Spiked(vectors.mT, root.new_zeros(1, 0), spectrum.unsqueeze(1), squares.mean() / weight)
