"""Exponential families: p(x) = h(x) exp(theta . T(x) - psi(theta)), and all that follows from T and psi."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.linalg import (
    all_finite,
    factor_or_nan,
    is_concrete,
    psd_root,
    require_inverse,
    solve_or_nan,
    symmetrise,
)
from natgrad.ground.messages import Explained, show_dtype
from natgrad.ground.pure import compute_exactly
from natgrad.ground.typed_torch import Map
from natgrad.operators import Closed, DenseOperator, Operator


@compute_exactly
class ExponentialFamily(Explained):
    """n natural parameters theta, statistics T(x), log-partition psi; the rest follows.

    theta and eta have shape (..., n), x (..., event): leading dimensions are batches, and gradients flow through all
    methods. eta = E[T] = grad psi are the expectation coordinates; Hess psi = Cov(T) is the Fisher matrix in theta, its
    inverse that in eta. A subclass sets `size` and writes `statistics`, `log_partition` and `draw`, `log_base` and
    `mean_log_base` where h(x) is not 1; it overrides what it knows in closed form.

    Attributes:
        size: n.
        domain: What an error message says of the theta that are inside.
        bounds: Two numbers that all of theta lies between.

    Example:
        >>> class Laplace(ng.ExponentialFamily):  # p(x) = exp(theta |x|) (-theta / 2), theta < 0
        ...     size = 1
        ...     def statistics(self, x):
        ...         return x.abs()
        ...     def log_partition(self, theta):
        ...         return (2 / -theta[..., 0]).log()
        ...     def draw(self, theta, count, generator=None):
        ...         u = torch.rand(count, *theta.shape, generator=generator) - 0.5
        ...         return u.sign() * torch.log1p(-2 * u.abs()) / theta
        >>> Laplace().fisher(torch.tensor([-2.0])).dense()
        tensor([[0.2500]])
    """

    call_hint = "; a family holds no parameters, its methods take them"
    size: int
    """n."""
    domain: str = "every finite theta is inside, so look for a NaN"
    """What `inside` asks for, in words."""
    bounds: tuple[float, float] = (-torch.inf, torch.inf)
    """Two numbers that all of theta lies between."""
    shown: tuple[str, ...] = ()
    """Arguments of the constructor that `repr` shows; those that are None are left out."""

    @abstractmethod
    def statistics(self, x: Tensor) -> Tensor:
        """T(x), shape (..., n).

        Args:
            x: Shape (..., event).
        """

    @abstractmethod
    def log_partition(self, theta: Tensor) -> Tensor:
        """psi(theta), shape (...); infinite outside of the domain.

        Args:
            theta: Natural parameters, shape (..., n).
        """

    @abstractmethod
    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws x (count, ..., event); what a subclass writes. `sample` checks theta and calls it.

        Args:
            theta: Natural parameters, shape (..., n).
            count: How many for every theta.
            generator: Source of the draws. None: the global one.
        """

    def sample(self, theta: Tensor, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws for every theta, without gradients, shape (n, ..., event).

        Args:
            theta: Natural parameters, shape (..., size).
            n: How many for every theta.
            generator: Source of the draws. None: the global one.
        """
        n = check_integer("n", n, of="the number of draws")
        with torch.no_grad():
            return self.draw(self.check(theta), n, generator)

    def inside(self, theta: Tensor) -> Tensor:
        """Whether psi(theta) is finite, shape (...). Default: for every finite theta between the `bounds`.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return ((theta > self.bounds[0]) & (theta < self.bounds[1])).all(-1)

    def log_base(self, x: Tensor) -> Tensor:
        """log h(x), shape (...). Default: zero.

        Args:
            x: Shape (..., event).
        """
        return torch.zeros_like(self.statistics(x)[..., 0])

    def mean_log_base(self, theta: Tensor) -> Tensor:
        """E[log h(x)], shape (...). Default: zero.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return theta.new_zeros(theta.shape[:-1])

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        """log p(x; theta) in nats, shape (...), constants included; batch shapes broadcast.

        Args:
            theta: Natural parameters, shape (..., n).
            x: Shape (..., event).
        """
        theta, x = self.check(theta), self.as_numbers(x, theta.dtype)
        return (theta * self.statistics(x)).sum(-1) - self.log_partition(theta) + self.log_base(x)

    def as_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers (counts, bits) in that floating dtype; what is floating-point stays as it is.

        Args:
            x: Shape (..., event).
            dtype: A floating dtype.
        """
        return x if not isinstance(x, Tensor) or x.is_floating_point() else x.to(dtype)

    def outcomes(self, theta: Tensor) -> Tensor:
        """All x that can come, where they are few, shape (S, event).

        Args:
            theta: Natural parameters, shape (..., n), which tell the size.

        Raises:
            ValueError: Where they are too many.
        """
        raise ValueError(f"{self!r} has no list of outcomes: they are infinitely many; draw with sample(theta, n)")

    def expectation(self, theta: Tensor) -> Tensor:
        """eta = E[T(x)] = grad psi(theta), shape (..., n).

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return torch.func.grad(lambda t: self.log_partition(t).sum())(self.check(theta))

    def natural(self, eta: Tensor) -> Tensor:
        """theta with E[T] = eta, shape (..., n). Default: Newton's method, which stays inside the domain.

        Args:
            eta: Expectation parameters, shape (..., n).

        Raises:
            ValueError: Where Newton's method does not arrive: eta is then on the boundary of what expectations can be,
                or beyond.
        """
        flat = self.check_finite(eta, "eta").reshape(-1, eta.shape[-1])
        if is_concrete(flat):
            return Inversion.apply(flat, self).view(eta.shape)
        # within torch.func by a few more steps, right to the seventh order: torch takes the derivative of a custom
        # `jvp` for zero where a second forward mode asks for it
        theta = Inversion.apply(flat.detach(), self)
        for _ in range(EXACT_STEPS):
            theta = theta + solve_covariance(self, theta, flat - self.expectation(theta))
        return theta.view(eta.shape)

    def invert(self, eta: Tensor) -> Tensor:
        """theta of eta, shape (b, n), without gradients: Newton's method from `guess`, unless a family knows better.

        Args:
            eta: Expectation parameters, shape (b, n).
        """
        return maximise_by_newton(self, eta, self.guess(eta))

    def guess(self, eta: Tensor) -> Tensor:
        """Where Newton's method starts, inside the domain: a new tensor (b, n). Default: zero.

        Args:
            eta: Expectation parameters, shape (b, n).
        """
        return torch.zeros_like(eta)

    def covariance(self, theta: Tensor) -> Tensor:
        """Cov(T) = Hess psi(theta) as matrices, shape (..., n, n).

        Args:
            theta: Natural parameters, shape (..., n).
        """
        theta = self.check(theta)
        if not theta.numel():
            return theta.unsqueeze(-1) * theta.unsqueeze(-2)  # an empty batch, which vmap cannot take
        flat = theta.reshape(-1, theta.shape[-1])
        with exact_derivatives():  # of a psi with a determinant inside, torch's own are wrong
            return torch.func.vmap(torch.func.hessian(self.log_partition))(flat).view(*theta.shape, theta.shape[-1])

    def fisher(self, theta: Tensor) -> Operator:
        """The Fisher matrix in the natural parameters of one distribution.

        Args:
            theta: Natural parameters, shape (n,).
        """
        return self._operator(self.check(self.single(theta, "theta")).detach().clone())

    def _operator(self, theta: Tensor) -> Operator:
        """That of one theta (n,), inside and without gradients: by products where they are known, else a matrix."""
        products = self.find_products(theta)
        if products is None:
            return DenseOperator(symmetrise(self.covariance(theta)))
        return Closed(theta, *products, origin=(self._operator, (theta,)))

    def fisher_expectation(self, eta: Tensor) -> Operator:
        """The Fisher matrix in the expectation parameters: the inverse of that in the natural ones.

        Args:
            eta: Expectation parameters, shape (n,).
        """
        theta = self.natural(self.single(eta, "eta")).detach()
        operator = self._operator(theta)
        inverse = None if isinstance(operator, DenseOperator) else operator.inverse(0.0)
        if inverse is not None:
            return inverse
        return DenseOperator(symmetrise(require_inverse(self.covariance(theta), self.explain_singular())))

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None] | None:
        """d theta -> d eta = Cov(T) d theta and its inverse, where they need no matrix. Default: None.

        Args:
            theta: Natural parameters, shape (..., n).

        Returns:
            Two functions (..., n) -> (..., n), the second one None where only the first is known.
        """
        return None

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """Cov(T) times tangents, row by row, (R, n): the family as a form on a model's outputs.

        Args:
            outputs: Natural parameters, shape (R, n).
            tangents: Shape (R, n).
        """
        products = self.find_products(outputs)
        if products is not None:
            return products[0](tangents)
        return (self.covariance(outputs) @ tangents.unsqueeze(-1)).squeeze(-1)

    def root(self, outputs: Tensor) -> Tensor:
        """F with Cov(T) = F F^T for every row, shape (R, n, n).

        Args:
            outputs: Natural parameters, shape (R, n).
        """
        return psd_root(self.covariance(outputs))

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """KL(p(.; theta), p(.; other)) in nats, shape (...): the Bregman divergence of psi.

        The default subtracts values of psi from one another, and loses the digits in which these agree; families that
        know a form without cancellation override it.

        Args:
            theta: Natural parameters, shape (..., n).
            other: Other natural parameters, shape (..., n).
        """
        theta, other = self.check(theta), self.check(other)
        slope = self.expectation(theta)
        return self.log_partition(other) - self.log_partition(theta) - (slope * (other - theta)).sum(-1)

    def bregman(self, theta: Tensor, other: Tensor) -> Tensor:
        """psi(theta) - psi(other) - grad psi(other) . (theta - other), which is KL(p(.; other), p(.; theta)).

        Args:
            theta: Natural parameters, shape (..., n).
            other: Other natural parameters, shape (..., n).
        """
        return self.kl(other, theta)

    def conjugate(self, eta: Tensor) -> Tensor:
        """phi(eta) = theta . eta - psi(theta) = -H - E[log h], the Legendre transform of psi, shape (...).

        Args:
            eta: Expectation parameters, shape (..., n).
        """
        theta = self.natural(eta)
        return -self.entropy(theta) - self.mean_log_base(theta)

    def entropy(self, theta: Tensor) -> Tensor:
        """-E[log p] = psi - theta . eta - E[log h], in nats, shape (...).

        Args:
            theta: Natural parameters, shape (..., n).
        """
        theta = self.check(theta)
        return self.log_partition(theta) - (theta * self.expectation(theta)).sum(-1) - self.mean_log_base(theta)

    def mle(self, x: Tensor) -> Tensor:
        """Maximum likelihood over the first dimension of x: the theta (..., n) whose E[T] is the mean of T.

        Args:
            x: Examples, shape (b, ..., event).

        Raises:
            ValueError: For no examples, or for those that no distribution with a density fits best, as they do not
                vary by more than their round-off.
        """
        if len(x) == 0:
            raise ValueError("x is empty, expected at least one example")
        x = self.as_numbers(x, torch.get_default_dtype())
        statistics = self.statistics(x)
        if is_concrete(statistics) and not all_finite(statistics.detach()):
            raise ValueError(f"x has entries that are not finite, or whose statistics in {self!r} are not")
        theta = self.maximise_likelihood(x, statistics).to(statistics.dtype)
        if is_concrete(theta) and not bool(self.inside(theta.detach()).all()):
            raise ValueError(
                f"x varies so little that no theta of {self!r} in {theta.dtype} stands for it: give x in float64, or "
                "more examples"
            )
        return theta

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        """theta (..., n) of the examples x (b, ..., event), in float64 where a family knows how to lose no digits.

        Args:
            x: Examples in the support, shape (b, ..., event).
            statistics: T(x), finite, shape (b, ..., n).
        """
        return self.natural(statistics.mean(0))

    def check(self, theta: Tensor) -> Tensor:
        """theta as it is. ValueError for another size, or outside the domain.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        self.check_shape(theta, "theta")
        if is_concrete(theta) and not bool(self.inside(theta.detach()).all()):
            raise ValueError(self.explain_outside())
        return theta

    def check_shape(self, value: Tensor, name: str) -> Tensor:
        """The value as it is. TypeError or ValueError unless it is a floating-point tensor (..., n).

        Args:
            value: What came.
            name: The argument's name in the error message.
        """
        size = getattr(self, "size", None)  # None: any number of parameters
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{name} is {show_dtype(value)}, expected a floating-point tensor (..., {size or 'n'})")
        if value.dim() == 0 or value.shape[-1] != (size or max(1, value.shape[-1])):
            wanted = f"(..., {size}): the parameters of {self!r}" if size else "(..., n) with n >= 1"
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {wanted}")
        return value

    def check_finite(self, value: Tensor, name: str) -> Tensor:
        """The value as it is, as `check_shape` has it. ValueError for entries that are no finite numbers.

        Args:
            value: What came.
            name: The argument's name in the error message.
        """
        if is_concrete(self.check_shape(value, name)) and not bool(torch.isfinite(value.detach()).all()):
            raise ValueError(f"{name} has entries that are not finite, expected means of the statistics of {self!r}")
        return value

    def single(self, value: Tensor, name: str) -> Tensor:
        """The value as it is. ValueError unless it is one point (n,).

        Args:
            value: What came.
            name: The argument's name in the error message.
        """
        if self.check_shape(value, name).dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected ({self.size},): an operator is that of one "
                "distribution; covariance(theta) gives the matrices of many"
            )
        return value

    def explain_outside(self) -> str:
        """What an error message says of a theta that is not inside."""
        return f"theta is outside the natural parameters of {self!r}: {self.domain}"

    def explain_singular(self) -> str:
        """What an error message says of a theta whose Fisher matrix has no inverse."""
        return (
            f"the Fisher matrix of {self!r} is singular in this dtype: expected theta off the edge of its domain, "
            "where distributions no longer differ, and statistics that do not depend on one another, as "
            "SubModel(family, free) has without some of them"
        )

    def __repr__(self) -> str:
        values = (getattr(self, name) for name in self.shown)
        words = (f"{v:g}" if isinstance(v, float) else repr(v) for v in values if v is not None)
        return f"{type(self).__name__}({', '.join(words)})"


