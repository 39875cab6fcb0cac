"""What q is fitted to: log p(z, data), known by its expected derivatives; a log joint density as a function."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.ground.derivatives import exact_derivatives
from natgrad.variational.curvature import expected_hessian
from natgrad.variational.quadrature import Points, default_points

LogJoint = Callable[[Tensor], Tensor]
LOG_2PI = math.log(2 * math.pi)
LEAVING = ("numpy()", "data pointer", "vmap: It looks like", "data-dependent control flow", "does not require grad")
"""Words of torch's errors where a function of z calls others than torch's, or `torch.autograd.grad`."""


class Moments(NamedTuple):
    """E_q of log p(z, data) and of its derivatives.

    Attributes:
        value: Of log p, a scalar.
        gradient: Of its gradient, shape (d,).
        hessian: Of its Hessian, shape (d, d), or the diagonal (d,).
    """

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class Target(ABC):
    """log p(z, data) as a function of z (d,), known by its expected derivatives under a normal distribution."""

    @property
    def steady(self) -> bool:
        """True if moments of the same q are the same at every step, so that two bounds can be compared."""
        return False

    @abstractmethod
    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        """E_q of log p(z, data) and of its derivatives.

        Args:
            mean: Of q, shape (d,).
            root: L (d, d) with L L^T the covariance of q, or standard deviations (d,) where q is diagonal.
            step: Number of the step, for points that are drawn anew.
            batch: The arguments of the step: inputs and targets for a network.
        """

    def check(self, d: int) -> None:
        """ValueError if z cannot have d entries.

        Args:
            d: Number of variables.
        """

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        """E_q of log p(z, data) over the points of `moments`, by which a step is judged. A subclass may be faster.

        Args:
            mean: Of q, shape (d,).
            root: L (d, d), or standard deviations (d,) where q is diagonal.
            step: Number of the step.
            batch: The arguments of the step.
        """
        return self.moments(mean, root, step, batch).value

    def elsewhere(self, d: int) -> Sequence[Target]:
        """The same by other points, which show how exactly its expectations are known; none where there are none.

        Args:
            d: Number of dimensions.
        """
        return ()

    def take_part(self, parts: int, total: int | None = None) -> Target:
        """One of several targets whose sum is log p: the same with its part of the prior, where it knows that.

        Args:
            parts: How many they are.
            total: Examples in the batches of all of them.
        """
        return self


def apply_root(root: Tensor, z: Tensor) -> Tensor:
    """L z for every row z. root: L (d, d), or standard deviations (d,). z: (s, d)."""
    return z * root if root.dim() == 1 else z @ root.mT


class SlopeTarget(Target):
    """A target that is known at single places: a function, or a network's weights."""

    points: Points | None  # how expectations are taken; None for the default of the dimension

    @abstractmethod
    def slopes(self, places: Tensor, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """log p (s,) and its gradient (s, d) at every place. places: (s, d)."""

    @abstractmethod
    def values_at(self, places: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """log p at every place, shape (s,). places: (s, d)."""

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        z, weights = self.place_points(mean, step)
        return weights @ self.values_at(mean + apply_root(root, z), batch)

    def place_points(self, mean: Tensor, step: int, d: int | None = None) -> tuple[Tensor, Tensor]:
        """Points (s, d) and weights (s,) in the dtype and on the device of the mean; default in its dimension."""
        d = len(mean) if d is None else d
        z, weights = (self.points or default_points(d)).at(d, step)
        return z.to(mean), weights.to(mean)


@dataclass(frozen=True)
class DensityTarget(SlopeTarget):
    """log p(z, data) as a function."""

    log_joint: LogJoint
    points: Points | None
    batched: bool  # true if it takes (s, d) to (s,), False if it takes (d,) to a scalar

    @property
    def steady(self) -> bool:
        return self.points is None or self.points.steady

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        z, weights = self.place_points(mean, step)
        places = mean + apply_root(root, z)
        values, parts = self.values_at(places, batch), places.split(_rows_at_once(len(mean)))
        gradients, bends = zip(*(self._derivatives(part) for part in parts), strict=True)
        slopes = torch.cat(gradients)
        check_slopes(values, slopes)
        curvatures = None if any(bend is None for bend in bends) else torch.cat(bends)
        return Moments(weights @ values, weights @ slopes, expected_hessian(slopes, curvatures, z, weights, root))

    def slopes(self, places: Tensor, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        require_no_batch(batch)
        slopes, values = map_rows(torch.func.grad_and_value(self._evaluate), places)
        check_slopes(values, slopes)
        return values.detach(), slopes.detach()

    def elsewhere(self, d: int) -> Sequence[DensityTarget]:
        return [replace(self, points=points) for points in (self.points or default_points(d)).others()]

    def values_at(self, places: Tensor, batch: tuple[Any, ...]) -> Tensor:
        require_no_batch(batch)
        return torch.cat([self.values(part).detach() for part in places.split(_rows_at_once(places.shape[1]))])

    def values(self, z: Tensor) -> Tensor:
        """log p(z, data) of every row, shape (s,). z: (s, d)."""
        # in z's dtype: a network in single precision may stand inside
        with explain_leaving():
            return (self.log_joint(z) if self.batched else map_rows(self.log_joint, z)).reshape(len(z)).to(z)

    def _evaluate(self, row: Tensor) -> Tensor:
        """log p of one z (d,), a scalar."""
        return self.log_joint(row.unsqueeze(0) if self.batched else row).reshape(()).to(row)

    def _derivatives(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients (s, d) and Hessians (s, d, d) at rows z; None for these where torch has no second derivative."""
        slope = torch.func.grad(self._evaluate)
        try:
            # twice in reverse: torch's forward derivative of logaddexp is NaN where both terms underflow
            with exact_derivatives():
                gradients, curvature = map_rows(lambda row: (slope(row), torch.func.jacrev(slope)(row)), z)
        except (RuntimeError, NotImplementedError) as error:
            if "derivative" not in str(error) or "implemented" not in str(error):
                raise
            return map_rows(slope, z).detach(), None
        return gradients.detach(), curvature.detach()


def require_no_batch(batch: tuple[Any, ...]) -> None:
    """Check that no data are handed to a target that has them inside."""
    if batch:
        raise TypeError("step takes no data here: a log joint has them inside; only networks are trained in batches")


def check_slopes(values: Tensor, slopes: Tensor) -> None:
    """Check that log p has gradients (s, d) where its values (s,) differ."""
    if len(slopes) and not bool(slopes.any()) and bool((values != values[0]).any()):
        raise ValueError(
            "log p differs between points, and its gradient is zero at all of them: it is cut off, as by detach(), "
            "or made of steps. Write it with torch's functions of z, and smoothly"
        )


def _rows_at_once(d: int) -> int:
    return max(1, 2**22 // max(1, d * d))


def map_rows(function: Callable[[Tensor], Any], z: Tensor) -> Any:
    """The function of every row of z (s, d) at once. torch's warning of a loop inside, as for prod(), is silenced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        with explain_leaving():
            return torch.func.vmap(function)(z)


@contextmanager
def explain_leaving() -> Generator[None]:
    """Inside, an error of a log p that is not made of torch's functions alone says how to write it."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in LEAVING):
            raise
        raise ValueError(
            f"log p leaves torch: {error}. Its derivatives are needed: write it with torch's functions of z, without "
            "numpy(), item(), or a branch on values of z, and derivatives inside of it by torch.func.grad"
        ) from error


def is_batched(log_joint: LogJoint, start: Tensor) -> bool:
    """True if log_joint takes rows (s, d) to (s,) or (s, 1), False if it takes one z (d,) to a scalar: by trying."""
    rows = start + torch.linspace(0, 1e-3, 3, dtype=start.dtype, device=start.device).unsqueeze(1)
    try:
        together, alone = log_joint(rows), log_joint(rows[1:2])
        if together.shape in ((3,), (3, 1)) and alone.numel() == 1:
            there, here = together[1].reshape(()), alone.reshape(())
            return bool(torch.allclose(there, here, rtol=1e-3, atol=1e-6, equal_nan=True))
    except Exception:  # noqa: BLE001 it takes one z, then, and may check that with any error of its own
        pass
    try:
        value = log_joint(start)
    except RuntimeError as error:
        raise ValueError(
            f"log_joint fails for z {tuple(start.shape)} in {start.dtype}: {error}. It takes one z (d,) or rows "
            "(s, d): pass the start in the dtype of your data; derivatives inside of it are taken by torch.func.grad"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"log_joint returned {came} for z {tuple(start.shape)}, expected a tensor: a scalar, or (s,) for rows"
        )
    return False
