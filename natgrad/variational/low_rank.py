"""A Gaussian q of many dimensions whose covariance is diagonal plus low rank, fitted by natural gradient steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.ground.checks import Group, check_integer, read_groups
from natgrad.ground.linalg import all_finite, require_factor
from natgrad.ground.messages import explain_calls
from natgrad.operators import Operator
from natgrad.optim import Processes
from natgrad.solvers import MinresQLP
from natgrad.variational.fitting import Fitted, refuse_infinite, search_rate
from natgrad.variational.network import NetworkData, NetworkOptions
from natgrad.variational.quadrature import Points
from natgrad.variational.start import as_precision, meet_targets, read_target
from natgrad.variational.targets import LOG_2PI, LogJoint, SlopeTarget, Target


@dataclass(frozen=True)
class FactoredCovariance:
    """Sigma = diag(scales)^2 + factor factor^T."""

    scales: Tensor  # s > 0, shape (d,)
    factor: Tensor  # B, shape (d, r)

    @cached_property
    def thin(self) -> Tensor:
        """V (d, r) with diag(s) Sigma^-1 diag(s) = I - V V^T."""
        return torch.linalg.solve_triangular(self._root.mT, self._relative, upper=True, left=False)

    def mv(self, vector: Tensor) -> Tensor:
        """Sigma times a vector (d,)."""
        return self.scales.square() * vector + self.factor @ (self.factor.mT @ vector)

    def diagonal(self) -> Tensor:
        """Of Sigma, shape (d,)."""
        return self.scales.square() + self.factor.square().sum(1)

    def dense(self) -> Tensor:
        """Sigma, shape (d, d)."""
        return torch.diag(self.scales.square()) + self.factor @ self.factor.mT

    def spread(self, z: Tensor) -> Tensor:
        """Rows s * z_1 + B z_2 of covariance Sigma. z: Rows (z_1, z_2) of unit covariance, (k, d + r)."""
        d = len(self.scales)
        return z[:, :d] * self.scales + z[:, d:] @ self.factor.mT

    def half_logdet(self) -> Tensor:
        """log det Sigma / 2."""
        return self.scales.log().sum() + self._root.diagonal().log().sum()

    def entropy_slopes(self) -> tuple[Tensor, Tensor]:
        """Derivatives of log det Sigma / 2 in log s (d,) and in diag(s)^-1 B (d, r)."""
        thin = self.thin
        return 1 - thin.square().sum(1), self._relative - thin @ (thin.mT @ self._relative)

    def move(self, logs: Tensor, relative: Tensor) -> FactoredCovariance:
        """After s <- s exp(logs) and B <- B + diag(s) relative. logs: (d,). relative: (d, r)."""
        return FactoredCovariance(self.scales * logs.exp(), self.factor + self.scales.unsqueeze(1) * relative)

    @cached_property
    def _relative(self) -> Tensor:
        return self.factor / self.scales.unsqueeze(1)

    @cached_property
    def _root(self) -> Tensor:
        """Lower factor of I + B^T diag(s)^-2 B."""
        inner = self._relative.mT @ self._relative
        inner.diagonal().add_(1)
        message = "q's covariance is not finite: take a smaller lr or a start with a smaller covariance"
        return require_factor(inner, message)


class FactorFisher(Operator):
    """Fisher matrix of N(0, Sigma) in (log s, diag(s)^-1 B), 1/2 tr(Sigma^-1 dSigma Sigma^-1 dSigma): d r^2 a product.

    It is singular along rotations of B's columns, which leave Sigma as it is.
    """

    def __init__(self, covariance: FactoredCovariance) -> None:
        self.thin, self.relative = covariance.thin, covariance._relative
        self.size = self.relative.numel() + len(self.relative)
        self.dtype, self.device = self.relative.dtype, self.relative.device
        self.turned = self._apply_inverse(self.relative)

    def mv(self, vector: Tensor) -> Tensor:
        d = len(self.relative)
        logs, step = 2 * vector[:d], vector[d:].view_as(self.relative)  # of s^2, relative to it
        thin, turned, moved = self.thin, self.turned, self._apply_inverse(step)
        inner = thin.mT @ (logs.unsqueeze(1) * thin)
        own = logs * (1 - 2 * thin.square().sum(1)) + ((thin @ inner) * thin).sum(1)
        diagonal = own + 2 * (moved * turned).sum(1)
        sides = self._apply_inverse(logs.unsqueeze(1) * turned)
        sides = sides + moved @ (turned.mT @ self.relative) + turned @ (moved.mT @ self.relative)
        return torch.cat([diagonal, sides.reshape(-1)])  # 1/2 of the trace's slope in log s is 1/2 * 2 of it in s^2

    def _apply_inverse(self, block: Tensor) -> Tensor:
        """(I - V V^T) block: Sigma^-1 in units of s."""
        return block - self.thin @ (self.thin.mT @ block)


OWN = ("target", "start", "rank", "covariance", "lr", "points", "seed", "group")
GROUPS = {"data": Group(NetworkData())}
SHARE = 0.25
"""Share of each variance that the low-rank part has at the start, at most."""
SOLVER = MinresQLP(rtol=1e-4, max_steps=100, max_condition=1e5)
"""The bound over a few points depends a little on rotations of B: what no step can follow is left out.

