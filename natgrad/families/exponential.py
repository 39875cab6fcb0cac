"""Exponential families: p(x) = h(x) exp(theta . T(x) - psi(theta)), and all that follows from T and psi."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.linalg import psd_root
from natgrad.operators import Dense, Operator

NEWTON_STEPS = 100


class ExponentialFamily(ABC):
    """n natural parameters theta, statistics T(x), log-partition psi; the rest follows.

    theta and eta have shape (..., n), x (..., event): leading dimensions are batches, and gradients flow through all
    methods. eta = E[T] = grad psi are the expectation coordinates; Hess psi = Cov(T) is the Fisher matrix in theta, its
    inverse that in eta. A subclass sets `size` and writes `statistics`, `log_partition` and `draw`; it overrides what
    it knows in closed form.
    """

    size: int
    """n."""

    @abstractmethod
    def statistics(self, x: Tensor) -> Tensor:
        """T(x), (..., event) -> (..., n)."""

    @abstractmethod
    def log_partition(self, theta: Tensor) -> Tensor:
        """psi(theta), (..., n) -> (...)."""

    @abstractmethod
    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent x (count, ..., event)."""

    def sample(self, theta: Tensor, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n independent draws for every theta (..., size): (n, ..., event). No gradients."""
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n is {n!r}, expected the number of draws, an integer >= 1")
        with torch.no_grad():
            return self.draw(self.check(theta), n, generator)

    def inside(self, theta: Tensor) -> Tensor:
        """Whether psi(theta) is finite, (..., n) -> (...) of bool. Default: everywhere."""
        return torch.ones(theta.shape[:-1], dtype=torch.bool, device=theta.device)

    def log_base(self, x: Tensor) -> Tensor:
        """log h(x), (..., event) -> (...). Default: zero."""
        found = self.statistics(x)
        return found.new_zeros(found.shape[:-1])

    def mean_log_base(self, theta: Tensor) -> Tensor:
        """E[log h(x)], (..., n) -> (...). Default: zero."""
        return theta.new_zeros(theta.shape[:-1])

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        """log p(x; theta), constants included; batch shapes broadcast."""
        theta = self.check(theta)
        return (theta * self.statistics(x)).sum(-1) - self.log_partition(theta) + self.log_base(x)

    def expectation(self, theta: Tensor) -> Tensor:
        """eta = E[T(x)] = grad psi(theta), (..., n) -> (..., n)."""
        return torch.func.grad(lambda t: self.log_partition(t).sum())(self.check(theta))

    def natural(self, eta: Tensor) -> Tensor:
        """theta with E[T] = eta, (..., n) -> (..., n). Default: Newton's method, which stays inside the domain.

        ValueError where it does not arrive: eta is then on the boundary of what expectations can be, or beyond.
        """
        eta = self.check_shape(eta, "eta")
        with torch.no_grad():
            found = newton(self, eta.detach().reshape(-1, self.size), self.guess(eta.detach().reshape(-1, self.size)))
            found = found.view(eta.shape)
            curvature = self.covariance(found)
        if not eta.requires_grad:
            return found
        return found + torch.linalg.solve(curvature, (eta - eta.detach()).unsqueeze(-1)).squeeze(-1)  # I_eta d eta

    def guess(self, eta: Tensor) -> Tensor:
        """Where Newton's method starts, (b, n) -> (b, n), inside the domain. Default: zero."""
        return torch.zeros_like(eta)

    def covariance(self, theta: Tensor) -> Tensor:
        """Cov(T) = Hess psi(theta) as matrices, (..., n) -> (..., n, n)."""
        theta = self.check(theta)
        flat = theta.reshape(-1, self.size)
        return torch.func.vmap(torch.func.hessian(self.log_partition))(flat).view(*theta.shape, self.size)

    def fisher(self, theta: Tensor) -> Operator:
        """The Fisher matrix in the natural parameters of one distribution, theta (n,)."""
        return Dense(symmetric(self.covariance(self.single(theta, "theta"))).detach())

    def fisher_expectation(self, eta: Tensor) -> Operator:
        """The Fisher matrix in the expectation parameters, eta (n,): the inverse of that in the natural ones."""
        return Dense(symmetric(torch.linalg.inv(self.covariance(self.natural(self.single(eta, "eta"))))).detach())

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """Cov(T) times tangents, row by row, (R, n), (R, n) -> (R, n): the family as a form on a model's outputs."""
        return (self.covariance(outputs) @ tangents.unsqueeze(-1)).squeeze(-1)

    def root(self, outputs: Tensor) -> Tensor:
        """F (R, n, n) with Cov(T) = F F^T for every row."""
        return psd_root(self.covariance(outputs))

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """KL(p(.; theta), p(.; other)) in nats, (..., n), (..., n) -> (...): the Bregman divergence of psi."""
        return self.bregman(other, theta)

    def bregman(self, theta: Tensor, other: Tensor) -> Tensor:
        """psi(theta) - psi(other) - grad psi(other) . (theta - other), which is KL(p(.; other), p(.; theta))."""
        theta, other = self.check(theta), self.check(other)
        slope = self.expectation(other)
        return self.log_partition(theta) - self.log_partition(other) - (slope * (theta - other)).sum(-1)

    def conjugate(self, eta: Tensor) -> Tensor:
        """phi(eta) = theta . eta - psi(theta), the Legendre transform of psi, (..., n) -> (...)."""
        theta = self.natural(eta)
        return (theta * eta).sum(-1) - self.log_partition(theta)

    def entropy(self, theta: Tensor) -> Tensor:
        """-E[log p] in nats, (..., n) -> (...): psi - theta . eta - E[log h]."""
        theta = self.check(theta)
        return self.log_partition(theta) - (theta * self.expectation(theta)).sum(-1) - self.mean_log_base(theta)

    def mle(self, x: Tensor) -> Tensor:
        """Maximum likelihood over the first dimension of x (b, ..., event): the theta whose E[T] is the mean of T."""
        if len(x) == 0:
            raise ValueError("x is empty, expected at least one example")
        return self.natural(self.statistics(x).mean(0))

    def check(self, theta: Tensor) -> Tensor:
        """theta as it is. ValueError for another size, or outside the domain."""
        self.check_shape(theta, "theta")
        if torch.func.debug_unwrap(theta) is theta and not bool(self.inside(theta.detach()).all()):
            raise ValueError(f"theta is outside the natural parameters of {self!r}: {self.domain}")
        return theta

    domain: str = "every finite theta is inside, so look for a NaN"
    """What `inside` asks for, in words."""

    def check_shape(self, value: Tensor, name: str) -> Tensor:
        """The value as it is. ValueError unless it is a floating tensor (..., n)."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            came = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} is {came}, expected a floating-point tensor (..., {self.size})")
        if value.dim() == 0 or value.shape[-1] != self.size:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected (..., {self.size}): the parameters of {self!r}"
            )
        return value

    def single(self, value: Tensor, name: str) -> Tensor:
        """The value as it is. ValueError unless its shape is (n,)."""
        if self.check_shape(value, name).dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected ({self.size},): an operator is that of one "
                "distribution; covariance(theta) gives the matrices of many"
            )
        return value


def newton(family: ExponentialFamily, eta: Tensor, theta: Tensor) -> Tensor:
    """theta (b, n) that maximises theta . eta - psi(theta), which is concave, by steps halved until it grows.

    ValueError if some row's gradient does not vanish.
    """

    def gain(at: Tensor) -> Tensor:
        value = (at * eta).sum(1) - family.log_partition(at)
        return torch.where(family.inside(at), value, -torch.inf).nan_to_num(nan=-torch.inf)

    accuracy = 30 * torch.finfo(eta.dtype).eps
    left = eta.new_full((), torch.inf)
    for _ in range(NEWTON_STEPS):
        residual = eta - family.expectation(theta)
        left = (residual.abs() / (1 + eta.abs())).amax()
        factor, info = torch.linalg.cholesky_ex(family.covariance(theta))
        both = torch.stack([residual, accuracy * eta.abs()], dim=2)
        step, doubt = torch.cholesky_solve(both, factor).unbind(2)
        if bool(info.any()) or not bool(torch.isfinite(step).all()):
            break
        # on the edge the residual vanishes too, but theta runs off in steps of about one, or round-off decides on it
        width = 1 + theta.abs()
        steady = bool(((step.abs() <= 1e-3 * width) & (doubt.abs() <= 0.1 * width)).all())
        if steady and left <= accuracy:
            return theta
        moved = halved(gain, theta, step)
        if steady and left <= 1e3 * accuracy and torch.equal(moved, theta):
            return theta  # round-off leaves no more
        theta = moved
    else:
        if left <= 1e3 * accuracy and steady:
            return theta
    raise ValueError(
        f"eta is not reached: Newton's method left {float(left):.2g}; expected means of the statistics of {family!r} "
        "in the interior of what they can be (a mean of 0 or 1 of a bit is on its edge)"
    )


def halved(gain: Callable[[Tensor], Tensor], theta: Tensor, step: Tensor) -> Tensor:
    """theta + step / 2^k for every row, with the least k at which the gain does not fall."""
    before, rate = gain(theta), torch.ones(len(theta), 1, dtype=theta.dtype, device=theta.device)
    slack = 10 * torch.finfo(theta.dtype).eps * (1 + before.abs())
    for _ in range(60):
        worse = gain(theta + rate * step) < before - slack
        if not bool(worse.any()):
            break
        rate = torch.where(worse.unsqueeze(1), rate / 2, rate)
    return theta + rate * step


def symmetric(matrix: Tensor) -> Tensor:
    """(A + A^T) / 2 of the last two dimensions."""
    return (matrix + matrix.mT) / 2