# From expectation to natural coordinates by Newton's method, differentiable to any order

NEWTON_STEPS = 100
FLAT_HALVINGS = 3  # so near the maximum Newton's whole step is right, or round-off leaves nothing
EXACT_STEPS = 3  # k steps from a solution have its derivatives up to the order 2^k - 1


class Inversion(torch.autograd.Function):
    """eta (b, n) -> theta (b, n), the inverse of grad psi; its derivative is Cov(T)^-1 at theta."""

    @staticmethod
    def forward(eta: Tensor, family: ExponentialFamily) -> Tensor:
        """What the family finds; by default Newton's method from its guess."""
        with torch.no_grad():
            return family.invert(eta)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """theta is where the derivatives are taken."""
        ctx.family = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Cov(T)^-1 g."""
        return solve_covariance(ctx.family, ctx.saved_tensors[0], grads[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Cov(T)^-1 d eta."""
        return solve_covariance(ctx.family, ctx.saved_tensors[0], tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], eta: Tensor, family: ExponentialFamily) -> tuple[Tensor, int]:
        """One more dimension of the batch."""
        many = eta.expand(info.batch_size, *eta.shape) if in_dims[0] is None else eta.movedim(in_dims[0], 0)
        return Inversion.apply(many.flatten(0, 1), family).unflatten(0, many.shape[:2]), 0


