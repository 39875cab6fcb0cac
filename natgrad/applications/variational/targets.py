"""What q is fitted to: a log joint density, a likelihood of linear functions of z, a network with data."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.applications.variational.curvature import expected_hessian, misses_kinks
from natgrad.applications.variational.quadrature import GaussHermite, Points, default_points
from natgrad.derivatives import exact_derivatives
from natgrad.families import Criterion, as_criterion
from natgrad.lapack import require_factor
from natgrad.linalg import all_finite, safe_cutoff
from natgrad.metrics import fisher
from natgrad.pure import PureModel, as_call
from natgrad.spaces import Params, Space, trainable

LogJoint = Callable[[Tensor], Tensor]
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Moments:
    """E_q of log p(z, data), of its gradient (d,), and of its Hessian: (d, d), or the diagonal (d,)."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class Target(ABC):
    """log p(z, data) as a function of z (d,), known by its expected derivatives under a normal distribution.

    steady: moments of the same q are the same at every step, so that two bounds can be compared.
    """

    @property
    def steady(self) -> bool:
        """Unless a subclass knows better, it may draw anew."""
        return False

    @abstractmethod
    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        """mean (d,); root: L (d, d) with L L^T the covariance, or standard deviations (d,) where q is diagonal."""

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        """E_q of log p(z, data) over the points of `moments`: what a step is judged by. A subclass may be faster."""
        return self.moments(mean, root, step, batch).value


def spread(root: Tensor, z: Tensor) -> Tensor:
    """L z for rows z (s, d)."""
    return z * root if root.dim() == 1 else z @ root.mT


