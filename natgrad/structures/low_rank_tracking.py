"""The online natural gradient's algebra: a second moment tracked as low rank plus scaled identity.

Povey, Zhang & Khudanpur 2015, as Kaldi has it. For rows X (N, D), with R (r, D) of orthonormal rows:

    F = R^T diag(d) R + rho I                     what is tracked
    G = F + alpha tr(F) / D I                     what is inverted
    F'  ~  decay F + X^T X                        the update, by one step of subspace iteration
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.linalg import all_finite, eigh
from natgrad.operators.low_rank_plus_identity import Spikes
from natgrad.structures.running_average import exchange_sums, solve_once

FLOOR = 5e-4
"""Of the largest eigenvalue: the least that a tracked direction has above the rest."""
FIRST = 3
"""Updates on the first batch, which turn the start's directions towards the data's."""


@dataclass(frozen=True)
class Tracked:
    """F = R^T diag(d) R + rho I.

    Args:
        basis: R, shape (..., r, D), with orthonormal rows.
        values: d, shape (..., r).
        rest: rho, shape (...,).
    """

    basis: Tensor
    values: Tensor
    rest: Tensor

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

        Args:
            scale: A number, or a tensor of shape (..., 1).
        """
        rest = self.rest.unsqueeze(-1)
        return Spikes(self.basis.mT, scale * torch.cat([self.values + rest, rest], dim=-1))


def unpack_tracked(packed: Tensor, rank: int) -> Tracked:
    """What `Tracked.pack` packed, in storage of its own.

    Args:
        packed: Shape (..., r D + r + 1).
        rank: r, at least 1.
    """
    size = (packed.shape[-1] - 1) // rank - 1
    basis, values, rest = packed.split([rank * size, rank, 1], dim=-1)
    lead = packed.shape[:-1]
    return Tracked(basis.reshape(*lead, rank, size).contiguous().clone(), values.clone(), rest.squeeze(-1).clone())


