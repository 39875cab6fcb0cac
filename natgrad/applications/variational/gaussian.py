"""A Gaussian q fitted to a target by natural gradient steps in its own parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.applications.variational.convergence import squared_length
from natgrad.applications.variational.fitting import Fitted
from natgrad.applications.variational.joined import JoinedTarget, find_processes, join_target
from natgrad.applications.variational.network import Network, NetworkData, NetworkOptions, build_network
from natgrad.applications.variational.quadrature import Points
from natgrad.applications.variational.start import as_mean, as_precision, read_density
from natgrad.applications.variational.targets import LOG_2PI, LogJoint, Moments, Target, are_finite
from natgrad.families import MultivariateNormal
from natgrad.ground.checks import Group, check_integer, check_positive, read_groups
from natgrad.ground.linalg import all_finite, eigh, factor_or_nan, require_factor
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.pure import keep_gradient_mode, run_detached
from natgrad.optim import RankExchange, refuse_processes

OWN = ("target", "start", "covariance", "diagonal", "lr", "points", "group")
GROUPS = {"data": Group(NetworkData())}
KEPT = 0.5
"""Share of its precision that a direction keeps in which a step would leave the cone."""
EDGE = 1e-9
"""Share of the precision from which on a step counts as leaving."""
ENOUGH, HALVINGS = 0.4, 30
"""Share of the promised gain that a move of the mean must bring, and how often it is shortened for it."""


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
            found out by a call); a `Projected` likelihood from `ng.applications.variational`; or an nn.Module, with its
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
    check_positive("lr", lr)
    if points is not None and not isinstance(points, Points):
        raise TypeError(f"points is {points!r}, expected Sobol(), GaussHermite() or Draws()")
    if isinstance(target, nn.Module):
        refuse_processes(target, "target")
        net = build_network(target, data, points)
        spread = 1e-2 / data.prior_precision if covariance is None else covariance
        mean = net.start if start is None else as_mean(start)
        joined = join_target(net, group, mean, spread, data, diagonal, lr, points)
        return Variational(joined, mean, spread, diagonal, lr)
    if data.criterion is not None or data.data_size is not None:
        raise TypeError("criterion and data_size belong to a network; a log joint has its data inside")
    if start is None:
        raise ValueError("start is None, expected the mean of q at the start (d,), or the number of dimensions d")
    density, mean = read_density(target, start, points)
    spread = 1.0 if covariance is None else covariance
    return Variational(join_target(density, group, mean, spread, diagonal, lr, points), mean, spread, diagonal, lr)


class Variational(Fitted):
    """q = N(mean, covariance), and its steps; made by `variational`.

    Args:
        target: What q is fitted to.
        mean: Of q at the start, shape (d,).
        covariance: Of q at the start: a number, (d,) or (d, d).
        diagonal: True for a q with independent entries.
        lr: Rate in natural parameters; it may be changed between steps.

    Attributes:
        precision: Shape (d, d), or (d,) where q is diagonal.
        steps: Number of steps taken.
    """

    def __init__(self, target: Target, mean: Tensor, covariance: Tensor | float, diagonal: bool, lr: float) -> None:
        self.target, self.lr, self.diagonal, self.steps = target, lr, diagonal, 0
        self.mean = mean.clone()
        self.precision = as_precision(covariance, mean, diagonal)

    def __repr__(self) -> str:
        kind = type(self.target.own if isinstance(self.target, JoinedTarget) else self.target).__name__
        return write_choices(self, d=len(self.mean), target=kind, diagonal=self.diagonal, lr=self.lr, steps=self.steps)

    @keep_gradient_mode
    @torch.no_grad()
    def step(self, *batch: Any) -> float:
        """One natural gradient step.

        The precision stays positive definite at every rate: a direction in which it would not keeps half of what it
        had. The mean's step is shortened until E_q[log p] on this batch gains at least .4 of what its slope promised,
        which a quadratic does up to 1.2 times the best length: a diagonal q cannot run away.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.

        Returns:
            The evidence lower bound before the step, in nats.

        Raises:
            ValueError: If log p or its derivatives are not finite; q is then as it was.
        """
        return self.advance(batch)[0]

    @torch.no_grad()
    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        root = self.root()
        found = self.target.moments(self.mean, root, self.steps, batch)
        if not are_finite(found):
            raise ValueError(
                f"log p or a derivative is not finite near z = {format_few(self.mean)}; q is as it was. Start nearer, "
                "with a smaller covariance, or write log p over unconstrained z"
            )
        precision = self._update_precision(found)
        move = self.lr * _solve_precision(precision, found.gradient)
        if not all_finite(move) or not all_finite(precision):
            raise ValueError(f"the step overflows from z = {format_few(self.mean)}; q is as it was. Take a smaller lr")
        self.mean, self.precision = self._move_mean(found, move, root, batch), precision
        self.steps += 1
        return float(found.value + self.entropy(root)), squared_length(found, root) / 2

    def _move_mean(self, found: Moments, move: Tensor, root: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """The mean after as much of the move as E_q[log p] over the same points allows; as it was if nothing does."""
        promise, rate = float(found.gradient @ move), 1.0
        slack = 8 * torch.finfo(self.mean.dtype).eps * (1 + abs(float(found.value)))
        for _ in range(HALVINGS):
            mean = self.mean + rate * move
            gain = float(self.target.value(mean, root, self.steps, batch) - found.value)
            if gain >= ENOUGH * rate * promise - slack:  # False for a NaN
                return mean
            # the best length of the parabola through both values; a NaN is an overflow
            best = rate * promise / (2 * (rate * promise - gain)) if math.isfinite(gain) else 0.0
            rate *= min(max(best, 0.1), 0.5)
        return self.mean

    @property
    def steady(self) -> bool:
        return self.target.steady

    @property
    def processes(self) -> RankExchange:
        return find_processes(self.target)

    def snapshot(self) -> tuple[Tensor, Tensor, int]:
        return self.mean, self.precision, self.steps

    def restore(self, place: tuple[Tensor, Tensor, int]) -> None:
        self.mean, self.precision, self.steps = place

    @torch.no_grad()
    def elbo(self, *batch: Any) -> float:
        """The evidence lower bound in nats, with the points of the next step.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.
        """
        root = self.root()
        return float(self.target.moments(self.mean, root, self.steps, batch).value + self.entropy(root))

    @torch.no_grad()
    def elbos_elsewhere(self) -> list[float]:
        root = self.root()
        entropy, others = self.entropy(root), self.target.elsewhere(len(self.mean))
        return [float(target.value(self.mean, root, self.steps, ()) + entropy) for target in others]

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
        z = torch.randn(int(n), len(self.mean), generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        root = self.root()
        return self.mean + (z * root if self.diagonal else z @ root.mT)

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
        target = self.target.own if isinstance(self.target, JoinedTarget) else self.target
        if not isinstance(target, Network):
            raise TypeError("predict is for networks; use sample(n) and your own function of z")
        draws = self.sample(samples, generator=generator)
        return torch.stack([run_detached(partial(target.predict, z, inputs)) for z in draws])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"mean": self.mean, "precision": self.precision, "steps": self.steps, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: If it is of another size.
        """
        missing = {"mean", "precision", "steps", "lr"} - set(state)
        if missing or state["precision"].shape != self.precision.shape:
            raise ValueError(f"state lacks {sorted(missing)} or is of another size, expected precision of shape "
                             f"{tuple(self.precision.shape)}")  # fmt: skip
        self.mean, self.precision = state["mean"].to(self.mean).clone(), state["precision"].to(self.precision).clone()
        self.steps, self.lr = state["steps"], state["lr"]

    def _factor(self, precision: Tensor) -> Tensor:
        return require_factor(
            precision,
            f"q's precision at z = {format_few(self.mean)} has become singular in {precision.dtype}: take a smaller "
            "lr, a start with a smaller covariance, or float64",
        )

    def _update_precision(self, found: Moments) -> Tensor:
        """(1 - lr) P - lr E[Hess log p], inside the cone."""
        if self.diagonal:
            return self.precision * keep_in_cone((1 - self.lr) - self.lr * found.hessian / self.precision)
        plain = (1 - self.lr) * self.precision - self.lr * (found.hessian + found.hessian.mT) / 2
        factor = self._factor(self.precision)
        half = torch.linalg.solve_triangular(factor, plain, upper=False)
        ratios, vectors = eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
        if bool((ratios > EDGE).all()):
            return plain  # to the bit what a conjugate problem asks for
        turned = factor @ vectors
        return (turned * keep_in_cone(ratios)) @ turned.mT


def keep_in_cone(ratios: Tensor) -> Tensor:
    """New precisions in units of the old: as they are where positive, a half otherwise.

    ratios: Of new to old precision, (d,).
    """
    return torch.where(ratios > EDGE, ratios, KEPT)


def _solve_precision(precision: Tensor, gradient: Tensor) -> Tensor:
    if precision.dim() == 1:
        return gradient / precision
    return torch.cholesky_solve(gradient.unsqueeze(1), factor_or_nan(precision)).squeeze(1)


def format_few(values: Tensor) -> str:
    """The first three numbers as text.

    values: (d,).
    """
    shown = ", ".join(f"{float(v):.3g}" for v in values[:3])
    return f"({shown}{', ...' if len(values) > 3 else ''})"
