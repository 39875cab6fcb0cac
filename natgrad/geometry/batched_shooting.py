"""Boundary values by shooting: Newton's method for the velocity, every pair of points by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from natgrad.lapack import solve_or_nan

SHORTEST = 2.0**-12
"""The part of a way that must be within reach of a next one."""
ROUNDS, NEWTON_STEPS, HALVINGS = 60, 12, 6


class Way(Protocol):
    """From where velocities (k, n) lead, and where they should, for k pairs of points."""

    def reach(self, velocity: Tensor) -> Tensor:
        """Where the geodesics with these velocities are at time 1; NaN where that is nowhere.

        Args:
            velocity: Shape (..., k, n).
        """
        ...

    def target(self, part: Tensor) -> Tensor:
        """The points at these parts of the ways.

        Args:
            part: From 0 (the start) to 1 (the end), shape (k,).

        Returns:
            Shape (k, n).
        """
        ...

    def guess(self, part: Tensor) -> Tensor:
        """First velocities towards them.

        Args:
            part: From 0 (the start) to 1 (the end), shape (k,).

        Returns:
            Shape (k, n).
        """
        ...

    def size(self, misfit: Tensor) -> Tensor:
        """Length of misfits.

        Args:
            misfit: Shape (k, n).

        Returns:
            Shape (k,).
        """
        ...


def shoot(way: Callable[[Tensor], Way], like: Tensor, tolerance: float) -> Tensor:
    """The velocities v with reach(v) = target(1), by Newton's method along paths of targets.

    The whole way is tried at once; where that fails, half of it first, and so on, every row by itself. NaN in rows
    where 2^-12 of the way is still too much, or 60 rounds were not enough.

    Args:
        way: The ways of some of the rows, by their numbers.
        like: A tensor (b, n) of the shape, dtype and device of the velocities.
        tolerance: Length of the misfit that is allowed.
    """
    begun, part, velocity = like.new_zeros(len(like)), like.new_ones(len(like)), torch.zeros_like(like)
    for _ in range(ROUNDS):
        rows = ((begun < 1) & (part >= SHORTEST)).nonzero().squeeze(1)
        if not len(rows):
            break
        each, aim = way(rows), (begun + part)[rows].clamp(max=1.0)
        from_zero = (begun[rows] == 0).unsqueeze(1)
        start = torch.where(from_zero, each.guess(aim), velocity[rows] * (aim / begun[rows]).unsqueeze(1))
        found = _newton(each, each.target(aim), start, tolerance)
        arrived = ~torch.isnan(found).any(1)
        begun[rows], part[rows] = torch.where(arrived, aim, begun[rows]), part[rows] * torch.where(arrived, 2.0, 0.5)
        velocity[rows] = torch.where(arrived.unsqueeze(1), found, velocity[rows])
    return torch.where((begun >= 1).unsqueeze(1), velocity, torch.nan)


def _newton(way: Way, target: Tensor, velocity: Tensor, tolerance: float) -> Tensor:
    """NaN in rows that do not arrive within 12 steps, each halved where a whole one is worse."""
    misfit = target - way.reach(velocity)
    left = way.size(misfit)
    for _ in range(NEWTON_STEPS):
        open_rows = left > tolerance  # false for a row that is lost
        if not bool(open_rows.any()):
            break
        step = solve_or_nan(_jacobian(way.reach, velocity), misfit.unsqueeze(-1)).squeeze(-1)
        step = torch.where(open_rows.unsqueeze(1), step, 0.0)
        rate = (velocity.norm(dim=-1) / step.norm(dim=-1).clamp_min(1e-300)).clamp(max=1.0)  # no longer than the way
        tried, found = velocity, left
        for _ in range(HALVINGS):
            tried = velocity + rate.unsqueeze(-1) * step
            misfit = target - way.reach(tried)
            found = way.size(misfit)
            worse = ~(found <= left.clamp_min(tolerance)) & open_rows
            if not bool(worse.any()):
                break
            rate = torch.where(worse, rate / 2, rate)
        velocity, left = tried, found
    return torch.where((left <= tolerance).unsqueeze(1), velocity, torch.nan)


def _jacobian(reach: Callable[[Tensor], Tensor], velocity: Tensor) -> Tensor:
    """d reach / d v (..., n, n) by central differences, all in one batch; Newton's method corrects the rest."""
    n = velocity.shape[-1]
    width = 1e-5 * (1 + velocity.detach().norm(dim=-1, keepdim=True))
    units = torch.eye(n, dtype=velocity.dtype, device=velocity.device).view(n, *(1,) * (velocity.dim() - 1), n)
    ends = reach(torch.stack([velocity + width * units, velocity - width * units]))
    return ((ends[0] - ends[1]) / (2 * width)).movedim(0, -1)
