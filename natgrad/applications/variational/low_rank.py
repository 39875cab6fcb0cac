"""A Gaussian q of many dimensions whose covariance is diagonal plus low rank, fitted by natural gradient steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.applications.variational.fitting import Fitted
from natgrad.applications.variational.gaussian import ENOUGH, HALVINGS, format_few
from natgrad.applications.variational.joined import JoinedTarget, find_processes, join_target
from natgrad.applications.variational.network import Network, NetworkData, NetworkOptions, build_network
from natgrad.applications.variational.quadrature import Points, default_points
from natgrad.applications.variational.start import as_mean, as_precision, read_density
from natgrad.applications.variational.targets import LOG_2PI, DensityTarget, LogJoint
from natgrad.ground.checks import Group, check_integer, check_positive, read_groups
from natgrad.ground.linalg import all_finite, require_factor
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.pure import keep_gradient_mode, run_detached
from natgrad.operators import Operator
from natgrad.optim import RankExchange, refuse_processes
from natgrad.solvers import MinresQLP


@dataclass(frozen=True)
class FactoredCovariance:
    """Sigma = diag(scales)^2 + factor factor^T.

    Args:
        scales: s > 0, shape (d,).
        factor: B, shape (d, r).
    """

    scales: Tensor
    factor: Tensor

    @cached_property
    def thin(self) -> Tensor:
        """V (d, r) with diag(s) Sigma^-1 diag(s) = I - V V^T."""
        return torch.linalg.solve_triangular(self._root.mT, self._relative, upper=True, left=False)

    def mv(self, vector: Tensor) -> Tensor:
        """Sigma times a vector (d,).

        vector: (d,).
        """
        return self.scales.square() * vector + self.factor @ (self.factor.mT @ vector)

    def diagonal(self) -> Tensor:
        """Of Sigma, shape (d,)."""
        return self.scales.square() + self.factor.square().sum(1)

    def dense(self) -> Tensor:
        """Sigma, shape (d, d)."""
        return torch.diag(self.scales.square()) + self.factor @ self.factor.mT

    def spread(self, z: Tensor) -> Tensor:
        """Rows s * z_1 + B z_2 of covariance Sigma.

        z: Rows (z_1, z_2) of unit covariance, (k, d + r).
        """
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
        """After s <- s exp(logs) and B <- B + diag(s) relative.

        logs: (d,). relative: (d, r).
        """
        return FactoredCovariance(self.scales * logs.exp(), self.factor + self.scales.unsqueeze(1) * relative)

    @cached_property
    def _relative(self) -> Tensor:
        return self.factor / self.scales.unsqueeze(1)

    @cached_property
    def _root(self) -> Tensor:
        """Lower factor of I + B^T diag(s)^-2 B."""
        inner = self._relative.mT @ self._relative
        inner.diagonal().add_(1)
        return require_factor(
            inner, "q's covariance is not finite: take a smaller lr or a start with a smaller covariance"
        )


class FactorFisher(Operator):
    """Fisher matrix of N(0, Sigma) in (log s, diag(s)^-1 B): 1/2 tr(Sigma^-1 dSigma Sigma^-1 dSigma) as a form.

    It is singular along rotations of B's columns, which leave Sigma as it is. A product costs d r^2 operations.

    Args:
        covariance: Sigma.
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


# A Gaussian q of many dimensions whose covariance is diagonal plus low rank, fitted by natural gradient steps

OWN = ("target", "start", "rank", "covariance", "lr", "points", "seed", "group")
GROUPS = {"data": Group(NetworkData())}
SHARE = 0.25
"""Share of each variance that the low-rank part has at the start, at most."""
SOLVER = MinresQLP(rtol=1e-4, max_steps=100)
"""The bound over a few points depends a little on rotations of B: what no step can follow is left out."""
LONGEST = 1.0
"""Most that a step changes the logarithm of a scale."""
Sloped = DensityTarget | Network | JoinedTarget
"""What tells log p and its gradient at given places."""


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
    check_positive("lr", lr)
    if points is not None and not isinstance(points, Points):
        raise TypeError(f"points is {points!r}, expected Sobol() or Draws()")
    if isinstance(target, nn.Module):
        refuse_processes(target, "target")
        density: DensityTarget | Network = build_network(target, data, points)
        mean = density.start if start is None else as_mean(start)
        spread = 1e-2 / data.prior_precision if covariance is None else covariance
    else:
        if data.criterion is not None or data.data_size is not None:
            raise TypeError("criterion and data_size belong to a network; a log joint has its data inside")
        if start is None:
            raise ValueError("start is None, expected the mean of q at the start (d,), or the number of dimensions d")
        found, mean = read_density(target, start, points)
        if not isinstance(found, DensityTarget):
            raise TypeError(f"target is {type(target).__name__}, expected a function z -> log p(z, data), or a module")
        density, spread = found, 1.0 if covariance is None else covariance
    check_integer("rank", rank, 1)
    if rank > len(mean):
        raise ValueError(f"rank is {rank}, expected 1 to d = {len(mean)}; ng.variational has whole covariances")
    variances = 1 / as_precision(spread, mean, True)
    joined = join_target(density, group, mean, variances, data, rank, lr, points, seed)
    return LowRankVariational(joined, mean, variances, int(rank), lr, seed)