@dataclass(frozen=True)
class Density(Target):
    """log p(z, data) as a function. batched: it takes (s, d) to (s,); otherwise (d,) to a scalar."""

    log_joint: LogJoint
    points: Points | None
    batched: bool

    @property
    def steady(self) -> bool:
        return self.points is None or self.points.steady

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        require_no_batch(batch)
        z, weights = self._points(mean, step)
        parts = (mean + spread(root, z)).split(_chunk(len(mean)))
        values = torch.cat([self.values(part).detach() for part in parts])
        found, bends = zip(*(self._derivatives(part) for part in parts), strict=True)
        slopes = torch.cat(found)
        curvatures = None if any(bend is None for bend in bends) else torch.cat(bends)
        return Moments(weights @ values, weights @ slopes, expected_hessian(slopes, curvatures, z, weights, root))

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        require_no_batch(batch)
        z, weights = self._points(mean, step)
        places = mean + spread(root, z)
        return weights @ torch.cat([self.values(part).detach() for part in places.split(_chunk(len(mean)))])

    def _points(self, mean: Tensor, step: int) -> tuple[Tensor, Tensor]:
        z, weights = (self.points or default_points(len(mean))).at(len(mean), step)
        return z.to(mean), weights.to(mean)

    def values(self, z: Tensor) -> Tensor:
        """log p(z, data) of rows z (s, d): (s,)."""
        return (self.log_joint(z) if self.batched else mapped(self.log_joint, z)).reshape(len(z))

    def _derivatives(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients (s, d) and Hessians (s, d, d) at rows z; None for these where torch has no second derivative."""

        def one(row: Tensor) -> Tensor:
            return self.log_joint(row.unsqueeze(0) if self.batched else row).reshape(())

        slope = torch.func.grad(one)
        try:
            # twice in reverse: torch's forward derivative of logaddexp is NaN where both terms underflow
            with exact_derivatives():
                found, curvature = mapped(lambda row: (slope(row), torch.func.jacrev(slope)(row)), z)
        except (RuntimeError, NotImplementedError) as error:
            if "derivative" not in str(error) or "implemented" not in str(error):
                raise
            return mapped(slope, z).detach(), None
        return found.detach(), curvature.detach()


@dataclass(frozen=True)
class Projected(Target):
    """sum_n log p(y_n | f_n) + log N(z; prior), f = rows z + offset + noise: regression, sparse Gaussian processes.

    rows: A (N, d).   log_likelihood: of f (..., N), entry by entry, the targets inside: f -> log p(y_n | f_n).
    variance: (N,), of a normal f_n around (A z + offset)_n, such as the part of a Gaussian process that its inducing
    points leave open (`inducing`).   precision: of the prior, a number, (d,) or (d, d).   mean: of the prior, a number
    or (d,).   order: nodes of the Gauss-Hermite sum in each f_n, the only approximation made.
    """

    rows: Tensor
    log_likelihood: Callable[[Tensor], Tensor]
    variance: Tensor | float = 0.0
    precision: Tensor | float = 1.0
    mean: Tensor | float = 0.0
    offset: Tensor | float = 0.0
    order: int = 32

    def __post_init__(self) -> None:
        if self.rows.dim() != 2 or not self.rows.is_floating_point():
            raise ValueError(f"rows has shape {tuple(self.rows.shape)}, expected a floating-point A (N, d)")
        if bool((torch.as_tensor(self.variance) < 0).any()):
            raise ValueError("variance has negative entries; for a Gaussian process, add jitter to the diagonal of Kmm")

    @property
    def steady(self) -> bool:
        return True

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        require_no_batch(batch)
        a = self.rows.to(mean)
        f, deviation, nodes, weights = self._nodes(mean, root)
        value, slope, curvature = self._entries(f, deviation, nodes, weights)
        prior, precision = self._prior(mean, root)
        gradient = a.mT @ slope - precision @ (mean - self.mean)
        if root.dim() == 1:
            return Moments(value + prior, gradient, curvature @ a.square() - precision.diagonal())
        return Moments(value + prior, gradient, (a.mT * curvature) @ a - precision)

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        require_no_batch(batch)
        f, _, _, weights = self._nodes(mean, root)
        return (weights @ self.log_likelihood(f).detach()).sum() + self._prior(mean, root)[0]

    def _nodes(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """f at the quadrature nodes (order, N), its standard deviations (N,), the nodes (order, 1), their weights."""
        a = self.rows.to(mean)
        turned = a * root if root.dim() == 1 else a @ root
        deviation = (turned.square().sum(1) + torch.as_tensor(self.variance).to(mean)).sqrt()
        nodes, weights = (part.to(mean) for part in GaussHermite(self.order).at(1, 0))
        return a @ mean + torch.as_tensor(self.offset).to(mean) + nodes * deviation, deviation, nodes, weights

    def _entries(self, f: Tensor, deviation: Tensor, nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E of the sum of log p, and of its first and second derivative in every f_n (N,)."""
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            found = self.log_likelihood(f)
            if found.shape != f.shape:
                raise ValueError(
                    f"log_likelihood returned {tuple(found.shape)} for f {tuple(f.shape)}, expected a number for every "
                    "entry: f comes with a leading dimension of quadrature nodes"
                )
            (slope,) = torch.autograd.grad(found.sum(), f, create_graph=True)
            bend = torch.zeros_like(f)
            if slope.requires_grad:
                (bend,) = torch.autograd.grad(slope.sum(), f)
        slope = slope.detach()
        mean = weights @ bend
        z, spread = nodes.expand_as(f), deviation.clamp(min=torch.finfo(f.dtype).tiny)
        rest = (slope - nodes * deviation * mean) * z / spread  # Stein's form of what a quadratic leaves
        if misses_kinks(rest, bend, weights):
            mean = mean + weights @ rest
        return (weights @ found.detach()).sum(), weights @ slope, mean

    def _prior(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """E_q log N(z; prior), and the prior's precision (d, d)."""
        precision = torch.as_tensor(self.precision).to(mean)
        if precision.dim() < 2:
            precision = torch.diag_embed(precision.expand(len(mean)))
        gap = mean - self.mean
        whole = torch.diag_embed(root) if root.dim() == 1 else root
        moved = (whole * (precision @ whole)).sum() + gap @ precision @ gap
        return 0.5 * (torch.logdet(precision) - len(mean) * LOG_2PI - moved), precision


def inducing(kmm: Tensor, kmn: Tensor, knn: Tensor) -> tuple[Tensor, Tensor]:
    """A (N, d) and the variance (N,) of a sparse Gaussian process, for `Projected` with precision 1.

    kmm (d, d), kmn (d, N): the covariance of the inducing values and of these with f; knn (N,): f's variances. z are
    the whitened inducing values, u = L z, L L^T = kmm. ValueError if kmm is not positive definite.
    """
    enough = max(1e-6, 10 * safe_cutoff(len(kmm), kmm.dtype))
    factor = require_factor(kmm, f"kmm is not positive definite; add {enough:.0e} of its mean diagonal to its diagonal")
    rows = torch.linalg.solve_triangular(factor, kmn, upper=False).mT
    return rows, (knn - rows.square().sum(1)).clamp(min=0)


class Network(Target):
    """A network's weights: data_size times the mean log-likelihood of a batch, plus log N(weights; 0, 1 / precision).

    The Hessian is that of the Gauss-Newton form: minus the Fisher metric of `ng.fisher`, which is never negative.
    """

    def __init__(self, model: nn.Module, criterion: Any, data_size: int, precision: float, points: Points) -> None:
        self.model, self.data_size, self.precision, self.points = model, data_size, precision, points
        self.criterion: Criterion = as_criterion(criterion)
        params = trainable(model)
        self.space = Space(params)
        self.metric = fisher(model, self.criterion)
        self.start = self.space.flatten({name: p.detach() for name, p in params.items()})

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        inputs, targets = require_batch(batch)
        z, weights = (part.to(mean) for part in self.points.at(len(mean), step))
        found = [self._one(place, root.dim() == 1, inputs, targets) for place in mean + spread(root, z)]
        value, gradient, hessian = (
            torch.einsum("s,s...->...", weights, torch.stack(part)) for part in zip(*found, strict=True)
        )
        return Moments(value, gradient, hessian)

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        inputs, targets = require_batch(batch)
        z, weights = (part.to(mean) for part in self.points.at(len(mean), step))
        places = mean + spread(root, z)
        return weights @ torch.stack(
            [self._log_joint(self._loss(place, inputs, targets)[0], place) for place in places]
        )

    def predict(self, place: Tensor, inputs: Any) -> Any:
        """The network's outputs with the weights z (d,)."""
        return PureModel(self.model, as_call(inputs))(self.space.unflatten(place))

    def _one(self, place: Tensor, diagonal: bool, inputs: Any, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Value, gradient and Hessian at the weights z (d,)."""
        params = {name: part.clone().requires_grad_() for name, part in self.space.unflatten(place).items()}
        with torch.enable_grad():
            loss, share = self._loss(params, inputs, targets)
        slopes = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        gradient = self.space.flatten(dict(zip(params, slopes, strict=True))) + self.precision * place
        metric = self.metric.at(params, inputs)
        curvature = (metric.diagonal() if diagonal else metric.dense()) * share
        own = torch.full_like(place, self.precision)
        value = self._log_joint(loss.detach(), place)
        return value, -gradient, -(curvature + (own if diagonal else torch.diag(own)))

    def _loss(self, place: Tensor | Params, inputs: Any, targets: Any) -> tuple[Tensor, float]:
        """-log p(data | weights), scaled to the whole set from a batch; rows of the outputs that the set has."""
        params = self.space.unflatten(place) if isinstance(place, Tensor) else place
        call = as_call(inputs)
        rows = self.criterion.family.nll(PureModel(self.model, call)(params), targets)
        return rows.sum() * (self.data_size / call.batch()), self.data_size * len(rows) / call.batch()

    def _log_joint(self, loss: Tensor, place: Tensor) -> Tensor:
        prior = 0.5 * (len(place) * (math.log(self.precision) - LOG_2PI) - self.precision * place.square().sum())
        return prior - loss


def require_no_batch(batch: tuple[Any, ...]) -> None:
    """TypeError where data are handed to a target that has them inside."""
    if batch:
        raise TypeError("step takes no data here: a log joint has them inside; only networks are trained in batches")


def require_batch(batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """(inputs, targets). TypeError for anything else."""
    if len(batch) != 2:
        raise TypeError(f"step got {len(batch)} arguments, expected inputs and targets: q.step(x, y)")
    return batch[0], batch[1]


def sound(found: Moments) -> bool:
    """Whether all moments are finite."""
    return all(all_finite(part) for part in (found.value, found.gradient, found.hessian))


def _chunk(d: int) -> int:
    return max(1, 2**22 // max(1, d * d))


def mapped(function: Callable[[Tensor], Any], z: Tensor) -> Any:
    """The function of every row at once. Quietly: torch warns where it takes one after the other, as in prod()."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return torch.func.vmap(function)(z)


def is_batched(log_joint: LogJoint, start: Tensor) -> bool:
    """Whether log_joint takes rows (s, d) to (s,) or (s, 1), or one z (d,) to a scalar: by trying. Else ValueError."""
    rows = start + torch.linspace(0, 1e-3, 3, dtype=start.dtype, device=start.device).unsqueeze(1)
    try:
        together, alone = log_joint(rows), log_joint(rows[1:2])
        if together.shape in ((3,), (3, 1)) and alone.numel() == 1:
            there, here = together[1].reshape(()), alone.reshape(())
            return bool(torch.allclose(there, here, rtol=1e-3, atol=1e-6, equal_nan=True))
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        pass  # it takes one z, then
    try:
        value = log_joint(start)
    except RuntimeError as error:
        raise ValueError(
            f"log_joint fails for z {tuple(start.shape)} in {start.dtype}: {error}. It takes one z (d,) or rows "
            "(s, d): pass the start in the dtype of your data"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"log_joint returned {came} for z {tuple(start.shape)}, expected a tensor: a scalar, or (s,) for rows"
        )
    return False