Near-rotations count as well, or their steps of 1e7 leave no length for the others.
"""
LONGEST = 1.0
"""Most that a step changes the logarithm of a scale."""


@explain_calls
def variational_low_rank(
    target: LogJoint | nn.Module,
    start: Tensor | Sequence[float] | int | None = None,
    *,
    rank: int,
    covariance: Tensor | float | None = None,
    lr: float = 1.0,
    points: Points | None = None,
    seed: int = 0,
    group: Any = None,
    **network: Unpack[NetworkOptions],
) -> LowRankVariational:
    """Natural-gradient variational inference with a covariance diag(s)^2 + B B^T, B (d, rank), for many dimensions.

    The natural gradient of E_q[log p(z, data)] + entropy of q in the Fisher metric of (m, s, B): m <- m + lr Sigma
    E[grad log p], and the step of s and B solves the metric's equations by MINRES-QLP, at d rank^2 operations
    a product. Gradients of log p are all that it needs: no matrix of d x d numbers is made.

    Args:
        target: A function z -> log p(z, data), of rows (s, d) to (s,) or of one z (d,) to a scalar; or an nn.Module,
            with its `criterion`, `data_size` and `prior_precision`.
        start: The mean of q (d,), or d for zeros; default the module's own weights.
        rank: Columns of B, 1 to d.
        covariance: Of q at the start: a number, or (d,); default 1, or for a module 1e-2 / prior_precision.
        lr: Rate; a step is shortened where the bound over the same points would not gain. Take .1 or less where points
            are drawn anew.
        points: In d + rank dimensions; default a Gauss-Hermite grid for two and Sobol points beyond, a pair of draws
            for a module.
        seed: Of B's directions at the start.
        group: The processes of `torch.distributed` that fit q together, each with its own terms of log p in its
            function, or its own rows of a network's batch; they all make the same calls.
        **network: For a module: the three that follow, one by one or as `data=NetworkData(...)`.
        criterion: A torch.nn loss or an `ng` likelihood.
        data_size: Number of examples in the whole set.
        prior_precision: Of the normal prior N(0, 1 / prior_precision) of each weight; default 1.

    Returns:
        q, whose `fit()` or `step()` moves it.

    Raises:
        ValueError: If a number or a shape does not fit, or the function fails at the start.
        TypeError: If the target is of another kind, or an argument belongs to another kind of target.

    Reference:
        Amari 1998; for the family: Ong, Nott & Smith 2018; Tran, Nguyen, Nott & Kohn 2020.

    Example:
        >>> A = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, -2.0]])
        >>> log_p = lambda z: -0.5 * (z @ A.mT - 1).square().sum(-1) - 0.5 * z.square().sum(-1)
        >>> q = ng.variational_low_rank(log_p, 3, rank=2)
        >>> q.fit().converged, q.factor.shape
        (True, torch.Size([3, 2]))
    """
    data: NetworkData = read_groups("variational_low_rank", GROUPS, network, OWN)["data"]
    density, mean, spread = read_target(target, start, covariance, points, data, lr)
    if not isinstance(density, SlopeTarget):
        raise TypeError(f"target is {type(target).__name__}, expected a function z -> log p(z, data), or a module")
    check_integer("rank", rank, 1)
    if rank > len(mean):
        raise ValueError(f"rank is {rank}, expected 1 to d = {len(mean)}; ng.variational has whole covariances")
    variances = 1 / as_precision(spread, mean, True)
    processes = meet_targets(density, group, mean, variances, data, rank, lr, points, seed)
    return LowRankVariational(density, mean, variances, int(rank), lr, seed, processes)


class LowRankVariational(Fitted):
    """q = N(mean, diag(scales)^2 + factor factor^T), and its steps; made by `variational_low_rank`.

    Args:
        target: What q is fitted to.
        mean: Of q at the start, shape (d,).
        variances: Of q at the start, shape (d,).
        rank: Columns of the factor.
        lr: Rate; it may be changed between steps.
        seed: Of the factor's directions at the start.
        processes: What fits q together, each with its part of the target; None for this one alone.

    Attributes:
        scales: s, shape (d,).
        factor: B, shape (d, rank).
        steps: Number of steps taken.
    """

    STATE = ("mean", "scales", "factor")
    target: SlopeTarget

    def __init__(
        self,
        target: SlopeTarget,
        mean: Tensor,
        variances: Tensor,
        rank: int,
        lr: float,
        seed: int,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(target, lr, processes)
        self.choices = {"d": len(mean), "target": type(target).__name__, "rank": rank}
        self.mean, self.rank = mean.clone(), rank
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(len(mean), rank, generator=generator, device=generator.device, dtype=torch.float64)
        directions = (drawn / drawn.norm(dim=1, keepdim=True)).to(mean)
        self.scales = ((1 - SHARE) * variances).sqrt()
        self.factor = (SHARE * variances).sqrt().unsqueeze(1) * directions

    @property
    def covariance(self) -> Tensor:
        """Of q, shape (d, d)."""
        return self._covariance.dense()

    @property
    def variances(self) -> Tensor:
        """Of q's entries, shape (d,): the covariance's diagonal, without the rest of it."""
        return self._covariance.diagonal()

    @property
    def _covariance(self) -> FactoredCovariance:
        return FactoredCovariance(self.scales, self.factor)

    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        z, weights = self.target.place_points(self.mean, self.steps, self.count_dimensions())
        ask = partial(self._add_parts, self.target, batch)
        before, covariance, d = self.mean, self._covariance, len(self.mean)
        values, slopes = ask(lambda part: part.slopes(before + covariance.spread(z), batch))
        bound, gradient = self._add_entropy(weights @ values, covariance), weights @ slopes
        if not all_finite(slopes) or not all_finite(bound):
            raise refuse_infinite(before)
        weighted = weights.unsqueeze(1) * slopes * covariance.scales
        own, sides = covariance.entropy_slopes()
        # slopes of the bound in (log s, diag(s)^-1 B), through z -> m + s z_1 + B z_2
        by_shape = torch.cat([own + (weighted * z[:, :d]).sum(0), (sides + weighted.mT @ z[:, d:]).reshape(-1)])
        shape = SOLVER.solve(FactorFisher(covariance), by_shape).value
        mean = covariance.mv(gradient)  # Sigma E[grad log p]
        length = float(gradient @ mean + by_shape @ shape)
        logs, relative = shape[:d], shape[d:].view_as(covariance.factor)

        def move(rate: float) -> tuple[Tensor, FactoredCovariance]:
            return before + rate * mean, covariance.move(rate * logs, rate * relative)

        def measure_gain(rate: float) -> float:
            place, tried = move(rate)
            (values,) = ask(lambda part: [part.values_at(place + tried.spread(z), batch)])
            return float(self._add_entropy(weights @ values, tried) - bound)

        rate = search_rate(measure_gain, length, min(self.lr, LONGEST / max(float(shape.abs().max()), 1e-30)), bound)
        if rate:  # what the solver found may be infinite
            self.mean, covariance = move(rate)
            self.scales, self.factor = covariance.scales, covariance.factor
        self.steps += 1
        return float(bound), length / 2

    def measure_bound(self, target: Target, batch: tuple[Any, ...]) -> float:
        assert isinstance(target, SlopeTarget)
        z, weights = target.place_points(self.mean, self.steps, self.count_dimensions())
        places = self.mean + self._covariance.spread(z)
        (values,) = self._add_parts(target, batch, lambda part: [part.values_at(places, batch)])
        return float(self._add_entropy(weights @ values, self._covariance))

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        like = self.mean
        z = torch.randn(n, self.count_dimensions(), generator=generator, dtype=like.dtype, device=like.device)
        return like + self._covariance.spread(z)

    def count_dimensions(self) -> int:
        return len(self.mean) + self.rank

    def _add_entropy(self, value: Tensor, covariance: FactoredCovariance) -> Tensor:
        return value + covariance.half_logdet() + 0.5 * len(self.mean) * (1 + LOG_2PI)