class LowRankVariational(Fitted):
    """q = N(mean, diag(scales)^2 + factor factor^T), and its steps; made by `variational_low_rank`.

    Args:
        target: What q is fitted to.
        mean: Of q at the start, shape (d,).
        variances: Of q at the start, shape (d,).
        rank: Columns of the factor.
        lr: Rate; it may be changed between steps.
        seed: Of the factor's directions at the start.

    Attributes:
        steps: Number of steps taken.
    """

    def __init__(self, target: Sloped, mean: Tensor, variances: Tensor, rank: int, lr: float, seed: int) -> None:
        self.target, self.lr, self.rank, self.steps = target, lr, rank, 0
        self.mean = mean.clone()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(len(mean), rank, generator=generator, dtype=torch.float64)
        directions = (drawn / drawn.norm(dim=1, keepdim=True)).to(mean)
        self._covariance = FactoredCovariance(
            ((1 - SHARE) * variances).sqrt(), (SHARE * variances).sqrt().unsqueeze(1) * directions
        )

    def __repr__(self) -> str:
        kind = type(self._own).__name__
        return write_choices(self, d=len(self.mean), target=kind, rank=self.rank, lr=self.lr, steps=self.steps)

    @property
    def scales(self) -> Tensor:
        """s, shape (d,)."""
        return self._covariance.scales

    @property
    def factor(self) -> Tensor:
        """B, shape (d, rank)."""
        return self._covariance.factor

    @property
    def covariance(self) -> Tensor:
        """Of q, shape (d, d)."""
        return self._covariance.dense()

    @property
    def variances(self) -> Tensor:
        """Of q's entries, shape (d,): the covariance's diagonal, without the rest of it."""
        return self._covariance.diagonal()

    @property
    def _own(self) -> DensityTarget | Network:
        """The target, or this process's part of it."""
        own = self.target.own if isinstance(self.target, JoinedTarget) else self.target
        assert isinstance(own, (DensityTarget, Network))
        return own

    @property
    def steady(self) -> bool:
        return self.target.steady

    @property
    def processes(self) -> RankExchange:
        return find_processes(self.target)

    @keep_gradient_mode
    @torch.no_grad()
    def step(self, *batch: Any) -> float:
        """One natural gradient step, shortened until the bound over its own points gains .4 of what its slope promised.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.

        Returns:
            The evidence lower bound before the step, in nats.

        Raises:
            ValueError: If log p or its gradient is not finite; q is then as it was.
        """
        return self.advance(batch)[0]

    @torch.no_grad()
    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        z, weights = self._points()
        covariance, d = self._covariance, len(self.mean)
        values, slopes = self.target.slopes(self.mean + covariance.spread(z), batch)
        bound, gradient = self._add_entropy(weights @ values, covariance), weights @ slopes
        if not all_finite(slopes) or not math.isfinite(float(bound)):
            raise ValueError(
                f"log p or its gradient is not finite near z = {format_few(self.mean)}; q is as it was. Start nearer, "
                "with a smaller covariance, or write log p over unconstrained z"
            )
        weighted = weights.unsqueeze(1) * slopes * covariance.scales
        own, sides = covariance.entropy_slopes()
        by_shape = torch.cat([own + (weighted * z[:, :d]).sum(0), (sides + weighted.mT @ z[:, d:]).reshape(-1)])
        shape = SOLVER.solve(FactorFisher(covariance), by_shape).value
        mean = covariance.mv(gradient)
        length = float(gradient @ mean + by_shape @ shape)
        self._take(bound, length, mean, shape, z, weights, batch)
        self.steps += 1
        return float(bound), length / 2

    def _take(
        self, bound: Tensor, length: float, mean: Tensor, shape: Tensor, z: Tensor, weights: Tensor, batch: Any
    ) -> None:
        """As much of the step as brings `ENOUGH` of the promised gain; none if nothing does."""
        d, before, covariance = len(self.mean), self.mean, self._covariance
        logs, relative = shape[:d], shape[d:].view_as(covariance.factor)
        rate = min(self.lr, LONGEST / max(float(shape.abs().max()), 1e-30))
        slack = 8 * torch.finfo(before.dtype).eps * (1 + abs(float(bound)))
        for _ in range(HALVINGS):
            tried, place = covariance.move(rate * logs, rate * relative), before + rate * mean
            values = self.target.values_at(place + tried.spread(z), batch)
            gain = float(self._add_entropy(weights @ values, tried) - bound)
            if gain >= ENOUGH * rate * length - slack:  # False for a NaN
                self.mean, self._covariance = place, tried
                return
            best = rate * length / (2 * (rate * length - gain)) if math.isfinite(gain) else 0.0
            rate *= min(max(best, 0.1), 0.5)

    def _points(self) -> tuple[Tensor, Tensor]:
        size = len(self.mean) + self.rank
        z, weights = (self._own.points or default_points(size)).at(size, self.steps)
        return z.to(self.mean), weights.to(self.mean)

    def _add_entropy(self, value: Tensor, covariance: FactoredCovariance) -> Tensor:
        return value + covariance.half_logdet() + 0.5 * len(self.mean) * (1 + LOG_2PI)

    @torch.no_grad()
    def elbo(self, *batch: Any) -> float:
        """The evidence lower bound in nats, with the points of the next step.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.
        """
        return self._elbo_over(*self._points(), batch)

    def elbos_elsewhere(self) -> list[float]:
        size, own = len(self.mean) + self.rank, self._own
        if not isinstance(own, DensityTarget):
            return []
        others = (own.points or default_points(size)).others()
        placed = ([part.to(self.mean) for part in points.at(size, self.steps)] for points in others)
        return [self._elbo_over(z, weights, ()) for z, weights in placed]

    @torch.no_grad()
    def _elbo_over(self, z: Tensor, weights: Tensor, batch: tuple[Any, ...]) -> float:
        values = self.target.values_at(self.mean + self._covariance.spread(z), batch)
        return float(self._add_entropy(weights @ values, self._covariance))

    @torch.no_grad()
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws from q, shape (n, d).

        Args:
            n: How many.
            generator: Of the draws; default torch's global one.

        Raises:
            ValueError: If n is no integer >= 1.
        """
        check_integer("n", n, of="the number of draws")
        size, like = len(self.mean) + self.rank, self.mean
        z = torch.randn(int(n), size, generator=generator, dtype=like.dtype, device=like.device)
        return like + self._covariance.spread(z)

    @torch.no_grad()
    def predict(self, inputs: Any, samples: int = 10, *, generator: torch.Generator | None = None) -> Any:
        """A network's outputs under draws of its weights, stacked: (samples, b, ...).

        Args:
            inputs: Of the network.
            samples: How many draws.
            generator: Of the draws; default torch's global one.

        Raises:
            TypeError: If the target is no network.
        """
        target = self._own
        if not isinstance(target, Network):
            raise TypeError("predict is for networks; use sample(n) and your own function of z")
        draws = self.sample(samples, generator=generator)
        return torch.stack([run_detached(partial(target.predict, z, inputs)) for z in draws])

    def snapshot(self) -> tuple[Tensor, FactoredCovariance, int]:
        return self.mean, self._covariance, self.steps

    def restore(self, place: tuple[Tensor, FactoredCovariance, int]) -> None:
        self.mean, self._covariance, self.steps = place

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"mean": self.mean, "scales": self.scales, "factor": self.factor, "steps": self.steps, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: If it is of another size.
        """
        missing = {"mean", "scales", "factor", "steps", "lr"} - set(state)
        if missing or state["factor"].shape != self.factor.shape:
            raise ValueError(
                f"state lacks {sorted(missing)} or is of another size, expected factor of shape "
                f"{tuple(self.factor.shape)}"
            )
        scales, factor = state["scales"].to(self.mean).clone(), state["factor"].to(self.mean).clone()
        self.mean, self._covariance = state["mean"].to(self.mean).clone(), FactoredCovariance(scales, factor)
        self.steps, self.lr = state["steps"], state["lr"]
