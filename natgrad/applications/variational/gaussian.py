"""A Gaussian q fitted to a target by natural gradient steps in its own parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from natgrad.applications.variational.quadrature import Draws, Points
from natgrad.applications.variational.targets import (
    LOG_2PI,
    Density,
    LogJoint,
    Moments,
    Network,
    Target,
    is_batched,
    sound,
)
from natgrad.families import MultivariateNormal
from natgrad.lapack import factor_or_nan, require_factor
from natgrad.linalg import all_finite, eigh
from natgrad.optim.parallel_models import refuse_processes
from natgrad.pure import run_detached

KEPT = 0.5
"""Share of its precision that a direction keeps in which a step would leave the cone."""
EDGE = 1e-9
"""Share of the precision from which on a step counts as leaving."""
ENOUGH, HALVINGS = 0.4, 30
"""Share of the promised gain that a move of the mean must bring, and how often it is shortened for it."""
WINDOW, LEFT, SMALLEST = 10, 1e-2, 2.0**-20
"""Steps over which bounds are compared; nats that a converged q may lack; share of its rate at which `fit` ends."""


class Bounds(list[float]):
    """The bounds that `fit` found, in nats, one before each step.

    Attributes:
        converged: True if the fit ended since nothing was left to gain; False if it ran out of steps, or of rate.
        gap: Half of the natural gradient's squared length before the last step, in nats: what a full step would gain of
            a bound that is quadratic. Noise keeps it from zero where points are drawn anew.
    """

    converged: bool = False
    gap: float = math.inf


def has_ended(bounds: Bounds, tolerance: float) -> bool:
    """True if the gap is below the tolerance; or below `LEFT` where `WINDOW` steps gained less than it each.

    The latter is how fits over points end where log p has kinks: the gap jumps when a point crosses one.
    """
    still = len(bounds) > WINDOW and abs(bounds[-1] - bounds[-1 - WINDOW]) < WINDOW * tolerance
    return bounds.gap < tolerance or (still and bounds.gap < LEFT)


def has_settled(bounds: Bounds, tolerance: float) -> bool:
    """True if the last `WINDOW` bounds gained less than the tolerance on those before, two standard errors included."""
    if len(bounds) < 2 * WINDOW:
        return False
    before, after = torch.tensor(bounds[-2 * WINDOW :], dtype=torch.float64).view(2, WINDOW)
    error = ((before.var() + after.var()) / WINDOW).sqrt()
    return float((after.mean() - before.mean()).abs() + 2 * error) < tolerance


def squared_length(found: Moments, root: Tensor) -> float:
    """|natural gradient|^2 of the bound in the Fisher metric: g^T P^-1 g + |L^T E[Hess] L + I|^2 / 2, in nats."""
    if root.dim() == 1:
        return float((root * found.gradient).square().sum() + (root.square() * found.hessian + 1).square().sum() / 2)
    turned = root.mT @ found.hessian @ root
    turned.diagonal().add_(1)
    return float((root.mT @ found.gradient).square().sum() + turned.square().sum() / 2)


def variational(
    target: LogJoint | Target | nn.Module,
    start: Tensor | Sequence[float] | int | None = None,
    *,
    criterion: Any = None,
    data_size: int | None = None,
    prior_precision: float = 1.0,
    covariance: Tensor | float | None = None,
    diagonal: bool = False,
    lr: float = 1.0,
    points: Points | None = None,
) -> Variational:
    """Natural-gradient variational inference: a normal q(z) that maximises E_q[log p(z, data)] + entropy of q.

    target: a function z -> log p(z, data), of rows (s, d) to (s,) or of one z (d,) to a scalar (which, is tried out); a
    `Projected` likelihood from natgrad.applications.variational; or an nn.Module, with its `criterion`, the `data_size`
    N of the whole set and the `prior_precision` of its weights.
    start: the mean of q (d,), or d for zeros, in float64 where the function takes it; the module's own weights by
    default.   covariance: of q at the start, a number, (d,) or (d, d); default 1, or for a network 1e-2 /
    prior_precision.   diagonal: q with independent entries.   lr: rate in natural parameters; 1 solves a conjugate
    problem in one step.   points: how expectations are taken; default a Gauss-Hermite grid in one or two dimensions and
    Sobol points beyond, a pair of draws for a network.

    Amari 1998; Khan & Rue 2023, the Bayesian learning rule: P <- (1 - lr) P - lr E[Hess log p] for the precision, and
    then m <- m + lr P^-1 E[grad log p]. ValueError or TypeError for what does not fit.
    """
    if not (isinstance(lr, Real) and 0 < lr < math.inf):
        raise ValueError(f"lr is {lr!r}, expected a number > 0")
    if points is not None and not isinstance(points, Points):
        raise TypeError(f"points is {points!r}, expected Sobol(), GaussHermite() or Draws()")
    if isinstance(target, nn.Module):
        refuse_processes(target, "target")
        net = _network(target, criterion, data_size, prior_precision, points)
        spread = 1e-2 / prior_precision if covariance is None else covariance
        return Variational(net, net.start if start is None else _mean(start), spread, diagonal, lr)
    if criterion is not None or data_size is not None:
        raise TypeError("criterion and data_size belong to a network; a log joint has its data inside")
    if start is None:
        raise ValueError("start is None, expected the mean of q at the start (d,), or the number of dimensions d")
    mean = _mean(start)
    if not isinstance(target, Target):
        if not callable(target):
            raise TypeError(f"target is {type(target).__name__}, expected a function z -> log p(z, data), or a module")
        mean = mean if isinstance(start, Tensor) else _fitting(target, mean)
        target = Density(target, points, is_batched(target, mean))
    elif points is not None:
        raise TypeError("points belong to a log joint or a network; Projected has its own order")
    return Variational(target, mean, 1.0 if covariance is None else covariance, diagonal, lr)


class Variational:
    """q = N(mean, covariance), and its steps; made by `variational`.

    mean (d,); precision (d, d), or (d,) where q is diagonal; steps taken so far. `lr` may be changed between steps.
    """

    def __init__(self, target: Target, mean: Tensor, covariance: Tensor | float, diagonal: bool, lr: float) -> None:
        self.target, self.lr, self.diagonal, self.steps = target, lr, diagonal, 0
        self.mean = mean.clone()
        self.precision = _precision(covariance, mean, diagonal)

    @torch.no_grad()
    def step(self, *batch: Any) -> float:
        """One natural gradient step. Returns the evidence lower bound before it, in nats.

        The precision stays positive definite at every rate: a direction in which it would not keeps half of what it
        had. The mean's step is shortened until E_q[log p] on this batch gains at least .4 of what its slope
        promised, which a quadratic does up to 1.2 times the best length: a diagonal q cannot run away.

        Args:
            batch: Inputs and targets for a network, nothing otherwise.

        Raises:
            ValueError: Where log p or its derivatives are not finite; q is then as it was.
        """
        return self._advance(batch)[0]

    def fit(self, steps: int = 100, *, tolerance: float = 1e-6) -> Bounds:
        """At most `steps`, until the natural gradient is shorter than `tolerance` says. Returns the bound before each.

        Where expectations are the same at every step, the bound never falls: a step that lowers it is taken back and
        the rate halved; two steps that do not double it again, up to `lr`. The list's `converged` tells why it ended,
        its `gap` how far from the optimum q was.

        Args:
            steps: At most.
            tolerance: In nats. `gap`, half of the natural gradient's squared length, is what a full step would gain.
                With the same points at every step q has converged once it is below, or below .01 where ten steps gained
                less than the tolerance each. With points drawn anew a step's bound is noise: q has converged
                once the last ten steps gained less than this on average, with two standard errors added. 1e-6 is out of
                reach then; take .1, or more points.
        """
        found, rate, past, risen = Bounds(), self.lr, self._place(), 0
        try:
            while len(found) < steps and not found.converged and self.lr > rate * SMALLEST:
                here = self._place()
                bound, gap = self._advance(())
                if self._fell(found, bound, tolerance):
                    self._go_back(past)
                    found.pop()  # the bound at `past`, which the next step measures again
                    risen, steps = 0, steps - 1
                    continue
                found.append(bound)
                found.gap, past, risen = gap, here, risen + 1
                found.converged = (has_ended if self.target.steady else has_settled)(found, tolerance)
                if risen % 2 == 0:
                    self.lr = min(rate, 2 * self.lr)
            if self.target.steady and self._fell(found, self.elbo(), tolerance):
                self._go_back(past)
        finally:
            self.lr = rate
        return found

    def _advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        """A step: the bound before it, and half of the natural gradient's squared length there, both in nats."""
        root = self.root()
        found = self.target.moments(self.mean, root, self.steps, batch)
        if not sound(found):
            raise ValueError(
                f"log p or a derivative is not finite near z = {_few(self.mean)}; q is as it was. Start nearer, with a "
                "smaller covariance, or write log p over unconstrained z"
            )
        precision = self._moved(found)
        move = self.lr * _solve(precision, found.gradient)
        if not all_finite(move) or not all_finite(precision):
            raise ValueError(f"the step overflows from z = {_few(self.mean)}; q is as it was. Take a smaller lr")
        self.mean, self.precision = self._climbed(found, move, root, batch), precision
        self.steps += 1
        return float(found.value + self.entropy(root)), squared_length(found, root) / 2

    def _climbed(self, found: Moments, move: Tensor, root: Tensor, batch: tuple[Any, ...]) -> Tensor:
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

    def _place(self) -> tuple[Tensor, Tensor, int]:
        return self.mean, self.precision, self.steps

    def _fell(self, found: list[float], bound: float, tolerance: float) -> bool:
        return bool(found) and self.target.steady and bound < found[-1] - tolerance

    def _go_back(self, place: tuple[Tensor, Tensor, int]) -> None:
        """To q as it was, with half of the rate."""
        (self.mean, self.precision, self.steps), self.lr = place, self.lr / 2

    @torch.no_grad()
    def elbo(self, *batch: Any) -> float:
        """The evidence lower bound in nats, with the points of the next step."""
        root = self.root()
        return float(self.target.moments(self.mean, root, self.steps, batch).value + self.entropy(root))

    @property
    def covariance(self) -> Tensor:
        """(d, d)."""
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
        """Of q, in nats."""
        root = self.root() if root is None else root
        scales = root if self.diagonal else root.diagonal()
        return scales.log().sum() + 0.5 * len(self.mean) * (1 + LOG_2PI)

    @torch.no_grad()
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws from q, (n, d)."""
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise ValueError(f"n is {n!r}, expected the number of draws, an integer >= 1")
        z = torch.randn(int(n), len(self.mean), generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        root = self.root()
        return self.mean + (z * root if self.diagonal else z @ root.mT)

    @torch.no_grad()
    def predict(self, inputs: Any, samples: int = 10, *, generator: torch.Generator | None = None) -> Any:
        """A network's outputs under `samples` draws of its weights, stacked: (samples, b, ...)."""
        if not isinstance(self.target, Network):
            raise TypeError("predict is for networks; use sample(n) and your own function of z")
        target = self.target
        draws = self.sample(samples, generator=generator)
        return torch.stack([run_detached(partial(target.predict, z, inputs)) for z in draws])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"mean": self.mean, "precision": self.precision, "steps": self.steps, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. ValueError for one of another size."""
        missing = {"mean", "precision", "steps", "lr"} - set(state)
        if missing or state["precision"].shape != self.precision.shape:
            raise ValueError(f"state lacks {sorted(missing)} or is of another size, expected precision of shape "
                             f"{tuple(self.precision.shape)}")  # fmt: skip
        self.mean, self.precision = state["mean"].to(self.mean).clone(), state["precision"].to(self.precision).clone()
        self.steps, self.lr = state["steps"], state["lr"]

    def _factor(self, precision: Tensor) -> Tensor:
        return require_factor(
            precision,
            f"q's precision at z = {_few(self.mean)} has become singular in {precision.dtype}: take a smaller lr, a "
            "start with a smaller covariance, or float64",
        )

    def _moved(self, found: Moments) -> Tensor:
        """(1 - lr) P - lr E[Hess log p], inside the cone."""
        if self.diagonal:
            return self.precision * inside((1 - self.lr) - self.lr * found.hessian / self.precision)
        plain = (1 - self.lr) * self.precision - self.lr * (found.hessian + found.hessian.mT) / 2
        factor = self._factor(self.precision)
        half = torch.linalg.solve_triangular(factor, plain, upper=False)
        ratios, vectors = eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
        if bool((ratios > EDGE).all()):
            return plain  # to the bit what a conjugate problem asks for
        turned = factor @ vectors
        return (turned * inside(ratios)) @ turned.mT


def inside(ratios: Tensor) -> Tensor:
    """New precisions in units of the old: as they are where positive, a half otherwise."""
    return torch.where(ratios > EDGE, ratios, KEPT)


def _solve(precision: Tensor, gradient: Tensor) -> Tensor:
    if precision.dim() == 1:
        return gradient / precision
    return torch.cholesky_solve(gradient.unsqueeze(1), factor_or_nan(precision)).squeeze(1)


def _mean(start: Any) -> Tensor:
    if isinstance(start, (int, np.integer)) and start >= 1:
        return torch.zeros(int(start), dtype=torch.float64)
    if isinstance(start, (list, tuple, np.ndarray)):
        start = _array(start)
    if not isinstance(start, Tensor) or start.dim() != 1 or len(start) == 0 or not start.is_floating_point():
        came = f"{start.dtype} {tuple(start.shape)}" if isinstance(start, Tensor) else repr(start)
        raise ValueError(f"start is {came}, expected the mean of q, a floating-point vector (d,), or d")
    if not all_finite(start):
        raise ValueError("start is not finite")
    return start.detach()


def _array(start: Any) -> Any:
    """A vector of numbers that is no tensor, in float64; what is none is returned as it came."""
    try:
        return torch.as_tensor(start, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return start


def _fitting(log_joint: LogJoint, mean: Tensor) -> Tensor:
    """The mean in float64, or in the default dtype where the function has tensors of that inside."""
    try:
        is_batched(log_joint, mean)
    except ValueError as error:
        if error.__cause__ is None:
            raise
        # torch does not mix dtypes in products
        return mean.to(torch.get_default_dtype())
    return mean


def _precision(covariance: Tensor | float, mean: Tensor, diagonal: bool) -> Tensor:
    given, d = torch.as_tensor(covariance).to(mean), len(mean)
    if given.shape not in ((), (d,), (d, d)) or (diagonal and given.dim() == 2):
        wanted = f"a number or ({d},)" + ("" if diagonal else f" or ({d}, {d})")
        raise ValueError(f"covariance has shape {tuple(given.shape)}, expected {wanted}")
    if given.dim() < 2:
        if not bool((given > 0).all()) or not all_finite(given):
            raise ValueError("covariance has entries that are not positive and finite")
        return (1 / given).expand(d).clone() if diagonal else torch.diag((1 / given).expand(d))
    return torch.cholesky_inverse(require_factor(given, "covariance is not positive definite"))


def _network(
    model: nn.Module, criterion: Any, data_size: int | None, prior_precision: float, points: Points | None
) -> Network:
    if criterion is None:
        raise ValueError("criterion is None, expected a torch.nn loss or an ng likelihood: what the outputs mean")
    if not isinstance(data_size, int) or data_size < 1:
        raise ValueError(f"data_size is {data_size!r}, expected the number of examples in the whole set")
    if not 0 < prior_precision < math.inf:
        raise ValueError(f"prior_precision is {prior_precision}, expected a number > 0")
    return Network(model, criterion, data_size, prior_precision, points or Draws(2))


def _few(values: Tensor) -> str:
    shown = ", ".join(f"{float(v):.3g}" for v in values[:3])
    return f"({shown}{', ...' if len(values) > 3 else ''})"
