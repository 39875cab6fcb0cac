"""Points where residuals are large: by weights that follow them, causal in time too, or drawn from a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_range, check_tensor


class PointWeights(ABC):
    """From the squares of a term's residuals to weights of its points, fixed within a step."""

    @abstractmethod
    def weigh(self, squares: Tensor, points: Tensor) -> Tensor:
        """The weights, shape (b,), >= 0.

        Args:
            squares: |r|^2 at every point, shape (b,).
            points: The term's points, shape (b, d).
        """


@dataclass(frozen=True)
class Causal(PointWeights):
    """w(t) = exp(-epsilon * sum of |r|^2 over earlier points): later times wait until the earlier ones are solved.

    The sum is over points, so that epsilon refers to their number too.

    Args:
        epsilon: How strictly. Where it is too large nearly all points have a weight of zero, and their residuals grow
            while the loss is small: begin with a tenth over the number of points, and see that weights return to 1.
        time: Which coordinate time is; default the last.

    Raises:
        ValueError: Unless epsilon is a finite number >= 0.

    Reference:
        Wang, Sankaran & Perdikaris 2022, eq. 2.13.

    Example:
        >>> causal = ng.residuals.Causal(epsilon=1.0)
        >>> causal.weigh(torch.tensor([1.0, 2.0]), torch.tensor([[0.1], [0.2]]))
        tensor([1.0000, 0.3679])
    """

    epsilon: float
    time: int = -1

    def __post_init__(self) -> None:
        check_range("epsilon", self.epsilon, "[0, inf)")

    def weigh(self, squares: Tensor, points: Tensor) -> Tensor:
        if not -points.shape[1] <= self.time < points.shape[1]:
            raise ValueError(f"time is {self.time}, and the points have {points.shape[1]} coordinates, counted from 0")
        times, order = points[:, self.time].sort(stable=True)
        sums = torch.cat([squares.new_zeros(1), squares[order].cumsum(0)])
        # points of one time wait for none of each other
        earlier = sums[torch.searchsorted(times.contiguous(), times, side="left")]
        weights = torch.empty_like(squares)
        weights[order] = torch.exp(-self.epsilon * earlier)
        return weights


@dataclass(frozen=True)
class WhereLarge(PointWeights):
    """w_i = share * |r_i|^power / mean |r|^power + 1 - share: more weight where the residual is large; mean 1.

    Args:
        power: Of the residual.
        share: Of the weights that follows the residuals, in [0, 1].

    Raises:
        ValueError: For a power that is negative, or a share outside [0, 1].

    Reference:
        Wu, Zhu, Tan, Kartha & Lu 2023, eq. 2, whose k and c are power and (1 - share) / share.

    Example:
        >>> ng.residuals.WhereLarge().weigh(torch.tensor([0.0, 4.0]), torch.zeros(2, 1))
        tensor([0.5000, 1.5000])
    """

    power: float = 1.0
    share: float = 0.5

    def __post_init__(self) -> None:
        check_range("power", self.power, "[0, inf)")
        check_range("share", self.share, "[0, 1]")

    def weigh(self, squares: Tensor, points: Tensor) -> Tensor:
        sizes = squares.clamp(min=torch.finfo(squares.dtype).tiny).pow(self.power / 2)
        return self.share * sizes / sizes.mean() + 1 - self.share


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
    check_tensor("pool", pool)
    check_tensor("residuals", residuals)
    if pool.dim() < 2 or residuals.dim() not in (1, 2) or len(residuals) != len(pool):
        raise ValueError(
            f"pool has shape {tuple(pool.shape)} and residuals {tuple(residuals.shape)}, expected (b, d) and (b,) or "
            "(b, m)"
        )
    for name, number in (("power", power), ("floor", floor)):
        check_range(name, number, "[0, inf)")
    sizes = residuals.detach().abs() if residuals.dim() == 1 else residuals.detach().norm(dim=1)
    if not bool(torch.isfinite(sizes).all()):
        raise ValueError("residuals holds a NaN or an infinity; look at the term at the pool's points")
    sizes = (sizes / sizes.max().clamp(min=torch.finfo(sizes.dtype).tiny)).pow(power)
    chances = sizes / sizes.mean().clamp(min=torch.finfo(sizes.dtype).tiny) + floor
    allowed = int((chances > 0).sum())
    if allowed < count:
        raise ValueError(f"pool has {allowed} points with a probability above 0, expected at least count, {count}")
    return pool[torch.multinomial(chances, count, generator=generator)]
