"""Kronecker factors that are never written down: tracked as low rank plus scaled identity (Kaldi's online metric)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.exchanges import ALONE, Sums
from natgrad.ground.linalg import eigh, widen_dtype
from natgrad.layers import Layer, Seen, layer_squares, layer_units
from natgrad.operators import DiagonalOperator, Operator, SpikedKronecker, Spikes, Units
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics

FLOOR = 5e-4
"""Of the largest eigenvalue: the least that a tracked direction has above the rest."""
FIRST = 3
"""Updates on the first batch, which turn the start's directions towards the data's."""


@dataclass(frozen=True)
class Tracked:
    """F = R^T diag(d) R + rho I."""

    basis: Tensor  # R, shape (..., r, D), with orthonormal rows
    values: Tensor  # d, shape (..., r)
    rest: Tensor  # rho, shape (...,)

    def trace(self) -> Tensor:
        """sum(d) + D rho, (...,)."""
        return self.values.sum(-1) + self.basis.shape[-1] * self.rest

    def pack(self) -> Tensor:
        """R, d and rho in one tensor (..., r D + r + 1)."""
        return torch.cat([self.basis.flatten(-2), self.values, self.rest.unsqueeze(-1)], dim=-1)

    def dense(self) -> Tensor:
        """F as a matrix (..., D, D)."""
        return self.spikes().dense()

    def spikes(self, scale: float | Tensor = 1.0) -> Spikes:
        """scale * F by its eigenvalues: d + rho, and rho for the rest.

        scale: A number, or a tensor of shape (..., 1).
        """
        rest = self.rest.unsqueeze(-1)
        return Spikes(self.basis.mT, scale * torch.cat([self.values + rest, rest], dim=-1))


def unpack_tracked(packed: Tensor, rank: int) -> Tracked:
    """What `Tracked.pack` packed, in storage of its own.

    packed: (..., r D + r + 1).
    """
    size = (packed.shape[-1] - 1) // rank - 1
    basis, values, rest = packed.split([rank * size, rank, 1], dim=-1)
    lead = packed.shape[:-1]
    return Tracked(basis.reshape(*lead, rank, size).contiguous().clone(), values.clone(), rest.squeeze(-1).clone())


def start(size: int, rank: int, like: Tensor, level: float = 0.0) -> Tracked:
    """d = rho = level, and directions drawn from a generator of their own."""
    rank, lead = min(rank, size - 1), like.shape[:-2]
    drawn = torch.randn(size, rank, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float64)
    basis = torch.linalg.qr(drawn)[0].mT.to(like).expand(*lead, rank, size)
    return Tracked(basis, like.new_full((*lead, rank), level), like.new_full(lead, level))


def track_rows(before: Tracked, rows: Tensor, decay: float, least: float = 0.0, sums: Sums = ALONE) -> Tracked:
    """Low rank plus scaled identity close to T = decay F + X^T X.

    One step of subspace iteration: Y = R T, Y Y^T = U C U^T, R' = C^-1/2 U^T Y, d' + rho' = C^1/2, rho' so that the
    trace is T's. Exact where R's span is T's own and T is a multiple of the identity beside it; at rest these are T's
    leading eigenvectors. d' is floored at 5e-4 of the largest C^1/2 (and at `least`).

    rows: X, (..., N, D).
    """
    rank, size = before.basis.shape[-2:]
    # all that is asked of the rows adds up over them, and so over the processes that have some each
    fresh = {"trace": rows.square().sum((-2, -1)), "images": (rows @ before.basis.mT).mT @ rows}
    fresh = sums.total(fresh if rank else {"trace": fresh["trace"]})
    trace = fresh["trace"] + decay * before.trace()
    if rank == 0:
        return Tracked(before.basis, before.values, trace / size)
    own = decay * (before.values + before.rest.unsqueeze(-1))

    def find() -> Tensor:
        images = fresh["images"] + own.unsqueeze(-1) * before.basis  # Y, (r, D)
        return iterate_subspace(images, trace, decay * before.rest, least).pack()

    return unpack_tracked(sums.solve_once(find, before.pack()), rank)


def iterate_subspace(images: Tensor, trace: Tensor, floor: Tensor, least: float) -> Tracked:
    """R', d' and rho' of `track_rows`.

    images: Y = R T, (..., r, D). trace: T's, (...,). floor: T is nowhere less, (...,).
    """
    rank, size = images.shape[-2:]
    squares, turn = (tensor.flip(-1) for tensor in eigh(images.double() @ images.double().mT))
    roots = torch.maximum(squares.clamp(min=0).sqrt(), floor.double().unsqueeze(-1))
    shown = roots > 16 * torch.finfo(images.dtype).tiny  # 1 / roots overflows below; such directions are completed
    inverses = torch.where(shown, 1 / torch.where(shown, roots, 1), 0)
    basis = orthonormal((inverses.unsqueeze(-1) * turn.mT).to(images.dtype) @ images)
    rest = ((trace - roots.sum(-1).to(trace)) / (size - rank)).clamp(min=least)
    above = roots.to(images.dtype) - rest.unsqueeze(-1)
    return Tracked(basis, torch.maximum(above, (FLOOR * roots[..., :1]).clamp(min=least).to(above)), rest)


def orthonormal(basis: Tensor) -> Tensor:
    """Orthonormal rows with the span of those of `basis` (..., r, D), completed where it lost rank: first come first.

    R' is orthonormal but for round-off, floored directions and directions that saw nothing. By Householder's
    reflections always, instead of by Cholesky where the condition is bad: no decision that a device has to wait for.
    """
    return torch.linalg.qr(basis.mT.to(widen_dtype(basis.dtype)))[0].mT.to(basis.dtype).contiguous()


def first(rows: Tensor, rank: int, sums: Sums = ALONE) -> Tracked:
    """X^T X tracked from nothing: `FIRST` steps of subspace iteration on the same rows (..., N, D)."""
    state = start(rows.shape[-1], rank, rows)
    for _ in range(FIRST):
        state = track_rows(state, rows, 0.0, sums=sums)
    return state


# Kronecker factors that are never written down: tracked as low rank plus scaled identity (Kaldi's online metric)


@dataclass(frozen=True)
class OnlineLowRank(Layerwise):
    """S (x) A per layer as in K-FAC, each factor a low rank plus a multiple of the identity.

    A is the second moment of the inputs with a 1 appended, S that of the output derivatives. The first batch is
    iterated upon three times; later ones once. Norms and depthwise convolutions get their exact blocks, embeddings the
    diagonal. Memory: rank * (size + 1) + 1 numbers per side. Neither factor is ever formed.

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
            return accumulate_statistics(before, seen.sums.total({"squares": layer_squares(seen)}), decay)
        if seen.single:
            return accumulate_statistics(before, seen.sums.total({"blocks": layer_units(seen)}), decay)
        rows, sums = (gradient_rows(seen), seen.sums.of_whole()) if self.gradient else (example_rows(seen), seen.sums)
        left = side("left", rows[0], self.rank_out, before, decay, sums)
        return left | side("right", rows[1], self.rank_in, before, decay, sums)

    def needs_past(self, seen: Seen) -> bool:
        return not (seen.by_token or seen.single)  # the basis that rows are looked at in

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
    a = seen.weigh_inputs(seen.activations)
    left = torch.cat([flat_rows(deltas) for deltas in seen.deltas], dim=-2)
    return left, (seen.share / (a.shape[0] * a.shape[1])) ** 0.5 * flat_rows(a)


