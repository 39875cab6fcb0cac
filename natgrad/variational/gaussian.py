"""A Gaussian q fitted to a target by natural gradient steps in its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.families import MultivariateNormal
from natgrad.ground.checks import Group, read_groups
from natgrad.ground.linalg import all_finite, eigh, factor_or_nan, require_factor
from natgrad.ground.messages import explain_calls
from natgrad.optim import Processes
from natgrad.variational.fitting import Fitted, format_few, refuse_infinite, search_rate
from natgrad.variational.network import NetworkData, NetworkOptions
from natgrad.variational.quadrature import Points
from natgrad.variational.start import as_precision, meet_targets, read_target
from natgrad.variational.targets import LOG_2PI, LogJoint, Moments, Target, apply_root

OWN = ("target", "start", "covariance", "diagonal", "lr", "points", "group")
GROUPS = {"data": Group(NetworkData())}
KEPT = 0.5
"""Share of its precision that a direction keeps in which a step would leave the cone."""
EDGE = 1e-9
"""Share of the precision from which on a step counts as leaving."""


@explain_calls
def variational(
    target: LogJoint | Target | nn.Module,
    start: Tensor | Sequence[float] | int | None = None,
    *,
    covariance: Tensor | float | None = None,
    diagonal: bool = False,
    lr: float = 1.0,
    points: Points | None = None,
    group: Any = None,
    **network: Unpack[NetworkOptions],
) -> Variational:
    """Natural-gradient variational inference: a normal q(z) that maximises E_q[log p(z, data)] + entropy of q.

    P <- (1 - lr) P - lr E[Hess log p] for the precision, and then m <- m + lr P^-1 E[grad log p] for the mean.

    Args:
        target: A function z -> log p(z, data), of rows (s, d) to (s,) or of one z (d,) to a scalar (which of the two is
            found out by a call); a `Projected` likelihood from `ng.variational`; or an nn.Module, with its
            `criterion`, `data_size` and `prior_precision`.
        start: The mean of q (d,), or d for zeros, in float64 where the function takes it; default the module's own
            weights.
        covariance: Of q at the start: a number, (d,) or (d, d); default 1, or for a module 1e-2 / prior_precision.
        diagonal: True for a q with independent entries.
        lr: Rate in natural parameters; 1 solves a conjugate problem in one step.
        points: How expectations are taken; default a Gauss-Hermite grid in one or two dimensions and Sobol points
            beyond, a pair of draws for a module.
        group: The processes of `torch.distributed` that fit q together. Each has its own part of the data: a step's
            examples of a network, the rows of `Projected`, or in a function its own terms of log p, with the prior in
            one of them.
        **network: For a module: the three that follow, one by one or as `data=NetworkData(...)`.
        criterion: A torch.nn loss or an `ng` likelihood.
        data_size: Number of examples in the whole set.
        prior_precision: Of the normal prior N(0, 1 / prior_precision) of each weight; default 1.

    Returns:
        q, whose `fit()` or `step()` moves it.

    Raises:
        ValueError: If a number or a shape does not fit, or the function fails at the start.
        TypeError: If the target is of another kind, or an argument belongs to another kind of target or to none.

    Reference:
        Amari 1998; Khan & Rue 2023, the Bayesian learning rule.

    Example:
        >>> q = ng.variational(lambda z: -0.5 * (z - 3).square().sum(-1), start=2)
        >>> bounds = q.fit()
        >>> [round(m, 4) for m in q.mean.tolist()], bounds.converged
        ([3.0, 3.0], True)
    """
    data: NetworkData = read_groups("variational", GROUPS, network, OWN)["data"]
    density, mean, spread = read_target(target, start, covariance, points, data, lr)
    processes = meet_targets(density, group, mean, spread, data, diagonal, lr, points)
    return Variational(density, mean, spread, diagonal, lr, processes)


class Variational(Fitted):
    """q = N(mean, covariance), and its steps; made by `variational`.

    Args:
        target: What q is fitted to.
        mean: Of q at the start, shape (d,).
        covariance: Of q at the start: a number, (d,) or (d, d).
        diagonal: True for a q with independent entries.
        lr: Rate in natural parameters; it may be changed between steps.
        processes: What fits q together, each with its part of the target; None for this one alone.

    Attributes:
        precision: Shape (d, d), or (d,) where q is diagonal.
        steps: Number of steps taken.
    """

    STATE = ("mean", "precision")

    def __init__(
        self,
        target: Target,
        mean: Tensor,
        covariance: Tensor | float,
        diagonal: bool,
        lr: float,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(target, lr, processes)
        self.choices = {"d": len(mean), "target": type(target).__name__, "diagonal": diagonal}
        self.mean, self.diagonal = mean.clone(), diagonal
        self.precision = as_precision(covariance, mean, diagonal)

    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        before, root = self.mean, self.root()
        ask = partial(self._add_parts, self.target, batch)
        moments = Moments(*ask(lambda part: part.moments(before, root, self.steps, batch)))
        if not all(map(all_finite, moments)):
            raise refuse_infinite(before)
        precision = self._update_precision(moments)
        if self.diagonal:
            direction = moments.gradient / precision
        else:
            direction = torch.cholesky_solve(moments.gradient.unsqueeze(1), factor_or_nan(precision)).squeeze(1)
        move = self.lr * direction  # lr P^-1 E[grad log p], P the new one
        if not all_finite(move) or not all_finite(precision):
            raise ValueError(f"the step overflows from z = {format_few(before)}; q is as it was. Take a smaller lr")

        def measure_gain(rate: float) -> float:
            (value,) = ask(lambda part: [part.value(before + rate * move, root, self.steps, batch)])
            return float(value - moments.value)

        rate = search_rate(measure_gain, float(moments.gradient @ move), 1.0, moments.value)
        self.mean, self.precision = before + rate * move, precision
        self.steps += 1
        return float(moments.value + self.entropy(root)), measure_square(moments, root) / 2

    def measure_bound(self, target: Target, batch: tuple[Any, ...]) -> float:
        root = self.root()
        (value,) = self._add_parts(target, batch, lambda part: [part.value(self.mean, root, self.steps, batch)])
        return float(value + self.entropy(root))

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        z = torch.randn(n, len(self.mean), generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + apply_root(self.root(), z)

    @property
    def covariance(self) -> Tensor:
        """Of q, shape (d, d)."""
        root = self.root()
        return torch.diag(root.square()) if self.diagonal else root @ root.mT

    @property
    def theta(self) -> Tensor:
        """The natural parameters of `ng.MultivariateNormal(d)`."""
        return MultivariateNormal(len(self.mean)).from_mean_covariance(self.mean, self.covariance)

    def root(self) -> Tensor:
        """L (d, d) with L L^T the covariance; the standard deviations (d,) where q is diagonal."""
        if self.diagonal:
            return self.precision.rsqrt()
        upper = self._factor(self.precision.flip(0, 1)).flip(0, 1)  # P = U U^T, U upper: U^-T is lower
        return torch.linalg.solve_triangular(upper.mT, torch.eye(len(upper)).to(upper), upper=False)

    def entropy(self, root: Tensor | None = None) -> Tensor:
        """Entropy of q, in nats.

        Args:
            root: From `root()`, where it is at hand.
        """
        root = self.root() if root is None else root
        scales = root if self.diagonal else root.diagonal()
        return scales.log().sum() + 0.5 * len(self.mean) * (1 + LOG_2PI)

    def _factor(self, precision: Tensor) -> Tensor:
        return require_factor(
            precision,
            f"q's precision at z = {format_few(self.mean)} has become singular in {precision.dtype}: take a smaller "
            "lr, a start with a smaller covariance, or float64",
        )

    def _update_precision(self, moments: Moments) -> Tensor:
        """(1 - lr) P - lr E[Hess log p], inside the cone: a direction in which it would leave keeps a half."""
        if self.diagonal:
            ratios = (1 - self.lr) - self.lr * moments.hessian / self.precision
            return self.precision * torch.where(ratios > EDGE, ratios, KEPT)
        # in units of the old P = F F^T: F^-1 P_new F^-T has to stay above 0
        plain = (1 - self.lr) * self.precision - self.lr * (moments.hessian + moments.hessian.mT) / 2
        factor = self._factor(self.precision)
        half = torch.linalg.solve_triangular(factor, plain, upper=False)
        ratios, vectors = eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
        if bool((ratios > EDGE).all()):
            return plain  # to the bit what a conjugate problem asks for
        turned = factor @ vectors
        return (turned * torch.where(ratios > EDGE, ratios, KEPT)) @ turned.mT


def measure_square(moments: Moments, root: Tensor) -> float:
    """|natural gradient|^2 of the bound in the Fisher metric: g^T P^-1 g + |L^T E[Hess] L + I|^2 / 2, in nats."""
    if root.dim() == 1:
        slope, bend = root * moments.gradient, root.square() * moments.hessian + 1
    else:
        slope, bend = root.mT @ moments.gradient, root.mT @ moments.hessian @ root
        bend.diagonal().add_(1)
    return float(slope.square().sum() + bend.square().sum() / 2)