def start(size: int, rank: int, like: Tensor, level: float = 0.0) -> Tracked:
    """d = rho = level, and directions drawn from a generator of their own.

    Args:
        size: D.
        rank: r, at most D - 1 is taken: the rest needs a direction.
        like: A tensor whose leading dimensions, dtype and device the result has.
        level: d and rho.
    """
    rank, lead = min(rank, size - 1), like.shape[:-2]
    drawn = torch.randn(size, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = torch.linalg.qr(drawn)[0].mT.to(like).expand(*lead, rank, size)
    return Tracked(basis, like.new_full((*lead, rank), level), like.new_full(lead, level))


def track_rows(before: Tracked, rows: Tensor, decay: float, least: float = 0.0) -> Tracked:
    """Low rank plus scaled identity close to T = decay F + X^T X.

    One step of subspace iteration: Y = R T, Y Y^T = U C U^T, R' = C^-1/2 U^T Y, d' + rho' = C^1/2, rho' so that the
    trace is T's. Exact where R's span is T's own and T is a multiple of the identity beside it; at rest these are T's
    leading eigenvectors. d' is floored at 5e-4 of the largest C^1/2 (and at `least`).

    Args:
        before: F.
        rows: X, shape (..., N, D).
        decay: Weight of F, >= 0.
        least: Floor of d' and rho'.

    Returns:
        F'. NaN throughout for rows that are not finite. With several processes: one of them computes it for all.
    """
    rank, size = before.basis.shape[-2:]
    # all that is asked of the rows adds up over them, and so over the processes that have some each
    fresh = {"trace": rows.square().sum((-2, -1)), "images": (rows @ before.basis.mT).mT @ rows}
    fresh = exchange_sums(fresh if rank else {"trace": fresh["trace"]})
    trace = fresh["trace"] + decay * before.trace()
    if rank == 0:
        return Tracked(before.basis, before.values, trace / size)
    own = decay * (before.values + before.rest.unsqueeze(-1))

    def find() -> Tensor:
        images = fresh["images"] + own.unsqueeze(-1) * before.basis  # Y, (r, D)
        return iterate_subspace(images, trace, decay * before.rest, least).pack()

    return unpack_tracked(solve_once(find, before.pack()), rank)


def iterate_subspace(images: Tensor, trace: Tensor, floor: Tensor, least: float) -> Tracked:
    """R', d' and rho' of `track_rows`.

    Args:
        images: Y = R T, shape (..., r, D).
        trace: T's, shape (...,).
        floor: T is nowhere less, shape (...,).
        least: Floor of d' and rho'.
    """
    rank, size = images.shape[-2:]
    squares, turn = (found.flip(-1) for found in eigh(images.double() @ images.double().mT))
    roots = torch.maximum(squares.clamp(min=0).sqrt(), floor.double().unsqueeze(-1))
    shown = roots > 16 * torch.finfo(images.dtype).tiny  # 1 / roots overflows below; such directions are completed
    kept = torch.where(shown, 1 / torch.where(shown, roots, 1), 0)
    basis = orthonormal((kept.unsqueeze(-1) * turn.mT).to(images.dtype) @ images)
    rest = ((trace - roots.sum(-1).to(trace)) / (size - rank)).clamp(min=least)
    above = roots.to(images.dtype) - rest.unsqueeze(-1)
    return Tracked(basis, torch.maximum(above, (FLOOR * roots[..., :1]).clamp(min=least).to(above)), rest)


def orthonormal(basis: Tensor) -> Tensor:
    """Orthonormal rows with the span of those of `basis` (..., r, D), completed where it lost rank: first come first.

    R' is orthonormal but for round-off, floored directions and directions that saw nothing. By Householder's
    reflections always, instead of by Cholesky where the condition is bad: no decision that a device has to wait for.
    """
    return torch.linalg.qr(basis.mT)[0].mT.contiguous()


def first(rows: Tensor, rank: int) -> Tracked:
    """X^T X tracked from nothing: `FIRST` steps of subspace iteration on the same rows (..., N, D)."""
    found = start(rows.shape[-1], rank, rows)
    for _ in range(FIRST):
        found = track_rows(found, rows, 0.0)
    return found


def smoothing(state: Tracked, alpha: float) -> Tensor:
    """W = E^1/2 R with G^-1 = (I - W^T W) / beta: E = d / (beta + d), beta = rho (1 + alpha) + alpha sum(d) / D."""
    size = state.basis.shape[-1]
    beta = state.rest * (1 + alpha) + alpha * state.values.sum(-1) / size
    return (state.values / (beta.unsqueeze(-1) + state.values)).sqrt().unsqueeze(-1) * state.basis


def smooth_rows(rows: Tensor, state: Tracked, alpha: float) -> Tensor:
    """X G^-1 scaled back to X's Frobenius norm, for rows X (N, D): X - (X W^T) W, times a scalar."""
    weights = smoothing(state, alpha)
    found = rows - (rows @ weights.mT) @ weights
    length = torch.linalg.vector_norm(found)
    return found * torch.where(length > 0, torch.linalg.vector_norm(rows) / length, 1)


@dataclass(frozen=True)
class OnlineSide:
    """One side of a layer in Kaldi's loop: X in, X G^-1 out, G from the batches before.

    Defaults are as published, the rank's for inputs: min(20, (D + 1) / 2); it is 80 for output derivatives.

    Args:
        rank: Of F.
        period: Batches between updates, after the first ten.
        history: Rows that the running average remembers.
        alpha: Smoothing.
    """

    rank: int = 20
    period: int = 4
    history: float = 2000.0
    alpha: float = 4.0

    def precondition(self, rows: Tensor, state: Tracked | None, batches: int) -> tuple[Tensor, Tracked | None]:
        """Preconditioned rows (N, D), and the state for the next batch.

        Rows that are not finite come back as they are, and leave the state as it was.

        Args:
            rows: X, shape (N, D).
            state: F from the batches before; None at first.
            batches: The number of batches seen before this one.
        """
        if not all_finite(rows):
            return rows, state
        size = rows.shape[-1]
        fresh = state is None
        for _ in range(FIRST if fresh else 0):
            before = start(size, min(self.rank, (size + 1) // 2), rows, 1e-10) if state is None else state
            state = self.update(rows, before)
        assert state is not None
        found = smooth_rows(rows, state, self.alpha)
        due = not fresh and (batches < 10 or batches % self.period == 0)
        return found, self.update(rows, state) if due else state

    def update(self, rows: Tensor, state: Tracked) -> Tracked:
        """F' ~ eta X^T X / N + (1 - eta) F, eta = min(.9, 1 - exp(-N / history)).

        Args:
            rows: X, shape (N, D).
            state: F.
        """
        eta = min(0.9, 1 - math.exp(-len(rows) / self.history))
        return track_rows(state, (eta / len(rows)) ** 0.5 * rows, 1 - eta, least=1e-10)