def solve_covariance(family: ExponentialFamily, theta: Tensor, vector: Tensor) -> Tensor:
    """Cov(T)^-1 v for every row; NaN where theta is so near the edge that Cov(T) is singular."""
    return solve_or_nan(family.covariance(theta), vector.unsqueeze(-1)).squeeze(-1)


def maximise_by_newton(family: ExponentialFamily, eta: Tensor, theta: Tensor) -> Tensor:
    """theta (b, n) that maximises theta . eta - psi(theta), concave, by steps halved until it grows."""
    if not len(eta):
        return theta  # none to find, and no largest residual
    eps = torch.finfo(eta.dtype).eps
    misfit = eta.new_full((), torch.inf)
    for k in range(NEWTON_STEPS):
        residual, covariance = eta - family.expectation(theta), family.covariance(theta)
        misfit = (residual.abs() / (1 + eta.abs())).amax()
        factor = factor_or_nan(covariance)
        both = torch.stack([residual, 30 * eps * eta.abs()], dim=2)
        step, doubt = torch.cholesky_solve(both, factor).unbind(2)
        if not all_finite(step):
            if k == 0:
                raise ValueError(family.explain_singular())
            break
        # on the edge the residual vanishes too, but theta runs off in steps of about one, or round-off decides on it
        width = 1 + theta.abs()
        steady = bool(((step.abs() <= 1e-3 * width) & (doubt.abs() <= 0.1 * width)).all())
        if steady and misfit <= 30 * eps:
            return theta
        moved = search_line(family, eta, theta, step, (residual * step).sum(1), factor)
        if torch.equal(moved, theta):
            # theta rounded in its last digits moves the expectation by Cov(T) |theta| eps: no step gets below that
            rounded = (covariance.abs() @ theta.abs().unsqueeze(2)).squeeze(2)
            if steady and bool((residual.abs() <= 1e3 * eps * (30 * (1 + eta.abs()) + rounded)).all()):
                return theta
            break
        theta = moved
    else:
        if misfit <= 3e4 * eps and steady:
            return theta
    raise ValueError(
        f"eta is not reached: Newton's method left {float(misfit):.2g}; expected means of the statistics of {family!r} "
        "in the interior of what they can be (a mean of 0 or 1 of a bit is on its edge)"
    )


