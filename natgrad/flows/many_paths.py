"""Flows from many starts at once, as exactly as a picture needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.flows.integrate import Field


def paths(field: Field, starts: Tensor, times: Tensor, inside: Callable[[Tensor], Tensor], substeps: int = 5) -> Tensor:
    """The flow from many starts at once, at all times: (m, T, n), NaN after a row left the domain.

    By Runge and Kutta's rule of order 4 in `substeps` steps of one length between times: for pictures. `flow` is exact
    to a tolerance, and says why it ended.

    Args:
        field: From `flow_field`.
        starts: Shape (m, n).
        times: Increasing, shape (T,).
        inside: Points (m, n) -> which of them lie in the domain, (m,) of bool.
        substeps: Steps between two times.
    """
    now, moving = starts.clone(), inside(starts)
    points = [now.clone()]
    for width in times.diff().tolist():
        for _ in range(substeps):
            _advance(field, now, moving, width / substeps, inside)
        points.append(torch.where(moving.unsqueeze(1), now, torch.nan))
    return torch.stack(points, dim=1)


def destinations(
    field: Field, starts: Tensor, span: float, inside: Callable[[Tensor], Tensor], steps: int = 400
) -> Tensor:
    """The points (m, n) where the flow from every start is at the last time, or where it left the domain: for basins.

    As `paths`: no more exact than a picture needs.

    Args:
        field: From `flow_field`.
        starts: Shape (m, n).
        span: The last time.
        inside: Points (m, n) -> which of them lie in the domain, (m,) of bool.
        steps: Of one length.
    """
    now, moving = starts.clone(), inside(starts)
    for _ in range(steps):
        _advance(field, now, moving, span / steps, inside)
    return now


def _advance(field: Field, points: Tensor, moving: Tensor, h: float, inside: Callable[[Tensor], Tensor]) -> None:
    """One step in place of the rows that move; those that leave stay where they were, and move no more."""
    if not bool(moving.any()):
        return
    now = points[moving]
    stages, valid = [field(now)], torch.ones(len(now), dtype=torch.bool)
    for part in (h / 2, h / 2, h):
        at = now + part * stages[-1]
        good = inside(at) & torch.isfinite(at).all(1)
        valid &= good
        stages.append(field(torch.where(good.unsqueeze(1), at, now)))
    new = now + h / 6 * (stages[0] + 2 * stages[1] + 2 * stages[2] + stages[3])
    valid &= torch.isfinite(new).all(1) & inside(new)
    points[moving] = torch.where(valid.unsqueeze(1), new, now)
    moving[moving.clone()] = valid
