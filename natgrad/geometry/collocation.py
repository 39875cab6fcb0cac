"""Boundary values of x'' = f(x, x') by collocation: the whole way at once instead of shot after shot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from numpy.polynomial import chebyshev
from torch import Tensor

from natgrad.lapack import fit_or_nan, invert_or_nan

NODES, MEMORY, SWEEPS = 32, 10, 80
DRIFT = 1e-5
"""Relative change of the invariant along a way that is believed."""


def connect(
    bend: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    end: Tensor,
    tolerance: float,
    invariant: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """x'(0) of the solution from start at time 0 to end at time 1; NaN in rows where none was found.

    x'' is a polynomial of degree 31, found by iterating x'' <- f(x, x'), accelerated: every sweep is one call of f. It
    converges for ways that are not too long, and its last coefficients tell whether the degree was enough.

    Args:
        bend: f(x, x') = x'', on (b, N, n).
        start: Shape (b, n).
        end: Shape (b, n).
        tolerance: Relative size of what is left over.
        invariant: A function of (x, x'), (b, N, n) -> (b, N), that is the same all along a true solution: polynomials
            that fit the equation at the nodes alone change it.

    Returns:
        Shape (b, n).

    Reference:
        Anderson 1965, for the acceleration.
    """
    place, speed, first, tail, nodes = (m.to(start) for m in _matrices())
    away = (end - start).unsqueeze(1)
    line = start.unsqueeze(1) + nodes.view(1, -1, 1) * away

    def sweep(u: Tensor) -> Tensor:
        return bend(line + place @ u, away + speed @ u)

    u, settled = _settle(sweep, torch.zeros_like(line), tolerance)
    rough = (tail @ u).abs().amax((1, 2)) > 1e3 * tolerance * (1 + u.abs().amax((1, 2)))
    drift = invariant(line + place @ u, away + speed @ u)
    kept = drift.amax(1) - drift.amin(1) <= DRIFT * drift.amax(1)  # false for NaN
    velocity = away.squeeze(1) + torch.einsum("k,bkn->bn", first, u)
    return torch.where((settled & ~rough & kept).unsqueeze(1), velocity, torch.nan)


def _settle(sweep: Callable[[Tensor], Tensor], u: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """The fixed point of the sweep, row by row, and which rows found it."""
    pasts: list[Tensor] = []  # u and its residual, for the last few sweeps
    residuals: list[Tensor] = []
    settled = torch.zeros(len(u), dtype=torch.bool, device=u.device)
    for _ in range(SWEEPS):
        residual = sweep(u) - u
        size = residual.abs().amax((1, 2))
        settled = size <= tolerance * (1 + u.abs().amax((1, 2)))
        lost = ~torch.isfinite(size)
        if bool((settled | lost).all()):
            break
        pasts, residuals = [*pasts, u][-MEMORY:], [*residuals, residual][-MEMORY:]
        u = torch.where((settled | lost)[:, None, None], u, _mix_pasts(pasts, residuals))
    return u, settled


def _mix_pasts(pasts: list[Tensor], residuals: list[Tensor]) -> Tensor:
    """The affine combination of the past points whose residuals nearly cancel, moved by what is left."""
    last, residual = pasts[-1], residuals[-1]
    if len(pasts) == 1:
        return last + residual
    steps = torch.stack([(last - p).flatten(1) for p in pasts[:-1]], dim=2).nan_to_num()
    changes = torch.stack([(residual - r).flatten(1) for r in residuals[:-1]], dim=2).nan_to_num()
    gram = changes.mT @ changes
    ridge = 1e-14 * gram.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-300)
    gram = gram + torch.diag_embed(ridge.unsqueeze(1).expand(gram.shape[:2]))
    weights = fit_or_nan(gram, changes.mT @ residual.flatten(1).nan_to_num().unsqueeze(2))
    return last + residual - ((steps + changes) @ weights).view_as(last)


@cache
def _matrices() -> tuple[Tensor, ...]:
    """For x'' at Chebyshev's nodes on [0, 1]: x - line, x' - away, x'(0) - away, last coefficients; and the nodes."""
    nodes = (1 + torch.cos(torch.arange(NODES, dtype=torch.float64) * torch.pi / (NODES - 1))) / 2
    to_coefficients = invert_or_nan(torch.from_numpy(chebyshev.chebvander(2 * nodes.numpy() - 1, NODES - 1)))
    twice, once, zero = [], [], []
    for k in range(NODES):
        unit = [0.0] * k + [1.0]
        rise = chebyshev.chebint(unit, scl=0.5, lbnd=-1)  # d/dt = 2 d/ds with s = 2 t - 1
        way = chebyshev.chebint(rise, scl=0.5, lbnd=-1)
        drop = float(chebyshev.chebval(1.0, way))  # so that the end is where it must be
        twice.append(torch.from_numpy(chebyshev.chebval(2 * nodes.numpy() - 1, way)) - drop * nodes)
        once.append(torch.from_numpy(chebyshev.chebval(2 * nodes.numpy() - 1, rise)) - drop)
        zero.append(-drop)
    first = torch.tensor(zero, dtype=torch.float64) @ to_coefficients
    place, speed = (torch.stack(rows, dim=1) @ to_coefficients for rows in (twice, once))
    return place, speed, first, to_coefficients[-3:], nodes
