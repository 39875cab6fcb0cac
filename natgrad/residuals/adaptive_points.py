"""Points where residuals are large: drawn from a pool of candidates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer


def draw_where_large(
    pool: Tensor,
    residuals: Tensor,
    count: int,
    *,
    power: float = 1.0,
    floor: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Some points of a pool, each with probability p_i ~ |r_i|^power / mean |r|^power + floor, without repetition.

    Fixed points let a network be wrong between them, at a shock above all. Draw a new pool and from it new points every
    20 steps or so: more often the steps never settle.

    Args:
        pool: Candidates, shape (b, d), several times as many as are wanted.
        residuals: r at the candidates, shape (b,) or (b, m), as `opt.evaluate(inside=pool)["inside"]` returns them.
        count: How many points.
        power: 0 draws uniformly; larger numbers follow the residuals more closely.
        floor: The share of uniform draws; 0 leaves points out where the residual is zero.
        generator: Source of the draws.

    Returns:
        Shape (count, d).

    Raises:
        ValueError: For shapes that do not fit, too few candidates, numbers out of range, residuals that are not finite.

    Reference:
        Wu, Zhu, Tan, Kartha & Lu 2023, eq. 2 (RAD), whose k and c are power and floor.

    Example:
        >>> pool = torch.linspace(0, 1, 5)[:, None]
        >>> r = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])
        >>> ng.residuals.draw_where_large(pool, r, 2, floor=0.0).sort(0).values.squeeze(1)
        tensor([0.5000, 0.7500])
    """
    count = check_integer("count", count)
    if pool.dim() < 2 or residuals.dim() not in (1, 2) or len(residuals) != len(pool):
        raise ValueError(
            f"pool has shape {tuple(pool.shape)} and residuals {tuple(residuals.shape)}, expected (b, d) and (b,) or "
            "(b, m)"
        )
    if not (0 <= power < math.inf and 0 <= floor < math.inf):
        raise ValueError(f"power is {power} and floor {floor}, expected finite numbers >= 0")
    sizes = residuals.detach().abs() if residuals.dim() == 1 else residuals.detach().norm(dim=1)
    if not bool(torch.isfinite(sizes).all()):
        raise ValueError("residuals holds a NaN or an infinity; look at the term at the pool's points")
    sizes = (sizes / sizes.max().clamp(min=torch.finfo(sizes.dtype).tiny)).pow(power)
    chances = sizes / sizes.mean().clamp(min=torch.finfo(sizes.dtype).tiny) + floor
    allowed = int((chances > 0).sum())
    if allowed < count:
        raise ValueError(f"pool has {allowed} points with a probability above 0, expected at least count, {count}")
    return pool[torch.multinomial(chances, count, generator=generator)]
