"""Likelihoods of linear functions of z: regression, and sparse Gaussian processes by inducing points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_tensor
from natgrad.ground.linalg import require_factor, safe_cutoff
from natgrad.ground.typed_torch import as_tensor_like
from natgrad.variational.curvature import misses_kinks
from natgrad.variational.quadrature import GaussHermite
from natgrad.variational.targets import LOG_2PI, Moments, Target, require_no_batch

MISFIT = (
    "log_likelihood fails for f {f}, a row for each quadrature node; targets have the shape ({n},) and f has leading "
    "dimensions: {problem}"
)


@dataclass(frozen=True)
class Projected(Target):
    """sum_n log p(y_n | f_n) + log N(z; prior), f = rows z + offset + noise: regression, sparse Gaussian processes.

    Args:
        rows: A, shape (N, d).
        log_likelihood: f -> log p(y_n | f_n) entry by entry for f (..., N), with the targets inside.
        variance: Of a normal f_n around (A z + offset)_n, a number or (N,), such as the part of a Gaussian process that
            its inducing points leave open (`inducing`).
        precision: Of the prior, a number, (d,) or (d, d).
        mean: Of the prior, a number or (d,).
        offset: A number or (N,).
        order: Nodes of the Gauss-Hermite sum in each f_n, the only approximation made.
        prior_share: How often the logarithm of the prior counts; less than once where rows are split up.

    Raises:
        ValueError: If rows are no floating-point matrix, or a variance is negative.
        TypeError: If rows are no tensor.

    Example:
        >>> x = torch.randn(100, 3, dtype=torch.float64)
        >>> signs = torch.sign(x[:, 0])
        >>> likelihood = ng.variational.Projected(x, lambda f: nn.functional.logsigmoid(signs * f))
        >>> q = ng.variational(likelihood, start=3)
        >>> q.fit().converged
        True
    """

    rows: Tensor
    log_likelihood: Callable[[Tensor], Tensor]
    variance: Tensor | float = 0.0
    precision: Tensor | float = 1.0
    mean: Tensor | float = 0.0
    offset: Tensor | float = 0.0
    order: int = 32
    prior_share: float = 1.0

    def __post_init__(self) -> None:
        check_tensor("rows", self.rows)
        if self.rows.dim() != 2 or not self.rows.is_floating_point():
            raise ValueError(f"rows has shape {tuple(self.rows.shape)}, expected a floating-point A (N, d)")
        if bool((torch.as_tensor(self.variance) < 0).any()):
            raise ValueError("variance has negative entries; for a Gaussian process, add jitter to the diagonal of Kmm")

    def check(self, d: int) -> None:
        if self.rows.shape[1] != d:
            turned = "; it looks transposed: pass rows.mT" if len(self.rows) == d else ""
            raise ValueError(
                f"rows has shape {tuple(self.rows.shape)}, expected A (N, {d}), since z has {d} entries, the start's "
                f"number{turned}"
            )

    @property
    def steady(self) -> bool:
        return True

    def elsewhere(self, d: int) -> Sequence[Projected]:
        return [replace(self, order=points.order) for points in GaussHermite(self.order).others()]

    def take_part(self, parts: int, total: int | None = None) -> Projected:
        return replace(self, prior_share=self.prior_share / parts)

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        require_no_batch(batch)
        a = self.rows.to(mean)
        f, deviation, nodes, weights = self._nodes(mean, root)
        value, slope, curvature = self._entries(f, deviation, nodes, weights)
        prior, precision = self._prior(mean, root)
        gradient = a.mT @ slope - precision @ (mean - self.mean)  # f = A z + offset: the chain rule
        if root.dim() == 1:
            return Moments(value + prior, gradient, curvature @ a.square() - precision.diagonal())
        return Moments(value + prior, gradient, (a.mT * curvature) @ a - precision)

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        require_no_batch(batch)
        f, _, _, weights = self._nodes(mean, root)
        return (weights @ self._evaluate(f).detach()).sum() + self._prior(mean, root)[0]

    def _nodes(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """f at the quadrature nodes (order, N), its standard deviations (N,), the nodes (order, 1), their weights."""
        a = self.rows.to(mean)
        turned = a * root if root.dim() == 1 else a @ root
        deviation = (turned.square().sum(1) + as_tensor_like(self.variance, mean)).sqrt()
        nodes, weights = (part.to(mean) for part in GaussHermite(self.order).at(1, 0))
        return a @ mean + as_tensor_like(self.offset, mean) + nodes * deviation, deviation, nodes, weights

    def _evaluate(self, f: Tensor) -> Tensor:
        """log p(y_n | f_n) of every entry, of f (order, N).

        The dimension between keeps targets (N, 1) from meeting the nodes where these are N too.
        """
        shape, wide = tuple(f.shape), f.unsqueeze(1)
        try:
            logs = self.log_likelihood(wide)
        except RuntimeError as error:
            raise ValueError(MISFIT.format(f=shape, n=shape[1], problem=error)) from error
        if logs.shape != wide.shape:
            problem = f"it returned {tuple(logs.shape)} for {tuple(wide.shape)}, expected a number for every entry"
            raise ValueError(MISFIT.format(f=shape, n=shape[1], problem=problem))
        return logs.squeeze(1).to(f)

    def _entries(self, f: Tensor, deviation: Tensor, nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E of the sum of log p, and of its first and second derivative in every f_n (N,)."""
        if not f.numel():  # all rows are on other processes
            return f.new_zeros(()), deviation, deviation
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            logs = self._evaluate(f)
            (slope,) = torch.autograd.grad(logs.sum(), f, create_graph=True)
            bend = torch.zeros_like(f)
            if slope.requires_grad:
                (bend,) = torch.autograd.grad(slope.sum(), f)
        slope = slope.detach()
        mean = weights @ bend
        z, spread = nodes.expand_as(f), deviation.clamp(min=torch.finfo(f.dtype).tiny)
        rest = (slope - nodes * deviation * mean) * z / spread  # Stein's form of what a quadratic leaves
        if misses_kinks(rest, bend, weights):
            mean = mean + weights @ rest
        return (weights @ logs.detach()).sum(), weights @ slope, mean

    def _prior(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """E_q log N(z; prior), and the prior's precision (d, d)."""
        precision = as_tensor_like(self.precision, mean)
        if precision.dim() < 2:
            precision = torch.diag_embed(precision.expand(len(mean)))
        gap = mean - self.mean
        factor = torch.diag_embed(root) if root.dim() == 1 else root
        moved = (factor * (precision @ factor)).sum() + gap @ precision @ gap
        value = 0.5 * (torch.logdet(precision) - len(mean) * LOG_2PI - moved)
        return self.prior_share * value, self.prior_share * precision


def inducing(kmm: Tensor, kmn: Tensor, knn: Tensor) -> tuple[Tensor, Tensor]:
    """A (N, d) and the variance (N,) of a sparse Gaussian process, for `Projected` with precision 1.

    z are the whitened inducing values: u = L z with L L^T = kmm.

    Args:
        kmm: Covariance of the inducing values, shape (d, d).
        kmn: Their covariance with f, shape (d, N).
        knn: Variances of f, shape (N,).

    Raises:
        ValueError: If kmm is not positive definite.
    """
    for name, part in (("kmm", kmm), ("kmn", kmn), ("knn", knn)):
        check_tensor(name, part)
    enough = max(1e-6, 10 * safe_cutoff(len(kmm), kmm.dtype))
    factor = require_factor(kmm, f"kmm is not positive definite; add {enough:.0e} of its mean diagonal to its diagonal")
    rows = torch.linalg.solve_triangular(factor, kmn, upper=False).mT
    return rows, (knn - rows.square().sum(1)).clamp(min=0)
