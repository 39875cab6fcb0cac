"""The Wishart family: scatter matrices of normal vectors."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from natgrad.families.event_checks import centre, check_rest, check_support, check_varies, widen
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.positive_families import log_gamma_draws
from natgrad.families.special_functions import (
    HALF_LOG_2PI,
    digamma,
    in_double,
    log_gamma,
    log_gamma_bregman,
    log_minus_digamma,
    log_ratio,
    stirling_rest,
    trigamma,
)
from natgrad.families.symmetric_matrices import (
    Pairs,
    factor_covariance,
    half_log_det,
    inverse_from,
    precision_gap,
    safe_factor,
)
from natgrad.ground.linalg import is_concrete, is_positive_definite
from natgrad.ground.messages import show_dtype, show_shape
from natgrad.ground.pure import compute_exactly
from natgrad.ground.typed_torch import Map

HALVINGS = 70
REACH = 80.0
"""log(a - (d - 1) / 2) is looked for between plus and minus this."""


@compute_exactly
class Wishart(ExponentialFamily):
    """Positive definite matrices W (d, d) with nu > d - 1 degrees of freedom and the scale V, E[W] = nu V.

    T = (log det W; W_ii; 2 W_ij for i < j, row by row), theta = ((nu - d - 1) / 2; -M_ii; -M_ij) with M = V^-1 / 2.
    p(W) = |M|^a / Gamma_d(a) |W|^(a - (d + 1) / 2) exp(-tr(M W)) with a = nu / 2. From eta to theta by one equation for
    a; the Fisher matrix and its inverse have products in O(d^3).

    Args:
        d: Size of the matrices.

    Example:
        >>> family = ng.families.Wishart(2)
        >>> theta = family.from_degrees_scale(torch.tensor(5.0), torch.eye(2))
        >>> family.expectation(theta)[1:]
        tensor([5., 5., 0.])
    """

    shown = ("d",)

    domain = "theta[..., 0] must be above -1, and the matrix of -theta[..., 1:] positive definite"

    def __init__(self, d: int) -> None:
        self.pairs = Pairs(d)
        self.d, self.size = self.pairs.d, 1 + self.pairs.size
        self._halves = torch.arange(self.d, dtype=torch.float64) / 2
        self._log_constant = self.d * (self.d - 1) / 4 * math.log(math.pi)

    def statistics(self, x: Tensor) -> Tensor:
        x = self._check_data(x)
        return torch.cat([2 * half_log_det(self._factor_data(x)).unsqueeze(-1), self.pairs.pack(x, 2.0)], dim=-1)

    def _check_data(self, x: Tensor) -> Tensor:
        """x (..., d, d) as it is. ValueError unless it is symmetric, by the digits that it has."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-2:] != (self.d, self.d):
            shape = f" of shape {show_shape(x)}" * isinstance(x, Tensor)
            raise ValueError(f"x is {show_dtype(x)}{shape}, expected floating-point matrices (..., {self.d}, {self.d})")
        slack = 1e4 * torch.finfo(x.dtype).eps * x.abs().amax((-2, -1))
        return check_support(x, (x - x.mT).abs().amax((-2, -1)) <= slack, "symmetric matrices")

    def _factor_data(self, x: Tensor) -> Tensor:
        """The Cholesky factor of x (..., d, d). ValueError unless x is positive definite."""
        return factor_covariance(x, "x has matrices that are not positive definite, as those of a Wishart family are")

    def log_partition(self, theta: Tensor) -> Tensor:
        edge, rate = self._split(self.check_shape(theta, "theta"))
        fine = self.inside(theta)
        factor, _ = safe_factor(rate)
        shapes = log_gamma(self._shift(edge)).sum(-1) + self._log_constant
        psi = shapes - 2 * self._shape(edge) * half_log_det(factor)
        return torch.where(fine, psi, torch.inf)

    def inside(self, theta: Tensor) -> Tensor:
        edge, rate = self._split(theta)
        return torch.isfinite(theta).all(-1) & (edge > 0) & is_positive_definite(rate)

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """theta_0 + 1, which is a - (d - 1) / 2 (...), and M (..., d, d)."""
        return theta[..., 0] + 1, -self.pairs.unpack(theta[..., 1:])

    def _shape(self, edge: Tensor) -> Tensor:
        """a = nu / 2 of theta_0 + 1."""
        return edge + (self.d - 1) / 2

    def _shift(self, edge: Tensor) -> Tensor:
        """a - i / 2 (..., d), i = 0, ..., d - 1, of theta_0 + 1 = a - (d - 1) / 2: the arguments of log Gamma."""
        return edge.unsqueeze(-1) + self._halves.to(edge).flip(0)

    def _factor(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """theta_0 + 1 (...) and the Cholesky factor of M (..., d, d)."""
        edge, rate = self._split(self.check(theta))
        return edge, factor_covariance(rate, self.explain_outside())

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._log_density(theta, self._check_data(x))

    @in_double
    def _log_density(self, theta: Tensor, x: Tensor) -> Tensor:
        """-a [tr(G) - d - log|G|] - (d + 1) / 2 log|W| + ..., G = M W / a: the large terms cancel by hand."""
        (edge, factor), data = self._factor(theta), self._factor_data(x)
        a = self._shape(edge)
        mean = factor_covariance(a[..., None, None] * inverse_from(factor))  # of E[W] = a M^-1
        gap = 2 * precision_gap(*torch.broadcast_tensors(mean, data))
        return self._constants(edge) - a * gap - (self.d + 1) * half_log_det(data)

    def _constants(self, edge: Tensor) -> Tensor:
        """-log Gamma_d(a) + d (a log a - a), by Stirling's formula: what is left is of order log a."""
        a, halves, shifted = self._shape(edge), self._halves.to(edge), self._shift(edge)
        turned = -a.unsqueeze(-1) * torch.log1p(-halves / a.unsqueeze(-1)) - halves
        rests = (halves + 0.5) * shifted.log() - HALF_LOG_2PI - stirling_rest(shifted)
        return (turned + rests).sum(-1) - self._log_constant

    def _mean_gap(self, edge: Tensor) -> Tensor:
        """-E[log det(M W / a)] = sum_i log a - digamma(a - i / 2) > 0, which falls in a from infinity to zero."""
        drop = -torch.log1p(-self._halves.to(edge) / self._shape(edge).unsqueeze(-1))
        return (log_minus_digamma(self._shift(edge)) + drop).sum(-1)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        edge, factor = self._factor(theta)
        a, gap = self._shape(edge), self._mean_gap(edge)
        mean_log_det = self.d * a.log() - gap - 2 * half_log_det(factor)
        return a * gap - self._constants(edge) + (self.d + 1) / 2 * mean_log_det

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """sum_i B(a' - i / 2, a - i / 2) + a [tr(M^-1 M') - d - log|M^-1 M'|] + (a - a') log|M^-1 M'|.

        B is the Bregman divergence of log Gamma.
        """
        (edge, factor), (other_edge, goal) = self._factor(theta), self._factor(other)
        start, end = (each.diagonal(dim1=-2, dim2=-1) for each in (factor, goal))
        turned = 2 * log_ratio(end, start, end - start).sum(-1)
        shapes = log_gamma_bregman(self._shift(other_edge), self._shift(edge)).sum(-1)
        return shapes + 2 * self._shape(edge) * precision_gap(factor, goal) - (other - theta)[..., 0] * turned

    def expectation(self, theta: Tensor) -> Tensor:
        edge, factor = self._factor(theta)
        mean_log_det = digamma(self._shift(edge)).sum(-1) - 2 * half_log_det(factor)
        mean = self.pairs.pack(self._shape(edge)[..., None, None] * inverse_from(factor), 2.0)
        return torch.cat([mean_log_det.unsqueeze(-1), mean], dim=-1)

    def invert(self, eta: Tensor) -> Tensor:
        """a by bisection of sum_i log a - digamma(a - i / 2) = log|E[W]| - E[log|W|]; then M = a E[W]^-1."""
        return self._invert_in_double(eta, eta.dtype)

    @in_double
    def _invert_in_double(self, eta: Tensor, dtype: torch.dtype) -> Tensor:
        mean = factor_covariance(
            self.pairs.unpack(eta[:, 1:], 2.0), "eta has a mean of x that is not positive definite"
        )
        gap = 2 * half_log_det(mean) - eta[:, 0]
        expected = "E[log det x] < log det E[x] in eta = (E[log det x], E[x]): x that do not vary have no density"
        check_rest(gap, self.d + eta[:, 0].abs(), dtype, "log det E[x] - E[log det x] is not positive", expected)
        return self._solve_shape(gap, mean)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        """From the mean of tr(A) - d - log|A|, A = E[W]^-1 W, which is log|E[W]| - E[log|W|] without cancellation."""
        mean = factor_covariance(centre(widen(x))[0])
        gap = 2 * precision_gap(*torch.broadcast_tensors(mean, self._factor_data(widen(x)))).mean(0)
        size = (mean @ mean.mT).norm(dim=(-2, -1)) * inverse_from(mean).norm(dim=(-2, -1)) / self.d
        check_varies(gap.detach().sqrt(), size.detach(), x.dtype)
        return self._solve_shape(gap, mean)

    def _solve_shape(self, gap: Tensor, mean: Tensor) -> Tensor:
        """theta (..., n) of log|E[W]| - E[log|W|] > 0 (...) and the Cholesky factor of E[W] (..., d, d)."""
        low, high = torch.full_like(gap, -REACH), torch.full_like(gap, REACH)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            above = self._mean_gap(middle.exp()) > gap
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        edge = ((low + high) / 2).exp()
        rate = self._shape(edge)[..., None, None] * inverse_from(mean)
        return torch.cat([(edge - 1).unsqueeze(-1), -self.pairs.pack(rate)], dim=-1)

    def covariance(self, theta: Tensor) -> Tensor:
        unit = torch.eye(self.size, dtype=self.check(theta).dtype, device=theta.device)
        return self._forward(theta.unsqueeze(-2), unit)

    def find_products(self, theta: Tensor) -> tuple[Map, Map]:
        return partial(self._forward, theta), partial(self._backward, theta)

    def _forward(self, theta: Tensor, tangent: Tensor) -> Tensor:
        """d eta = I_theta d theta: dE[W] = M^-1 da - a M^-1 dM M^-1, dE[log|W|] = sum trigamma da - tr(M^-1 dM)."""
        edge, factor = self._factor(theta)
        inverse, moved = inverse_from(factor), self.pairs.unpack(tangent[..., 1:])  # M^-1, -dM
        packed, first = self.pairs.pack(inverse, 2.0), tangent[..., :1]
        spread = self.pairs.pack(self._shape(edge)[..., None, None] * (inverse @ moved @ inverse), 2.0)
        log_det = trigamma(self._shift(edge)).sum(-1, keepdim=True) * first + (packed * tangent[..., 1:]).sum(-1, True)
        return torch.cat([log_det, packed * first + spread], dim=-1)

    def _backward(self, theta: Tensor, tangent: Tensor) -> Tensor:
        """d theta: -dM = (M dE M - M da) / a, da = (dE[log|W|] - tr(M dE) / a) / (sum trigamma - d / a)."""
        edge, rate = self._split(self.check(theta))
        a, moved = self._shape(edge), self.pairs.unpack(tangent[..., 1:], 2.0)
        trace = (rate * moved).sum((-2, -1))
        slope = trigamma(self._shift(edge)).sum(-1) - self.d / a
        first = (tangent[..., 0] - trace / a) / slope
        turned = (rate @ moved @ rate - first[..., None, None] * rate) / a[..., None, None]
        return torch.cat([first.unsqueeze(-1), self.pairs.pack(turned)], dim=-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """R A A^T R^T with R R^T = V and Bartlett's triangle A: chi variables on its diagonal, normal ones below.

        With nu near d - 1 some draws are singular in their dtype. They are lifted off, and their log det comes out too
        large: of d = 3 and nu = 2.2 one in twenty, in float64.
        """
        edge, factor = self._factor(theta)
        shape = (count, *theta.shape[:-1], self.d)
        chi = (0.5 * log_gamma_draws(self._shift(edge).expand(shape), generator)).exp()  # of chi^2 / 2, V = M^-1 / 2
        normal = torch.randn(*shape, self.d, generator=generator, dtype=theta.dtype, device=theta.device)
        triangle = torch.diag_embed(chi) + (0.5**0.5 * normal).tril(-1)
        root = torch.linalg.solve_triangular(factor.mT, triangle, upper=True)
        return lift_singular(root @ root.mT)

    def from_degrees_scale(self, degrees: Tensor, scale: Tensor) -> Tensor:
        """theta of degrees of freedom and a scale, shape (..., n).

        Args:
            degrees: nu above d - 1, shape (...).
            scale: V, positive definite, shape (..., d, d).
        """
        degrees = torch.as_tensor(degrees, dtype=scale.dtype, device=scale.device)
        rate = inverse_from(factor_covariance(scale, "scale is not positive definite")) / 2
        packed = -self.pairs.pack(rate)
        first = ((degrees - self.d - 1) / 2).unsqueeze(-1).expand(*packed.shape[:-1], 1)
        theta = torch.cat([first, packed], dim=-1)
        if is_concrete(theta) and not bool((degrees > self.d - 1).all()):
            raise ValueError(f"degrees is {float(degrees.min()):.4g} at least, expected above d - 1 = {self.d - 1}")
        return self.check(theta)

    def degrees_scale(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """nu (...) and V (..., d, d).

        Args:
            theta: Natural parameters, shape (..., n).
        """
        edge, factor = self._factor(theta)
        return 2 * self._shape(edge), inverse_from(factor) / 2


def lift_singular(matrix: Tensor) -> Tensor:
    """Matrices (..., d, d), symmetric; those that round-off left within d eps of a singular one are lifted off it."""
    matrix = (matrix + matrix.mT) / 2
    margin = 4 * matrix.diagonal(dim1=-2, dim2=-1).sum(-1) * matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    margin = torch.diag_embed(margin.clamp(min=torch.finfo(matrix.dtype).tiny).unsqueeze(-1).expand(matrix.shape[:-1]))
    singular = ~is_positive_definite(matrix - margin)
    return matrix + torch.where(singular[..., None, None], 2 * margin, 0.0)