def search_line(
    family: ExponentialFamily, eta: Tensor, theta: Tensor, step: Tensor, size: Tensor, factor: Tensor
) -> Tensor:
    """theta + step / 2^k for every row, with the least k that is better; size: r^T Cov(T)^-1 r at theta, (b,)."""

    def gain(at: Tensor) -> Tensor:
        return ((at * eta).sum(1) - family.log_partition(at)).nan_to_num(nan=-torch.inf)

    # better is a gain that does not fall; near the maximum, where it is flat to round-off, a smaller r^T Cov(T)^-1 r
    terms = (theta * eta).abs().sum(1) + family.log_partition(theta).abs()
    noise = 10 * torch.finfo(theta.dtype).eps * (1 + terms)
    before, flat = gain(theta), size <= noise
    rate = torch.ones(len(theta), 1, dtype=theta.dtype, device=theta.device)
    for k in range(60):
        trial = theta + rate * step
        inside = family.inside(trial)
        trial = torch.where(inside.unsqueeze(1), trial, theta)
        worse = ~inside | (gain(trial) < before - noise)
        if bool(flat.any()):
            residual = (eta - family.expectation(trial)).unsqueeze(2)
            after = (residual * torch.cholesky_solve(residual, factor)).sum((1, 2))
            worse = torch.where(flat, ~inside | ~(after <= (1 - rate[:, 0] / 2) * size), worse)
        stuck = worse & flat & (k >= FLAT_HALVINGS)
        if not bool((worse & ~stuck).any()):
            break
        rate = torch.where(worse.unsqueeze(1), rate / 2, rate)
    return torch.where(worse.unsqueeze(1), theta, trial)