def flat_rows(tensor: Tensor) -> Tensor:
    """(b, t, G, d) -> (G, b t, d), without the groups where there is one."""
    rows = tensor.flatten(0, 1).transpose(0, 1)
    return rows[0] if len(rows) == 1 else rows


def gradient_rows(seen: Seen) -> tuple[Tensor, Tensor]:
    """The columns and rows of the layer's matrix in J^T c over all processes, per cotangent c: (N, o) and (N, d)."""
    matrices = [torch.einsum("btgo,btgd->god", deltas, seen.activations) for deltas in seen.deltas]
    matrices = list(seen.sums.total({str(i): matrix for i, matrix in enumerate(matrices)}).values())
    left, right = (torch.cat(parts, dim=-2) for parts in ([m.mT for m in matrices], matrices))
    return (left[0], right[0]) if len(left) == 1 else (left, right)


def side(name: str, rows: Tensor, rank: int, before: Statistics | None, decay: float, sums: Sums) -> Statistics:
    """One factor's running total after these rows."""
    rank = min(rank, (rows.shape[-1] + 1) // 2)
    if before is None or f"{name}_basis" not in before:
        state = first(rows, rank, sums)
    else:
        state = track_rows(side_of(before, name), rows, decay, sums=sums)
    return {f"{name}_basis": state.basis, f"{name}_values": state.values, f"{name}_rest": state.rest}


def side_of(totals: Statistics, name: str) -> Tracked:
    """One factor from a layer's totals."""
    return Tracked(totals[f"{name}_basis"], totals[f"{name}_values"], totals[f"{name}_rest"])
